"""The two forms of a cut model that a reconstruction solves: cut copies of dense layers, or an already cut model."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from pyprune.cut.compact import TensorCut, cut_buffer, tensor_cut
from pyprune.cut.mask import gauge_weight
from pyprune.cut.projections import ExpertProjection, Gain, Projection
from pyprune.cut.steps import Step
from pyprune.cut.target import choose_target
from pyprune.errors import PlanError, UnsupportedModelError
from pyprune.families import decoder_layers
from pyprune.families.base import Block, Row, is_mixture, kept_positions
from pyprune.families.scale import stream_scale, width_factor
from pyprune.modeling.shapes import uninitialised_model
from pyprune.plan import LayerPlan, PrunePlan
from pyprune.probe.streams import LayerRunner, Part


@dataclass(eq=False)
class Chunk:
    """A few sequences of one kind and their two streams.

    Attributes:
        ids: int64 [B, T], fed to both models.
        real: bool [B, T]; positions that hold a token and no padding.
        kind: of text.
        held_back: whether it only judges solutions.
        dense: the dense stream [B, T, H].
        cut: the cut stream [B, T, H']; None while it is the dense one.
    """

    ids: Tensor
    real: Tensor
    kind: str
    held_back: bool
    dense: Tensor
    cut: Tensor | None = None

    def __post_init__(self) -> None:
        self._padded = not bool(self.real.all())

    def tokens(self, x: Tensor) -> Tensor:
        """The rows of x [B, T, channels] or [B * T, channels] that are no padding; a view where none is."""
        flat = x.reshape(-1, x.shape[-1])
        return flat[self.real.flatten()] if self._padded else flat

    def places(self, rows: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return those of some positions that are no padding, as rows of :meth:`tokens`, and their rows of x."""
        if not self._padded:
            return rows, x
        real = self.real.flatten()
        kept = real[rows]
        return (real.cumsum(0) - 1)[rows[kept]], x[kept]

    @property
    def nbytes(self) -> int:
        """Bytes of its streams."""
        return self.dense.nbytes + (0 if self.cut is None else self.cut.nbytes)


class CutSide(ABC):
    """A cut model next to the dense one, one layer at a time, with its widths after the cut.

    Args:
        runner: of the layers that are solved; its family is also the dense model's.
        plan: the parts to keep.
        config: of the dense model.

    Attributes:
        walks_everything: whether the cut stream starts at the embeddings, even where it is still the dense one.
        copied_bytes: most bytes of copied weights held at a time.
    """

    walks_everything = False
    copied_bytes = 0

    def __init__(self, runner: LayerRunner, plan: PrunePlan, config: PretrainedConfig) -> None:
        self.runner = runner
        self.family = runner.family
        self.plan = plan
        self.plans = {layer.index: layer for layer in plan.layers}
        self.position = {layer.index: i for i, layer in enumerate(plan.layers)}
        self.kept = torch.tensor(plan.hidden, device=runner.device) if plan.removed_hidden else None
        self.gauge = bool(plan.removed_hidden) and self.family.gauges(config)
        self.scale = stream_scale(self.family, plan, tied=bool(config.tie_word_embeddings))
        self.changed: list[str] = []

    @abstractmethod
    def begin(self, chunk: Chunk) -> Tensor:
        """The cut stream [B, T, H'] at the first step that is walked."""

    @abstractmethod
    def layer(self, index: int) -> AbstractContextManager[nn.Module]:
        """Give one kept layer, by its dense index; its solved parameters are kept when the block ends."""

    def run(self, module: nn.Module, part: Part, stream: Tensor) -> Tensor:
        """Return the cut stream [B, T, H'] after a part of the dense model, whose layer ``module`` stands for."""
        return self.runner.run(module, part, stream)

    def target(self, dense: Tensor) -> Tensor:
        """Return the target of the cut stream: the dense one's kept channels at its scale, float32 [B, T, H']."""
        if self.kept is None:
            return dense.float()
        target = dense.float().index_select(-1, self.kept)
        if self.gauge:
            target = target - target.mean(-1, keepdim=True)
        return target * self.scale

    def projection(self, row: Row, layer: nn.Module, layer_plan: LayerPlan) -> Projection:
        """Return the linear module whose weight ``row`` describes, with the dense outputs that it keeps."""
        name = self._name(row)
        kept = kept_positions(row, layer_plan, self.plan)[0] if row.role == "reader" else None
        module = cast(nn.Linear, layer.get_submodule(name))
        dense_rows = None if kept is None else torch.tensor(kept, device=module.weight.device)
        return Projection(name, module, dense_rows=dense_rows, scale=width_factor(row, layer_plan, self.plan))

    def remember(self, solved: Sequence[Projection | Gain]) -> None:
        """Remember the parameters that were changed in the layer at work, to keep them when its block ends."""
        names = dict.fromkeys(name for module in solved for name in module.parameters)  # experts share one
        self.changed += [name for name in names if name not in self.changed]

    def _name(self, row: Row) -> str:
        return row.pattern.removeprefix(f"{self.family.layers_path}.{{i}}.").removesuffix(".weight")

    def _rows(self, role: str, block: Block, layer: LayerPlan) -> list[Row]:
        rows = (row for row in self.family.rows if row.role == role and row.block == block and not row.is_bias)
        return [row for row in rows if row.kind in (None, layer.kind)]

    def solves(self, step: Step) -> bool:
        """Return whether the writers of a step can be solved: not those of experts that write next to another block."""
        rows = (row for b in step.writers for row in self._rows("writer", b, self.plans[step.part.layer]))
        return len(step.writers) == 1 or all(len(row.axes) == 2 for row in rows)

    def is_mixture(self, step: Step) -> bool:
        """Return whether a step has experts."""
        return is_mixture(self.plans[step.part.layer].kind) and "mlp" in step.writers

    def writers(self, step: Step, layer: nn.Module) -> list[Projection]:
        """The modules of a step that write to the stream, and the experts in one; not those behind a gate.

        Raises:
            UnsupportedModelError: the experts show no tokens that each of them reads.
        """
        plan = self.plans[step.part.layer]
        rows = [row for b in step.writers for row in self._rows("writer", b, plan)]
        experts = [row for row in rows if len(row.axes) == 3]
        if not experts:
            return [self.projection(row, layer, plan) for row in rows]
        name = self._name(experts[0]).rpartition(".")[0]
        module: Any = layer.get_submodule(name)
        if not hasattr(module, "_apply_gate"):
            raise UnsupportedModelError(f"{type(module).__name__} shows no tokens that each of its experts reads.")
        gates = [row for row in self._rows("reader", step.writers[0], plan) if row.axes == ("inner", "hidden")]
        beside = [self.projection(row, layer, plan) for row in rows if row not in experts and not gates]
        return [*(ExpertProjection(name, module, i) for i in range(len(module.down_proj))), *beside]

    def readers(self, step: Step, layer: nn.Module) -> dict[Block, list[Projection]]:
        """The linear modules of a step that read the stream, by block; without blocks that have none."""
        plan = self.plans[step.part.layer]
        modules = dict(layer.named_modules())
        readers = {
            block: [
                row for row in self._rows("reader", block, plan) if isinstance(modules.get(self._name(row)), nn.Linear)
            ]
            for block in step.writers
        }
        return {block: [self.projection(row, layer, plan) for row in rows] for block, rows in readers.items() if rows}

    def gain(self, step: Step, layer: nn.Module) -> Gain | None:
        """Return the gain of the norm after the writer, or None if it writes to the stream itself."""
        rows = [row for block in step.writers for row in self._rows("post_norm", block, self.plans[step.part.layer])]
        if not rows:
            return None
        name = self._name(rows[0])
        return Gain(name, layer.get_submodule(name), self.family.offset(rows[0]))


class CopiedLayers(CutSide):
    """A dense model as its own cut: one layer at a time is copied, cut and solved, and written to the dense model.

    Args:
        dense: the dense model's layers; the model itself is changed.
        plan: the parts to keep.
    """

    def __init__(self, dense: LayerRunner, plan: PrunePlan) -> None:
        config = dense.model.config
        super().__init__(dense, plan, config)
        self._tied = bool(config.tie_word_embeddings)
        with torch.device("meta"):
            target = choose_target(self.family, config, plan).config
            empty = uninitialised_model(target, dense.model.dtype, attn_implementation=config._attn_implementation)
        self._empty = decoder_layers(empty.eval())

    def begin(self, chunk: Chunk) -> Tensor:
        """The kept part of the dense stream: embeddings are cut like everything that writes."""
        return self.target(chunk.dense).to(chunk.dense.dtype)

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """Give a cut copy of a dense layer; its solved parameters are written to the dense one when the block ends."""
        layer = self._empty[self.position[index]]
        with self.runner.layer(index) as dense:
            cuts = self._cuts(index, dense)
            copied = {name: cut.of(self._to_gauge(index, name, dense)) for name, cut in cuts.items()}
            buffers = dict(dense.named_buffers())
        names = [name for name, _ in layer.named_buffers() if name in buffers]  # stored or computed
        place = f"{self.family.layers_path}.{index}"
        buffers = {name: cut_buffer(f"{place}.{name}", buffers[name], self.family, self.plan) for name in names}
        lacking = layer.load_state_dict(copied, strict=False, assign=True).missing_keys
        # Stock architectures have biases that the dense model lacks.
        for name, values in (dict.fromkeys(lacking) | buffers).items():
            owner, _, part = name.rpartition(".")
            setattr(layer.get_submodule(owner), part, values)
        self.copied_bytes = max(self.copied_bytes, sum(p.nbytes for p in layer.parameters()))
        yield layer
        if self.changed:
            with self.runner.layer(index) as dense:
                for name in self.changed:
                    _put(layer.get_parameter(name), dense.get_parameter(name), cuts[name])
                self.runner.keep(index, self.changed)
        self.changed.clear()
        layer.to("meta")

    def _cuts(self, index: int, layer: nn.Module) -> dict[str, TensorCut]:
        place = f"{self.family.layers_path}.{index}"
        named = {
            name: tensor_cut(f"{place}.{name}", self.family, self.plan, tied=self._tied)
            for name, _ in layer.named_parameters()
        }
        return {name: cut for name, cut in named.items() if cut is not None}

    def _to_gauge(self, index: int, name: str, layer: nn.Module) -> Tensor:
        weight = layer.get_parameter(name).detach()
        row, _ = self.family.match(f"{self.family.layers_path}.{index}.{name}", self.plan.dense.layers)
        return gauge_weight(weight, row, self.plan.hidden) if self.gauge else weight


def _put(values: Tensor, dense: Tensor, cut: TensorCut) -> None:
    """Write a cut tensor to its places in the dense one."""
    kept = (cut.experts, cut.rows, cut.columns) if dense.dim() == 3 else (cut.rows, cut.columns)[: dense.dim()]
    places = [slice(None) if i is None else i.to(dense.device) for i in kept]
    if sum(i is not None for i in kept) > 1:  # those of every dimension, each along an axis of its own
        all_of = (torch.arange(size, device=dense.device) for size in dense.shape)
        pairs = enumerate(zip(places, all_of, strict=True))
        places = [
            (one if isinstance(place, slice) else place).view([-1, *[1] * (dense.dim() - 1 - dim)])
            for dim, (place, one) in pairs
        ]
    if cut.factor != 1.0:
        values = ((values.double() + cut.offset) / cut.factor - cut.offset).to(dense.dtype)
    dense.data[tuple(places)] = values


def _same_weights(own: Mapping[str, Tensor], dense: Mapping[str, Tensor]) -> bool:
    """Check whether weights are the dense ones, rounded as stored or not; biases that it lacks must be zero."""
    if not dense.keys() <= own.keys():
        return False
    for name, weight in own.items():
        expected = dense.get(name, torch.zeros_like(weight)).to(weight.device)
        stored = (expected.to(dtype).to(weight.dtype) for dtype in (expected.dtype, torch.bfloat16, torch.float16))
        if weight.shape != expected.shape or not any(torch.equal(weight, other) for other in stored):
            return False
    return True


class CompactedLayers(CutSide):
    """An already cut model, which is solved as a whole.

    Args:
        pruned: its layers; the model itself is changed.
        plan: the one that it was cut with.
        config: of the dense model.

    Raises:
        PlanError: the model does not have the plan's sizes.
    """

    walks_everything = True

    def __init__(self, pruned: LayerRunner, plan: PrunePlan, config: PretrainedConfig) -> None:
        super().__init__(pruned, plan, config)
        embedding = cast(nn.Embedding, pruned.model.get_input_embeddings())
        sizes = len(pruned.layers), embedding.weight.shape[1]
        if sizes != (len(plan.layers), len(plan.hidden)):
            raise PlanError(
                f"The pruned model has {sizes[0]} layers of hidden size {sizes[1]}, and the plan leaves "
                f"{len(plan.layers)} of {len(plan.hidden)}. Give the plan that it was cut with."
            )

    def limit_exact(self, steps: Sequence[Step], dense: LayerRunner) -> list[Step]:
        """Return the steps, exact only up to the first with other weights than the dense model's (from a training)."""
        limited, exact = [], True
        for step in steps:
            exact = exact and step.exact and self._is_dense(step, dense)
            limited.append(replace(step, exact=exact))
        return limited

    def _is_dense(self, step: Step, dense: LayerRunner) -> bool:
        """Check whether the blocks of a step have the dense model's weights."""
        index = step.part.layer
        place = f"{self.family.layers_path}.{index}"

        def step_weights(layer: nn.Module) -> dict[str, Tensor]:
            named = dict(layer.named_parameters())
            # Matched by the weight of the same module: a bias that the cut added is in no table of the dense model.
            weights = {name: re.sub(r"\.bias$", ".weight", name) for name in named}
            blocks = {name: self.family.match(f"{place}.{weights[name]}")[0].block for name in named}
            return {name: weight for name, weight in named.items() if blocks[name] in step.part.blocks}

        with dense.layer(index) as whole:
            return _same_weights(step_weights(self.runner.layers[self.position[index]]), step_weights(whole))

    def begin(self, chunk: Chunk) -> Tensor:
        """The pruned model's own embeddings."""
        return self.runner.embed(chunk.ids.to(self.runner.model.device))

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """Give the pruned model's layer; its runner is handed the solved parameters when the block ends."""
        position = self.position[index]
        with self.runner.layer(position) as layer:
            yield layer
            self.runner.keep(position, self.changed)
        self.changed.clear()

    def run(self, module: nn.Module, part: Part, stream: Tensor) -> Tensor:
        """Return the pruned stream [B, T, H'] after a part; the layer has another index than in the dense model."""
        return super().run(module, replace(part, layer=self.position[part.layer]), stream)
