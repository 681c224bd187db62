"""Measure the speed of checkpoints against the dense model, in the engine alone or in servers under load."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyprune.cli.base import add_to_record, given_names, guard, output, refuse_split, refuse_unread
from pyprune.cli.evaluate import PROTOCOL, loaded_perplexity, named_figure, text_conditions
from pyprune.errors import ConfigError, shown

if TYPE_CHECKING:
    from pyprune.runtime.report import Report

DENSE = "dense"
SERVED_PROMPT_TOKENS = 512
"""Default length of the prompts that servers get."""
BATCH_SIZE = 64
KV_GIB = 1.0


def _as_gguf_files(files: ExitStack, engine: str, quantise: str | None, models: Mapping[str, str]) -> dict[str, str]:
    """Write the GGUF file of each model, for both perplexity and speed in llama.cpp; none for other engines."""
    from pyprune.serving.engines import GGUF_FORMAT, as_gguf

    if engine != "llamacpp":
        return {}
    return {name: files.enter_context(as_gguf(path, quantise or GGUF_FORMAT)) for name, path in models.items()}


def model_perplexity(
    path: str, file: str | None, source: str, protocol: str, *, split: str | None, field: str | None
) -> float:
    """Measure a checkpoint's perplexity on a text; of a GGUF file, if any, in llama.cpp."""
    if file is None:
        return loaded_perplexity(path, source, protocol, split=split, field=field)
    from pyprune.quality.measure import check_test_text
    from pyprune.runtime.progress import say
    from pyprune.serving.gguf.perplexity import gguf_perplexity

    if file == path:
        say(f"{path} has no record of its training text, which may be {source}.", "dim")
    else:
        check_test_text(path, source, split=split, field=field)
    return gguf_perplexity(file, source, protocol, split=split, field=field).perplexity


@guard
def bench(
    pruned: list[str],
    *,
    against: str,
    engine: str = "auto",
    batch_size: int = BATCH_SIZE,
    new_tokens: int = 128,
    prompt_tokens: str | None = None,
    repeats: int = 3,
    precision: float = 0.02,
    max_repeats: int | None = None,
    dtype: str = "bfloat16",
    quantise: str | None = None,
    ppl: str | None = None,
    protocol: str = PROTOCOL,
    split: str | None = None,
    field: str | None = None,
    serving: bool = False,
    concurrency: str | None = None,
    request_rate: str | None = None,
    requests: int | None = None,
    slo: str | None = None,
    eager: bool = False,
    kv_gib: float = KV_GIB,
    vllm_args: str | None = None,
    seed: int = 0,
    report: Path | None = None,
    overwrite: bool = False,
    jsonl: Path | None = None,
    annotate: bool = False,
    json_file: str | None = None,
    debug: bool = False,
) -> None:
    """Measure PRUNED against DENSE, turn by turn: token generation and prompt processing, or servers under load.

    Prints the papers' table: PR (share removed), PPL, Tokens/s, TI (throughput increase), Latency, Speedup. For
    llama.cpp, which computes PPL itself in the timed format, also load time and memory. With --serving:
    output tokens/s, TTFT, TPOT, ITL and end-to-end times, goodput, load time, memory, and the cache's capacity.

    Example: pyprune bench pruned/ --against HuggingFaceTB/SmolLM2-135M --engine vllm --ppl wikitext2

    Args:
        pruned (PRUNED...): Pruned checkpoint folders; with llamacpp also GGUF files.
        against (DENSE): Checkpoint folder or hub id (llamacpp: or GGUF file) to compare with, the baseline.
        engine: auto (vLLM if installed, else Transformers), vllm, transformers or llamacpp.
        batch_size: Prompts generated at once (token generation).
        new_tokens: Tokens generated for each prompt.
        prompt_tokens (N): Length in tokens of the one prompt (prompt processing); with --serving, of every prompt, and
            N,N measures every load with each of them. (default: 2048, or as many as the models read; with --serving:
            512)
        repeats: Timed turns of each model and column, after a warm-up; the least.
        precision: Repeat until the 95 % interval of every ratio is at most this share of it (0.02 = 2 %), or report
            that it is wider. 0: exactly --repeats turns.
        max_repeats: Most turns for --precision. Default: 10, or --repeats if that is more.
        dtype: bfloat16, float16 or float32: dtype of weights and activations; not with llamacpp.
        quantise: GGUF format in which llamacpp runs a folder: f32, f16, bf16, q8_0, q6_k, q5_k, q5_1, q5_0, q4_k, q4_1
            or q4_0. Default: q8_0.
        ppl (SOURCE): Fill the PPL column: wikitext2, ptb, c4, a datasets id, or a text file.
        protocol: Protocol of --ppl: ppl-2048 or ppl-128.
        serving: Measure `vllm serve` under load with vLLM's own `vllm bench serve`, every model in turn.
        concurrency (N,N): With --serving: numbers of requests in flight. Default: 1,4,16.
        request_rate (R,R): With --serving, instead of --concurrency: requests per second, at random.
        requests: With --serving: requests of a turn. Default: twice those in flight, or ten seconds of the rate; at
            least 8.
        slo (LIMITS): With --serving: limits of ttft, tpot and e2e, such as ttft:500ms,tpot:50ms; goodput is the
            requests per second that keep them.
        eager: With --serving: servers do not compile (--enforce-eager).
        kv_gib: With --serving: GiB of key-value cache of each server.
        vllm_args ('OPTIONS'): With --serving: further options of `vllm serve`, in one argument.
        seed: Seed of the random prompts and of the order of servers.
        report (DIR): Write report.md and report.html into DIR: quality against speed. Needs --ppl.
        overwrite: Replace --report if pyprune wrote all that it holds. Default: refuse.
        jsonl (FILE): Append every sample to FILE as it is taken (JSON lines).
    """
    from pyprune.checkpoint.record import check_annotatable
    from pyprune.data.sources import check_source
    from pyprune.runtime.device import resolve_device, warn_of_slow_dtype
    from pyprune.runtime.figures import check_lines
    from pyprune.serving.load.options import parse_prompts

    if report is None:
        refuse_unread("--report", {"--overwrite": overwrite})
    if ppl is None:
        of_text = {"--protocol": protocol != PROTOCOL, "--split": split is not None, "--field": field is not None}
        refuse_unread("--ppl", of_text)
    refuse_split(split, [] if ppl is None else [ppl])
    common: dict[str, Any] = {
        "new_tokens": new_tokens,
        "repeats": repeats,
        "precision": precision,
        "max_repeats": max_repeats,
        "dtype": dtype,
        "seed": seed,
    }
    prompts = None if prompt_tokens is None else parse_prompts(prompt_tokens)
    load: dict[str, Any] = {
        "concurrency": concurrency,
        "request_rate": request_rate,
        "requests": requests,
        "slo": slo,
        "eager": eager,
        "kv_gib": None if kv_gib == KV_GIB else kv_gib,
        "vllm_args": vllm_args,
    }
    alone = {"engine": engine, "batch_size": batch_size, "quantise": quantise}
    models = {DENSE: against, **short_names(pruned)}
    prepare = _servers if serving else _engine
    check, measure = prepare({**common, "prompts": prompts}, load, alone, jsonl)
    if jsonl is not None:
        check_lines(jsonl, report, *models.values(), ppl)
    if report is not None:
        _check_report(report, ppl, overwrite=overwrite, reads=[against, *pruned, ppl])
    if engine != "llamacpp":
        warn_of_slow_dtype(dtype, resolve_device("auto"))
    annotated = short_names(pruned) if annotate else {}
    for folder in annotated.values():
        check_annotatable(folder)
    read = check(models)  # before the perplexities, which take long
    perplexity = None
    with ExitStack() as written:
        files: dict[str, str] = {}
        if ppl:
            check_source(ppl)
            files = _as_gguf_files(written, engine, quantise, models)
            perplexity = {
                name: model_perplexity(read[name], files.get(name), ppl, protocol, split=split, field=field)
                for name in models
            }
        measured = measure(models, files, perplexity)
    output({**measured.figures, "perplexity": perplexity}, json_file, *measured.printed)
    for name, folder in annotated.items():
        quality: dict[str, float] = {}
        if ppl and perplexity:
            conditions = [*text_conditions(ppl, split, field), *_format_conditions(engine, quantise)]
            quality = {named_figure(f"{protocol} {ppl}", conditions): round(perplexity[name], 4)}
        add_to_record(folder, speed=measured.facts(name), **({"quality": quality} if quality else {}))
    if report is not None and perplexity is not None:
        from pyprune.checkpoint.experts import expert_charts

        tradeoff = measured.tradeoff(perplexity, f"{ppl}, {protocol}")
        tradeoff = replace(tradeoff, charts=(*tradeoff.charts, *expert_charts(models)))
        _write_report(tradeoff, report, measured.figures, overwrite=overwrite)


def _format_conditions(engine: str, quantise: str | None) -> list[str]:
    """Name the engine and format of a perplexity that was measured on a GGUF file."""
    from pyprune.serving.engines import GGUF_FORMAT

    return ["llama.cpp", quantise or GGUF_FORMAT] if engine == "llamacpp" else []


@dataclass(frozen=True)
class _Measured:
    """The measurements, in the forms in which they are printed and written.

    Attributes:
        figures: for --json.
        printed: tables and texts.
        tradeoff: (perplexities, their text and protocol) -> the report.
        facts: name of a model -> facts for its record.
    """

    figures: dict[str, Any]
    printed: tuple[Any, ...]
    tradeoff: Callable[[Mapping[str, float], str], Report]
    facts: Callable[[str], dict[str, Any]]


Check = Callable[[Mapping[str, str]], Mapping[str, str]]
"""(models) -> folder or file of each for its perplexity; raises if they cannot be measured with the options."""
Measure = Callable[[Mapping[str, str], Mapping[str, str], Mapping[str, float] | None], _Measured]
"""(models, their GGUF files if any, perplexities) -> the measurements."""


def short_names(pruned: Sequence[str]) -> dict[str, str]:
    """Name checkpoints in tables: "pruned" for a single one, otherwise the last part of each path."""
    if len(pruned) == 1:
        return {"pruned": pruned[0]}
    names: dict[str, str] = {}
    for path in pruned:
        short = Path(path).name or path
        taken = {DENSE, *names}
        number = next(n for n in range(1, len(pruned) + 2) if (short if n == 1 else f"{short} ({n})") not in taken)
        names[short if number == 1 else f"{short} ({number})"] = path
    return names


def _engine(
    common: Mapping[str, Any], load: Mapping[str, Any], alone: Mapping[str, Any], jsonl: Path | None
) -> tuple[Check, Measure]:
    """Check the options of the engine alone; return the functions that check and measure models with them."""
    from pyprune.serving.checkpoints import is_gguf
    from pyprune.serving.engines import choose_engine
    from pyprune.serving.load.tradeoff import speed_tradeoff
    from pyprune.serving.speed.measure import measure, workload_of
    from pyprune.serving.speed.table import conditions, speed_facts, speed_table

    names = [f"--{name.replace('_', '-')}" for name, value in load.items() if value is not None and value is not False]
    if names:
        raise ConfigError(f"{', '.join(names)} belong{'s' if len(names) == 1 else ''} to servers; add --serving.")
    choose_engine(alone["engine"])
    options = {**common, **alone}
    prompt, *others = options.pop("prompts") or (None,)
    if others:
        raise ConfigError("--prompt-tokens names several lengths, which belong to servers; give one, or add --serving.")
    options["prompt_tokens"] = prompt

    def check(models: Mapping[str, str]) -> Mapping[str, str]:
        if options["quantise"] is not None and all(map(is_gguf, models.values())):
            raise ConfigError(
                f"--quantise {options['quantise']} is the format for folders, and every model here is a GGUF file. "
                "Leave it out."
            )
        workload_of(models, **options)
        return models

    def run(models: Mapping[str, str], files: Mapping[str, str], perplexity: Mapping[str, float] | None) -> _Measured:
        report = measure(models, **options, jsonl=jsonl, gguf_files=files)
        return _Measured(
            report.to_dict(),
            (speed_table(report, perplexity=perplexity), conditions(report)),
            partial(speed_tradeoff, report),
            partial(speed_facts, report),
        )

    return check, run


def _servers(
    common: Mapping[str, Any], load: Mapping[str, Any], alone: Mapping[str, Any], jsonl: Path | None
) -> tuple[Check, Measure]:
    """Check the options of servers under load; return the functions that check and measure models with them."""
    from pyprune.serving.engines import choose_engine
    from pyprune.serving.load.options import LoadOptions, parse_loads, parse_slo, with_prompts
    from pyprune.serving.load.run import check_servers, measure_serving
    from pyprune.serving.load.table import load_table, load_text, server_table
    from pyprune.serving.load.tradeoff import load_tradeoff

    _refuse_with_serving(alone)
    choose_engine("vllm")
    prompts = common["prompts"] or (SERVED_PROMPT_TOKENS,)
    options = LoadOptions(
        **{name: value for name, value in common.items() if name != "prompts"},
        prompt_tokens=prompts[0],
        loads=with_prompts(parse_loads(load["concurrency"], load["request_rate"]), prompts),
        requests=load["requests"],
        slo=parse_slo(load["slo"]),
        eager=load["eager"],
        kv_gib=KV_GIB if load["kv_gib"] is None else load["kv_gib"],
        vllm_args=tuple(_words(load["vllm_args"] or "")),
    )
    options.validate()

    def run(models: Mapping[str, str], files: Mapping[str, str], perplexity: Mapping[str, float] | None) -> _Measured:
        report = measure_serving(models, options, jsonl=jsonl)
        text = load_text(report)
        return _Measured(
            report.to_dict(),
            (load_table(report), server_table(report, perplexity=perplexity), text),
            partial(load_tradeoff, report),
            # Each figure with its conditions, so that the figures of a run with other loads remain.
            lambda name: {
                key: entry
                for x in options.loads
                for key, entry in {
                    f"{x.ratio_of}, {x}, over the dense model's": round(report.ratio(name, x), 4),
                    f"conditions of servers, {x}": text.replace("\n", "; "),
                }.items()
            },
        )

    def check(models: Mapping[str, str]) -> Mapping[str, str]:
        return {name: str(folder) for name, folder in check_servers(models, options).items()}

    return check, run


def _refuse_with_serving(alone: Mapping[str, Any]) -> None:
    wrong = {
        f"--engine {alone['engine']}": alone["engine"] not in ("auto", "vllm"),
        f"--batch-size {alone['batch_size']}": alone["batch_size"] != BATCH_SIZE,
        f"--quantise {alone['quantise']}": alone["quantise"] is not None,
    }
    if names := given_names(wrong):
        raise ConfigError(
            f"{', '.join(names)} cannot be combined with --serving, which measures `vllm serve` under the load of "
            "--concurrency or --request-rate."
        )


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--vllm-args is {shown(text)}, which cannot be split into words ({error}).") from error


def _check_report(folder: Path, ppl: str | None, *, overwrite: bool, reads: Sequence[str | None]) -> None:
    """Refuse, before anything is measured, a report that could not be written."""
    from pyprune.runtime.files import check_output

    if ppl is None:
        raise ConfigError("--report shows quality against speed, so it needs --ppl SOURCE.")
    check_output(folder, overwrite=overwrite, reads=reads)


def _write_report(report: Report, folder: Path, figures: Mapping[str, Any], *, overwrite: bool) -> None:
    from pyprune.runtime.files import atomic_folder, write_report_manifest
    from pyprune.runtime.progress import say
    from pyprune.runtime.report import write_report

    with atomic_folder(folder, overwrite=overwrite) as work:
        write_report(report, work)
        write_report_manifest(work, figures)
    say(f"Wrote {folder}: report.md and report.html")
