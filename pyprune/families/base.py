"""The contract of a family: ONE table from parameter names to axis names, plus a few flags.

Slicing, masking, regularising, grouping, counting parameters, exporting and the tests read this table and
nothing else. A family file holds data; the behaviour is here and in ``compact.py``.
No torch is imported: a table also describes a model whose weights are not in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from pyprune.errors import PlanError, UnsupportedModelError, did_you_mean
from pyprune.families.gguf_forms import GgufForm
from pyprune.plan import DECODER, HEAD_DIM, BlockSizes, LayerPlan, PrunePlan, Sizes, attention_and_mlp

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel

Axis = str
"""Name of what a dimension counts: one of :data:`SHARED_AXES`, or an axis that :attr:`Family.kinds` gives a block."""
Dimension = Axis | tuple[Axis, ...]
"""The axis that a dimension of a parameter counts; if projections are fused into one matrix, several axes in a row."""
SHARED_AXES: tuple[Axis, ...] = ("vocab", "positions", "hidden", "head_dim", "inner", "layers")
"""Axes that no block owns. ``inner`` is the inside of a block that is kept whole, and ``layers`` the channels that each
layer has in a parameter outside of the layers. Of these a plan cuts hidden and layers only."""
PER_HEAD: Mapping[Axis, Axis] = {"each_head": "heads", "each_kv_head": "kv_heads"}
"""Axis that counts heads -> the axis that counts their channels."""
PLAN_AXES: Mapping[Axis, str] = {"heads": "query_heads"}
"""Axis of a table -> its name in plans, where they differ."""
ROUTER: tuple[Axis, ...] = ("experts", "hidden")
"""Axes of the matrix whose products with the stream are the logits of a router."""
Block = str
"""Name of a block of a layer, a key of :attr:`Family.kinds`."""
BLOCKS: tuple[Block, ...] = ("attention", "mlp")
"""The blocks of a usual decoder layer, in the order in which it runs them. They can be removed without their layer."""
MIXTURE = "mixture"
"""The last word of a kind of layers whose MLP is a mixture of experts; the only word if all mixers are alike."""
KINDS: Mapping[str, Mapping[Block, tuple[Axis, ...]]] = {DECODER: {"attention": ("heads", "kv_heads"), "mlp": ("ffn",)}}
"""The kinds of layers of a usual decoder: kind -> block -> axes that it owns."""
NO_LISTS = ("architectures", "mlp_only_layers", "moe_layers")
"""Fields of a configuration whose values do not belong to layers one by one, though there may be as many."""
STORED = "stored_"
"""What the names of fields begin with that hold a list for :func:`stored_lists`."""
Role = Literal[
    "embedding",  # writes the stream from token or position ids
    "reader",  # reads the stream, normalised where the family has pre-norms
    "writer",  # adds to the stream
    "pre_norm",  # normalises the stream before a sub-block
    "post_norm",  # normalises a sub-block's output before it joins the stream
    "final_norm",  # normalises the stream before the head
    "head",  # turns the stream into logits
    "inner",  # touches neither the stream nor a norm of it (q/k/v biases, q/k norms, ...)
]


@dataclass(frozen=True)
class Row:
    """One line of a family's table.

    Attributes:
        pattern: parameter name; ``{i}`` stands for the layer index, and ``*`` for any text.
        axes: the axis of every dimension, in order; a dimension of fused projections names several axes, such as
            ("heads", "kv_heads", "kv_heads") for queries, keys and values. () = any dimensions, which no plan cuts.
        role: effect of the parameter on the residual stream.
        block: the sub-block that owns it; None when it belongs to the layer or the model as a whole.
        width_norm: for projections whose output is divided by its root mean square over the whole first axis: input
            for the parameter of the normalised projection, weight for that norm's weight.
        kind: the kind of layers that has the parameter; None = every kind, or it is outside the layers.
        by_group: the fused dimension holds one KV group after another, each with its part of every axis in order
            (Falcon: the queries of a group, its key, its value; GPT-NeoX: of one head each); or one channel after
            another of an axis that is fused with itself (GPT-OSS: gate, up); otherwise one whole axis after another.
        by_head: the dimension is fused by query head (Qwen3.5: the query of a head and its gate).
        head_dim: name of the channels that a head has in this parameter, if they are not those of the output
            projection: a key of :attr:`Family.head_fields`.
        by_root: of a reader whose output the model divides by the root of the hidden size, which a cut changes as it
            changes the stream (Gemma 4).

    Raises:
        UnsupportedModelError: a fused dimension with an axis of :data:`SHARED_AXES`, a second one, or one that
            ``width_norm`` would normalise as a whole; ``by_group`` without a fused dimension of heads.
    """

    pattern: str
    axes: tuple[Dimension, ...]
    role: Role
    block: Block | None = None
    width_norm: Literal["", "input", "weight"] = ""
    kind: str | None = None
    by_group: bool = False
    by_head: bool = False
    head_dim: str = HEAD_DIM
    by_root: bool = False

    def __post_init__(self) -> None:
        fused = [axes for axes in self.dimensions if len(axes) > 1]
        other = [axis for axes in fused for axis in axes if axis in SHARED_AXES or axis in PER_HEAD]
        if other:
            raise UnsupportedModelError(
                f"The row {self.pattern!r} fuses the axis {other[0]!r} with others; only axes of its block can be."
            )
        if len(fused) > 1:
            raise UnsupportedModelError(f"The row {self.pattern!r} has {len(fused)} fused dimensions; it can have one.")
        if fused and self.width_norm:
            raise UnsupportedModelError(
                f"The row {self.pattern!r} is fused and has width_norm {self.width_norm!r}; a projection that is "
                "normalised over its whole width must be a parameter of its own."
            )
        if self.by_group and not (fused and ({*fused[0]} <= {"heads", "kv_heads"} or len({*fused[0]}) == 1)):
            raise UnsupportedModelError(f"The row {self.pattern!r} is by_group, but fuses no heads and KV heads.")

    @cached_property
    def dimensions(self) -> tuple[tuple[Axis, ...], ...]:
        """The axes of every dimension: one, or several if it is fused."""
        return tuple(axes if isinstance(axes, tuple) else (axes,) for axes in self.axes)

    @property
    def fused_dim(self) -> int | None:
        """The dimension that counts several axes in a row, or None."""
        return next((dim for dim, axes in enumerate(self.dimensions) if len(axes) > 1), None)

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """Matches a full parameter name; group "i" is the layer index."""
        pattern = re.escape(self.pattern).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\*", ".*")
        return re.compile(pattern + r"\Z")

    @property
    def is_bias(self) -> bool:
        """True for additive vectors, and those of all experts in one matrix."""
        return self.pattern.endswith((".bias", "_bias"))

    @property
    def is_norm_weight(self) -> bool:
        """True for the multiplicative vector of a norm over the hidden axis."""
        return self.role in ("pre_norm", "post_norm", "final_norm") and not self.is_bias

    @property
    def counts_experts(self) -> bool:
        """True for vectors with a number for each expert: biases of a router, corrections of its choice, scales."""
        return "experts" in self.axes and {*self.axes} <= {"experts", "inner"}

    @property
    def of_each_expert(self) -> bool:
        """True for the matrices and biases of experts, of which a token reads those of the chosen ones."""
        return self.axes[:1] == ("experts",) and (len(self.axes) > 2 or (self.is_bias and not self.counts_experts))

    def axis_dim(self, axis: Axis) -> int | None:
        """The dimension that counts ``axis`` and nothing else, or None."""
        return self.axes.index(axis) if axis in self.axes else None


@dataclass(frozen=True)
class NamedParam:
    """A parameter of a model together with its row.

    Attributes:
        name: as in ``model.named_parameters()``.
        parameter: the tensor, shape given by ``row.axes``.
        row: the table row that matched.
        layer: dense layer index, or None outside the layers.
    """

    name: str
    parameter: nn.Parameter
    row: Row
    layer: int | None

    def axis_dim(self, axis: Axis) -> int | None:
        """The dimension that counts ``axis`` and nothing else, or None."""
        return self.row.axis_dim(axis)


@dataclass(frozen=True)
class StockTarget:
    """A stock architecture that a compacted model of a family can become.

    Attributes:
        model_type: the target's ``config.model_type``.
        obstacle: (config, plan) -> reason it does not fit; None = it fits.
        config_changes: (config) -> config values to set on the target.
        zero_biases: (config) -> biases that the target has and the source lacks, (pattern, axis); written as zeros.
    """

    model_type: str
    obstacle: Callable[[PretrainedConfig, PrunePlan], str | None]
    config_changes: Callable[[PretrainedConfig], dict[str, Any]] = lambda config: {}
    zero_biases: Callable[[PretrainedConfig], tuple[tuple[str, Axis], ...]] = lambda config: ()


@dataclass(frozen=True)
class StockClasses:
    """Import paths "module:name" of the stock architecture, from which the pruned classes are made.

    Attributes:
        config: the configuration class.
        model: the causal LM.
        layer: its decoder layer, called with (config, index).
    """

    config: str
    model: str
    layer: str

    @classmethod
    def locate(cls, package: str, name: str, *, config: str | None = None) -> StockClasses:
        """Name Transformers' classes by its habits: folder ``package``, ``{name}Config``, ``{name}ForCausalLM``, ..."""
        modelling = f"transformers.models.{package}.modeling_{package}"
        return cls(
            f"transformers:{config or name + 'Config'}",
            f"transformers:{name}ForCausalLM",
            f"{modelling}:{name}DecoderLayer",
        )


def renumbered(indices: Sequence[int], kept: Sequence[int]) -> list[int]:
    """Return the new indices of those of these layers that are kept."""
    return [new for new, old in enumerate(kept) if old in indices]


def stored_lists(config_class: type[Any], names: Iterable[str]) -> dict[str, property]:
    """Return properties of a subclass of a configuration class: lists that it holds, or computes if it does not.

    Args:
        config_class: computes the lists.
        names: of the lists, as :attr:`Family.computed_lists`.
    """

    def stored(name: str) -> property:
        computed: property = getattr(config_class, name)
        return property(lambda config: vars(config).get(STORED + name) or computed.__get__(config))

    return {name: stored(name) for name in names}


def kept_lists(config: PretrainedConfig, names: Iterable[str], kept: Sequence[int]) -> dict[str, list[Any]]:
    """Return the fields that hold the values of the kept layers for :func:`stored_lists`."""
    return {STORED + name: [getattr(config, name)[i] for i in kept] for name in names}


def _stock_layer(layer_class: type[nn.Module], config: Any, index: int) -> nn.Module:
    """Build a layer at the sizes of its configuration."""
    return layer_class(config, index)


def _unknown_lists(config: PretrainedConfig, known: tuple[str, ...]) -> Iterator[str]:
    """Yield the fields of a configuration with as many values as layers, other than the known ones."""
    layers = getattr(config, "num_hidden_layers", None)
    for name, value in vars(config).items():
        public = not name.startswith("_") and not name.endswith("_token_id") and name not in NO_LISTS
        if public and name not in known and isinstance(value, list | tuple) and len(value) == layers:
            yield name


def is_mixture(kind: str) -> bool:
    """Return whether the MLP of a kind of layers is a mixture of experts."""
    return kind.rpartition("_")[2] == MIXTURE


def layer_overrides(config: Any, index: int) -> dict[str, Any]:
    """Return the values of one layer that differ from the global ones (``per_layer_config``)."""
    spec = vars(config).get("_heterogeneity_spec")
    return dict(spec.per_layer_overrides.get(index, {})) if spec is not None else {}


def alike_layers(config: PretrainedConfig) -> tuple[str, ...]:
    """Return the kind of every layer of a model whose layers are alike."""
    return (DECODER,) * int(config.num_hidden_layers)


def decoder_blocks(family: Family, config: PretrainedConfig, kind: str) -> dict[Block, BlockSizes]:
    """Return the sizes of attention and MLP in the usual fields of a configuration, the same for every kind."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    explicit = getattr(config, "head_dim", None) if family.has_head_dim_field else None
    ffn = getattr(config, family.width_fields(kind)["ffn"])
    blocks = attention_and_mlp(heads, kv_heads, explicit or config.hidden_size // heads, ffn)
    if family.head_fields:
        dims = {name: sum(getattr(config, one) for one in fields) for name, fields in family.head_fields.items()}
        blocks["attention"] = BlockSizes(blocks["attention"].axes, dims.pop(HEAD_DIM), dims)
    return blocks


@dataclass(frozen=True)
class Family:
    """Everything that pyprune knows about one model type.

    Attributes:
        model_type: ``config.model_type``.
        classes: the stock classes.
        rows: the axis table.
        stock_targets: candidate stock architectures after compaction, first fit wins.
        layers_path: dotted path of the ModuleList of decoder layers.
        attention_module: name of the attention module inside a layer.
        mlp_modules: names of the modules inside a layer that make up its MLP, in order.
        more_values: class of a block's module -> how many values it returns besides its output; none if it is missing.
        kinds: kind of layer -> its blocks in the order in which it runs them -> the axes that each block owns. A block
            without axes is closed: it is kept whole, and is removed only with its layer.
        layer_kinds: (config) -> kind of every layer.
        block_sizes: (family, config, kind) -> sizes of the blocks of a kind, in order.
        parallel: the blocks of a layer read the same stream, although each has a norm of its own in front; blocks that
            share one are known to.
        norm: rms (RMSNorm) or layer (LayerNorm with mean subtraction).
        unit_offset_norm: norms multiply by 1 + w instead of w (Gemma).
        scaled_embedding: the embedding is multiplied by sqrt(hidden_size) (Gemma).
        begins_with_bos: the model expects its bos token before every text, and so in front of every window that it
            reads (Gemma); without it the figures are many times worse.
        intermediate_field: the config field that holds the FFN width.
        mixture_fields: axis of the MLP of a mixture of experts -> the config field that holds its width, or counts its
            experts.
        kind_values: (config, kinds of the kept layers) -> config values that name them, besides ``layer_lists``.
        has_head_dim_field: the stock configuration honours an explicit head_dim.
        head_fields: name of the channels of a head -> the config fields whose sum they are, "head_dim" among them,
            where matrices have several numbers of channels for a head; {} = head_dim is all.
        gauge: LayerNorm is made sliceable by subtracting the kept channels' mean from every writer, which a
            stock LayerNorm can then hold; otherwise a LayerNorm that divides by the original size is used.
        carries_output_bias: the pruned architecture can hold biases on the output projections of attention and MLP
            that the dense model lacks (``output_bias`` in the configuration).
        inner_from_hidden: closed blocks derive inner sizes from the hidden size, so that the pruned architecture keeps
            that of the dense model (``source_hidden_size`` in the configuration).
        layer_values: how many values a layer returns in a tuple, the stream first; 0 = the stream alone.
        needs_positions: the class numbers tokens after cached ones from 0, unless positions are given, as generation
            gives them.
        needs_mask: layers read the mask of attention, also one that only hides later positions.
        hidden_fields: the config fields that hold the hidden size.
        layer_lists: the config fields with a value for each layer, which are sliced with the layers.
        last_word: the entry of ``layer_types`` that the stock configuration gives the last layer, whatever was there.
        layer_fields: the config fields of which the stock configuration holds values by layer (``per_layer_config``).
        layer_inputs: the config field that holds the channels of each layer on the axis ``layers``; "" = none does.
        layer_scales: names of buffers of a layer that hold one number, by which it multiplies the stream at its end.
        gives_more: (config) -> whether layers are given what depends on more than the shape of the stream: embeddings
            of their own, or keys of earlier layers.
        index_lists: the config fields with indices of layers, which are renumbered.
        other_lists: config fields with a list that has nothing to do with layers.
        computed_lists: properties of the configuration class that compute a value for each layer from its index. The
            pruned architecture holds those of the kept layers (:func:`stored_lists`).
        needed_kinds: kind of layers -> the kind of layers that read their keys and values, and need them.
        closed: axis (or "layers") -> reason why no plan may cut it.
        layers_alone: reason why the type has no table, and nothing is removed but whole layers; "" = it has one.
        plan_obstacle: (config, plan) -> reason why a model of the type cannot lose what a plan removes, or None.
        refused_switches: switch of the configuration -> (the value that is not supported, the reason).
        build_layer: (layer class, config of one layer, index) -> decoder layer at that layer's sizes; for stock layers
            that do not read every size from the configuration.
        vllm_layer: import path "module:name" of the vLLM decoder layer that reads sizes per layer, for families that
            vLLM's LLaMA serves with such layers; ``pyprune.serving.vllm.layers`` has some.
        vllm: import path "module:name" of the vLLM model that serves sizes per layer, for all other families.
        gguf: architectures of llama.cpp that can hold the family, first fit wins; or a sentence why there is none.
        refuse: (config) -> reason this variant is not supported; None = it is.
        plain_values: (config) -> values that mean the same without rules that derive a size from others.
        unserved: (config.json as plain data) -> reason why vLLM's class of the stock architecture refuses it, or None.

    Raises:
        UnsupportedModelError: a row names a kind, block, axis or channels of a head that the family does not have.
    """

    model_type: str
    classes: StockClasses
    rows: tuple[Row, ...]
    stock_targets: tuple[StockTarget, ...]
    layers_path: str = "model.layers"
    attention_module: str = "self_attn"
    mlp_modules: tuple[str, ...] = ("mlp",)
    more_values: Mapping[str, int] = field(default_factory=dict, hash=False)
    kinds: Mapping[str, Mapping[Block, tuple[Axis, ...]]] = field(default_factory=lambda: KINDS, hash=False)
    layer_kinds: Callable[[PretrainedConfig], tuple[str, ...]] = alike_layers
    block_sizes: Callable[[Family, PretrainedConfig, str], Mapping[Block, BlockSizes]] = decoder_blocks
    parallel: bool = False
    norm: Literal["rms", "layer"] = "rms"
    unit_offset_norm: bool = False
    scaled_embedding: bool = False
    begins_with_bos: bool = False
    intermediate_field: str = "intermediate_size"
    mixture_fields: Mapping[Axis, str] = field(default_factory=dict, hash=False)
    kind_values: Callable[[PretrainedConfig, Sequence[str]], dict[str, Any]] = lambda config, kinds: {}
    has_head_dim_field: bool = True
    head_fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    gauge: bool = False
    carries_output_bias: bool = True
    inner_from_hidden: bool = False
    layer_values: int = 0
    needs_positions: bool = False
    needs_mask: bool = False
    hidden_fields: tuple[str, ...] = ("hidden_size",)
    layer_lists: tuple[str, ...] = ("layer_types",)
    last_word: str = ""
    layer_fields: tuple[str, ...] = ()
    layer_inputs: str = ""
    layer_scales: tuple[str, ...] = ()
    gives_more: Callable[[PretrainedConfig], bool] = lambda config: False
    index_lists: tuple[str, ...] = ()
    other_lists: tuple[str, ...] = ()
    computed_lists: tuple[str, ...] = ()
    needed_kinds: Mapping[str, str] = field(default_factory=dict, hash=False)
    closed: Mapping[str, str] = field(default_factory=dict)
    layers_alone: str = ""
    plan_obstacle: Callable[[PretrainedConfig, PrunePlan], str | None] = lambda config, plan: None
    refused_switches: Mapping[str, tuple[bool | None, str]] = field(default_factory=dict)
    build_layer: Callable[[type[nn.Module], Any, int], nn.Module] = _stock_layer
    vllm_layer: str = ""
    vllm: str = ""
    gguf: tuple[GgufForm, ...] | str = "pyprune has no layout for this family."
    refuse: Callable[[PretrainedConfig], str | None] = lambda config: None
    plain_values: Callable[[PretrainedConfig], Mapping[str, Any]] = lambda config: {}
    unserved: Callable[[Mapping[str, Any]], str | None] = lambda config: None

    def __post_init__(self) -> None:
        for row in self.rows:
            where = f"of the row {row.pattern!r} ({self.model_type})"
            if row.kind is not None and row.kind not in self.kinds:
                raise UnsupportedModelError(did_you_mean(row.kind, self.kinds, f"kind {where}"))
            blocks = [self.kinds[row.kind]] if row.kind else list(self.kinds.values())
            names = {name for kind in blocks for name in kind}
            if row.block is not None and row.block not in names:
                raise UnsupportedModelError(did_you_mean(row.block, names, f"block {where}"))
            if row.head_dim not in (head_dims := {HEAD_DIM, *self.head_fields}):
                raise UnsupportedModelError(did_you_mean(row.head_dim, head_dims, f"channels of a head {where}"))
            axes = {axis for kind in blocks for axis in kind.get(row.block or "", ())}
            axes |= {axis for axis, channels in PER_HEAD.items() if channels in axes}
            for axis in (axis for dimension in row.dimensions for axis in dimension):
                if axis not in axes and axis not in SHARED_AXES:
                    raise UnsupportedModelError(did_you_mean(axis, {*axes, *SHARED_AXES}, f"axis {where}"))

    def reads_raw_stream(self, reader: Row) -> bool:
        """Return True if no weight stands between the stream and a reader: no norm (OLMo 2), or one without (OLMo)."""
        return not any(
            row.role == "pre_norm"
            and row.block in (None, reader.block)
            and (row.kind is None or reader.kind in (None, row.kind))
            for row in self.rows
        )

    @cached_property
    def bare_head(self) -> bool:
        """True when no weight stands between the stream and the head: the final norm has none."""
        return not any(row.role == "final_norm" for row in self.rows)

    def closed_axes(self, config: PretrainedConfig) -> dict[str, str]:
        """Return the axes that no plan may cut, with the reason for each.

        Axes are hidden, heads and ffn, and "layers".
        """
        closed = dict(self.closed)
        if self.layers_alone:
            return closed
        for name in _unknown_lists(config, self.layer_lists + self.index_lists + self.other_lists):
            closed["layers"] = f"{name} of its configuration has as many values as layers, and may belong to them"
        if config.tie_word_embeddings and self.bare_head and self.norm == "rms":
            closed["hidden"] = "its head is tied to the embedding, and its final norm has no weight"
        if config.tie_word_embeddings and self.norm == "layer" and self.unit_offset_norm:
            closed["hidden"] = "its head is tied to the embedding, which rules out the gauge of its LayerNorm"
        return closed

    def width_fields(self, kind: str) -> Mapping[Axis, str]:
        """Return axis -> the config field that holds its width, of the MLP of a kind of layers."""
        return self.mixture_fields if is_mixture(kind) else {"ffn": self.intermediate_field}

    @property
    def pruned_config(self) -> str:
        """Name of the pruned configuration class."""
        return "Pruned" + self.classes.config.rpartition(":")[2]

    @property
    def pruned_model(self) -> str:
        """Name of the pruned causal LM, which stands in config.json as its architecture."""
        return "Pruned" + self.classes.model.rpartition(":")[2]

    @property
    def served_by(self) -> str:
        """Import path "module:name" of the vLLM model that serves sizes per layer; "" = vLLM does not serve them."""
        return f"pyprune.serving.vllm.model:{self.pruned_model}" if self.vllm_layer else self.vllm

    def sizes(self, config: PretrainedConfig) -> Sizes:
        """Read the dense sizes off a configuration."""
        layers = self.layer_kinds(config)
        kinds = {kind: self.block_sizes(self, config, kind) for kind in self.kinds if kind in layers}
        inputs = getattr(config, self.layer_inputs, 0) if self.layer_inputs else 0
        return Sizes(config.hidden_size, config.vocab_size, kinds, layers, inputs or 0)

    def head_dim_values(self, dense: Sizes) -> dict[str, int]:
        """Return the config value that states the channels of a head; {} if no single field does."""
        return {HEAD_DIM: dense.head_dim} if dense.head_dim and not self.head_fields else {}

    def gauges(self, config: PretrainedConfig) -> bool:
        """True when slicing the hidden axis goes through the gauge.

        A head that is tied to the embedding reads what the gauge shifts, so it rules the gauge out.
        """
        return self.gauge and not config.tie_word_embeddings

    def variant_obstacle(self, config: PretrainedConfig) -> str | None:
        """Return why this variant of the model type is not supported, or None."""
        for name, (value, reason) in self.refused_switches.items():
            if getattr(config, name, None) is value:
                return f"{name} is {value}: {reason}."
        return self.refuse(config)

    def needs_virtual_norm(self, config: PretrainedConfig, plan: PrunePlan) -> bool:
        """True when the sliced model needs a LayerNorm that divides by the original hidden size."""
        sliced = len(plan.hidden) != plan.dense.hidden_size
        return self.norm == "layer" and sliced and not self.gauges(config)

    def offset(self, row: Row) -> float:
        """Return the constant added to a parameter in use: 1 for norms that multiply by 1 + w, else 0.

        A removed parameter is minus this.
        """
        return 1.0 if self.unit_offset_norm and row.is_norm_weight else 0.0

    def effective(self, row: Row, values: Tensor) -> Tensor:
        """Return a parameter's values plus their :meth:`offset`; the same tensor if that is 0."""
        offset = self.offset(row)
        return values + offset if offset else values

    def match(self, name: str, kinds: Sequence[str] = ()) -> tuple[Row, int | None]:
        """Find the row of a parameter name, and the index of its layer (None outside the layers).

        Args:
            name: of the parameter.
            kinds: kind of every layer, by the indices in names; () if no two kinds share a name.

        Raises:
            UnsupportedModelError: no row matches; a parameter is never ignored.
        """
        for row in self.rows:
            match = row.regex.match(name)
            if match is None:
                continue
            index = int(match["i"]) if "i" in row.regex.groupindex else None
            if index is None or row.kind is None or not kinds or (index < len(kinds) and kinds[index] == row.kind):
                return row, index
        if "language_model." in name:
            advice = "It has the name of a text part of a larger model. Rename it without language_model."
        else:
            advice = "The model has a part this family does not know; add a row in pyprune/families."
        raise UnsupportedModelError(
            f"No row of the {self.model_type!r} family table describes the parameter {name!r}. {advice}"
        )

    def buffer_row(self, name: str) -> Row | None:
        """Return the row of a buffer with a number for each expert; None for any other buffer."""
        rows = (row for row in self.rows if row.counts_experts)
        return next((row for row in rows if row.regex.match(name)), None)

    def layers(self, model: PreTrainedModel) -> nn.ModuleList:
        """Return the decoder layers; each maps hidden states [B, T, H] to hidden states [B, T, H]."""
        module: Any = model
        for part in self.layers_path.split("."):
            module = getattr(module, part)
        return module  # type: ignore[no-any-return]

    def block_norms(self, block: Block, kind: str = DECODER) -> tuple[str, ...]:
        """Return the names inside a layer of a kind of the norms that only serve ``block``."""
        prefix = f"{self.layers_path}.{{i}}."
        return tuple(
            row.pattern.removeprefix(prefix).removesuffix(".weight")
            for row in self.rows
            if row.block == block and row.is_norm_weight and row.kind in (None, kind)
        )

    def output_row(self, block: Block, kinds: Collection[str] = ()) -> Row:
        """Return the row of the matrix [hidden, axis] through which ``block`` writes to the stream.

        Args:
            block: of any layer.
            kinds: of the layers of the model; () = all kinds of the family.

        Raises:
            UnsupportedModelError: it has none, or several, or it is a mixture of experts.
        """
        kinds = kinds or self.kinds
        if block == "mlp":
            self.refuse_experts("this step", kinds)
        writers = (row for row in self.rows if row.role == "writer" and row.block == block and len(row.axes) > 1)
        # Once, although layers of several kinds may have it.
        rows = {row.pattern: row for row in writers if row.kind is None or row.kind in kinds}
        if len(rows) != 1:
            raise UnsupportedModelError(
                f"The block {block!r} of {self.model_type!r} writes to the stream through {len(rows)} matrices, "
                "and this step needs one. Choose a method that removes whole layers."
            )
        return next(iter(rows.values()))

    def refuse_experts(self, reader: str, kinds: Iterable[str]) -> None:
        """Refuse a step that reads linear modules only, for models with mixtures of experts.

        Args:
            reader: the step, as the subject of a sentence.
            kinds: of the layers of the model.

        Raises:
            UnsupportedModelError: one of the kinds has a mixture of experts.
        """
        if any(map(is_mixture, kinds)):
            raise UnsupportedModelError(
                f"{reader[0].upper()}{reader[1:]} reads linear modules, and the experts of {self.model_type!r} models "
                "are none. Choose the method wanda, magnitude or taylor, or one that removes whole layers (last)."
            )

    def output_projection(self, block: Block, kinds: Collection[str] = ()) -> str:
        """Return the name inside a layer of the linear module of :meth:`output_row`."""
        return self.output_row(block, kinds).pattern.removeprefix(f"{self.layers_path}.{{i}}.").removesuffix(".weight")

    def blocks_of_layers(self, config: PretrainedConfig) -> list[tuple[Block, ...]]:
        """Return the blocks of every layer, in the order in which it runs them; of a cut model those of its layers."""
        return [tuple(self.kinds[kind]) for kind in self.layer_kinds(config)]

    def removable_layers(self, kinds: Sequence[str]) -> tuple[int, ...]:
        """Return the layers that can be removed whatever else is kept, ascending.

        Args:
            kinds: of all layers.
        """
        return tuple(index for index, kind in enumerate(kinds) if self.needed_kinds.get(kind) not in kinds)

    def block_modules(self, block: Block, layer: nn.Module | None = None) -> tuple[str, ...]:
        """Return the names of the modules inside a layer that make up ``block``, in order.

        Args:
            block: of the layer.
            layer: which may lack some of the modules that other layers have; None = any.

        Raises:
            UnsupportedModelError: the block cannot be left out without its layer.
        """
        if block not in BLOCKS:
            raise UnsupportedModelError(
                f"The block {block!r} of {self.model_type!r} can only be left out with its whole layer. "
                "Choose a method that removes layers."
            )
        names = (self.attention_module,) if block == "attention" else self.mlp_modules
        return tuple(name for name in names if layer is None or getattr(layer, name, None) is not None)

    def plan(self, config: PretrainedConfig) -> PrunePlan:
        """Return the identity plan of a model with this configuration."""
        return PrunePlan.identity(self.model_type, self.sizes(config))


def axis_width(axis: Axis, dense: Sizes, layer: int, head_dim: str = HEAD_DIM) -> int:
    """Return the channels of a layer of a dense model along an axis that a plan can cut, or that can be fused.

    Args:
        axis: of a table.
        dense: the dense sizes.
        layer: index of the layer.
        head_dim: as in :class:`Row`.
    """
    if axis == "hidden":
        return dense.hidden_size
    name, width = unit_of(axis, dense, layer, head_dim)
    return dense.units(name, layer) * width


def unit_of(axis: Axis, dense: Sizes, layer: int, head_dim: str) -> tuple[str, int]:
    """Return the name in plans of an axis of a block, and the channels of one of its units."""
    counted = PER_HEAD.get(axis, axis)
    name = PLAN_AXES.get(counted, counted)
    return name, 1 if axis in PER_HEAD else dense.channels(name, layer, head_dim)


def kept_indices(
    axis: Axis, layer: LayerPlan | None, plan: PrunePlan, head_dim: str = HEAD_DIM
) -> tuple[int, ...] | None:
    """Return the kept channels along ``axis`` (heads expanded to head x head_dim channels); None = all of them.

    Args:
        axis: of a table.
        layer: the kept parts of a layer; None outside the layers.
        plan: the kept parts of the model.
        head_dim: as in :class:`Row`.
    """
    if axis == "hidden":
        return None if len(plan.hidden) == plan.dense.hidden_size else plan.hidden
    if axis == "layers":
        width = plan.dense.layer_inputs
        return tuple(i * width + c for i in plan.kept_layers for c in range(width)) if plan.removed_layers else None
    if layer is None or axis in SHARED_AXES:
        return None
    name, width = unit_of(axis, plan.dense, layer.index, head_dim)
    units = layer.units(name)
    if len(units) == plan.dense.units(name, layer.index):
        return None
    return tuple(unit * width + c for unit in units for c in range(width))


def kept_positions(row: Row, layer: LayerPlan | None, plan: PrunePlan) -> list[tuple[int, ...] | None]:
    """Return the kept positions along every dimension of a parameter; None = all of them.

    Args:
        row: of the parameter.
        layer: the kept parts of its layer; None outside the layers.
        plan: the kept parts of the model.
    """
    return [_kept_along(axes, row, layer, plan) for axes in row.dimensions]


def _kept_along(axes: tuple[Axis, ...], row: Row, layer: LayerPlan | None, plan: PrunePlan) -> tuple[int, ...] | None:
    """Return the kept positions along a dimension of a row that counts these axes."""
    kept = [kept_indices(axis, layer, plan, row.head_dim) for axis in axes]
    if len(kept) == 1 or layer is None or all(indices is None for indices in kept):
        return kept[0]
    positions: list[int] = []
    for indices, part in zip(kept, fused_parts(row, plan.dense, layer.index), strict=True):
        positions += part.positions(range(part.width) if indices is None else indices)
    return tuple(sorted(positions))


@dataclass(frozen=True)
class FusedPart:
    """The place of one axis in a fused dimension: a run of channels in each of some groups of positions.

    Attributes:
        groups: groups of the whole dimension; 1 if whole axes follow one another.
        step: positions of a group.
        start: the part's first position in a group.
        length: its positions in a group.
    """

    groups: int
    step: int
    start: int
    length: int

    @property
    def width(self) -> int:
        """Channels of the axis."""
        return self.groups * self.length

    def positions(self, channels: Iterable[int]) -> list[int]:
        """Return the positions of channels of the axis."""
        return [c // self.length * self.step + self.start + c % self.length for c in channels]

    def of(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the axis's part of a tensor, whose other dimensions do not change."""
        if self.groups == 1:
            return tensor.narrow(dim, self.start, self.length)
        groups: Tensor = tensor.unflatten(dim, (self.groups, self.step))
        return groups.narrow(dim + 1, self.start, self.length).flatten(dim, dim + 1)


def fused_parts(row: Row, dense: Sizes, layer: int) -> tuple[FusedPart, ...]:
    """Return the places of the axes in the fused dimension of a row, in order."""
    dim = row.fused_dim
    axes = () if dim is None else row.dimensions[dim]
    groups = 1
    if row.by_group:
        groups = dense.units("kv_heads" if "heads" in axes else axes[0], layer)
    elif row.by_head:
        groups = dense.units("query_heads", layer)
    lengths = [axis_width(axis, dense, layer, row.head_dim) // groups for axis in axes]
    return tuple(
        FusedPart(groups, sum(lengths), sum(lengths[:number]), length) for number, length in enumerate(lengths)
    )


def block_is_skipped(row: Row, layer: LayerPlan | None) -> bool:
    """True when the row belongs to a sub-block that the plan leaves out of this layer."""
    return layer is not None and row.block is not None and not layer.keeps(row.block)


def shapes_after(family: Family, shapes: Mapping[str, tuple[int, ...]], plan: PrunePlan) -> dict[str, tuple[int, ...]]:
    """Return the shapes that the plan leaves, by dense parameter name (removed parameters are absent).

    Args:
        family: the model's family.
        shapes: parameter name -> shape; tied parameters once.
        plan: the parts to keep.
    """
    layers = {layer.index: layer for layer in plan.layers}
    result: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        row, index = family.match(name, plan.dense.layers)
        layer = layers.get(index) if index is not None else None
        if (index is not None and layer is None) or block_is_skipped(row, layer):
            continue
        kept = kept_positions(row, layer, plan) or [None] * len(shape)
        result[name] = tuple(n if k is None else len(k) for n, k in zip(shape, kept, strict=True))
    return result


def parameters_after(family: Family, shapes: Mapping[str, tuple[int, ...]], plan: PrunePlan) -> int:
    """Count the parameters that the plan leaves of a source with these shapes (added zero biases excluded)."""
    return sum(prod(shape) for shape in shapes_after(family, shapes, plan).values())


def parameter_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every parameter, tied ones once. Works on meta-device models."""
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def count_parameters(model: nn.Module) -> int:
    """Count parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters())


def cut_axes(plan: PrunePlan) -> set[str]:
    """Return the axes of which a plan removes something: "layers", hidden, and those of kept blocks (heads, ffn)."""
    dense = plan.dense
    axes = {"layers"} if len(plan.layers) < dense.num_layers else set()
    if plan.removed_hidden:
        axes.add("hidden")
    table_names = {name: axis for axis, name in PLAN_AXES.items()}
    for name in dense.axes:
        if any(0 < len(layer.units(name)) < dense.units(name, layer.index) for layer in plan.layers):
            axes.add(table_names.get(name, name))
    return axes


def closed_obstacle(plan: PrunePlan, family: Family, config: PretrainedConfig) -> str | None:
    """Return the first closed axis that a plan cuts, with its reason, as part of a sentence; None if there is none."""
    closed = family.closed_axes(config)
    axis = next(iter(closed.keys() & cut_axes(plan)), None) if closed else None
    return f"the axis {axis}, which is closed in this {plan.model_type!r} model: {closed[axis]}" if axis else None


def check_plan(plan: PrunePlan, family: Family, config: PretrainedConfig) -> None:
    """Refuse a plan made for another model.

    Raises:
        PlanError: the plan is inconsistent, its model type or dense sizes differ from the model's, or it removes a
            block alone that can only be removed with its layer, or layers without which the others would change.
    """
    plan.validate()
    if plan.model_type != family.model_type:
        raise PlanError(f"The plan is for model type {plan.model_type!r}, but the model is {family.model_type!r}.")
    if reason := closed_obstacle(plan, family, config):
        raise PlanError(f"The plan cuts {reason}.")
    sizes = family.sizes(config)
    if plan.dense != sizes:
        raise PlanError(
            f"The plan is for a dense model of {plan.dense}, but this model has {sizes}. "
            "Apply a plan to the dense model that it was made for."
        )
    for layer in plan.layers:
        for block in sizes.blocks(layer.index):
            if not layer.keeps(block) and block not in BLOCKS:
                raise PlanError(
                    f"The plan removes the block {block!r} of layer {layer.index} alone. Keep it, or remove the layer."
                )
    kept = {layer.kind for layer in plan.layers}
    for index in plan.removed_layers:
        if (reader := family.needed_kinds.get(sizes.layers[index])) in kept:
            raise PlanError(
                f"The plan removes layer {index}, whose keys and values kept layers of the kind {reader} read. Keep "
                "it, or remove those too."
            )
    if reason := family.plan_obstacle(config, plan):
        raise PlanError(reason)
