"""Families of model types without a table, inferred from a tiny model of the type's own classes.

No two sizes of the tiny model are equal, so that the shape of a parameter names its axes. One forward pass shows what
its norms normalise: the residual stream in front of a block, or the output of a block. What inference cannot know is in
``exceptions.py``. The contract in ``tests/families`` proves the result for each type that is supported.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from pyprune.errors import UnsupportedModelError, shown
from pyprune.families.base import (
    MIXTURE,
    Axis,
    Block,
    Dimension,
    Family,
    Role,
    Row,
    StockClasses,
    StockTarget,
    alike_layers,
    cut_axes,
    is_mixture,
    kept_lists,
    renumbered,
    stored_lists,
)
from pyprune.families.common import (
    first_obstacle,
    heads_obstacle,
    output_bias_obstacle,
    square_obstacle,
    tied_head_obstacle,
    width_obstacle,
)
from pyprune.families.engines import vllm_layer, vllm_mixture
from pyprune.families.exceptions import EXCEPTIONS, FINISH, TINY, VARIANTS
from pyprune.families.gemma4 import GIVEN
from pyprune.families.gguf_types import gguf_forms
from pyprune.families.latent import (
    HEAD_FIELDS,
    latent_channels,
    tiny_head_dims,
    tiny_latent_values,
    tiny_latent_widths,
)
from pyprune.families.mixtures import (
    SHARED_WIDTH,
    TINY_EXPERT_FFN,
    TINY_EXPERTS,
    TINY_WIDTHS,
    block_sizes,
    kind_values,
    mixture_values,
    mlp_kinds,
    one_width_obstacle,
    rows_obstacle,
    shared_width_obstacle,
    tiny_mixture_values,
)
from pyprune.families.prefix import dense_type
from pyprune.plan import DECODER, PrunePlan

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig

VOCAB, LAYERS, FFN, HEADS, KV_HEADS, HEAD_DIM = 211, 5, 46, 6, 3, 16
HIDDEN: dict[str, int] = {"any": 62, "multiple of heads": 60, "heads times head_dim": HEADS * HEAD_DIM}
"""Rule of a configuration class for its hidden size -> the hidden size of a tiny model that keeps it."""
OUTPUTS = ("o_proj", "out_proj", "dense")
"""Names of the matrix that writes the heads to the stream; only used if the heads are as wide as the stream."""
_WIDTHS: dict[int, Dimension] = {
    VOCAB: "vocab",
    HEADS * HEAD_DIM: "heads",
    KV_HEADS * HEAD_DIM: "kv_heads",
    **dict.fromkeys((FFN, TINY_EXPERT_FFN), "ffn"),
    **dict.fromkeys((2 * FFN, 2 * TINY_EXPERT_FFN), ("ffn", "ffn")),
    HEAD_DIM: "head_dim",
    HEADS: "each_head",
    KV_HEADS: "each_kv_head",
    1: "inner",
    2 * HEADS * HEAD_DIM: ("heads", "heads"),
}
_BLOCK_OF: dict[Dimension, Block] = {
    "heads": "attention",
    "kv_heads": "attention",
    "ffn": "mlp",
    ("ffn", "ffn"): "mlp",
    ("heads", "heads"): "attention",
    "shared_ffn": "mlp",
    ("shared_ffn", "shared_ffn"): "mlp",
    "experts": "mlp",
    "each_head": "attention",
    "each_kv_head": "attention",
}
"""Block of a parameter, by an axis that is not the stream."""
_SHARED: dict[Dimension, Dimension] = {"ffn": "shared_ffn", ("ffn", "ffn"): ("shared_ffn", "shared_ffn")}
_PER_HEAD = ("each_head", "each_kv_head")
WRITTEN_ANEW = ("model_type", "architectures", "_name_or_path", "transformers_version", "quantization_config")
"""Fields of a configuration that describe the checkpoint that it was read from."""
ANY_MLP = ""
"""Stands for the MLP of layers whose word tells all."""
_KIND_FIELDS = ("layer_types", "layers_block_type")
"""Fields of configurations that name the kind of every layer."""


class _Obstacle(Exception):
    """The reason why nothing can be inferred."""


def tiny_values(rule: str, layers: int = LAYERS) -> dict[str, Any]:
    """Return configuration values of a tiny model in which no two sizes are equal, unless the rule makes them so.

    Args:
        rule: a key of :data:`HIDDEN`.
        layers: number of layers.
    """
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN[rule],
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": FFN,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }


def own_values(model_type: str, layers: int = LAYERS) -> dict[str, Any]:
    """Return the values of a tiny model that only its type has; a tuple is repeated until each layer has a value."""
    return {
        name: [value[i % len(value)] for i in range(layers)] if isinstance(value, tuple) else value
        for name, value in TINY.get(model_type, {}).items()
    }


def tiny_sizes(model_type: str) -> dict[str, Any]:
    """Return configuration values of a tiny model of a type, with sizes that its classes allow.

    Raises:
        UnsupportedModelError: none can be built or understood.
    """
    if model_type in GIVEN:
        return tiny_values("any") | own_values(model_type)
    try:
        return _tiny_sizes(model_type, _first_that_builds(model_type)[0], LAYERS)
    except _Obstacle as obstacle:
        raise UnsupportedModelError(f"No tiny model of the type {model_type!r} can be built: {obstacle}.") from obstacle


@cache
def inferred_family(model_type: str) -> Family | str:
    """Return the family of a model type without a file of its own, or the reason why none can be inferred.

    The reason is "" for a type of which Transformers has no causal LM.
    """
    if model_type not in causal_types():
        return ""
    if model_type in GIVEN:
        return GIVEN[model_type]
    with undisturbed():
        try:
            return _infer(model_type)
        except _Obstacle as obstacle:
            return str(obstacle)


@cache
def causal_types() -> Mapping[str, tuple[str, str]]:
    """Return model type -> names of the configuration class and the causal LM, of every type of Transformers."""
    auto = "transformers.models.auto."
    configs: Mapping[str, str] = import_module(f"{auto}configuration_auto").CONFIG_MAPPING_NAMES
    models: Mapping[str, str] = import_module(f"{auto}modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return {name: (configs[name], models[name]) for name in models if name in configs}


@contextmanager
def undisturbed() -> Iterator[None]:
    """Compute on the CPU in float32, without warnings, whatever the caller has set; keep its random numbers."""
    import torch
    from transformers.utils import logging

    level, dtype = logging.get_verbosity(), torch.get_default_dtype()
    logging.set_verbosity(100)  # tiny sizes make some classes warn
    torch.set_default_dtype(torch.float32)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.inference_mode(mode=False):
            torch.manual_seed(0)
            yield
    finally:
        logging.set_verbosity(level)
        torch.set_default_dtype(dtype)


@dataclass
class _Facts:
    """The facts that one tiny model shows.

    Attributes:
        model: class of the causal LM.
        layers: kind -> class of its decoder layers.
        layers_path: dotted path of their ModuleList.
        kinds: kind of every layer of the tiny model.
        kind_of: (word in a list of the configuration, its MLP by :func:`mlp_kinds`) -> kind of layer, see
            :func:`_find_kinds`; empty if all mixers are alike.
        shut: (kind, module of a layer) -> reason why its inside is no axis, so that it is a closed block.
        rows: pattern -> row; the pattern names the kind of layers (:meth:`start`).
        modules: block -> names of the modules of a layer that hold it.
        flags: values of fields of :class:`Family`.
        closed: axis -> reason why it cannot be cut.
    """

    model: type[Any]
    layers: dict[str, type[Any]]
    layers_path: str
    kinds: tuple[str, ...]
    kind_of: dict[tuple[str, str], str] = field(default_factory=dict)
    shut: dict[tuple[str, str], str] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    modules: dict[Block, tuple[str, ...]] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    closed: dict[str, str] = field(default_factory=dict)

    @property
    def has_mixtures(self) -> bool:
        """Return whether the MLP of any layer is a mixture of experts."""
        return any(map(is_mixture, self.layers))

    @property
    def layer_kinds(self) -> Callable[[PretrainedConfig], tuple[str, ...]]:
        """Return the function that tells the kind of every layer by a configuration."""
        return partial(_layer_kinds, self.kind_of) if self.kind_of else mlp_kinds if self.has_mixtures else alike_layers

    def start(self, kind: str) -> str:
        """Return the beginning of patterns in layers of a kind."""
        return f"{self.layers_path}.{{{kind}}}."

    def public(self, reason: str) -> str:
        """Return a reason with patterns as families have them."""
        for kind in self.layers:
            reason = reason.replace(self.start(kind), f"{self.layers_path}.{{i}}.")
        return reason

    def split(self, name: str) -> tuple[str, str] | None:
        """Return the kind of the layer of a parameter or module, and the name inside it; None outside the layers."""
        inside = re.match(re.escape(self.layers_path) + r"\.(\d+)\.(.*)\Z", name)
        return (self.kinds[int(inside[1])], inside[2]) if inside else None

    def blocks(self) -> dict[str, dict[Block, tuple[Axis, ...]]]:
        """Return kind -> its blocks -> their axes."""
        table: dict[str, dict[Block, tuple[Axis, ...]]] = {}
        for kind in sorted(self.layers, key=is_mixture):
            table[kind] = {module: () for other, module in self.shut if other == kind}
            owned = {row.block for row in self.rows.values() if row.pattern.startswith(self.start(kind))}
            table[kind] |= {"attention": ("heads", "kv_heads")} if "attention" in owned else {}
            table[kind] |= {"mlp": ("ffn",)} if "mlp" in owned else {}
        return table

    def final_rows(self) -> tuple[Row, ...]:
        """Return the rows with patterns of a family; a row has a kind if another row has its pattern."""
        table, kinds = self.blocks(), tuple(self.layers)
        parts: dict[tuple[str, Block | None], list[Row]] = {}
        owned: dict[str, list[tuple[list[str], Row]]] = {}
        for pattern, row in self.rows.items():
            kind = next((kind for kind in kinds if pattern.startswith(self.start(kind))), None)
            if kind is None:
                owned[pattern] = [([*kinds], row)]
            else:
                plain = replace(row, pattern=pattern.replace(self.start(kind), f"{self.layers_path}.{{i}}."))
                parts.setdefault((kind, row.block), []).append(plain)
        for (kind, block), rows in parts.items():
            owners = [other for other in kinds if block is None or block in table[other]]
            if any(parts.get((other, block)) != rows for other in owners):
                owners = [kind]
            for row in rows if kind == owners[0] else ():
                owned.setdefault(row.pattern, []).append((owners, row))
        return tuple(
            row if kind is None else replace(row, kind=kind)
            for places in owned.values()
            for owners, row in places
            for kind in (owners if len(places) > 1 or len(owners) < len(kinds) else [None])
        )


def _infer(model_type: str) -> Family:
    """Infer the family of a type.

    Raises:
        _Obstacle: it is not a dense decoder whose parts can be told apart.
    """
    rule, facts = _first_that_builds(model_type)
    refused = _merge_switches(facts, model_type, rule, {})
    if variant := VARIANTS.get(model_type):
        other = _facts_of(_config(model_type, rule, **variant), rule)
        _merge_switches(other, model_type, rule, variant)
        _merge(facts, other, is_variant=True)
    lists, reason = _layer_lists(model_type, rule, facts)
    for name, value in _config(model_type, rule).to_dict().items():
        if name in lists["layer_lists"] and all(count == HEADS for count in value):
            facts.closed["heads"] = f"{name} of its configuration counts them layer by layer"
    if reason:
        facts.closed["layers"] = reason
    config = _config(model_type, rule)
    config_class = type(config)
    classes = (config_class, facts.model, facts.layers[facts.kinds[0]])
    if not _is_tied(config):
        refused["tie_word_embeddings"] = (True, "its class does not tie the head to the embedding")
    mixture = _mixture(config, facts)
    counts_shared = SHARED_WIDTH in mixture.get("mixture_fields", {}).values()
    obstacle = _stock_obstacle(model_type, rule, facts, counts_shared=counts_shared)
    if lists["computed_lists"]:
        obstacle = first_obstacle(partial(_period_obstacle, lists["computed_lists"]), obstacle)
    if mixture and mixture["mixture_fields"]["ffn"] == mixture["intermediate_field"]:
        obstacle = first_obstacle(obstacle, one_width_obstacle)
    stock = StockTarget(model_type, obstacle)
    kinds: dict[str, Any] = {
        "kinds": facts.blocks(),
        "layer_kinds": facts.layer_kinds,
        "block_sizes": partial(block_sizes, None),
    }
    family = Family(
        model_type=model_type,
        classes=StockClasses(*(f"{c.__module__}:{c.__qualname__}" for c in classes)),
        rows=facts.final_rows(),
        stock_targets=(stock,),
        layers_path=facts.layers_path,
        attention_module=facts.modules.get("attention", ("",))[0],
        mlp_modules=facts.modules.get("mlp", ()),
        head_fields=HEAD_FIELDS if latent_channels(config) and "attention" in facts.modules else {},
        inner_from_hidden=bool(facts.shut) and _inner_depends_on_hidden(model_type, rule, facts),
        **lists,
        index_lists=_index_lists(model_type),
        closed={axis: facts.public(reason) for axis, reason in facts.closed.items()},
        refused_switches={name: (value, facts.public(reason)) for name, (value, reason) in refused.items()},
        **facts.flags,
        **(kinds | mixture),
        vllm_layer=vllm_layer(model_type),
        vllm=vllm_mixture(model_type),
        gguf=gguf_forms(model_type),
    )
    narrow = rule == "heads times head_dim"
    if narrow or counts_shared or facts.shut or facts.kind_of:
        family = replace(family, build_layer=partial(_build_resized_layer, facts, narrow))
    return replace(family, **EXCEPTIONS.get(model_type, {}))


def _layer_kinds(kind_of: Mapping[tuple[str, str], str], config: PretrainedConfig) -> tuple[str, ...]:
    """Return the kind of every layer by the word for its mixer in a configuration, and by its MLP.

    Raises:
        UnsupportedModelError: the tiny model had no such layer.
    """
    pairs = list(zip(_layer_words(config), mlp_kinds(config), strict=False))
    kinds = [kind_of.get(pair) or kind_of.get((pair[0], ANY_MLP)) for pair in pairs]
    for kind, (word, mlp) in zip(kinds, pairs, strict=True):
        if kind is None:
            raise UnsupportedModelError(
                f"pyprune knows no layers of the kind {shown(_kind_name(word, mlp))} in {config.model_type!r} models, "
                f"but only {', '.join(dict.fromkeys(kind_of.values()))}. Prune another model of this type."
            )
    return tuple(kind for kind in kinds if kind)


def _kind_name(word: str, mlp: str) -> str:
    """Return the name of the layers whose mixer has this word, with a mixture of experts or without."""
    return f"{word}_{MIXTURE}" if mlp == MIXTURE else word


def _layer_words(config: PretrainedConfig) -> list[str]:
    lists = (getattr(config, name, None) for name in _KIND_FIELDS)
    return next((list(words) for words in lists if isinstance(words, list | tuple)), [])


def _first_that_builds(model_type: str) -> tuple[str, _Facts]:
    """Return the rule of the hidden size under which a tiny model can be built and understood, and its facts."""
    reasons: list[str] = []
    for rule in HIDDEN:
        try:
            return rule, _facts_of(_config(model_type, rule), rule)
        except _Obstacle as obstacle:
            reasons.append(str(obstacle))
    raise _Obstacle(next((reason for reason in reasons if not reason.startswith("its ")), reasons[0]))  # a parameter


def _config(model_type: str, rule: str, layers: int = LAYERS, **values: Any) -> PretrainedConfig:
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(model_type, **{**_tiny_sizes(model_type, rule, layers), **values})
    except Exception as error:  # checks of any configuration class
        raise _Obstacle(f"its configuration refuses the sizes of a tiny model: {shown(error)}") from error


def _tiny_sizes(model_type: str, rule: str, layers: int) -> dict[str, Any]:
    mixture = tiny_mixture_values(_fields(model_type), layers, HIDDEN[rule])
    latent = tiny_latent_values(_fields(model_type), HEADS)
    return tiny_values(rule, layers) | mixture | latent | own_values(model_type, layers)


@cache
def _fields(model_type: str) -> frozenset[str]:
    """Return the names of the fields of a configuration class."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.for_model(model_type)
    except Exception as error:  # checks of any configuration class
        raise _Obstacle(f"its configuration has no default values: {shown(error)}") from error
    return frozenset((*config.to_dict(), *config.attribute_map))


def _mixture(config: PretrainedConfig, facts: _Facts) -> dict[str, Any]:
    """Return values of fields of :class:`Family` for a type with mixtures of experts; {} for another."""
    if not facts.has_mixtures:
        return {}
    axes = {axis for row in facts.rows.values() for dimension in row.dimensions for axis in dimension}
    return mixture_values(config.to_dict(), axes, facts.blocks())


def _switches(model_type: str, rule: str) -> Iterator[tuple[str, Any]]:
    """Yield the switches of a configuration class that all configurations do not have, and their other values.

    A rank is one that can be None: queries are then projected at once, and not by way of it.
    """
    from transformers import PretrainedConfig

    shared = {*PretrainedConfig().to_dict(), "use_cache", "tie_word_embeddings"}
    for name, value in _config(model_type, rule).to_dict().items():
        if isinstance(value, bool) and name not in shared:
            yield name, not value
        elif name == "q_lora_rank" and _can_be(model_type, rule, name, None):
            yield name, None


def _can_be(model_type: str, rule: str, name: str, value: Any) -> bool:
    """Return whether a configuration class takes a value of a field."""
    try:
        _config(model_type, rule, **{name: value})
    except _Obstacle:
        return False
    return True


def _merge_switches(
    facts: _Facts, model_type: str, rule: str, values: Mapping[str, Any]
) -> dict[str, tuple[bool | None, str]]:
    """Add the rows of a tiny model with each switch turned; return those that are refused, with value and reason."""
    refused: dict[str, tuple[bool | None, str]] = {}
    for name, value in _switches(model_type, rule):
        try:
            _merge(facts, _facts_of(_config(model_type, rule, **values, **{name: value}), rule))
        except _Obstacle as obstacle:
            refused[name] = (value, str(obstacle))
    return refused


def _merge(facts: _Facts, other: _Facts, *, is_variant: bool = False) -> None:
    """Add the rows of another configuration of the same class; refuse one whose parts mean something else.

    Args:
        facts: changed.
        other: of the other configuration.
        is_variant: it has other kinds of layers, and may lack a module of those that hold a block.
    """
    for pattern, row in other.rows.items():
        if facts.rows.get(pattern, row) != row:
            raise _Obstacle(f"{pattern} then has another meaning")
    modules, blocks = dict(other.modules), other.blocks()
    if is_variant:  # what it lacks counts as equal
        modules |= {block: names for block, names in facts.modules.items() if {*names} >= {*modules.get(block, names)}}
        blocks |= facts.blocks()
    if (facts.flags, facts.modules, facts.blocks() | blocks) != (other.flags, modules, blocks):
        raise _Obstacle("its norms, its embedding or its blocks are then of another kind")
    facts.layers |= other.layers
    facts.shut |= other.shut
    facts.kind_of |= other.kind_of
    facts.rows |= other.rows
    facts.closed |= other.closed


def _facts_of(config: PretrainedConfig, rule: str) -> _Facts:
    """Read the axes of every parameter off the shapes, and the roles of the norms off a forward pass."""
    try:
        model = build_on_meta(config)
        path, layers = _find_layers(model)
    except _Obstacle:
        raise
    except Exception as error:  # the constructor of any model class
        raise _Obstacle(f"its tiny model cannot be built: {shown(error)}") from error
    kinds, kind_of = _find_kinds(config, layers)
    classes = {kind: type(layer) for kind, layer in zip(kinds, layers, strict=True)}
    facts = _Facts(type(model), classes, path, kinds, kind_of)
    for name, parameter in model.named_parameters():
        _add_row(facts, model, name, tuple(parameter.shape))
    for name in sorted(model.state_dict().keys() - dict(model.named_parameters()).keys()):
        if tuple(model.get_buffer(name).shape) == (TINY_EXPERTS,):  # what corrects the choice of a router
            _add_row(facts, model, name, (TINY_EXPERTS,))
    _check_projections(facts)
    for row in [row for row in facts.rows.values() if row.role == "writer" and row.pattern.endswith(".weight")]:
        bias = row.pattern.removesuffix("weight") + "bias"  # compensation adds one where the model has none
        facts.rows.setdefault(bias, replace(row, pattern=bias, axes=("hidden",)))
    _watch_forward(facts, config)
    return facts


def _find_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    from torch import nn

    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == LAYERS:
            return name, module
    raise _Obstacle(f"it has no list of {LAYERS} layers, the number that its configuration names")


def _has_experts(layer: nn.Module) -> bool:
    """Return whether a layer has a parameter with matrices of several experts."""
    return any(p.ndim == 3 and p.shape[0] == TINY_EXPERTS for p in layer.parameters())


def _find_kinds(config: PretrainedConfig, layers: nn.ModuleList) -> tuple[tuple[str, ...], dict[tuple[str, str], str]]:
    """Return the kind of every layer, and what tells it.

    A kind is what the mixer is and what the MLP is. The configuration has a word for the mixer, and :func:`mlp_kinds`
    tells the MLP. Where the word alone tells it (a layer of one block), :data:`ANY_MLP` stands for the MLP. Words whose
    layers have the same parameters are one kind.
    """
    shapes = [{name: p.shape for name, p in layer.named_parameters()} for layer in layers]
    built = tuple(MIXTURE if _has_experts(layer) else DECODER for layer in layers)
    words, rule = _layer_words(config), mlp_kinds(config)
    alike = all(shape == shapes[built.index(mlp)] for shape, mlp in zip(shapes, built, strict=True))
    if config.model_type not in TINY or len(words) != len(layers) or alike:
        if MIXTURE in built and built != rule:
            raise _Obstacle(f"its layers are {', '.join(built)}, which no known field of its configuration names")
        return built, {}
    kinds = tuple(_kind_name(words[shapes.index(shape)], mlp) for shape, mlp in zip(shapes, built, strict=True))
    kind_of: dict[tuple[str, str], str] = {}
    for kind, word, mlp, named in zip(kinds, words, built, rule, strict=True):
        if kind_of.setdefault((word, mlp if mlp == named else ANY_MLP), kind) != kind:
            raise _Obstacle(f"its layers of the kind {word!r} have different parameters")
    return kinds, kind_of


def _add_row(facts: _Facts, model: Any, name: str, shape: tuple[int, ...]) -> None:
    """Add the row of a parameter, or shut the block of a layer that no axes explain."""
    kind, inside = facts.split(name) or ("", "")
    module = inside.partition(".")[0]
    if (kind, module) in facts.shut:
        return
    try:
        row = _row(facts, model, name, shape)
    except _Obstacle as obstacle:
        if "." not in inside or model.config.model_type not in TINY:
            raise
        facts.shut[kind, module] = str(obstacle)
        start = f"{facts.start(kind)}{module}."
        facts.rows = {pattern: row for pattern, row in facts.rows.items() if not pattern.startswith(start)}
        return
    if latent_channels(model.config):
        sizes = tiny_head_dims(HEADS)
        row = replace(row, head_dim=next((sizes[n] for n in shape if n in sizes), row.head_dim))
    if facts.rows.setdefault(row.pattern, row) != row:
        raise _Obstacle(f"{name} has the shape {shape}, other than in other layers")


def _row(facts: _Facts, model: Any, name: str, shape: tuple[int, ...]) -> Row:
    """Return the row of a parameter by its shape; norms of the stream get their role later."""
    kind, inside = facts.split(name) or ("", None)
    pattern = facts.start(kind) + inside if inside else name
    module = (inside or name).rpartition(".")[0]
    if re.search(r"\.\d+(\.|\Z)", inside or name):
        raise _Obstacle(f"{name} is one of several modules in a list")
    mixture = is_mixture(kind)
    widths = _WIDTHS | TINY_WIDTHS if mixture else _WIDTHS
    if latent_channels(model.config):
        widths = widths | tiny_latent_widths(HEADS)
    axes = _axes(name, shape, model.config.hidden_size, widths)
    if not inside:
        return _outer_row(model, pattern, module, axes)
    if "experts" in axes and len(axes) > 1 and pattern.rpartition(".")[0].endswith("experts"):
        return _experts_row(facts, model.get_submodule(name.rpartition(".")[0]), pattern, axes)
    projected = facts.rows.get(f"{facts.start(kind)}{module}.weight")
    if pattern.endswith(".bias") and projected is not None and len(projected.axes) == 2:
        role: Role = "writer" if projected.role == "writer" else "inner"
        return Row(pattern, (projected.axes[0],), role, projected.block, by_head=projected.by_head)
    if axes == ("hidden",):
        return Row(pattern, axes, "pre_norm", None)
    if len(axes) == 2 and "hidden" in axes:
        other = axes[1 - axes.index("hidden")]
        if other in _BLOCK_OF and (axes[1] == "hidden" or other in ("heads", "ffn", "shared_ffn")):
            role = "reader" if axes[1] == "hidden" else "writer"
            return Row(pattern, axes, role, _BLOCK_OF[other], by_head=other == ("heads", "heads"))
        if axes == ("inner", "hidden") and (mixture or shape[0] > 1):  # the gate of a shared expert, or a latent rank
            return Row(pattern, axes, "reader", "mlp" if shape[0] == 1 else "attention")
    expands = axes[1:] == ("inner",) and axes[0] in ("heads", "kv_heads", "inner")
    if "hidden" not in axes and (len(axes) == 1 or axes[0] in _PER_HEAD or "experts" in axes or expands):
        return Row(pattern, axes, "inner", _block_of_module(facts, facts.start(kind) + module.partition(".")[0], axes))
    raise _Obstacle(f"{name} of the shape {shape} ({' x '.join(map(str, axes))}) is none of the known projections")


def _experts_row(facts: _Facts, module: nn.Module, pattern: str, axes: tuple[Dimension, ...]) -> Row:
    """Return the row of the matrices, or the biases, of all experts of a layer."""
    fused = any(isinstance(axis, tuple) for axis in axes)
    in_turns = fused and not getattr(module, "is_concatenated", True)
    if len(axes) == 2:
        weight = facts.rows[pattern.removesuffix("_bias")]
        return Row(pattern, axes, "inner" if weight.role == "reader" else "writer", "mlp", by_group=in_turns)
    siblings = [
        row for row in facts.rows.values() if row.pattern.startswith(pattern.rpartition(".")[0]) and row.fused_dim
    ]
    transposed = siblings[0].axes[1] == "hidden" if siblings else bool(getattr(module, "is_transposed", False))
    reads = fused or (axes[1] == "hidden") == transposed
    return Row(pattern, axes, "reader" if reads else "writer", "mlp", by_group=in_turns)


def _axes(
    name: str, shape: tuple[int, ...], hidden: int, widths: Mapping[int, Dimension] = MappingProxyType(_WIDTHS)
) -> tuple[Dimension, ...]:
    """Return the axes that sizes name; where heads are as wide as the stream, the name of the module decides."""
    axes: list[Dimension] = []
    for size in shape:
        if size != hidden and size not in widths:
            raise _Obstacle(f"{name} has a dimension of {size}, which is none of the sizes in its configuration")
        axes.append("hidden" if size == hidden else widths[size])
    if "shared" in name and widths is not _WIDTHS:  # a shared expert may be as wide as the others
        axes = [_SHARED.get(axis, axis) for axis in axes]
    if hidden == HEADS * HEAD_DIM and axes == ["hidden", "hidden"]:
        writes = name.split(".")[-2] in OUTPUTS
        return ("hidden", "heads") if writes else ("heads", "hidden")
    return tuple(axes)


def _outer_row(model: Any, pattern: str, module: str, axes: tuple[Dimension, ...]) -> Row:
    """Return the row of a parameter outside the layers."""
    owner = model.get_submodule(module)
    if axes == ("vocab", "hidden") and owner is model.get_input_embeddings():
        return Row(pattern, axes, "embedding")
    if owner is model.get_output_embeddings():
        return Row(pattern, axes, "head" if len(axes) == 2 else "inner")
    if axes == ("hidden",):
        return Row(pattern, axes, "final_norm")
    raise _Obstacle(f"{pattern} is neither the embedding, nor the head, nor a norm between them")


def _block_of_module(facts: _Facts, module: str, axes: tuple[Dimension, ...]) -> Block | None:
    """Return the block of a vector: that of its axis, or that of the projections in the same module."""
    if axes[0] in _BLOCK_OF:
        return _BLOCK_OF[axes[0]]
    return next((row.block for row in facts.rows.values() if row.pattern.startswith(f"{module}.") and row.block), None)


def _check_projections(facts: _Facts) -> None:
    """Refuse layers with more than one attention or dense MLP, and find the modules that hold them."""
    blocks: tuple[tuple[Block, Axis], ...] = (("attention", "heads"), ("mlp", "ffn"))
    for (block, axis), (kind, owned) in product(blocks, facts.blocks().items()):
        start = facts.start(kind)
        rows = [row for name, row in facts.rows.items() if row.role == "writer" and name.startswith(start)]
        writers = [row for row in rows if {*row.axes} - {"experts"} == {"hidden", axis}]
        if block not in owned and facts.shut:
            continue
        if len(writers) != 1:
            raise _Obstacle(f"its layers have {len(writers)} matrices from {axis} to the stream; one is expected")
        owner = writers[0].pattern.removeprefix(start).split(".")
        if len(owner) < 3:
            raise _Obstacle(f"{writers[0].pattern} is not in a module of its block")
        beside = [row.pattern.removeprefix(start).split(".")[0] for row in rows if "shared_ffn" in row.axes]
        modules = tuple(dict.fromkeys((owner[0], *(beside if block == "mlp" else ()))))
        if facts.modules.setdefault(block, modules) != modules:
            raise _Obstacle(f"its layers have their {block} in different modules")


@dataclass(frozen=True)
class _Call:
    """One call of a module: its name, itself, and its first input and output."""

    name: str
    module: nn.Module
    input: Tensor
    output: Tensor


def _watch_forward(facts: _Facts, config: PretrainedConfig) -> None:
    """Set the roles of the norms and the flags from one forward pass of a tiny model."""
    import torch
    from transformers import AutoModelForCausalLM

    calls: list[_Call] = []
    more: dict[str, int] = {}
    entered: dict[str, tuple[Tensor, tuple[Any, ...], dict[str, Any]]] = {}
    blocks: dict[str, tuple[Tensor, Tensor]] = {}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False) if _is_norm(module) else ():
            parameter.data += 0.1 * torch.randn_like(parameter)  # no two norms give the same
        if not list(module.children()) or (facts.has_mixtures and name.endswith(f".{facts.modules['mlp'][0]}")):
            module.register_forward_hook(partial(_record, calls, name))
    layers = model.get_submodule(facts.layers_path)
    firsts = {kind: layers[facts.kinds.index(kind)] for kind in facts.layers}
    hooks = [
        layer.register_forward_pre_hook(partial(_record_layer, entered, kind), with_kwargs=True)
        for kind, layer in firsts.items()
    ]
    values: set[int] = set()
    hooks += [layer.register_forward_hook(partial(_count_values, values)) for layer in firsts.values()]
    parts = [part for layer in firsts.values() for part in layer.children()]
    hooks += [part.register_forward_hook(partial(_count_more, more)) for part in parts]
    for kind, module in facts.shut:
        record = partial(_record_block, blocks, kind + module)
        firsts[kind].get_submodule(module).register_forward_hook(record, with_kwargs=True)
    with torch.no_grad():
        try:
            model(torch.arange(3, 12)[None], use_cache=False)
        except Exception as error:  # the code of any model class
            raise _Obstacle(f"its tiny model cannot run: {shown(error)}") from error
        for hook in hooks:
            hook.remove()
        if len(values) > 1:
            raise _Obstacle("its layers return different numbers of values")
        (facts.flags["layer_values"],) = values
        facts.flags["more_values"] = more
        calls, blocks = list(calls), dict(blocks)  # of this pass alone
        facts.flags["needs_mask"] = any(_needs_mask(layer, *entered[kind]) for kind, layer in firsts.items())
        for kind, module in facts.shut:
            if not all(isinstance(end, torch.Tensor) for end in blocks.get(kind + module, (None,))):
                raise _Obstacle(facts.shut[kind, module])
            block = firsts[kind].get_submodule(module)
            _add_closed_rows(facts, kind, module, block, calls, blocks[kind + module], config.hidden_size)
        norms = _stream_norms(facts, calls, config.hidden_size)
        _find_roles(facts, calls, norms, square=config.hidden_size == HEADS * HEAD_DIM)
        norms = _stream_norms(facts, calls, config.hidden_size)  # without those of heads that are as wide
        _find_norm_kind(facts, norms)
        _find_width_norms(facts, calls)
        stream = entered[facts.kinds[0]][0]
        _find_embedding_factor(facts, model.get_input_embeddings().weight[3:12], stream[0], norms)
        for kind, layer in firsts.items():
            _check_idle_layer(facts, kind, layer, stream, partial(_run_layer, layer, *entered[kind][1:]))


def _run_layer(layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], stream: Tensor) -> Tensor:
    output: Any = layer(stream, *args, **keywords)
    return cast("Tensor", output[0] if isinstance(output, tuple) else output)


def _needs_mask(layer: nn.Module, stream: Tensor, args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Return whether a layer computes something else without a mask that only hides later positions."""
    import torch

    if keywords.get("attention_mask") is None:
        return False
    expected = _run_layer(layer, args, keywords, stream)
    try:
        bare = _run_layer(layer, args, keywords | {"attention_mask": None}, stream)
    except Exception:  # the code of any model class
        return True
    return not torch.allclose(bare, expected, atol=1e-5)


def _record_layer(entered: dict[str, Any], kind: str, _: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
    """Keep the stream and the other arguments of a layer's call."""
    others = {name: value for name, value in kwargs.items() if args or name != "hidden_states"}
    entered[kind] = args[0] if args else kwargs["hidden_states"], args[1:], others


def _count_values(values: set[int], _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Keep how many values a layer returns in a tuple; 0 if it returns the stream alone."""
    values.add(len(output) if isinstance(output, tuple) else 0)


def _count_more(more: dict[str, int], module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Keep how many values a module returns besides its output."""
    if isinstance(output, tuple):
        more[type(module).__name__] = len(output) - 1


def _record_block(blocks: dict[str, Any], name: str, module: nn.Module, *call: Any) -> None:
    args, kwargs, output = call
    tensors = args or (kwargs.get("hidden_states"),)
    blocks[name] = tensors[0], output[0] if isinstance(output, tuple) else output


def _add_closed_rows(
    facts: _Facts, kind: str, block: str, module: nn.Module, calls: list[_Call], ends: tuple[Any, Any], hidden: int
) -> None:
    """Add the rows of a block whose inside is no axis: linear modules that read the stream, and one that writes it.

    A size of the stream names its dimensions. Where inner sizes are equal to it, a module reads the stream if its input
    is that of the block, and writes it if its output is.

    Raises:
        _Obstacle: another of its parameters may have a dimension of the stream.
    """
    from torch import nn

    called = {call.module: call for call in calls}
    owners = {name: module.get_submodule(name.rpartition(".")[0]) for name, _ in module.named_parameters()}
    wide = [(name, p) for name, p in module.named_parameters() if hidden in p.shape]
    equal = any(tuple(p.shape) == (hidden, hidden) or isinstance(owners[name], nn.Conv1d) for name, p in wide)
    if any(not isinstance(owners[name], nn.Linear | nn.Conv1d) for name, _ in wide):
        raise _Obstacle(facts.shut[kind, block])
    roles: list[Role] = []
    for name, parameter in module.named_parameters():
        axes: list[Dimension] = ["inner"] * parameter.ndim
        role: Role = "inner"
        call = called.get(owners[name]) if isinstance(owners[name], nn.Linear) else None
        if call is not None and (_same(call.output, ends[1]) if equal else parameter.shape[0] == hidden):
            axes[0], role = "hidden", "writer"
        elif parameter.ndim == 2 and call and (_same(call.input, ends[0]) if equal else parameter.shape[1] == hidden):
            axes[1], role = "hidden", "reader"
        roles.append(role)
        pattern = f"{facts.start(kind)}{block}.{name}"
        facts.rows[pattern] = Row(pattern, tuple(axes), role, block)
        if role == "writer" and pattern.endswith(".weight"):
            bias = pattern.removesuffix("weight") + "bias"
            facts.rows.setdefault(bias, Row(bias, ("hidden",), role, block))
    if "reader" not in roles or "writer" not in roles:
        raise _Obstacle(facts.shut[kind, block])


def _record(calls: list[_Call], name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    from torch import Tensor

    output = output[0] if isinstance(output, tuple) else output
    if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
        calls.append(_Call(name, module, args[0], output))


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _same(one: Tensor, other: Tensor) -> bool:
    """Check whether two tensors are the same memory, whatever their shapes."""
    return one.data_ptr() == other.data_ptr() and one.numel() == other.numel()


def _is_multiple(one: Tensor, other: Tensor) -> bool:
    """Check whether a tensor is a constant times another."""
    import torch

    if one.shape != other.shape or not one.any():
        return False
    return torch.allclose(other, one * ((one * other).sum() / one.square().sum()), rtol=1e-4, atol=1e-6)


def _weight_row(facts: _Facts, call: _Call) -> Row | None:
    """Return the row of the weight of a called module, of whatever layer."""
    kind, inside = facts.split(f"{call.name}.weight") or ("", None)
    return facts.rows.get(facts.start(kind) + inside if inside else f"{call.name}.weight")


def _stream_norms(facts: _Facts, calls: list[_Call], hidden: int) -> list[_Call]:
    """Return the calls of norms over the stream, also of those without weights."""
    rows = [(call, _weight_row(facts, call)) for call in calls if _is_norm(call.module)]
    return [
        call
        for call, row in rows
        if (row is None and call.input.shape[-1] == hidden) or (row is not None and row.axes == ("hidden",))
    ]


def _find_roles(facts: _Facts, calls: list[_Call], norms: list[_Call], *, square: bool) -> None:
    """Set role and block of the norms inside the layers, by what they read and who reads them."""
    placed: dict[str, tuple[Role, Block | None]] = {}
    bare: set[Role] = set()
    for norm in norms:
        row = _weight_row(facts, norm)
        role, block = _role_of(facts, norm, calls)
        if row is None:
            bare |= {role}
        elif row.role != "final_norm":
            placed[row.pattern.rpartition(".")[0]] = role, block
    for pattern, row in facts.rows.items():
        if row.role == "pre_norm":
            role, block = placed.get(pattern.rpartition(".")[0], ("inner", None))
            facts.rows[pattern] = replace(row, role=role, block=block)
            if role == "inner" and square and _normalises_heads(facts, calls, pattern):
                facts.rows[pattern] = replace(row, axes=("heads",), role="inner", block="attention")
            elif role == "inner" and square:
                raise _Obstacle(f"{pattern} may count channels of the stream or of the heads, which are as many")
            elif role == "inner" and pattern.rpartition(".")[0] in placed:
                facts.closed["hidden"] = f"{pattern} acts on the stream in an unknown way"
    if "pre_norm" in bare and any(row.role == "pre_norm" for row in facts.rows.values()):
        facts.closed["hidden"] = "only some of the norms in front of its blocks have weights"
    if sum(row.role == "final_norm" and not row.is_bias for row in facts.rows.values()) > 1:
        facts.closed["hidden"] = "several norms outside the layers act on the stream"


def _normalises_heads(facts: _Facts, calls: list[_Call], pattern: str) -> bool:
    """Return whether a norm reads all heads, where they are as wide as the stream together."""
    norms = [call for call in calls if (row := _weight_row(facts, call)) is not None and row.pattern == pattern]
    readers = [call for call in calls if (row := _weight_row(facts, call)) is not None and row.axes[0] == "heads"]
    return all(any(_same(norm.input, reader.output) for reader in readers) for norm in norms)


def _role_of(facts: _Facts, norm: _Call, calls: list[_Call]) -> tuple[Role, Block | None]:
    blocks: set[Block] = set()
    for call in calls:
        # Experts have no linear module in it.
        if facts.has_mixtures and call.name.endswith(f".{facts.modules['mlp'][0]}"):
            if _same(norm.input, call.output) or _same(norm.output, call.output):  # behind it, or its last module
                return "post_norm", "mlp"
            if _same(norm.output, call.input):
                blocks.add("mlp")
        row = _weight_row(facts, call)
        if row is None or row.block is None:
            continue
        if row.role == "writer" and _same(norm.input, call.output):
            return "post_norm", row.block
        if row.role == "reader" and _same(norm.output, call.input):
            blocks.add(row.block)
    if not blocks:  # a constant may stand between them
        rows = [(call, _weight_row(facts, call)) for call in calls if _is_multiple(norm.output, call.input)]
        blocks = {row.block for _, row in rows if row is not None and row.role == "reader" and row.block is not None}
    if not blocks:
        return "inner", None
    return "pre_norm", blocks.pop() if len(blocks) == 1 else None


def _check_idle_layer(
    facts: _Facts, kind: str, layer: nn.Module, stream: Tensor, run: Callable[[Tensor], Tensor]
) -> None:
    """Close layers where a layer whose writers are zero changes the stream, and hidden where it mixes its channels."""
    import torch
    from torch import nn

    start = facts.start(kind)
    writers = {pattern.removeprefix(start) for pattern, row in facts.rows.items() if row.role == "writer"}
    for name, parameter in layer.named_parameters():
        if name in writers:
            nn.init.zeros_(parameter)
        elif parameter.ndim == 1:
            parameter.add_(1)  # weights of norms were set to zero
            parameter.mul_(1 + 0.1 * torch.arange(len(parameter)) / len(parameter))
    for name, buffer in layer.named_buffers():
        if name in layer.state_dict() and buffer.is_floating_point():
            buffer.mul_(1.1)
    x = (torch.arange(stream.numel()).view_as(stream) % 13 - 6) / 5
    half = torch.arange(stream.shape[-1]) % 2
    y = run(x)
    if not torch.allclose(y, x, atol=1e-5):
        facts.closed["layers"] = "a layer changes the stream also where its blocks write nothing"
    if not (torch.allclose(run(2 * x), 2 * y, atol=1e-4) and torch.allclose(run(x * half), y * half, atol=1e-4)):
        facts.closed["hidden"] = "a layer changes the stream in other ways than by its blocks"


def _find_norm_kind(facts: _Facts, norms: list[_Call]) -> None:
    """Set the flags that tell what all norms of the stream compute, from calls of each of them."""
    import torch
    from torch import nn

    kinds: set[tuple[str, bool]] = set()
    for norm in norms:
        x = torch.linspace(-1, 1, norm.input.shape[-1]).pow(3) + 0.2
        y = norm.module(x)
        if not torch.allclose(y, norm.module(4 * x), atol=1e-3):
            facts.closed["hidden"] = f"{norm.name} does not divide the stream by its size"
        kind = "layer" if torch.allclose(y, norm.module(x + 1), atol=1e-3) else "rms"
        for parameter in norm.module.parameters():
            nn.init.zeros_(parameter)
        bare = not list(norm.module.parameters())
        kinds.add((kind, bool(not bare and norm.module(x).any())))
    if len({kind for kind, _ in kinds}) > 1 or len({offset for _, offset in kinds}) > 1:
        facts.closed["hidden"] = "its norms are of several kinds"
    facts.flags["norm"] = "layer" if any(kind == "layer" for kind, _ in kinds) else "rms"
    facts.flags["unit_offset_norm"] = any(offset for _, offset in kinds)
    facts.flags["gauge"] = facts.flags["norm"] == "layer"
    if facts.flags["gauge"] and any(row.role == "post_norm" for row in facts.rows.values()):
        facts.closed["hidden"] = "a LayerNorm stands between its blocks and the stream"


def _find_width_norms(facts: _Facts, calls: list[_Call]) -> None:
    """Mark projections that are normalised over their whole width; close the axis of any other norm over a width."""
    for call in filter(lambda call: _is_norm(call.module), calls):
        row = _weight_row(facts, call)
        kind, inside = facts.split(call.name) or ("", "")
        if (kind, inside.partition(".")[0]) in facts.shut:
            continue
        axis = row.axes[0] if row is not None else _WIDTHS.get(call.input.shape[-1])
        if axis not in ("heads", "kv_heads", "ffn") or (row is not None and row.axes == ("hidden",)):
            continue
        closed = "ffn" if _BLOCK_OF[axis] == "mlp" else "heads"
        before = [_weight_row(facts, other) for other in calls if _same(other.output, call.input) and other is not call]
        projections = [other for other in before if other is not None and other.role == "reader"]
        if row is None or closed == "ffn" or len(projections) != 1 or projections[0].axes[0] != axis:
            facts.closed[closed] = f"{call.name} normalises the whole width of its input"
            continue
        start = projections[0].pattern.removesuffix("weight")
        for pattern in (start + "weight", start + "bias"):
            if pattern in facts.rows:
                facts.rows[pattern] = replace(facts.rows[pattern], width_norm="input")
        facts.rows[row.pattern] = replace(row, width_norm="weight")


def _find_embedding_factor(facts: _Facts, embedding: Tensor, stream: Tensor, norms: list[_Call]) -> None:
    """Find by what the embedding is multiplied before the first layer: nothing, a constant, or the root of hidden."""
    import torch

    factor = float((stream * embedding).sum() / embedding.square().sum())
    root = embedding.shape[-1] ** 0.5
    facts.flags["scaled_embedding"] = abs(factor / root - 1) < 1e-4
    constant = torch.allclose(stream, factor * embedding, rtol=1e-3, atol=1e-6)
    first = any(_same(norm.output, stream) and not list(norm.module.parameters()) for norm in norms)
    if not constant and not first:
        facts.closed["hidden"] = "the stream does not begin with the embedding, or a multiple of it"
    elif constant and not facts.flags["scaled_embedding"] and abs(factor - 1) > 1e-4:
        facts.closed["hidden"] = f"the embedding is multiplied by {factor:.3g}, which may depend on the hidden size"


def _layer_lists(model_type: str, rule: str, facts: _Facts) -> tuple[dict[str, Any], str]:
    """Return the fields of :class:`Family` with lists, and why layers cannot be removed ("" if they can).

    A shorter model is built with the lists by layer sliced; lists that its class would compute otherwise are stored.
    If a number, word or switch in one of its modules differs from the same layer of the whole model, the layer reads
    its index or the number of layers from somewhere else.
    """
    few, many = (_config(model_type, rule, layers).to_dict() for layers in (LAYERS, LAYERS + 2))
    lists = tuple(name for name, value in few.items() if _lengths(value, many.get(name)) == (LAYERS, LAYERS + 2))
    others = tuple(name for name, value in few.items() if _lengths(value, many.get(name)) == (LAYERS, LAYERS))
    whole = _config(model_type, rule, 2 * LAYERS - 1)
    kept = (0, 2, 3, 6, 8)
    values = plain_values(whole) | {"num_hidden_layers": len(kept)}
    values |= {name: [values[name][i] for i in kept] for name in lists}
    values |= {name: renumbered(values[name], kept) for name in _index_lists(model_type)}
    if facts.has_mixtures:
        values |= kind_values(whole, [facts.layer_kinds(whole)[i] for i in kept])
    config_class = type(whole)
    shorter = config_class(**values)
    computed = tuple(name for name in _list_properties(whole) if _is_broken(whole, shorter, name, kept))
    if computed:
        config_class = type(config_class.__name__, (config_class,), stored_lists(config_class, computed))
        shorter = config_class(**values | kept_lists(whole, computed, kept))
    found = {"layer_lists": lists, "other_lists": others, "computed_lists": computed}
    dense, cut = (_layer_attributes(config, facts) for config in (whole, shorter))
    for new, old in enumerate(kept):
        for name, value in dense[old].items():
            if name not in cut[new]:
                return found, "the kind of a layer depends on its index or on the number of layers"
            if cut[new][name] != value:
                return found, f"{name} of a layer depends on its index or on the number of layers"
    return found, ""


def _list_properties(config: PretrainedConfig) -> list[str]:
    """Return the properties of a configuration class with a value for each layer."""
    names = (name for name in dir(type(config)) if isinstance(getattr(type(config), name), property))
    return [name for name in names if _lengths(getattr(config, name, None)) == (config.num_hidden_layers,)]


def _is_broken(whole: PretrainedConfig, shorter: PretrainedConfig, name: str, kept: Sequence[int]) -> bool:
    """Return whether a shorter configuration computes other values for the kept layers."""
    return list(getattr(shorter, name)) != [getattr(whole, name)[i] for i in kept]


def _period_obstacle(computed: tuple[str, ...], config: PretrainedConfig, plan: PrunePlan) -> str | None:
    """Explain why a stock class would compute other kinds of layers than those that are kept, or None."""
    shorter = copy.copy(config)
    shorter.num_hidden_layers = len(plan.layers)
    broken = any(_is_broken(config, shorter, name, plan.kept_layers) for name in computed)
    return "its kinds of layers follow from their indices" if broken else None


def _index_lists(model_type: str) -> tuple[str, ...]:
    """Return the fields with indices of layers: lists of numbers that the tiny model is given."""
    return tuple(name for name, value in TINY.get(model_type, {}).items() if isinstance(value, list))


def _lengths(*values: Any) -> tuple[int, ...]:
    return tuple(len(value) if isinstance(value, list | tuple) else -1 for value in values)


def _layer_attributes(config: PretrainedConfig, facts: _Facts) -> list[dict[str, Any]]:
    """Return the plain values in the modules of every layer, by dotted name, without the layer's index."""
    import torch
    from transformers.initialization import no_init_weights

    with no_init_weights(), torch.device("meta"):
        layers = facts.model(config).get_submodule(facts.layers_path)
    indices = ("layer_idx", "layer_id")
    return [
        {name: value for name, value in plain_attributes(layer).items() if name.rpartition(".")[2] not in indices}
        for layer in layers
    ]


def plain_attributes(layer: nn.Module) -> dict[str, Any]:
    """Return the numbers, words and switches in the modules of a layer, by dotted name."""
    return {
        f"{name}.{key}".lstrip("."): value
        for name, module in layer.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, int | float | bool | str | None)
    }


def _stock_obstacle(model_type: str, rule: str, facts: _Facts, *, counts_shared: bool) -> Any:
    checks = [output_bias_obstacle(model_type), width_obstacle]
    checks += [rows_obstacle] * facts.has_mixtures + [shared_width_obstacle] * counts_shared
    if facts.flags["norm"] == "layer":
        checks.append(tied_head_obstacle)
    if facts.shut and _inner_depends_on_hidden(model_type, rule, facts):
        checks.append(_inner_obstacle)
    heads = {"num_attention_heads": 2 * HEADS, "num_key_value_heads": 2 * KV_HEADS}
    if facts.shut and "attention" in facts.modules and _inner_depends_on(model_type, rule, facts, heads):
        checks.append(_inner_heads_obstacle)
    if rule != "any":
        checks.append(heads_obstacle if rule == "multiple of heads" else square_obstacle)
    return first_obstacle(*checks)


def _is_tied(config: PretrainedConfig) -> bool:
    """Check whether the class of a model ties its head to the embedding if its configuration says so."""
    model = build_on_meta(type(config)(**plain_values(config) | {"tie_word_embeddings": True}))
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


def _inner_obstacle(config: PretrainedConfig, plan: PrunePlan) -> str | None:
    """Explain why a sliced hidden size does not fit blocks that derive their inner sizes from it, or None."""
    return "its inner sizes follow from the hidden size" if plan.removed_hidden else None


def _inner_heads_obstacle(config: PretrainedConfig, plan: PrunePlan) -> str | None:
    """Explain why fewer heads do not fit closed blocks that have as many as the attention, or None."""
    cut = {"heads", "kv_heads"} & cut_axes(plan)
    return "blocks that are kept whole have as many heads as the attention" if cut else None


def _inner_depends_on_hidden(model_type: str, rule: str, facts: _Facts) -> bool:
    """Check whether another hidden size, and nothing else, changes the inner sizes of a closed block."""
    hidden = _config(model_type, rule).hidden_size + HEADS * HEAD_DIM
    return _inner_depends_on(model_type, rule, facts, {"hidden_size": hidden})


def _inner_depends_on(model_type: str, rule: str, facts: _Facts, changes: dict[str, Any]) -> bool:
    """Check whether other values of a configuration change the inner sizes of a closed block."""
    config = _config(model_type, rule)
    values = plain_values(config) | changes
    try:
        wider, model = build_on_meta(type(config)(**values)), build_on_meta(config)
    except Exception:  # checks of any configuration class
        return True
    shapes = dict(wider.named_parameters())
    for name, parameter in model.named_parameters():
        kind, inside = facts.split(name) or ("", "")
        if (kind, inside.partition(".")[0]) in facts.shut:
            axes = facts.rows[facts.start(kind) + inside].axes
            sizes = zip(axes, parameter.shape, shapes[name].shape, strict=True)
            if any(axis == "inner" and before != after for axis, before, after in sizes):
                return True
    return False


def plain_values(config: PretrainedConfig) -> dict[str, Any]:
    """Return the values of a configuration from which its class makes another."""
    return {name: value for name, value in config.to_dict().items() if name not in WRITTEN_ANEW}


def build_on_meta(config: PretrainedConfig, **options: Any) -> Any:
    """Return a causal LM on the meta device: modules, names and shapes without values.

    Args:
        config: of the model, which keeps it.
        options: of ``AutoModelForCausalLM.from_config``.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights(), torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, **options)
    model.tie_weights()
    return model


def _build_resized_layer(
    facts: _Facts, narrow: bool, layer_class: type[nn.Module], config: Any, index: int
) -> nn.Module:
    """Build a layer of a class that takes a width from others: with another width of the stream, or of shared experts.

    Args:
        facts: of the type.
        narrow: the class wants heads that are together as wide as the stream.
        layer_class: of the first decoder layer.
        config: of this layer; its hidden_size is changed.
        index: of the layer.
    """
    import torch
    from torch import nn

    hidden = config.hidden_size
    sizes = {"hidden": hidden, "shared_ffn": getattr(config, SHARED_WIDTH, None)}
    if narrow:
        config.hidden_size = config.num_attention_heads * config.head_dim
    else:
        config.hidden_size = getattr(config, "source_hidden_size", None) or hidden
    kind = facts.layer_kinds(config)[index]
    layer_class, start = facts.layers[kind], facts.start(kind)
    # Some classes are told the kind, which others read from the configuration.
    told = "layer_type" in inspect.signature(layer_class.__init__).parameters
    layer: nn.Module = layer_class(config, index, *([_layer_words(config)[index]] if told else []))
    if (model_type := dense_type(config.model_type)) in FINISH:
        FINISH[model_type](layer, config)
    for name, parameter in list(layer.named_parameters()):
        owner: Any = layer.get_submodule(name.rpartition(".")[0])
        pairs = zip(facts.rows[start + name].dimensions, parameter.shape, strict=True)
        shape = [len(axes) * (sizes.get(axes[0]) or n // len(axes)) for axes, n in pairs]
        if shape == list(parameter.shape):
            continue
        setattr(owner, name.rpartition(".")[2], nn.Parameter(torch.ones(shape, dtype=parameter.dtype)))
        if isinstance(owner, nn.Linear):
            owner.out_features, owner.in_features = owner.weight.shape
        elif isinstance(owner, nn.LayerNorm):
            owner.normalized_shape = (hidden,)
        elif hasattr(owner, "hidden_dim"):  # routers and experts count the stream's channels so
            owner.hidden_dim = hidden
    for name in facts.modules.get("mlp", ()):
        module: Any = getattr(layer, name, None)
        if hasattr(module, "input_size"):  # the mixtures of Granite count them so
            module.input_size = hidden
    return layer
