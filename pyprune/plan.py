"""PrunePlan: which layers, hidden channels, heads and FFN channels stay. Data, not code; no torch here.

Every method produces one; :func:`pyprune.cut.compact.compact_` is the only code that cuts, and it reads
nothing else. A plan can be saved, compared, edited by hand and replayed, and it is embedded in every checkpoint.
Index sets are written as range text ("0-431,440"), so that a plan of a 7B model stays readable.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from typing import Any, Self

from pyprune.errors import PlanError, did_you_mean, shown

PLAN_VERSION = 1
MAX_LAYERS = 4096
MAX_INDEX = 10_000_000
"""Largest index a plan may name: no model is wider, and a damaged range must not fill the memory."""
MAX_INDICES = 20_000_000
"""Most layers times widths of a model that a plan may be for; one of 400 billion parameters needs 7 million."""
PLAN_KEYS = ("version", "model_type", "dense", "hidden", "layers")
LAYER_KEYS = ("index", "query_heads", "kv_heads", "ffn")


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
    """The kept parts of one layer. An empty tuple means that the whole sub-block is skipped.

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
    """The kept parts of a model. Frozen; the methods below return new plans.

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
        """Set the kept parts of one layer (None leaves that axis as it is).

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
        """Dense indices of the layers that are removed."""
        kept = set(self.kept_layers)
        return tuple(i for i in range(self.dense.num_layers) if i not in kept)

    @property
    def removed_hidden(self) -> tuple[int, ...]:
        """Dense indices of the hidden channels that are removed."""
        kept = set(self.hidden)
        return tuple(i for i in range(self.dense.hidden_size) if i not in kept)

    @property
    def is_uniform(self) -> bool:
        """True when every kept layer has the same widths and no sub-block is skipped."""
        first = self.layers[0].widths if self.layers else (0, 0, 0)
        return all(layer.widths == first for layer in self.layers) and all(first)

    @property
    def is_identity(self) -> bool:
        """True when nothing is removed."""
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
            f"query heads {spread(len(x.query_heads) for x in self.layers)} of {dense.num_attention_heads}",
            f"KV heads {spread(len(x.kv_heads) for x in self.layers)} of {dense.num_key_value_heads}",
            f"FFN {spread(len(x.ffn) for x in self.layers)} of {dense.intermediate_size}",
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
        version = data.get("version") if isinstance(data, Mapping) else None
        if isinstance(data, Mapping) and version != PLAN_VERSION:
            raise PlanError(f"Plan version is {shown(version)}; this pyprune reads {PLAN_VERSION}.")
        _check_keys(data, PLAN_KEYS, "the plan")
        dense = _sizes(data["dense"])
        plan = cls(
            model_type=_text(data["model_type"], "model_type"),
            dense=dense,
            hidden=parse_ranges(data["hidden"], dense.hidden_size, "hidden"),
            layers=_layers(data["layers"], dense),
        )
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
        except (ValueError, RecursionError) as error:
            raise PlanError(f"The plan is not valid JSON: {str(error)[:300]}.") from error
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


def parse_ranges(text: str, size: int = MAX_INDEX + 1, name: str = "an index set") -> tuple[int, ...]:
    """Read "0-3,7" back; nothing is expanded before all of it is known to be ascending and within the bounds.

    Args:
        text: what :func:`format_ranges` wrote.
        size: indices must be smaller.
        name: what the indices are of, for messages.

    Raises:
        PlanError: text that is not a list of ascending ranges, or an index that is not below ``size``.
    """
    if not isinstance(text, str):
        raise PlanError(f"{name}: index sets are written as text like '0-3,7', not {shown(text)}.")
    runs: list[range] = []
    for part in filter(None, text.replace(" ", "").split(",")):
        run = _run(part, name)
        if run.stop > size:
            raise PlanError(f"{name}: {shown(part)} lies outside 0..{size - 1}.")
        if runs and run.start < runs[-1].stop:
            raise PlanError(f"{name}: indices must be ascending and unique; {shown(part)} is not.")
        runs.append(run)
    return tuple(chain.from_iterable(runs))


def _run(part: str, name: str) -> range:
    first, dash, last = part.partition("-")
    numbers = (first, last) if dash else (first, first)
    if not all(n.isascii() and n.isdecimal() for n in numbers):
        raise PlanError(f"{name}: {shown(part)} is not an index or a range like '0-3'.")
    if max(map(len, numbers)) > 20:
        raise PlanError(f"{name}: {shown(part)} ends beyond {MAX_INDEX}.")
    low, high = map(int, numbers)
    if high < low:
        raise PlanError(f"{name}: the range {shown(part)} must run upwards.")
    return range(low, high + 1)


def _sizes(data: Any) -> Sizes:
    names = [field.name for field in fields(Sizes)]
    _check_keys(data, names, "dense")
    sizes = Sizes(**{name: _count(data[name], f"dense.{name}", least=1) for name in names})
    units = sizes.num_attention_heads + sizes.num_key_value_heads + sizes.intermediate_size
    whole = sizes.num_layers * units + sizes.hidden_size + sizes.num_attention_heads * sizes.head_dim
    if sizes.num_layers > MAX_LAYERS or whole > MAX_INDICES:
        raise PlanError(
            f"The plan is for {sizes.num_layers} layers of {units} heads and FFN channels; at most {MAX_LAYERS} layers "
            f"and {MAX_INDICES:,} indices in all are read. The plan is damaged."
        )
    return sizes


def _layers(data: Any, dense: Sizes) -> tuple[LayerPlan, ...]:
    if not isinstance(data, list):
        raise PlanError(f"layers is {shown(data)}; expected a list with one JSON object for every layer that stays.")
    before = -1
    for entry in data:
        _check_keys(entry, LAYER_KEYS, "a layer")
        index = _count(entry["index"], "layer index")
        if not before < index < dense.num_layers:
            raise PlanError(
                f"layers: {index} comes after {before}; indices must be ascending, unique and below {dense.num_layers}."
            )
        before = index
    return tuple(_layer(entry, dense) for entry in data)


def _layer(entry: Mapping[str, Any], dense: Sizes) -> LayerPlan:
    where = f"layer {entry['index']}"
    return LayerPlan(
        index=entry["index"],
        query_heads=parse_ranges(entry["query_heads"], dense.num_attention_heads, f"{where} query_heads"),
        kv_heads=parse_ranges(entry["kv_heads"], dense.num_key_value_heads, f"{where} kv_heads"),
        ffn=parse_ranges(entry["ffn"], dense.intermediate_size, f"{where} ffn"),
    )


def _check_keys(data: Any, known: Sequence[str], where: str) -> None:
    """Every key must be there, and no other: an entry with a mistake in its name would be passed over silently."""
    if not isinstance(data, Mapping):
        raise PlanError(f"{where} is {shown(data)}; expected a JSON object with {', '.join(known)}.")
    for key in data:
        if key not in known:
            raise PlanError(did_you_mean(str(key)[:80], known, f"entry of {where}"))
    missing = [key for key in known if key not in data]
    if missing:
        raise PlanError(f"The plan is damaged: {where} lacks {', '.join(missing)}.")


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


def spread(values: Iterable[int]) -> str:
    """Sizes of layers for people: one number where they are alike, else the least and the most ("16-48")."""
    found = sorted(set(values))
    if not found:
        return "none"
    return str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"


def _count(value: Any, name: str, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= MAX_INDEX:
        raise PlanError(f"{name} is {shown(value)}; expected a whole number from {least} to {MAX_INDEX}.")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or len(value) > 100:
        raise PlanError(f"{name} is {shown(value)}; expected a short text.")
    return value
