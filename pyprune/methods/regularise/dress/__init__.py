"""DReSS: regularise a set of hidden channels, so that slicing them off afterwards loses little (Feng et al.)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from typing_extensions import override

from pyprune.config.base import LARGEST_INDEX, LARGEST_WEIGHT, Norm, option
from pyprune.config.data import DataConfig
from pyprune.config.method import MethodOptions
from pyprune.config.run import PruneConfig, StageConfig
from pyprune.config.train import TrainConfig
from pyprune.methods.base import Deferred, Method, own_options
from pyprune.methods.training import MIXTURE, make_forms, published_recovery, published_training, short_training


@dataclass(frozen=True)
class DressOptions(MethodOptions):
    """DReSS: regularise a set R of hidden channels, then remove it (Feng et al., "DReSS").

    Defaults are the paper's constants, except for ``train``.

    Attributes:
        select: which channels form R: last, first or segments (by position), explicit (a list), scored (the smallest
            weights) or energy (the smallest share of the residual stream's energy on calibration text).
        channels: the explicit list for select="explicit", hidden indices.
        segments: number of equal segments for select="segments".
        penalise: removed penalises R; all penalises every hidden channel, and only R is removed (the paper's
            full-parameter-regularisation ablation).
        norm: l2 = sum of group norms (not squared), l1 = sum of absolute values.
        penalty_weight: the papers' lambda, in units of loss per unit of norm.
        solver: subgradient (the penalty joins the loss) or prox (group soft-threshold after the smooth step; l2 only).
        prox_step: step size of the proximal map; None = the learning rate.
        schedule: published, or anneal (the channels of R shrink to exactly zero).
        anneal_share: share of the steps after which the annealed factor is zero, in [0, 1]; at 0 the channels of R are
            zero from the first step on.
        target_preserved_ratio: preserved ratio of |W| in R to reach; above it a warning is issued.
        train: the training loop's options.
    """

    select: Literal["last", "first", "segments", "explicit", "scored", "energy"] = "last"
    channels: tuple[int, ...] = option((), at_least=0, at_most=LARGEST_INDEX)
    segments: int = option(5, at_least=1, at_most=LARGEST_INDEX)
    penalise: Literal["removed", "all"] = "removed"
    norm: Norm = "l2"
    penalty_weight: float = option(1e-3, at_least=0, at_most=LARGEST_WEIGHT)
    solver: Literal["subgradient", "prox"] = "subgradient"
    prox_step: float | None = option(None, above=0, at_most=LARGEST_WEIGHT, otherwise=", or null for the learning rate")
    schedule: Literal["published", "anneal"] = "published"
    anneal_share: float = option(0.5, at_least=0, at_most=1)
    target_preserved_ratio: float = option(0.3, at_least=0)
    train: TrainConfig = field(default_factory=TrainConfig)

    @property
    @override
    def regularising_options(self) -> tuple[str, ...]:
        penalty = "penalise", "norm", "penalty_weight", "solver", "prox_step", "schedule", "anneal_share"
        return *penalty, "target_preserved_ratio", "train"

    @property
    @override
    def reads_text(self) -> bool:
        return self.select == "energy"

    @property
    @override
    def training(self) -> TrainConfig:
        return self.train

    @property
    @override
    def idle(self) -> dict[str, str]:
        annealed = self.schedule == "anneal"
        off = ("penalty_weight", "norm", "solver", "prox_step") if annealed else ("anneal_share",)
        found = dict.fromkeys(off, f"schedule {self.schedule!r}")
        if self.solver != "prox":
            found.setdefault("prox_step", f"solver {self.solver!r}")
        return found | ({} if self.select == "segments" else {"segments": f"select {self.select!r}"})

    @property
    @override
    def preserved_goal(self) -> float:
        return self.target_preserved_ratio

    @override
    def problems(self) -> Iterator[str]:
        if self.penalise != "removed" and self.schedule != "published":
            yield (
                "penalise is 'all' with schedule 'anneal', which would shrink the whole model to zero; "
                "use schedule 'published'."
            )
        if self.solver != "subgradient" and self.norm != "l2":
            yield (
                "solver is 'prox' with norm 'l1'; its proximal map is that of l2. Use norm 'l2', or solver "
                "'subgradient'."
            )
        explicit = self.select == "explicit"
        if bool(self.channels) != explicit:
            yield (
                f"channels has {len(self.channels)} entries with select={self.select!r}; "
                "give channels exactly when select is 'explicit'."
            )


def _dress_paper() -> PruneConfig:
    """DReSS with the paper's constants: l2, lambda 1e-3, last 25 %, 750 + 250 samples of 2048, LoRA recovery."""
    return PruneConfig(
        method="dress",
        ratio=0.25,
        ratio_of="hidden",
        data=DataConfig("wikitext2", "train", samples=750, sequence_length=2048),
        recovery_data=DataConfig("wikitext2", "train", samples=250, sequence_length=2048, seed=1),
        stages=StageConfig(before=("regularise",), after=("recover",)),
        # 750 samples are 12 steps an epoch; about 700 steps are what lr 2e-5 needs to bring weights of size
        # 0.02 to the 30 % of Figure 5.
        options=DressOptions(train=published_training(steps=720, validation_interval=12)),
        # "All other hyperparameters follow the default settings" of PEFT (appendix), so its modules too.
        recover=replace(published_recovery(), targets="default"),
        finetune=published_training(steps=40, validation_interval=4),
    )


def _dress_paper_opt() -> PruneConfig:
    """DReSS with the paper's constants for OPT-2.7B: lambda 5e-3."""
    base = _dress_paper()
    return replace(base, options=replace(own_options(base, DressOptions), penalty_weight=5e-3))


def _dress() -> PruneConfig:
    """DReSS's axis: 25 % of the hidden channels, those of the least energy on a mixture of texts."""
    annealed = _dress_anneal()
    options = replace(own_options(annealed, DressOptions), select="energy")
    return replace(annealed, data=MIXTURE, stages=StageConfig(before=()), options=options)


def _dress_anneal() -> PruneConfig:
    """DReSS whose channels, those of the smallest norm, are annealed to exactly zero while the rest is trained."""
    return PruneConfig(
        method="dress",
        ratio=0.25,
        ratio_of="hidden",
        data=DataConfig("wikitext2", "train", samples=160, sequence_length=256),
        options=DressOptions(
            select="scored",
            penalty_weight=0.0,
            schedule="anneal",
            anneal_share=0.5,
            target_preserved_ratio=0.05,
            train=short_training(),
        ),
        finetune=short_training(),
    )


METHOD = Method(
    name="dress",
    axis="hidden",
    summary="DReSS: slice a set of hidden channels off, in the paper's form after training has shrunk it.",
    decide=Deferred(f"{__name__}.channels:decide"),
    regularise=Deferred(f"{__name__}.training:regularise"),
    objective=Deferred(f"{__name__}.training:objective"),
    from_disk=True,
    options=DressOptions,
    presets={
        **make_forms(_dress),
        "dress-anneal": _dress_anneal,
        "dress-paper": _dress_paper,
        "dress-paper-opt": _dress_paper_opt,
    },
)
