"""Next-token losses that never hold more than some megabytes in addition to the logits.

A vocabulary of 50,000 to 250,000 tokens makes the logits the largest tensor of a step by far. Taken in one piece, their
loss needs a copy without the last position, the log-softmax, and the gradients of all of these, each as large again.
Here the gradient is written down in closed form over the logits, some rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyprune.data.tokens import IGNORED, Batch
from pyprune.train.head import causal_lm, last_hidden, logits_of, select_positions, select_rows

ROWS = 64
"""The head gets a multiple of this many positions, unless it gets all of them."""
_CHUNK_BYTES = 24 << 20
"""Bytes of float32 logits in one chunk: an allocator keeps blocks of this size, and frees larger ones."""


def causal_loss(model: nn.Module, batch: Tensor | Batch) -> Tensor:
    """Mean next-token cross-entropy over the predicted tokens, in float32 (scalar, nats a token).

    Args:
        model: a causal LM whose output has ``logits`` [B, T, V]. A gradient is written over them, so nobody else
            may keep them.
        batch: sequences on the model's device; plain token ids, int64 [B, T], predict every token
            (:data:`IGNORED` marks right padding).
    """
    tokens = Batch.of(batch)
    logits, targets = _predicting_logits(model, tokens) or _all_logits(model, tokens)
    total = cast(Tensor, cast(Any, _CrossEntropy).apply(logits, targets))
    return total / tokens.predicted.sum().clamp(min=1)


def _all_logits(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the logits [B, T, V] of every position, and their targets."""
    logits: Tensor = model(input_ids=batch.inputs, use_cache=False).logits
    return logits, _next_token(batch.targets).to(logits.device)


def _predicting_logits(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor] | None:
    """Return the logits [1, n, V] of the positions whose next token counts, and their targets.

    The head of a small model is a fifth of its work, and prompts and padding may be half of the positions.

    Returns:
        None if every token counts, or the model's halves are unknown.
    """
    base = causal_lm(model)
    if base is None or batch.counts_every_token:
        return None
    rows = batch.predicting_rows()
    targets = select_rows(batch.targets.flatten(), rows)
    if rows is not None:  # to few lengths: kernels are built for each
        missing = -len(rows) % ROWS
        rows, targets = functional.pad(rows, (0, missing)), functional.pad(targets, (0, missing), value=IGNORED)
    logits = logits_of(base, select_positions(last_hidden(base, batch.inputs), rows))
    return logits.unsqueeze(0), targets.unsqueeze(0).to(logits.device)


def distillation_loss(
    logits: Tensor, taught: Tensor, targets: Tensor, alpha: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """Sum (1 - alpha) CE + alpha temperature^2 KL(taught || own) over rows, both distributions at temperature.

    With p = softmax(logits), and p_t and q_t the two distributions at the temperature t, its gradient in the logits is
    (1 - alpha) (p - one-hot) + alpha t (p_t - q_t) (Hinton, Vinyals and Dean, 2015, section 2).

    Args:
        logits: the student's, [N, V]; a gradient is written over them.
        taught: the teacher's, [N, V], on any device; only read.
        targets: int64 [N], all of them predicted.
        alpha: weight of the teacher, 0 to 1.
        temperature: above 0.

    Returns:
        The sum (a scalar, differentiable in ``logits``), and the sums of CE and of KL alone [2]; nats, in float32 or
        wider.
    """
    return cast(tuple[Tensor, Tensor], cast(Any, _Distillation).apply(logits, taught, targets, alpha, temperature))


def token_losses(logits: Tensor, ids: Tensor) -> Tensor:
    """Return negative log-likelihoods of the tokens after the first, no gradient: nats, [B, T - 1], float32 or wider.

    Args:
        logits: [B, T, V].
        ids: int64 [B, T], the tokens of the logits.
    """
    rows, targets = logits.detach().flatten(0, 1), _next_token(ids[:, 1:]).flatten()
    losses = [_losses(rows[chunk], targets[chunk]) for chunk in _chunks(rows)]
    return torch.cat(losses).view_as(ids)[:, :-1]


def _next_token(targets: Tensor) -> Tensor:
    """Append a column that predicts nothing: leaving out the last position's logits would copy all others."""
    return functional.pad(targets, (0, 1), value=IGNORED)


def _chunks(rows: Tensor) -> Iterator[slice]:
    """Yield slices of rows [N, V], one for each chunk."""
    length = max(1, _CHUNK_BYTES // (4 * rows.shape[1]))
    return (slice(at, at + length) for at in range(0, len(rows), length))


def _wide(rows: Tensor) -> Tensor:
    return rows if rows.dtype == torch.float64 else rows.float()


def _losses(rows: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(_wide(rows), targets, ignore_index=IGNORED, reduction="none")


class _CrossEntropy(torch.autograd.Function):
    """The summed loss of logits [B, T, V] at targets [B, T]; the logits become their own gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        gradient = ctx.needs_input_grad[0]
        rows, targets = logits.detach().flatten(0, 1), targets.flatten()
        total = torch.zeros((), dtype=_wide(rows[:0]).dtype, device=rows.device)
        for chunk in _chunks(rows):
            total += (
                _loss_and_gradient(rows[chunk], targets[chunk])
                if gradient
                else _losses(rows[chunk], targets[chunk]).sum()
            )
        ctx.gradient = rows.view_as(logits) if gradient else None
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        return _take_gradient(ctx).mul_(grad), None


class _Distillation(torch.autograd.Function):
    """:func:`distillation_loss`; the student's logits become their own gradient."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, taught: Tensor, targets: Tensor, alpha: float, temperature: float
    ) -> tuple[Tensor, Tensor]:
        gradient = ctx.needs_input_grad[0]
        rows = logits.detach()
        sums = torch.zeros(2, dtype=_wide(rows[:0]).dtype, device=rows.device)
        for chunk in _chunks(rows):
            others = _wide(taught[chunk].detach()).to(rows.device)
            sums += _distillation_sums(rows[chunk], others, targets[chunk], alpha, temperature, gradient)
        ctx.gradient = rows if gradient else None
        ctx.mark_non_differentiable(sums)
        return (1 - alpha) * sums[0] + alpha * temperature**2 * sums[1], sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_sums: Tensor) -> tuple[Tensor | None, ...]:
        return _take_gradient(ctx).mul_(grad), None, None, None, None


def _take_gradient(ctx: Any) -> Tensor:
    """Return the gradient in the logits' memory; it can be taken once."""
    gradient, ctx.gradient = ctx.gradient, None
    if gradient is None:
        raise RuntimeError("The loss was differentiated twice, but its first gradient took the logits' memory.")
    return cast(Tensor, gradient)


def _distillation_sums(
    rows: Tensor, taught: Tensor, targets: Tensor, alpha: float, temperature: float, gradient: bool
) -> Tensor:
    """Return CE and KL of rows, each summed [2]; with ``gradient`` the rows become it."""
    index = targets.unsqueeze(1)
    student = _wide(rows).log_softmax(-1)
    # Both in the same way, so that equal logits have a divergence of exactly zero.
    softened = student if temperature == 1 else (_wide(rows) / temperature).log_softmax(-1)
    learned = (taught if temperature == 1 else taught / temperature).log_softmax(-1)
    probabilities = learned.exp()
    sums = torch.stack([-student.gather(1, index).sum(), learned.sub_(softened).mul_(probabilities).sum()])
    if not gradient:
        return sums
    if softened is student:
        total = student.exp_().sub_(probabilities, alpha=alpha)
    else:
        total = student.exp_().mul_(1 - alpha).add_(softened.exp_().sub_(probabilities), alpha=alpha * temperature)
    total.scatter_add_(1, index, torch.full_like(index, alpha - 1, dtype=total.dtype))
    rows.copy_(total)
    return sums


def _loss_and_gradient(rows: Tensor, targets: Tensor) -> Tensor:
    """Return the summed loss of rows, which become softmax minus one-hot (zero where nothing is predicted)."""
    log_likelihoods = _wide(rows).log_softmax(-1)
    index = targets.clamp(min=0).unsqueeze(1)
    predicted = (targets != IGNORED).unsqueeze(1)
    total = -(log_likelihoods.gather(1, index) * predicted).sum()
    gradient = log_likelihoods.exp_()
    gradient.scatter_add_(1, index, -torch.ones_like(index, dtype=gradient.dtype))
    rows.copy_(gradient.mul_(predicted))
    return total
