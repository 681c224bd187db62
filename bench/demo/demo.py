"""The demo's steps on one model: text, training, cutting, measuring, exporting, timing."""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench._settings import Arm, Settings, choice, shared_training
from bench._texts import TEXT, evaluation_texts, load_dense, served_perplexities
from pyprune.config.data import DataConfig
from pyprune.runtime.progress import say

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from pyprune.data.sampling import TokenSamples
    from pyprune.plan import PrunePlan
    from pyprune.quality.perplexity import EvaluationText, PerplexityResult
    from pyprune.serving.speed.results import SpeedReport

SERVING_MINUTES = 6
"""vLLM's starts and turns."""
PROMPT = "The old harbour of the city was built"


@dataclass
class Outcome:
    """A model of the demo and its figures.

    Attributes:
        label: in the table.
        home: perplexity on the test text.
        elsewhere: kind of text -> perplexity on text of other kinds.
        layers: how many are left.
        parameters: how many are left.
        seconds: training and cutting up to here, wall time.
        losses: language-model loss of each step, nats a token (none where nothing was trained).
        sample: what the model writes after :data:`PROMPT`; None where it was not asked.
        config: the options; None of the dense model.
        warnings: what the package warned of.
    """

    label: str
    home: PerplexityResult
    elsewhere: dict[str, PerplexityResult]
    layers: int
    parameters: int
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    sample: str | None = None
    config: dict[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def perplexity(self) -> float:
        """On the test text."""
        return self.home.perplexity


@dataclass
class Results:
    """Everything that was measured.

    Attributes:
        outcomes: key in metrics.json -> model; the first is the dense one, the last the one that was served with it.
        plan: of the cut.
        speed: of these two.
    """

    outcomes: dict[str, Outcome]
    plan: PrunePlan
    speed: SpeedReport

    @property
    def dense(self) -> Outcome:
        """The model before the cut."""
        return self.outcomes["dense_ppl"]

    @property
    def served_model(self) -> Outcome:
        """The model that was served."""
        return list(self.outcomes.values())[-1]


class Clock:
    """Announces each phase, and keeps and prints its wall time in seconds."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time one phase; ``name`` is its key in metrics.json."""
        say(f"[{self.total:4.0f} s] {name}", "bold")
        begin, busy = time.monotonic(), sum(os.times()[:4])
        yield
        self.add(name, time.monotonic() - begin)
        say(f"         {name}: {self.phases[name]:.0f} s, {sum(os.times()[:4]) - busy:.0f} s of CPU")

    def add(self, name: str, seconds: float) -> None:
        """Keep the wall time of a phase that was timed elsewhere."""
        self.phases[name] = round(seconds, 1)

    @property
    def total(self) -> float:
        """Seconds of all phases."""
        return sum(self.phases.values())


class Demo:
    """The state of one run: settings, the dense model and its texts.

    Args:
        settings: how much is done.
        work: a folder for checkpoints and texts.
        engine: vllm, transformers or auto.
        model: checkpoint folder; None = the packaged SmolLM2.
        text: source of the calibration and test text.

    Attributes:
        clock: the phases.
        starts: seconds that the engines took to start, which no phase holds.
        chosen: folder of the run whose layers are taken; None = they are chosen here.
    """

    def __init__(self, settings: Settings, work: Path, engine: str, model: str | None, text: str) -> None:
        self.settings = settings
        self.work = work
        self.engine = engine
        self.clock = Clock()
        self.starts = 0.0
        self.chosen: str | None = None
        self.source_text = text
        with self.clock.phase("load the model"):
            self.model_name, self.model, self.tokenizer = load_dense(model)
        with self.clock.phase("draw training and test text"):
            self.elsewhere: dict[str, EvaluationText] = {}
            self.test, self.samples = self._texts()
            self.calibration = self._calibration()

    def _texts(self) -> tuple[EvaluationText, TokenSamples]:
        from bench._texts import write_demo_data
        from pyprune.data.sampling import sample_sequences
        from pyprune.quality.perplexity import evaluation_text

        s = self.settings
        files = write_demo_data(self.work / "text", self.source_text)
        test = evaluation_text(self.tokenizer, str(files.test))
        wanted = DataConfig(source=str(files.calibration), samples=s.sequences, sequence_length=s.sequence_length)
        return test, sample_sequences(self.tokenizer, wanted, exclude=test.spans)

    def _calibration(self) -> TokenSamples:
        """Draw the text that cuts are reconstructed on: of several kinds where the text is ours.

        The documents of those kinds that are held back become the test texts of other kinds.
        """
        from bench._texts import write_demo_mixture
        from pyprune.data.sampling import sample_sequences

        s = self.settings
        if self.source_text != TEXT:
            return self.samples
        mixture = write_demo_mixture(self.work / "mixture")
        wanted = mixture.data(s.calibration, s.sequence_length)
        tests = {kind: path for kind, path in mixture.tests.items() if kind != "prose"}
        self.elsewhere = evaluation_texts(self.tokenizer, tests, None)
        used = [self.test, *self.elsewhere.values()]
        return sample_sequences(self.tokenizer, wanted, exclude=[text.spans for text in used])

    def measure(self, label: str, model: PreTrainedModel, *, brief: bool = False, **facts: Any) -> Outcome:
        """Measure the weights as they are served, and let the model write; ``brief``: on the test text alone.

        Args:
            label: in the table.
            model: is copied.
            brief: measure perplexity on the test text, and nothing else.
            facts: other fields of the outcome.
        """
        from pyprune.families import count_parameters

        s = self.settings
        texts = {"": self.test} if brief else {"": self.test, **self.elsewhere}
        limits = {"": s.test_tokens, **dict.fromkeys(self.elsewhere, s.elsewhere_tokens)}
        found = served_perplexities(model, self.tokenizer, texts, limits, s.dtype, s.protocol)
        home = found.pop("")
        say(f"{label}: perplexity {home.perplexity:.2f}")
        sizes = int(model.config.num_hidden_layers), count_parameters(model)
        return Outcome(label, home, found, *sizes, sample=None if brief else self.write_sample(model), **facts)

    def write_sample(self, model: PreTrainedModel) -> str:
        """Greedy continuation of :data:`PROMPT`."""
        import torch

        from pyprune.runtime.modes import evaluation_mode

        ids: Tensor = self.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
        with evaluation_mode(model), torch.inference_mode():
            out = model.generate(  # type: ignore[operator]
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=self.settings.sample_tokens,
                pad_token_id=self.tokenizer.eos_token_id,
            )
        text = self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        return " ".join(text.split())

    def choose_layers(self, layers: tuple[int, ...]) -> PrunePlan:
        """Stage 1: learn the gates once; every arm removes these layers.

        Args:
            layers: what a former run chose; empty = choose now.
        """
        from pyprune import make_plan

        beginnings = self.samples.ids[:, : self.settings.gate_sequence_length]
        return make_plan(self.model, beginnings, choice(self.settings, layers))

    def run_arm(self, arm: Arm) -> tuple[PreTrainedModel, dict[str, Outcome]]:
        """Train and cut a copy of the dense model as `prune_` does; measure it, also before the last training."""
        from pyprune.methods.registry import complete_config
        from pyprune.run.stages import Stages
        from pyprune.run.text import RunText

        model = copy.deepcopy(self.model)
        text = {"data": self.samples, "cut.data": self.calibration, "recovery_data": self.samples}
        run = Stages(model, RunText.of(text), complete_config(arm.config), teacher=self.teacher)
        found: dict[str, Outcome] = {}
        seconds = 0.0

        def measure_as(name: tuple[str, str] | None) -> None:
            if name is not None:
                losses = [record["lm_loss"] for stage in run.result.stages for record in history(stage)]
                facts = {"config": arm.config.to_dict(), "warnings": list(run.result.warnings)}
                key, label = name
                found[key] = self.measure(
                    label, model, brief=arm.brief, seconds=round(seconds, 1), losses=losses, **facts
                )

        begin = time.monotonic()
        run.decide()
        run.train_before_the_cut()
        run.cut()
        seconds = time.monotonic() - begin
        measure_as(arm.cut)
        begin = time.monotonic()
        run.train_after_the_cut()
        seconds += time.monotonic() - begin
        run.finish()
        measure_as(arm.trained)
        return model, found

    def teacher(self) -> PreTrainedModel:
        """The dense model once more, in the dtype that is computed in."""
        from pyprune.runtime.device import DTYPES

        copied: PreTrainedModel = copy.deepcopy(self.model).to(DTYPES[self.settings.compute_dtype])
        return copied

    def minutes(self, arms: int) -> tuple[float, float]:
        """How long trained arms take on this machine: (minutes of everything, seconds of the step that was timed).

        Args:
            arms: how many are trained.
        """
        from pyprune.train.loop import train

        step = train(copy.deepcopy(self.model), self.samples.ids, shared_training(replace(self.settings, steps=1)))
        s = self.settings
        tokens = (s.test_tokens + len(self.elsewhere) * s.elsewhere_tokens) * (arms + 3)
        # In steps: a forward pass is a third of one, a reconstruction as much as a step and a half of its tokens.
        forwards = tokens / (3 * s.batch_size * s.sequence_length)
        reconstruction = 1.5 * s.calibration / s.batch_size
        return (arms * s.steps + forwards + reconstruction) * step.seconds / 60 + SERVING_MINUTES, step.seconds

    def export(self, name: str, model: PreTrainedModel, plan: PrunePlan | None, facts: dict[str, Any]) -> Path:
        """Write a checkpoint for the server."""
        from pyprune.checkpoint.trained_on import training_marks
        from pyprune.serving.export import export

        trained_on = training_marks([self.samples, self.calibration]) if plan is not None else ""
        facts = {"source": self.model_name, "training_marks": trained_on, **facts}
        return export(
            model,
            self.work / name,
            dtype=self.settings.dtype,
            tokenizer=self.tokenizer,
            plan=plan,
            provenance=facts,
        ).path

    def time_both(self, dense: Path, pruned: Path) -> SpeedReport:
        """Serve both checkpoints and time them turn by turn; the starts of the engines are a phase by themselves."""
        from pyprune.serving.speed.measure import measure

        s = self.settings
        begin = time.monotonic()
        report = measure(
            {"dense": dense, "pruned": pruned},
            engine=self.engine,
            batch_size=s.batch_prompts,
            new_tokens=s.new_tokens,
            prompt_tokens=s.prompt_tokens,
            repeats=s.repeats,
            dtype=s.dtype,
        )
        starts = {name: model.load_seconds or 0.0 for name, model in report.models.items()}
        self.starts = sum(starts.values())
        self.clock.add("time dense and pruned", time.monotonic() - begin - self.starts)
        shown = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in starts.items())
        say(f"         starts of {report.engine}: {shown}; turns: {self.clock.phases['time dense and pruned']:.0f} s")
        return report


def history(stage: dict[str, Any]) -> list[dict[str, Any]]:
    """The step records inside a stage's report."""
    records: list[dict[str, Any]] = stage.get("train", stage).get("history", [])
    return records


def chosen_layers(folder: Path, demo: Demo) -> tuple[int, ...]:
    """The layers that a former run into ``folder`` chose for the same model and text; empty where there is none."""
    try:
        details = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["details"]
        same = (details["model"], details["text"]) == (demo.model_name, demo.source_text)
        return tuple(details["removed_layers"]) if same and details["ratio"] == demo.settings.ratio else ()
    except (OSError, ValueError, KeyError, TypeError):
        return ()
