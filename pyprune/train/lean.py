"""Lean training: the copies and dtype of a training's weights (``train.memory``, ``train.copies``)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from pyprune.config.train import TrainConfig
from pyprune.runtime.device import working_dtype
from pyprune.train.objective import Objective


def decide_memory(config: TrainConfig, model: nn.Module) -> TrainConfig:
    """Return the options with ``memory`` decided by a loaded model: lean for bfloat16 weights, full for others.

    Raises:
        ConfigError: options that contradict the decided one.
    """
    if config.memory != "auto":
        return config
    half = any(p.dtype == torch.bfloat16 for p in model.parameters() if p.requires_grad)
    config = replace(config, memory="lean" if half else "full")
    config.validate()
    return config


def decide_dtype(config: TrainConfig, model: nn.Module, device: torch.device) -> TrainConfig:
    """Return the options with ``dtype`` decided: auto is that of bfloat16 weights, else the faster one."""
    if config.dtype == "auto" and computed_in(config, model) == "bfloat16":
        return replace(config, dtype="bfloat16")
    return replace(config, dtype=working_dtype(config.dtype, device))


def computed_in(config: TrainConfig, model: nn.Module) -> str:
    """Return the dtype of most products, ``dtype`` decided; bfloat16 weights under adapters also keep theirs."""
    half = any(p.dtype == torch.bfloat16 for p in model.parameters())
    return "bfloat16" if half else config.dtype


def to_bfloat16(model: nn.Module) -> None:
    """Turn float32 weights to bfloat16 in place, one tensor at a time; adapters, which are small, keep their dtype."""
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float32 and ".lora_" not in name:
            parameter.data = parameter.data.to(torch.bfloat16)


def autocast(config: TrainConfig, device_type: str) -> torch.autocast:
    """Make the context that computes in bfloat16 with float32 weights; it does nothing for ``dtype`` float32.

    With gradient checkpointing the bfloat16 copies of weights are not kept for a second use, which only the head has
    (in distillation, for each chunk of rows). They would all be alive at the end of the forward pass: 2 bytes a
    parameter, of whole weights even if several processes share them. Without checkpointing the graph holds them anyway.
    """
    cached = not config.gradient_checkpointing
    return torch.autocast(device_type, torch.bfloat16, enabled=config.dtype == "bfloat16", cache_enabled=cached)


def steps_in_backward(config: TrainConfig, objective: Objective) -> bool:
    """Decide whether each weight is stepped inside backward; call it after the objective's ``optimizer_penalties``.

    It is in lean memory, if a step has one forward pass and nothing else reads its gradients.
    """
    return config.memory == "lean" and config.passes == 1 and not objective.reads_gradients()


def place_of_copies(config: TrainConfig, device: torch.device) -> torch.device | None:
    """Return the device of copies of the trained weights (``config.copies``, ``memory`` decided); None = no copies."""
    copies = config.copies
    if copies == "auto" and config.memory == "lean":
        # Weights of early stopping are part of its result; those to return to after a failure are a convenience.
        on_host = device.type != "cpu" or config.early_stop_patience is not None
        copies = "host" if on_host else "off"
    if copies == "off":
        return None
    return torch.device("cpu") if copies == "host" else device
