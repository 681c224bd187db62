"""Write a checkpoint as a GGUF file, one tensor in memory at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pyprune.errors import CheckpointError, ConfigError, MissingDependencyError, OutputError, did_you_mean
from pyprune.runtime.progress import track
from pyprune.runtime.version import VERSION
from pyprune.serving.gguf.blocks import (
    BLOCKS,
    FALLBACK,
    FINE,
    FORMATS,
    NARROW,
    Array,
    check_quantizer,
    ggml_type,
    kind_of,
    nbytes,
    quantise_values,
)
from pyprune.serving.gguf.layout import Model, Planned, open_model, planned_tensors

F16_MAX = 65504.0
OWN_KEY = "pyprune.version"
"""Marks a file as pyprune's own; ``--overwrite`` replaces no other."""


@dataclass(frozen=True)
class GgufReport:
    """The file that was written.

    Attributes:
        path: the file.
        architecture: llama.cpp's name, ``general.architecture``.
        quantise: format of the matrices.
        parameters: elements of all tensors.
        bytes: size of the file in bytes.
        notes: differences from the checkpoint or from the format that was asked for, one sentence each.
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
        quantise: one of :data:`pyprune.serving.gguf.blocks.FORMATS`, for matrices; vectors stay float32, and the head
            and matrices whose rows are no whole blocks get others (:func:`pyprune.serving.gguf.blocks.kind_of`).
        overwrite: replace a GGUF file that pyprune wrote.

    Raises:
        ConfigError: an unknown format.
        CheckpointError: the source cannot be read, its tokenizer cannot be converted, or its values do not fit float16.
        UnsupportedModelError: llama.cpp has no architecture for the model; the message says why.
        OutputError: ``out`` exists, or cannot be written.
        MissingDependencyError: the package gguf is not installed, or for a K-quant xllamacpp is not.
    """
    from pyprune.runtime.disk import disk_errors, sync
    from pyprune.runtime.files import claim_work_folder, whole_folder
    from pyprune.serving.checkpoints import read_checkpoint

    check_gguf_format(quantise)
    target = Path(out).absolute()
    check_gguf_output(target, source, overwrite=overwrite)
    model = open_model(read_checkpoint(source).folder)
    name = Path(os.path.normpath(source)).name

    def place(part: Path) -> None:
        check_gguf_output(target, source, overwrite=overwrite)  # minutes may have passed
        os.replace(part / target.name, target)
        sync(target.parent)

    with claim_work_folder(target) as work, disk_errors(target), whole_folder(work / "part", place) as part:
        parameters, notes = _write(model, part / target.name, quantise, name)
    return GgufReport(
        target, model.form.architecture, quantise, parameters, target.stat().st_size, tuple(dict.fromkeys(notes))
    )


def check_gguf_format(quantise: str) -> None:
    """Refuse a format of GGUF files that cannot be written, before anything is read.

    Raises:
        ConfigError: an unknown format.
        ConfigError, MissingDependencyError: see :func:`pyprune.serving.gguf.blocks.check_quantizer`.
        MissingDependencyError: the package gguf is not installed.
    """
    if quantise not in FORMATS:
        raise ConfigError(did_you_mean(quantise, FORMATS, "GGUF format"))
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("gguf", "gguf", "Writing GGUF files") from error
    check_quantizer(quantise)


def check_gguf_output(out: Path, source: str | Path, *, overwrite: bool) -> None:
    """Refuse a path at which no GGUF file may be written.

    Args:
        out: the file.
        source: the source; a pyprune checkpoint takes no further file.
        overwrite: whether a GGUF file of pyprune's may be replaced.

    Raises:
        OutputError: the message has the reason.
    """
    from pyprune.checkpoint.record import has_record
    from pyprune.runtime.disk import is_written_in_place
    from pyprune.runtime.files import check_file

    check_file(out)
    if out.is_symlink() or (out.exists() and is_written_in_place(out)):
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


def _ends(folder: Path) -> list[int]:
    """Return the ids that end an answer, from generation_config.json of a checkpoint."""
    from pyprune.checkpoint.configuration import read_generation_config

    ends = getattr(read_generation_config(folder), "eos_token_id", None)
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def _write(model: Model, path: Path, quantise: str, name: str) -> tuple[int, list[str]]:
    """Write the file; return (elements, notes)."""
    import gguf

    from pyprune.checkpoint.gguf import read_gguf_header
    from pyprune.checkpoint.plausible import read_config
    from pyprune.checkpoint.tokenizer import load_tokenizer
    from pyprune.checkpoint.tower import has_tower
    from pyprune.serving.checkpoints import FORMAT_KEY
    from pyprune.serving.gguf.metadata import add_metadata, rope_factors
    from pyprune.serving.gguf.tokenizer import add_tokenizer

    writer = gguf.GGUFWriter(path, model.form.architecture)
    writer.add_string(OWN_KEY, VERSION)
    writer.add_string(FORMAT_KEY, quantise)
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(_file_type(quantise))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_plan(writer, model.folder)
    notes = add_metadata(writer, model)
    if has_tower(read_config(model.folder)):
        notes.append("The file holds the text tower alone, which answers about text.")
    tokenizer = load_tokenizer(str(model.folder))
    notes += add_tokenizer(writer, tokenizer, model.config.vocab_size, _ends(model.folder))
    factors = [Planned(name, values.shape, partial(np.asarray, values)) for name, values in rope_factors(model)]
    planned = [*factors, *planned_tensors(model)]
    formats = [kind_of(t.shape, quantise, head=t.name == model.head) if t.is_matrix else "f32" for t in planned]
    for tensor, kind in zip(planned, formats, strict=True):
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), nbytes(tensor.shape, kind), raw_dtype=ggml_type(kind)
        )
    notes += _format_notes(planned, formats, quantise, model.head)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    try:
        for values in track(convert_tensors(planned, formats), "writing tensors", total=len(planned)):
            writer.write_tensor_data(values)
    finally:
        writer.close()
    return read_gguf_header(path).elements, notes


def _add_plan(writer: Any, folder: Path) -> None:
    from pyprune.checkpoint.record import read_record

    record = read_record(folder)
    if record is not None and record.plan is not None:
        writer.add_string("pyprune.plan", json.dumps(record.plan.to_dict()))


def _file_type(quantise: str) -> int:
    """Return llama.cpp's type of a file of this format; for K-quants the mixture that is nearly all of one."""
    import gguf

    name = {"f32": "ALL_F32", "q4_k": "MOSTLY_Q4_K_S", "q5_k": "MOSTLY_Q5_K_S"}.get(quantise)
    return int(gguf.LlamaFileType[name or f"MOSTLY_{quantise.upper()}"])


def _format_notes(planned: list[Planned], formats: list[str], quantise: str, head: str) -> Iterator[str]:
    matrices = {t.name: kind for t, kind in zip(planned, formats, strict=True) if t.is_matrix}
    fine = FINE.get(quantise, quantise)
    for kind, multiple in ((NARROW.get(quantise), BLOCKS[quantise][0]), (FALLBACK, 32)):
        others = [name for name, used in matrices.items() if used == kind != quantise and name != head]
        if others:
            yield (
                f"{len(others)} of {len(matrices)} matrices are {kind}, because their rows are no multiple of "
                f"{multiple} ({others[0]} and others)."
            )
    if matrices[head] == fine != quantise:
        yield f"{head} makes the logits and is {fine}."
    elif matrices[head] not in (fine, quantise):
        yield f"{head} makes the logits and is {matrices[head]}: its rows are no multiple of {BLOCKS[fine][0]}."


def convert_tensors(planned: list[Planned], formats: list[str]) -> Iterator[Array]:
    """Make each tensor and convert it to its format, one after the other."""
    for tensor, kind in zip(planned, formats, strict=True):
        values = np.ascontiguousarray(tensor.make())
        if kind not in ("f32", "bf16") and values.size and float(np.abs(values).max()) > F16_MAX:
            raise CheckpointError(
                f"{tensor.name} holds values beyond {F16_MAX:g}, the range of float16, which {kind} uses. "
                "Write the file as bf16 or f32."
            )
        yield quantise_values(values, kind)
