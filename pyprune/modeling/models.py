"""Pruned causal LMs: the stock model with every layer rebuilt to its own sizes. Each class is made on first use."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from typing import Any, ClassVar, cast

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, Cache, PretrainedConfig
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)

from pyprune.errors import UnsupportedModelError
from pyprune.families import Family, all_families, family_of_type, find_family, resolve
from pyprune.families.base import Block, layer_overrides
from pyprune.families.infer import causal_types
from pyprune.modeling.configuration import PrunedConfigMixin, layer_view, pruned_config_class
from pyprune.modeling.layers import SkippedAttention, SkippedModule, VirtualLayerNorm
from pyprune.plan import HEAD_DIM
from pyprune.runtime.modes import evaluation_mode

_CACHE_TOKENS = 8
_EPSILON = 1e-5
"""Of a LayerNorm that names none: OLMo's."""
EXPERT_ROW_BYTES = 16
"""Transformers' kernels for experts fail on rows that are no multiple of it; its loop over experts does not."""
_CACHE_ERROR = defaultdict(lambda: 0.1, {torch.float64: 1e-6, torch.float32: 1e-3})
"""Largest relative difference of logits that rounding explains, by the dtype of the weights."""


class PrunedModelMixin:
    """Builds a stock model without layers, then one stock layer per index at that layer's sizes."""

    config_class: Any
    decoder_layer_class: ClassVar[type[nn.Module]]
    _cache_is_right = False

    def __init__(self, config: PretrainedConfig) -> None:
        stub: Any = copy.deepcopy(config)
        stub.per_layer_config = _values_by_kind(config)
        stub.num_hidden_layers = 0
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Initializing zero-element")  # parameters that count the layers
            super().__init__(stub)  # type: ignore[call-arg]
        # The stock constructor resolves the attention implementation on the configuration it is given.
        config._attn_implementation = stub._attn_implementation
        self._build_layers(cast(Any, config), stub)

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False: Transformers' own code gives parts their values, buffers of layers too that no file holds."""
        return False

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as the stock model does; if attention is skipped, the first call tests the cache.

        Raises:
            UnsupportedModelError: after cached tokens, a token gets other logits than without a cache.
        """
        if not self._cache_is_right and kwargs.get("use_cache", True):
            self._check_cache()
        return super().generate(*args, **kwargs)  # type: ignore[misc]

    def _check_cache(self) -> None:
        model = cast(Any, self)
        skipped = [module.layer_idx for module in model.modules() if isinstance(module, SkippedAttention)]
        if skipped:
            with evaluation_mode(model), torch.no_grad():
                error = self.cache_error()
            if not error < _CACHE_ERROR[model.dtype]:
                raise UnsupportedModelError(
                    f"Transformers {transformers.__version__} generates wrongly from this model, whose attention is "
                    f"skipped in layers {skipped}: with its cache, logits are {error:.1%} off. Install "
                    "an older release, or generate with use_cache=False."
                )
        self._cache_is_right = True

    def cache_error(self) -> float:
        """Return the relative error of a token's logits after cached tokens, against a pass without a cache."""
        model = cast(Any, self)
        ids = torch.arange(_CACHE_TOKENS, device=model.device)[None] % model.config.vocab_size
        expected = model(ids, use_cache=False).logits[:, -1].float()
        first = model(ids[:, :-1], use_cache=True)
        kept: dict[str, Any] = {name: value for name, value in first.items() if isinstance(value, Cache)}
        if model.config.family.needs_positions:
            kept["position_ids"] = torch.full_like(ids[:, -1:], _CACHE_TOKENS - 1)
        cached = model(ids[:, -1:], use_cache=True, **kept).logits[:, -1].float()
        return float((cached - expected).norm() / expected.norm().clamp(min=1e-30))

    def _build_layers(self, config: Any, stub: Any) -> None:
        family: Family = config.family
        model = cast(Any, self)
        _set_config(model, config)
        for part in model.modules() if config.is_heterogeneous else ():
            if hasattr(part, "rope_init_fns"):
                part.config = stub  # reads values of kinds of layers, not of each layer
        layers, kinds = family.layers(model), family.layer_kinds(config)
        del layers[:]  # of a configuration that counts its layers by a list
        for i in range(config.num_hidden_layers):
            layer = self._build_layer(config.layer_config(i), i, family)
            if getattr(config, "output_bias", False):
                _give_output_biases(layer, family, kinds, i)
            _set_config(layer, layer_view(config, i))
            layers.append(layer)
        _resize_outer_parameters(model, family, config)
        norm_size = getattr(config, "norm_size", None)
        if norm_size is not None:
            _use_virtual_norms(model, config.hidden_size, norm_size)
        model.post_init()
        rows = (p for p in model.parameters() if p.ndim == 3)
        if any(p.shape[-1] * p.itemsize % EXPERT_ROW_BYTES for p in rows):
            config._experts_implementation = "eager"

    def _build_layer(self, config: Any, index: int, family: Family) -> nn.Module:
        layer = family.build_layer(self.decoder_layer_class, config, index)
        for block in getattr(config, "skip", ()):
            _skip_block(layer, block, index, family, family.layer_kinds(config)[index])
        return layer


def _values_by_kind(config: Any) -> dict[int, dict[str, Any]] | None:
    """Return the values by layer that stock classes read outside of the layers too: the channels of a head."""
    layers = {i: layer_overrides(config, i).get(HEAD_DIM) for i in range(config.num_hidden_layers)}
    return {i: {HEAD_DIM: size} for i, size in layers.items() if size} or None


def _resize_outer_parameters(model: nn.Module, family: Family, config: Any) -> None:
    """Give parameters outside of the layers that count them their size; they were built for no layer."""
    width = config.num_hidden_layers * getattr(config, family.layer_inputs, 0) if family.layer_inputs else 0
    for row in family.rows if width else ():
        if "layers" in row.axes:
            owner: Any = model.get_submodule(row.pattern.rpartition(".")[0])
            sizes = zip(row.axes, owner.weight.shape, strict=True)
            shape = [width if axis == "layers" else size for axis, size in sizes]
            owner.weight = nn.Parameter(owner.weight.new_empty(shape))
            setattr(owner, "out_features" if isinstance(owner, nn.Linear) else "embedding_dim", width)


def _set_config(module: nn.Module, config: Any) -> None:
    """Give this configuration to all modules, as in a stock model: a later change of it reaches every module."""
    for part in module.modules():
        if isinstance(getattr(part, "config", None), PrunedConfigMixin):
            part.config = config


def _skip_block(layer: nn.Module, block: Block, index: int, family: Family, kind: str) -> None:
    """Replace a sub-block by modules without parameters whose contribution is exactly zero."""
    for name in family.block_modules(block, layer):
        more = family.more_values.get(type(getattr(layer, name)).__name__, int(block == "attention"))
        setattr(layer, name, SkippedAttention(index, more) if block == "attention" else SkippedModule(more))
    for norm in family.block_norms(block, kind):
        setattr(layer, norm, nn.Identity())


def _give_output_biases(layer: nn.Module, family: Family, kinds: tuple[str, ...], index: int) -> None:
    """Give a bias to the output projections of a layer (bias compensation)."""
    for name in (family.output_projection(block, kinds) for block in family.kinds[kinds[index]]):
        parent, _, last = name.rpartition(".")
        owner = dict(layer.named_modules()).get(parent)
        projection = getattr(owner, last, None)
        if isinstance(projection, nn.Linear):
            setattr(owner, last, nn.Linear(projection.in_features, projection.out_features))


def _use_virtual_norms(model: nn.Module, size: int, norm_size: int) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if "LayerNorm" in type(child).__name__ and _normalised_shape(child) == (size,):
                weight, bias = getattr(child, "weight", None), getattr(child, "bias", None)
                eps: Any = getattr(child, "eps", None) or getattr(child, "variance_epsilon", _EPSILON)
                options = {"affine": weight is not None, "bias": bias is not None}
                setattr(parent, name, VirtualLayerNorm(size, norm_size, eps, **options))


def _normalised_shape(norm: nn.Module) -> tuple[int, ...]:
    """Return the shape that a LayerNorm normalises; some classes of their own keep only a weight (Cohere)."""
    shape = getattr(norm, "normalized_shape", None)
    return tuple(shape or getattr(norm, "weight", torch.empty(0)).shape)


def _make_model_class(family: Family) -> Any:
    """Make the pruned causal LM of one family."""
    stock = resolve(family.classes.model)
    facts = {
        "__module__": __name__,
        "__doc__": f"{stock.__name__} with per-layer sizes.",
        "config_class": pruned_config_class(family.model_type),
        "decoder_layer_class": resolve(family.classes.layer),
    }
    return type(family.pruned_model, (PrunedModelMixin, stock), facts)


def pruned_model_class(model_type: str) -> Any:
    """Return the pruned causal LM of a dense model type; made, and registered with the Auto class, on first use."""
    family = family_of_type(model_type)
    if family.pruned_model not in globals():
        model_class = globals().setdefault(family.pruned_model, _make_model_class(family))
        AutoModelForCausalLM.register(model_class.config_class, model_class, exist_ok=True)
        _register_conversions(family, model_class)
    return globals()[family.pruned_model]


def _register_conversions(family: Family, model_class: Any) -> None:
    """Let Transformers read and write the names in files of a pruned model as those of the stock model."""
    stock = family.classes.model.rpartition(":")[2]
    tables = get_checkpoint_conversion_mapping(stock) or get_checkpoint_conversion_mapping(family.model_type)
    if tables:
        register_checkpoint_conversion_mapping(model_class.config_class.model_type, tables, overwrite=True)


def __getattr__(name: str) -> Any:
    """PRUNED_MODELS (dense model type -> class), and the classes that checkpoints name: PrunedLlamaForCausalLM, ..."""
    if name == "PRUNED_MODELS":
        return {model_type: pruned_model_class(model_type) for model_type in all_families()}
    for family in all_families().values():
        if family.pruned_model == name:
            return pruned_model_class(family.model_type)
    types = [model_type for model_type, (_, model_name) in causal_types().items() if name == "Pruned" + model_name]
    # A larger model may have the class of its text part.
    types.sort(key=lambda model_type: find_family(model_type) is None)
    if types:
        return pruned_model_class(types[0])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
