"""Evaluation and training mode of modules, and frozen parameters, for as long as a block lasts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from pyprune.runtime.products import products_in_float32


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode (no dropout), and back into its own mode after the block.

    Products of half-precision weights are computed in float32 on a CPU that has no instructions for them.
    """
    modules = [(module, "training") for module in model.modules()]
    with _attributes_as(False, modules), products_in_float32(model):
        yield


@contextmanager
def disable_dropout(model: nn.Module) -> Iterator[None]:
    """Set all dropout to 0 in the block; for training mode, which gradient checkpointing needs, without randomness."""
    rates = [
        (module, name)
        for module in model.modules()
        for name, value in vars(module).items()
        if type(value) is float and (name.endswith(("dropout", "layerdrop")) or isinstance(module, nn.Dropout))
    ]
    with _attributes_as(0.0, rates):
        yield


@contextmanager
def training(model: nn.Module, device: torch.device, *, gradient_checkpointing: bool) -> Iterator[None]:
    """Set training mode and a private random stream for the block; products as in :func:`evaluation_mode`.

    Args:
        model: of Transformers if ``gradient_checkpointing`` is on.
        device: of the model; its random stream is restored too.
        gradient_checkpointing: compute activations again in the backward pass instead of holding them.
    """
    was_training = model.training
    changed_checkpointing = gradient_checkpointing and not getattr(model, "is_gradient_checkpointing", False)
    if changed_checkpointing:
        cast(Any, model).gradient_checkpointing_enable({"use_reentrant": False})
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), products_in_float32(model):
            model.train()
            yield
    finally:
        model.train(was_training)
        if changed_checkpointing:
            cast(Any, model).gradient_checkpointing_disable()


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Let no parameter of a model require a gradient, and those that did do so again after the block."""
    with _attributes_as(False, [(p, "requires_grad") for p in model.parameters()]):
        yield


@contextmanager
def _attributes_as(value: object, places: Sequence[tuple[object, str]]) -> Iterator[None]:
    """Give attributes, named by owner and name, one value in the block, and their earlier values after it."""
    before = [(owner, name, getattr(owner, name)) for owner, name in places]
    try:
        for owner, name in places:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, earlier in before:
            setattr(owner, name, earlier)
