"""Reconstruction: the kept parts of a model are solved in closed form to follow the dense model's residual stream.

The dense and the cut model read the same text side by side. Every kept part is solved in order (attention, then MLP).
With h the cut stream before it and x its writer's input (o_proj, down_proj) in the *cut* model,

    W <- W + argmin_D  sum over tokens ||x D^T - (t - h - x W^T)||^2  +  ridge * mean(diag(x^T x)) * ||D||^2.

The target t is the dense stream in front of the next kept part. So a writer takes over the output of the removed layers
and blocks after it, and corrects the errors of the parts before it. If hidden channels are removed, t is the kept part
of the dense stream. A bias is solved in the same system, and attention and MLP that write at the same point (Phi) are
one system. One rule serves layers, blocks, heads, FFN and hidden channels.

Kept experts of a mixture are one system, with the shared ones (:mod:`pyprune.cut.experts`).

If a norm follows the writer (Gemma 3, OLMo 2), it fixes the size of the output: g * y / rms(y), with y = x W^T. Its
gain g and W are then solved in turns: first g, then up to three rounds of W and g. With n = y / rms(y),

    g <- (<n, t - h> + r g) / (<n, n> + r) for each channel,  r = 0.01 * mean <n, n>,
    W <- the solution above for outputs (t - h) / g * rms(y), with y of the last W; tokens are weighted by 1 / rms(y).

The |g| that divides is at least 5 % of the mean one. Errors are measured after the norm.

The ridge is chosen for every writer among the candidates and "leave it as it was", on sequences that are held back from
every kind of text; a candidate that makes any kind worse is out. The system is then solved on all sequences with the
best ridge. The reported errors are those from before that, of text not solved on.

With the readers (q, k, v, gate, up), each is solved to give the dense module's values from the cut stream before the
writers of its block are. That is the default if hidden channels are removed.

Several processes (torchrun) share the sequences: each takes its own through both models. The sums of the systems and of
the errors are those of all, so that every process solves the same.

The idea generalises FLAP's bias compensation and the least squares of OSSCAR and SlimGPT after cuts of heads and FFN
channels. It also generalises ReplaceMe's linear map in place of a run of layers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pyprune.config.cut import ReconstructConfig
from pyprune.config.train import micro_batch_for
from pyprune.cut.sides import Chunk, CompactedLayers, CopiedLayers, CutSide
from pyprune.cut.steps import Step, steps_of
from pyprune.cut.walk import SolvedPart, Walk, chunks_of
from pyprune.data.tokens import Batch
from pyprune.errors import DataError
from pyprune.families import check_plan
from pyprune.families.mixtures import chosen_experts
from pyprune.plan import PrunePlan
from pyprune.probe.activations import frozen_eval
from pyprune.probe.streams import HostLayers, LayerRunner, Part
from pyprune.runtime import processes
from pyprune.runtime.device import warn_of_slow_dtype, working_dtype
from pyprune.runtime.progress import track

T = TypeVar("T")

FORWARD_TOKENS = 2048
"""Tokens in one pass through a layer, unless ``batch_size`` is given."""


@dataclass(frozen=True)
class ReconstructionReport:
    """Result of a reconstruction. JSON-able through :meth:`to_dict`.

    Attributes:
        parts: every system in the order of the layers.
        dtype: that the layers computed in.
        exact: parts before everything that is removed (or was trained since the cut), which are not solved.
        not_solved: parts with experts that are not solved, because the block does not add up what they write, or they
            show no tokens that each of them reads.
        no_carrier: removed parts before the first kept one: no writer before them could take over their output, and
            the first writers after them correct it.
        tokens: calibration tokens, padding not counted.
        held_back: those of them that only judged.
        seconds: wall time.
        extra_bytes: most memory held in addition to the models: streams, the current layer, sums and solutions.
    """

    parts: tuple[SolvedPart, ...]
    dtype: str
    exact: tuple[str, ...]
    not_solved: tuple[str, ...]
    no_carrier: tuple[str, ...]
    tokens: int
    held_back: int
    seconds: float
    extra_bytes: int

    @property
    def solved(self) -> int:
        """Systems whose solution was taken."""
        return sum(part.taken for part in self.parts)

    def notes(self) -> list[str]:
        """Sentences for the report; a warning when nothing changed (``solved`` is 0)."""
        return [self._outcome(), *self._lost(), *self._left()]

    def _left(self) -> list[str]:
        if not self.not_solved:
            return []
        return [f"The experts of {len(self.not_solved)} layers keep their values: the layers do more than add them up."]

    def _outcome(self) -> str:
        if not self.parts and self.not_solved:
            return "The reconstruction changed nothing: only experts write to the stream after what is removed."
        if not self.parts:
            return "The reconstruction changed nothing: the plan removes nothing."
        if not self.solved:
            return (
                f"The reconstruction changed nothing: for none of {len(self.parts)} systems was a solution better than "
                "the weights as they were on the text held back. Use more calibration text, or a larger ridge."
            )
        last = [part for part in self.parts if part.role == "writers" or part is self.parts[-1]][-1]
        return (
            f"Reconstruction: {self.solved} of {len(self.parts)} systems were solved on {self.tokens:,} tokens; on "
            f"{self.held_back:,} held back, the stream after layer {last.layer} was {last.after:.1%} off the dense one "
            f"({self.seconds:.0f} s, {self.extra_bytes / 2**20:,.0f} MiB more)."
        )

    def _lost(self) -> list[str]:
        if not self.no_carrier:
            return []
        return [
            f"Nothing is kept before {', '.join(self.no_carrier)}, so no writer could take over their output; the "
            "first writers after them correct part of it."
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)


def reconstruct_(
    model: PreTrainedModel | LayerRunner,
    plan: PrunePlan,
    samples: Tensor | Batch,
    *,
    kinds: Sequence[str] | None = None,
    options: ReconstructConfig = ReconstructConfig(),  # noqa: B008 - frozen
    batch_size: int | None = None,
    dense_experts: int | None = None,
) -> ReconstructionReport:
    """Solve the kept parts of a dense model so that its cut follows it, in place; shapes stay dense.

    The stream of the masked model is fitted, so that :func:`pyprune.cut.mask.mask_` and
    :func:`pyprune.cut.compact.compact_` mean the same as before. Removed parts, and everything before them, keep their
    values. In addition to the model, two streams of the text, a cut copy of one layer and the inputs of its writers
    (see :class:`pyprune.cut.walk.Walk`) are held.

    Args:
        model: the dense model, any dtype and device, or its layers, one at a time; the streams are held in its dtype.
            The sums of the systems are float64, or float32 of more than 1,024 inputs; their products are float32 of
            more than 256.
        plan: the parts to keep.
        samples: token ids, int64 [N, T], with :data:`pyprune.data.tokens.IGNORED` as right padding, which does not
            count.
        kinds: kind of text of each sample, N labels; None = those of the samples, or all of one kind.
        options: see :class:`ReconstructConfig`.
        batch_size: sequences in one pass; None = as many as make 2,048 tokens.
        dense_experts: experts that a token of the dense model reads, where ``model`` already reads fewer of them as its
            cut will; None = as many as the configuration says.

    Raises:
        DataError: fewer than two samples of every kind, or labels that do not fit them.
        PlanError: the plan is not this model's.
        UnsupportedModelError: unknown model type or parameter, or a layer that does more with its writers' output than
            add it to the stream.
    """
    dense = LayerRunner.of(model)
    check_plan(plan, dense.family, dense.model.config)
    side = CopiedLayers(dense, plan)
    return _reconstruct(dense, side, plan, Batch.of(samples), kinds, options, batch_size, dense_experts)


def reconstruct_compacted_(
    pruned: PreTrainedModel,
    plan: PrunePlan,
    dense: PreTrainedModel | LayerRunner,
    samples: Tensor | Batch,
    *,
    options: ReconstructConfig = ReconstructConfig(),  # noqa: B008 - frozen
    batch_size: int | None = None,
    device: torch.device | None = None,
) -> ReconstructionReport:
    """Solve an already cut model so that it follows the dense one, in place.

    Args:
        pruned: a result of :func:`pyprune.cut.compact.compact_`, possibly trained since.
        plan: the one that it was cut with.
        dense: the dense model, or its layers, one at a time.
        samples: see :func:`reconstruct_`.
        options: see :class:`ReconstructConfig`.
        batch_size: see :func:`reconstruct_`.
        device: of the dense model, for each layer of a ``pruned`` that is on the host; None = the device of
            ``pruned``.

    Raises:
        DataError, UnsupportedModelError: see :func:`reconstruct_`.
        PlanError: the plan is not the dense model's, or the pruned model does not have its sizes.
    """
    source = LayerRunner.of(dense)
    check_plan(plan, source.family, source.model.config)
    family = source.family  # a model that was cut has none
    layers = LayerRunner(pruned, family) if device is None else HostLayers(pruned, family, device)
    side = CompactedLayers(layers, plan, source.model.config)
    with frozen_eval(pruned):
        return _reconstruct(source, side, plan, Batch.of(samples), None, options, batch_size)


@torch.no_grad()
def _reconstruct(
    dense: LayerRunner,
    side: CutSide,
    plan: PrunePlan,
    samples: Batch,
    kinds: Sequence[str] | None,
    options: ReconstructConfig,
    batch_size: int | None,
    dense_experts: int | None = None,
) -> ReconstructionReport:
    begin = time.monotonic()
    dtype = working_dtype(options.dtype, dense.model.device)
    warn_of_slow_dtype(dtype, dense.model.device)
    config = dense.model.config
    fewer = (dense_experts or chosen_experts(config)) != chosen_experts(side.runner.model.config)
    steps, lost = steps_of(dense.family, plan, fewer_experts=fewer)
    if isinstance(side, CompactedLayers):
        steps = side.limit_exact(steps, dense)
    readers = bool(plan.removed_hidden) if options.readers is None else options.readers
    held_back = 0
    walk: Walk | None = None
    if not all(step.exact for step in steps):
        with frozen_eval(dense.model), dense.compute_in(dtype), side.runner.compute_in(dtype):
            chunks, judging, held_back = text_chunks(
                dense, samples, kinds or samples.kinds or None, options.held_back, batch_size
            )
            multiplier = float(getattr(config, "residual_multiplier", 1.0))
            walk = Walk(dense, side, chunks, options.ridges, multiplier, options.relative, judging, dense_experts)
            _walk(walk, side, steps, lost, readers=readers)
    return ReconstructionReport(
        parts=tuple(walk.reports) if walk is not None else (),
        dtype=dtype,
        exact=tuple(str(step.part) for step in steps if step.exact),
        not_solved=tuple(map(str, [*_unsolved(side, steps), *(walk.not_solved if walk is not None else ())])),
        no_carrier=tuple(map(str, lost)),
        tokens=samples.token_count(),
        held_back=held_back,
        seconds=round(time.monotonic() - begin, 3),
        extra_bytes=walk.extra_bytes + side.copied_bytes if walk is not None else 0,
    )


def _unsolved(side: CutSide, steps: Sequence[Step]) -> list[Part]:
    return [step.part for step in steps if not step.exact and not side.solves(step)]


def _walk(walk: Walk, side: CutSide, steps: Sequence[Step], lost: Sequence[Part], *, readers: bool) -> None:
    """Take both streams through all steps, and solve the steps after which they differ."""
    # The cut stream branches off before the first removed part.
    started = side.walks_everything or bool(lost)
    if started:
        walk.begin()
    walk.advance_dense(lost)
    by_layer = [(index, list(group)) for index, group in groupby(steps, key=lambda step: step.part.layer)]
    for index, group in track(by_layer, "reconstructing layers"):
        with ExitStack() as stack:
            layer: nn.Module | None = None
            for step in group:
                if not step.exact and not started:
                    started = True
                    walk.begin()
                if started and layer is None:
                    layer = stack.enter_context(side.layer(index))
                walk.advance_to_target(step, layer if readers and not step.exact else None)
                if layer is not None and (step.exact or not side.solves(step)):
                    walk.advance_cut(step, layer)
                elif layer is not None:
                    walk.solve_writers(step, layer)


def text_chunks(
    dense: LayerRunner, samples: Batch, kinds: Sequence[str] | None, held_back: float, batch_size: int | None
) -> tuple[list[Chunk], list[str], int]:
    """Return this process's share of the text, and the kinds of text and number of tokens that all hold back."""
    processes.check_same_text(samples.digest)
    count = len(samples)
    labels = ["text"] * count if kinds is None else [str(kind) for kind in kinds]
    if len(labels) != count:
        raise DataError(f"kinds has {len(labels)} labels for {count} samples; give one for each, or None.")
    size = batch_size or micro_batch_for(max(1, count), max(1, samples.ids.shape[-1]), FORWARD_TOKENS)
    batches = list(chunks_of(samples.inputs, samples.real, labels, held_back, size))
    while batch_size is None and size > 1 and processes.is_divided() and len(batches) < processes.count():
        size = -(-size // 2)  # or some processes would have nothing to do
        batches = list(chunks_of(samples.inputs, samples.real, labels, held_back, size))
    judging = sorted({kind for _, _, kind, judges in batches if judges})
    if not judging:
        raise DataError(
            f"Reconstruction has {count} samples and cannot hold any back to choose the ridge with; give at least two "
            "of a kind."
        )
    device = dense.model.device
    chunks = []
    for ids, real, kind, judges in _share(batches):
        ids, real = ids.to(device), real.to(device)
        chunks.append(Chunk(ids, real, kind, judges, dense.embed(ids)))
    return chunks, judging, sum(int(real.sum()) for _, real, _, judges in batches if judges)


def _share(chunks: list[T]) -> list[T]:
    """Return the chunks of this process, if several share the text."""
    if not processes.is_divided():
        return chunks
    if len(chunks) < processes.count():
        raise DataError(
            f"Reconstruction's text makes {len(chunks)} forward passes, and {processes.count()} processes share them; "
            "give more text or a smaller batch_size, or start fewer processes."
        )
    return chunks[processes.number() :: processes.count()]
