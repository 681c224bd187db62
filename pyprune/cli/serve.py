"""export, serve and bench."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pyprune.cli.base import Annotate, Debug, GgufFile, JsonFile, Overwrite, add_to_record, guarded, output
from pyprune.cli.evaluate import loaded_perplexity
from pyprune.runtime.progress import warn


@guarded
def export(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint folder or hub id (owner/name).")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to create.")],
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
    """Write MODEL as a safetensors checkpoint that vLLM and Transformers load; a plan stays with it.

    Example: pyprune export folder/ --gguf-file model.gguf --dtype bfloat16 --out dense/
    """
    from pyprune.serving.export import export as write

    report = write(model, out, target=target, dtype=dtype, gguf_file=gguf_file, overwrite=overwrite)  # type: ignore[arg-type]
    size = f"{report.parameters:,} parameters, {report.bytes:,} bytes"
    needs = "stock, loads without pyprune" if report.stock else "loads with pyprune installed"
    print(f"Wrote {report.path}: {report.architecture} ({needs}), {size}.")
    for reason in report.reasons:
        print(f"Not a stock architecture: {reason}")
    for warning in report.warnings:
        warn(warning)


@guarded
def serve(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint folder.")],
    vllm_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- VLLM OPTIONS]", help="Options for `vllm serve`, after a --, e.g. -- --port 9000."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Serve a checkpoint with vLLM's OpenAI-compatible server (`vllm serve DIR`).

    Example: pyprune serve pruned/ -- --port 9000 --max-model-len 2048
    """
    from pyprune.serving.export import serve as start

    start(folder, vllm_args or ())


@guarded
def bench(
    pruned: Annotated[str, typer.Argument(metavar="PRUNED", help="Pruned checkpoint folder.")],
    against: Annotated[
        str, typer.Option(metavar="DENSE", help="Checkpoint folder or hub id to compare with (the baseline).")
    ],
    engine: Annotated[
        str, typer.Option(help="auto (vLLM if installed, else Transformers), vllm or transformers.")
    ] = "auto",
    batch_size: Annotated[int, typer.Option(help="Prompts generated at once (token generation).")] = 64,
    new_tokens: Annotated[int, typer.Option(help="Tokens generated for each prompt.")] = 128,
    prompt_tokens: Annotated[int, typer.Option(help="Length in tokens of the one prompt (prompt processing).")] = 2048,
    repeats: Annotated[int, typer.Option(help="Timed turns of each model and column, after a warm-up.")] = 3,
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16 or float32: dtype of weights and activations.")
    ] = "bfloat16",
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

    Prints the papers' table: PR (share removed), PPL, Tokens/s, TI (throughput increase), Latency, Speedup.

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
    warn_of_slow_dtype(dtype, resolve_device("auto"))
    if annotate:
        check_annotatable(pruned)
    models = {"dense": against, "pruned": pruned}
    if ppl:
        check_source(ppl)
    perplexity = {name: loaded_perplexity(path, ppl, protocol) for name, path in models.items()} if ppl else None
    report = measure(
        models,
        engine=engine,
        batch_size=batch_size,
        new_tokens=new_tokens,
        prompt_tokens=prompt_tokens,
        repeats=repeats,
        dtype=dtype,
        seed=seed,
        jsonl=jsonl,
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
