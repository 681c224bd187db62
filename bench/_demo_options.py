"""How much the demo does, and the ways to get to the same shapes that it compares."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from pyprune.config.cut import CutConfig
from pyprune.config.run import PruneConfig, StageConfig
from pyprune.config.train import TrainConfig
from pyprune.methods.base import own_options
from pyprune.methods.registry import preset
from pyprune.methods.regularise.elder import ElderOptions, GateConfig


@dataclass(frozen=True)
class Settings:
    """How much the demo does.

    Attributes:
        steps: optimizer steps of every trained arm.
        batch_size: sequences a step.
        sequence_length: tokens in a sequence.
        ratio: share of the layers that is removed.
        gates: stage 1, which chooses the layers.
        gate_sequence_length: tokens from the beginning of each training sequence that stage 1 uses.
        protocol: of the perplexities.
        test_tokens: tokens of test text in every perplexity.
        elsewhere_tokens: tokens of each text of another kind.
        batch_prompts: prompts generated at once when timing.
        new_tokens: tokens generated for each prompt when timing.
        prompt_tokens: tokens of the one long prompt when timing.
        repeats: timed turns of each model and column.
        sample_tokens: tokens of text that each model writes for the report.
        dtype: of the weights that are measured and served.
        compute_dtype: that the arms are reconstructed and trained in.
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
    elsewhere_tokens: int = 2 * 2048
    batch_prompts: int = 64
    new_tokens: int = 128
    prompt_tokens: int = 2048
    repeats: int = 3
    sample_tokens: int = 40
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"

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
            elsewhere_tokens=2 * 128,
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
    """One way to get to the same shapes.

    Attributes:
        key: in metrics.json.
        label: in the table.
        config: its options.
        after_the_cut: key and label of what it is between the cut and the training after it; None = not measured.
    """

    key: str
    label: str
    config: PruneConfig
    after_the_cut: tuple[str, str] | None = None

    @property
    def is_dense(self) -> bool:
        """Whether it keeps all layers."""
        return not self.config.stages.prune


def elder_options(name: str) -> ElderOptions:
    """ELDeR's options in one of its presets."""
    return own_options(preset(name), ElderOptions)


def recommended(settings: Settings) -> PruneConfig:
    """The package's default, with the demo's share of the layers and the dtype that it computes in."""
    options = elder_options("elder")
    training = replace(options.train, dtype=settings.compute_dtype)
    return replace(preset("elder"), ratio=settings.ratio, options=replace(options, train=training))


def shared_training(settings: Settings, seed: int = 0) -> TrainConfig:
    """What all trained arms share; the seed is of the order of the samples."""
    return replace(
        elder_options("elder").train,
        dtype=settings.compute_dtype,
        steps=settings.steps,
        batch_size=settings.batch_size,
        micro_batch_size=settings.batch_size,
        seed=seed,
    )


def choice(settings: Settings) -> PruneConfig:
    """The options of stage 1."""
    base = recommended(settings)
    return replace(base, options=replace(own_options(base, ElderOptions), gates=settings.gates))


def make_arms(layers: tuple[int, ...], settings: Settings) -> dict[str, Arm]:
    """The dense control and the ways to remove ``layers``; all train with the same options on the same tokens."""
    base = recommended(settings)
    options = own_options(base, ElderOptions)
    training = shared_training(settings)
    default = replace(
        base,
        options=replace(options, layers=layers, train=training),
        recover=replace(base.recover, train=training),
        finetune=training,
        cut=replace(base.cut, least_squares=replace(base.cut.least_squares, dtype=settings.compute_dtype)),
    )
    plain = replace(default, cut=CutConfig(), stages=StageConfig(before=(), after=("finetune",)))
    papers = elder_options("elder-paper")
    published = replace(
        own_options(default, ElderOptions),
        schedule=papers.schedule,
        penalty_weight=papers.penalty_weight,
        norm=papers.norm,
    )
    arms = (
        Arm(
            "dense_finetuned_ppl",
            "control: dense, fine-tuned",
            replace(plain, stages=StageConfig(before=("finetune",), prune=False)),
        ),
        Arm(
            "published_ppl",
            f"papers' form ({published.norm}, penalty_weight {published.penalty_weight:g}), then cut",
            replace(plain, options=published, stages=StageConfig(before=("regularise",))),
        ),
        Arm("prune_then_finetune_ppl", "control: cut, then fine-tuned", plain, ("direct_ppl", "direct removal")),
        Arm(
            "pruned_ppl",
            "pyprune's default: cut, reconstructed, then trained on text and logits",
            default,
            ("reconstructed_ppl", "cut and reconstructed, no training"),
        ),
    )
    return {arm.key: arm for arm in arms}
