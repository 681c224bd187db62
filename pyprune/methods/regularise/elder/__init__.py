"""ELDeR: learn which layers matter least, turn them into the identity by training, drop them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Literal

from typing_extensions import override

from pyprune.config.base import LARGEST_INDEX, LARGEST_WEIGHT, Config, Norm, option
from pyprune.config.data import DataConfig
from pyprune.config.method import Deciding, MethodOptions
from pyprune.config.run import PruneConfig, StageConfig
from pyprune.config.train import LARGEST_BATCH, TrainConfig, micro_batch_for
from pyprune.methods.base import Deferred, Method, own_options
from pyprune.methods.training import MIXTURE, make_forms, published_recovery, published_training, short_training

READ_BY_GATES = ("dtype", "gradient_checkpointing", "checkpoint_interval")
"""Options of stage 2's training that stage 1 uses as well."""


@dataclass(frozen=True)
class GateConfig(Config):
    """Stage 1 of ELDeR/TRSP: learn one scalar per layer, mask the smallest, repeat.

    Defaults are the papers' constants; learning rate, steps and batch are ours, because the papers name none.

    Attributes:
        placement: residual scales the branch, h + S (layer(h) - h); output scales the whole stream
            (the papers' literal text, which always drives the last layers out).
        weighed_share: share of the layers that get a gate, those of the smallest block influence (ShortGPT), rounded
            up; the others are kept. 1 = all layers.
        search: greedy (one layer a round) or one_shot.
        penalty_weight: the papers' lambda1.
        learning_rate: of the gates (Adam).
        first_round_steps: Adam steps of the first round.
        round_steps: Adam steps of each later round, warm-started.
        batch_size: sequences per step.
    """

    placement: Literal["residual", "output"] = "residual"
    weighed_share: float = option(1.0, above=0, at_most=1)
    search: Literal["greedy", "one_shot"] = "greedy"
    penalty_weight: float = option(5e-3, at_least=0, at_most=LARGEST_WEIGHT)
    learning_rate: float = option(1e-2, above=0, at_most=LARGEST_WEIGHT)
    first_round_steps: int = option(40, at_least=1, at_most=100_000)
    round_steps: int = option(10, at_least=1, at_most=100_000)
    batch_size: int = option(4, at_least=1, at_most=LARGEST_BATCH)


@dataclass(frozen=True)
class ElderOptions(MethodOptions):
    """ELDeR / TRSP: learn layer gates, regularise the layers that will be dropped, drop them.

    Defaults are the papers' constants, except for ``train``.

    Attributes:
        gates: stage 1.
        layers: explicit layers to remove (skips stage 1); dense indices.
        norm: of the input-output difference of a layer in P, mean over tokens of the per-token norm.
        penalty_weight: the papers' lambda2.
        schedule: published (the norm penalty) or anneal (gates of P go from 1 to exactly 0).
        anneal_share: share of the steps after which the annealed gate is zero, in [0, 1]; at 0 the layers of P are
            removed at the first step, and the rest is trained: cut, then fine-tuned.
        train: stage 2's training options.
    """

    gates: GateConfig = field(default_factory=GateConfig)
    layers: tuple[int, ...] = option((), at_least=0, at_most=LARGEST_INDEX)
    norm: Norm = "l2"
    penalty_weight: float = option(1e-3, at_least=0, at_most=LARGEST_WEIGHT)
    schedule: Literal["published", "anneal"] = "published"
    anneal_share: float = option(0.5, at_least=0, at_most=1)
    train: TrainConfig = field(default_factory=TrainConfig)

    @property
    @override
    def regularising_options(self) -> tuple[str, ...]:
        gates = () if self.layers else READ_BY_GATES
        train = [f"train.{option.name}" for option in fields(TrainConfig) if option.name not in gates]
        return "norm", "penalty_weight", "schedule", "anneal_share", *train

    @property
    @override
    def training(self) -> TrainConfig:
        return self.train

    @override
    def deciding_training(self, sequence_length: int) -> Deciding | None:
        return None if self.layers else Deciding("gates", self.gate_training(sequence_length))

    def gate_training(self, sequence_length: int) -> TrainConfig:
        """Return the training options of stage 1, except its steps and seed.

        Args:
            sequence_length: tokens of the text's sequences.
        """
        return TrainConfig(
            optimizer="adam",
            learning_rate=self.gates.learning_rate,
            batch_size=self.gates.batch_size,
            micro_batch_size=micro_batch_for(self.gates.batch_size, sequence_length),
            max_grad_norm=None,
            memory="full",  # of the gates: the weights are frozen
            **{name: getattr(self.train, name) for name in READ_BY_GATES},
        )

    @property
    @override
    def idle(self) -> dict[str, str]:
        off = ("penalty_weight", "norm") if self.schedule == "anneal" else ("anneal_share",)
        found = dict.fromkeys(off, f"schedule {self.schedule!r}")
        if self.gates.search == "one_shot":
            found["gates.round_steps"] = f"gates.search {self.gates.search!r}"
        return found | ({"gates": f"layers {list(self.layers)}"} if self.layers else {})

    @property
    @override
    def reads_text(self) -> bool:
        return not self.layers


def _elder_paper() -> PruneConfig:
    """ELDeR with the papers' constants: lambda1 5e-3, lambda2 1e-3, 128 samples of 2048, no recovery."""
    return PruneConfig(
        method="elder",
        ratio=0.25,
        ratio_of="layers",
        data=DataConfig("wikitext2", "train", samples=128, sequence_length=2048),
        # 128 samples are 2 steps an epoch.
        options=ElderOptions(train=published_training(steps=100, validation_interval=2)),
        recover=published_recovery(),
        finetune=published_training(steps=100, validation_interval=2),
    )


def _elder_paper_literal() -> PruneConfig:
    """ELDeR with the gate exactly as printed (scaling the whole stream), which drives the last layers out first."""
    base = _elder_paper()
    options = own_options(base, ElderOptions)
    return replace(base, options=replace(options, gates=replace(options.gates, placement="output")))


def _elder() -> PruneConfig:
    """ELDeR: 25 % of the layers, as its gates choose on a mixture of texts."""
    return replace(_elder_anneal(), data=MIXTURE, stages=StageConfig(before=()))


def _elder_anneal() -> PruneConfig:
    """ELDeR with well-trained residual gates, whose chosen layers are then faded out during training."""
    return PruneConfig(
        method="elder",
        ratio=0.25,
        ratio_of="layers",
        data=DataConfig("wikitext2", "train", samples=160, sequence_length=256),
        options=ElderOptions(
            gates=GateConfig(penalty_weight=5e-2, learning_rate=3e-2),
            penalty_weight=0.0,
            schedule="anneal",
            anneal_share=0.25,
            train=short_training(),
        ),
        finetune=short_training(),
    )


METHOD = Method(
    name="elder",
    axis="layers",
    summary="ELDeR: learn which layers matter least, in the papers' form turn them into the identity, and drop them.",
    decide=Deferred(f"{__name__}.gates:decide"),
    regularise=Deferred(f"{__name__}.penalty:regularise"),
    objective=Deferred(f"{__name__}.penalty:objective"),
    deciding_objective=Deferred(f"{__name__}.gates:objective"),
    options=ElderOptions,
    reads_seed=True,
    presets={
        **make_forms(_elder),
        "elder-anneal": _elder_anneal,
        "elder-paper": _elder_paper,
        "elder-paper-literal": _elder_paper_literal,
    },
)
