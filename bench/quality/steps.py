"""Steps that take the dense model to each case of a grid: trainings, cuts and reconstructions, and their costs.

A path is a sequence of steps, each a verb with arguments: ("reconstruct mixture", "finetune prose"). Paths that begin
alike share their first steps.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench._settings import Settings, shared_training
from bench._texts import PASSAGE, evaluation_texts, load_dense, served_perplexities, untie_, write_demo_mixture
from bench.quality.grid import Bench, Case, count_removed, find_plan, keep_plan, text_identity
from pyprune.runtime.progress import say
from pyprune.runtime.records import Json, RecordFile, digest

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from pyprune.config.train import TrainConfig
    from pyprune.data.tokens import Batch
    from pyprune.plan import PrunePlan

Steps = tuple[str, ...]
PROTOCOL = "ppl-2048"
LENGTH = 256
"""Tokens of a training sequence."""
DRAWS = {"web-short": ("web", 16, 512), "web-scores": ("web", 10, 128)}
"""Text -> (kind, sequences, tokens of each); other texts are as many tokens as are trained on."""


@dataclass(frozen=True)
class Cut:
    """The parts that a case removes.

    Attributes:
        label: in the table.
        layers: removed without a decision.
        preset: decides what is removed where no layers are named.
        options: of the preset.
        text: that it is decided on.
        part: sequences and tokens of each that are read of this text; None = all.
        regulariser: method that trains before the cut; empty = none.
    """

    label: str
    layers: Sequence[int] = ()
    preset: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    text: str = "mixture"
    part: tuple[int, int] | None = None
    regulariser: str = ""


@dataclass
class State:
    """A model on a path.

    Attributes:
        model: after the last step.
        plan: of the cut; None = nothing is removed.
        dense: the model that the cut is compared with: teacher, and first of the two passes of a reconstruction.
        cut: of the case; None = a control.
        seed: of the texts and the order of training.
        before: the state before the last step.
        figures: costs of the steps, added up, and what else they report.
    """

    model: PreTrainedModel
    plan: PrunePlan | None
    dense: PreTrainedModel
    cut: Cut | None
    seed: int
    before: State | None = None
    figures: Json = field(default_factory=dict)


class PathBench(Bench):
    """The dense model, its texts, and the states of the current path; the next path drops those that it does not share.

    Args:
        options: of the command line.
        records: of this run and the earlier ones; plans are kept there.
        work: folder for the split documents.
        cuts: name of a case -> what it removes.
        arms: name of a case, empty for the controls -> fields and path of each of its rows.
        tests: texts to measure; empty = all that exist.
        home_tokens: of the prose that is measured; 0 = as of the other texts.
        passage: see :func:`bench._texts.write_demo_mixture`.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        records: RecordFile,
        work: Path,
        *,
        cuts: Mapping[str, Cut],
        arms: Callable[[str], Sequence[tuple[Json, Steps]]],
        tests: Sequence[str] = (),
        home_tokens: int = 0,
        passage: int = PASSAGE,
    ) -> None:
        from pyprune.runtime.device import DTYPES

        self.options, self.records, self.cuts, self.arms = options, records, cuts, arms
        dtype = getattr(options, "working_dtype", options.dtype)
        steps = getattr(options, "steps", None) or Settings.full().steps
        self.settings = replace(Settings.full(), dtype=options.dtype, compute_dtype=dtype, steps=steps)
        self.name, self.dense, self.tokenizer = load_dense(options.model)
        if hasattr(options, "working_dtype"):
            self.dense.to(DTYPES[dtype])
        self.mixture = write_demo_mixture(work, passage=passage)
        found = evaluation_texts(self.tokenizer, self.mixture.tests, options.data)
        self.tests = {name: text for name, text in found.items() if not tests or name in tests}
        self.limits = dict.fromkeys(self.tests, options.tokens) | ({"prose": home_tokens} if home_tokens else {})
        self.setting: Json = {
            "model": self.name,
            "dtype": options.dtype,
            "texts": {name: text_identity(self.limits[name], text.text_sha256) for name, text in self.tests.items()},
        }
        self._drawn: dict[tuple[str, int], Batch] = {}
        self._states: dict[tuple[str, int, Steps], State] = {}

    def cases(self) -> list[Case]:
        """Return the controls of each seed, then its cases, arms with common steps next to each other."""
        cases = []
        for seed in self.options.seeds:
            for name in ("", *getattr(self.options, "case", self.cuts)):
                for fields, path in sorted(self.arms(name), key=lambda arm: arm[1]):
                    drawn = seed if path else None
                    cases.append(Case({"case": name, **fields, "seed": drawn}, task=path))
        return cases

    def measure(self, case: Case) -> Json:
        """Go a case's path and measure its model."""
        from pyprune.families import count_parameters

        name, seed = case.fields["case"], case.fields["seed"] or 0
        state = self._reach(name, seed, case.task)
        return {
            "perplexity": self.perplexity(state.model),
            "parameters": count_parameters(state.model),
            **({"removed": count_removed(state.plan)} if state.plan else {}),
            **state.figures,
        }

    def perplexity(self, model: PreTrainedModel) -> Json:
        """Return protocol -> text -> perplexity of the weights in the measured dtype."""
        results = served_perplexities(model, self.tokenizer, self.tests, self.limits, dtype=self.options.dtype)
        return {PROTOCOL: {name: round(result.perplexity, 3) for name, result in results.items()}}

    def samples(self, text: str, seed: int) -> Batch:
        """Draw a text, once for each seed; no token of it is a test token."""
        from pyprune.config.data import DataConfig
        from pyprune.data.sampling import sample_sequences
        from pyprune.families import begins_with_bos

        if (text, seed) not in self._drawn:
            usual = text, self.settings.steps * self.settings.batch_size, LENGTH
            kind, count, length = DRAWS.get(text, usual)
            source = next((part.source for part in self.mixture.parts if part.label == kind), "")
            wanted = DataConfig(source=source, samples=count, sequence_length=length, seed=seed)
            if kind == "mixture":
                wanted = self.mixture.data(count, length, seed)
            spans = [test.spans for test in self.tests.values()]
            bos = begins_with_bos(self.dense.config)
            self._drawn[text, seed] = sample_sequences(self.tokenizer, wanted, exclude=spans, bos=bos)
        return self._drawn[text, seed]

    def plan(self, name: str) -> PrunePlan:
        """Return what a case keeps; it is decided once, on text of seed 0, and recorded."""
        from pyprune.families import family_for

        cut = self.cuts[name]
        if cut.layers:
            return family_for(self.dense).plan(self.dense.config).drop_layers(cut.layers)
        key = digest([name, self.name])[:16]
        return find_plan(self.records, key) or keep_plan(self.records, key, self._decide(name, cut))

    def _decide(self, name: str, cut: Cut) -> PrunePlan:
        from pyprune import make_plan
        from pyprune.run.recipe import build_config

        say(f"{name}: deciding")
        text: Any = self.samples(cut.text, 0)
        if cut.part:
            text = text.ids[: cut.part[0], : cut.part[1]]
        return make_plan(self.dense, text, build_config(preset=cut.preset, options=cut.options))

    def _reach(self, name: str, seed: int, path: Steps) -> State:
        """Go a path from the last common state; training of the dense model is shared by all cases of a seed."""

        def place(length: int) -> tuple[str, int, Steps]:
            return ("" if path[:length] == ("finetune prose",) else name), seed, path[:length]

        shared = {place(length) for length in range(len(path) + 1)} | {("", seed, ("finetune prose",))}
        self._states = {at: state for at, state in self._states.items() if at in shared}
        cut = self.cuts.get(name)
        plan = self.plan(name) if cut and (cut.preset or cut.layers) else None
        state = State(self.dense, plan, self.dense, cut, seed)
        for length in range(1, len(path) + 1):
            at = place(length)
            if at not in self._states:
                say(f"{name or 'dense'}, seed {seed}: {', '.join(path[:length])}")
                self._states[at] = self._take(path[length - 1], state)
            state = replace(self._states[at], plan=self._states[at].plan or plan, cut=cut)
        return state

    def _take(self, step: str, before: State) -> State:
        """Take one step on a copy of the model; add its costs up."""
        verb, *words = step.split()
        state = replace(before, model=copy.deepcopy(before.model), before=before, figures=dict(before.figures))
        cost: Json = {}
        with _costs(cost):
            STEPS[verb](self, state, *words)
        if verb != "price":
            for name in ("seconds", "cpu_seconds"):
                state.figures[name] = round(state.figures.get(name, 0) + cost[name], 1)
            if "peak_bytes" in cost:
                state.figures["peak_bytes"] = max(state.figures.get("peak_bytes", 0), cost["peak_bytes"])
        return state

    def _training(self, seed: int) -> TrainConfig:
        return shared_training(self.settings, seed)

    def _count(self, state: State) -> None:
        state.figures["tokens_trained"] = state.figures.get("tokens_trained", 0) + self.settings.train_tokens

    def cut(self, state: State) -> None:
        """Cut."""
        from pyprune.cut.compact import compact_

        assert state.plan is not None
        compact_(state.model, state.plan)

    def reconstruct(self, state: State, text: str, dtype: str = "float32") -> None:
        """Solve what is kept on a text, then cut."""
        self.solve(state, text, dtype)
        self.cut(state)

    def solve(self, state: State, text: str, dtype: str = "float32") -> None:
        """Solve what is kept to follow the dense model."""
        from pyprune.config.cut import ReconstructConfig
        from pyprune.cut.reconstruct import reconstruct_

        assert state.plan is not None
        samples = self.samples(text, state.seed)
        reconstruct_(state.model, state.plan, samples, options=ReconstructConfig(dtype=dtype))
        state.figures["tokens_calibrated"] = state.figures.get("tokens_calibrated", 0) + samples.ids.numel()

    def price(self, state: State, text: str) -> None:
        """Compare the CPU seconds of solving, two steps before, with those of a dense and a cut pass over its text."""
        assert state.before
        assert state.before.before
        assert state.before.before.before
        solved, before = state.before.before, state.before.before.before
        ids = self.samples(text, state.seed).ids
        passes = _pass_seconds(state.dense, ids) + _pass_seconds(state.model, ids)
        spent = solved.figures["cpu_seconds"] - before.figures.get("cpu_seconds", 0)
        state.figures["times_passes"] = round(spent / passes, 2)

    def finetune(self, state: State, text: str, memory: str = "full", passes: str = "") -> None:
        """Train all weights; with "each", in a pass for each sequence."""
        from pyprune.train.recover import finetune

        training = self._training(state.seed)
        if memory == "lean":
            training = replace(training, memory="lean", dtype="bfloat16")
        if passes == "each":
            training = replace(training, micro_batch_size=1)
        finetune(state.model, self.samples(text, state.seed), training)
        self._count(state)

    def regularise(self, state: State, form: str) -> None:
        """Train with the penalty of the case's method: in its "paper" form, or "anneal"."""
        from pyprune.methods.registry import get_method, preset

        assert state.plan is not None
        assert state.cut is not None
        options: Any = replace(preset(f"{state.cut.regulariser}-{form}").options, train=self._training(state.seed))
        train: Any = get_method(state.cut.regulariser).regularise
        train(state.model, self.samples("prose", state.seed).ids, state.plan, options)
        self._count(state)

    def recover(self, state: State, how: str, text: str = "prose") -> None:
        """Train after the cut: the papers' "lora", logit KL ("distil"), or text and logit KL ("both")."""
        from pyprune.config.recoveries import recovery
        from pyprune.config.train import DistillConfig, RecoverConfig
        from pyprune.runtime.device import DTYPES
        from pyprune.train.recover import recover

        training, teacher = self._training(state.seed), None
        if how == "lora":
            papers = recovery("alpaca-lora").recover
            config = replace(papers, train=replace(training, learning_rate=papers.train.learning_rate))
        else:
            distill = DistillConfig(alpha=0.5 if how == "both" else 1.0)
            config = RecoverConfig(adapters="none", distill=distill, train=training)
            teacher = copy.deepcopy(self.dense).to(DTYPES[self.settings.dtype])
        recover(state.model, self.samples(text, state.seed), config, teacher=teacher)
        self._count(state)

    def train_plainly(self, state: State, adapters: str, rate: str) -> None:
        """Train LoRA of the papers' size, or all weights, at a learning rate."""
        from pyprune.config.train import RecoverConfig, TrainConfig
        from pyprune.train.recover import recover

        batch = self.settings.batch_size
        train = TrainConfig(
            steps=self.settings.steps,
            batch_size=batch,
            micro_batch_size=batch,
            learning_rate=float(rate),
            warmup_steps=2,
            decay="cosine",
            dtype="auto",
        )
        config: Any = RecoverConfig(adapters=adapters, rank=32, alpha=10.0, train=train)
        recover(state.model, self.samples("prose", state.seed).ids, config)
        self._count(state)

    def write(self, state: State, how: str) -> None:
        """Round trained weights: not ("float32"), to "nearest", or as checkpoints are "written"."""
        from pyprune.ops.rounding import changed_to_bfloat16

        assert state.before is not None
        assert state.before.before is not None
        before, after = (dict(s.model.named_parameters()) for s in (state.before.before, state.before))
        for name, weight in state.model.named_parameters():
            if how == "nearest":
                weight.data = weight.data.bfloat16().float()
            elif how == "written":
                weight.data = changed_to_bfloat16(weight.data, name).float()
        state.figures["kept"] = kept_share(before, after, dict(state.model.named_parameters()))

    def store(self, state: State) -> None:
        """Round the dense weights to bfloat16, as a checkpoint from the hub is."""
        import torch

        state.model.to(torch.bfloat16).float()

    def untie(self, state: State) -> None:
        """Untie the head from the embedding; the model computes the same."""
        untie_(state.model)
        state.dense = state.model

    def choose(self, state: State, how: str, text: str) -> None:
        """Keep three quarters of the hidden channels: of most "energy", or principal directions of the stream.

        Directions ("alike" or "tokens-by-energy") first become channels of a model that computes the same.
        """
        from pyprune.families import family_for
        from pyprune.methods.hidden.pca.directions import principal_directions, stream_moment
        from pyprune.methods.hidden.pca.rotation import rotate_
        from pyprune.probe.energy import stream_energy

        ids = self.samples(text, state.seed).ids
        count = state.model.config.hidden_size * 3 // 4
        channels: Sequence[int] = range(count)
        if how == "energy":
            channels = sorted(stream_energy(state.model, ids).argsort(descending=True)[:count].tolist())
        else:
            rotate_(state.model, principal_directions(stream_moment(state.model, ids, alike=how == "alike")))
        state.plan = family_for(state.model).plan(state.model.config).keep_hidden(channels)
        state.dense = state.model


STEPS: Mapping[str, Callable[..., None]] = {
    "cut": PathBench.cut,
    "reconstruct": PathBench.reconstruct,
    "solve": PathBench.solve,
    "price": PathBench.price,
    "finetune": PathBench.finetune,
    "regularise": PathBench.regularise,
    "recover": PathBench.recover,
    "train": PathBench.train_plainly,
    "write": PathBench.write,
    "store": PathBench.store,
    "untie": PathBench.untie,
    "choose": PathBench.choose,
}


def kept_share(before: Mapping[str, Tensor], after: Mapping[str, Tensor], written: Mapping[str, Tensor]) -> float:
    """Return the share of the change from ``before`` to ``after`` that ``written`` has, by projection on it."""
    changes = {name: after[name].detach() - before[name].detach() for name in before}
    left = sum(float(((written[name].detach() - before[name].detach()) * c).sum()) for name, c in changes.items())
    return left / sum(float(change.square().sum()) for change in changes.values())


def _pass_seconds(model: PreTrainedModel, ids: Tensor) -> float:
    """CPU seconds of a forward pass over text without the head: the least of two, in passes of the usual size."""
    import torch

    from pyprune.cut.reconstruct import FORWARD_TOKENS

    seconds = []
    for _ in range(2):
        began = time.process_time()
        with torch.no_grad():
            for rows in ids.split(max(1, FORWARD_TOKENS // ids.shape[1])):
                model.base_model(input_ids=rows, use_cache=False)
        seconds.append(time.process_time() - began)
    return min(seconds)


@contextmanager
def _costs(into: Json) -> Iterator[None]:
    """Add wall and processor seconds of a block to a record, and its peak memory above what was held before."""
    before = _reset_peak()
    began, worked = time.monotonic(), time.process_time()
    yield
    into["seconds"], into["cpu_seconds"] = time.monotonic() - began, time.process_time() - worked
    if before is not None:
        into["peak_bytes"] = _status("VmHWM") - before


def _reset_peak() -> int | None:
    """Let Linux count the peak of resident memory from here; bytes held now, or None where it cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _status("VmRSS")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
