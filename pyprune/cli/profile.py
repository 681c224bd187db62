"""Measure and predict the cost of models on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pyprune.cli.base import comma_separated, guard, output, refuse_unread
from pyprune.errors import ConfigError, shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PretrainedConfig

    from pyprune.fit.measured import MeasuredCosts
    from pyprune.fit.profile import Profile
    from pyprune.plan import PrunePlan
    from pyprune.runtime.report import Cell, Table

T = TypeVar("T")
LARGEST = 10_000_000
FACTS_OF_FIT = ("residual", "left_out_median", "left_out_worst", "left_out", "seconds", "spread", "coefficients")
"""Attributes of a fit to a workload that --json has."""


@guard
def profile(
    model: str,
    *,
    out: Path | None = None,
    engine: str = "auto",
    dtype: str | None = None,
    device: str = "auto",
    repeats: int = 3,
    prefill: str | None = None,
    generation: str | None = None,
    probes: int | None = None,
    resident: int | None = None,
    seed: int = 0,
    json_file: str | None = None,
    debug: bool = False,
) -> None:
    """Measure how the time of models like MODEL depends on attention, FFN, layers and hidden size on this machine.

    About a dozen small checkpoints with random weights are timed in turns with the dense model (speed depends only on
    shapes) and deleted. `pyprune predict` and `pyprune fit` read the file.

    Example: pyprune profile HuggingFaceTB/SmolLM2-135M --engine vllm --out profile.json

    Args:
        model (MODEL): Folder with config.json or hub id of the dense model.
        out (FILE): File to write. Default: a file in the user's cache folder, found by name.
        engine: auto (vLLM if installed, else Transformers), vllm, transformers or llamacpp.
        dtype: bfloat16, float16 or float32; with llamacpp a format of GGUF files. Default: bfloat16, q8_0.
        device: auto (an accelerator if there is one), cpu or cuda.
        repeats: Timed turns of each probe and workload, after a warm-up.
        prefill (N,N): Prompt lengths in tokens, or none. Default: 512,2048, or those that MODEL reads.
        generation (BxN,BxN+P): Sequences at a time x new tokens of each, + the tokens of each prompt if prompts are
            long; or none. Default: 64x128,1x128,4x64+1024, or those that MODEL reads.
        probes: Most probes in addition to the dense model. Default: all, about a dozen.
        resident: Engines loaded at once, the dense model's among them. Default: as many as fit in memory.
        seed: Seed of the random prompts.
    """
    from pyprune.fit.measured import MeasuredCosts
    from pyprune.fit.profile import accelerators, check_stored, stored_as
    from pyprune.fit.profiling.timing import ProfileOptions, take_profile
    from pyprune.runtime.figures import check_figures

    options = ProfileOptions(
        engine=engine,
        dtype=dtype,
        device=device,
        repeats=repeats,
        prefill=None if prefill is None else _workloads(prefill, _count),
        generation=None if generation is None else _workloads(generation, _with_prompt),
        probes=probes,
        seed=seed,
        resident=resident,
    )
    if out is not None:
        check_figures(out, model, option="--out", ours=lambda data: "probes" in data)  # an earlier profile
    elif device == "cpu" and engine != "llamacpp" and (names := accelerators()):
        raise ConfigError(
            f"--device is cpu, and profiles are kept by name for the device that engines choose, {names[0]} here; name "
            "a file with --out, and give it to fit and predict with --profile."
        )
    else:
        check_stored()
    taken = take_profile(model, options)
    path = taken.save(stored_as(taken.name) if out is None else out)
    costs = MeasuredCosts(taken)
    where = f"Stored as {taken.name} ({path})." if out is None else f"Wrote {path}."
    notes = [f"Note: {note}." for note in taken.notes]
    tables = fit_table(costs), probes_table(costs)
    output({"profile": str(path), "name": taken.name, **summary(costs)}, json_file, *tables, *notes, where)


@guard
def predict(
    target: str | None = None,
    *,
    profile: str,
    weights: str | None = None,
    context: str | None = None,
    allow_mismatch: bool = False,
    json_file: str | None = None,
    debug: bool = False,
) -> None:
    """Predict the cost of a plan or checkpoint: prefill, time to first token, tokens/s, weights and key/value cache.

    Example: pyprune predict pruned/ --profile profile.json --weights bfloat16,q8_0

    Args:
        profile (NAME): Profile of the dense model: its name, or the path of its file.
        target ([PLAN]): Plan (JSON), or checkpoint folder: one of pyprune's, or the dense model's. Default: print the
            measurements of the profile.
        weights: Formats in which memory is counted: float32, bfloat16, float16, w8a8-int8, w8a16, w4a16, fp8, or a GGUF
            format. Default: the profile's dtype.
        context (N or BxN): Contexts of the key/value cache. Default: 2048.
    """
    from pyprune.fit.measured import MeasuredCosts
    from pyprune.fit.profile import Profile

    contexts = "2048" if context is None else context
    batch, tokens = _batch(contexts) if "x" in contexts else (1, _count(contexts, contexts))
    stored = Profile.load(profile)
    if target is None:
        refuse_unread("PLAN", {"--allow-mismatch": allow_mismatch})
        if weights is not None or context is not None:
            raise ConfigError(
                "--weights and --context need a PLAN, whose memory is counted: name a plan or a checkpoint, or leave "
                "them out."
            )
        costs = MeasuredCosts(stored)
        output({"name": stored.name, **summary(costs)}, json_file, fit_table(costs), probes_table(costs))
        return
    plan = plan_of(target)
    stored.check(plan, allow=allow_mismatch)
    formats = (stored.dtype,) if weights is None else comma_separated(weights)
    if not formats:
        raise ConfigError(f"--weights is {shown(weights or '')}, which names no format; name one, such as bfloat16.")
    rows = _predictions(plan, MeasuredCosts(stored), _config(stored), formats, (batch, tokens))
    data = {"plan": plan.to_dict(), "profile": stored.name, "predicted": dict(rows)}
    output(data, json_file, _prediction_table(plan, rows))


def _workloads(text: str, read: Callable[[str, str], T]) -> tuple[T, ...]:
    """Read each part of "512,2048"; nothing for "none"."""
    return () if text.strip() == "none" else tuple(read(part, text) for part in comma_separated(text) or [text])


def _with_prompt(part: str, text: str) -> tuple[int, ...]:
    """Return (sequences, tokens) of "64x128", and also the prompts' length of "4x64+1024"."""
    batch, sign, prompt = part.partition("+")
    return (*_batch(batch), *([_count(prompt, text)] if sign else []))


def _batch(text: str) -> tuple[int, int]:
    batch, sign, tokens = text.partition("x")
    if not sign:
        raise ConfigError(f"{shown(text)} is not of the form BxN (sequences at a time x tokens of each), like 64x128.")
    return _count(batch, text), _count(tokens, text)


def _count(part: str, text: str) -> int:
    if not (part.isascii() and part.isdecimal() and len(part) < 9 and 1 <= int(part) <= LARGEST):
        raise ConfigError(f"{shown(part)} in {shown(text)} is not a whole number from 1 to {LARGEST:,}.")
    return int(part)


def summary(costs: MeasuredCosts) -> dict[str, Any]:
    """Return the errors of the profile's fit, and the multiples that its products suggest, as plain data."""
    from dataclasses import asdict

    from pyprune.fit.sizes import SizeRules, column_times

    fits = {
        str(quantity): {
            "dense_seconds": fit.seconds["dense"],
            **{name: getattr(fit, name) for name in FACTS_OF_FIT},
        }
        for quantity, fit in costs.fits.items()
    }
    times = {str(multiple): seconds for multiple, seconds in column_times(costs.profile.products).items()}
    return {"fits": fits, "sizes": asdict(SizeRules.learn(costs.profile)), "seconds_per_column": times}


def fit_table(costs: MeasuredCosts) -> Table:
    """Make a row for each workload: the dense model's time, and the errors of predicting left-out probes."""
    from pyprune.fit.sizes import SizeRules
    from pyprune.runtime.report import Table

    rows: list[tuple[Cell, ...]] = []
    for quantity, fit in costs.fits.items():
        worst, error = fit.left_out_worst
        shares = (max(fit.spread.values()), fit.residual, fit.left_out_median)
        percent = (f"{share:.1%}" for share in shares)
        rows.append((str(quantity), fit.seconds["dense"], len(fit.seconds), *percent, f"{error:+.1%} ({worst})"))
    profile = costs.profile
    rules = SizeRules.learn(profile)
    columns = ("workload", "dense (s)", "models", "largest spread", "fit", "left out: median", "left out: worst")
    note = f"{profile.machine['device']}, {profile.engine}, {profile.dtype}. Good FFN widths: {rules.ffn_multiple}s."
    return Table(f"Profile {profile.name}", columns, tuple(rows), note)


def probes_table(costs: MeasuredCosts) -> Table:
    """Make a row for each probe: its name, and its speed as a multiple of the dense model's."""
    from pyprune.runtime.report import Table

    rows: list[tuple[Cell, ...]] = []
    for probe in costs.profile.probes[1:]:
        seconds = [(fit.seconds["dense"], fit.seconds.get(probe.name)) for fit in costs.fits.values()]
        faster = (None if own is None else f"{dense / own:.2f}" for dense, own in seconds)
        rows.append((probe.name, *faster))
    columns = ("models with", *map(str, costs.fits))
    return Table("Times as fast as the dense model", columns, tuple(rows))


def plan_of(target: str) -> PrunePlan:
    """Read the plan in a file or checkpoint; a folder without a record is taken for the dense model.

    Args:
        target: a plan's JSON file or a checkpoint folder.

    Raises:
        PlanError, CheckpointError: it cannot be read.
    """
    import os

    from pyprune.checkpoint.record import read_record
    from pyprune.errors import PlanError
    from pyprune.families import family_for
    from pyprune.fit.profiling.probes import dense_config
    from pyprune.plan import PrunePlan
    from pyprune.runtime.files import read_bounded

    if os.path.isfile(target):
        try:
            return PrunePlan.from_json(read_bounded(target))
        except (OSError, ValueError) as error:
            raise PlanError(f"The plan {target} cannot be read: {error}. Give a plan or a checkpoint.") from error
    record = read_record(target)
    if record is not None and record.plan is not None:
        return record.plan
    config = dense_config(target)
    return family_for(config).plan(config)


def _config(profile: Profile) -> PretrainedConfig:
    """Restore the dense model's configuration from the profile."""
    from transformers import AutoConfig

    values = {name: value for name, value in profile.config.items() if name != "model_type"}
    return AutoConfig.for_model(profile.model_type, **values)


def _predictions(
    plan: PrunePlan,
    measured: MeasuredCosts,
    config: PretrainedConfig,
    formats: tuple[str, ...],
    context: tuple[int, int],
) -> list[tuple[str, dict[str, float]]]:
    """Predict every quantity as (name with unit, {dense, plan})."""
    from pyprune.fit.cost import ExactCosts
    from pyprune.fit.quantities import Quantity
    from pyprune.plan import PrunePlan

    dense = PrunePlan.identity(plan.model_type, plan.dense)
    rows: list[tuple[str, dict[str, float]]] = []
    for quantity in measured.fits:
        both = {"dense": measured.predict(quantity, dense), "plan": measured.predict(quantity, plan)}
        if quantity.kind == "prefill":
            rows.append((f"{quantity}, time to first token (ms)", {k: 1000 * v for k, v in both.items()}))
        else:
            tokens = quantity.batch * quantity.tokens
            rows.append((f"{quantity} (tokens/s)", {k: tokens / v for k, v in both.items()}))
    batch, tokens = context
    plans, cache = {"dense": dense, "plan": plan}, Quantity("memory", tokens, batch)
    for number, name in enumerate(formats):
        # In w4a16 the groups of scales follow from the widths of each plan.
        costs = {who: ExactCosts.of(config, name, plan=each) for who, each in plans.items()}
        counted = [] if number else [("parameters", Quantity("parameters"), 1.0)]
        counted.append((f"weights in {name} (MB)", Quantity("memory", 0), 1e6))
        counted.append((f"weights in {name} + {cache} (MB)", cache, 1e6))
        for label, quantity, unit in counted:
            rows.append((label, {who: costs[who].predict(quantity, plans[who]) / unit for who in plans}))
            if quantity.kind == "parameters" and measured.chosen:
                active = {who: float(costs[who].active(plans[who], measured.chosen)) for who in plans}
                rows.append(("parameters that a token reads", active))
    return rows


def _prediction_table(plan: PrunePlan, rows: list[tuple[str, dict[str, float]]]) -> Table:
    from pyprune.runtime.report import Table

    cells: list[tuple[Cell, ...]] = [
        (name, *(_cell(name, row[who]) for who in ("dense", "plan")), f"{row['plan'] / row['dense']:.2f}x")
        for name, row in rows
    ]
    return Table("Predicted", ("", "dense", "plan", "plan / dense"), tuple(cells), plan.summary())


def _cell(name: str, value: float) -> Cell:
    return int(value) if name.startswith("parameters") else float(value)
