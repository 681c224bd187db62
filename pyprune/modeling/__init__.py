"""The pruned architectures for Transformers. Importing this module registers them with the Auto classes.

import pyprune.modeling
model = AutoModelForCausalLM.from_pretrained("pruned/")
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM

from pyprune.modeling.configuration import PRUNED_CONFIGS, PrunedConfigMixin, pruned_config_class
from pyprune.modeling.layers import SkippedAttention, SkippedModule, VirtualLayerNorm
from pyprune.modeling.models import PRUNED_MODELS, PrunedModelMixin

__all__ = [
    "PRUNED_CONFIGS",
    "PRUNED_MODELS",
    "PrunedConfigMixin",
    "PrunedModelMixin",
    "SkippedAttention",
    "SkippedModule",
    "VirtualLayerNorm",
    "pruned_config_class",
]


# Checkpoints and serving engines know the classes by name: PrunedLlamaConfig, PrunedLlamaForCausalLM and so on.
globals().update({cls.__name__: cls for cls in (*PRUNED_CONFIGS.values(), *PRUNED_MODELS.values())})


def _register() -> None:
    """Tell the Auto classes about every pruned architecture; calling it again changes nothing."""
    for config_class in PRUNED_CONFIGS.values():
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    for model_class in PRUNED_MODELS.values():
        AutoModelForCausalLM.register(model_class.config_class, model_class, exist_ok=True)


_register()
