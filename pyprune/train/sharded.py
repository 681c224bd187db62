"""Training that is divided among processes: FSDP2 holds a part of every weight, its gradient and moments in each.

A model with its layers is copied without its weights, and the copy is sharded by ``fully_shard``, layer by layer; each
weight leaves the model as it joins the copy. Every tensor with a hidden axis is divided along that axis. So each group
of DReSS's penalty is in one process, and penalties and proximal maps work on the part as on a whole. The optimizer, the
copies and the kernels see plain tensors: the parts that this process holds.

Gradients add up over the processes (no mean), because losses are weighted by their share of the whole batch's tokens.
Afterwards the weights are whole again in every process. If they are on the host
(:class:`pyprune.runtime.processes.Division`), only the first process gets them, so that no device and no other process
ever holds a whole model. Parameters that an objective trains in addition to the model (the gates of layers) are whole
in every process.

The rows of a batch are divided in the order of the processes. So N processes with one micro batch each do the work of
one process with N micro batches; sums are taken in another order, which changes the last bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pyprune.config.train import TrainConfig, largest_divisor
from pyprune.data.tokens import Batch
from pyprune.errors import ConfigError, TrainingError
from pyprune.families import decoder_layers, named_axes
from pyprune.runtime import processes
from pyprune.runtime.processes import Division, summed_
from pyprune.runtime.shapes import shape_only
from pyprune.train.head import causal_lm
from pyprune.train.objective import LossTerms, ParameterGroup
from pyprune.train.optimizer import norms_of
from pyprune.train.shards import SHARDS, is_blocks, read_parts, write_parts
from pyprune.train.state import Check, TrainState, load_state, save_state

_LOSS = "pyprune_loss"


class Whole:
    """One process trains all of a model.

    Attributes:
        model: the trained model.
        processes: number of processes that train together.
        rank: number of this one.
    """

    processes = 1
    rank = 0

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def groups(self, groups: list[ParameterGroup]) -> list[ParameterGroup]:
        """Return the optimizer's groups: of each parameter the part that this process holds."""
        return groups

    def shares(self, batch: Batch, config: TrainConfig) -> Iterator[tuple[Batch, bool]]:
        """Yield this process's micro batches of a batch, and whether each counts: all processes must run as many."""
        for micro in batch.micro_batches(config.sequences_per_pass):
            yield micro, True

    def loss(self, compute: Callable[[], LossTerms]) -> LossTerms:
        """Run the objective's loss of one micro batch."""
        return compute()

    def take_gradients(self) -> None:
        """Hand the gradients of a complete step to the parts."""

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the l2 norm of all gradients."""
        return nn.utils.get_total_norm(gradients)

    def norms(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the l2 norm of each gradient, float32 [n]."""
        return norms_of(gradients)

    def total(self, values: Sequence[float]) -> list[float]:
        """Add numbers up over the processes."""
        return list(values)

    def size(self, parameters: Iterable[Tensor]) -> int:
        """Return the number of elements of the whole parameters of these parts."""
        return sum(p.numel() for p in parameters)

    def save(self, folder: Path, state: TrainState, name: str | None = None) -> Path:
        """Write a state whose tensors are parts; see :func:`pyprune.train.state.save_state`."""
        return save_state(folder, state, name=name)

    def load(self, path: Path, check: Check | None = None) -> TrainState:
        """Read a state, tensors as this process's parts; ``check`` is called on its plain data before."""
        return load_state(path, check=check)

    def checkpoint_interval(self, config: TrainConfig) -> int | None:
        """Steps between two checkpoints; None = only at the end."""
        return config.checkpoint_interval

    @contextmanager
    def training(self) -> Iterator[None]:
        """Train the model in the block; afterwards its weights are whole, in the processes that get the result."""
        yield


class Sharded(Whole):
    """A part of a model's weights in each process.

    Args:
        model: whole, the same in every process, or by ``how``; its trained parameters have no weights meanwhile.
        how: the device of parts, and the processes that have the weights.

    Raises:
        ConfigError: the installed torch cannot do this.
    """

    def __init__(self, model: nn.Module, how: Division) -> None:
        from torch.distributed.fsdp import FSDPModule

        if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
            raise ConfigError(f"Training in several processes needs torch 2.9 or newer; this is {torch.__version__}.")
        layerdrop = getattr(getattr(model, "config", None), "layerdrop", 0)
        if layerdrop:
            raise ConfigError(
                f"The model's configuration has layerdrop {layerdrop}: each process would leave out other "
                "layers, and they would wait for each other. Set layerdrop to 0 in config.json."
            )
        self.processes = processes.count()
        self.rank = processes.number()
        self.mesh = _mesh(model, how)
        self._originals = dict(model.named_parameters())
        if not how.on_host:
            for parameter in self._originals.values():
                torch.distributed.broadcast(parameter.data, src=0)
        self._kept = {name for name, p in self._originals.items() if how.on_host and not p.requires_grad}
        sent = how.weights == "first"
        super().__init__(_sharded_copy(model, self.mesh, self._placement, kept=self._kept, sent=sent))
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self.divided = {name: cast(Any, p) for name, p in self.model.named_parameters()}
        self.parts = {name: _make_part(p) for name, p in self.divided.items()}
        self._names = {id(part): name for name, part in self.parts.items()}
        self._order: list[str | None] = []
        self._others: list[nn.Parameter] = []

    def _placement(self, model: nn.Module) -> Callable[[nn.Parameter], Any]:
        """Choose the dimension along which each weight is divided: its hidden one, else the first."""
        from torch.distributed.tensor import Shard

        dims = {}
        # With adapters no method looks at channels, and the names are not the model's own.
        for param in named_axes(model) if isinstance(model, PreTrainedModel) else ():
            dim = param.axis_dim("hidden")
            if dim is not None and param.parameter.shape[dim] % self.processes == 0:
                dims[id(param.parameter)] = dim
        return lambda parameter: Shard(dims.get(id(parameter), 0))

    def groups(self, groups: list[ParameterGroup]) -> list[ParameterGroup]:
        """Return the groups with parts of the model's parameters; others are whole in every process."""
        made = [replace(g, parameters={n: part_of(p) for n, p in g.parameters.items()}) for g in groups]
        trained = [p for group in made for p in group.parameters.values()]
        self._order = [self._names.get(id(p)) for p in trained]
        self._others = [p for p in trained if id(p) not in self._names]
        return made

    def shares(self, batch: Batch, config: TrainConfig) -> Iterator[tuple[Batch, bool]]:
        """Yield the rows of this process. If it has fewer than another, it runs a row again, which does not count."""
        rows = -(-len(batch) // self.processes)
        training = len(batch) == config.batch_size
        size = largest_divisor(rows, config.micro_batch_size) if training else min(rows, config.micro_batch_size)
        mine = batch[self.rank * rows : (self.rank + 1) * rows]
        micros = list(mine.micro_batches(size)) if len(mine) else []
        yield from ((micro, True) for micro in micros)
        for _ in range(-(-rows // size) - len(micros)):
            yield batch[:1], False

    def loss(self, compute: Callable[[], LossTerms]) -> LossTerms:
        """Run the loss as FSDP's forward pass of the whole model: an objective may call single parts of it."""
        losses: list[LossTerms] = []

        def tensors() -> tuple[Tensor, ...]:
            terms = compute()
            losses.append(terms)
            parts = (terms.lm, terms.penalty, terms.total, *terms.parts.values())
            return tuple(t for t in parts if t is not None)

        run_within(self.model, tensors)
        if not torch.is_grad_enabled():
            cast(Any, self.model).reshard()  # otherwise the backward pass does
        return losses[0]

    def take_gradients(self) -> None:
        """Hand FSDP's sums of gradients to the parts, and sum those of parameters outside the model."""
        for other in self._others:
            if other.grad is not None:
                summed_(other.grad)
        for name, parameter in self.divided.items():
            if parameter.grad is not None:
                self.parts[name].grad = parameter.grad.to_local()
                parameter.grad = None

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the l2 norm of all gradients over all processes."""
        return summed_(self._squares(gradients).sum()).sqrt()

    def norms(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the l2 norm of each gradient over all processes, float32 [n]."""
        return summed_(self._squares(gradients)).sqrt()

    def _squares(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return this process's share of each gradient's squared norm, also if every process has it whole."""
        squares = super().norms(gradients).square()
        whole = {id(p.grad) for p in self._others}
        for place, gradient in enumerate(gradients):
            if id(gradient) in whole:
                squares[place] /= self.processes
        return squares

    def total(self, values: Sequence[float]) -> list[float]:
        """Add numbers up over the processes."""
        return cast(
            list[float], summed_(torch.tensor(values, dtype=torch.float64)).tolist()
        )  # on the CPU, through gloo

    def size(self, parameters: Iterable[Tensor]) -> int:
        """Return the number of elements of the whole parameters of these parts."""
        return sum((self.divided[self._names[id(p)]] if id(p) in self._names else p).numel() for p in parameters)

    def save(self, folder: Path, state: TrainState, name: str | None = None) -> Path:
        """Write the parts of every process, through torch.distributed.checkpoint; all wait until it has its name."""
        tensors = {
            f"{group}/{key}": tensor if (of := self._name_of(group, key)) is None else self._dtensor(of, tensor)
            for group, entries in state.tensors.items()
            for key, tensor in entries.items()
        }

        def write(part: Path | None, _: object = None) -> None:
            write_parts(cast(Path, processes.from_first(part)) / SHARDS, tensors)

        written: Path | None = None
        if processes.first():
            written = save_state(folder, replace(state, tensors={}), name=name, write_tensors=write)
        else:
            write(None)
        return cast(Path, processes.from_first(written))

    def _name_of(self, group: str, key: str) -> str | None:
        """Return the name of the parameter that an entry of a state belongs to; None for others."""
        if group == "optimizer":
            position, _, kind = key.partition(".")
            return None if kind == "step" or is_blocks(f"{group}/{key}") else self._order[int(position)]
        return key if group in ("weights", "best") and key in self.divided else None

    def _dtensor(self, name: str, part: Tensor) -> Any:
        from torch.distributed.tensor import DTensor

        like = self.divided[name]
        # from_local would move tensors on the host (copies) to the mesh's device.
        mesh = self.mesh if part.device.type == self.mesh.device_type else self._mesh_of_hosts
        return DTensor.from_local(
            part.detach(), mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    @cached_property
    def _mesh_of_hosts(self) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh("cpu", (self.processes,))

    def load(self, path: Path, check: Check | None = None) -> TrainState:
        """Read a state that any number of processes wrote."""
        return load_state(path, lambda folder: read_parts(folder, self._empty, self._part_of_whole), check)

    def _empty(self, group: str, key: str, size: torch.Size, dtype: torch.dtype) -> Any:
        """Make the tensor to read an entry into: for the part of a parameter in this process, or for a whole entry."""
        name = self._name_of(group, key)
        if name is None:
            return torch.empty(size, dtype=dtype)
        return self._dtensor(name, torch.empty_like(self.parts[name], dtype=dtype, device="cpu"))

    def _part_of_whole(self, group: str, key: str, tensor: Tensor) -> Tensor:
        """Return the part of a whole tensor that this process holds."""
        name = self._name_of(group, key)
        if name is None:
            return tensor
        dim = self.divided[name].placements[0].dim
        pieces = tensor.chunk(self.processes, dim)
        return (pieces[self.rank] if self.rank < len(pieces) else tensor.narrow(dim, 0, 0)).contiguous()

    def checkpoint_interval(self, config: TrainConfig) -> int | None:
        """Return the configured interval, or a tenth of the steps, as nothing can be saved when a process is lost."""
        return config.checkpoint_interval or max(1, config.steps // 10)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Train in the block; a TrainingError, which all processes see, restores the weights. Others end the run."""
        try:
            yield
        except TrainingError:
            self._restore()
            raise
        self._restore()

    @torch.no_grad()
    def _restore(self) -> None:
        """Gather the weights, one at a time, into the model, and free their parts."""
        keeps = processes.gets_result()
        for name, original in self._originals.items():
            if name not in self._kept:
                whole = self.divided[name].detach().full_tensor()  # of all processes together
                original.data = whole.to(original.device) if keeps else shape_only(original, whole.shape)
            self.parts[name].data.untyped_storage().resize_(0)


def check_shares(batch_size: int, name: str = "batch_size") -> None:
    """Check that every process of this run gets as many rows of a batch.

    Args:
        batch_size: of a training.
        name: of the option, for the message.

    Raises:
        ConfigError: the batch cannot be divided evenly.
    """
    number = processes.count()
    if batch_size % number:
        raise ConfigError(f"{name} is {batch_size}, which {number} processes cannot share; use a multiple of {number}.")


def make_shards(model: nn.Module, config: TrainConfig) -> Whole:
    """Divide a model as a training that starts now needs it.

    Raises:
        ConfigError: its batch cannot be divided among the processes that share it.
    """
    how = processes.division()
    if how is None:
        return Whole(model)
    check_shares(config.batch_size)
    return Sharded(model, how)


def model_to_read(model: PreTrainedModel) -> PreTrainedModel:
    """Return the module to run when a training only reads a model: a sharded copy if weights are on the host.

    Every process loads such a model from files. A model that is read layer by layer as it runs is not sharded.

    The model keeps its own weights. Run the copy through :func:`run_within`; from the first call on, its embeddings,
    last norm and head are whole in every process.
    """
    how = processes.division()
    if how is None or not how.on_host or any(p.is_meta for p in model.parameters()):
        return model
    names = {name for name, _ in model.named_parameters()}
    copied = cast(PreTrainedModel, _sharded_copy(model, _mesh(model, how), lambda _: None, kept=names))
    return copied.requires_grad_(False)  # or autocast would keep a copy of every weight in the pass


def release(model: nn.Module) -> None:
    """Break the cycle in a sharded copy (the method of :func:`run_within`), so that it is freed once unused."""
    model.__dict__.pop(_LOSS, None)


def run_within(model: nn.Module, function: Callable[[], Any]) -> Any:
    """Call a function that runs parts of a sharded model, as FSDP's forward pass of the whole; else just call it."""
    return getattr(model, _LOSS)(function) if hasattr(model, _LOSS) else function()


def part_of(parameter: nn.Parameter) -> nn.Parameter:
    """Return the part of a parameter that this process holds: itself, unless its training is divided."""
    return cast(nn.Parameter, getattr(parameter, "pyprune_part", parameter))


def is_divided(model: nn.Module) -> bool:
    """Check whether the weights of a model are divided among processes."""
    return any(hasattr(p, "device_mesh") for p in model.parameters())


def channels_of(parameter: nn.Parameter, dim: int, channels: Sequence[int]) -> list[int]:
    """Return the given channels of a parameter as positions in this process's part; those of others are left out.

    Raises:
        ConfigError: the parameter is divided along another dimension, because this one is not a multiple of the
            number of processes.
    """
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return list(channels)
    if cast(Any, parameter).placements[0].dim != dim or parameter.shape[dim] % mesh.size():
        raise ConfigError(
            f"The penalty's {parameter.shape[dim]} channels cannot be divided among {mesh.size()} processes; use a "
            "number of processes that divides them."
        )
    size = parameter.shape[dim] // mesh.size()
    start = mesh.get_local_rank() * size
    return [channel - start for channel in channels if start <= channel < start + size]


def _mesh(model: nn.Module, how: Division) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    device = how.device or next(model.parameters()).device
    return init_device_mesh(device.type, (processes.count(),))


def _sharded_copy(
    model: nn.Module, mesh: Any, placement: Callable[[nn.Module], Any], *, kept: set[str], sent: bool = False
) -> nn.Module:
    """Copy the modules; the copy takes over the weights, a layer at a time. Kept ones also stay in the model.

    Args:
        model: whole; if weights are ``sent``, in the first process.
        mesh: the processes.
        placement: (the copy) -> the dimension along which each of its weights is divided.
        kept: names of the weights that the model keeps.
        sent: the first process sends a layer's weights before they are divided; the others have their shapes.
    """
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    kept_ids = {id(p) for name, p in model.named_parameters() if name in kept}
    copied = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    place = placement(copied)
    base = causal_lm(copied)
    layers = [] if base is None else list(decoder_layers(base))
    for module in (*layers, copied):
        held = [(p, p.data) for p in module.parameters() if not hasattr(p, "device_mesh")]
        for parameter, whole in held if sent else ():
            parameter.data = _from_first(whole, mesh)
        fully_shard(module, mesh=mesh, shard_placement_fn=place)  # moves them to the mesh's device
        for parameter, whole in held:
            parameter.data = whole if id(parameter) in kept_ids else whole.new_empty(0)
    setattr(copied, _LOSS, MethodType(_call, copied))
    register_fsdp_forward_method(copied, _LOSS)
    return copied


def _from_first(whole: Tensor, mesh: Any) -> Tensor:
    """Return a tensor of the first process, on this one's device."""
    place = mesh.device_type
    if processes.first():
        here = whole.contiguous().to(place)
    else:
        here = torch.empty(whole.shape, dtype=whole.dtype, device=place)
    torch.distributed.broadcast(here, src=0)
    return here


def _call(model: nn.Module, function: Callable[[], Any]) -> Any:
    return function()


def _make_part(parameter: Any) -> nn.Parameter:
    """Make a plain parameter over the memory of the part, and attach it to the divided one."""
    part = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
    parameter.pyprune_part = part
    return part
