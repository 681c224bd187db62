"""Predict the memory of a training at its peak, before anything is loaded or computed.

Weights, gradients, moments and copies are counted. Activations are measured: forward and backward of the objective run
on tensors that have a shape and a dtype but no memory (torch's FakeTensorMode). Every storage is added up, operation by
operation, for as long as it would be alive. So autocast's copies of weights, gradient checkpointing, the chunks of the
losses, a teacher, and every family are included, because their own code runs. Attention is taken for a fused kernel,
which holds queries, keys, values, its output and one sum a row. The scratch memory of kernels and the interpreter are
not included.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations import moe
from typing_extensions import override

from pyprune.config.train import TrainConfig
from pyprune.data.tokens import Batch
from pyprune.families import decoder_layers
from pyprune.ops import plain_torch
from pyprune.ops.regularised_adamw import Moments
from pyprune.runtime import processes
from pyprune.runtime.products import products_in, products_in_float32
from pyprune.train.head import causal_lm
from pyprune.train.lean import autocast, decide_dtype, decide_memory, place_of_copies, steps_in_backward
from pyprune.train.objective import Objective
from pyprune.train.optimizer import uses_own_optimizer

FUSED = ("sdpa", "flash_attention_2")
ATTENTION = "pyprune_fused_shapes"
"""Transformers' names of fused attention, and the name of the one here that has shapes only."""


PARTS = ("weights", "gradients", "moments", "copies", "gathered", "activations", "teacher")
"""The terms of the peak on the device."""


@dataclass(frozen=True)
class TrainingMemory:
    """The memory of one training at its peak, bytes.

    Attributes:
        memory: full or lean.
        in_backward: whether each weight is stepped inside backward, so that gradients are held one at a time.
        weights: of the model, trained or not.
        gradients: of all trained weights; 0 in backward.
        moments: of the optimizer.
        copies: of trained weights on the device (the last good and the best ones).
        gathered: the weights that FSDP gathers if several processes share them: embeddings and head, a layer and the
            next one, the whole gradients of the first two, and a buffer. 0 in one process.
        activations: most that forward and backward hold in addition (with the current gradient), weights of a teacher
            aside.
        teacher: weights of the dense model that is learnt from, and those gathered of them; or those read at a time, if
            they stay in files. 0 without distillation.
        on_host: copies in the CPU's memory, for a model on a GPU.
        sequences: in one forward pass.
        length: tokens in a sequence.
        checkpointing: whether activations are computed again in the backward pass.
    """

    memory: Literal["full", "lean"]
    in_backward: bool
    weights: int
    gradients: int
    moments: int
    copies: int
    gathered: int
    activations: int
    teacher: int
    on_host: int
    sequences: int
    length: int
    checkpointing: bool

    @property
    def total(self) -> int:
        """The peak on the device."""
        return sum(getattr(self, part) for part in PARTS)


def training_memory(
    model: nn.Module,
    config: TrainConfig,
    objective: Objective,
    length: int,
    *,
    device: torch.device,
    teacher: nn.Module | None = None,
    teacher_in: Literal["device", "shares", "files"] = "device",
    shares: int | None = None,
) -> TrainingMemory:
    """Predict the peak memory of a training, in each process. Models are on the meta device, and useless afterwards.

    Args:
        model: a causal LM, with the dtypes that it will have; adapters on it, if any.
        config: the loop's options; ``memory`` auto is decided by the model's dtype.
        objective: of the run; its ``setup`` and ``teardown`` are called.
        length: tokens in a sequence, all of them predicted.
        device: where the real model will be.
        teacher: that the objective runs, for its weights.
        teacher_in: place of those: the device, shared among the processes, or files, from which one layer at a time is
            read to the device.
        shares: processes that share the weights and the batch; None = those of this run.
    """
    shares = shares or processes.count()
    asked = config.dtype if device.type == "cpu" else "bfloat16"  # models of shapes are on a CPU for any device
    config = decide_dtype(decide_memory(config, model), model, device)
    config = replace(config, batch_size=max(1, config.batch_size // shares))
    with FakeTensorMode(allow_non_fake_inputs=True), plain_torch(), _modules_of_shapes(model, teacher):
        for part in (model, teacher):
            _give_shapes(part)
        if shares == 1 and teacher_in == "shares":
            teacher_in = "device"
        if teacher is not None and teacher_in != "device":
            teacher.requires_grad_(False)  # as in such a copy: autocast keeps no copies of its weights
        taught = _teacher_bytes(teacher, teacher_in, shares)
        with products_in(asked):
            return _measure(model, config, objective, length, device, taught, shares)


def _measure(
    model: nn.Module,
    config: TrainConfig,
    objective: Objective,
    length: int,
    device: torch.device,
    teacher: int,
    shares: int,
) -> TrainingMemory:
    model.train()
    if config.gradient_checkpointing:
        cast(Any, model).gradient_checkpointing_enable({"use_reentrant": False})
    objective.setup(model, config)
    try:
        groups = objective.parameter_groups(model, config)
        trained = _unique(p for group in groups for p in group.parameters.values())
        if uses_own_optimizer(config, device):
            objective.optimizer_penalties(model, config)
        in_backward = shares == 1 and steps_in_backward(config, objective)
        peak = _peak(model, config, objective, length, trained if in_backward else [])
    finally:
        objective.teardown(model)
    gradients = 0 if in_backward else _bytes(trained)
    place = place_of_copies(config, device)
    copies = 0 if place is None else (2 if config.early_stop_patience is not None else 1) * _bytes(trained)
    on_device = place == device
    return TrainingMemory(
        memory=cast(Literal["full", "lean"], config.memory),
        in_backward=in_backward,
        weights=_bytes(_unique(model.parameters())) // shares + _bytes(_unique(model.buffers())),
        gradients=gradients // shares,
        moments=sum(_moments(p, config) for p in trained) // shares,
        copies=copies // shares if on_device else 0,
        gathered=_gathered_bytes(model, trained) if shares > 1 else 0,
        activations=max(0, peak - gradients),
        teacher=teacher,
        on_host=0 if on_device else copies // shares,
        sequences=config.sequences_per_pass,
        length=length,
        checkpointing=config.gradient_checkpointing,
    )


def _teacher_bytes(teacher: nn.Module | None, place: str, shares: int) -> int:
    """Return the bytes of a model that is only read: all of it, one of its layers, or a share and the gathered ones."""
    if teacher is None:
        return 0
    weights = _bytes(_unique(teacher.parameters()))
    rest, largest = _gathered_parts(teacher)
    if place == "files":
        vectors = (p for p in _unique(teacher.parameters()) if p.ndim == 1)
        return _bytes(_unique([*rest, *largest, *vectors]))
    if place == "device":
        return weights
    return weights // shares + _bytes(rest) + 2 * _bytes(largest)


def _gathered_bytes(model: nn.Module, trained: list[Tensor]) -> int:
    """Return the bytes that a process gathers whole: weights, gradients, and a buffer to reduce them."""
    rest, largest = _gathered_parts(model)
    trainable = {id(p) for p in trained}
    gradients = _bytes(p for p in (*rest, *largest) if id(p) in trainable)
    return _bytes(rest) + 2 * _bytes(largest) + gradients + max(_bytes(rest), _bytes(largest))


def _gathered_parts(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weights that FSDP gathers at once: those outside of the layers, and those of the largest layer."""
    base = causal_lm(model)
    layers = [_unique(layer.parameters()) for layer in decoder_layers(base)] if base is not None else []
    in_layers = {id(p) for layer in layers for p in layer}
    rest = [p for p in _unique(model.parameters()) if id(p) not in in_layers]
    return rest, max(layers, key=_bytes, default=[])


def _give_shapes(model: nn.Module | None) -> None:
    """Replace tensors of the meta device by those of FakeTensorMode, which is on, on the CPU; tied ones stay tied."""
    made: dict[int, Tensor] = {}
    for module in model.modules() if model is not None else ():
        for tensors in cast(tuple[dict[str, Tensor | None], ...], (module._parameters, module._buffers)):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = made.setdefault(id(tensor), _shape_of(tensor))


def _shape_of(tensor: Tensor) -> Tensor:
    shape = torch.empty(tensor.shape, dtype=tensor.dtype)
    return nn.Parameter(shape, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else shape


def _peak(model: nn.Module, config: TrainConfig, objective: Objective, length: int, freed: list[Tensor]) -> int:
    """Return the most bytes that forward and backward hold in addition to the weights, of one or two passes."""
    ids = torch.zeros(config.sequences_per_pass, length, dtype=torch.int64)
    live = _LiveBytes()
    handles = [cast(nn.Parameter, p).register_post_accumulate_grad_hook(_drop) for p in freed]
    try:
        with live, products_in_float32(model):  # in this order: converted weights are counted
            objective.before_step(model, 1)
            for _ in range(min(2, config.passes)):
                with autocast(config, "cpu"):
                    terms = objective.micro_loss(model, Batch.of(ids))
                loss = terms.main_loss if terms.penalty is None else terms.main_loss + terms.penalty
                del terms
                loss.backward()
                del loss
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
    return live.peak


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


class _LiveBytes(TorchDispatchMode):
    """Adds up the storages that operations make, for as long as they live.

    Attributes:
        peak: the most that were alive at once, bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._now = 0
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._answers: list[Tensor] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            # There are no values: results of "all" are taken for true (every token counts), all others for false (no
            # layer is dropped at random).
            return int(any(args[0].untyped_storage()._cdata == t.untyped_storage()._cdata for t in self._answers))
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.all:
            self._answers.append(result)
        # A storage that an operation reads, and that is not counted, was made before the block.
        read = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in read:
                self._hold(tensor.untyped_storage())
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def forget(_: object) -> None:
            del self._alive[key]
            self._now -= size

        self._alive[key] = weakref.ref(storage, forget)
        self._now += size
        self.peak = max(self.peak, self._now)


class _FusedAttention(torch.autograd.Function):
    """The tensors that a fused attention kernel holds and makes."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, length, _ = query.shape
        out = query.new_empty(batch, length, heads, value.shape[3]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, out, query.new_empty(batch, heads, length, dtype=torch.float32))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (x.to(dtype) for x in (query, key, value))
    out = cast(Tensor, cast(Any, _FusedAttention).apply(query, key, value))
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _attention)


def _product_of_shapes(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Give all rows to the first expert: how many each one gets is a value, and these tensors have none."""
    return input.to(weight.dtype) @ weight[0]


@contextmanager
def _modules_of_shapes(*models: nn.Module | None) -> Iterator[None]:
    """Replace torch's fused attention and products of experts by those above in the block; eager attention is kept."""
    bases = [cast(Any, m).get_base_model() if hasattr(m, "get_base_model") else m for m in models]
    own = [base for base in bases if isinstance(base, PreTrainedModel)]
    before: list[tuple[Callable[[str], None], str]] = []
    products = moe._grouped_mm
    try:
        moe._grouped_mm = _product_of_shapes
        for base in own:
            if base.config._attn_implementation in FUSED:
                before.append((base.set_attn_implementation, base.config._attn_implementation))
                base.set_attn_implementation(ATTENTION)
            if base._can_set_experts_implementation():
                before.append((base.set_experts_implementation, base.config._experts_implementation))
                base.set_experts_implementation("grouped_mm")
        yield
    finally:
        moe._grouped_mm = products
        for restore, name in before:
            restore(name)


def _moments(parameter: Tensor, config: TrainConfig) -> int:
    """Return the bytes of the optimizer's state of one weight."""
    if config.optimizer == "sgd":
        return 0
    if config.memory != "lean":
        return 2 * parameter.numel() * max(4, parameter.element_size())
    layout = Moments.layout(parameter, quantised=True).values()
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in layout)


def _unique(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(t): t for t in tensors}.values())


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
