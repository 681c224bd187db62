"""A dense checkpoint on disk whose tensors are read one at a time, and its model without parameters."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from pyprune.checkpoint.configuration import read_dense_config
from pyprune.checkpoint.shards import Entry, Place, TensorFiles, check_finite, map_tensor, read_header
from pyprune.errors import CheckpointError, OutputError
from pyprune.families import Family, NamedParam, family_for, parameter_shapes
from pyprune.runtime.disk import disk_errors, reason

COMPUTED = "rotary_emb.inv_freq"
"""End of names in old files of values that the model computes."""


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
        self.config, self._shapes = read_dense_config(self.folder)
        self.family = family_for(self.config)
        self._where = self._parameter_names()
        self._check_shapes()

    def model(self) -> PreTrainedModel:
        """Build the dense model in eval mode, its parameters without memory (on the meta device), its buffers computed.

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
        return model

    def check(self, model: PreTrainedModel) -> None:
        """Check every tensor once, so that damage is found before hours of work, as in a loaded model.

        Args:
            model: of :meth:`model`.

        Raises:
            CheckpointError: tensors are missing, foreign, not finite, or beyond the range of ``dtype``.
        """
        shapes = parameter_shapes(model)
        foreign = sorted(self._where.keys() - shapes.keys())
        if foreign:
            raise CheckpointError(
                f"{self.folder} holds {foreign[0]}, for which the model of its config.json has no place. The "
                "checkpoint is damaged or its config.json was changed."
            )
        for name in shapes:
            if self.dtype == torch.float16:
                self.read(name)
            else:
                self.map_tensor(name)

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
        if name not in self._where:
            shape = self._shapes.get(name)
            raise CheckpointError(
                f"{name} of {self.folder} is missing; by config.json its shape is {shape}. The checkpoint is "
                "incomplete or its config.json was changed; fetch it again."
            )
        tensor = self.files.read(self._where[name])
        if name not in self._finite:  # some are read in every pass
            check_finite(name, tensor, self.folder)
            self._finite.add(name)
        return tensor

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
        return list(dict.fromkeys((*self._where, *self._replaced)))

    def entry(self, name: str) -> Entry:
        """Return shape and stored dtype of a parameter, by its name."""
        if name in self._replaced:
            return self._replaced[name].entry
        stored = self._where[name]
        return Entry(name, self.files.dtype(stored), self.files.shape(stored))

    def _parameter_names(self) -> dict[str, str]:
        """Return parameter name -> name in the files."""
        names: dict[str, str] = {}
        for name in self.files.names():
            if name.endswith(COMPUTED):
                continue
            dense = _parameter_name(self.family, name) or name
            if self.family.match(dense)[0].role == "head" and self.config.tie_word_embeddings:
                continue
            if dense in names:
                raise CheckpointError(
                    f"{self.folder} holds {dense} twice, as {names[dense]} and as {name}; it is unclear which one "
                    "is valid. Fetch or write the checkpoint again."
                )
            names[dense] = name
        return names

    def _check_shapes(self) -> None:
        """Compare shapes with the dense model's: a cut would take a part of a larger tensor as the whole."""
        for dense, name in self._where.items():
            shape = self.files.shape(name)
            expected = self._shapes.get(dense, shape)  # a foreign tensor is refused where the output is planned
            if shape != expected:
                raise CheckpointError(
                    f"{name} of {self.folder} has the shape {shape}, but by its config.json it is {expected}. The "
                    "checkpoint is damaged or its config.json was changed."
                )


def unknown_name(folder: Path, family: Family) -> str | None:
    """Return the first name in the safetensors of a folder that no row of its family describes; None if there is none.

    Raises:
        CheckpointError: the files are damaged.
    """
    names = (name for name in TensorFiles(folder).names() if not name.endswith(COMPUTED))
    return next((name for name in names if _parameter_name(family, name) is None), None)


def _parameter_name(family: Family, name: str) -> str | None:
    """Return the model's name of a tensor: some checkpoints hold the decoder without the causal LM around it."""
    name = family.parameter_name(name)
    return next((n for n in (name, f"model.{name}") if any(row.regex.match(n) for row in family.rows)), None)


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
