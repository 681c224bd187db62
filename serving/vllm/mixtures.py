"""Mixtures of experts for vLLM whose layers have their own numbers of experts, and their own widths and heads.

vLLM's model of a type builds all layers from one configuration, one after another. Here that configuration has the
values of a layer while the layer is built. vLLM imports this module only when a checkpoint names one of these
architectures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import extract_layer_index, make_layers

from pyprune.families.base import layer_overrides
from pyprune.families.engines import inferred_architectures
from pyprune.serving.vllm.model import check_served

MODULES = "vllm.model_executor.models."


class OwnSizes:
    """Builds each layer of the vLLM model that it is mixed into at the sizes of its index.

    Raises:
        CheckpointError, ConfigError: see :func:`pyprune.serving.vllm.model.check_served`.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        check_served(vllm_config)
        with _layers_of(vllm_config.model_config.hf_config):
            super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]


@contextmanager
def _layers_of(config: Any) -> Iterator[None]:
    """Let vLLM's models build each layer of this configuration with the layer's own values."""

    def make(count: int, layer_fn: Callable[..., nn.Module], prefix: str) -> Any:
        def layer(prefix: str) -> nn.Module:
            with _values_of_layer(config, extract_layer_index(prefix)):
                return layer_fn(prefix=prefix)

        return make_layers(count, layer, prefix)

    # A model calls the function by the name in its own module, and some models build those of another module.
    modules = [module for name, module in sys.modules.items() if name.startswith(MODULES)]
    callers = [module for module in modules if getattr(module, "make_layers", None) is make_layers]
    try:
        for module in callers:
            vars(module)["make_layers"] = make
        yield
    finally:
        for module in callers:
            vars(module)["make_layers"] = make_layers


@contextmanager
def _values_of_layer(config: Any, index: int) -> Iterator[None]:
    """Give a configuration the values of one of its layers."""
    own = layer_overrides(config, index)
    usual = {name: vars(config)[name] for name in own if name in vars(config)}
    try:
        vars(config).update(own)
        yield
    finally:
        for name in own:
            del vars(config)[name]
        vars(config).update(usual)


def __getattr__(name: str) -> type[Any]:
    """Return a class that checkpoints name, such as PrunedMixtralForCausalLM, and make it at the first request."""
    if name not in inferred_architectures():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    stock = ModelRegistry.models[name.removeprefix("Pruned")].load_model_cls()
    facts = {"__module__": __name__, "__doc__": f"{stock.__name__} with per-layer sizes."}
    return globals().setdefault(name, type(name, (OwnSizes, stock), facts))  # type: ignore[no-any-return]
