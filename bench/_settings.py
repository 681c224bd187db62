"""How much the demo does, short or full, and the ways to get to the same shapes that it compares."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from pyprune.config.cut import CutConfig
from pyprune.config.run import PruneConfig, StageConfig
from pyprune.config.train import TrainConfig
from pyprune.methods.base import own_options
from pyprune.methods.registry import preset
from pyprune.methods.regularise.elder import ElderOptions, GateConfig

FULL_GATES = replace(
    own_options(preset("elder"), ElderOptions).gates, weighed_share=1.0, first_round_steps=30, round_steps=6
)
SHORT_GATES = replace(FULL_GATES, weighed_share=0.5, first_round_steps=24, round_steps=4, batch_size=2)


@dataclass(frozen=True)
class Settings:
    """How much the demo does; the defaults are the short demo's, which trains no weights.

    Attributes:
        steps: optimizer steps of every trained arm; 0 = nothing is trained, and the controls are left out.
        batch_size: sequences a step.
        sequences: of training text that are drawn.
        sequence_length: tokens in a sequence.
        calibration: sequences of a mixture of texts that cuts are reconstructed on.
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

    steps: int = 0
    batch_size: int = 8
    sequences: int = 160
    sequence_length: int = 256
    calibration: int = 32
    ratio: float = 0.25
    gates: GateConfig = field(default_factory=lambda: SHORT_GATES)
    gate_sequence_length: int = 128
    protocol: str = "ppl-2048"
    test_tokens: int = 2 * 2048
    elsewhere_tokens: int = 2048
    batch_prompts: int = 16
    new_tokens: int = 32
    prompt_tokens: int = 1024
    repeats: int = 3
    sample_tokens: int = 40
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"

    @classmethod
    def full(cls) -> Settings:
        """Every control, trained on 36,864 tokens: README's table."""
        return cls(
            steps=18,
            sequences=144,
            calibration=144,
            gates=FULL_GATES,
            test_tokens=6 * 2048,
            elsewhere_tokens=2 * 2048,
            batch_prompts=64,
            new_tokens=128,
            prompt_tokens=2048,
        )

    @property
    def train_tokens(self) -> int:
        """Tokens that every trained arm sees."""
        return self.steps * self.batch_size * self.sequence_length


@dataclass(frozen=True)
class Arm:
    """One way to get to the same shapes.

    Attributes:
        config: its options.
        cut: key and label of what it is after the cut and before any training after it; None = not measured.
        trained: like ``cut``, for the model after training; None = nothing is trained.
        brief: whether perplexity on the test text is all that is measured.
    """

    config: PruneConfig
    cut: tuple[str, str] | None = None
    trained: tuple[str, str] | None = None
    brief: bool = False


def elder_options(name: str) -> ElderOptions:
    """ELDeR's options in one of its presets."""
    return own_options(preset(name), ElderOptions)


def default_config(settings: Settings) -> PruneConfig:
    """The package's default, with the demo's share of the layers and the dtype that it computes in."""
    options = elder_options("elder")
    training = replace(options.train, dtype=settings.compute_dtype)
    return replace(preset("elder-trained"), ratio=settings.ratio, options=replace(options, train=training))


def shared_training(settings: Settings, seed: int = 0) -> TrainConfig:
    """Return the options that all trained arms share; the seed is of the order of the samples."""
    return replace(
        elder_options("elder").train,
        dtype=settings.compute_dtype,
        steps=max(1, settings.steps),
        batch_size=settings.batch_size,
        micro_batch_size=settings.batch_size,
        seed=seed,
    )


def choice(settings: Settings, layers: tuple[int, ...] = ()) -> PruneConfig:
    """The options of stage 1, or of leaving it out because the layers are chosen already."""
    base = default_config(settings)
    return replace(base, options=replace(own_options(base, ElderOptions), gates=settings.gates, layers=layers))


def make_arms(layers: tuple[int, ...], settings: Settings) -> tuple[Arm, ...]:
    """The ways to remove ``layers``, with the dense control; all train with the same options on the same tokens.

    The last one is the package's default, which is served.
    """
    base = default_config(settings)
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
    direct = "direct_ppl", "the same layers cut directly"
    reconstructed = "reconstructed_ppl", "cut and reconstructed, no training"
    if not settings.steps:
        cut_alone = StageConfig(before=(), after=())
        return (
            Arm(replace(plain, stages=cut_alone), direct, brief=True),
            Arm(replace(default, stages=cut_alone), reconstructed),
        )
    return (
        Arm(
            replace(plain, stages=StageConfig(before=("finetune",), prune=False)),
            trained=("dense_finetuned_ppl", "control: dense, fine-tuned"),
        ),
        Arm(
            replace(plain, options=published, stages=StageConfig(before=("regularise",))),
            trained=(
                "published_ppl",
                f"papers' form ({published.norm}, penalty_weight {published.penalty_weight:g}), then cut",
            ),
        ),
        Arm(plain, direct, ("prune_then_finetune_ppl", "control: cut, then fine-tuned")),
        Arm(
            default,
            reconstructed,
            ("pruned_ppl", "pyprune's default: cut, reconstructed, then trained on text and logits"),
        ),
    )
