"""What a method is: it decides a plan and, where it regularises, trains the model towards it. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from pyprune.config.method import MethodOptions
from pyprune.config.run import PruneConfig, StageAction, StageConfig
from pyprune.errors import ConfigError
from pyprune.families import Family, family_for, parameter_shapes

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from pyprune.checkpoint.stored import StoredModel
    from pyprune.config.run import RatioOf
    from pyprune.config.score import ScoreConfig
    from pyprune.plan import PrunePlan
    from pyprune.probe.streams import LayerRunner

Options = TypeVar("Options", bound=MethodOptions)


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is to reach: the options that a decision reads, and the facts of the model that all methods look up.

    Attributes:
        method: its name, for messages.
        options: the method's own; None = its defaults (:func:`own_options` reads them).
        ratio: share to remove, in (0, 1).
        ratio_of: of what: layers, hidden or parameters; None = the method's own axis.
        hidden_multiple: legal multiple of a sliced hidden size, channels.
        score: what all scoring methods share.
        reconstruct: what the cut does for what stays: none, bias or least_squares; none where nothing is cut.
        seed: of the order of samples.
        family: of the model.
        identity: the plan that removes nothing.
        shapes: parameter name -> shape, tied parameters once.
    """

    method: str
    options: MethodOptions | None
    ratio: float
    ratio_of: RatioOf | None
    hidden_multiple: int
    score: ScoreConfig
    reconstruct: Literal["none", "bias", "least_squares"]
    seed: int
    family: Family
    identity: PrunePlan
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, model: PreTrainedModel, config: PruneConfig) -> PlanRequest:
        """Take what a decision reads from the options of a run, and look at the model.

        Args:
            model: dense, of a known family; on the meta device if need be.
            config: every option.

        Raises:
            UnsupportedModelError: the model has no family.
        """
        family = family_for(model)
        return cls(
            method=config.method,
            options=config.options,
            ratio=config.ratio,
            ratio_of=config.ratio_of,
            hidden_multiple=config.hidden_multiple,
            score=config.score_options,
            reconstruct=config.cut.reconstruct if config.stages.prune else "none",
            seed=config.seed,
            family=family,
            identity=family.plan(model.config),
            shapes=parameter_shapes(model),
        )


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
    """How a stage's training is run, in addition to what the configuration says.

    Attributes:
        validation: token ids, int64 [M, T], for early stopping; None holds some samples out when needed.
        checkpoint_dir: where resumable checkpoints go (a stage uses sub-folders of it); None = none.
        resume: continue from the checkpoints found there.
        stored: where the weights are read from, tensor by tensor; the model itself has none (meta device). None = they
            are in the model. Only methods that are declared ``from_disk`` are given this.
    """

    validation: Tensor | None = None
    checkpoint_dir: Path | None = None
    resume: bool = False
    stored: StoredModel | None = None

    def folder(self, stage: str) -> Path | None:
        """The checkpoint folder of a stage."""
        return None if self.checkpoint_dir is None else self.checkpoint_dir / stage


class StageReport(Protocol):
    """What every regulariser returns."""

    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        ...


def with_no_work_said(report: StageReport, removed: tuple[int, ...], unit: str) -> StageReport:
    """Add a warning to a regulariser's report if the plan, a replayed one, left it nothing to penalise.

    Args:
        report: of the stage.
        removed: what the plan removes of the method's unit.
        unit: singular.
    """
    if not removed:
        report.warnings.insert(
            0,
            f"The regulariser had no effect: the plan removes no {unit}, so nothing was penalised and the language "
            "model alone was trained. Choose the method that fits the plan, or 'finetune' as the stage.",
        )
    return report


class Decide(Protocol):
    """Choose what to remove."""

    def __call__(
        self, model: PreTrainedModel, samples: Tensor, request: PlanRequest, run: RunOptions = ..., /
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
        options: Any,
        run: RunOptions = ...,
        /,
    ) -> StageReport:
        """Change the weights in place; ``options`` are the method's own."""
        ...


class Prepare(Protocol):
    """Change the weights for the cut, which follows at once."""

    def __call__(
        self, layers: LayerRunner, plan: PrunePlan, samples: Tensor, details: Mapping[str, Any], /
    ) -> Sequence[str]:
        """Change the weights in place, have ``layers`` keep them, and return notes for the report.

        ``samples`` is the text that was decided on, ``details`` are those of the decision.
        """
        ...


@dataclass(frozen=True)
class Deferred:
    """A function that is imported when it is first called, so that declaring a method imports no torch.

    Attributes:
        path: "module:name".
    """

    path: str

    def load(self) -> Callable[..., Any]:
        """The function."""
        module, _, name = self.path.partition(":")
        found: Callable[..., Any] = getattr(import_module(module), name)
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Import it and call it."""
        return self.load()(*args, **kwargs)


@dataclass(frozen=True)
class Method:
    """A method that the registry finds by its file or folder.

    Attributes:
        name: the file's or folder's name.
        axis: the axis it removes from.
        summary: one line for people.
        decide: (model, samples [N, T], request, run) -> PlanDecision.
        regularise: (model, samples [N, T], plan, the method's options, run) -> report; None for a method that only
            scores. The plan is of the dense model; on a model that was already cut to it nothing is left to penalise
            and the stage trains the language model alone, with the same options.
        reads_text: whether ``decide`` looks at the samples; with which options, :meth:`reads_text_with` says.
        options: the class of the method's own options.
        prepare: (layers, plan, samples [N, T], details of the decision) -> notes; changes the weights that stay right
            before the cut, in memory or on disk, as ``layers`` holds them. None for a method that cuts them as they
            are. A replayed plan is cut without it.
        rotates: whether ``prepare`` changes what the hidden channels are, so that those of the cut model are none of
            the dense model's, and nothing that compares the two channel by channel can be used.
        objective: (plan, the method's own options) -> what ``regularise`` trains on, an
            :class:`~pyprune.train.objective.Objective`; what it will hold in memory is found with it. None = the
            language model alone.
        decides_by: the same of the training by which ``decide`` chooses (``deciding`` of the options); None = it trains
            nothing.
        from_disk: whether ``decide`` (by ``run.stored``) and ``prepare`` can read the weights from disk, a tensor or a
            layer at a time, so that a model larger than memory is pruned; with which options, :meth:`why_loaded` says.
        reads_seed: whether ``decide`` reads the seed of the request. To a method that does not, naming one is refused.
        removes: what it removes, in words; empty = what the axis says.
        presets: name -> function that builds a preset (its docstring describes it); names are ``name`` (what every
            run of the method starts from; :meth:`start` where it is missing) and ``name-...``.
    """

    name: str
    axis: Literal["hidden", "layers", "structures"]
    summary: str
    decide: Decide
    regularise: Regularise | None
    reads_text: bool = True
    options: type[MethodOptions] = MethodOptions
    prepare: Prepare | None = None
    rotates: bool = False
    objective: Callable[[PrunePlan, Any], Any] | None = None
    decides_by: Callable[[PrunePlan, Any], Any] | None = None
    from_disk: bool = False
    reads_seed: bool = False
    removes: str = ""
    presets: Mapping[str, Callable[[], PruneConfig]] = field(default_factory=dict)

    def start(self) -> PruneConfig:
        """What a run starts from where ``presets`` has none of the method's name."""
        before: tuple[StageAction, ...] = ("regularise",) if self.regularise is not None else ()
        return PruneConfig(method=self.name, options=self.options(), stages=StageConfig(before=before))

    def unread(self, config: PruneConfig) -> dict[str, str]:
        """Dotted names of options that methods share and this one does not read in a run -> why not, in words."""
        found = {"hidden_multiple": "removes none of the hidden size"} if self.axis == "layers" else {}
        if not self._reads_seed_in(config):
            own = f"{self.name}.seed is its own" if hasattr(self.options(), "seed") else "data.seed draws the text"
            found["seed"] = f"draws nothing by it ({own})"
        return found

    def _reads_seed_in(self, config: PruneConfig) -> bool:
        """Whether a run's decision reads its seed; what would decide by a training may be told instead."""
        return self.reads_seed and (self.decides_by is None or config.deciding() is not None)

    @property
    def scores(self) -> bool:
        """Whether it scores structures, and so reads the options that all such methods share (``score``)."""
        return self.axis == "structures"

    def why_loaded(self, config: PruneConfig) -> str:
        """Why a run of these options needs the whole model in memory to decide and to cut; empty where it does not."""
        return "" if self.from_disk else f"{self.name} scores the model as a whole"

    def reads_text_with(self, options: MethodOptions | None) -> bool:
        """Whether ``decide`` looks at the samples with these options of the method; None stands for its defaults."""
        return self.reads_text and (self.options() if options is None else options).reads_text


def own_options(given: PlanRequest | PruneConfig, kind: type[Options]) -> Options:
    """The options of a run's method, which must be of the class that the method declares; None stands for its defaults.

    Raises:
        ConfigError: they are another method's.
    """
    found = kind() if given.options is None else given.options
    if not isinstance(found, kind):
        raise ConfigError(
            f"The options of method {given.method!r} are a {type(found).__name__}; it takes a {kind.__name__}."
        )
    return found


def with_paper(name: str, make: Callable[[], PruneConfig]) -> dict[str, Callable[[], PruneConfig]]:
    """Presets of a method for which nothing better than the paper's constants is known: both names give the same."""
    return {name: make, f"{name}-paper": make}
