"""The demo's steps on one model: text, training, cutting, measuring, exporting, timing."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench._demo_data import TEXT, load_dense
from bench._demo_options import Arm, Settings, choice
from bench._quality import evaluation_texts, served_perplexities
from pyprune.config.data import DataConfig
from pyprune.runtime.progress import say

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from pyprune.data.sampling import TokenSamples
    from pyprune.plan import PrunePlan
    from pyprune.quality.perplexity import EvaluationText, PerplexityResult
    from pyprune.serving.speed import SpeedReport
    from pyprune.stages import PruneResult

PROMPT = "The old harbour of the city was built"


@dataclass
class Outcome:
    """What an arm came to, or what it was before the training after its cut.

    Attributes:
        arm: which one.
        label: in the table.
        perplexity: on the test text.
        elsewhere: kind of text -> perplexity on text of other kinds.
        parameters: how many are left.
        seconds: training and cutting up to here, wall time.
        losses: language-model loss of each step, nats a token (none where nothing was trained).
        sample: what the model writes after :data:`PROMPT`.
        warnings: what the package warned of.
    """

    arm: Arm
    label: str
    perplexity: float
    elsewhere: dict[str, float]
    parameters: int
    seconds: float
    losses: list[float]
    sample: str
    warnings: list[str]


@dataclass
class Results:
    """Everything that was measured."""

    dense_perplexity: PerplexityResult
    dense_elsewhere: dict[str, float]
    dense_parameters: int
    dense_sample: str
    plan: PrunePlan
    outcomes: dict[str, Outcome]
    speed: SpeedReport


class Clock:
    """Announces each phase and keeps its wall time in seconds."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time one phase; ``name`` is its key in metrics.json."""
        say(f"[{self.total:4.0f} s] {name}", "bold")
        begin = time.monotonic()
        yield
        self.phases[name] = round(time.monotonic() - begin, 1)

    @property
    def total(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started


class Demo:
    """The state of one run: settings, the dense model and its texts.

    Args:
        settings: how much is done.
        work: a folder for checkpoints and texts.
        engine: vllm, transformers or auto.
        model: checkpoint folder; None = the packaged SmolLM2.
        text: source of the calibration and test text.
    """

    def __init__(self, settings: Settings, work: Path, engine: str, model: str | None, text: str) -> None:
        self.settings = settings
        self.work = work
        self.engine = engine
        self.clock = Clock()
        self.source_text = text
        with self.clock.phase("load the model"):
            self.model_name, self.model, self.tokenizer = load_dense(model)
        with self.clock.phase("draw training and test text"):
            self.elsewhere: dict[str, EvaluationText] = {}
            self.test, self.samples = self._texts()
            self.calibration = self._calibration()

    def _texts(self) -> tuple[EvaluationText, TokenSamples]:
        from bench._demo_data import write_demo_data
        from pyprune.data.sampling import sample_sequences
        from pyprune.quality.perplexity import evaluation_text

        s = self.settings
        files = write_demo_data(self.work / "text", self.source_text)
        test = evaluation_text(self.tokenizer, str(files.test))
        wanted = DataConfig(
            source=str(files.calibration), samples=s.steps * s.batch_size, sequence_length=s.sequence_length
        )
        return test, sample_sequences(self.tokenizer, wanted, exclude=test.spans)

    def _calibration(self) -> TokenSamples:
        """What cuts are reconstructed on: as many tokens as are trained on, of several kinds where the text is ours.

        The documents of those kinds that are held back become the test texts of other kinds.
        """
        from bench._demo_data import write_demo_mixture
        from pyprune.data.sampling import sample_sequences

        s = self.settings
        if self.source_text != TEXT:
            return self.samples
        mixture = write_demo_mixture(self.work / "mixture")
        wanted = mixture.data(max(s.steps * s.batch_size, 2 * len(mixture.parts)), s.sequence_length)
        tests = {kind: path for kind, path in mixture.tests.items() if kind != "prose"}
        self.elsewhere = evaluation_texts(self.tokenizer, tests, None)
        used = [self.test, *self.elsewhere.values()]
        return sample_sequences(self.tokenizer, wanted, exclude=[text.spans for text in used])

    def perplexity(self, model: PreTrainedModel) -> tuple[PerplexityResult, dict[str, float]]:
        """Perplexity of the weights as they are served: on the test text, and by kind on texts of other kinds."""
        s = self.settings
        texts = {"": self.test, **self.elsewhere}
        limits = {"": s.test_tokens, **dict.fromkeys(self.elsewhere, s.elsewhere_tokens)}
        found = served_perplexities(model, self.tokenizer, texts, limits, s.dtype, s.protocol)
        return found.pop(""), {kind: result.perplexity for kind, result in found.items()}

    def write_sample(self, model: PreTrainedModel) -> str:
        """Greedy continuation of :data:`PROMPT`."""
        import torch

        from pyprune.runtime.modes import evaluating

        ids: Tensor = self.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
        with evaluating(model), torch.inference_mode():
            out = model.generate(  # type: ignore[operator]
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=self.settings.sample_tokens,
                pad_token_id=self.tokenizer.eos_token_id,
            )
        text = self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        return " ".join(text.split())

    def choose_layers(self) -> PrunePlan:
        """Stage 1: learn the gates once; every arm removes these layers."""
        from pyprune.pipeline import make_plan

        beginnings = self.samples.ids[:, : self.settings.gate_sequence_length]
        return make_plan(self.model, beginnings, choice(self.settings))

    def run_arm(self, arm: Arm) -> tuple[PreTrainedModel, dict[str, Outcome]]:
        """Train and cut a copy of the dense model as `prune_` does; measure it, also before the last training."""
        from pyprune.methods.registry import checked
        from pyprune.stages import StageRun, StageText

        model = copy.deepcopy(self.model)
        text = {"regularise": self.samples, "cut": self.calibration, "recover": self.samples}
        run = StageRun(model, StageText.of(text), checked(arm.config), teacher=self.teacher)
        found: dict[str, Outcome] = {}
        begin = time.monotonic()
        run.decide()
        run.train_before_the_cut()
        run.cut()
        seconds = time.monotonic() - begin
        if arm.after_the_cut is not None:
            key, label = arm.after_the_cut
            found[key] = self._outcome(arm, label, run.result, model, seconds)
        begin = time.monotonic()
        run.train_after_the_cut()
        seconds += time.monotonic() - begin
        found[arm.key] = self._outcome(arm, arm.label, run.finished(), model, seconds)
        return model, found

    def teacher(self) -> PreTrainedModel:
        """The dense model once more, in the dtype that is computed in."""
        from pyprune.runtime.device import DTYPES

        copied: PreTrainedModel = copy.deepcopy(self.model).to(DTYPES[self.settings.compute_dtype])
        return copied

    def _outcome(self, arm: Arm, label: str, result: PruneResult, model: PreTrainedModel, seconds: float) -> Outcome:
        from pyprune.families import count_parameters

        perplexity, elsewhere = self.perplexity(model)
        say(f"{label}: perplexity {perplexity.perplexity:.2f}")
        losses = [record["lm_loss"] for stage in result.stages for record in history(stage)]
        return Outcome(
            arm,
            label,
            perplexity.perplexity,
            elsewhere,
            count_parameters(model),
            round(seconds, 1),
            losses,
            self.write_sample(model),
            list(result.warnings),
        )

    def export(self, name: str, model: PreTrainedModel, plan: PrunePlan | None, facts: dict[str, Any]) -> Path:
        """Write a checkpoint for the server."""
        from pyprune.checkpoint.trained_on import training_marks
        from pyprune.serving.export import export

        trained_on = training_marks([self.samples]) if plan is not None else ""
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
        """Serve both checkpoints and time them turn by turn."""
        from pyprune.serving.measure import measure

        s = self.settings
        return measure(
            {"dense": dense, "pruned": pruned},
            engine=self.engine,
            batch_size=s.batch_prompts,
            new_tokens=s.new_tokens,
            prompt_tokens=s.prompt_tokens,
            repeats=s.repeats,
            dtype=s.dtype,
        )


def history(stage: dict[str, Any]) -> list[dict[str, Any]]:
    """The step records inside a stage's report."""
    records: list[dict[str, Any]] = stage.get("train", stage).get("history", [])
    return records
