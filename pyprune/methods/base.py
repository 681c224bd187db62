"""What a method is: it decides a plan and, where it regularises, trains the model towards it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from pyprune.config.run import PruneConfig
    from pyprune.plan import PrunePlan


@dataclass(frozen=True)
class PlanDecision:
    """A plan and how it came about.

    Attributes:
        plan: what stays.
        notes: one sentence for each rounding or choice that a reader must know.
        details: plain JSON data for the report (gate history and the like).
        warnings: what the user should worry about.
    """

    plan: PrunePlan
    notes: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunOptions:
    """How a stage's training is run, beside what the configuration says.

    Attributes:
        validation: token ids, int64 [M, T], for early stopping; None holds some samples out when needed.
        checkpoint_dir: where resumable checkpoints go (a stage uses sub-folders of it); None = none.
        resume: continue from the checkpoints found there.
    """

    validation: Tensor | None = None
    checkpoint_dir: Path | None = None
    resume: bool = False

    def folder(self, stage: str) -> Path | None:
        """The checkpoint folder of a stage."""
        return None if self.checkpoint_dir is None else self.checkpoint_dir / stage


def nothing_to_do(unit: str) -> str:
    """Say that a replayed plan leaves a regulariser without work."""
    return (
        f"The regulariser had no effect: the plan removes no {unit}, so nothing was penalised and the language model "
        "alone was trained. Choose the method that fits the plan, or 'finetune' as the stage."
    )


class StageReport(Protocol):
    """What every regulariser returns."""

    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        ...


class Decide(Protocol):
    """Choose what goes."""

    def __call__(
        self, model: PreTrainedModel, samples: Tensor, config: PruneConfig, run: RunOptions = ..., /
    ) -> PlanDecision:
        """Return the plan; the model's weights are left as they were."""
        ...


class Regularise(Protocol):
    """Train towards a plan."""

    def __call__(
        self,
        model: PreTrainedModel,
        samples: Tensor,
        plan: PrunePlan,
        config: PruneConfig,
        run: RunOptions = ...,
        /,
    ) -> StageReport:
        """Change the weights in place."""
        ...


@dataclass(frozen=True)
class Method:
    """A method that the registry finds by its file.

    Attributes:
        name: the file's name.
        axis: the axis it removes from (also the default unit of the ratio).
        summary: one line for people.
        decide: (model, samples [N, T], config, run) -> PlanDecision.
        regularise: (model, samples [N, T], plan, config, run) -> report; None for a method that only scores. The
            plan is of the dense model; on a model that was already cut to it nothing is left to penalise and the stage
            trains the language model alone, with the same options.
        reads_text: whether ``decide`` looks at the samples.
    """

    name: str
    axis: Literal["hidden", "layers", "structures"]
    summary: str
    decide: Decide
    regularise: Regularise | None
    reads_text: bool = True
