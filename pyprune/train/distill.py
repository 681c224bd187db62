"""Knowledge distillation: a pruned student learns from the dense model it was cut from.

Two signals, both at the positions whose next token counts (the prompt of an instruction never does):

* the distribution of the next token, temperature^2 KL(teacher || student) (Hinton, Vinyals and Dean, "Distilling the
  Knowledge in a Neural Network", 2015, section 2). Logits are made chunk by chunk and their gradient is taken at once,
  so that neither model's [B, T, V] ever exists;
* the residual stream x after every kept layer. The student's layer j is compared with the dense layer k_j, the last one
  before the student's next layer. So a layer stands for the removed ones after it, as in a reconstruction of the cut
  and in LaCo's merged layers. The student has the kept channels C, and the cut scales its stream by s
  (:func:`pyprune.families.scale.stream_scale`), so

      D = mean over j and tokens of |x_j - s x^teacher_{k_j}[C]|^2 / |s x^teacher_{k_j}[C]|^2.

  Layers before one without attention are left out, unless attention and MLP write at the same point: the next part
  reads the middle of a dense layer.

  It is relative per token, because the size of the stream differs by orders of magnitude between layers and tokens. If
  LayerNorm is cut through the gauge, the teacher's mean over C is subtracted first, as the cut did for the student.

An unpruned copy of the teacher has exactly zero of both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pyprune.config.train import OF_NO_RESULT, DistillConfig
from pyprune.data.tokens import Batch
from pyprune.errors import ConfigError
from pyprune.families import Family, check_plan, count_parameters, decoder_layers, family_for
from pyprune.families.scale import stream_scale
from pyprune.plan import LayerPlan, PrunePlan
from pyprune.probe.hooks import LayerHooks
from pyprune.probe.streams import parts_of
from pyprune.train.head import causal_lm, last_hidden, logits_of, output_head, select_positions, select_rows
from pyprune.train.loss import distillation_loss
from pyprune.train.objective import LossTerms
from pyprune.train.sharded import model_to_read, release, run_within

ChunkLoss = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
"""(rows of the hidden states [n, H], which rows they are) -> (sum to minimise, sums to report [k])."""


class Distillation:
    """The loss of a student against its teacher.

    Args:
        student: the model to train; dense, or cut to ``plan``.
        teacher: the dense model, any dtype and device; it is only read.
        config: weights and temperature.
        plan: of the cut from the teacher to the student; None = nothing was cut. Only the hidden states need it.

    Raises:
        ConfigError: the two models do not belong together, or share weights.
        PlanError: the plan is not the teacher's.
    """

    def __init__(
        self,
        student: PreTrainedModel,
        teacher: PreTrainedModel,
        config: DistillConfig,
        plan: PrunePlan | None = None,
    ) -> None:
        self.teacher = teacher
        self.config = config
        self.was_training = teacher.training
        self.read = teacher  # or a sharded copy
        self.hooks: list[LayerHooks] = []
        self.listening = False
        self.student_stream: dict[int, Tensor] = {}
        self.teacher_stream: dict[int, Tensor] = {}
        self.rows: Tensor | None = None
        check_pair(student, teacher)
        self.view = _StreamView(student, teacher, plan) if config.hidden else None

    def run_facts(self) -> dict[str, Any]:
        """Return options and teacher, which a resumed run must share; the teacher by the SHA-256 of its vectors."""
        digest = hashlib.sha256()
        for parameter in self.teacher.parameters():
            if parameter.ndim == 1:
                digest.update(parameter.detach().float().cpu().numpy().tobytes())
        return {
            **{
                f"distill.{k}": v
                for k, v in self.config.to_dict().items()
                if k not in ("version", "chunk", *OF_NO_RESULT)
            },
            "teacher_parameters": count_parameters(self.teacher),
            "teacher_sha256": digest.hexdigest(),
        }

    def start(self, student: nn.Module) -> None:
        """Put the teacher into eval mode, shard it if possible, and listen to both residual streams."""
        self.was_training = self.teacher.training
        self.teacher.eval()
        self.read = model_to_read(self.teacher)
        if self.view is None:
            return
        layers = decoder_layers(cast(PreTrainedModel, causal_lm(student)))
        self.hooks = [
            LayerHooks(layers, [own for own, _ in self.view.pairs], self._hear_student),
            LayerHooks(decoder_layers(self.read), [dense for _, dense in self.view.pairs], self._hear_teacher),
        ]

    def stop(self) -> None:
        """Undo :meth:`start`."""
        for hooks in self.hooks:
            hooks.remove()
        self.hooks.clear()
        release(self.read)
        self.read = self.teacher
        self.teacher.train(self.was_training)

    def _hear_student(self, index: int, before: Tensor, after: Tensor) -> None:
        # Gradient checkpointing runs the hook again in the backward pass, and no operation may differ there.
        if self.listening:
            self.student_stream[index] = after

    def _hear_teacher(self, index: int, before: Tensor, after: Tensor) -> None:
        self.teacher_stream[index] = select_positions(after, self.rows)

    def terms(self, student: nn.Module, batch: Batch) -> LossTerms:
        """Return the loss of one micro batch; ``lm`` is the language-model loss, for the report."""
        # Computed once: a mask would be searched again for every layer of both streams.
        self.rows = batch.predicting_rows()
        base = cast(PreTrainedModel, causal_lm(student))
        self.listening = True
        states = select_positions(last_hidden(base, batch.inputs), self.rows)
        self.listening = False
        with torch.no_grad():
            expected = select_positions(run_within(self.read, lambda: self._read_states(batch.inputs)), self.rows)
        targets = select_rows(batch.targets.flatten(), self.rows)
        total, sums = _sum_chunks(self._logit_loss(base, expected, targets), states, base, self.config.chunk)
        count = max(1, len(targets))
        cross_entropy, divergence = sums[0] / count, sums[1] / count
        total, parts = total / count, {"kl": divergence}
        if self.view is not None:
            difference = self._stream_difference(self.view)
            total = total + self.config.hidden * difference
            parts["hidden"] = difference.detach()
        return LossTerms(cross_entropy, total=total, parts=parts)

    def _read_states(self, inputs: Tensor) -> Tensor:
        """Return the input of the teacher's head, [B, T, H]."""
        return last_hidden(self.read, inputs.to(self.read.device))

    def _logit_loss(self, student: PreTrainedModel, expected: Tensor, targets: Tensor) -> ChunkLoss:
        """Make the loss (1 - alpha) CE + alpha temperature^2 KL of rows; it also sums CE and KL for the report."""
        alpha, temperature = self.config.alpha, self.config.temperature

        def loss(states: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                taught = logits_of(self.read, expected[rows])
            return distillation_loss(logits_of(student, states), taught, targets[rows], alpha, temperature)

        return loss

    def _stream_difference(self, view: _StreamView) -> Tensor:
        """Return D of the module's docstring, a scalar."""
        differences = []
        for j, k in view.pairs:
            stream = select_positions(self.student_stream[j], self.rows).float()
            expected = view.target(self.teacher_stream[k].float()).to(stream.device)
            size = expected.square().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
            differences.append(((stream - expected).square().sum(-1) / size).sum() / max(1, len(stream)))
        self.student_stream.clear()
        self.teacher_stream.clear()
        return torch.stack(differences).mean()


class _StreamView:
    """Maps the teacher's residual stream to that of the cut student.

    Attributes:
        pairs: (the student's layer, the dense layer after which the streams are compared), in order.
    """

    def __init__(self, student: PreTrainedModel, teacher: PreTrainedModel, plan: PrunePlan | None) -> None:
        family = family_for(teacher)
        plan = plan or family.plan(teacher.config)
        check_plan(plan, family, teacher.config)
        sizes = (len(decoder_layers(student)), int(student.config.hidden_size))
        planned = (len(plan.layers), len(plan.hidden))
        if sizes != planned:
            raise ConfigError(
                f"distill.hidden compares streams, but the student has {sizes[0]} layers of hidden size {sizes[1]}, "
                f"and the plan keeps {planned[0]} layers of {planned[1]} ({plan.summary()}). Give the plan of the cut, "
                "or set distill.hidden to 0."
            )
        self.pairs = _pairs(family, plan)
        self.kept: Tensor | None = torch.tensor(plan.hidden) if plan.removed_hidden else None
        self.scale = stream_scale(family, plan, tied=bool(getattr(teacher.config, "tie_word_embeddings", False)))
        self.centred = self.kept is not None and family.gauges(teacher.config)

    def target(self, stream: Tensor) -> Tensor:
        """Map the teacher's stream [N, H] to the target of the student's [N, H']."""
        if self.kept is None:
            return stream
        kept = stream.index_select(-1, self.kept.to(stream.device))
        if self.centred:
            kept = kept - kept.mean(-1, keepdim=True)
        return self.scale * kept


def _pairs(family: Family, plan: PrunePlan) -> list[tuple[int, int]]:
    """Return the layers whose streams are compared; see the module's docstring."""
    following = [*plan.layers[1:], None]

    def begins(layer: LayerPlan) -> bool:
        """Check whether the first part of a layer is kept."""
        first, *_ = parts_of(family, layer.index, tuple(plan.dense.blocks(layer.index)))
        return any(layer.keeps(block) for block in first.blocks)

    return [
        (own, (plan.dense.num_layers if after is None else after.index) - 1)
        for own, after in enumerate(following)
        if after is None or begins(after)
    ]


class _SumChunks(torch.autograd.Function):
    """A loss summed over chunks of rows; each chunk's gradient is taken before the next one is computed."""

    @staticmethod
    def forward(
        ctx: Any, loss: ChunkLoss, size: int, differentiable: bool, states: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        total, sums = states.new_zeros((), dtype=torch.float32), torch.zeros(2, device=states.device)
        gradient = torch.zeros_like(states)
        of_weights = [torch.zeros_like(w) for w in weights]
        for at in range(0, len(states), size):
            rows = slice(at, at + size)
            with torch.set_grad_enabled(differentiable):
                piece = states[rows].detach().requires_grad_(differentiable)
                value, reported = loss(piece, rows)
            total += value.detach()
            sums += reported
            if differentiable:
                pieces = torch.autograd.grad(value, [piece, *weights])
                gradient[rows] = pieces[0]
                for sum_, part in zip(of_weights, pieces[1:], strict=True):
                    sum_ += part
        ctx.save_for_backward(gradient, *of_weights)
        ctx.mark_non_differentiable(sums)
        return total, sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_total: Tensor, grad_sums: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *(grad_total.to(g.dtype) * g for g in ctx.saved_tensors)


def _sum_chunks(loss: ChunkLoss, states: Tensor, student: PreTrainedModel, size: int) -> tuple[Tensor, Tensor]:
    """Sum ``loss`` over the rows of ``states`` [N, H], differentiable in them and in the student's head."""
    differentiable = torch.is_grad_enabled() and states.requires_grad
    weights = [p for p in output_head(student).parameters() if p.requires_grad] if differentiable else []
    return cast(tuple[Tensor, Tensor], cast(Any, _SumChunks).apply(loss, size, differentiable, states, *weights))


def check_pair(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Refuse a teacher that a student cannot learn from.

    Raises:
        ConfigError: it shares weights with the student, or has another vocabulary.
    """
    weights = {id(p) for p in student.parameters()}
    if any(id(p) in weights for p in teacher.parameters()):
        raise ConfigError(
            "The teacher shares weights with the student, so it would change as the student learns. Load it again, "
            "or copy it (copy.deepcopy) before the cut."
        )
    vocabularies = [int(m.config.vocab_size) for m in (student, teacher)]
    if vocabularies[0] != vocabularies[1]:
        raise ConfigError(
            f"The teacher has a vocabulary of {vocabularies[1]} tokens and the student one of {vocabularies[0]}; "
            "distillation needs the model that the student was cut from."
        )
