"""Compare methods on slightly other weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pyprune.cli.base import comma_separated, guard, output, refuse_others_beside, text_options
from pyprune.errors import ConfigError, OutputError, shown
from pyprune.methods.registry import score_presets
from pyprune.runtime.progress import say

LONGEST_NUMBER = 20
"""Digits of a whole number."""


@guard
def robustness(
    context: typer.Context,
    model: str | None = None,
    *,
    methods: Annotated[
        str,
        typer.Option(
            metavar="A,B",
            help=f"Presets of scoring methods, comma-separated: {', '.join(score_presets())}. smoothgrad gets the "
            "noise draws of moreau.",
        ),
    ] = "taylor,smoothgrad,moreau,moreau-converged",
    ratios: str = "0.05,0.1,0.15,0.2",
    variants: str = "bfloat16,float16,lora,int8",
    axes: str = "heads,ffn",
    seeds: str = "0",
    calibration: str | None = None,
    samples: int | None = None,
    sequence_length: int | None = None,
    ppl: list[str] | None = None,
    protocol: str = "ppl-128",
    tokens: int | None = None,
    lora_rank: int = 8,
    lora_size: float = 0.01,
    lora_seed: int = 0,
    set_: list[str] | None = None,
    out: Path = Path("robustness.jsonl"),
    device: str = "auto",
    gguf_file: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    check_theorem: bool = False,
    json_file: str | None = None,
    debug: bool = False,
) -> None:
    """Compare the units that scoring methods remove from MODEL and from MODEL with slightly other weights.

    Each variant is scored once per method, ranked to every ratio and measured as a masked model: its perplexity against
    the pruned float32 model's, and the Jaccard overlap of the removed units.

    Example: pyprune robustness HuggingFaceTB/SmolLM2-135M --ppl wikitext2 --tokens 32768 --out robust.jsonl

    Args:
        model (MODEL): Checkpoint folder or hub id (owner/name) of a dense model.
        ratios (A,B): Shares to remove, between 0 and 1, comma-separated: of the parameters, or with --axes hidden of
            the hidden channels.
        variants (A,B): Weights to compare with the float32 weights, comma-separated: rounded to bfloat16, float16 or
            int8, or moved by a random low-rank update (lora).
        axes (A,B): Units to remove: heads,ffn, or hidden (the paper's channel-wise table).
        seeds (A,B): Seeds of the calibration samples, comma-separated.
        calibration (SOURCE): Text to score on: wikitext2, ptb, c4, alpaca, bookcorpus, a datasets id, or a
            .txt/.jsonl(.gz) file. Default: wikitext2.
        samples: Sequences to draw from it. Default: 10.
        sequence_length: Tokens in a sequence. Default: 128.
        ppl (SOURCE): Text to measure perplexity on, as for pyprune eval. Repeatable. Default: wikitext2.
        protocol: Protocol of the perplexities: ppl-128 or ppl-2048.
        tokens: Use only this many tokens of each test text. Default: all.
        lora_rank: Rank of the update of the variant lora.
        lora_size: Its Frobenius norm relative to that of each matrix, between 0 and 1.
        lora_seed (INTEGER): Its seed.
        out (FILE): JSON lines of finished work (an existing file is continued); the tables are written next to it as
            .md.
        check_theorem: Check MoreauPruner's Theorem 1 on a small function instead; no MODEL.
    """
    if check_theorem:
        refuse_others_beside(context, "--check-theorem", "check_theorem", "json_file", "debug")
        _print_theorem(json_file)
        return
    if model is None:
        raise typer.BadParameter("give a model, or --check-theorem", param_hint="MODEL")
    from pyprune.checkpoint.load import ModelSource
    from pyprune.checkpoint.tokenizer import no_tokenizer
    from pyprune.config.data import DataConfig
    from pyprune.data.sources import evaluation_split, look_up, look_up_samples
    from pyprune.robustness.compare import check_robustness, check_rows_file
    from pyprune.robustness.options import RobustnessConfig
    from pyprune.robustness.perturbations import Adapter

    config = RobustnessConfig(
        methods=comma_separated(methods),
        ratios=tuple(_number(text, "--ratios") for text in comma_separated(ratios)),
        variants=comma_separated(variants),
        seeds=tuple(_whole(text, "--seeds") for text in comma_separated(seeds)),
        axes=comma_separated(axes),  # type: ignore[arg-type]
        texts=tuple(ppl or ("wikitext2",)),
        protocol=protocol,
        max_tokens=tokens,
        adapter=Adapter(lora_rank, lora_size, lora_seed),
        options=text_options(calibration, samples, sequence_length),
        settings=tuple(set_ or ()),
    )
    config.validate()
    check_rows_file(out)
    if json_file not in (None, "-") and Path(str(json_file)).resolve() == out.with_suffix(".md").resolve():
        raise OutputError(f"--json is {json_file}, where the tables are written; name another file.")
    look_up((text, evaluation_split(text)) for text in config.texts)
    look_up_samples([DataConfig(calibration)] if calibration else [])
    source = ModelSource(model, gguf_file, revision, trust_remote_code)
    loaded, tokenizer = source.load(device=device)
    if tokenizer is None:
        raise no_tokenizer(model)
    result = check_robustness(loaded, tokenizer, config, out=out)
    report = result.report()
    output({"model": model, **result.to_dict()}, json_file, *report.tables, *report.notes)
    say(f"Rows: {out}. Tables: {out.with_suffix('.md')}.", "dim")


def _print_theorem(json_file: str | None) -> None:
    from dataclasses import astuple

    from pyprune.robustness.theorem import CASES, NOTE, check_theorem
    from pyprune.runtime.report import Table

    checks = [check_theorem(*case) for case in CASES]
    columns = ("beta", "sigma", "rho", "Moreau gradient", "plain gradient", "bound as printed", "bound as proved")
    table = Table("Theorem 1: largest slope found", columns, tuple(astuple(check) for check in checks), NOTE)
    output({"theorem": [vars(check) for check in checks]}, json_file, table)


def _number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{option} has {shown(text)}; give numbers, for example 0.05,0.1.") from None


def _whole(text: str, option: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= LONGEST_NUMBER):
        raise ConfigError(f"{option} has {shown(text)}; give whole numbers >= 0, for example 0,1.")
    return int(text)
