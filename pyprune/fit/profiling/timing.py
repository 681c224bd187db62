"""Time the probes of a profile in turns with the dense model, and matrix products of several widths."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from typing_extensions import override

from pyprune.checkpoint.load import ModelSource, Reading
from pyprune.config.base import Config, option
from pyprune.data.stream import position_limit
from pyprune.errors import BudgetError, ConfigError, PlanError, UnsupportedModelError, did_you_mean
from pyprune.families import family_for
from pyprune.fit.choices import Routers
from pyprune.fit.formats import WEIGHT_FORMATS
from pyprune.fit.profile import DENSE, Probe, Product, Profile, Timing, accelerators, installed_versions, this_machine
from pyprune.fit.profiling.probes import Model, dense_config, probe_plans, write_served
from pyprune.fit.profiling.turns import EngineGroup, cache_bytes, longest_sequence, room_for, visible, written_bytes
from pyprune.fit.quantities import Quantity
from pyprune.fit.sizes import MULTIPLES
from pyprune.plan import PrunePlan
from pyprune.runtime.device import resolve_device
from pyprune.runtime.progress import say
from pyprune.serving.comparison import DTYPES, seed_problems
from pyprune.serving.engines import GGUF_FORMAT, EngineName, choose_engine
from pyprune.serving.gguf.blocks import FORMATS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DEFAULT_PREFILL = (512, 2048)
DEFAULT_GENERATION = ((64, 128), (1, 128), (4, 64, 1024))
PRODUCT_ROWS = 2048
PRODUCT_REPEATS = 9


@dataclass(frozen=True)
class ProfileOptions(Config):
    """The workloads, engine and turns of a profile.

    Attributes:
        engine: auto (vLLM if installed, else Transformers), vllm, transformers or llamacpp.
        dtype: of weights and activations; for llamacpp a format of GGUF files. None = bfloat16, q8_0 for llamacpp.
        device: auto, cpu or cuda.
        repeats: timed turns of each probe and workload, after a warm-up; three times as many if they are short.
        prefill: prompt lengths in tokens; None = those of :data:`DEFAULT_PREFILL` that the model reads.
        generation: (sequences at a time, new tokens of each), and the tokens of each prompt if prompts are long; None =
            those of :data:`DEFAULT_GENERATION` that it reads.
        probes: most probes in addition to the dense model; None = all.
        seed: of the random prompts.
        resident: engines loaded at once, the dense model's among them; None = as many as the free memory holds.
    """

    engine: str = "auto"
    dtype: str | None = None
    device: str = "auto"
    repeats: int = option(3, at_least=1)
    prefill: tuple[int, ...] | None = None
    generation: tuple[tuple[int, ...], ...] | None = None
    probes: int | None = None
    seed: int = 0
    resident: int | None = option(None, at_least=1)

    @property
    def quantities(self) -> list[Quantity]:
        """The workloads, each once."""
        prompts = DEFAULT_PREFILL if self.prefill is None else self.prefill
        batches = DEFAULT_GENERATION if self.generation is None else self.generation
        generations = [Quantity("generation", tokens, batch, *prompt) for batch, tokens, *prompt in batches]
        return list(dict.fromkeys([*(Quantity("prefill", tokens) for tokens in prompts), *generations]))

    def within(self, limit: float | None) -> ProfileOptions:
        """Replace the default workloads by those that a model reads, perhaps none.

        Args:
            limit: positions of the model; None = no limit.
        """
        fits = [q for q in self.quantities if limit is None or longest_sequence(q) <= limit]
        prompts = tuple(q.tokens for q in fits if q.kind == "prefill")
        batches = tuple((q.batch, q.tokens, q.prompt) for q in fits if q.kind == "generation")
        return replace(
            self,
            prefill=prompts if self.prefill is None else self.prefill,
            generation=batches if self.generation is None else self.generation,
        )

    @override
    def problems(self) -> Iterator[str]:
        yield from seed_problems(self.seed)
        if self.probes is not None and self.probes < 2:
            yield f"probes is {self.probes}; a fit needs at least 2 in addition to the dense model."
        if not self.quantities:
            yield "Neither prefill nor generation is to be measured; name at least one length or batch."
        for quantity in self.quantities:
            if quantity.tokens < 1 or quantity.batch < 1:
                yield f"{quantity} is no workload; lengths and batches must be at least 1."
        if self.device not in ("auto", "cpu") and not self.device.startswith("cuda"):
            yield f"device is {self.device!r}; use auto, cpu or cuda."


def take_profile(
    model: str | Path | ModelSource, options: ProfileOptions | None = None, **reading: Unpack[Reading]
) -> Profile:
    """Measure the times of models of a model's family and sizes on this machine.

    Args:
        model: folder with config.json or hub id of a dense model; weights are not read (llamacpp needs its tokenizer).
        options: see :class:`ProfileOptions`.
        reading: ``gguf_file``, ``revision`` and ``trust_remote_code`` (:class:`pyprune.checkpoint.load.ModelSource`).

    Raises:
        ConfigError: invalid options, a missing device, or a workload beyond the model's context.
        CheckpointError, UnsupportedModelError: the model cannot be read, or its family is unknown.
        MissingDependencyError: the engine is not installed.
        EngineError: an engine failed; its last log lines are in the message.
        BudgetError: fewer than two probes can be run.
    """
    o = options or ProfileOptions()
    o.validate()
    resolve_device(o.device)
    engine, note = choose_engine(o.engine)
    if note:
        say(note, "yellow")
    dtype = _dtype(o.dtype, engine)
    source = ModelSource.of(model, **reading)
    config = dense_config(source)
    o = o.within(position_limit(config))
    o.validate()  # a model may read none of the default lengths
    _check_lengths(config, o.quantities)
    tokenizer = source.tokenizer() if engine == "llamacpp" else None
    run = _Run(o, engine, dtype, config, tokenizer=tokenizer)
    with visible(o.device), tempfile.TemporaryDirectory(prefix="pyprune-profile-") as work:
        run.take(Path(work))
    # The engine's device: an engine that was built only for the CPU does not use an accelerator.
    place = resolve_device(o.device) if run.device in accelerators() else torch.device("cpu")
    try:
        run.products = time_products(config, dtype, place)
    except RuntimeError as error:  # such as a GPU that is full by now: keep the turns, which took hours
        run.notes.append(f"products of several widths were not timed ({error}), so that the default multiples are used")
    return run.profile([note] if note else [])


def default_dtype(engine: str) -> str:
    """Return the default dtype of an engine: llama.cpp's default format, bfloat16 for the others."""
    return GGUF_FORMAT if engine == "llamacpp" else "bfloat16"


def _dtype(dtype: str | None, engine: str) -> str:
    allowed: Sequence[str] = FORMATS if engine == "llamacpp" else DTYPES
    chosen = dtype or default_dtype(engine)
    if chosen not in allowed and chosen in WEIGHT_FORMATS:
        raise ConfigError(
            f"Times of {chosen} weights in {engine} are not measured; those of {', '.join(allowed)} are. Give one of "
            f"these, {'--engine llamacpp, ' if chosen in FORMATS else ''}or limit only memory and parameters, which "
            "are counted in every format."
        )
    if chosen not in allowed:
        raise ConfigError(did_you_mean(chosen, allowed, f"dtype of the engine {engine}"))
    return chosen


def _check_lengths(config: PretrainedConfig, quantities: Sequence[Quantity]) -> None:
    limit = position_limit(config)
    longest = max(longest_sequence(quantity) for quantity in quantities)
    if limit is not None and longest > limit:
        raise ConfigError(
            f"The model reads at most {limit} tokens, and the workloads need {longest}; name shorter ones with "
            "--prefill and --generation."
        )


@dataclass
class _Run:
    """The state of one measurement."""

    options: ProfileOptions
    engine: EngineName
    dtype: str
    config: PretrainedConfig
    probes: list[Probe] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    folders: dict[str, Path] = field(default_factory=dict)
    tokenizer: Any = None
    device: str | None = None

    def take(self, work: Path) -> None:
        """Take every sample, group by group; the dense model remains loaded if there is room for two engines."""
        o, identity = self.options, family_for(self.config).plan(self.config)
        plans = probe_plans(identity, self.dtype, Routers.of(self.config, identity.dense))
        dense = self._write(DENSE, plans.pop(DENSE), work)
        if dense is None:
            raise BudgetError(f"The dense model cannot be run with {self.engine}: {'; '.join(self.notes)}.")
        self.probes.append(Probe.of(DENSE, identity))
        queue = list(plans)[: o.probes]
        cache = cache_bytes(dense[1], o.quantities, self.dtype)
        room = o.resident or room_for(self.engine, written_bytes(work), cache)
        with EngineGroup(self.engine, self.dtype, o.quantities, int(self.config.vocab_size), o.seed) as engines:

            def write(name: str) -> Model | None:
                return self._write(name, plans[name], work)

            for names, turns in engines.time_groups(dense, queue, write, room=room, repeats=o.repeats):
                self.timings += turns
                self.probes += [Probe.of(name, plans[name]) for name in names]
                for name in names:
                    shutil.rmtree(self.folders[name])
            self.device = engines.device
        if len(self.probes) < 3:
            raise BudgetError(
                f"Only {len(self.probes) - 1} probes could be run, at least 2 are needed: {'; '.join(self.notes)}."
            )

    def _write(self, name: str, plan: PrunePlan, work: Path) -> Model | None:
        """Write a probe; note the reason and return None if the engine cannot run it."""
        folder = work / name.replace(" ", "-")
        try:
            model = write_served(self.config, plan, folder, self.engine, self.dtype, self.tokenizer)
        except (PlanError, UnsupportedModelError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            self.notes.append(f"{name} was left out: {error}")
            return None
        self.folders[name] = folder
        return model

    def profile(self, notes: Sequence[str]) -> Profile:
        """Make the profile of the measurements and their conditions."""
        return Profile(
            engine=self.engine,
            dtype=self.dtype,
            machine=this_machine(self.device),
            versions=installed_versions(self.engine),
            model_type=str(self.config.model_type),
            dense=family_for(self.config).sizes(self.config),
            config=json.loads(json.dumps(self.config.to_dict(), default=str)),
            probes=tuple(self.probes),
            timings=tuple(self.timings),
            products=tuple(self.products),
            notes=(*notes, *self.notes),
            made=datetime.now(UTC).isoformat(timespec="seconds"),
        )


def time_products(config: PretrainedConfig, dtype: str, place: torch.device) -> list[Product]:
    """Time the products of an MLP (up to a width and down again) at widths of several multiples, turn by turn.

    The widths are just above two values, so that they have different divisors but nearly the same size. There are 2,048
    rows, as in a prompt of that many tokens; torch computes them in the dtype (float32 for formats of llama.cpp alone).

    Args:
        config: of the dense model.
        dtype: of the profile.
        place: the device that computes them.
    """
    sizes = family_for(config).sizes(config)
    kind = getattr(torch, dtype) if dtype in DTYPES else torch.float32
    base = max(128, *(int(share * sizes.ffn_sizes[-1]) // 128 * 128 for share in (1 / 2, 3 / 4)))
    bases = sorted({max(128, base * 2 // 3 // 128 * 128), base})
    generator = torch.Generator().manual_seed(0)
    widths = [(multiple, start + multiple) for start in bases for multiple in MULTIPLES]

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).to(place, kind)

    rows = random(PRODUCT_ROWS, sizes.hidden_size)
    pairs = {w: (random(w, sizes.hidden_size), random(sizes.hidden_size, w)) for _, w in widths}
    products: list[Product] = []
    with torch.inference_mode():
        for repeat in range(-1, PRODUCT_REPEATS):
            for multiple, width in widths:
                up, down = pairs[width]
                start = time.perf_counter()
                result = torch.nn.functional.linear(torch.nn.functional.linear(rows, up), down)
                if place.type == "cuda":
                    torch.cuda.synchronize(place)
                del result
                if repeat >= 0:
                    products.append(Product(multiple, width, time.perf_counter() - start))
    return products
