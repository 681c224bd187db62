"""The options of the regularising methods."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from typing_extensions import override

from pyprune.config.base import LARGEST_INDEX, LARGEST_WEIGHT, Config, Norm, _require, option
from pyprune.config.train import LARGEST_BATCH, TrainConfig

Solver = Literal["subgradient", "prox"]
Schedule = Literal["published", "anneal"]


@dataclass(frozen=True)
class DressConfig(Config):
    """DReSS: regularise a set R of hidden channels, then remove it (Feng et al., "DReSS").

    Attributes:
        select: which channels form R.
        channels: the explicit list for select="explicit", hidden indices.
        segments: number of equal segments for select="segments".
        penalise: removed penalises R; all penalises every hidden channel while R still goes (the paper's
            full-parameter-regularisation ablation).
        norm: l2 = sum of group norms (not squared), l1 = sum of absolute values.
        penalty_weight: the papers' lambda, in units of loss per unit of norm.
        solver: subgradient (the penalty joins the loss) or prox (soft-threshold after the smooth step).
        prox_step: step size of the proximal map; None = the learning rate (l1 in the Adam metric).
        schedule: published, or anneal (the channels of R shrink to exactly zero).
        anneal_share: share of the steps after which the annealed factor is zero, in (0, 1].
        target_preserved_ratio: preserved ratio of |W| in R to reach; above it a warning is issued.
        train: the training loop's options.
    """

    select: Literal["last", "first", "segments", "explicit", "scored"] = "last"
    channels: tuple[int, ...] = option((), at_least=0, at_most=LARGEST_INDEX)
    segments: int = option(5, at_least=1, at_most=LARGEST_INDEX)
    penalise: Literal["removed", "all"] = "removed"
    norm: Norm = "l2"
    penalty_weight: float = option(1e-3, at_least=0, at_most=LARGEST_WEIGHT)
    solver: Solver = "subgradient"
    prox_step: float | None = option(None, above=0, at_most=LARGEST_WEIGHT, otherwise=", or null for the learning rate")
    schedule: Schedule = "published"
    anneal_share: float = option(0.5, above=0, at_most=1)
    target_preserved_ratio: float = option(0.3, at_least=0)
    train: TrainConfig = field(default_factory=TrainConfig)

    @override
    def problems(self) -> list[str]:
        found: list[str] = []
        _require(
            self.penalise == "removed" or self.schedule == "published",
            "penalise is 'all' with schedule 'anneal', which would shrink the whole model to zero; "
            "use schedule 'published'.",
            found,
        )
        in_adam_metric = (
            self.solver == "prox" and self.norm == "l1" and self.prox_step is None and self.train.optimizer != "sgd"
        )
        _require(
            not (self.penalise == "all" and in_adam_metric),
            "penalise is 'all' with the l1 prox in the Adam metric, which erases every weight without a gradient at "
            "once (the embeddings of all tokens that the text lacks); use solver 'subgradient' or give prox_step.",
            found,
        )
        explicit = self.select == "explicit"
        _require(
            bool(self.channels) == explicit,
            f"channels has {len(self.channels)} entries with select={self.select!r}; "
            "give channels exactly when select is 'explicit'.",
            found,
        )
        return found


@dataclass(frozen=True)
class GateConfig(Config):
    """Stage 1 of ELDeR/TRSP: learn one scalar per layer, mask the smallest, repeat.

    Attributes:
        placement: residual scales the branch, h + S (layer(h) - h); output scales the whole stream
            (the papers' literal text, which always drives the last layers out).
        search: greedy (one layer a round) or one_shot.
        penalty_weight: the papers' lambda1.
        learning_rate: of the gates (Adam).
        first_round_steps: Adam steps of the first round.
        round_steps: Adam steps of each later round, warm-started.
        batch_size: sequences per step.
    """

    placement: Literal["residual", "output"] = "residual"
    search: Literal["greedy", "one_shot"] = "greedy"
    penalty_weight: float = option(5e-3, at_least=0, at_most=LARGEST_WEIGHT)
    learning_rate: float = option(1e-2, above=0, at_most=LARGEST_WEIGHT)
    first_round_steps: int = option(40, at_least=1, at_most=100_000)
    round_steps: int = option(10, at_least=1, at_most=100_000)
    batch_size: int = option(4, at_least=1, at_most=LARGEST_BATCH)


@dataclass(frozen=True)
class ElderConfig(Config):
    """ELDeR / TRSP: learn layer gates, regularise the layers that will go, drop them.

    Attributes:
        gates: stage 1.
        layers: explicit layers to remove (skips stage 1); dense indices.
        norm: of the input-output difference of a layer in P, mean over tokens of the per-token norm.
        penalty_weight: the papers' lambda2.
        schedule: published (the norm penalty) or anneal (gates of P go from 1 to exactly 0).
        anneal_share: share of the steps after which the annealed gate is zero, in (0, 1].
        train: stage 2's training options.
    """

    gates: GateConfig = field(default_factory=GateConfig)
    layers: tuple[int, ...] = option((), at_least=0, at_most=LARGEST_INDEX)
    norm: Norm = "l2"
    penalty_weight: float = option(1e-3, at_least=0, at_most=LARGEST_WEIGHT)
    schedule: Schedule = "published"
    anneal_share: float = option(0.5, above=0, at_most=1)
    train: TrainConfig = field(default_factory=TrainConfig)
