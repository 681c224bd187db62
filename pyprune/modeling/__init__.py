"""The pruned architectures for Transformers. Importing this module registers them with the Auto classes.

import pyprune.modeling
model = AutoModelForCausalLM.from_pretrained("pruned/")

The configurations are made at once, the models on first use: a serving engine imports this in all of its processes, and
the stock models, from which the pruned ones are made, take most of a second to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyprune.families import all_families, resolve
from pyprune.modeling.configuration import (
    PRUNED_CONFIGS,
    PrunedConfigMixin,
    pruned_config_class,
    register,
    register_on_first_use,
)
from pyprune.runtime.releases import warn_of_untried_releases

if TYPE_CHECKING:
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
globals().update({cls.__name__: cls for cls in PRUNED_CONFIGS.values()})

_LATER = {
    **dict.fromkeys(("SkippedAttention", "SkippedModule", "VirtualLayerNorm"), "layers"),
    **dict.fromkeys(("PRUNED_MODELS", "PrunedModelMixin"), "models"),
    **{family.pruned_model: "models" for family in all_families().values()},
}
"""Name -> the module of this package that has it and is imported on first use."""


def __getattr__(name: str) -> Any:
    """Return a class that is made on first use: a model, or either class of an inferred family."""
    module = "configuration" if name.endswith("Config") else "models"
    if name not in _LATER and not name.startswith("Pruned"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER.get(name, module)}"), name)


def _register() -> None:
    """Register every pruned architecture with the Auto classes; those of inferred families are made on first use."""
    for family in all_families().values():
        if not family.classes.model.startswith("transformers:"):
            resolve(family.classes.model)  # a package registers its own classes when this is imported
        register(family, PRUNED_CONFIGS[family.model_type])
    register_on_first_use()


_register()
warn_of_untried_releases()
