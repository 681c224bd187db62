"""PrunePlan: which layers, hidden channels, heads and FFN channels stay. Data, not code; no torch here.

Every method produces one; :func:`pyprune.compact.compact_` is the only code that cuts, and it reads
nothing else. A plan can be saved, diffed, edited by hand and replayed, and it is embedded in every checkpoint.
Index sets are written as range text ("0-431,440"), so that a plan of a 7B model stays readable.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from pyprune.errors import PlanError

PLAN_VERSION = 1


@dataclass(frozen=True)
class Sizes:
    """Sizes of a dense decoder (counts; head_dim in channels).

    Attributes:
        num_layers: decoder layers.
        hidden_size: channels of the residual stream.
        num_attention_heads: query heads of a layer.
        num_key_value_heads: key/value heads of a layer; query head q reads KV head
            q // (num_attention_heads / num_key_value_heads).
        head_dim: channels of one head.
        intermediate_size: FFN channels of a layer.
        vocab_size: rows of the token embedding.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_attention_heads // self.num_key_value_heads


@dataclass(frozen=True)
class LayerPlan:
    """What stays of one kept layer. An empty tuple means that the whole sub-block is skipped.

    Attributes:
        index: the layer's index in the dense model.
        query_heads: kept query heads, ascending dense indices.
        kv_heads: kept KV heads, ascending dense indices.
        ffn: kept FFN channels, ascending dense indices.
    """

    index: int
    query_heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    ffn: tuple[int, ...]

    @property
    def widths(self) -> tuple[int, int, int]:
        """(query heads, KV heads, FFN channels) that stay."""
        return len(self.query_heads), len(self.kv_heads), len(self.ffn)


@dataclass(frozen=True)
class PrunePlan:
    """What stays of a model. Frozen; the methods below return new plans.

    Attributes:
        model_type: the dense model's ``config.model_type``.
        dense: the dense model's sizes.
        hidden: kept hidden channels, ascending; the same in every layer (the residual stream is shared).
        layers: the kept layers, ascending by index.
    """

    model_type: str
    dense: Sizes
    hidden: tuple[int, ...]
    layers: tuple[LayerPlan, ...]

    @classmethod
    def identity(cls, model_type: str, dense: Sizes) -> Self:
        """The plan that removes nothing."""
        whole = tuple(
            LayerPlan(
                i,
                tuple(range(dense.num_attention_heads)),
                tuple(range(dense.num_key_value_heads)),
                tuple(range(dense.intermediate_size)),
            )
            for i in range(dense.num_layers)
        )
        return cls(model_type, dense, tuple(range(dense.hidden_size)), whole)

    def drop_layers(self, indices: Iterable[int]) -> Self:
        """Remove layers by dense index.

        Raises:
            PlanError: an index that the plan no longer holds.
        """
        gone = set(indices)
        unknown = sorted(gone - {layer.index for layer in self.layers})
        if unknown:
            raise PlanError(f"Layers {unknown} are not in the plan; it holds {self.kept_layers}.")
        return replace(self, layers=tuple(layer for layer in self.layers if layer.index not in gone))

    def keep_hidden(self, indices: Iterable[int]) -> Self:
        """Keep exactly these hidden channels (dense indices)."""
        return replace(self, hidden=tuple(sorted(indices)))

    def with_layer(
        self,
        index: int,
        *,
        query_heads: Sequence[int] | None = None,
        kv_heads: Sequence[int] | None = None,
        ffn: Sequence[int] | None = None,
    ) -> Self:
        """Set what stays of one layer (None leaves that axis as it is).

        Raises:
            PlanError: the layer is not in the plan.
        """
        if index not in self.kept_layers:
            raise PlanError(f"Layer {index} is not in the plan; it holds {self.kept_layers}.")
        changes = {
            name: tuple(sorted(value))
            for name, value in (("query_heads", query_heads), ("kv_heads", kv_heads), ("ffn", ffn))
            if value is not None
        }
        layers = tuple(
            replace(layer, **changes) if layer.index == index else layer  # type: ignore[arg-type]
            for layer in self.layers
        )
        return replace(self, layers=layers)

    @property
    def kept_layers(self) -> tuple[int, ...]:
        """Dense indices of the layers that stay."""
        return tuple(layer.index for layer in self.layers)

    @property
    def removed_layers(self) -> tuple[int, ...]:
        """Dense indices of the layers that go."""
        kept = set(self.kept_layers)
        return tuple(i for i in range(self.dense.num_layers) if i not in kept)

    @property
    def removed_hidden(self) -> tuple[int, ...]:
        """Dense indices of the hidden channels that go."""
        kept = set(self.hidden)
        return tuple(i for i in range(self.dense.hidden_size) if i not in kept)

    @property
    def is_uniform(self) -> bool:
        """True when every kept layer has the same widths and no sub-block is skipped."""
        first = self.layers[0].widths if self.layers else (0, 0, 0)
        return all(layer.widths == first for layer in self.layers) and all(first)

    @property
    def is_identity(self) -> bool:
        """True when nothing goes."""
        return self == PrunePlan.identity(self.model_type, self.dense)

    def validate(self) -> None:
        """Check the plan against itself.

        Raises:
            PlanError: every problem found, in one message.
        """
        problems = self._problems()
        if problems:
            raise PlanError("The plan is not usable:\n" + "\n".join(f"- {p}" for p in problems))

    def _problems(self) -> list[str]:
        dense = self.dense
        if dense.num_key_value_heads < 1 or dense.num_attention_heads % dense.num_key_value_heads:
            return [f"{dense.num_attention_heads} query heads do not divide into {dense.num_key_value_heads} KV heads."]
        problems = _index_problems("hidden", self.hidden, dense.hidden_size)
        problems += _index_problems("layers", self.kept_layers, dense.num_layers)
        if not self.hidden:
            problems.append("no hidden channel is left; keep at least one.")
        if not self.layers:
            problems.append("no layer is left; keep at least one.")
        for layer in self.layers:
            problems += _layer_problems(layer, dense)
        return problems

    def summary(self) -> str:
        """One line for people: what is left of what."""
        dense = self.dense
        parts = [
            f"{len(self.layers)} of {dense.num_layers} layers",
            f"hidden {len(self.hidden)} of {dense.hidden_size}",
            f"query heads {_spread(len(x.query_heads) for x in self.layers)} of {dense.num_attention_heads}",
            f"KV heads {_spread(len(x.kv_heads) for x in self.layers)} of {dense.num_key_value_heads}",
            f"FFN {_spread(len(x.ffn) for x in self.layers)} of {dense.intermediate_size}",
        ]
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data with index sets as range text."""
        return {
            "version": PLAN_VERSION,
            "model_type": self.model_type,
            "dense": asdict(self.dense),
            "hidden": format_ranges(self.hidden),
            "layers": [
                {
                    "index": layer.index,
                    "query_heads": format_ranges(layer.query_heads),
                    "kv_heads": format_ranges(layer.kv_heads),
                    "ffn": format_ranges(layer.ffn),
                }
                for layer in self.layers
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_dict` wrote, and validate it.

        Raises:
            PlanError: a wrong version, a missing or unknown key, a value of the wrong kind, or an
                inconsistent plan.
        """
        if not isinstance(data, Mapping):
            raise PlanError(f"A plan is a JSON object, not {type(data).__name__}.")
        if data.get("version") != PLAN_VERSION:
            raise PlanError(f"Plan version is {data.get('version')!r}; this pyprune reads {PLAN_VERSION}.")
        try:
            plan = cls(
                model_type=_text(data["model_type"], "model_type"),
                dense=Sizes(**{k: _count(v, f"dense.{k}") for k, v in data["dense"].items()}),
                hidden=parse_ranges(data["hidden"]),
                layers=tuple(
                    LayerPlan(
                        index=_count(layer["index"], "layer index"),
                        query_heads=parse_ranges(layer["query_heads"]),
                        kv_heads=parse_ranges(layer["kv_heads"]),
                        ffn=parse_ranges(layer["ffn"]),
                    )
                    for layer in data["layers"]
                ),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"The plan is damaged: missing or unknown entry {error}.") from error
        plan.validate()
        return plan

    def to_json(self) -> str:
        """The plan as indented JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read :meth:`to_json` text.

        Raises:
            PlanError: not JSON, or not a valid plan.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"The plan is not valid JSON: {error}.") from error
        return cls.from_dict(data)


def kv_head_of(query_head: int, dense: Sizes) -> int:
    """The KV head that a query head reads (consecutive query heads share one)."""
    return query_head // dense.group_size


def format_ranges(indices: Sequence[int]) -> str:
    """Write ascending indices as "0-3,7"; the empty set is ""."""
    parts: list[str] = []
    start = 0
    for i in range(1, len(indices) + 1):
        if i == len(indices) or indices[i] != indices[i - 1] + 1:
            first, last = indices[start], indices[i - 1]
            parts.append(str(first) if first == last else f"{first}-{last}")
            start = i
    return ",".join(parts)


MAX_INDEX = 10_000_000
"""Largest index a plan may name: no model is wider, and a damaged range must not fill the memory."""


def parse_ranges(text: str) -> tuple[int, ...]:
    """Read "0-3,7" back.

    Raises:
        PlanError: text that is not a list of ranges, or a range beyond :data:`MAX_INDEX`.
    """
    if not isinstance(text, str):
        raise PlanError(f"An index set is written as text like '0-3,7', not {text!r}.")
    indices: list[int] = []
    for part in filter(None, text.replace(" ", "").split(",")):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise PlanError(f"{part!r} is not an index or a range like '0-3'.")
        low, high = int(first), int(last if dash else first)
        if high < low or high > MAX_INDEX:
            raise PlanError(f"The range {part!r} must run upwards and end at most at {MAX_INDEX}.")
        indices.extend(range(low, high + 1))
    return tuple(indices)


def _index_problems(name: str, indices: Sequence[int], size: int) -> list[str]:
    if list(indices) != sorted(set(indices)):
        return [f"{name}: indices must be ascending and unique."]
    outside = [i for i in indices if not 0 <= i < size]
    return [f"{name}: {outside[:5]} lie outside 0..{size - 1}."] if outside else []


def _layer_problems(layer: LayerPlan, dense: Sizes) -> list[str]:
    where = f"layer {layer.index}"
    problems = _index_problems(f"{where} query_heads", layer.query_heads, dense.num_attention_heads)
    problems += _index_problems(f"{where} kv_heads", layer.kv_heads, dense.num_key_value_heads)
    problems += _index_problems(f"{where} ffn", layer.ffn, dense.intermediate_size)
    if problems:
        return problems
    per_group = dict.fromkeys(layer.kv_heads, 0)
    for head in layer.query_heads:
        kv = kv_head_of(head, dense)
        if kv not in per_group:
            return [f"{where}: query head {head} reads KV head {kv}, which is removed."]
        per_group[kv] += 1
    if len(set(per_group.values())) > 1 or 0 in per_group.values():
        counts = ", ".join(f"KV head {kv}: {n}" for kv, n in per_group.items())
        problems.append(f"{where}: every kept KV head needs equally many query heads ({counts}).")
    if not layer.query_heads and not layer.ffn:
        problems.append(f"{where}: both sub-blocks are empty; drop the layer instead.")
    return problems


def _spread(values: Iterable[int]) -> str:
    found = sorted(set(values))
    if not found:
        return "none"
    return str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"


def _count(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise PlanError(f"{name} is {value!r}; expected a whole number >= 0.")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise PlanError(f"{name} is {value!r}; expected text.")
    return value
