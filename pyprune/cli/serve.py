"""export, serve and bench."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from pyprune.cli.base import Annotate, Debug, GgufFile, JsonFile, Overwrite, add_to_record, guarded, output
from pyprune.cli.evaluate import loaded_perplexity
from pyprune.errors import ConfigError, did_you_mean, shown
from pyprune.runtime.progress import warn

FILE_FORMATS = ("safetensors", "gguf")


@guarded
def export(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint folder or hub id (owner/name).")],
    out: Annotated[Path, typer.Option(metavar="PATH", help="Folder to create; with --format gguf, the file.")],
    file_format: Annotated[
        str,
        typer.Option("--format", help="safetensors (folder for vLLM and Transformers) or gguf (file for llama.cpp)."),
    ] = "safetensors",
    quantise: Annotated[
        str | None,
        typer.Option(
            help="Format of matrices. gguf: f32, f16 (default), bf16, q8_0, q4_0, q4_1, q5_0 or q5_1. safetensors, for "
            "vLLM: w8a8-int8, w8a16, fp8 or w4a16. Default: as --dtype.",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        str,
        typer.Option(
            help="auto (a stock architecture whenever the sizes allow), stock (refuse otherwise), or pruned "
            "(pyprune's own, with sizes per layer)."
        ),
    ] = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16: dtype of the written weights. Default: MODEL's own."),
    ] = None,
    gguf_file: GgufFile = None,
    overwrite: Overwrite = False,
    debug: Debug = False,
) -> None:
    """Write MODEL as a safetensors checkpoint that vLLM and Transformers load, or as a GGUF file; a plan stays with it.

    Example: pyprune export pruned/ --format gguf --quantise q8_0 --out pruned.gguf
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


def _refuse_quantise(quantise: str | None, file_format: str) -> None:
    """Each file format has formats of its own for matrices."""
    from pyprune.serving.gguf.write import FORMATS
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
    given = {"--target": target != "auto", "--dtype": dtype is not None, "--gguf-file": gguf_file is not None}
    wrong = [name for name, is_given in given.items() if is_given]
    if wrong:
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


@guarded
def serve(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint folder.")],
    vllm_args: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[VLLM OPTIONS]",
            help="Options of `vllm serve`, handed on as they are. After a --, also those that pyprune has: -- --help.",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Check a checkpoint and serve it with vLLM's OpenAI-compatible server: `vllm serve DIR`, with any of its options.

    Example: pyprune serve pruned/ --port 9000 --max-model-len 2048
    """
    from pyprune.serving.export import serve as start

    if str(folder).startswith("-"):
        raise ConfigError(
            f"{shown(str(folder))} stands where the checkpoint folder belongs. Name the folder first, then vLLM's "
            "options: pyprune serve DIR --port 9000"
        )
    start(folder, vllm_args or ())


def _as_gguf_files(files: ExitStack, engine: str, quantise: str | None, models: Mapping[str, str]) -> dict[str, str]:
    """The GGUF file of each model, in which llama.cpp both reads the text and is timed; nothing for other engines."""
    from pyprune.serving.engines import GGUF_FORMAT, as_gguf

    if engine != "llamacpp":
        return {}
    return {name: files.enter_context(as_gguf(path, quantise or GGUF_FORMAT)) for name, path in models.items()}


def _perplexity(path: str, file: str | None, source: str, protocol: str) -> float:
    """Perplexity of a checkpoint; with a GGUF file, that of what llama.cpp runs."""
    if file is None:
        return loaded_perplexity(path, source, protocol)
    from pyprune.serving.gguf.perplexity import gguf_perplexity

    return gguf_perplexity(file, source, protocol).perplexity


@guarded
def bench(
    pruned: Annotated[
        str, typer.Argument(metavar="PRUNED", help="Pruned checkpoint folder; with llamacpp also a GGUF file.")
    ],
    against: Annotated[
        str,
        typer.Option(
            metavar="DENSE", help="Checkpoint folder or hub id (llamacpp: or GGUF file) to compare with, the baseline."
        ),
    ],
    engine: Annotated[
        str, typer.Option(help="auto (vLLM if installed, else Transformers), vllm, transformers or llamacpp.")
    ] = "auto",
    batch_size: Annotated[int, typer.Option(help="Prompts generated at once (token generation).")] = 64,
    new_tokens: Annotated[int, typer.Option(help="Tokens generated for each prompt.")] = 128,
    prompt_tokens: Annotated[int, typer.Option(help="Length in tokens of the one prompt (prompt processing).")] = 2048,
    repeats: Annotated[int, typer.Option(help="Timed turns of each model and column, after a warm-up.")] = 3,
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16 or float32: dtype of weights and activations; not with llamacpp.")
    ] = "bfloat16",
    quantise: Annotated[
        str | None,
        typer.Option(
            help="Format in which llamacpp gets a folder: f32, f16, bf16, q8_0, q4_0, q4_1, q5_0 or q5_1. "
            "Default: q8_0.",
            show_default=False,
        ),
    ] = None,
    ppl: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="Fill the PPL column: wikitext2, ptb, c4, a datasets id, or a text file."),
    ] = None,
    protocol: Annotated[str, typer.Option(help="Protocol of --ppl: ppl-2048 or ppl-128.")] = "ppl-2048",
    seed: Annotated[int, typer.Option(help="Seed of the random prompts.")] = 0,
    jsonl: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append every sample to FILE as it is taken (JSON lines).")
    ] = None,
    annotate: Annotate = False,
    json_file: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Measure PRUNED against DENSE, turn by turn: token generation and prompt processing.

    Prints the papers' table: PR (share removed), PPL, Tokens/s, TI (throughput increase), Latency, Speedup; for
    llama.cpp, whose PPL is computed by it in the format that is timed, also load time and memory.

    Example: pyprune bench pruned/ --against HuggingFaceTB/SmolLM2-135M --engine vllm --ppl wikitext2
    """
    from pyprune.checkpoint.record import check_annotatable
    from pyprune.data.sources import check_source
    from pyprune.runtime.device import resolve_device, warn_of_slow_dtype
    from pyprune.runtime.figures import check_lines
    from pyprune.serving.engines import choose_engine
    from pyprune.serving.measure import measure
    from pyprune.serving.table import conditions, speed_table

    if jsonl is not None:
        check_lines(jsonl)
    choose_engine(engine)  # a missing engine is an error now, not after the perplexities
    if engine != "llamacpp":
        warn_of_slow_dtype(dtype, resolve_device("auto"))
    if annotate:
        check_annotatable(pruned)
    models = {"dense": against, "pruned": pruned}
    perplexity = None
    with ExitStack() as written:
        files: dict[str, str] = {}
        if ppl:
            check_source(ppl)
            files = _as_gguf_files(written, engine, quantise, models)
            perplexity = {name: _perplexity(path, files.get(name), ppl, protocol) for name, path in models.items()}
        report = measure(
            models,
            engine=engine,
            batch_size=batch_size,
            new_tokens=new_tokens,
            prompt_tokens=prompt_tokens,
            repeats=repeats,
            dtype=dtype,
            quantise=quantise,
            seed=seed,
            jsonl=jsonl,
            gguf_files=files,
        )
    table = speed_table(report, perplexity=perplexity)
    output({**report.to_dict(), "perplexity": perplexity}, json_file, table, conditions(report))
    if annotate:
        speed = {
            "throughput increase (TI)": round(report.throughput_increase("pruned"), 4),
            "prompt speedup": round(report.speedup("pruned"), 4),
            "conditions": conditions(report).replace("\n", " "),
        }
        add_to_record(pruned, speed=speed)
