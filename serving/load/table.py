"""Make the tables of servers under load, and the conditions of their figures."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence

from pyprune.runtime.report import Cell, Table
from pyprune.serving.comparison import precision_text
from pyprune.serving.load.capacity import NOT_COMPILED
from pyprune.serving.load.options import Load, LoadOptions
from pyprune.serving.load.results import PERCENTILES, LoadReport, ServedModel
from pyprune.serving.speed.table import plus_minus
from pyprune.serving.stats import named_variables, vllm_release
from pyprune.serving.vllm.options import given_options, parallel_ranks
from pyprune.serving.vllm.releases import CPU_SEQUENCES, limits_cpu_sequences

TIMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "End to end"}
GPU_MEMORY = "GPU memory (MB)"
TIME_COLUMNS = tuple(f"{name} {'/'.join(f'p{p}' for p in PERCENTILES)} (ms)" for name in TIMES.values())


def load_table(report: LoadReport) -> Table:
    """Return the table of the clients' figures: a row for each load and model.

    Output tokens/s and goodput are "median ± median absolute deviation" of the turns; the times are percentiles over
    the requests of all turns, in ms. The ratio is of output tokens/s, under a rate of mean end-to-end times.
    """
    goodput = ("Goodput (requests/s)",) if report.options.slo else ()
    columns = ("Load", "Model", "Output tokens/s", "Ratio", *TIME_COLUMNS)
    rows = tuple(_row(report, load, name) for load in report.options.loads for name in report.models)
    is_rated = any(load.rate is not None for load in report.options.loads)
    note = "Ratio: of mean end-to-end times; how many tokens come in a second is what the rate asks for." * is_rated
    return Table("Servers under load", (*columns, *goodput), rows, note)


def _row(report: LoadReport, load: Load, name: str) -> tuple[Cell, ...]:
    times = [milliseconds(report.percentiles(name, load, metric)) for metric in TIMES]
    goodput = report.goodput(name, load)
    kept = (plus_minus(goodput, 2) if goodput else None,) if report.options.slo else ()
    speed = plus_minus(report.tokens_per_second(name, load))
    return (str(load), name, speed, f"{report.ratio(name, load):.2f}x", *times, *kept)


def milliseconds(values: Sequence[float] | None) -> str | None:
    """Format percentiles in ms as a cell, such as "8.5 / 120 / 1,300"; None without any."""
    return None if values is None else " / ".join(f"{value:,.{0 if value >= 100 else 1}f}" for value in values)


def server_table(report: LoadReport, *, perplexity: Mapping[str, float] | None = None) -> Table:
    """Return the table of the servers' memory and starts: a row for each model.

    Args:
        report: of the measurement.
        perplexity: model name -> perplexity; models without one show "-".
    """
    base = report.models[report.baseline].parameters
    gib = f"{report.options.kv_gib:g} GiB"
    has_gpu = any(model.gpu_memory is not None for model in report.models.values())
    columns = (
        *("Model", "PR", "PPL", "Parameters", "Bytes", "Until healthy (s)", "Compiling (s)", "Peak host memory (MB)"),
        *([GPU_MEMORY] if has_gpu else []),
        *("KV bytes/token", f"Sequences in {gib}", "Server says"),
    )
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (
            name,
            f"{1 - model.parameters / base:.1%}",
            f"{perplexity[name]:.2f}" if perplexity and name in perplexity else None,
            model.parameters,
            model.bytes,
            *_taken(model, has_gpu=has_gpu),
        )
        for name, model in report.models.items()
    )
    contexts = sorted({model.capacity.context for model in report.models.values() if model.capacity})
    lengths = ", ".join(f"{context:,}" for context in contexts)
    sequences = (
        f"Sequences: of {lengths} tokens that {gib} of key-value cache hold at once, computed from the KV heads of "
        "every layer; the server's log has its own number, and the only one for several ranks."
    )
    notes = [sequences] if contexts else []
    notes.append("Peak host memory: of all processes of a server, without a GPU's own.")
    if has_gpu:
        notes.append("GPU memory: what came to be in use on all visible ones, key-value cache and all.")
    return Table("Servers", columns, rows, note=" ".join(notes))


def _taken(model: ServedModel, *, has_gpu: bool) -> tuple[Cell, ...]:
    starts = (start_seconds(model.load_seconds), start_seconds(model.compile_seconds))
    held = (model.memory, *([model.gpu_memory] if has_gpu else []))
    memory = (None if size is None else f"{size / 1e6:,.0f}" for size in held)
    c = model.capacity
    if c is None:
        return (*starts, *memory, None, None, None)
    computed = (c.token_bytes, f"{c.sequences:,.2f}") if c.token_bytes else (None, None)
    return (*starts, *memory, *computed, None if c.reported is None else f"{c.reported:,.2f}")


def start_seconds(values: Sequence[float]) -> str | None:
    """Format the seconds of the first start and of the fastest later one, which finds compiled code."""
    if not values:
        return None
    later = f", then {min(values[1:]):.1f}" if len(values) > 1 else ""
    return f"{values[0]:.1f}{later}"


def load_conditions(report: LoadReport) -> dict[str, str]:
    """Return how the figures were taken: name -> value, every option that changes them among it."""
    o, env = report.options, report.environment
    found = {
        "engine": f"vLLM {vllm_release(env)}, `vllm serve` and `vllm bench serve`",
        "mode": _join_models({name: _mode(report, model) for name, model in report.models.items()}),
        "dtype": o.dtype,
        "device": f"{env['device']} ({env['cpus']} CPUs); the client runs on the same machine",
        "lengths": f"{', '.join(map(str, o.prompts))} prompt tokens (vLLM's dataset random), {o.new_tokens} new "
        "tokens, greedy, the end of a text ignored",
        "longest sequence": _join_models({name: _longest(model) for name, model in report.models.items()}),
        "requests of a turn": ", ".join(f"{o.requests_of(load)} ({load})" for load in o.loads)
        + "; before them, not measured, as many as come at once",
        "turns": f"{_turns(report)} of each model and load, order drawn with seed {o.seed}; {_side_by_side(report)}",
        **_gpu_memory(report),
        "cache": f"{o.kv_gib:g} GiB of key-value cache for each {_owner(o)}, prefix caching off",
    }
    if o.slo:
        limits = ", ".join(f"{TIMES[name]} at most {limit:g} ms" for name, limit in o.slo.items())
        found["service level"] = f"{limits}, in every single request that counts as good"
    if o.vllm_args:
        found["further options of vllm serve"] = shlex.join(o.told_args)
    if variables := named_variables(env):
        found["environment of the servers"] = variables
    return found


def _owner(options: LoadOptions) -> str:
    """Name the owner of a cache: a server or a rank."""
    ranks = parallel_ranks(options.vllm_args)
    return "server" if ranks == 1 else f"of the {ranks} ranks of a server"


def _join_models(texts: Mapping[str, str]) -> str:
    """Join the texts of the models, or return one text if they are equal."""
    different = set(texts.values())
    return different.pop() if len(different) == 1 else "; ".join(f"{name}: {text}" for name, text in texts.items())


def _mode(report: LoadReport, model: ServedModel) -> str:
    """Describe how the servers of a model compiled it, by their log."""
    if report.options.eager:
        return "eager (--enforce-eager)"
    if model.compilation is None:
        return "not in vLLM's log"
    if model.compilation == NOT_COMPILED:
        return "not compiled, as vLLM's log says"
    return "compiled" if report.options.vllm_args else "compiled (vLLM's own default)"


def _longest(model: ServedModel) -> str:
    return "not known" if model.max_model_len is None else f"{model.max_model_len:,} tokens (--max-model-len)"


def _gpu_memory(report: LoadReport) -> dict[str, str]:
    """Return an entry if the memory of a GPU could not be read."""
    env = report.environment
    if env["device"] == env["cpu"] or any(model.gpu_memory is not None for model in report.models.values()):
        return {}
    why = (
        "NVML was not read (it needs nvidia-ml-py; where CUDA_VISIBLE_DEVICES picks some of several kinds, their UUIDs "
        "or CUDA_DEVICE_ORDER=PCI_BUS_ID)"
    )
    return {"GPU memory": f"not told: {why}"}


def _turns(report: LoadReport) -> int:
    return 1 + max(turn.repeat for turn in report.turns)


def _side_by_side(report: LoadReport) -> str:
    if len(report.models) == 1:
        return "one server"
    if report.resident:
        return "all servers were up, idle but for one"
    return "one server was up at a time, started when its turn came"


def load_text(report: LoadReport) -> str:
    """Return the conditions as lines, then the precision of the ratios, and doubts."""
    lines = [f"{name}: {value}" for name, value in load_conditions(report).items()]
    return "\n".join([*lines, *load_notes(report)])


def load_notes(report: LoadReport) -> list[str]:
    """Return the precision of the ratios, if it was asked for, and doubts; one sentence or more each."""
    intervals = {f"{name} ({load})": i for (name, load), i in report.intervals(report.options.loads).items()}
    notes = [precision_text(intervals, report.options), report.note or "", *waiting_notes(report), *_doubts(report)]
    return [note for note in notes if note]


def waiting_notes(report: LoadReport) -> list[str]:
    """Return a note for each load whose requests are not all served at once."""
    seats, why = _seats(report)
    found = [
        f"{load}: {why} {seats} of these requests at a time, the others wait. TTFT contains that."
        for load in report.options.loads
        if seats < (load.concurrency or 0)
    ]
    for name, model in report.models.items():
        for load in report.options.loads:
            tokens = report.options.prompt_of(load) + report.options.new_tokens
            fit = math.inf if model.capacity is None else model.capacity.held(tokens)
            if fit < min(load.concurrency or 0, seats):
                found.append(
                    f"{name}, {load}: the cache holds {fit:.1f} of these requests, the others wait in the server. TTFT "
                    "and the ratio contain that; raise --kv-gib to measure the model alone."
                )
    return found


def _seats(report: LoadReport) -> tuple[float, str]:
    """Return the requests that a server answers at a time (infinite if unknown), and the reason for the limit."""
    given = given_options(report.options.vllm_args)
    if given.max_num_seqs is not None:
        return given.max_num_seqs * max(1, given.data_parallel_size), "--max-num-seqs lets a server take"
    others = given.max_num_batched_tokens is not None or given.performance_mode is not None  # which change the number
    if others or not limits_cpu_sequences(report.environment["versions"].get("vllm", "")):
        return math.inf, ""
    seats = CPU_SEQUENCES * parallel_ranks(report.options.vllm_args)
    return seats, "without --max-num-seqs a server of vLLM's CPU build takes"


def _doubts(report: LoadReport) -> list[str]:
    return [
        f"{name}: the server's log says that its cache holds {c.reported:g} sequences, config.json that it holds "
        f"{c.sequences:.2f}. Believe the log: sliding windows, several ranks or another cache dtype count there."
        for name, model in report.models.items()
        if (c := model.capacity) is not None and c.is_confirmed is False
    ]
