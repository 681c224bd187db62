"""List the choices of every layer, and rank its units by score. Does not import torch.

A layer keeps some KV groups with their query heads (or fewer query heads of each group), some FFN channels and, if it
is a mixture, some experts; it skips its attention or its MLP, or is removed as a whole. The widths of a layer are
numbers of units; the scores decide which units are removed: the smallest first, ties by the smaller index, as in every
local ranking of this package. The hidden size is one choice for the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import fsum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeVar

from typing_extensions import override

from pyprune.config.base import LARGEST_INDEX, Config, option
from pyprune.errors import BudgetError, ConfigError
from pyprune.families.mixtures import expert_groups, fewest_experts
from pyprune.fit.quantities import Widths
from pyprune.plan import DECODER, BlockSizes, PrunePlan, Sizes
from pyprune.runtime.records import digest

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from pyprune.fit.sizes import SizeRules

T = TypeVar("T")
Skip = Literal["attention", "mlp", "layer"]
DROPPED = Widths(0, 0, 0, "")
"""The choice of a layer that is removed as a whole."""
Obstacle = Callable[[PrunePlan], str | None]
"""(plan) -> why it cannot be run; None = it can."""
RULED = ("ffn_multiple", "kv_heads_multiple", "query_heads_multiple")
"""Options that the rules for the target replace (:meth:`ChoiceOptions.with_rules`)."""


@dataclass(frozen=True)
class ChoiceOptions(Config):
    """The choices of layers.

    Attributes:
        ffn_shares: FFN widths as shares of the dense width, rounded to ``ffn_multiple``; the dense width is always one.
        ffn_multiple: FFN widths are multiples of it (the dense width is always allowed).
        expert_shares: numbers of experts of a mixture as shares of the dense number, in addition to that number.
        head_counts: most different numbers of KV groups that a layer may keep, in addition to skipped attention; evenly
            spaced if the model has more.
        kv_heads_multiple: numbers of KV groups are multiples of it (tensor parallelism).
        query_heads_multiple: numbers of query heads are multiples of it.
        query_heads: also remove query heads from the kept groups, the same number from each.
        skips: blocks that may be skipped: attention or mlp of a kept layer, or a whole layer.
        keep_first: layers at the beginning of the model that are not changed.
        keep_last: layers at its end that are not changed.
        hidden: hidden sizes to try in addition to the dense one.
    """

    ffn_shares: tuple[float, ...] = option((0.875, 0.75, 0.625, 0.5, 0.375, 0.25), above=0, below=1)
    ffn_multiple: int = option(64, at_least=1, at_most=LARGEST_INDEX)
    expert_shares: tuple[float, ...] = option((0.875, 0.75, 0.625, 0.5, 0.375, 0.25), above=0, below=1)
    head_counts: int = option(8, at_least=1, at_most=256)
    kv_heads_multiple: int = option(1, at_least=1, at_most=LARGEST_INDEX)
    query_heads_multiple: int = option(1, at_least=1, at_most=LARGEST_INDEX)
    query_heads: bool = False
    skips: tuple[Skip, ...] = ("attention", "mlp", "layer")
    keep_first: int = option(0, at_least=0, at_most=LARGEST_INDEX)
    keep_last: int = option(0, at_least=0, at_most=LARGEST_INDEX)
    hidden: tuple[int, ...] = option((), at_least=1, at_most=LARGEST_INDEX)

    def with_rules(self, rules: SizeRules) -> Self:
        """Take the multiples of widths from the rules for the target.

        Raises:
            ConfigError: a hidden size is no such multiple.
        """
        step = rules.hidden_multiple
        slow = [size for size in self.hidden if size % step]
        if slow:
            near = sorted({near for size in slow for near in (size // step * step, -(-size // step) * step) if near})
            raise ConfigError(
                f"choices.hidden names {', '.join(map(str, slow))}, where multiples of {step} run well; use "
                f"{', '.join(map(str, near))}, or keep_multiples=true to take any size."
            )
        return replace(self, **{name: getattr(rules, name) for name in RULED})

    @override
    def problems(self) -> Iterator[str]:
        if len(set(self.skips)) != len(self.skips):
            yield f"skips names one twice: {list(self.skips)}."


class Routers(NamedTuple):
    """What the routers of a model need.

    Attributes:
        groups: into which they divide the experts; a layer keeps equally many of each.
        fewest: experts that a layer keeps at least.
    """

    groups: int = 1
    fewest: int = 1

    @classmethod
    def of(cls, config: PretrainedConfig, dense: Sizes) -> Self:
        """Read them off the configuration of a model of these sizes."""
        return cls(expert_groups(config), fewest_experts(config)) if "experts" in dense.axes else cls()

    def nearest(self, share: float, whole: int) -> int:
        """Return the number of experts nearest to a share of ``whole`` that a layer may keep."""
        return max(self.fewest, round(share * whole / self.groups) * self.groups)

    def first(self, count: int, whole: int) -> list[int]:
        """Return the first of the experts of each group, ``count`` of ``whole`` together."""
        size = whole // self.groups
        return [group * size + i for group in range(self.groups) for i in range(count // self.groups)]


NO_GROUPS = Routers()
"""Of a model without mixtures, or one whose routers need nothing."""


@dataclass(frozen=True)
class LayerSpace:
    """The choices of one layer.

    Attributes:
        heads: (query heads, KV heads), the dense pair first; (0, 0) = no attention.
        ffn: FFN widths, the dense one first; 0 = no MLP.
        drop: the layer may be removed as a whole.
        kind: of the layer.
        closed: the layer has a block that is kept whole.
        experts: numbers of experts, the dense one first; 0 = it is no mixture.
    """

    heads: tuple[tuple[int, int], ...]
    ffn: tuple[int, ...]
    drop: bool
    kind: str = DECODER
    closed: bool = False
    experts: tuple[int, ...] = (0,)

    @property
    def dense(self) -> Widths:
        """The choice that changes nothing."""
        return self._choice()

    @property
    def attentions(self) -> tuple[Widths, ...]:
        """The choices that change the attention alone, the dense one first."""
        return tuple(self._choice(heads=pair) for pair in self.heads)

    @property
    def mlps(self) -> tuple[Widths, ...]:
        """The choices that change the width of the MLP alone, or skip it, the dense one first."""
        return tuple(self._choice(ffn=width) for width in self.ffn)

    @property
    def mixtures(self) -> tuple[Widths, ...]:
        """The choices that change the number of experts alone, the dense one first."""
        return tuple(self._choice(experts=count) for count in self.experts)

    @property
    def alone(self) -> tuple[Widths, ...]:
        """The choices that change one of attention, width of the MLP and number of experts."""
        return (*self.attentions[1:], *self.mlps[1:], *self.mixtures[1:])

    def _choice(
        self, heads: tuple[int, int] | None = None, ffn: int | None = None, experts: int | None = None
    ) -> Widths:
        """Return a choice; what is None is dense, and a skipped MLP has no experts."""
        width = self.ffn[0] if ffn is None else ffn
        count = self.experts[0] if experts is None else experts
        return Widths(*(heads or self.heads[0]), width, self.kind, count if width else 0)

    @cached_property
    def widths(self) -> tuple[Widths, ...]:
        """Every choice, the dense one first, :data:`DROPPED` last."""
        pairs = ((pair, ffn) for pair in self.heads for ffn in self.ffn if pair != (0, 0) or ffn or self.closed)
        counts = (self.experts, self.experts[:1])
        kept = tuple(self._choice(pair, ffn, n) for pair, ffn in pairs for n in counts[not ffn])
        return (*kept, DROPPED) if self.drop else kept


@dataclass(frozen=True)
class Space:
    """The choices of a model.

    Attributes:
        identity: the plan that removes nothing.
        layers: one entry for each dense layer.
        hidden: hidden sizes, the dense one first.
        routers: of the mixtures.
    """

    identity: PrunePlan
    layers: tuple[LayerSpace, ...]
    hidden: tuple[int, ...]
    routers: Routers = NO_GROUPS

    @classmethod
    def of(cls, identity: PrunePlan, options: ChoiceOptions = ChoiceOptions(), routers: Routers = NO_GROUPS) -> Self:
        """List all choices that the options and the routers allow.

        Raises:
            ConfigError: more layers are kept than the model has, or a hidden size is larger than the dense one.
        """
        options.validate()
        dense = identity.dense
        if options.keep_first + options.keep_last > dense.num_layers:
            raise ConfigError(
                f"keep_first {options.keep_first} and keep_last {options.keep_last} keep more than the model's "
                f"{dense.num_layers} layers."
            )
        wide = [size for size in options.hidden if size > dense.hidden_size]
        if wide:
            raise ConfigError(
                f"hidden names {wide}; the model's hidden size is {dense.hidden_size}, which is the largest."
            )
        opened = {kind: _open_layer(dense, kind, options, routers) for kind in dense.kinds}
        whole = {
            kind: replace(x, heads=x.heads[:1], ffn=x.ffn[:1], experts=x.experts[:1], drop=False)
            for kind, x in opened.items()
        }
        last = dense.num_layers - options.keep_last
        layers = tuple(
            (opened if options.keep_first <= i < last else whole)[kind] for i, kind in enumerate(dense.layers)
        )
        hidden = sorted({dense.hidden_size, *options.hidden}, reverse=True)
        return cls(identity, layers, tuple(hidden), routers)

    def drop_impossible(self, obstacle: Obstacle) -> Self:
        """Drop the choices that an architecture or engine cannot hold.

        Every hidden size, pair of heads, FFN width and removed layer is tried alone, in a plan that removes nothing
        else. A layer may be removed only if the next one then has the same choices: llama.cpp reads the size of a head
        from the first layer, so that layer 0 is kept if attention can be skipped.
        """
        dense, *smaller = self.hidden
        hidden = (dense, *(size for size in smaller if not obstacle(self.identity.keep_hidden(range(size)))))
        layers = [self._possible(i, layer, obstacle) for i, layer in enumerate(self.layers)]
        for i, following in enumerate(layers[1:]):
            rest = self.identity.drop_layers([i])
            if layers[i].drop and any(obstacle(self._change(rest, i + 1, widths)) for widths in following.alone):
                layers[i] = replace(layers[i], drop=False)
        return replace(self, layers=tuple(layers), hidden=hidden)

    def zero_losses(self) -> Search:
        """Give every choice the loss 0, for a solver that only asks what is feasible."""
        layers = tuple(tuple(Choice(widths, 0.0) for widths in layer.widths) for layer in self.layers)
        return Search(self.identity, layers, dict.fromkeys(self.hidden, 0.0))

    def _possible(self, index: int, layer: LayerSpace, obstacle: Obstacle) -> LayerSpace:
        def fits(widths: Widths) -> bool:
            return widths == layer.dense or not obstacle(self._change(self.identity, index, widths))

        return replace(
            layer,
            heads=tuple(widths[:2] for widths in layer.attentions if fits(widths)),
            ffn=tuple(widths.ffn for widths in layer.mlps if fits(widths)),
            experts=tuple(widths.experts for widths in layer.mixtures if fits(widths)),
            drop=layer.drop and len(self.layers) > 1 and fits(DROPPED),
        )

    def _change(self, plan: PrunePlan, index: int, widths: Widths) -> PrunePlan:
        """Give one layer of a plan other widths, with its first units."""
        if widths == DROPPED:
            return plan.drop_layers([index])
        dense = plan.dense
        each = widths.query_heads // widths.kv_heads if widths.kv_heads else 0
        group_size = dense.units("query_heads", index) // (dense.units("kv_heads", index) or 1)
        units: dict[str, Sequence[int]] = {
            "query_heads": [group * group_size + i for group in range(widths.kv_heads) for i in range(each)],
            "kv_heads": range(widths.kv_heads),
            "ffn": range(widths.ffn),
            "experts": self.routers.first(widths.experts, dense.units("experts", index)),
        }
        return plan.with_layer(index, **{axis: kept for axis, kept in units.items() if dense.units(axis, index)})

    @property
    def dense_widths(self) -> Widths:
        """Widths of a layer of the dense model."""
        return Widths.of(self.identity.layers[0])


def _open_layer(dense: Sizes, kind: str, options: ChoiceOptions, routers: Routers) -> LayerSpace:
    """Return the choices of the layers of a kind. Blocks and axes other than heads, FFN and experts are kept whole."""
    blocks = dense.kinds[kind].values()
    attention = next((block for block in blocks if "query_heads" in block.axes), None)
    ffn = next((block.axes["ffn"] for block in blocks if "ffn" in block.axes), None)
    experts = next((block.axes["experts"] for block in blocks if "experts" in block.axes), 0)
    return LayerSpace(
        ((0, 0),) if attention is None else _heads(attention, options),
        (0,) if ffn is None else _ffn(ffn, options),
        "layer" in options.skips,
        kind,
        any(not block.axes for block in blocks),
        _experts(experts, options, routers),
    )


def _heads(attention: BlockSizes, options: ChoiceOptions) -> tuple[tuple[int, int], ...]:
    """Return pairs (query heads, KV heads) in descending order."""
    total, group = attention.axes["kv_heads"], attention.group_size
    legal = [n for n in range(total, 0, -1) if n % options.kv_heads_multiple == 0 or n == total]
    counts = space_evenly(legal, options.head_counts)
    per_group = range(group, 0, -1) if options.query_heads else (group,)
    every = sorted(((n * each, n) for n in counts for each in per_group), reverse=True)
    pairs = [pair for pair in every if pair == every[0] or pair[0] % options.query_heads_multiple == 0]
    return (*pairs, (0, 0)) if "attention" in options.skips else tuple(pairs)


def _ffn(whole: int, options: ChoiceOptions) -> tuple[int, ...]:
    """Return FFN widths in descending order."""
    multiple = options.ffn_multiple
    legal = {min(whole, max(multiple, round(share * whole / multiple) * multiple)) for share in options.ffn_shares}
    widths = sorted({whole, *legal}, reverse=True)
    return (*widths, 0) if "mlp" in options.skips else tuple(widths)


def _experts(whole: int, options: ChoiceOptions, routers: Routers) -> tuple[int, ...]:
    """Return numbers of experts in descending order; (0,) of a layer that is no mixture."""
    counts = {routers.nearest(share, whole) for share in options.expert_shares}
    return (whole, *sorted((count for count in counts if count < whole), reverse=True))


def space_evenly(values: Sequence[T], most: int) -> list[T]:
    """Pick at most ``most`` values, evenly spaced, the first and (from two on) the last among them."""
    if len(values) <= most:
        return list(values)
    if most == 1:
        return [values[0]]
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


@dataclass(frozen=True)
class LayerScores:
    """Importance of the units of one layer; the smallest are removed first.

    Attributes:
        kv_groups: of every KV head together with its query heads.
        query_heads: of every query head alone.
        ffn: of every FFN channel.
        experts: of every expert.
        groups: into which the router divides the experts.
    """

    kv_groups: tuple[float, ...]
    query_heads: tuple[float, ...]
    ffn: tuple[float, ...]
    experts: tuple[float, ...] = ()
    groups: int = 1

    @cached_property
    def _ffn_sums(self) -> tuple[float, ...]:
        """Sum of the n smallest scores of FFN channels, for every n from 0."""
        return (0.0, *accumulate(sorted(self.ffn)))

    def attention_removed(self, query_heads: int, kv_heads: int) -> float:
        """Sum the scores of the removed units of the attention at a width."""
        if not self.kv_groups:
            return 0.0
        groups = sum(sorted(self.kv_groups)[: len(self.kv_groups) - kv_heads])
        kept = set(self.kept_groups(kv_heads))
        chosen = set(self.kept_heads(query_heads, kv_heads))
        size = len(self.query_heads) // len(self.kv_groups)
        return groups + fsum(s for i, s in enumerate(self.query_heads) if i // size in kept and i not in chosen)

    def ffn_removed(self, ffn: int) -> float:
        """Sum the scores of the removed FFN channels at a width."""
        return self._ffn_sums[len(self.ffn) - ffn]

    def experts_removed(self, count: int) -> float:
        """Sum the scores of the removed experts at a number of them."""
        kept = set(self.kept_experts(count))
        return fsum(score for i, score in enumerate(self.experts) if i not in kept)

    def kept_groups(self, count: int) -> tuple[int, ...]:
        """Return the ``count`` best KV heads, ascending."""
        return _largest(self.kv_groups, count)

    def kept_heads(self, query_heads: int, kv_heads: int) -> tuple[int, ...]:
        """Return the best query heads, the same number in each kept group, ascending."""
        if not kv_heads:
            return ()
        size, each = len(self.query_heads) // len(self.kv_groups), query_heads // kv_heads
        starts = [group * size for group in self.kept_groups(kv_heads)]
        return tuple(at + i for at in starts for i in _largest(self.query_heads[at : at + size], each))

    def kept_ffn(self, count: int) -> tuple[int, ...]:
        """Return the ``count`` best FFN channels, ascending."""
        return _largest(self.ffn, count)

    def kept_experts(self, count: int) -> tuple[int, ...]:
        """Return the best experts, the same number in each group, ``count`` together, ascending."""
        size = len(self.experts) // self.groups
        starts = range(0, size * self.groups, size or 1)
        each = count // self.groups
        return tuple(at + i for at in starts for i in _largest(self.experts[at : at + size], each))


@dataclass(frozen=True)
class UnitScores:
    """Importance of every unit of a model. JSON-able through :meth:`to_dict`.

    Attributes:
        layers: one entry for each dense layer.
        hidden: of every hidden channel; empty if only the dense hidden size is tried.
        method: name of the scoring method.
    """

    layers: tuple[LayerScores, ...]
    hidden: tuple[float, ...] = ()
    method: str = ""

    def _kept(self, index: int, widths: Widths) -> dict[str, tuple[int, ...]]:
        """Return the kept units of one layer at its widths, by axis that it has."""
        scores = self.layers[index]
        heads = {
            "query_heads": scores.kept_heads(widths.query_heads, widths.kv_heads),
            "kv_heads": scores.kept_groups(widths.kv_heads),
        }
        mlp = {"ffn": scores.kept_ffn(widths.ffn)} if scores.ffn else {}
        mlp |= {"experts": scores.kept_experts(widths.experts)} if scores.experts else {}
        return (heads if scores.kv_groups else {}) | mlp

    def plan(self, identity: PrunePlan, widths: Mapping[int, Widths], hidden_size: int | None = None) -> PrunePlan:
        """Plan to keep the best units of some layers at these widths, and the others whole.

        Args:
            identity: of the dense model.
            widths: dense layer index -> widths, :data:`DROPPED` to remove the layer.
            hidden_size: kept hidden channels; None = all.

        Raises:
            BudgetError: a hidden size without scores of the hidden channels.
        """
        layers = [
            identity.layers[i].with_units(identity.dense, self._kept(i, widths[i]))
            if i in widths
            else identity.layers[i]
            for i in range(len(self.layers))
            if widths.get(i) != DROPPED
        ]
        plan = replace(identity, layers=tuple(layer for layer in layers if layer.blocks))
        if hidden_size is None or hidden_size == identity.dense.hidden_size:
            return plan
        if not self.hidden:
            raise BudgetError(f"Hidden channels were not scored; hidden size {hidden_size} needs their scores.")
        return replace(plan, hidden=_largest(self.hidden, hidden_size))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; layers without experts do not name them."""
        data = asdict(self)
        for layer in (layer for layer in data["layers"] if not layer["experts"]):
            del layer["experts"], layer["groups"]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], dense: Sizes) -> Self:
        """Read the data of :meth:`to_dict`.

        Raises:
            BudgetError: they do not fit the model.
        """
        try:
            layers = tuple(
                LayerScores(
                    _floats(x["kv_groups"]),
                    _floats(x["query_heads"]),
                    _floats(x["ffn"]),
                    _floats(x.get("experts", ())),
                    int(x.get("groups", 1)),
                )
                for x in data["layers"]
            )
            scores = cls(layers, _floats(data["hidden"]), str(data["method"]))
        except (KeyError, TypeError, ValueError) as error:
            raise BudgetError(f"The unit scores are damaged ({error!r}); score the model again.") from error
        axes = ("kv_heads", "query_heads", "ffn", "experts")
        sizes = [tuple(dense.units(axis, i) for axis in axes) for i in range(dense.num_layers)]
        fit = [(len(x.kv_groups), len(x.query_heads), len(x.ffn), len(x.experts)) for x in layers] == sizes
        if not fit or len(scores.hidden) not in (0, dense.hidden_size):
            raise BudgetError("The unit scores are of a model of other sizes; score this model.")
        return scores

    def digest(self) -> str:
        """SHA-256 over all scores, hexadecimal."""
        return digest(self.to_dict())


def _floats(values: Sequence[Any]) -> tuple[float, ...]:
    return tuple(map(float, values))


def _largest(scores: Sequence[float], count: int) -> tuple[int, ...]:
    """Return the indices of the ``count`` largest scores, ascending; of equal ones the larger index is kept."""
    order = sorted(range(len(scores)), key=lambda i: (scores[i], i))
    return tuple(sorted(order[len(order) - count :])) if count else ()


@dataclass(frozen=True)
class Choice:
    """A choice of a layer, and the loss of the model by it alone.

    Attributes:
        widths: of the layer.
        loss: at least 0; 0 for the dense widths.
    """

    widths: Widths
    loss: float


@dataclass(frozen=True)
class Search:
    """The choices of a solver with their losses; losses of different layers add up.

    Attributes:
        identity: the plan that removes nothing.
        layers: the choices of each dense layer, the dense one first.
        hidden: hidden size -> loss by it alone; 0 for the dense one.
    """

    identity: PrunePlan
    layers: tuple[tuple[Choice, ...], ...]
    hidden: Mapping[int, float]
