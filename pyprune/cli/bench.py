"""bench: speed of checkpoints against the dense model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from pyprune.cli.base import Annotate, Debug, JsonFile, add_to_record, guarded, output
from pyprune.cli.evaluate import loaded_perplexity


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
