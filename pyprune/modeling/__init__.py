"""The pruned architectures for Transformers. Importing this module registers them with the Auto classes.

import pyprune.modeling
model = AutoModelForCausalLM.from_pretrained("pruned/")

The configurations are made at once, the models on first use: a serving engine imports this in all of its processes, and
the stock models, from which the pruned ones are made, take most of a second to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoModelForCausalLM

from pyprune.families import all_families, resolve
from pyprune.modeling.configuration import PRUNED_CONFIGS, PrunedConfigMixin, pruned_config_class
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
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)


class _OnFirstUse(type):
    """A class that stands for a pruned model until more than its configuration class is used.

    The model answers for it, and takes its place in the Auto class once it is made.
    """

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls._model(), name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._model()(*args, **kwargs)

    def _model(cls) -> Any:
        return getattr(import_module(f"{__name__}.models"), cls.__name__)


def _register() -> None:
    """Register every pruned architecture with the Auto classes."""
    for family in all_families().values():
        if not family.classes.model.startswith("transformers:"):
            resolve(family.classes.model)  # a package registers its own classes when this is imported
        config_class = PRUNED_CONFIGS[family.model_type]
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        facts = {"__module__": f"{__name__}.models", "config_class": config_class}
        AutoModelForCausalLM.register(config_class, _OnFirstUse(family.pruned_model, (), facts), exist_ok=True)


_register()
warn_of_untried_releases()
