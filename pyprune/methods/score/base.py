"""The one interface of all scoring methods: a scorer adds element scores, the rest is shared.

    def score(run: Scoring) -> None:
        for param in run.open_params:                       # parameters with open structures, in the model's order
            run.add(param, some_tensor_like_the_weight)  # element score = |tensor * weight|

A scorer may call:

* ``run.add(param, factor)``: element scores ``factor * weight`` (the weight that removal takes away: 1 + w for Gemma's
  norms). They are reduced to structures at once, so add each parameter as soon as its scores exist. It may be called
  several times; scores add up. ``signed=True`` takes |sum| of each channel instead of the sum of absolute values.
* ``run.add_elements(param, elements)``: ready element scores (Wanda: |w| times the norm of its input).
* ``run.add_units(layer, axis, values)``: ready scores of units: heads [query heads], kv_heads, ffn or hidden (FLAP).
* ``run.moments(...)``: statistics of the inputs and outputs of modules, ``run.module_weight(name)`` and
  ``run.module_bias(name)``.
* ``run.model``, ``run.samples`` (token ids, int64 [N, T]), ``run.score`` (options that all scoring methods share),
  ``own_options(run.request, NameOptions)``, ``run.scope`` (open axes and layers), ``run.note(...)``, ``run.warn(...)``
  and ``run.details`` for the report.

A scorer must not change the model. In later rounds of ``score.iterations`` it sees the masked model (``run.masked`` is
True). ``_gradients.py`` takes gradients one layer at a time, and ``pyprune/probe/activations.py`` takes statistics of
inputs and outputs. A scorer that uses only these and ``run`` scores a model on disk as well, on the axes that it
declares (``from_disk``). It may hook ``run.module(name)``. Parameters that gradients come with have their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pyprune.checkpoint.layers import StoredLayers
from pyprune.checkpoint.stored import StoredModel
from pyprune.config.score import ScoreAxis, ScoreConfig
from pyprune.cut.compensate import target_of
from pyprune.cut.mask import Masking, masked
from pyprune.errors import ConfigError
from pyprune.families import NamedParam, parameters_after
from pyprune.families.base import Block
from pyprune.methods.base import PlanDecision, PlanRequest
from pyprune.methods.ratio import share_of_parameters
from pyprune.methods.score import Scorer
from pyprune.methods.score._losses import losses_by_axis, losses_note, untouched_axes
from pyprune.methods.score._rank import Ranking
from pyprune.methods.score._structures import PLAN_UNITS, LayerAxis, OpenUnits, StructureScores
from pyprune.plan import PrunePlan
from pyprune.probe.activations import Moments, gather_moments

NEAR = 0.9
"""Share of the goal; a plan that removes less causes a warning."""

LAYERS_OF_AN_END = 6
"""Layers of the model for each layer that is closed at both ends."""

LARGEST_SHARE = 0.75
"""Share of the open parameters above which more layers are opened."""

MANY_ZEROS = 0.5
"""Share of units with a score of exactly zero; above it a ranking is mostly the tie-break, which causes a warning."""

UNIFORM_NOTE = (
    "uniform: all layers are open and lose the same count (ranking, normalise, first_layer, last_layer unused)."
)


@dataclass
class Scoring:
    """One round of scoring: the inputs of a scorer and the sums of its scores.

    Attributes:
        model: the dense (or, in later rounds, masked) model; do not change it.
        samples: token ids, int64 [N, T]; empty for methods that read no text.
        request: the goal of the plan, and the options.
        scope: the open axes and layers.
        open_params: the parameters that own open structures, in the model's order.
        masked: whether earlier rounds have zeroed structures of this model.
        scores: the structures' running sums.
        stored: the files from which weights are read, a tensor or a layer at a time; None = they are in the model.
        notes: sentences for the report.
        warnings: problems that the user should know.
        details: plain JSON data for the report.
    """

    model: PreTrainedModel
    samples: Tensor
    request: PlanRequest
    scope: OpenUnits
    open_params: tuple[NamedParam, ...]
    masked: bool
    scores: StructureScores
    stored: StoredModel | None = None
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        samples: Tensor,
        request: PlanRequest,
        *,
        masked: bool = False,
        stored: StoredModel | None = None,
    ) -> Scoring:
        """Open the structures that the options name, without any scores yet."""
        scope = open_units(request)
        scores = StructureScores(scope, request.score.aggregation)
        return cls(model, samples, request, scope, scope.open_params(model), masked, scores, stored)

    @cached_property
    def layers(self) -> StoredLayers | None:
        """Return the layers of a model on disk, read one at a time; None if the model is in memory."""
        return None if self.stored is None else StoredLayers(self.stored)

    @property
    def device(self) -> torch.device:
        """Return the device that the model computes on."""
        return self.model.device if self.stored is None else self.stored.device

    def module(self, name: str) -> nn.Module:
        """Return a module for hooks; of a model on disk its weights are in memory only while its layer runs."""
        return (self.model if self.layers is None else self.layers.model).get_submodule(name)

    @property
    def score(self) -> ScoreConfig:
        """Return the options that all scoring methods share."""
        return self.request.score

    def output_projections(self) -> dict[LayerAxis, str]:
        """Return the module whose input the heads or FFN channels are: open (layer, axis) -> its name.

        Raises:
            ConfigError: the hidden axis is open.
        """
        if "hidden" in self.score.axes:
            raise ConfigError(
                f"score.axes is {list(self.score.axes)}, but {self.request.method} scores the inputs of o_proj and "
                "down_proj; use heads and ffn."
            )
        family, kinds = self.request.family, self.request.identity.dense.layers
        blocks: dict[ScoreAxis, Block] = {"heads": "attention", "ffn": "mlp"}
        return {
            (layer, axis): f"{family.layers_path}.{layer}.{family.output_projection(blocks[axis], kinds)}"
            for layer, axis in self.scope.places
        }

    @torch.no_grad()
    def weight(self, param: NamedParam) -> Tensor:
        """Return the values that a removal takes away: w, or 1 + w for norms that multiply by it."""
        values = param.parameter.detach()
        if self.stored is not None and values.is_meta:
            values = self.stored.read(param.name)
        return self.request.family.effective(param.row, values)

    def module_weight(self, module: str) -> Tensor:
        """Return the weight of a linear module by its name."""
        if self.stored is not None:
            return self.stored.read(f"{module}.weight")
        return cast(nn.Linear, self.model.get_submodule(module)).weight.detach()

    def module_bias(self, module: str) -> Tensor | None:
        """Return the bias of a module by its name; None if it has none."""
        bias = getattr(self.model.get_submodule(module), "bias", None)
        return bias if bias is None or self.stored is None else self.stored.read(f"{module}.bias")

    def moments(
        self,
        *,
        inputs: Iterable[str] = (),
        outputs: Iterable[str] = (),
        others: Mapping[str, Callable[..., None]] = MappingProxyType({}),
    ) -> dict[str, Moments]:
        """Return the moments of modules' inputs or outputs on the samples; see :func:`gather_moments`."""
        source = self.model if self.layers is None else self.layers
        size = self.score.batch_size
        return gather_moments(source, self.samples, inputs=inputs, outputs=outputs, others=others, batch_size=size)

    @torch.no_grad()
    def add(self, param: NamedParam, factor: Tensor, *, signed: bool = False) -> None:
        """Add the element scores ``factor * weight``.

        Args:
            param: one of ``open_params``.
            factor: of the parameter's shape.
            signed: each channel counts |sum of its elements| instead of the sum of their absolute values.
        """
        self.scores.add_elements(param, factor, self.weight(param), signed=signed)

    @torch.no_grad()
    def add_elements(self, param: NamedParam, elements: Tensor, *, signed: bool = False) -> None:
        """Add ready element scores of the parameter's shape."""
        self.scores.add_elements(param, elements, signed=signed)

    def add_units(self, layer: int | None, axis: str, values: Tensor, part: str = "unit") -> None:
        """Add ready scores of whole units.

        Args:
            layer: dense layer index; None for the hidden axis.
            axis: heads, kv_heads, ffn or hidden.
            values: [units of that axis], finite; at least 0 where the aggregation is prod.
            part: name of this share of the units; shares of one name add up, others are aggregated.
        """
        self.scores.add_structures(layer, axis, part, values)

    def note(self, text: str) -> None:
        """Add a sentence that a reader of the report must know."""
        self.notes.append(text)

    def warn(self, text: str) -> None:
        """Add a problem that the user should know."""
        self.warnings.append(text)


def open_units(request: PlanRequest) -> OpenUnits:
    """Open the structures that the options name.

    As many layers of ``score.closed_ends`` stay closed at each end as leave :data:`LAYERS_OF_AN_END` layers for each,
    and no more than :data:`LARGEST_SHARE` of the open parameters to remove. If that is not enough with all layers open,
    ``score.further_axes`` are open too.

    Raises:
        ConfigError: open layers that the model does not have, or axes that none of them has.
    """
    score, dense = request.score, request.identity.dense
    most = 0 if score.names_open_layers else min(score.closed_ends, dense.num_layers // LAYERS_OF_AN_END)
    further = () if score.counts else score.further_axes
    every = tuple(dict.fromkeys((*score.axes, *further)))
    of_axes = [replace(score, axes=axes) for axes in dict.fromkeys((score.axes, every))]
    *narrower, widest = (
        replace(opened, first_layer=ends, last_layer=-1 - ends) if ends else opened
        for opened in of_axes
        for ends in range(most, -1, -1)
    )
    for opened in narrower:
        scope = OpenUnits.of(dense, opened)
        if request.ratio <= LARGEST_SHARE * _open_share(request, scope):
            return scope
    scope = OpenUnits.of(dense, widest)
    if not scope.axes:
        raise ConfigError(
            f"score.axes is {list(score.axes)}, of which the open layers of this {request.family.model_type!r} model "
            "have nothing that can be cut.\nChoose other axes, or a method that removes layers."
        )
    return scope


def _open_share(request: PlanRequest, scope: OpenUnits) -> float:
    """Return the share of all parameters that the open layers would lose if they lost every open unit."""
    plan = request.identity
    for layer, axis in scope.places:
        if layer is not None:
            plan = plan.with_layer(layer, **dict.fromkeys(PLAN_UNITS[axis], ()))
    return share_of_parameters(request.family, request.shapes, plan)


def decide_by_scores(
    scorer: Scorer,
    model: PreTrainedModel,
    samples: Tensor,
    request: PlanRequest,
    *,
    stored: StoredModel | None = None,
) -> PlanDecision:
    """Score, rank and decide, in ``score.iterations`` rounds. The model comes back unchanged.

    Later rounds score the masked model and, in memory, hold one more copy of its weights meanwhile. Notes and details
    are those of the last round, warnings those of all.

    Args:
        scorer: adds the scores of a round.
        model: a dense model of a known family; a scorer that reads no weights may be used on the meta device.
        samples: calibration token ids, int64 [N, T].
        request: the goal of the plan.
        stored: the files from which weights are read, if the model is on the meta device.

    Raises:
        ConfigError: options that do not fit the model, or a goal that cannot be reached.
        ScoreError: scores that cannot rank anything.
    """
    ranking = make_ranking(model, request)
    ranking.check_goal()
    rounds = request.score.iterations
    plan = ranking.identity
    run = Scoring.of(model, samples, request, stored=stored)
    warnings: list[str] = []
    for number in range(1, rounds + 1):
        with _masked(model, plan, stored) if number > 1 else nullcontext():
            run = Scoring.of(model, samples, request, masked=number > 1, stored=stored)
            scorer(run)
        prefix = f"Round {number}: " if rounds > 1 else ""
        warnings += [prefix + text for text in (*_zero_warnings(run, ranking, plan), *run.warnings)]
        plan = ranking.plan(run.scores, plan, Fraction(number, rounds))
    share = share_of_parameters(request.family, request.shapes, plan)
    losses = losses_by_axis(ranking, plan)
    left = parameters_after(request.family, request.shapes, plan)
    notes = [*ranking.rounding_notes(), _goal_note(request, share, left), losses_note(losses), *run.notes]
    warnings += untouched_axes(ranking, losses, standardised=run.scores.standardised)
    warnings += _shortfall(ranking, share)
    if request.score.closed_ends and not request.score.names_open_layers:
        first, last = ranking.scope.layers[0], ranking.scope.layers[-1]
        notes.append(f"Layers {first} to {last} are open (score.closed_ends is {request.score.closed_ends}).")
    if more := [axis for axis in ranking.scope.axes if axis not in request.score.axes]:
        notes.append(f"{' and '.join(more)} are open too: the other axes alone would lose too much.")
    if request.score.uniform:
        notes.append(UNIFORM_NOTE)
        if reasons := ranking.stock_obstacles(plan):
            warnings.append(
                f"No stock architecture fits although score.uniform is on: {'; '.join(reasons)}. The checkpoint needs "
                "pyprune in addition to vLLM or Transformers; score.axes=[ffn] keeps the heads, which most "
                "architectures require."
            )
    details = {
        "rounds": rounds,
        "share_removed": share,
        "removed_by_axis": {loss.axis: loss.to_dict() for loss in losses},
        "group_scores": score_spread(run),
        **run.details,
    }
    return PlanDecision(plan, tuple(notes), {"scores": details}, tuple(warnings))


def _masked(model: PreTrainedModel, plan: PrunePlan, stored: StoredModel | None) -> AbstractContextManager[Any]:
    """Mask the model or the stored tensors, whichever weights are read from, until the block ends."""
    if stored is None:
        return masked(model, plan)
    return stored.transform_reads(Masking(stored.family, stored.config, plan).apply_)


def make_ranking(model: PreTrainedModel, request: PlanRequest) -> Ranking:
    """Return the ranking that turns a round's scores of a model into plans; only the goal in ``request`` changes them.

    Raises:
        ConfigError: open layers that the model does not have.
    """
    scope = open_units(request)
    biases = request.reconstruct == "bias"

    def stock_obstacles(plan: PrunePlan) -> tuple[str, ...]:
        return target_of(model, plan, biases=biases).reasons

    return Ranking(request, scope, stock_obstacles)


def _shortfall(ranking: Ranking, share: float) -> list[str]:
    request, score = ranking.request, ranking.score
    if score.counts or request.ratio_of not in (None, "parameters") or share >= NEAR * request.ratio:
        return []
    steps = {"ffn": "score.ffn_multiple", "hidden": "hidden_multiple"}
    names = [steps[axis] for axis in ranking.scope.axes if axis in steps]
    closer = [f"smaller steps ({', '.join(names)})"] if names else []
    if score.is_local or score.axes == ("hidden",):
        reason = "every further step is larger than the rest of the goal"
        if not score.uniform and "hidden" not in score.axes:
            closer.append("the ranking 'global'")
        if len(ranking.scope.layers) < ranking.scope.dense.num_layers:
            closer.append("more open layers")
    else:
        reason = "the next unit in the order of the scores is larger than the rest of the goal, and none is skipped"
        closer.append("the ranking 'local', which continues with smaller steps")
    if "heads" in ranking.scope.axes and ranking.scope.whole_groups and ranking.scope.dense.largest_group > 1:
        closer.insert(0, "query heads without their KV head (score.heads_unit=query_head)")
    advice = f" This may come closer: {'; '.join(closer)}." if closer else ""
    return [f"Only {share:.2%} of the parameters are removed, {request.ratio:.2%} were asked for: {reason}.{advice}"]


def _goal_note(request: PlanRequest, share: float, left: int) -> str:
    if request.score.counts:
        counts = ", ".join(f"{axis} {count}" for axis, count in request.score.counts.items())
        asked = f"counts were given ({counts} are kept in every open layer; the ratio was not used)"
    else:
        unit = " of the hidden channels" * (request.ratio_of == "hidden")
        asked = f"asked for {request.ratio:.2%}{unit}"
    return f"{share:.2%} of the parameters are removed, {left:,} are kept; {asked}."


def score_spread(run: Scoring) -> dict[str, dict[str, float | None]]:
    """Return axis -> number of units, smallest, median and largest group score, and the share of exact zeros.

    None stands for a score that is not finite: the logarithm of a product of 0.
    """
    spread: dict[str, dict[str, float | None]] = {}
    for axis in run.scope.axes:
        places = [place for place in run.scope.places if place[1] == axis]
        values = torch.cat([run.scores.group_scores(*place) for place in places])
        spread[axis] = {
            "units": values.numel(),
            "zeros": float((values == 0).double().mean()),
            "smallest": _finite(values.min()),
            "median": _finite(values.median()),
            "largest": _finite(values.max()),
        }
    return spread


def _finite(value: Tensor) -> float | None:
    """Return the number, or None if it is infinite, for JSON."""
    return float(value) if bool(torch.isfinite(value)) else None


def _zero_warnings(run: Scoring, ranking: Ranking, before: PrunePlan) -> list[str]:
    """Warn of equal scores, which only the tie-break ranks; units that are removed already do not count."""
    warnings = []
    for axis in run.scope.axes:
        places = [place for place in run.scope.places if place[1] == axis]
        values = torch.cat([ranking.remaining_scores(run.scores, before, *place) for place in places])
        zeros = float((values == 0).double().mean())
        if values.numel() > 1 and bool((values == values[0]).all()):
            warnings.append(f"The scores rank nothing: every unit of {axis} has the score {float(values[0]):.4g}.")
        elif run.score.aggregation != "prod" and zeros > MANY_ZEROS:
            warnings.append(f"{zeros:.1%} of the {axis} scores are exactly zero; their order is only the tie-break.")
    return warnings
