"""The options that all scoring methods share; those of one method are next to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from typing_extensions import override

from pyprune.config.base import LARGEST_INDEX, Config, option
from pyprune.config.train import LARGEST_BATCH

ScoreAxis = Literal["heads", "ffn", "hidden"]


@dataclass(frozen=True)
class ScoreConfig(Config):
    """Options of every scoring method: which structures are open, and how scores become a plan.

    The goal is ``ratio`` (share of all parameters to remove), or the counts ``heads``, ``ffn`` and ``hidden``, which
    win over it.

    Attributes:
        axes: the axes whose structures may be removed.
        further_axes: axes (heads or ffn) that are open too if the others would lose too much without them (a note says
            so). Counts win over it.
        aggregation: how the structures of a group (one per matrix) become the group's score.
        ranking: global (one order over all open layers) or local (the same count in every open layer).
        normalise: numbers that a global order compares: none (the raw scores, as in the papers), size (score per
            removed parameter), axis (score over the mean of its axis in all open layers) or layer (score over the mean
            of its layer and axis).
        heads_unit: kv_group (a KV head with all its query heads) or query_head (as many query heads of every KV
            group of a layer; KV heads are kept).
        heads: query heads that are kept in every open layer; None = by the ratio.
        ffn: FFN channels that are kept in every open layer; None = by the ratio.
        hidden: hidden channels that are kept; None = by the ratio.
        first_layer: first open layer; layers before it keep their heads and FFN.
        last_layer: last open layer, inclusive; negative counts from the end (-1 is the last).
        layers: the open layers, listed (instead of first_layer and last_layer).
        closed_ends: layers at each end of the model that keep their heads and FFN; fewer where the layers between them
            would lose too much (a note says how many). first_layer, last_layer, layers, uniform and counts win over it.
        uniform: give every layer the same widths, so that a stock architecture fits. All layers are then open and
            ranking is local, whatever the options above are; heads are removed only in numbers that such an
            architecture takes.
        iterations: rounds; each removes its share of the goal and scores the masked model again.
        ffn_multiple: multiple of the resulting FFN widths; channels are removed in bundles.
        allow_empty: a layer may lose its last unit of an axis, and the sub-block is skipped.
        batch_size: sequences in one forward and backward pass; None = all samples at once. More than one pass a step
            holds the mean gradient of all open parameters.
        layerwise: take gradients one layer at a time (False holds those of all open parameters at once).
    """

    axes: tuple[ScoreAxis, ...] = ("heads", "ffn")
    further_axes: tuple[Literal["heads", "ffn"], ...] = ()
    aggregation: Literal["sum", "mean", "max", "prod"] = "sum"
    ranking: Literal["local", "global"] = "global"
    normalise: Literal["none", "size", "axis", "layer"] = "none"
    heads_unit: Literal["kv_group", "query_head"] = "kv_group"
    heads: int | None = option(None, at_least=1, at_most=LARGEST_INDEX)
    ffn: int | None = option(None, at_least=1, at_most=LARGEST_INDEX)
    hidden: int | None = option(None, at_least=1, at_most=LARGEST_INDEX)
    first_layer: int = option(0, at_least=0, at_most=LARGEST_INDEX)
    last_layer: int = option(-1, at_least=-LARGEST_INDEX, at_most=LARGEST_INDEX)
    layers: tuple[int, ...] = option((), at_least=0, at_most=LARGEST_INDEX)
    closed_ends: int = option(0, at_least=0, at_most=LARGEST_INDEX)
    uniform: bool = False
    iterations: int = option(1, at_least=1, at_most=1_000)
    ffn_multiple: int = option(1, at_least=1, at_most=LARGEST_INDEX)
    allow_empty: bool = False
    batch_size: int | None = option(None, at_least=1, at_most=LARGEST_BATCH)
    layerwise: bool = True

    @property
    def counts(self) -> dict[ScoreAxis, int]:
        """Return the counts that are set, by axis."""
        counts: dict[ScoreAxis, int | None] = {"heads": self.heads, "ffn": self.ffn, "hidden": self.hidden}
        return {axis: count for axis, count in counts.items() if count is not None}

    @property
    def names_open_layers(self) -> bool:
        """True if other options decide which layers are open, so that closed_ends is not read."""
        named = (self.layers, self.first_layer, self.last_layer) != ((), 0, -1)
        return named or self.uniform or bool(self.counts) or "hidden" in self.axes

    @property
    def is_local(self) -> bool:
        """True if every open layer loses the same count."""
        return self.ranking == "local" or self.uniform

    @property
    def idle(self) -> dict[str, str]:
        """Return options that the values of others switch off: name -> the option and the value that do it."""
        readers = {"heads_unit": {"heads"}, "ffn_multiple": {"ffn"}, "allow_empty": {"heads", "ffn"}}
        closed = [name for name, axes in readers.items() if axes.isdisjoint((*self.axes, *self.further_axes))]
        ends = {"closed_ends": "options that name the open layers"} if self.names_open_layers else {}
        further = {"further_axes": "the counts"} if self.counts else {}
        return dict.fromkeys(closed, f"axes {list(self.axes)}") | ends | further

    @override
    def problems(self) -> Iterator[str]:
        if not self.axes:
            yield "axes is empty; name at least one of heads, ffn, hidden."
        if len(set(self.axes)) != len(self.axes):
            yield f"axes names one twice: {list(self.axes)}."
        yield from self._goal_problems()
        if self.layers and (self.first_layer, self.last_layer) != (0, -1):
            yield "layers is given together with first_layer or last_layer; use one way of naming the open layers."

    def _goal_problems(self) -> Iterator[str]:
        counts, axes = set(self.counts), set(self.axes)
        if counts and counts != axes:
            yield (
                f"counts are given for {sorted(counts)} and axes is {sorted(axes)}; give one count for every axis, and "
                "leave the other axes out."
            )
        if counts and not self.is_local:
            yield "counts fix the kept size of every open layer, which is a local ranking; set ranking to local."
        if not self.is_local and "hidden" in axes and len(axes) != 1:
            yield (
                "a global ranking cannot compare hidden channels, which all layers share, with heads or ffn; "
                "set ranking to local, or use axes [hidden] alone."
            )
        if set(self.axes) == {"hidden"} and (self.layers, self.first_layer, self.last_layer) != ((), 0, -1):
            yield "axes is ['hidden'], which all layers share; leave layers, first_layer and last_layer out."
        if self.normalise != "none" and self.ranking != "global":
            yield (
                f"normalise is {self.normalise!r}, which only a global ranking reads; set it to none, or ranking to "
                "global."
            )
        if self.normalise != "none" and self.aggregation == "prod":
            yield (
                f"normalise is {self.normalise!r} and aggregation is 'prod': a product is kept as its logarithm, which "
                "cannot be divided; use normalise none, or another aggregation."
            )
