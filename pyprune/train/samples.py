"""Checks of samples and parameters before a training; the order of samples."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pyprune.data.stream import position_limit
from pyprune.data.tokens import IGNORED, Batch
from pyprune.errors import ConfigError, DataError, shown


def batch_indices(count: int, batch_size: int, step: int, seed: int) -> Tensor:
    """Return the sample indices of ``step`` (from 1): successive pieces of one seeded permutation an epoch, [size]."""
    first = (step - 1) * batch_size
    positions = range(first, first + batch_size)
    orders: dict[int, Tensor] = {}
    for epoch in {p // count for p in positions}:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        orders[epoch] = torch.randperm(count, generator=generator)
    return torch.stack([orders[p // count][p % count] for p in positions])


def check_samples(model: nn.Module, samples: Tensor | Batch, what: str) -> None:
    """Refuse samples that the model cannot be trained on.

    Raises:
        DataError: wrong shape or type, an id outside the vocabulary, a length beyond the model's, padding that is
            not on the right or has a label, or nothing to predict.
    """
    tokens = Batch.of(samples)
    ids, labels = tokens.ids, tokens.labels
    if ids.ndim != 2 or ids.dtype != torch.int64 or len(ids) == 0 or ids.shape[1] < 2:
        raise DataError(
            f"{what} has shape {tuple(ids.shape)} and type {ids.dtype}; expected token ids, int64 [N, T] "
            "with N >= 1 and T >= 2."
        )
    if labels.shape != ids.shape or labels.dtype != torch.int64:
        raise DataError(
            f"{what} has labels of shape {tuple(labels.shape)} and type {labels.dtype}; expected int64 "
            f"{list(ids.shape)}, one for each token id."
        )
    config = getattr(model, "config", None)
    limit = None if config is None else position_limit(config)
    if limit is not None and ids.shape[1] > limit:
        raise DataError(
            f"{what} has sequences of {ids.shape[1]} tokens, but the model allows {shown(limit)}. "
            "Use a shorter sequence_length."
        )
    vocab, largest = getattr(config, "vocab_size", None), max(int(ids.max()), int(labels.max()))
    if vocab is not None and largest >= vocab:
        raise DataError(
            f"{what} holds the token id {largest}, but the model's vocabulary ends at {vocab - 1}. "
            "Tokenise with the model's own tokenizer."
        )
    padding = ids < 0
    if bool((padding[:, :-1] & ~padding[:, 1:]).any()) or bool((padding & (labels >= 0)).any()):
        raise DataError(f"{what} has padding before a token or a label on padding; pad on the right, with {IGNORED}.")
    if not bool(tokens.predicted.any()):
        raise DataError(f"{what} holds nothing but padding and masked tokens; there is nothing to predict.")


def check_trainable(parameters: Mapping[str, nn.Parameter], *, lean: bool = False) -> None:
    """Refuse half-precision trained weights: an update of 2e-5 on a weight of 0.02 rounds to nothing in bfloat16.

    Args:
        parameters: the trained ones.
        lean: in lean memory bfloat16 weights are rounded stochastically, so that they keep such updates on average.

    Raises:
        ConfigError: nothing to train, or trained weights of a half type.
    """
    if not parameters:
        raise ConfigError("Nothing to train: no parameter requires a gradient.")
    refused = (torch.float16,) if lean else (torch.bfloat16, torch.float16)
    half = [n for n, p in parameters.items() if p.dtype in refused]
    if half:
        raise ConfigError(
            f"{len(half)} trained parameters (first: {half[0]}) are {parameters[half[0]].dtype}, where small "
            "updates round to nothing. Load the model in float32 (the training's dtype may be bfloat16), or train "
            "bfloat16 weights with memory 'lean'."
        )


def check_not_wide(model: nn.Module) -> None:
    """Refuse float64 weights in lean memory, which trains bfloat16 ones.

    Raises:
        ConfigError: a trained weight is float64.
    """
    wide = [n for n, p in model.named_parameters() if p.requires_grad and p.dtype == torch.float64]
    if wide:
        raise ConfigError(
            f"{len(wide)} trained parameters (first: {wide[0]}) are float64, which memory 'lean' does not train; set "
            "memory to full, or load the model with dtype bfloat16."
        )


def check_gradients_fit(model: nn.Module) -> None:
    """Refuse float16 weights, trained or under adapters and gates: their gradients are float16 as well.

    A loss is a mean over many tokens, so the gradients of most words' logits are below 6e-8, the smallest number of
    float16, and no loss is scaled here. bfloat16 has the range of float32.

    Raises:
        ConfigError: a weight is float16.
    """
    half = [name for name, parameter in model.named_parameters() if parameter.dtype == torch.float16]
    if half:
        raise ConfigError(
            f"{len(half)} parameters (first: {half[0]}) are float16, whose smallest number is above most of the "
            "gradients of a training. Load the model with dtype bfloat16 or float32."
        )


def hold_out(samples: Batch) -> tuple[Batch, Batch, str]:
    """Split samples for early stopping: (training, validation, a note for the report)."""
    if len(samples) < 2:
        raise ConfigError(
            "early_stop_patience needs validation samples, and one training sample cannot be split. "
            "Give validation samples or more training samples."
        )
    count = max(1, len(samples) // 20)
    note = f"Early stopping validates on {count} of the {len(samples)} samples, which were held out of training."
    return samples[:-count], samples[-count:], note
