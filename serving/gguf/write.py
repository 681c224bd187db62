"""Write a checkpoint as a GGUF file, one tensor in memory at a time."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pyprune.errors import CheckpointError, ConfigError, MissingDependencyError, OutputError, did_you_mean
from pyprune.serving.gguf.layout import Array, Model, Planned, open_model, planned_tensors

FORMATS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1")
"""Formats of matrices that the package gguf writes; vectors are float32 in all of them."""
FINE = "q8_0"
"""Format of the head where the other matrices have fewer bits: every logit is made of it."""
FALLBACK = "f16"
"""Format of matrices whose rows are no whole number of blocks."""
F16_MAX = 65504.0
OWN_KEY = "pyprune.version"
"""Marks a file as pyprune's own; ``--overwrite`` replaces no other."""


@dataclass(frozen=True)
class GgufReport:
    """What was written.

    Attributes:
        path: the file.
        architecture: llama.cpp's name, ``general.architecture``.
        quantise: format of the matrices.
        parameters: elements of all tensors.
        bytes: size of the file in bytes.
        notes: what differs from the checkpoint or from the format asked for, one sentence each.
    """

    path: Path
    architecture: str
    quantise: str
    parameters: int
    bytes: int
    notes: tuple[str, ...]


def export_gguf(source: str | Path, out: str | Path, *, quantise: str = "f16", overwrite: bool = False) -> GgufReport:
    """Write a checkpoint as a GGUF file that llama.cpp runs: weights, tokenizer, chat template, plan.

    Tensors are read, converted and written one at a time. The file appears whole or not at all.

    Args:
        source: a checkpoint folder or a hub id, dense or pruned.
        out: the file to create.
        quantise: one of :data:`FORMATS`, for matrices; vectors stay float32. Of formats with fewer than eight bits the
            head (or the embedding it is tied to) gets q8_0, and matrices whose rows are no multiple of 32 get f16.
        overwrite: replace a GGUF file that pyprune wrote.

    Raises:
        ConfigError: an unknown format.
        CheckpointError: the source cannot be read, its tokenizer cannot be converted, or its values do not fit float16.
        UnsupportedModelError: llama.cpp has no architecture for the model; the message says why.
        OutputError: ``out`` exists, or cannot be written.
        MissingDependencyError: the package gguf is not installed.
    """
    from pyprune.runtime.disk import disk_errors, sync
    from pyprune.runtime.files import claimed, whole_folder
    from pyprune.serving.checkpoints import read_checkpoint

    if quantise not in FORMATS:
        raise ConfigError(did_you_mean(quantise, FORMATS, "GGUF format"))
    check_gguf_installed()
    target = Path(out).absolute()
    check_gguf_output(target, source, overwrite=overwrite)
    model = open_model(read_checkpoint(source).folder)
    name = Path(os.path.normpath(source)).name

    def place(part: Path) -> None:
        check_gguf_output(target, source, overwrite=overwrite)  # minutes may have passed
        os.replace(part / target.name, target)
        sync(target.parent)

    with claimed(target) as work, disk_errors(target), whole_folder(work / "part", place) as part:
        parameters, notes = _write(model, part / target.name, quantise, name)
    return GgufReport(
        target, model.form.architecture, quantise, parameters, target.stat().st_size, tuple(dict.fromkeys(notes))
    )


def check_gguf_installed() -> None:
    """Raise :class:`MissingDependencyError` without the package that writes GGUF files."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("gguf", "gguf", "Writing GGUF files") from error


def check_gguf_output(out: Path, source: str | Path, *, overwrite: bool) -> None:
    """Refuse a path at which no GGUF file may be written.

    Args:
        out: the file.
        source: what is read; a pyprune checkpoint takes no further file.
        overwrite: whether a GGUF file of pyprune's may be replaced.

    Raises:
        OutputError: the message says why not.
    """
    from pyprune.checkpoint.record import has_record
    from pyprune.runtime.disk import in_place
    from pyprune.runtime.files import check_file

    check_file(out)
    if out.is_symlink() or (out.exists() and in_place(out)):
        raise OutputError(f"{out} is a symbolic link or no regular file; name a file to create.")
    if has_record(source) and Path(source).resolve() in out.resolve().parents:
        raise OutputError(
            f"{out} is inside the checkpoint that is read, whose record does not name it. Write it elsewhere."
        )
    if not out.exists():
        return
    if not overwrite:
        raise OutputError(f"{out} exists already. Choose another file or give --overwrite.")
    with out.open("rb") as stream:
        beginning = stream.read(4096)
    if not beginning.startswith(b"GGUF") or OWN_KEY.encode() not in beginning:
        raise OutputError(f"{out} is not a GGUF file that pyprune wrote; it is not replaced, even with --overwrite.")


def _write(model: Model, path: Path, quantise: str, name: str) -> tuple[int, list[str]]:
    """Write the file; (elements, notes)."""
    import gguf

    from pyprune.checkpoint.gguf import read_gguf_header
    from pyprune.checkpoint.tokenizer import load_tokenizer
    from pyprune.serving.gguf.metadata import add_metadata, rope_factors
    from pyprune.serving.gguf.tokenizer import add_tokenizer

    writer = gguf.GGUFWriter(path, model.form.architecture)
    writer.add_string(OWN_KEY, _version())
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(_file_type(quantise))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_plan(writer, model.tensors.folder)
    notes = add_metadata(writer, model)
    notes += add_tokenizer(writer, load_tokenizer(str(model.tensors.folder)), model.config.vocab_size)
    factors = [Planned(name, values.shape, partial(np.asarray, values)) for name, values in rope_factors(model)]
    planned = [*factors, *planned_tensors(model)]
    formats = [_format(tensor, quantise, model.head) for tensor in planned]
    for tensor, kind in zip(planned, formats, strict=True):
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), _nbytes(tensor.shape, kind), raw_dtype=_type(kind)
        )
    notes += _format_notes(planned, formats, quantise, model.head)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    try:
        for values in _converted(planned, formats):
            writer.write_tensor_data(values)
    finally:
        writer.close()
    return read_gguf_header(path).elements, notes


def _version() -> str:
    from pyprune import __version__

    return __version__


def _add_plan(writer: Any, folder: Path) -> None:
    from pyprune.checkpoint.record import has_record, read_pruning_json

    plan = read_pruning_json(folder).plan if has_record(folder) else None
    if plan is not None:
        writer.add_string("pyprune.plan", json.dumps(plan.to_dict()))


def _type(kind: str) -> Any:
    import gguf

    return gguf.GGMLQuantizationType[kind.upper()]


def _file_type(quantise: str) -> int:
    import gguf

    name = "ALL_F32" if quantise == "f32" else f"MOSTLY_{quantise.upper()}"
    return int(gguf.LlamaFileType[name])


def _blocks(kind: str) -> tuple[int, int]:
    """(elements, bytes) of a block."""
    import gguf

    elements, nbytes = gguf.GGML_QUANT_SIZES[_type(kind)]
    return int(elements), int(nbytes)


def _nbytes(shape: tuple[int, ...], kind: str) -> int:
    elements, nbytes = _blocks(kind)
    return math.prod(shape) // elements * nbytes


def _format(tensor: Planned, quantise: str, head: str) -> str:
    if len(tensor.shape) == 1:
        return "f32"
    kind = FINE if tensor.name == head and quantise.startswith(("q4", "q5")) else quantise
    return FALLBACK if tensor.shape[-1] % _blocks(kind)[0] else kind


def _format_notes(planned: list[Planned], formats: list[str], quantise: str, head: str) -> Iterator[str]:
    matrices = {t.name: kind for t, kind in zip(planned, formats, strict=True) if len(t.shape) > 1}
    coarse = [name for name, kind in matrices.items() if kind == FALLBACK and quantise != FALLBACK]
    if coarse:
        yield (
            f"{len(coarse)} of {len(matrices)} matrices are {FALLBACK}, because their rows are no multiple of "
            f"{_blocks(quantise)[0]} ({coarse[0]} and others)."
        )
    if matrices[head] == FINE != quantise:
        yield f"{head} makes the logits and is {FINE}."


def _converted(planned: list[Planned], formats: list[str]) -> Iterator[Array]:
    from gguf.quants import quantize

    for tensor, kind in zip(planned, formats, strict=True):
        values = np.ascontiguousarray(tensor.make())
        if kind not in ("f32", "bf16") and values.size and float(np.abs(values).max()) > F16_MAX:
            raise CheckpointError(
                f"{tensor.name} holds values beyond {F16_MAX:g}, the range of float16, which {kind} uses. "
                "Write the file as bf16 or f32."
            )
        yield quantize(values, _type(kind))
