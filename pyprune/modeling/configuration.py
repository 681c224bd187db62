"""Configurations of the pruned architectures: a stock configuration plus per-layer sizes.

Per-layer sizes use Transformers' own ``per_layer_config`` notation (layer index -> overrides, ``skip`` for
missing sub-blocks "attention" and "mlp"), so a checkpoint becomes stock by a change of model_type on the
day Transformers' modelling reads that notation. The classes are made from the families' tables and
live at module level because serving engines pickle them to their worker processes. Those of inferred families are made
on first use.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, ClassVar, cast

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.integrations.heterogeneity.configuration_utils import HeterogeneousConfigMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from pyprune.families import Family, all_families, dense_family, family_of_type, find_family, resolve
from pyprune.families.base import layer_overrides, stored_lists
from pyprune.families.infer import causal_types
from pyprune.families.prefix import PREFIX

TOWER = "pruned_config"
"""Field of a multimodal configuration that describes its tower as a pruned causal LM."""


class PrunedConfigMixin:
    """The fields and checks that a pruned configuration adds to its stock one.

    Extra fields:
        per_layer_config: layer index -> the values that differ there (num_attention_heads,
            num_key_value_heads, the FFN width) and ``skip``, a list of "attention" and "mlp".
        head_dim: channels of a head, independent of hidden_size.
        source_hidden_size: the dense hidden size, from which closed blocks derive inner sizes; absent = hidden_size.
        stored_NAME: values for the kept layers of a list that the stock class computes from the index of a layer.
        norm_size: the size a LayerNorm divides by (the dense hidden size); absent = the stored size.
        output_bias: the output projections of attention and MLP have biases, from bias compensation, although the stock
            family has none; absent = as in the stock family.
    """

    model_type: ClassVar[str]

    def __post_init__(self, **kwargs: Any) -> None:
        """Set up as the stock configuration, but keep the word of the last layer (:attr:`Family.last_word`)."""
        config, word = cast(Any, self), self.family.last_word
        words = list(config.layer_types or ()) if word else []
        if words:
            config.layer_types = [*words[:-1], word]
        super().__post_init__(**kwargs)  # type: ignore[misc]
        if words:
            config.layer_types = words

    @property
    def family(self) -> Family:
        """The family of the dense model."""
        return dense_family(cast(PretrainedConfig, self))

    def __getattribute__(self, key: str) -> Any:
        """Read global values without Transformers' warning; the reason is stated just below."""
        return HeterogeneousConfigMixin._getattr_without_heterogeneous_validation(cast(Any, self), key)

    @property
    def allow_global_per_layer_attribute_access(self) -> bool:
        """The global values are the dense model's; shared code may read them (they are upper bounds)."""
        return True

    @allow_global_per_layer_attribute_access.setter
    def allow_global_per_layer_attribute_access(self, value: bool) -> None:
        del value

    def validate_architecture(self) -> None:
        """Check the sizes of every layer (the stock rules about divisibility do not apply here).

        Raises:
            ValueError: the message names the layer and the value. Transformers turns it into its own
                validation error when a damaged config.json is read.
        """
        heads, kv_heads = _value(self, "num_attention_heads", 1), _value(self, "num_key_value_heads", None)
        for i in range(_value(self, "num_hidden_layers")):
            overrides = layer_overrides(self, i)
            q = overrides.get("num_attention_heads", heads)
            kv = overrides.get("num_key_value_heads", kv_heads if kv_heads is not None else q)
            if "attention" not in overrides.get("skip", ()) and (q < 1 or kv < 1 or q % kv):
                raise ValueError(f"layer {i}: {q} query heads do not divide into {kv} KV heads.")
            unknown = set(overrides.get("skip", ())) - {"attention", "mlp"}
            if unknown:
                raise ValueError(f"layer {i}: skip names {sorted(unknown)}; allowed: attention, mlp.")

    def validate_rope(self) -> None:
        """Run the stock checks as if the heads together were as wide as the stream.

        Some of them take hidden_size / num_attention_heads for the channels of a head (Phi-3's longrope factors).

        Raises:
            ValueError: see :meth:`validate_architecture`.
        """
        square: Any = copy.copy(self)
        head_dim = _value(self, "head_dim", None)
        if head_dim:
            square.hidden_size = head_dim * _value(self, "num_attention_heads", 1)
        super(PrunedConfigMixin, square).validate_rope()  # type: ignore[misc]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as the stock configuration does; PEFT calls this before it looks up its modules."""
        _tell_peft()
        return cast(dict[str, Any], super().to_dict())  # type: ignore[misc]

    def layer_config(self, index: int) -> PretrainedConfig:
        """Return a stock-readable copy of this configuration with the sizes of layer ``index``."""
        # Without per-layer sizes Transformers hands out the shared configuration itself.
        return cast(PretrainedConfig, copy.copy(self.per_layer_config[index]))


def _tell_peft() -> None:
    """Give PEFT, if it is imported, the default modules of stock types for pruned ones, in its tables by model type."""
    constants = sys.modules.get("peft.utils.constants")
    for name, table in vars(constants).items() if constants is not None else ():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(table, dict):
            table.update({PREFIX + stock: modules for stock, modules in table.items() if PREFIX not in stock})


class LayerView:
    """The shared configuration as the modules of one layer see it: the layer's sizes, and all else from the shared one.

    Some stock modules read sizes from their configuration in every forward pass (Phi-3), not only when they are built.
    A later change of the shared configuration reaches them too.

    Args:
        shared: the model's configuration.
        changed: the values that differ in this layer, by name.
    """

    def __init__(self, shared: PretrainedConfig, changed: Mapping[str, Any]) -> None:
        self.__dict__.update(changed, shared=shared)

    def __getattr__(self, name: str) -> Any:
        # Copying and unpickling look for special methods before there is anything to read them from.
        if name == "shared" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.shared, name)


def layer_view(config: PretrainedConfig, index: int) -> Any:
    """Return the configuration of layer ``index``'s modules: the shared one, unless its sizes differ."""
    changed = {name: value for name, value in layer_overrides(config, index).items() if name != "skip"}
    return LayerView(config, changed) if changed else config


def _value(config: Any, name: str, *default: Any) -> Any:
    try:
        return config._getattr_without_heterogeneous_validation(name)
    except AttributeError:
        if default:
            return default[0]
        raise


def _make_config_class(family: Family) -> Any:
    """Make the pruned configuration class of one family."""
    stock = resolve(family.classes.config)
    facts = {
        "__module__": __name__,
        "__doc__": f"{stock.__name__} with per-layer sizes.",
        "model_type": PREFIX + family.model_type,
        **stored_lists(stock, family.computed_lists),
    }
    return strict(type(family.pruned_config, (PrunedConfigMixin, stock), facts))


PRUNED_CONFIGS: dict[str, Any] = {family.model_type: _make_config_class(family) for family in all_families().values()}
globals().update({cls.__name__: cls for cls in PRUNED_CONFIGS.values()})


def pruned_config_class(model_type: str) -> Any:
    """Return the pruned configuration class of a dense model type; that of an inferred family is made on first use.

    Raises:
        UnsupportedModelError: the type has no table, and none can be inferred.
    """
    if model_type in PRUNED_CONFIGS:
        return PRUNED_CONFIGS[model_type]
    family = family_of_type(model_type)
    if family.pruned_config not in globals():
        register(family, globals().setdefault(family.pruned_config, _make_config_class(family)))
    return globals()[family.pruned_config]


class _ModelOnFirstUse(type):
    """A class that stands for a pruned model until more than its configuration class is used.

    The model answers for it, and takes its place in the Auto class once it is made.
    """

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls._model(), name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._model()(*args, **kwargs)

    def _model(cls) -> Any:
        return getattr(import_module("pyprune.modeling.models"), cls.__name__)


def register(family: Family, config_class: Any) -> None:
    """Register the pruned architecture of a family with the Auto classes; its model is made on first use."""
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    facts = {"__module__": "pyprune.modeling.models", "config_class": config_class}
    AutoModelForCausalLM.register(config_class, _ModelOnFirstUse(family.pruned_model, (), facts), exist_ok=True)


class _ConfigOnFirstUse(type):
    """A class that stands for a pruned configuration, inferred or of a tower, until it is read from a checkpoint.

    Transformers finds classes by model type, and inferring the families of all types takes many seconds.
    """

    find: Callable[[str], Any]

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(cls.find(cls.__name__), name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.find(cls.__name__)(*args, **kwargs)


def register_on_first_use() -> None:
    """Register the pruned types whose classes are made when a checkpoint of one is read: inferred ones, and towers."""

    def pruned_tower(model_type: str) -> Any:
        return import_module("pyprune.modeling.towers").pruned_tower_class(model_type)

    types: dict[str, Callable[[str], Any]] = dict.fromkeys(causal_types(), pruned_config_class)
    types |= dict.fromkeys(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, pruned_tower)
    for model_type in types.keys() - PRUNED_CONFIGS.keys():
        facts = {"find": staticmethod(types[model_type])}
        AutoConfig.register(PREFIX + model_type, _ConfigOnFirstUse(model_type, (), facts), exist_ok=True)


def __getattr__(name: str) -> Any:
    """The pruned configuration classes of inferred families, by their names."""
    for model_type, (config_name, _) in causal_types().items():
        if name == "Pruned" + config_name and find_family(model_type):
            return pruned_config_class(model_type)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
