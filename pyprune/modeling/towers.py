"""Multimodal models with a pruned text tower: the stock class, in which the tower's layers have sizes of their own.

The configuration is the stock one and, as ``pruned_config``, that of the tower as a pruned causal LM. Both classes are
made on first use.
"""

from __future__ import annotations

from typing import Any, cast

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, AutoModelForMultimodalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

from pyprune.families.prefix import PREFIX
from pyprune.modeling.configuration import TOWER
from pyprune.modeling.models import pruned_model_class


class PrunedTowerConfigMixin:
    """Adds the configuration of the pruned causal LM to that of a multimodal model.

    Extra fields:
        pruned_config: of the causal LM. ``text_config`` has the sizes outside of its layers.
    """

    def __post_init__(self, pruned_config: Any = None, **kwargs: Any) -> None:
        """Set up as the stock configuration."""
        if isinstance(pruned_config, dict):
            pruned_config = AutoConfig.for_model(**pruned_config)
        cast(Any, self).pruned_config = pruned_config
        super().__post_init__(**kwargs)  # type: ignore[misc]


class PrunedTowerMixin:
    """Builds a stock multimodal model around a tower without layers, then takes those of the pruned causal LM."""

    def __init__(self, config: Any) -> None:
        text = config.text_config
        whole = {name: getattr(text, name, None) for name in ("num_hidden_layers", "layer_types")}
        _set(text, {"num_hidden_layers": 0, "layer_types": []})
        super().__init__(config)  # type: ignore[call-arg]
        model = cast(Any, self)
        tower, pruned = model.get_decoder(), config.pruned_config
        for part in tower.modules():  # some classes copy the configuration
            if type(getattr(part, "config", None)) is type(text):
                _set(part.config, whole)
        _set(text, whole)
        pruned._attn_implementation = text._attn_implementation
        pruned._experts_implementation = text._experts_implementation
        causal = pruned_model_class(pruned.model_type)(pruned)
        base = causal.base_model
        if isinstance(base, type(tower)):
            model.set_decoder(base)
        else:  # it also reads positions in three dimensions
            tower.layers = base.layers

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False, as :meth:`pyprune.modeling.models.PrunedModelMixin.is_custom_code`."""
        return False


def _set(config: PretrainedConfig, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if hasattr(config, name):
            setattr(config, name, value)


def pruned_tower_class(model_type: str) -> Any:
    """Return the configuration class of a multimodal type whose tower is pruned; made, and registered, on first use.

    Args:
        model_type: of the stock multimodal model.
    """
    stock = CONFIG_MAPPING[model_type]
    name = f"Pruned{stock.__name__}"
    if name not in globals():
        facts: dict[str, Any] = {
            "__module__": __name__,
            "__doc__": f"{stock.__name__} with a pruned text tower.",
            "model_type": PREFIX + model_type,
            "sub_configs": {**stock.sub_configs, TOWER: AutoConfig},
        }
        config_class: Any = strict(type(name, (PrunedTowerConfigMixin, stock), facts))
        model: Any = MODEL_FOR_MULTIMODAL_LM_MAPPING[stock]
        facts = {
            "__module__": __name__,
            "__doc__": f"{model.__name__} with a pruned text tower.",
            "config_class": config_class,
        }
        model_class: Any = type(f"Pruned{model.__name__}", (PrunedTowerMixin, model), facts)
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        AutoModelForMultimodalLM.register(config_class, model_class, exist_ok=True)
        globals().update({name: config_class, model_class.__name__: model_class})
    return globals()[name]
