"""Lean training: what a training holds of its weights, and in which dtype (``train.memory``, ``train.copies``)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from pyprune.config.train import TrainConfig


def decided(config: TrainConfig, model: nn.Module) -> TrainConfig:
    """The options with ``memory`` decided for a model that is in memory: lean for bfloat16 weights, full for others."""
    if config.memory != "auto":
        return config
    half = any(p.dtype == torch.bfloat16 for p in model.parameters() if p.requires_grad)
    return replace(config, memory="lean" if half else "full")


def to_bfloat16(model: nn.Module) -> None:
    """Turn float32 weights to bfloat16 in place, one tensor at a time; adapters, which are small, stay as they are."""
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float32 and ".lora_" not in name:
            parameter.data = parameter.data.to(torch.bfloat16)


def place_of_copies(config: TrainConfig, device: torch.device) -> torch.device | None:
    """Where copies of the trained weights are kept (``config.copies``, ``memory`` decided); None = nowhere."""
    wanted = config.copies
    if wanted == "auto" and config.memory == "lean":
        # Weights of early stopping are part of its result; those to return to after a failure are a convenience.
        on_host = device.type != "cpu" or config.early_stop_patience is not None
        wanted = "host" if on_host else "off"
    if wanted == "off":
        return None
    return torch.device("cpu") if wanted == "host" else device
