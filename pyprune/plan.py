"""PrunePlan: which layers, hidden channels, blocks of layers, heads and FFN channels are kept. Data; no torch here.

Every method produces one; :func:`pyprune.cut.compact.compact_` is the only code that cuts, and it reads
nothing else. A plan can be saved, compared, edited by hand and replayed, and it is embedded in every checkpoint.
Index sets are written as range text ("0-431,440"), so that a plan of a 7B model stays readable.

A layer consists of blocks ("attention", "mlp"), and a block owns axes ("query_heads", "kv_heads", "ffn"). A block is
removed if its layer does not name it; a block that is kept names all its axes, none of them empty.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Self

from pyprune.errors import PlanError, UnsupportedModelError, did_you_mean, shown

PLAN_VERSION = 2
"""Version of the text that is written. Version 1, of models whose layers are all attention and MLP, is read too."""
MAX_LAYERS = 4096
MAX_INDEX = 10_000_000
"""Largest index a plan may name: no model is wider, and a damaged range must not fill the memory."""
MAX_INDICES = 20_000_000
"""Most layers times widths of a model that a plan may be for; one of 400 billion parameters needs 7 million."""
PLAN_KEYS = ("version", "model_type", "dense", "hidden", "layers")
LAYER_KEYS = ("index", "kind", "blocks")
DECODER = "decoder"
"""The kind of all layers of a model whose layers are alike."""
HEAD_DIM = "head_dim"
AXIS_NAMES = {"query_heads": "query heads", "kv_heads": "KV heads", "ffn": "FFN"}
"""Axis -> its name for people, where that is not the axis itself."""


@dataclass(frozen=True)
class BlockSizes:
    """Sizes of one block of a dense layer.

    Attributes:
        axes: axis -> units along it (heads or channels). A block without axes is closed: its inside is kept whole.
        head_dim: channels of one head, on every axis whose name ends in "heads"; None without such an axis.
        head_dims: other numbers of channels that matrices have for a head, by name ("qk_head_dim").
    """

    axes: Mapping[str, int] = field(default_factory=dict, hash=False)
    head_dim: int | None = None
    head_dims: Mapping[str, int] = field(default_factory=dict, hash=False)

    def channels(self, axis: str, head_dim: str = HEAD_DIM) -> int:
        """Return the channels of one unit of an axis, which are ``head_dim`` by name if the units are heads."""
        if not axis.endswith("heads"):
            return 1
        return self.head_dim or 1 if head_dim == HEAD_DIM else self.head_dims[head_dim]

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head; query head q reads KV head q // group_size."""
        return self.axes["query_heads"] // self.axes.get("kv_heads", self.axes["query_heads"])


@dataclass(frozen=True)
class Sizes:
    """Sizes of a dense decoder.

    The properties named like fields of a configuration hold for all layers that own the axis; ask by layer
    (:meth:`blocks`) where layers may differ.

    Attributes:
        hidden_size: channels of the residual stream.
        vocab_size: rows of the token embedding.
        kinds: kind of layer -> its blocks by name, in the order in which a layer runs them.
        layers: kind of every layer.
        layer_inputs: channels that each layer has in parameters outside of the layers.
    """

    hidden_size: int
    vocab_size: int
    kinds: Mapping[str, Mapping[str, BlockSizes]] = field(hash=False)
    layers: tuple[str, ...]
    layer_inputs: int = 0

    @classmethod
    def decoder(
        cls,
        num_layers: int,
        hidden_size: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        intermediate_size: int,
        vocab_size: int,
    ) -> Self:
        """Return the sizes of a decoder whose layers all have the same attention and the same MLP.

        Args:
            num_layers: decoder layers.
            hidden_size: channels of the residual stream.
            num_attention_heads: query heads of a layer.
            num_key_value_heads: key/value heads of a layer; query head q reads KV head
                q // (num_attention_heads / num_key_value_heads).
            head_dim: channels of one head.
            intermediate_size: FFN channels of a layer.
            vocab_size: rows of the token embedding.
        """
        blocks = attention_and_mlp(num_attention_heads, num_key_value_heads, head_dim, intermediate_size)
        return cls(hidden_size, vocab_size, {DECODER: blocks}, (DECODER,) * num_layers)

    def blocks(self, layer: int) -> Mapping[str, BlockSizes]:
        """Return the blocks of a layer by name, in the order in which it runs them."""
        return self.kinds[self.layers[layer]]

    def units(self, axis: str, layer: int) -> int:
        """Return how many units a layer has along an axis; 0 if it has no such axis."""
        return next((block.axes[axis] for block in self.blocks(layer).values() if axis in block.axes), 0)

    def channels(self, axis: str, layer: int, head_dim: str = HEAD_DIM) -> int:
        """Return the channels of one unit of an axis of a layer; 1 if it has no such axis.

        Args:
            axis: in plans.
            layer: index in the dense model.
            head_dim: name of the number of channels of a head, as in :attr:`BlockSizes.head_dims`.
        """
        return next((block.channels(axis, head_dim) for block in self.blocks(layer).values() if axis in block.axes), 1)

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the axes of all layers."""
        blocks = [block for kind in self.kinds.values() for block in kind.values()]
        return tuple(dict.fromkeys(axis for block in blocks for axis in block.axes))

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def num_attention_heads(self) -> int:
        """Query heads of a layer."""
        return self._shared("query_heads")

    @property
    def num_key_value_heads(self) -> int:
        """KV heads of a layer."""
        return self._shared("kv_heads")

    @property
    def intermediate_size(self) -> int:
        """FFN channels of a layer."""
        return self._shared("ffn")

    @property
    def ffn_sizes(self) -> tuple[int, ...]:
        """FFN channels of the layers, each number once, ascending; those of an expert where there are experts."""
        return tuple(sorted({block.axes["ffn"] for block in self._owners("ffn")}))

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self._one({b.head_dim or 0 for b in self._owners("query_heads")}, HEAD_DIM)

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self._one({block.group_size for block in self._owners("query_heads")}, "query heads of a KV head")

    @property
    def largest_group(self) -> int:
        """Most query heads that share one KV head in any layer; 0 without heads."""
        return max((block.group_size for block in self._owners("query_heads")), default=0)

    def _shared(self, axis: str) -> int:
        return self._one({block.axes[axis] for block in self._owners(axis)}, axis)

    def _owners(self, axis: str) -> list[BlockSizes]:
        return [block for kind in self.kinds.values() for block in kind.values() if axis in block.axes]

    def _one(self, values: set[int], name: str) -> int:
        """Return the only value; 0 if no layer has one."""
        if len(values) > 1:
            raise UnsupportedModelError(
                f"The layers of this model have different {name} ({', '.join(map(str, sorted(values)))}), and this "
                "step knows one number for all layers. Remove whole layers or hidden channels instead."
            )
        return next(iter(values), 0)

    def __str__(self) -> str:
        kinds = "; ".join(map(self.describe, self.kinds))
        return f"{kinds}; hidden size {self.hidden_size}, vocabulary {self.vocab_size}"

    def describe(self, kind: str) -> str:
        """Describe the layers of a kind for people: how many there are, and the sizes of their blocks."""
        blocks = []
        for name, block in self.kinds[kind].items():
            sizes = [f"{axis} {n}" for axis, n in block.axes.items()]
            sizes += [f"{HEAD_DIM} {block.head_dim}"] if block.head_dim else []
            sizes += [f"{name} {n}" for name, n in block.head_dims.items()]
            blocks.append(f"{name} ({', '.join(sizes)})" if sizes else name)
        return f"{self.layers.count(kind)} layers of {' and '.join(blocks)}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        kinds = {
            kind: {
                "layers": format_ranges([i for i, name in enumerate(self.layers) if name == kind]),
                "blocks": {
                    name: {
                        **block.axes,
                        **({} if block.head_dim is None else {HEAD_DIM: block.head_dim}),
                        **block.head_dims,
                    }
                    for name, block in blocks.items()
                },
            }
            for kind, blocks in self.kinds.items()
        }
        inputs = {"layer_inputs": self.layer_inputs} if self.layer_inputs else {}
        return {"hidden_size": self.hidden_size, "vocab_size": self.vocab_size, **inputs, "kinds": kinds}

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Read the data of :meth:`to_dict`, or the seven sizes of version 1.

        Raises:
            PlanError: a missing or unknown key, a value of the wrong kind, or more layers and units than can be true.
        """
        if isinstance(data, Mapping) and "num_layers" in data:
            data = _upgrade_sizes(data)
        optional = ("layer_inputs",) if isinstance(data, Mapping) and "layer_inputs" in data else ()
        _check_keys(data, ("hidden_size", "vocab_size", *optional, "kinds"), "dense")
        hidden, vocab = (_count(data[name], f"dense.{name}", least=1) for name in ("hidden_size", "vocab_size"))
        kinds = _named(data["kinds"], "dense.kinds")
        for kind, entry in kinds.items():
            _check_keys(entry, ("layers", "blocks"), f"dense.kinds.{kind}")
        blocks = {kind: _blocks(entry["blocks"], f"dense.kinds.{kind}") for kind, entry in kinds.items()}
        layers = _kinds_of_layers({kind: entry["layers"] for kind, entry in kinds.items()})
        inputs = _count(data["layer_inputs"], "dense.layer_inputs") if optional else 0
        sizes = cls(hidden, vocab, blocks, layers, inputs)
        _check_bounds(sizes)
        return sizes


def attention_and_mlp(query_heads: int, kv_heads: int, head_dim: int, ffn: int) -> dict[str, BlockSizes]:
    """Return the sizes of the blocks of a usual decoder layer.

    Args:
        query_heads: of the attention.
        kv_heads: of the attention.
        head_dim: channels of one head.
        ffn: channels of the MLP.
    """
    attention = BlockSizes({"query_heads": query_heads, "kv_heads": kv_heads}, head_dim)
    return {"attention": attention, "mlp": BlockSizes({"ffn": ffn})}


Units = tuple[int, ...]
"""Kept units of an axis, ascending dense indices."""


@dataclass(frozen=True)
class LayerPlan:
    """The kept parts of one layer.

    Attributes:
        index: the layer's index in the dense model.
        kind: its kind, a key of :attr:`Sizes.kinds`.
        blocks: the blocks that are kept, in the layer's order: name -> axis -> kept units. A block that is missing here
            is removed; a closed block has no axes.
    """

    index: int
    kind: str
    blocks: Mapping[str, Mapping[str, Units]] = field(hash=False)

    def keeps(self, block: str) -> bool:
        """Return whether a block is kept, with all or some of its units."""
        return block in self.blocks

    def units(self, axis: str) -> Units:
        """Return the kept units of an axis; none if the block that owns it is removed, or the layer has none."""
        return next((axes[axis] for axes in self.blocks.values() if axis in axes), ())

    @property
    def query_heads(self) -> Units:
        """Kept query heads."""
        return self.units("query_heads")

    @property
    def kv_heads(self) -> Units:
        """Kept KV heads."""
        return self.units("kv_heads")

    @property
    def ffn(self) -> Units:
        """Kept FFN channels."""
        return self.units("ffn")

    @property
    def widths(self) -> tuple[int, int, int]:
        """(query heads, KV heads, FFN channels) that are kept."""
        return len(self.query_heads), len(self.kv_heads), len(self.ffn)

    @property
    def sizes(self) -> dict[str, dict[str, int]]:
        """Return block -> axis -> kept units, counted."""
        return {name: {axis: len(units) for axis, units in axes.items()} for name, axes in self.blocks.items()}

    def is_whole(self, block: str, dense: Sizes) -> bool:
        """Return whether a block keeps all its units."""
        return self.keeps(block) and self.sizes[block] == dict(dense.blocks(self.index)[block].axes)

    def with_units(self, dense: Sizes, axes: Mapping[str, Iterable[int]]) -> Self:
        """Return the layer with other kept units. An axis without units removes the block that owns it.

        Args:
            dense: the dense model's sizes.
            axes: axis -> kept units; the other axes do not change.

        Raises:
            PlanError: the layer has no such axis.
        """
        owners = {axis: name for name, block in dense.blocks(self.index).items() for axis in block.axes}
        for axis in axes:
            if axis not in owners:
                raise PlanError(did_you_mean(axis, owners, f"axis of layer {self.index}"))
        blocks = {name: dict(kept) for name, kept in self.blocks.items()}
        for axis, units in axes.items():
            blocks.setdefault(owners[axis], {})[axis] = tuple(sorted(units))
        empty = {owners[axis] for axis, units in axes.items() if not blocks[owners[axis]][axis]}
        kept = {name: blocks[name] for name in dense.blocks(self.index) if name in blocks and name not in empty}
        return replace(self, blocks=kept)


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
    hidden: Units
    layers: tuple[LayerPlan, ...]

    @classmethod
    def identity(cls, model_type: str, dense: Sizes) -> Self:
        """The plan that removes nothing."""
        whole = {
            kind: {name: {axis: tuple(range(n)) for axis, n in block.axes.items()} for name, block in blocks.items()}
            for kind, blocks in dense.kinds.items()
        }
        layers = tuple(LayerPlan(i, kind, whole[kind]) for i, kind in enumerate(dense.layers))
        return cls(model_type, dense, tuple(range(dense.hidden_size)), layers)

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

    def with_layer(self, index: int, **axes: Iterable[int] | None) -> Self:
        """Set the kept units of one layer, by axis: ``query_heads``, ``kv_heads``, ``ffn`` and others that it has.

        An axis without units removes the block that owns it; None leaves an axis as it is.

        Raises:
            PlanError: the layer is not in the plan, or has no such axis.
        """
        if index not in self.kept_layers:
            raise PlanError(f"Layer {index} is not in the plan; it holds {self.kept_layers}.")
        changes = {axis: tuple(units) for axis, units in axes.items() if units is not None}
        layers = (layer.with_units(self.dense, changes) if layer.index == index else layer for layer in self.layers)
        return replace(self, layers=tuple(layers))

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
        """True when axes that are equally wide in the dense model are so in all kept layers, and no block is removed.

        Kinds of layers may differ where the dense model differs: dense layers of a mixture are wider than its experts.
        """
        kept: dict[tuple[str, int], int] = {}
        return all(
            all(layer.keeps(block) for block in self.dense.kinds[layer.kind])
            and all(
                len(units) == kept.setdefault((axis, self.dense.units(axis, layer.index)), len(units))
                for axes in layer.blocks.values()
                for axis, units in axes.items()
            )
            for layer in self.layers
        )

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
        problems = _size_problems(dense)
        if problems:
            return problems
        problems = _index_problems("hidden", self.hidden, dense.hidden_size)
        problems += _index_problems("layers", self.kept_layers, dense.num_layers)
        if not self.hidden:
            problems.append("no hidden channel is left; keep at least one.")
        if not self.layers:
            problems.append("no layer is left; keep at least one.")
        for layer in self.layers:
            if 0 <= layer.index < dense.num_layers:
                problems += _layer_problems(layer, dense)
        return problems

    def summary(self) -> str:
        """One line for people: what is left of what."""
        dense = self.dense
        parts = [
            f"{len(self.layers)} of {dense.num_layers} layers",
            f"hidden {len(self.hidden)} of {dense.hidden_size}",
        ]
        for axis in dense.axes:
            kept = spread(len(x.units(axis)) for x in self.layers if dense.units(axis, x.index))
            whole = spread(n for i in range(dense.num_layers) if (n := dense.units(axis, i)))
            parts.append(f"{AXIS_NAMES.get(axis, axis)} {kept} of {whole}")
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data with index sets as range text."""
        return {
            "version": PLAN_VERSION,
            "model_type": self.model_type,
            "dense": self.dense.to_dict(),
            "hidden": format_ranges(self.hidden),
            "layers": [
                {
                    "index": layer.index,
                    "kind": layer.kind,
                    "blocks": {
                        name: {axis: format_ranges(units) for axis, units in axes.items()}
                        for name, axes in layer.blocks.items()
                    },
                }
                for layer in self.layers
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_dict` wrote, or a plan of version 1, and validate it.

        Raises:
            PlanError: a wrong version, a missing or unknown key, a value of the wrong kind, or an
                inconsistent plan.
        """
        version = data.get("version") if isinstance(data, Mapping) else None
        if isinstance(data, Mapping) and version not in (1, PLAN_VERSION):
            raise PlanError(f"Plan version is {shown(version)}; this pyprune reads 1 and {PLAN_VERSION}.")
        _check_keys(data, PLAN_KEYS, "the plan")
        dense = Sizes.from_dict(data["dense"])
        layers = _upgrade_layers(data["layers"], dense) if version == 1 else data["layers"]
        plan = cls(
            model_type=_text(data["model_type"], "model_type"),
            dense=dense,
            hidden=parse_ranges(data["hidden"], dense.hidden_size, "hidden"),
            layers=_layers(layers, dense),
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


def kv_head_of(query_head: int, dense: Sizes | BlockSizes) -> int:
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
            raise PlanError(f"{name}: {shown(part)} is outside 0..{size - 1}.")
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


def _check_bounds(sizes: Sizes) -> None:
    """Refuse sizes that no model has, before any index set is expanded."""
    blocks = [block for layer in sizes.layers for block in sizes.kinds[layer].values()]
    units = sum(sum(block.axes.values()) for block in blocks)
    widest = max(map(_widest, blocks), default=0)
    if units + sizes.hidden_size + widest > MAX_INDICES:
        raise PlanError(
            f"The plan is for {sizes.num_layers} layers with {units:,} heads and channels; at most {MAX_INDICES:,} "
            "indices in all are read. The plan is damaged."
        )


def _widest(block: BlockSizes) -> int:
    """Return the most channels that a matrix has along an axis of a block."""
    head_dims = (HEAD_DIM, *block.head_dims)
    return max((n * block.channels(axis, name) for axis, n in block.axes.items() for name in head_dims), default=0)


def _named(data: Any, where: str) -> Mapping[str, Any]:
    """Check that data is an object whose entries have names."""
    if not isinstance(data, Mapping) or not data:
        raise PlanError(f"{where} is {shown(data)}; expected a JSON object with at least one entry.")
    for name in data:
        _name(name, where)
    return data


def _blocks(data: Any, where: str) -> dict[str, BlockSizes]:
    """Read the sizes of the blocks of one kind of layer."""
    blocks: dict[str, BlockSizes] = {}
    for name, entry in _named(data, f"{where}.blocks").items():
        place = f"{where}.blocks.{name}"
        if not isinstance(entry, Mapping):
            raise PlanError(f"{place} is {shown(entry)}; expected a JSON object with its sizes.")
        sizes = {_name(axis, place): _count(n, f"{place}.{axis}", least=1) for axis, n in entry.items()}
        head_dims = {size: sizes.pop(size) for size in [*sizes] if size.endswith(HEAD_DIM)}
        blocks[name] = BlockSizes(sizes, head_dims.pop(HEAD_DIM, None), head_dims)
    return blocks


def _kinds_of_layers(ranges: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kind of every layer from the layers of every kind as range text; each layer must have one."""
    kinds: dict[int, str] = {}
    for kind, text in ranges.items():
        layers = parse_ranges(text, MAX_LAYERS, f"dense.kinds.{kind}.layers")
        twice = [i for i in layers if i in kinds]
        if twice or not layers:
            raise PlanError(f"dense.kinds.{kind}.layers: {f'layer {twice[0]} has two kinds' if twice else 'no layer'}.")
        kinds |= dict.fromkeys(layers, kind)
    missing = [i for i in range(len(kinds)) if i not in kinds]
    if missing:
        raise PlanError(f"dense.kinds: layer {missing[0]} has no kind; each layer up to {max(kinds)} must have one.")
    return tuple(kinds[i] for i in range(len(kinds)))


_SIZES_1 = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)
"""Keys of ``dense`` in version 1."""
_BLOCKS_1 = {"attention": ("query_heads", "kv_heads"), "mlp": ("ffn",)}
"""Blocks of every layer in version 1, with their axes; a block without units was removed."""


def _upgrade_sizes(data: Mapping[str, Any]) -> dict[str, Any]:
    """Turn ``dense`` of version 1 into that of version 2."""
    _check_keys(data, _SIZES_1, "dense")
    layers, hidden, heads, kv_heads, head_dim, ffn, vocab = (
        _count(data[name], f"dense.{name}", least=1) for name in _SIZES_1
    )
    attention = {"query_heads": heads, "kv_heads": kv_heads, HEAD_DIM: head_dim}
    kind = {"layers": f"0-{layers - 1}", "blocks": {"attention": attention, "mlp": {"ffn": ffn}}}
    return {"hidden_size": hidden, "vocab_size": vocab, "kinds": {DECODER: kind}}


def _upgrade_layers(data: Any, dense: Sizes) -> list[dict[str, Any]]:
    """Turn ``layers`` of version 1 into those of version 2."""
    upgraded = []
    for entry in _list_of_layers(data):
        _check_keys(entry, ("index", *chain.from_iterable(_BLOCKS_1.values())), "a layer")
        blocks = {name: {axis: entry[axis] for axis in axes} for name, axes in _BLOCKS_1.items()}
        kept = {name: axes for name, axes in blocks.items() if any(text != "" for text in axes.values())}
        upgraded.append({"index": entry["index"], "kind": DECODER, "blocks": kept})
    return upgraded


def _list_of_layers(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise PlanError(f"layers is {shown(data)}; expected a list with one JSON object for every kept layer.")
    return data


def _layers(data: Any, dense: Sizes) -> tuple[LayerPlan, ...]:
    before = -1
    for entry in _list_of_layers(data):
        _check_keys(entry, LAYER_KEYS, "a layer")
        index = _count(entry["index"], "layer index")
        if not before < index < dense.num_layers:
            raise PlanError(
                f"layers: {index} comes after {before}; indices must be ascending, unique and below {dense.num_layers}."
            )
        before = index
    return tuple(_layer(entry, dense) for entry in data)


def _layer(entry: Mapping[str, Any], dense: Sizes) -> LayerPlan:
    index, blocks = entry["index"], entry["blocks"]
    where, known = f"layer {index}", dense.blocks(index)
    if not isinstance(blocks, Mapping):
        raise PlanError(f"{where}: blocks is {shown(blocks)}; expected a JSON object with the blocks that are kept.")
    for name in blocks:
        if name not in known:
            raise PlanError(did_you_mean(str(name)[:80], known, f"block of {where}"))
    kept = {name: blocks[name] for name in known if name in blocks}
    for name, axes in kept.items():
        _check_keys(axes, tuple(known[name].axes), f"{name} of {where}")
    read = {
        name: {axis: parse_ranges(axes[axis], n, f"{where} {axis}") for axis, n in known[name].axes.items()}
        for name, axes in kept.items()
    }
    return LayerPlan(index, _text(entry["kind"], f"{where}: kind"), read)


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
    return [f"{name}: {outside[:5]} are outside 0..{size - 1}."] if outside else []


def _size_problems(dense: Sizes) -> list[str]:
    """Return the problems of the dense sizes themselves."""
    problems = []
    for kind, blocks in dense.kinds.items():
        axes = [axis for block in blocks.values() for axis in block.axes]
        problems += [f"{kind}: two blocks own the axis {axis}." for axis in dict.fromkeys(axes) if axes.count(axis) > 1]
        for name, block in blocks.items():
            if any(axis.endswith("heads") for axis in block.axes) and not block.head_dim:
                problems.append(f"{kind}: {name} has heads and no {HEAD_DIM}.")
            if _is_grouped(block):
                heads, kv_heads = block.axes["query_heads"], block.axes["kv_heads"]
                if kv_heads < 1 or heads % kv_heads:
                    problems.append(f"{heads} query heads do not divide into {kv_heads} KV heads.")
    return problems


def _is_grouped(block: BlockSizes) -> bool:
    return "query_heads" in block.axes and "kv_heads" in block.axes


def _layer_problems(layer: LayerPlan, dense: Sizes) -> list[str]:
    where, known = f"layer {layer.index}", dense.blocks(layer.index)
    if layer.kind != dense.layers[layer.index]:
        return [f"{where}: its kind is {dense.layers[layer.index]!r}, not {shown(layer.kind)}."]
    problems = [f"{where}: the model has no block {shown(name)} there." for name in layer.blocks if name not in known]
    if not layer.blocks:
        problems.append(f"{where}: no block is left; drop the layer instead.")
    for name, block in known.items():
        if layer.keeps(name):
            problems += _block_problems(where, name, layer.blocks[name], block)
        elif not block.axes:
            problems.append(f"{where}: {name} has no axis; it is removed only with its whole layer.")
    return problems


def _block_problems(where: str, name: str, kept: Mapping[str, Units], block: BlockSizes) -> list[str]:
    """Return the problems of the kept units of one block."""
    if kept.keys() != block.axes.keys():
        expected, named = ", ".join(block.axes) or "no axis", ", ".join(kept) or "none"
        return [f"{where}: {name} has {expected}; the plan names {named}."]
    problems = []
    for axis, units in kept.items():
        problems += _index_problems(f"{where} {axis}", units, block.axes[axis])
        if not units:
            problems.append(f"{where}: {axis} is empty; remove the block {name} instead.")
    if problems or not _is_grouped(block):
        return problems
    return _group_problems(where, kept["query_heads"], kept["kv_heads"], block)


def _group_problems(where: str, query_heads: Units, kv_heads: Units, block: BlockSizes) -> list[str]:
    per_group = dict.fromkeys(kv_heads, 0)
    for head in query_heads:
        kv = kv_head_of(head, block)
        if kv not in per_group:
            return [f"{where}: query head {head} reads KV head {kv}, which is removed."]
        per_group[kv] += 1
    if len(set(per_group.values())) == 1 and 0 not in per_group.values():
        return []
    counts = ", ".join(f"KV head {kv}: {n}" for kv, n in per_group.items())
    return [f"{where}: every kept KV head needs equally many query heads ({counts})."]


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


def _name(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > 100 or not value.isidentifier():
        raise PlanError(f"{where} holds the name {shown(value)}; expected one of letters, digits and underscores.")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or len(value) > 100:
        raise PlanError(f"{name} is {shown(value)}; expected a short text.")
    return value
