"""Compute as quantised checkpoints do, in plain torch without compressed-tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def rounded_float8(values: Tensor, scale: Tensor) -> Tensor:
    """The nearest multiples of ``scale`` by a float8 number, in float32.

    Args:
        values: float32 [..., channels].
        scale: float32 that broadcasts to them.
    """
    return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Every linear layer but the head, by name."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}


def with_weights_of(plain: PreTrainedModel, quantised: PreTrainedModel) -> PreTrainedModel:
    """Give a plain model the rounded weights of another: nothing of compressed-tensors is in it.

    Args:
        plain: the same model before it was rounded; it is changed.
        quantised: as :func:`pyprune.checkpoint.load.load_model` reads it.

    Returns:
        ``plain``.
    """
    found = linear_layers(quantised)
    for name, module in linear_layers(plain).items():
        module.weight.data = found[name].weight.detach().to(module.weight.dtype)
    return plain


def round_inputs_(model: nn.Module, quantise: str) -> None:
    """Let linear layers round their input as vLLM does: a scale for each token, which ends at its largest value.

    Args:
        model: of Transformers.
        quantise: "w8a8-int8" or "fp8".
    """

    def to_int8(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        scale = inputs[0].float().abs().amax(-1, keepdim=True) / 127
        return (((inputs[0].float() / scale).round().clamp(-128, 127) * scale).to(inputs[0].dtype),)

    def to_float8(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        scale = inputs[0].float().abs().amax(-1, keepdim=True) / 448
        return (rounded_float8(inputs[0].float(), scale).to(inputs[0].dtype),)

    hook = {"w8a8-int8": to_int8, "fp8": to_float8}[quantise]
    for module in linear_layers(model).values():
        module.register_forward_pre_hook(hook)
