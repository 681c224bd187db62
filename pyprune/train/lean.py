"""Lean training: what a training holds of its weights, and in which dtype (``train.memory``, ``train.copies``)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from pyprune.config.train import TrainConfig
from pyprune.runtime.device import working_dtype
from pyprune.train.objective import Objective


def decided(config: TrainConfig, model: nn.Module) -> TrainConfig:
    """The options with ``memory`` decided for a model that is in memory: lean for bfloat16 weights, full for others.

    Raises:
        ConfigError: options that do not go with what was decided.
    """
    if config.memory != "auto":
        return config
    half = any(p.dtype == torch.bfloat16 for p in model.parameters() if p.requires_grad)
    found = replace(config, memory="lean" if half else "full")
    found.validate()
    return found


def computing(config: TrainConfig, model: nn.Module, device: torch.device) -> TrainConfig:
    """The options with ``dtype`` decided: auto is bfloat16 where weights are (in lean memory), else what is faster."""
    if config.dtype == "auto" and computed_in(config, model) == "bfloat16":
        return replace(config, dtype="bfloat16")
    return replace(config, dtype=working_dtype(config.dtype, device))


def computed_in(config: TrainConfig, model: nn.Module) -> str:
    """The dtype of most products, ``dtype`` decided: float32 leaves bfloat16 weights under adapters as they are."""
    half = any(p.dtype == torch.bfloat16 for p in model.parameters())
    return "bfloat16" if half else config.dtype


def to_bfloat16(model: nn.Module) -> None:
    """Turn float32 weights to bfloat16 in place, one tensor at a time; adapters, which are small, stay as they are."""
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float32 and ".lora_" not in name:
            parameter.data = parameter.data.to(torch.bfloat16)


def autocast(config: TrainConfig, device_type: str) -> torch.autocast:
    """Where a training computes in bfloat16 while its weights are float32; does nothing for ``dtype`` float32.

    With gradient checkpointing the bfloat16 copies of weights are not kept for a second use, which only the head has
    (in distillation, for each chunk of rows): they would all be alive at the end of the forward pass, 2 bytes a
    parameter, and of whole weights also where several processes share them. Without checkpointing the graph holds them
    anyway.
    """
    cached = not config.gradient_checkpointing
    return torch.autocast(device_type, torch.bfloat16, enabled=config.dtype == "bfloat16", cache_enabled=cached)


def steps_in_backward(config: TrainConfig, objective: Objective) -> bool:
    """Whether each weight is stepped inside backward; asked after the objective's ``optimizer_penalties``.

    In lean memory, where one forward pass makes a step and nothing else reads its gradients.
    """
    return config.memory == "lean" and config.passes == 1 and not objective.reads_gradients()


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
