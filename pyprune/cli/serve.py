"""Export and serve a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyprune.cli.base import given_names, guard
from pyprune.cli.sizes import warn_of_slow_checkpoint
from pyprune.errors import ConfigError, did_you_mean, shown
from pyprune.runtime.progress import warn

FILE_FORMATS = ("safetensors", "gguf")


@guard
def export(
    model: str,
    *,
    out: Path,
    file_format: str = "safetensors",
    quantise: str | None = None,
    target: str = "auto",
    dtype: str | None = None,
    gguf_file: str | None = None,
    overwrite: bool = False,
    debug: bool = False,
) -> None:
    """Write MODEL as a safetensors checkpoint for vLLM and Transformers, or as a GGUF file; its plan is written too.

    Example: pyprune export pruned/ --format gguf --quantise q8_0 --out pruned.gguf

    Args:
        model (MODEL): Checkpoint folder or hub id (owner/name).
        out (PATH): Folder to create; with --format gguf, the file.
        file_format: safetensors (folder for vLLM and Transformers) or gguf (file for llama.cpp).
        quantise: Format of matrices. gguf: f32, f16 (default), bf16, q8_0, q6_k, q5_k, q5_1, q5_0, q4_k, q4_1 or q4_0.
            safetensors, for vLLM: w8a8-int8, w8a16, fp8 or w4a16. Default: as --dtype.
        target: auto (as stored: a stock architecture if the sizes allow one), stock (refuse other sizes), or pruned
            (pyprune's own, with sizes per layer).
        dtype: float32, bfloat16 or float16: dtype of the written weights. Default: MODEL's own.
    """
    if file_format not in FILE_FORMATS:
        raise ConfigError(did_you_mean(file_format, FILE_FORMATS, "file format"))
    if file_format == "gguf":
        _refuse_quantise(quantise, file_format)
        _refuse_with_gguf(target, dtype, gguf_file)
        _export_gguf(model, out, quantise or "f16", overwrite=overwrite)
        return
    _refuse_quantise(quantise, file_format)
    from pyprune.serving.export import export as write

    options: dict[str, Any] = {"target": target, "dtype": dtype, "gguf_file": gguf_file, "overwrite": overwrite}
    report = write(model, out, quantise=quantise, **options)
    size = f"{report.parameters:,} parameters, {report.bytes:,} bytes"
    needs = "stock, loads without pyprune" if report.stock else "loads with pyprune installed"
    print(f"Wrote {report.path}: {report.architecture} ({needs}), {size}.")
    if report.weights:
        print(f"Weights: {report.weights}.")
    for reason in report.reasons:
        print(f"Not a stock architecture: {reason}")
    for warning in report.warnings:
        warn(warning)
    warn_of_slow_checkpoint(out, quantise)


def _refuse_quantise(quantise: str | None, file_format: str) -> None:
    """Refuse a format of matrices that the file format does not have."""
    from pyprune.serving.gguf.blocks import FORMATS
    from pyprune.serving.quantise import SCHEMES

    names = {"gguf": list(FORMATS), "safetensors": list(SCHEMES)}
    (other,) = (kind for kind in names if kind != file_format)
    if quantise is None or quantise in names[file_format]:
        return
    if quantise in names[other]:
        raise ConfigError(
            f"--quantise {quantise} belongs to --format {other}; with --format {file_format} it is one of "
            f"{', '.join(names[file_format])}."
        )
    kind = {"gguf": "GGUF format", "safetensors": "quantisation"}[file_format]
    raise ConfigError(did_you_mean(quantise, names[file_format], kind))


def _refuse_with_gguf(target: str, dtype: str | None, gguf_file: str | None) -> None:
    options = {"--target": target != "auto", "--dtype": dtype is not None, "--gguf-file": gguf_file is not None}
    if wrong := given_names(options):
        raise ConfigError(
            f"{', '.join(wrong)} cannot be combined with --format gguf: the sizes decide on llama.cpp's architecture, "
            "--quantise sets the format of the weights, and the source is a safetensors checkpoint."
        )


def _export_gguf(model: str, out: Path, quantise: str, *, overwrite: bool) -> None:
    from pyprune.serving.gguf.write import export_gguf

    report = export_gguf(model, out, quantise=quantise, overwrite=overwrite)
    size = f"{report.parameters:,} parameters, {report.bytes:,} bytes"
    print(f"Wrote {report.path}: llama.cpp architecture {report.architecture}, {report.quantise}, {size}.")
    for note in report.notes:
        print(f"Note: {note}")
    if Path(model).is_dir():
        warn_of_slow_checkpoint(Path(model), quantise)


@guard
def serve(
    folder: str,
    vllm_args: list[str] | None = None,
    *,
    no_verify: bool = False,
    debug: bool = False,
) -> None:
    """Check a checkpoint and serve it with vLLM's OpenAI-compatible server: `vllm serve DIR`, with any of its options.

    Example: pyprune serve pruned/ --port 9000 --max-model-len 2048

    Args:
        folder (DIR): Checkpoint folder.
        vllm_args ([VLLM OPTIONS]): Options of `vllm serve`, passed on unchanged; after a --, also those that pyprune
            has: -- --help.
        no_verify: Do not verify the checksums of the files first (PYPRUNE_VERIFY=0).
    """
    from pyprune.serving.vllm.command import serve as start

    if folder.startswith("-"):
        raise ConfigError(
            f"{shown(folder)} stands where the checkpoint folder belongs. Name the folder first, then vLLM's "
            "options: pyprune serve DIR --port 9000"
        )
    start(folder, vllm_args or (), verify=not no_verify)
