"""The interface of a method: it decides a plan, and may train the model towards it. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from pyprune.config.method import MethodOptions
from pyprune.config.run import PruneConfig, StageAction, StageConfig
from pyprune.errors import ConfigError
from pyprune.families import Family, family_for, parameter_shapes, removable_layers

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
    """The goal of a plan: the options that a decision reads, and the facts of the model that all methods look up.

    Attributes:
        method: name of the method, for messages.
        options: the method's own options; None = its defaults (:func:`own_options` reads them).
        ratio: share to remove, in (0, 1).
        ratio_of: the unit of the ratio: layers, hidden, experts or parameters; None = the method's own axis.
        hidden_multiple: legal multiple of a sliced hidden size, channels.
        score: the options that all scoring methods share.
        reconstruct: how the cut compensates the kept weights: none, bias or least_squares; none if nothing is cut.
        seed: seed of the order of samples.
        family: family of the model.
        identity: the plan that removes nothing.
        shapes: parameter name -> shape, tied parameters once.
        removable_layers: layers that can be removed whatever else is kept, ascending.
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
    removable_layers: tuple[int, ...]

    @classmethod
    def of(cls, model: PreTrainedModel, config: PruneConfig) -> PlanRequest:
        """Build the request from the options of a run and the model's shapes.

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
            removable_layers=removable_layers(model),
        )


@dataclass(frozen=True)
class PlanDecision:
    """A plan and how it was chosen.

    Attributes:
        plan: the kept layers, heads and channels.
        notes: one sentence for each rounding or choice that a reader must know.
        details: plain JSON data for the report (gate history and the like).
        warnings: problems that the user should know.
    """

    plan: PrunePlan
    notes: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunOptions:
    """Options of a stage's run that are not part of the configuration.

    Attributes:
        validation: token ids, int64 [M, T], for early stopping; None holds some samples out when needed.
        checkpoint_dir: folder for resumable checkpoints (a stage uses sub-folders of it); None = none are written.
        resume: continue from the checkpoints in that folder.
        stored: the files from which the weights are read, tensor by tensor; the model itself is on the meta device.
            None = the weights are in the model. Only methods that are declared ``from_disk`` get it.
        further: token ids, int64 [M, T], that ``decide`` may read besides its samples; None = there is no more text.
        kinds: kind of text of each of the samples, then of those of ``further``; empty = unknown.
        dense_experts: experts that a token of the dense model reads, where the cut one reads fewer; else None.
    """

    validation: Tensor | None = None
    checkpoint_dir: Path | None = None
    resume: bool = False
    stored: StoredModel | None = None
    further: Tensor | None = None
    kinds: tuple[str, ...] = ()
    dense_experts: int | None = None

    def folder(self, stage: str) -> Path | None:
        """Return the checkpoint folder of a stage."""
        return None if self.checkpoint_dir is None else self.checkpoint_dir / stage


NO_RUN = RunOptions()
"""The default of a run: no validation text, no checkpoints, weights in the model."""


class StageReport(Protocol):
    """The report that every regulariser returns."""

    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        ...


def warn_if_nothing_penalised(report: StageReport, removed: tuple[int, ...], unit: str) -> StageReport:
    """Add a warning to a regulariser's report if the plan (a replayed one) left it nothing to penalise.

    Args:
        report: report of the stage.
        removed: layers or channels that the plan removes, by the method's unit.
        unit: name of the unit, singular.
    """
    if not removed:
        report.warnings.insert(
            0,
            f"The regulariser had no effect: the plan removes no {unit}, so nothing was penalised and the model was "
            "trained on the language-model loss alone. Choose the method that fits the plan, or 'finetune' as the "
            "stage.",
        )
    return report


class Decide(Protocol):
    """Choose what to remove."""

    def __call__(
        self, model: PreTrainedModel, samples: Tensor, request: PlanRequest, run: RunOptions = ..., /
    ) -> PlanDecision:
        """Return the plan; the model's weights do not change."""
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


Prepare = Callable[["LayerRunner", "PrunePlan", "Tensor", Mapping[str, Any]], Sequence[str]]
"""(layers, plan, samples, details) -> notes for the report: change the weights in place directly before the cut, and
have ``layers`` keep them. ``samples`` is the text that the decision read, ``details`` are the decision's."""


@dataclass(frozen=True)
class Deferred:
    """A function that is imported when it is first called, so that declaring a method imports no torch.

    Attributes:
        path: "module:name".
    """

    path: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Import the function and call it."""
        module, _, name = self.path.partition(":")
        return getattr(import_module(module), name)(*args, **kwargs)


@dataclass(frozen=True)
class Method:
    """A method that the registry finds by its file or folder.

    Attributes:
        name: name of the file or folder.
        axis: the axis from which it removes.
        summary: one line for people.
        decide: (model, samples [N, T], request, run) -> PlanDecision.
        regularise: (model, samples [N, T], plan, the method's options, run) -> report; None for a method that only
            scores. The plan describes the dense model. On a model that was already cut nothing is left to penalise,
            and the stage trains on the language-model loss alone, with the same options.
        reads_text: whether ``decide`` reads the samples; :meth:`reads_text_with` decides it for given options.
        further_text: times as much text as the samples that ``decide`` may read besides them (``run.further``).
        options: class of the method's own options.
        prepare: (layers, plan, samples [N, T], details of the decision) -> notes; changes the kept weights directly
            before the cut, in memory or on disk, as ``layers`` holds them. None for a method that cuts the weights
            without a change. A replayed plan is cut without it.
        rotates: whether ``prepare`` mixes the hidden channels. Then no channel of the cut model is a channel of the
            dense model, and nothing may compare the two channel by channel.
        objective: (plan, the method's own options) -> the :class:`~pyprune.train.objective.Objective` of
            ``regularise``, which also predicts its memory. None = the language-model loss alone.
        deciding_objective: (plan, the method's own options) -> the objective of the training by which ``decide``
            chooses (``deciding_training`` of the options); None = ``decide`` trains nothing.
        from_disk: whether ``decide`` (by ``run.stored``) and ``prepare`` can read the weights from disk, a tensor or a
            layer at a time, for a model larger than memory; :meth:`streaming_obstacle` decides it for given options.
        reads_seed: whether ``decide`` reads the seed of the request; otherwise a run that sets the seed is refused.
        removes: name of the removed parts; empty = the axis's name for them.
        presets: name -> function that builds a preset (its docstring describes it). The names are ``name`` (the start
            of every run of the method; :meth:`default_config` if it is missing) and ``name-...``.
    """

    name: str
    axis: Literal["hidden", "layers", "structures", "experts"]
    summary: str
    decide: Decide
    regularise: Regularise | None = None
    reads_text: bool = True
    further_text: int = 0
    options: type[MethodOptions] = MethodOptions
    prepare: Prepare | None = None
    rotates: bool = False
    objective: Callable[[PrunePlan, Any], Any] | None = None
    deciding_objective: Callable[[PrunePlan, Any], Any] | None = None
    from_disk: bool = False
    reads_seed: bool = False
    removes: str = ""
    presets: Mapping[str, Callable[[], PruneConfig]] = field(default_factory=dict)

    def default_config(self) -> PruneConfig:
        """Return the options that a run starts from if ``presets`` has none of the method's name."""
        before: tuple[StageAction, ...] = ("regularise",) if self.regularise is not None else ()
        return PruneConfig(method=self.name, options=self.options(), stages=StageConfig(before=before))

    def unread_options(self, config: PruneConfig) -> dict[str, str]:
        """Return the shared options that this method does not read in a run: dotted name -> reason."""
        keeps = self.axis in ("layers", "experts")
        reasons = {"hidden_multiple": "removes none of the hidden size"} if keeps else {}
        if not self._reads_seed_in(config):
            other = f"{self.name}.seed is its own" if hasattr(self.options(), "seed") else "data.seed draws the text"
            reasons["seed"] = f"draws nothing by it ({other})"
        return reasons

    def _reads_seed_in(self, config: PruneConfig) -> bool:
        """Check whether a run's decision reads the seed (false if the choice is given explicitly)."""
        return self.reads_seed and (self.deciding_objective is None or config.deciding_training() is not None)

    @property
    def scores(self) -> bool:
        """True if it scores structures, and so reads the options that all such methods share (``score``)."""
        return self.axis == "structures"

    def streaming_obstacle(self, config: PruneConfig) -> str | None:
        """Return why a run of these options needs the whole model in memory; None if it does not."""
        return None if self.from_disk else f"{self.name} scores the model as a whole"

    def reads_text_with(self, options: MethodOptions | None) -> bool:
        """Check whether ``decide`` reads the samples with these options of the method; None = its defaults."""
        return self.reads_text and (self.options() if options is None else options).reads_text


def own_options(source: PlanRequest | PruneConfig, kind: type[Options]) -> Options:
    """Return the options of a run's method, which must be of the class that the method declares; None = its defaults.

    Raises:
        ConfigError: they are another method's.
    """
    options = kind() if source.options is None else source.options
    if not isinstance(options, kind):
        raise ConfigError(
            f"The options of method {source.method!r} are a {type(options).__name__}; it takes a {kind.__name__}."
        )
    return options
