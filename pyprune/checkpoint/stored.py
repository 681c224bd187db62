"""A dense checkpoint on disk whose tensors are read one at a time, and its model without parameters."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from pyprune.checkpoint.configuration import read_dense_files
from pyprune.checkpoint.places import StoredTensor
from pyprune.checkpoint.shards import Entry, Place, TensorFiles, check_finite, map_tensor, read_header
from pyprune.errors import CheckpointError, OutputError
from pyprune.families import NamedParam, family_for, parameter_shapes
from pyprune.runtime.disk import disk_errors, reason


class StoredModel:
    """A dense checkpoint folder with safetensors: its headers, its configuration, and its tensors one at a time.

    Args:
        folder: a dense checkpoint of a known family, in one file or in shards.
        dtype: of the tensors that :meth:`read` returns; None = the stored one of each.
        device: where they are put.
        scratch: a folder for tensors that replace those of the checkpoint (:meth:`replace`) and for additional ones
            (:meth:`zeros`); made when needed.

    Attributes:
        folder: the checkpoint.
        dtype: see above.
        device: see above.
        files: its tensors.
        places: where the tensors of the model are in the files.
        buffers: names of tensors that the files hold besides the parameters.
        config: its configuration; a head that is stored with other values than the embedding is not tied.
        family: of the model.

    Raises:
        CheckpointError: no safetensors, damaged files, or tensors of other shapes than config.json asks for.
        UnsupportedModelError: unknown model type, variant or parameter.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        scratch: Path | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.dtype = dtype
        self.device = torch.device(device)
        self._scratch = scratch
        self._replaced: dict[str, Place] = {}
        self._finite: set[str] = set()
        self._in_range: set[str] = set()
        self._transform: Callable[[NamedParam], None] | None = None
        self.files = TensorFiles(self.folder)
        dense = read_dense_files(self.folder)
        self.config, self.places = dense.config, dense.places
        self._shapes, self.buffers = dense.shapes, list(dense.buffers)
        self.family = family_for(self.config)
        known = {*self._shapes, *self.buffers}
        position = {name: number for number, name in enumerate(self.files.names())}
        places = sorted(self.places.tensors.items(), key=lambda item: position[item[1].names(0)[0]])
        self._where = {name: place for name, place in places if name in known}
        self._check_shapes({**self._shapes, **{name: tuple(b.shape) for name, b in dense.buffers.items()}})

    def model(self) -> PreTrainedModel:
        """Build the dense model in eval mode, its parameters without memory (on the meta device), its buffers with it.

        It includes parameters that :meth:`replace` has added.
        """
        config = copy.deepcopy(self.config)
        if self.dtype is not None:
            config.dtype = self.dtype
        model = build_without_parameters(config)
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        for name in self._replaced.keys() - names:
            owner, _, last = name.rpartition(".")
            shape = self._replaced[name].entry.shape
            added = nn.Parameter(torch.empty(shape, dtype=model.dtype, device="meta"), requires_grad=False)
            model.get_submodule(owner).register_parameter(last, added)
        for name in self.buffers:
            model.get_buffer(name).copy_(self.map_tensor(name))
        return model

    def check(self, model: PreTrainedModel) -> None:
        """Check every tensor once, so that damage is found before hours of work, as in a loaded model.

        Args:
            model: of :meth:`model`.

        Raises:
            CheckpointError: tensors are missing, foreign, not finite, or beyond the range of ``dtype``.
        """
        self.refuse_foreign()
        for name in parameter_shapes(model):
            if self.dtype == torch.float16:
                self.read(name)
            else:
                self._check_finite(name)

    def refuse_foreign(self) -> None:
        """Refuse files with tensors that have no place in the model."""
        if self.places.unknown:
            raise CheckpointError(
                f"{self.folder} holds {self.places.unknown[0]}, for which the model of its config.json has no "
                "place. The checkpoint is damaged or its config.json was changed."
            )

    def replace(self, name: str, values: Tensor) -> None:
        """Use these values of a parameter instead of the checkpoint's from now on, or add a parameter.

        Raises:
            OutputError: they cannot be written.
            RuntimeError: ``scratch`` was not given.
        """
        if self._scratch is None:
            raise RuntimeError("There is no folder for tensors that were changed; give scratch.")
        path = self._scratch / f"{name}.safetensors"
        part = path.with_suffix(".part")  # tensors that were mapped from the old file keep their values
        with disk_errors(self._scratch):
            self._scratch.mkdir(exist_ok=True)
            save_file({name: values.detach().cpu().contiguous()}, part)
            part.replace(path)
        (self._replaced[name],) = read_header(path)
        self._in_range.discard(name)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return zeros on the CPU, mapped from a file: the system keeps as much in memory as fits.

        Backed by a file next to the replaced tensors, else in TMPDIR; deleted with the tensor.

        Args:
            shape: of the tensor, at least one number.
            dtype: of the tensor.

        Raises:
            OutputError: the disk has no room for them.
        """
        folder, count = self._scratch or Path(tempfile.gettempdir()), prod(shape)
        size = count * dtype.itemsize
        try:
            folder.mkdir(exist_ok=True)
            descriptor, path = tempfile.mkstemp(prefix="pyprune-", dir=folder)
            try:
                if hasattr(os, "posix_fallocate"):  # Linux
                    # A full disk is an error here, and would be a signal where the tensor is written to.
                    os.posix_fallocate(descriptor, 0, size)
                return torch.from_file(path, shared=True, size=count, dtype=dtype).view(*shape)
            finally:
                os.close(descriptor)
                os.unlink(path)  # the mapping keeps the file
        except OSError as error:
            other = "" if self._scratch else " TMPDIR names another folder for temporary files."
            raise OutputError(
                f"A tensor of {size / 1e6:,.1f} MB, one of many, is held in a file in {folder}, which failed: "
                f"{reason(error, folder)}.{other}"
            ) from error

    @property
    def replaced_names(self) -> list[str]:
        """Return the names of the parameters that :meth:`replace` was called for."""
        return list(self._replaced)

    def map_tensor(self, name: str) -> Tensor:
        """Map a tensor from its file, by its parameter name, in its stored dtype.

        Raises:
            CheckpointError: it is missing, or its values are not finite.
        """
        if name in self._replaced:
            return map_tensor(self._replaced[name])
        return self._stored(name).read(self.read_file)

    def map_part(self, name: str, index: int) -> Tensor:
        """Return a part of a tensor, such as one expert [1, ...]; see :meth:`map_tensor`.

        Args:
            name: of the parameter.
            index: of the part, below the number of :meth:`place`.
        """
        if name in self._replaced:
            return self.map_tensor(name)[index : index + 1]
        return self._stored(name).part(index, self.read_file)

    def place(self, name: str) -> StoredTensor:
        """Return where a parameter is in the files, or would be under its own name."""
        return self.places.of(name)

    def read_file(self, name: str) -> Tensor:
        """Map a tensor from its file, by its name there; its values are checked once."""
        tensor = self.files.read(name)
        if name not in self._finite:  # some are read in every pass
            check_finite(name, tensor, self.folder)
            self._finite.add(name)
        return tensor

    def _stored(self, name: str) -> StoredTensor:
        if name not in self._where:
            shape = self._shapes.get(name)
            raise CheckpointError(
                f"{name} of {self.folder} is missing; by config.json its shape is {shape}. The checkpoint is "
                "incomplete or its config.json was changed; fetch it again."
            )
        return self._where[name]

    def _check_finite(self, name: str) -> None:
        if name not in self._replaced:
            place = self._stored(name)
            for stored in (stored for part in range(place.parts) for stored in place.names(part)):
                self.read_file(stored)

    def read(self, name: str) -> Tensor:
        """Read a tensor by its parameter name, in ``dtype`` on ``device``.

        Raises:
            CheckpointError: as :meth:`map_tensor`, or values beyond the range of ``dtype``.
        """
        tensor = self.map_tensor(name)
        moved = tensor.to(self.device)  # in the stored dtype, because a GPU converts faster
        # A copy, because changes in place would reach the mapped tensor.
        values = moved.to(self.dtype or tensor.dtype, copy=moved is tensor)
        if values.dtype != tensor.dtype and name not in self._in_range:
            check_finite(name, values, self.folder)  # beyond the range of float16
            self._in_range.add(name)
        if self._transform is not None:
            row, layer = self.family.match(name)
            self._transform(NamedParam(name, nn.Parameter(values, requires_grad=False), row, layer))
        return values

    @contextmanager
    def transform_reads(self, transform: Callable[[NamedParam], None]) -> Iterator[None]:
        """Change every tensor that :meth:`read` returns in place, by ``transform(parameter)``, until the block ends."""
        self._transform = transform
        try:
            yield
        finally:
            self._transform = None

    @property
    def names(self) -> list[str]:
        """Return the names of the parameters that Transformers loads, in the order of the files."""
        buffers = {*self.buffers}
        return [name for name in dict.fromkeys((*self._where, *self._replaced)) if name not in buffers]

    def entry(self, name: str) -> Entry:
        """Return shape and stored dtype of a parameter, by its name."""
        if name in self._replaced:
            return self._replaced[name].entry
        place = self._where[name]
        return Entry(name, cast(torch.dtype, place.dtype), self._found_shape(place))

    def _found_shape(self, place: StoredTensor) -> tuple[int, ...]:
        """Return the shape of a parameter by the shapes in the files, of which those of experts are alike."""
        first = place.part(0, lambda name: torch.empty(self.files.shape(name), device="meta"))
        return (place.parts, *first.shape[1:]) if place.is_merged else tuple(first.shape)

    def _check_shapes(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Compare shapes with the dense model's: a cut would take a part of a larger tensor as the whole."""
        for name, place in self._where.items():
            unlike = [n for part in range(1, place.parts) for n in self._unlike_first(place, part)]
            stored = (unlike or place.names(0))[0]
            try:
                shape = self.files.shape(stored) if unlike else self._found_shape(place)
            except RuntimeError:  # parts that cannot be joined
                shape, unlike = self.files.shape(stored), [stored]
            if unlike or shape != expected[name]:
                raise CheckpointError(
                    f"{stored} of {self.folder} has the shape {shape}, but by its config.json {name} is "
                    f"{expected[name]}. The checkpoint is damaged or its config.json was changed."
                )

    def _unlike_first(self, place: StoredTensor, part: int) -> list[str]:
        """Return the tensors of one expert that have other shapes than those of the first one."""
        pairs = zip(place.names(part), place.names(0), strict=True)
        return [name for name, first in pairs if self.files.shape(name) != self.files.shape(first)]


def build_without_parameters(config: PretrainedConfig) -> PreTrainedModel:
    """Build a model in eval mode whose parameters have no memory (on the meta device); its buffers are computed."""
    with no_init_weights(), _parameters_on_meta():
        model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config))
    model.tie_weights()
    model.eval()
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Free the memory of every parameter as soon as a module has made it: one of them exists at a time."""
    register = nn.Module.register_parameter

    def drop_memory(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:  # a shared parameter stays one object
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = drop_memory  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
