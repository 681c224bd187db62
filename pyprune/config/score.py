"""What the options of all scoring methods share; what one of them has alone is next to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from typing_extensions import override

from pyprune.config.base import LARGEST_INDEX, Config, _require, option
from pyprune.config.train import LARGEST_BATCH

ScoreAxis = Literal["heads", "ffn", "hidden"]


@dataclass(frozen=True)
class ScoreConfig(Config):
    """What every scoring method shares: which structures are open, how scores become a plan.

    The goal is ``ratio`` (share of all parameters to remove), or the counts ``heads``, ``ffn`` and ``hidden``, which
    win over it.

    Attributes:
        axes: the axes whose structures may go.
        aggregation: how the structures of a group (one per matrix) become the group's score.
        ranking: global (one order over all open layers) or local (the same count in every open layer).
        normalise: what a global order compares: none (the scores as they are, the papers' way), size (score per
            removed parameter), axis (score over the mean of its axis in all open layers) or layer (score over the mean
            of its layer and axis).
        heads_unit: kv_group (a KV head with all its query heads) or query_head (as many query heads of every KV
            group of a layer; KV heads stay).
        heads: query heads that stay in every open layer; None = by the ratio.
        ffn: FFN channels that stay in every open layer; None = by the ratio.
        hidden: hidden channels that stay; None = by the ratio.
        first_layer: first open layer; layers before it keep their heads and FFN.
        last_layer: last open layer, inclusive; negative counts from the end (-1 is the last).
        layers: the open layers, listed (instead of first_layer and last_layer).
        uniform: give every layer the same widths, so that a stock architecture fits: all layers are open and ranking
            is local, whatever the options above say; of the numbers of heads only those go that such an architecture
            takes.
        iterations: rounds; each removes its share of the goal and scores the masked model anew.
        ffn_multiple: FFN widths that result are multiples of this; channels go in bundles.
        allow_empty: a layer may lose its last unit of an axis, and the sub-block is skipped.
        batch_size: sequences in one forward and backward pass; None = all samples at once. More than one pass a step
            holds the mean gradient of all open parameters.
        layerwise: take gradients one layer at a time (False holds those of all open parameters at once).
    """

    axes: tuple[ScoreAxis, ...] = ("heads", "ffn")
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
    uniform: bool = False
    iterations: int = option(1, at_least=1, at_most=1_000)
    ffn_multiple: int = option(1, at_least=1, at_most=LARGEST_INDEX)
    allow_empty: bool = False
    batch_size: int | None = option(None, at_least=1, at_most=LARGEST_BATCH)
    layerwise: bool = True

    @property
    def counts(self) -> dict[ScoreAxis, int]:
        """The counts that were given, by axis."""
        given: dict[ScoreAxis, int | None] = {"heads": self.heads, "ffn": self.ffn, "hidden": self.hidden}
        return {axis: count for axis, count in given.items() if count is not None}

    @property
    def is_local(self) -> bool:
        """Whether every open layer loses the same count."""
        return self.ranking == "local" or self.uniform

    @property
    def idle(self) -> dict[str, str]:
        """Names of options that do nothing beside the values of others -> the option and the value that are why."""
        readers = {"heads_unit": {"heads"}, "ffn_multiple": {"ffn"}, "allow_empty": {"heads", "ffn"}}
        closed = [name for name, axes in readers.items() if axes.isdisjoint(self.axes)]
        return dict.fromkeys(closed, f"axes {list(self.axes)}")

    @override
    def problems(self) -> list[str]:
        found: list[str] = []
        _require(bool(self.axes), "axes is empty; name at least one of heads, ffn, hidden.", found)
        _require(len(set(self.axes)) == len(self.axes), f"axes names one twice: {list(self.axes)}.", found)
        found += self._goal_problems()
        _require(
            not self.layers or (self.first_layer, self.last_layer) == (0, -1),
            "layers is given together with first_layer or last_layer; use one way of naming the open layers.",
            found,
        )
        return found

    def _goal_problems(self) -> list[str]:
        found: list[str] = []
        counts, axes = set(self.counts), set(self.axes)
        if counts and counts != axes:
            found.append(
                f"counts are given for {sorted(counts)} and axes is {sorted(axes)}; give one count for every axis, and "
                "leave the other axes out."
            )
        _require(
            not counts or self.is_local,
            "counts say what stays in every open layer, which is a local ranking; set ranking to local.",
            found,
        )
        _require(
            self.is_local or "hidden" not in axes or len(axes) == 1,
            "a global ranking cannot compare hidden channels, which all layers share, with heads or ffn; "
            "set ranking to local, or use axes [hidden] alone.",
            found,
        )
        _require(
            set(self.axes) != {"hidden"} or (self.layers, self.first_layer, self.last_layer) == ((), 0, -1),
            "axes is ['hidden'], whose channels run through every layer; leave layers, first_layer and last_layer out.",
            found,
        )
        _require(
            self.normalise == "none" or self.ranking == "global",
            f"normalise is {self.normalise!r}, which only a global ranking reads; set it to none, or set ranking to "
            "global.",
            found,
        )
        _require(
            self.normalise == "none" or self.aggregation != "prod",
            f"normalise is {self.normalise!r} and aggregation is 'prod': a product is kept as its logarithm, which "
            "cannot be divided; use normalise none, or another aggregation.",
            found,
        )
        return found
