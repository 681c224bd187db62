"""Evaluation and training mode of modules, and frozen parameters, for as long as a block lasts."""

from __future__ import annotations

from collections.abc import Iterator
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
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with products_in_float32(model):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def disable_dropout(model: nn.Module) -> Iterator[None]:
    """Set all dropout to 0 in the block; for training mode, which gradient checkpointing needs, without randomness."""
    rates = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if type(value) is float and (name.endswith(("dropout", "layerdrop")) or isinstance(module, nn.Dropout))
    ]
    try:
        for module, name, _ in rates:
            setattr(module, name, 0.0)
        yield
    finally:
        for module, name, value in rates:
            setattr(module, name, value)


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
    trainable = [p for p in model.parameters() if p.requires_grad]
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
