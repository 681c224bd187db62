"""Run vLLM's own client, `vllm bench serve`, and read the file that it writes."""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pyprune.serving.engines import COMMAND_TIMEOUT_S, PYTHON, EngineError, engine_environment, engine_error
from pyprune.serving.load.options import SLO_METRICS, Load, LoadOptions
from pyprune.serving.load.results import Request, Turn

RESULT = "result.json"
LOOK_S = 60.0
"""Seconds between two checks that a server still gives tokens."""
METRICS = "ttft,tpot,itl,e2el"


def bench_command(url: str, model: str, load: Load, options: LoadOptions, repeat: int, folder: Path) -> list[str]:
    """Return the command line of one turn; its result goes to :data:`RESULT` in ``folder``.

    Every model gets the same prompts in a turn, and every turn gets others. Warm-up requests, as many as come at once,
    are not measured.

    Args:
        url: of the server.
        model: the folder, which is its name there and has the tokenizer.
        load: how requests come.
        options: lengths, number of requests and the service level.
        repeat: number of the turn; with the seed it decides the prompts, which no other seed shares.
        folder: for the result.
    """
    asked: dict[str, object] = {
        "--backend": "vllm",
        "--base-url": url,
        "--endpoint": "/v1/completions",
        "--model": model,
        "--dataset-name": "random",
        "--random-input-len": options.prompt_of(load),
        "--random-output-len": options.new_tokens,
        "--num-prompts": options.requests_of(load),
        "--num-warmups": load.concurrency or 1,
        "--seed": random.Random(f"{options.seed}/{repeat}").getrandbits(32),
        "--temperature": 0,
        "--percentile-metrics": METRICS,
        "--metric-percentiles": "50,90,99",
        "--result-dir": folder,
        "--result-filename": RESULT,
    }
    if load.rate is None:
        asked["--max-concurrency"] = load.concurrency
    else:
        asked["--request-rate"] = load.rate
    words = [str(word) for pair in asked.items() for word in pair]
    words += ["--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm"]
    if options.slo:
        words += ["--goodput", *(f"{SLO_METRICS[name]}:{limit:g}" for name, limit in options.slo.items())]
    return [*PYTHON, "-m", "pyprune.serving.vllm.launch", "bench", "serve", *words]


def run_client(
    command: Sequence[str],
    folder: Path,
    patience: float = COMMAND_TIMEOUT_S,
    progress: Callable[[], object | None] = lambda: None,
) -> dict[str, Any]:
    """Run the client and return its result.

    Args:
        command: of :func:`bench_command`.
        folder: for its result.
        patience: seconds without progress after which it is ended; a turn takes as long as its requests do.
        progress: returns a value that changes while the server answers; None = unknown at the moment.

    Raises:
        EngineError: it ended with an error, wrote no readable result, or made no progress for ``patience`` seconds;
            with the end of its log.
    """
    with tempfile.NamedTemporaryFile(prefix="pyprune-client-", suffix=".log") as log:
        path = Path(log.name)
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=client_environment()
        )
        try:
            if not _wait(process, patience, progress):
                raise engine_error(f"`vllm bench serve` got no token from the server for {patience:.0f} s", path)
        finally:
            process.kill()  # no effect where it has ended
            process.wait()
        if process.returncode:
            raise engine_error(f"`vllm bench serve` ended with status {process.returncode}", path)
        try:
            found = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise engine_error(f"`vllm bench serve` wrote no result that can be read ({error})", path) from error
        return dict(found)


def _wait(process: subprocess.Popen[bytes], patience: float, progress: Callable[[], object | None]) -> bool:
    """Wait for a client; False after ``patience`` seconds without progress."""
    seen, since = progress(), time.monotonic()
    while time.monotonic() - since < patience:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=min(patience, LOOK_S))
            return True
        now = progress()
        if now is not None and now != seen:
            seen, since = now, time.monotonic()
    return False


def counting_obstacle(found: Mapping[str, Any], new_tokens: int) -> str | None:
    """Explain why a turn does not count, in a sentence without its full stop; None where it does.

    Requests failed, or answers broke off: vLLM's client counts an answer that had begun as a success.

    Args:
        found: result of the client.
        new_tokens: of every answer.
    """
    if failed := found.get("failed"):
        why = next((str(text) for text in found.get("errors", ()) if text), "no reason was given")
        return f"{failed} of {found.get('num_prompts')} requests failed: {why.strip()[-500:].rstrip('.')}"
    short = sum(tokens != new_tokens for tokens in found.get("output_lens", ()))
    if not short:
        return None
    return (
        f"{short} of {len(found['output_lens'])} answers have another length than the {new_tokens} tokens that were "
        "asked for: they broke off, and the turn does not count; measure again"
    )


def patience_with(load: Load, options: LoadOptions) -> float:
    """Return the seconds that a turn may get no token: an hour, plus the time to send its requests at their rate."""
    return COMMAND_TIMEOUT_S + (options.requests_of(load) / load.rate if load.rate else 0.0)


def client_environment() -> dict[str, str]:
    """Return the environment of the client, which must not use a proxy for the loopback interface."""
    ours = engine_environment()
    known = [ours.get(name) for name in ("no_proxy", "NO_PROXY")]
    direct = ",".join(dict.fromkeys([*(text for text in known if text), "127.0.0.1"]))
    return {**ours, "no_proxy": direct, "NO_PROXY": direct}


def read_turn(found: Mapping[str, Any], **facts: Any) -> Turn:
    """Return one turn of the client's result.

    Args:
        found: result of the client, with --save-detailed.
        facts: the attributes of the turn that it lacks.

    Raises:
        EngineError: the result lacks an entry: another release of vLLM.
    """
    try:
        rows = zip(found["ttfts"], found["itls"], found["latencies"], found["output_lens"], strict=True)
        requests = [Request(ttft, tuple(itl), latency, int(tokens)) for ttft, itl, latency, tokens in rows]
        goodput = found["request_goodput"]
        return Turn(
            seconds=float(found["duration"]),
            prompt_tokens=int(found["total_input_tokens"]),
            output_tokens=int(found["total_output_tokens"]),
            goodput=None if goodput is None else float(goodput),
            requests=tuple(requests),
            **facts,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(
            f"`vllm bench serve` wrote a result without what is needed ({type(error).__name__}: {error}). It comes "
            "from a release of vLLM that was not tested; 0.32 was."
        ) from error
