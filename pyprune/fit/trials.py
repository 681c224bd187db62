"""Measure the losses of single blocks: change and reconstruct one block of the dense model, and no other.

The dense residual stream runs through the model once. Each block is narrowed or skipped alone, for each of its widths.
The writer of the change (the block's own if a part of it is kept, else the nearest one before it) is then solved in
closed form to follow the dense stream, as :mod:`pyprune.cut.reconstruct` does for a cut, on one part of the text. Only
the layers after it run on the other part, on which the loss is measured. A trial therefore costs half the model on
average, and no text is used for both solving and judging.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import override

from pyprune.config.cut import ReconstructConfig
from pyprune.config.run import PruneConfig
from pyprune.config.score import ScoreAxis
from pyprune.config.train import micro_batch_for
from pyprune.cut.mask import mask_, restored
from pyprune.cut.projections import Tally
from pyprune.cut.reconstruct import reconstruct_
from pyprune.cut.sides import Chunk, CopiedLayers
from pyprune.cut.steps import Step, steps_of
from pyprune.cut.systems import Writers
from pyprune.cut.walk import USED, Walk, chunks_of
from pyprune.data.tokens import Batch
from pyprune.errors import DataError
from pyprune.families import check_plan, family_for
from pyprune.fit.choices import LayerScores, Routers, Space, UnitScores
from pyprune.fit.quantities import Widths
from pyprune.fit.values import BlockLoss, BlockLosses, ValueOptions, anchors_of
from pyprune.methods.base import PlanRequest
from pyprune.methods.experts import reap
from pyprune.methods.registry import get_method
from pyprune.methods.score import ScoreMethod, scoring_config
from pyprune.methods.score._structures import StructureScores
from pyprune.methods.score.base import Scoring
from pyprune.methods.score.taylor import TaylorOptions
from pyprune.plan import PrunePlan
from pyprune.probe.activations import frozen_eval
from pyprune.probe.experts import ExpertSums, expert_modules, read_experts
from pyprune.probe.streams import LayerRunner, Part
from pyprune.runtime.device import warn_of_slow_dtype, working_dtype
from pyprune.runtime.progress import track, warn
from pyprune.runtime.records import RecordFile, digest

HELD_BACK = 0.125
"""Share of the sequences for solving on which ridges are judged, as in a cut."""


def recommended_scores() -> PruneConfig:
    """Return the options of the scorer: Taylor's second-order term, sum |w h w|."""
    return scoring_config("taylor", TaylorOptions(form="param_second"))


def score_units(model: PreTrainedModel, samples: Tensor, *, hidden: bool = False) -> UnitScores:
    """Score every KV group, query head, FFN channel and expert of a dense model, with ``hidden`` every hidden channel.

    Experts are scored by what they add to the tokens that are routed to them (REAP).

    Args:
        model: is not changed.
        samples: token ids, int64 [N, T].
        hidden: needed if hidden sizes are tried.

    Raises:
        ScoreError: scores that are not finite.
    """
    config = recommended_scores()
    method = cast(ScoreMethod, get_method(config.method))
    axes: tuple[ScoreAxis, ...] = ("heads", "ffn", "hidden") if hidden else ("heads", "ffn")
    opened = replace(
        config.score_options,
        axes=axes,
        ranking="local",
        normalise="none",
        heads_unit="kv_group",
        first_layer=0,
        last_layer=-1,
        closed_ends=0,
        layers=(),
        heads=None,
        ffn=None,
        hidden=None,
    )
    request = PlanRequest.of(model, replace(config, score=opened))
    run = Scoring.of(model, samples, request)
    method.scorer(run)
    heads = StructureScores(replace(run.scope, whole_groups=False), opened.aggregation)
    heads.sums = run.scores.sums
    experts, groups = _expert_scores(model, samples), Routers.of(model.config, run.scope.dense).groups
    layers = tuple(
        LayerScores(
            _scores_of(run.scores, i, "heads"),
            _scores_of(heads, i, "heads"),
            _scores_of(run.scores, i, "ffn"),
            experts.get(i, ()),
            groups if i in experts else 1,
        )
        for i in range(run.scope.dense.num_layers)
    )
    channels = tuple(run.scores.group_scores(None, "hidden").tolist()) if hidden else ()
    return UnitScores(layers, channels, config.method)


def _scores_of(scores: StructureScores, layer: int, axis: str) -> tuple[float, ...]:
    """Return the scores of a layer's groups along an axis; none if the layer has no such axis."""
    return tuple(scores.group_scores(layer, axis).tolist()) if scores.scope.units(axis, layer) else ()


def _expert_scores(model: PreTrainedModel, samples: Tensor) -> dict[int, tuple[float, ...]]:
    """Return layer -> REAP's score of each of its experts; {} of a model without mixtures."""
    sums = {layer: ExpertSums() for layer in expert_modules(model)}
    if not sums:
        return {}
    with frozen_eval(model):
        read_experts(LayerRunner.of(model), samples, sums)
    return {layer: tuple(reap.score(each).tolist()) for layer, each in sums.items()}


def weights_digest(model: PreTrainedModel) -> str:
    """SHA-256 over the names, shapes and values of all parameters, hexadecimal."""
    sha = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        sha.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        sha.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return sha.hexdigest()


@torch.no_grad()
def measure_losses(
    model: PreTrainedModel,
    space: Space,
    scores: UnitScores,
    samples: Tensor | Batch,
    options: ValueOptions = ValueOptions(),  # noqa: B008 - frozen
    *,
    path: Path | None = None,
    model_id: str | None = None,
) -> BlockLosses:
    """Measure the loss of every anchor of every layer, and of every hidden size.

    Args:
        model: dense; is not changed.
        space: choices of the model.
        scores: of its units.
        samples: windows of text without padding, int64 [N, T], at least three of every kind.
        options: see :class:`ValueOptions`.
        path: a JSONL file to which every loss is appended as soon as it is measured. Losses of the same model, text,
            scores and options are read from it; a warning tells of losses of others. None keeps nothing.
        model_id: identifies the model; None = a digest of its weights.

    Raises:
        DataError: too few sequences, or padding among them.
        PlanError: the space is not this model's.
        CheckpointError, OutputError: the file cannot be read or written.
    """
    options.validate()
    options = replace(options, dtype=working_dtype(options.dtype, model.device))
    warn_of_slow_dtype(options.dtype, model.device)
    batch = Batch.of(samples)
    check_plan(space.identity, family_for(model), model.config)
    identity = {
        "model": model_id or weights_digest(model),
        "text": batch.digest(),
        "kinds": list(batch.kinds),
        "scores": replace(scores, hidden=()).digest(),  # those of hidden channels change no loss of a layer
        "options": options.identity(),
    }
    store = _Store(path, identity, digest(scores.hidden))
    trials = BlockTrials(model, scores, space, batch, options)
    anchors = [(i, widths) for i, layer in enumerate(space.layers) for widths in anchors_of(layer, options)]
    for loss in trials.blocks([place for place in anchors if store.get(*place, space.hidden[0]) is None]):
        store.add(loss)
    for size in space.hidden[1:]:
        if store.get(None, space.dense_widths, size) is None:
            store.add(trials.hidden(size))
    entries = [store.get(i, widths, space.hidden[0]) for i, widths in anchors]
    entries += [store.get(None, space.dense_widths, size) for size in space.hidden[1:]]
    return BlockLosses(tuple(entry for entry in entries if entry is not None), len(entries) - store.added)


class _Store:
    """Losses in a file, each under the identity of its model, text, scores and options.

    Args:
        path: the file; None keeps them in memory.
        identity: of this run.
        channels: digest of the scores of hidden channels, which losses of hidden sizes depend on.
    """

    def __init__(self, path: Path | None, identity: dict[str, Any], channels: str) -> None:
        self.records = RecordFile(path, program="pyprune fit", option="--cache")
        self.name, self.channels = digest(identity), channels
        self.added = 0
        others = [r["identity"] for key, r in self.records.of("identity").items() if key != self.name]
        if self.name not in self.records.of("identity"):
            if others:
                last = others[-1]
                differ = [name for name in identity if last.get(name) != identity[name]]
                warn(f"{path} holds losses of another {', '.join(differ)}; they are not used. All are measured again.")
            self.records.add({"kind": "identity", "key": self.name, "identity": identity})

    def get(self, layer: int | None, widths: Widths, hidden: int) -> BlockLoss | None:
        """Return a measured loss; None if it is missing."""
        record = self.records.of("loss").get(self._key(layer, widths, hidden))
        return None if record is None else BlockLoss(layer, widths, hidden, float(record["loss"]["kl"]))

    def add(self, loss: BlockLoss) -> None:
        """Keep a loss."""
        key = self._key(loss.layer, loss.widths, loss.hidden_size)
        self.records.add({"kind": "loss", "key": key, "identity": self.name, "loss": asdict(loss)})
        self.added += 1

    def _key(self, layer: int | None, widths: Widths, hidden: int) -> str:
        return digest([self.name, layer, *widths.sizes, hidden, *([self.channels] if layer is None else [])])


@dataclass(eq=False)
class _Judge:
    """Sequences on which losses are measured.

    Attributes:
        ids: int64 [B, T].
        stream: the dense stream [B, T, H] at the current block.
        dense: probabilities of the dense model at the judged positions, float32 [B, P, V].
        entropy: of the dense model there, float32 [B, P].
    """

    ids: Tensor
    stream: Tensor
    dense: Tensor
    entropy: Tensor


class BlockTrials:
    """A dense model, its text, and the stream at the current block.

    Args:
        model: dense.
        scores: of its units.
        space: its choices.
        batch: the text.
        options: see :class:`ValueOptions`.
    """

    def __init__(
        self, model: PreTrainedModel, scores: UnitScores, space: Space, batch: Batch, options: ValueOptions
    ) -> None:
        if not batch.counts_every_token:
            raise DataError("Losses of blocks are measured on windows of text; these samples have padding or masks.")
        if not len(batch) or batch.ids.shape[1] < 2 * options.stride:
            raise DataError(
                f"The text has {len(batch)} sequences of {batch.ids.shape[-1]} tokens; losses at every "
                f"{options.stride}-th position need at least {2 * options.stride} tokens each."
            )
        self.model = model
        self.family = family_for(model)
        self.runner = LayerRunner(model, self.family)
        self.scores = scores
        self.identity = space.identity
        self.space = space
        self.options = options
        self.batch = batch
        self.multiplier = float(getattr(model.config, "residual_multiplier", 1.0))
        length = batch.ids.shape[1]
        self.at = torch.arange(options.stride - 1, length - 1, options.stride)
        kinds = list(batch.kinds) or ["text"] * len(batch)
        size = micro_batch_for(len(batch), length)
        parts = list(chunks_of(batch.inputs, batch.real, kinds, options.judged, size))
        judged = [ids for ids, _, _, judges in parts if judges]
        judged = list(torch.cat(judged).split(size)) if judged else []
        rows = [(ids, kind) for ids, _, kind, judges in parts if not judges]
        if not judged:
            raise DataError("Losses need sequences to judge on and others to solve on; give at least three of a kind.")
        self.solved_on = Batch.of(torch.cat([ids for ids, _ in rows]))
        self.solved_kinds = [kind for ids, kind in rows for _ in ids]
        self.fit: list[Chunk] = []
        self.targets: dict[tuple[Part, ...], list[Tensor]] = {}
        with frozen_eval(model), self.runner.compute_in(options.dtype):
            self.judges = [self._judge(ids.to(model.device)) for ids in judged]
        self.positions = sum(judge.entropy.numel() for judge in self.judges)

    def blocks(self, places: Sequence[tuple[int, Widths]]) -> Iterable[BlockLoss]:
        """Measure changes of single layers, in the order of the blocks at which they begin."""
        by_start: dict[Part, list[tuple[int, Widths, PrunePlan]]] = {}
        for index, widths in places:
            plan = self.scores.plan(self.identity, {index: widths})
            by_start.setdefault(self._start(plan), []).append((index, widths, plan))
        if not places:
            return
        parts = [part for i in range(len(self.runner.layers)) for part in self.runner.parts(i)]
        last = max(parts.index(part) for part in by_start)
        with frozen_eval(self.model), self.runner.compute_in(self.options.dtype):
            self._begin()
            for part in track(parts[: last + 1], "measuring losses of blocks"):
                for index, widths, plan in by_start.get(part, ()):
                    yield BlockLoss(index, widths, len(self.identity.hidden), self._trial(plan))
                self._advance(part)

    def hidden(self, size: int) -> BlockLoss:
        """Measure the whole model at a smaller hidden size, reconstructed."""
        plan = self.scores.plan(self.identity, {}, size)
        options = ReconstructConfig(ridges=self.options.ridges, dtype=self.options.dtype)
        with restored(self.model):
            if self.options.reconstruct:
                reconstruct_(self.model, plan, self.solved_on, kinds=self.solved_kinds, options=options)
            mask_(self.model, plan)
            with frozen_eval(self.model), self.runner.compute_in(self.options.dtype):
                kl = self._loss([self._run_layers(self.runner.embed(judge.ids)) for judge in self.judges])
        return BlockLoss(None, self.space.dense_widths, size, kl)

    def _judge(self, ids: Tensor) -> _Judge:
        stream = self.runner.embed(ids)
        logits = self._logits(self._run_layers(stream), ids)
        dense = logits.softmax(-1)
        return _Judge(ids, stream, dense, _cross_entropy(logits, dense))

    def _begin(self) -> None:
        """Put all streams before the first layer."""
        length = self.solved_on.ids.shape[1]
        size = micro_batch_for(len(self.solved_on), length)
        parts = chunks_of(self.solved_on.inputs, self.solved_on.real, self.solved_kinds, HELD_BACK, size)
        device = self.model.device
        self.fit = [
            Chunk(ids.to(device), real.to(device), kind, judges, self.runner.embed(ids))
            for ids, real, kind, judges in parts
        ]
        if self.options.reconstruct and not any(chunk.held_back for chunk in self.fit):
            raise DataError(
                "Losses need two sequences of a kind to solve on, in addition to those for judging; give more."
            )
        for judge in self.judges:
            judge.stream = self.runner.embed(judge.ids)

    def _advance(self, part: Part) -> None:
        self.targets.clear()
        layer = self.runner.layers[part.layer]
        for chunk in self.fit if self.options.reconstruct else ():
            chunk.dense = self.runner.run(layer, part, chunk.dense)
        for judge in self.judges:
            judge.stream = self.runner.run(layer, part, judge.stream)

    def _start(self, plan: PrunePlan) -> Part:
        """Return the first part where the changed model's stream differs from the dense one's."""
        steps, lost = steps_of(self.family, plan)
        return lost[0] if lost else next(step.part for step in steps if not step.exact)

    def _trial(self, plan: PrunePlan) -> float:
        """Measure the KL of a plan, from the streams at its first change."""
        steps, lost = steps_of(self.family, plan)
        first = 0 if lost else next(i for i, step in enumerate(steps) if not step.exact)
        side = CopiedLayers(self.runner, plan)
        with side.layer(steps[first].part.layer) as layer:
            if self.options.reconstruct and side.solves(steps[first]):
                self._solve(side, steps[first], lost, layer)
                side.changed.clear()  # the copy of the layer keeps the solved weights
            streams = [side.run(layer, steps[first].part, judge.stream) for judge in self.judges]
        return self._loss([self._run_steps(steps[first + 1 :], stream) for stream in streams])

    def _solve(self, side: CopiedLayers, step: Step, lost: Sequence[Part], layer: nn.Module) -> None:
        """Solve the writers of a step, in the copy of its layer, for the dense stream after the parts they replace."""
        chunks = [replace(chunk) for chunk in self.fit]
        walk = _SolvingWalk(
            self.runner, side, chunks, ridges=self.options.ridges, multiplier=self.multiplier, relative=False
        )
        walk.begin()
        key = (*lost, step.part, *step.absorbs)
        if key not in self.targets:
            walk.advance_dense(lost)
            walk.advance_to_target(step)
            self.targets[key] = [chunk.dense for chunk in chunks]
        for chunk, target in zip(chunks, self.targets[key], strict=True):
            chunk.dense = target
        walk.solve_writers(step, layer)

    def _run_steps(self, steps: Sequence[Step], stream: Tensor) -> Tensor:
        """Run a stream [B, T, H] through these steps of the dense model."""
        for index, group in groupby(steps, key=lambda step: step.part.layer):
            blocks = {block for step in group for block in step.writers}
            part = Part(index, tuple(block for block in self.runner.blocks[index] if block in blocks))
            stream = self.runner.run(self.runner.layers[index], part, stream)
        return stream

    def _run_layers(self, stream: Tensor) -> Tensor:
        """Run a stream [B, T, H] of the embeddings through all layers."""
        for index in range(len(self.runner.layers)):
            stream = self.runner.run(self.runner.layers[index], self.runner.whole_layer(index), stream)
        return stream

    def _loss(self, streams: Sequence[Tensor]) -> float:
        """Mean KL from the dense model of streams [B, T, H] after the last layer, nats a token."""
        divergence = 0.0
        for judge, stream in zip(self.judges, streams, strict=True):
            cross_entropy = _cross_entropy(self._logits(stream, judge.ids), judge.dense)
            divergence += float((cross_entropy - judge.entropy).double().sum())
        return max(0.0, divergence / self.positions)

    def _logits(self, stream: Tensor, ids: Tensor) -> Tensor:
        """Compute the logits at the judged positions, float32 [B, P, V], of a stream [B, T, H] after the layers."""
        at = self.at.to(stream.device)
        with self.runner.continue_from(stream.index_select(1, at)) as model:
            logits = model(input_ids=ids.index_select(1, at), use_cache=False).logits
        return cast(Tensor, logits).float()


def _cross_entropy(logits: Tensor, probabilities: Tensor) -> Tensor:
    """Cross-entropy of logits [B, P, V] against probabilities, float32 [B, P].

    With p the probabilities, -sum p log softmax(z) = logsumexp(z) - p z, which needs no other tensor of that shape.
    """
    return logits.logsumexp(-1) - (probabilities.unsqueeze(-2) @ logits.unsqueeze(-1)).flatten(-3)


class _SolvingWalk(Walk):
    """A walk that ends with one step, so that the cut stream after it is not needed."""

    @override
    def _advance_past(self, writers: Writers) -> Tally:
        return Tally({USED: 0.0}, {USED: 0.0})
