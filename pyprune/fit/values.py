"""What each choice of each layer loses: measured for a few anchors, interpolated by the scores. No torch here.

For a block at a width, the loss is that of the whole model with this block alone changed (:mod:`pyprune.fit.trials`
measures it). Between two measured widths of a block the loss runs linearly in the sum of the scores of the units that
are removed, and never falls when more goes: the scorer says how fast the loss grows with each unit, the anchors say how
much it is in the end, which no sum of scores does. The loss of a layer is the sum of its attention's and its MLP's; a
layer that goes as a whole has a measurement of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from typing_extensions import override

from pyprune.config.base import LARGEST_WEIGHT, Config, option
from pyprune.errors import BudgetError
from pyprune.fit.choices import DROPPED, Choice, LayerScores, LayerSpace, Search, Space, UnitScores, spaced
from pyprune.fit.quantities import Widths

Value = Literal["kl", "cross_entropy"]
_TIE = 1e-9
"""What a share of the units counts for beside that of the scores, so that more removed units are always more."""


RIDGES = (1e-2, 1.0)
"""Of the reconstruction behind a change, where none are given."""


@dataclass(frozen=True)
class ValueOptions(Config):
    """How losses of single blocks are measured.

    Attributes:
        judged: share of the sequences on which the loss is measured; the others are reconstructed on.
        stride: the loss is measured at every n-th position of a sequence; a position costs as much as several layers
            where the vocabulary is large.
        ffn_anchors: FFN widths that are measured, as shares of the dense width (the nearest ones of the choices).
        head_anchors: most numbers of KV groups that are measured for a layer, beside skipped attention.
        reconstruct: whether the writer behind a change is solved to follow the dense stream before the loss is
            measured, as the cut itself will be; without it, blocks whose loss can be repaired look too important.
        ridges: candidates for the ridge of that.
        dtype: that the layers compute in: float32, bfloat16 (autocast), or auto: bfloat16 where the device multiplies
            faster in it, else float32. bfloat16 rounds: losses below about 1e-3 nats are noise then.
    """

    judged: float = option(1 / 3, above=0, below=1)
    stride: int = option(4, at_least=1, at_most=4096)
    ffn_anchors: tuple[float, ...] = option((0.75, 0.5, 0.25), above=0, below=1)
    head_anchors: int = option(4, at_least=1, at_most=256)
    reconstruct: bool = True
    ridges: tuple[float, ...] = option(RIDGES, at_least=0, at_most=LARGEST_WEIGHT)
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"

    @override
    def problems(self) -> Iterator[str]:
        if not self.ridges:
            yield "ridges is empty; give one or more numbers from 0 up."
        if not self.reconstruct and self.ridges != RIDGES:
            yield "ridges would do nothing: they are of the reconstruction, which reconstruct=false leaves out."

    def measuring(self) -> dict[str, Any]:
        """The options that change a measured loss; which anchors are measured does not."""
        return {k: v for k, v in self.to_dict().items() if k not in ("ffn_anchors", "head_anchors")}


@dataclass(frozen=True)
class BlockLoss:
    """What the model loses by one change.

    Attributes:
        layer: dense index; None for the hidden size, whose loss is of the whole model.
        widths: the layer's widths, all but one block the dense ones; :data:`DROPPED` = the layer goes.
        hidden_size: of the model.
        kl: mean KL divergence of the changed model's next-token distribution from the dense one's, nats a token.
        cross_entropy: the changed model's mean cross-entropy minus the dense one's, nats a token.
    """

    layer: int | None
    widths: Widths
    hidden_size: int
    kl: float
    cross_entropy: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        widths = [self.widths.query_heads, self.widths.kv_heads, self.widths.ffn]
        return {
            "layer": self.layer,
            "widths": widths,
            "hidden_size": self.hidden_size,
            "kl": self.kl,
            "cross_entropy": self.cross_entropy,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BlockLoss:
        """Read what :meth:`to_dict` gave.

        Raises:
            KeyError, TypeError, ValueError: it is damaged.
        """
        layer = None if data["layer"] is None else int(data["layer"])
        query_heads, kv_heads, ffn = map(int, data["widths"])
        numbers = float(data["kl"]), float(data["cross_entropy"])
        return cls(layer, Widths(query_heads, kv_heads, ffn), int(data["hidden_size"]), *numbers)


@dataclass(frozen=True)
class BlockLosses:
    """Measured losses of single changes. JSON-able through :meth:`to_dict`.

    Attributes:
        entries: every measurement.
        cross_entropy: of the dense model on the judged text, nats a token.
        positions: judged positions.
        identity: what was measured on what, and how (digests and options).
        seconds: wall time of this run's measurements.
        reused: how many entries were there from an earlier run.
    """

    entries: tuple[BlockLoss, ...]
    cross_entropy: float
    positions: int
    identity: Mapping[str, Any]
    seconds: float = 0.0
    reused: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        own = {name: value for name, value in vars(self).items() if name not in ("entries", "identity")}
        return {**own, "identity": dict(self.identity), "entries": [entry.to_dict() for entry in self.entries]}


def anchors_of(layer: LayerSpace, options: ValueOptions) -> tuple[Widths, ...]:
    """The changes of one layer that are measured, the smallest first in each block.

    Args:
        layer: what it may become.
        options: how many.
    """
    dense = layer.widths[0]
    pairs = [pair for pair in layer.heads[1:] if pair != (0, 0)]
    heads = [*spaced(pairs[::-1], options.head_anchors)[::-1], *((0, 0) for pair in layer.heads if pair == (0, 0))]
    narrow = [ffn for ffn in layer.ffn[1:] if ffn]
    wide = [min(narrow, key=lambda ffn: abs(ffn - share * dense.ffn)) for share in options.ffn_anchors if narrow]
    ffn = [*sorted({*wide, *narrow[-1:]}, reverse=True), *(0 for width in layer.ffn if not width)]
    found = [Widths(queries, groups, dense.ffn) for queries, groups in heads]
    found += [Widths(dense.query_heads, dense.kv_heads, width) for width in ffn]
    return (*found, DROPPED) if layer.drop else tuple(found)


def search_of(losses: BlockLosses, scores: UnitScores, space: Space, value: Value = "kl") -> Search:
    """What a solver chooses from: every choice of every layer with its loss.

    Args:
        losses: of the anchors.
        scores: of all units.
        space: the choices.
        value: kl or cross_entropy. KL is the default: it is never negative, sees every change of the distribution and
            not only that of the one token that came, and so has a small fraction of the variance on the same text; to
            second order it grows with the square of a change of the logits, so that independent changes of different
            blocks add up. The difference of cross-entropies can be negative by chance on little text, and a solver
            takes that for a gain. On SmolLM2-135M the 240 losses of two draws of 567 positions had a rank correlation
            of 0.98 as KL and of 0.86 as differences of cross-entropy, 3 to 6 % of which were negative.

    Raises:
        BudgetError: a loss that the choices need was not measured.
    """
    measured = {(e.layer, e.widths): _of(e, value) for e in losses.entries if e.layer is not None}
    layers = tuple(
        _choices(i, layer, scores.layers[i], {w: loss for (at, w), loss in measured.items() if at == i})
        for i, layer in enumerate(space.layers)
    )
    hidden = {e.hidden_size: _of(e, value) for e in losses.entries if e.layer is None}
    missing = [size for size in space.hidden[1:] if size not in hidden]
    if missing:
        raise BudgetError(
            f"The loss of the hidden sizes {missing} was not measured; measure the losses again with them."
        )
    return Search(space.identity, layers, {space.hidden[0]: 0.0} | {size: hidden[size] for size in space.hidden[1:]})


def _of(entry: BlockLoss, value: Value) -> float:
    return entry.kl if value == "kl" else entry.cross_entropy


def _choices(
    index: int, layer: LayerSpace, scores: LayerScores, measured: Mapping[Widths, float]
) -> tuple[Choice, ...]:
    """Every choice of a layer with its loss."""
    dense = layer.widths[0]
    heads = {Widths(*pair, dense.ffn): scores.attention_removed(*pair) for pair in layer.heads}
    ffn = {Widths(dense.query_heads, dense.kv_heads, width): scores.ffn_removed(width) for width in layer.ffn}
    found = {
        **_losses(heads, measured, f"the attention of layer {index}", lambda w: w.query_heads + _TIE * w.kv_heads),
        **_losses(ffn, measured, f"the MLP of layer {index}", lambda w: w.ffn),
    }
    if layer.drop and DROPPED not in measured:
        raise _unmeasured(f"layer {index} as a whole")

    def loss(widths: Widths) -> float:
        if widths == DROPPED:
            return measured[DROPPED]
        attention = Widths(widths.query_heads, widths.kv_heads, dense.ffn)
        return found[attention] + found[Widths(dense.query_heads, dense.kv_heads, widths.ffn)]

    return tuple(Choice(widths, loss(widths)) for widths in layer.widths)


def _losses(
    removed: Mapping[Widths, float], measured: Mapping[Widths, float], what: str, units: Callable[[Widths], float]
) -> dict[Widths, float]:
    """The loss of every width of a block; that of a skipped one is the measured one, whatever the others are.

    Args:
        removed: widths, the dense ones first -> sum of the scores of what goes.
        measured: loss of the anchors.
        what: the block, for messages.
        units: how many units stay at a width; 0 = the block is skipped.
    """
    dense = next(iter(removed))
    whole = max(removed.values()) or 1.0
    at = {w: score / whole + _TIE * (1 - units(w) / units(dense)) for w, score in removed.items()}
    skipped = [w for w in removed if not units(w)]
    between = [w for w in removed if w != dense and units(w)]
    anchors = sorted((w for w in between if w in measured), key=lambda w: at[w])
    if any(w not in measured for w in skipped) or (between and not anchors and not skipped):
        raise _unmeasured(what)
    risen = monotone([measured[w] for w in anchors])
    points = [(0.0, 0.0), *zip([at[w] for w in anchors], risen, strict=True)]
    points += [(at[w], max(points[-1][1], measured[w])) for w in skipped if at[w] > points[-1][0]]
    xs, ys = np.array(points).T
    found = {w: float(np.interp(at[w], xs, ys)) for w in between}
    return {dense: 0.0, **found, **{w: measured[w] for w in skipped}}


def _unmeasured(what: str) -> BudgetError:
    return BudgetError(f"The loss of {what} was not measured for these choices; measure the losses again.")


def monotone(values: Sequence[float]) -> list[float]:
    """The nearest sequence, in least squares, that never falls and is never below 0 (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, many = pools.pop()
            mean, count = (mean * count + before * many) / (count + many), count + many
        pools.append((mean, count))
    return [max(0.0, mean) for mean, count in pools for _ in range(count)]
