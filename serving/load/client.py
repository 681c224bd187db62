"""vLLM's own client, `vllm bench serve`: how it is called, and what is read from the file that it writes."""

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
"""Seconds between two looks at whether a server still gives tokens."""
METRICS = "ttft,tpot,itl,e2el"


def bench_command(url: str, model: str, load: Load, options: LoadOptions, repeat: int, folder: Path) -> list[str]:
    """Return the command line of one turn; its result goes to :data:`RESULT` in ``folder``.

    Every model gets the same prompts in a turn, and every turn others. As many requests as come at once go ahead, which
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
    """Run the client and return what it wrote.

    Args:
        command: of :func:`bench_command`.
        folder: where it writes its result.
        patience: seconds without progress after which it is ended; a turn takes as long as its requests do.
        progress: what changes while the server answers; None where that is not known at the moment.

    Raises:
        EngineError: it ended with an error, wrote nothing that can be read, or got nothing for so long; with the end of
            its log.
    """
    with tempfile.NamedTemporaryFile(prefix="pyprune-client-", suffix=".log") as log:
        path = Path(log.name)
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=client_environment()
        )
        try:
            if not _ended(process, patience, progress):
                raise engine_error(f"`vllm bench serve` got no token from the server for {patience:.0f} s", path)
        finally:
            process.kill()  # nothing where it has ended
            process.wait()
        if process.returncode:
            raise engine_error(f"`vllm bench serve` ended with status {process.returncode}", path)
        try:
            found = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise engine_error(f"`vllm bench serve` wrote no result that can be read ({error})", path) from error
        return dict(found)


def _ended(process: subprocess.Popen[bytes], patience: float, progress: Callable[[], object | None]) -> bool:
    """Wait for a client; False where so many seconds went by without progress."""
    seen, since = progress(), time.monotonic()
    while time.monotonic() - since < patience:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=min(patience, LOOK_S))
            return True
        now = progress()
        if now is not None and now != seen:
            seen, since = now, time.monotonic()
    return False


def counting_obstacle(found: Mapping[str, Any], new_tokens: int) -> str:
    """Why a turn does not count, a sentence without its full stop; empty where it does.

    Requests failed, or answers broke off: vLLM's client counts one that had begun as a success.

    Args:
        found: what the client wrote.
        new_tokens: of every answer.
    """
    if failed := found.get("failed"):
        why = next((str(text) for text in found.get("errors", ()) if text), "no reason was given")
        return f"{failed} of {found.get('num_prompts')} requests failed: {why.strip()[-500:].rstrip('.')}"
    short = sum(tokens != new_tokens for tokens in found.get("output_lens", ()))
    if not short:
        return ""
    return (
        f"{short} of {len(found['output_lens'])} answers have another length than the {new_tokens} tokens that were "
        "asked for: they broke off, and the turn does not count; measure again"
    )


def patience_with(load: Load, options: LoadOptions) -> float:
    """Seconds that a turn may get no token: an hour, and as long as its requests take to be sent at their rate."""
    return COMMAND_TIMEOUT_S + (options.requests_of(load) / load.rate if load.rate else 0.0)


def client_environment() -> dict[str, str]:
    """The environment of the client, which must not ask a proxy for the loopback interface."""
    ours = engine_environment()
    known = [ours.get(name) for name in ("no_proxy", "NO_PROXY")]
    direct = ",".join(dict.fromkeys([*(text for text in known if text), "127.0.0.1"]))
    return {**ours, "no_proxy": direct, "NO_PROXY": direct}


def measured_span(found: Mapping[str, Any]) -> tuple[float, float] | None:
    """When the first request was sent and the last one answered, by the clock of ``time.perf_counter``.

    Args:
        found: what the client wrote; None where it tells no times, as older releases do.

    Raises:
        EngineError: the times are of another form: another release of vLLM.
    """
    starts = found.get("start_times")
    if not starts:
        return None
    try:
        return min(starts), max(start + latency for start, latency in zip(starts, found["latencies"], strict=True))
    except (KeyError, TypeError, ValueError) as error:
        raise _untested(error) from error


def read_turn(found: Mapping[str, Any], **facts: Any) -> Turn:
    """Return one turn of the client's result.

    Args:
        found: what the client wrote, with --save-detailed.
        facts: the attributes of the turn that it does not know.

    Raises:
        EngineError: the result lacks what is needed: another release of vLLM.
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
        raise _untested(error) from error


def _untested(error: Exception) -> EngineError:
    return EngineError(
        f"`vllm bench serve` wrote a result without what is needed ({type(error).__name__}: {error}). It comes from a "
        "release of vLLM that was not tested; 0.32 was."
    )
