"""Decoder layers under torch.compile while they are trained (``train.compile``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pyprune.config.train import TrainConfig
from pyprune.errors import ConfigError
from pyprune.families import decoder_layers
from pyprune.probe.streams import replaced_forwards
from pyprune.runtime.products import are_in_float32
from pyprune.runtime.progress import warn
from pyprune.train.head import causal_lm

FORMS_OF_A_LAYER = 4
"""Times that one layer may be compiled: for a first length, for any length, and the same again for another dtype."""


@contextmanager
def compiled_layers(model: nn.Module, config: TrainConfig) -> Iterator[None]:
    """Run every decoder layer compiled in the block, if its gradients are needed; does nothing without ``compile``.

    Each layer is compiled alone, so that layers of equal sizes share one result and hooks stay outside of it. A pass
    without gradients (a validation) is not compiled.

    Args:
        model: a causal LM, with adapters or without, whose layers are :func:`~pyprune.families.decoder_layers`.
        config: with ``compile`` on or off.

    Raises:
        ConfigError: torch.compile does not work here, or the decoder layers of the model are unknown.
    """
    if not config.compile:
        yield
        return
    base = causal_lm(model)
    if base is None:
        raise ConfigError(
            f"compile is on, but {type(model).__name__} is no model of Transformers; set compile to false."
        )
    if are_in_float32():
        warn("compile has no effect: products of half-precision weights are computed in float32, and not compiled.")
        yield
        return
    check_compiler(next(model.parameters()).device)
    layers = decoder_layers(base)
    # Layers of one class share two limits, of kept and of all compilations; each unequal layer is compiled.
    limits, forms = torch._dynamo.config, FORMS_OF_A_LAYER * len(layers)
    room = {
        "recompile_limit": max(limits.recompile_limit, forms),
        "accumulated_recompile_limit": max(limits.accumulated_recompile_limit, 10 * forms),
    }
    with limits.patch(room), replaced_forwards({layer: _compile_for_gradients(layer.forward) for layer in layers}):
        yield


def _compile_for_gradients(forward: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(forward)

    def run(*args: Any, **kwargs: Any) -> Any:
        return (compiled if torch.is_grad_enabled() else forward)(*args, **kwargs)

    return run


def check_compiler(device: torch.device) -> None:
    """Compile a small function, to fail before the long work in front of a first training.

    Raises:
        ConfigError: torch.compile does not work on the device; the message names the requirement.
    """
    try:
        torch.compile(_small)(torch.ones(2, device=device))
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"compile is on, but torch.compile does not work on {device.type} here: {type(error).__name__}: {reason} "
            "On a CPU it needs a C++ compiler (g++ or clang++), on a GPU Triton. Install it, or set compile to false."
        ) from error


def _small(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) + x
