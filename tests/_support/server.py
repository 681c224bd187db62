"""The real server as a separate process on loopback: started, asked over HTTP and stopped, with no process left."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pyprune.serving.engines import engine_environment
from tests._support.answers import Answer, answer_in, completion_request

START_S, STOP_S, ANSWER_S = 900.0, 60.0, 120.0
OPTIONS = ("--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "256")


class Server:
    """Runs ``command`` until the block ends.

    Args:
        command: everything up to vLLM's options, such as ``["vllm", "serve", folder]``.
        model: the name that requests give, which is the folder.
        log: file for everything that the server prints.
        environment: added to the engine's usual variables.
        options: vLLM's options after the command.
    """

    def __init__(
        self,
        command: Sequence[str],
        model: Path,
        log: Path,
        environment: Mapping[str, str] | None = None,
        options: Sequence[str] = OPTIONS,
    ) -> None:
        self.model, self.log = str(model), log
        self.port = _free_port()
        variables = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **(environment or {})}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *options, "--port", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=engine_environment() | variables,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # The session was made for this server alone: nothing else can be reached through it.
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def wait_until_healthy(self) -> Self:
        """Return when /health answers; fail with the log's end when the server dies or takes too long."""
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                self._get("/health")
                return self
            time.sleep(0.25)
        raise AssertionError(f"no healthy server (exit status {self.process.poll()}):\n{self.text()[-3000:]}")

    def wait_until_it_ends(self) -> int:
        """Return the exit status of a server that ends without a signal."""
        return self.process.wait(timeout=START_S)

    def complete(self, prompt: Sequence[int], model: str | None = None) -> Answer:
        """One greedy completion of token ids, with log probabilities of the prompt and of every new token.

        Args:
            prompt: token ids.
            model: the name of an adapter; None = the model itself.
        """
        return answer_in(self.post("/v1/completions", **completion_request(model or self.model, prompt)), prompt)

    def metric(self, name: str, label: str = "") -> float:
        """The value of a Prometheus metric, summed over the lines that hold this label, such as `le="512.0"`."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=ANSWER_S) as reply:
            lines = reply.read().decode().splitlines()
        found = [line for line in lines if line.startswith(name + "{") and label in line]
        assert found, f"/metrics has no {name}"
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def stop(self, by: signal.Signals = signal.SIGTERM) -> int:
        """Ask the server to stop, as a supervisor or Ctrl-C does; return its exit status."""
        self.process.send_signal(by)
        status = self.process.wait(timeout=STOP_S)
        end = time.monotonic() + STOP_S
        while self.processes() and time.monotonic() < end:
            time.sleep(0.1)
        return status

    def processes(self) -> list[int]:
        """The living processes of the server's session (ended ones that nobody has collected yet do not count)."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == self.process.pid and state != "Z":
                    found.append(int(folder.name))
        return found

    def left_over(self, patience: float = 30) -> list[int]:
        """The processes that are still there this many seconds after the server ended (helpers end a moment later)."""
        deadline = time.monotonic() + patience
        while (found := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return found

    def text(self) -> str:
        """Everything that the server printed so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def _get(self, path: str) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5):
            pass

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """Send JSON and read the answer, which is JSON as well."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
            answer: dict[str, Any] = json.load(reply)
        return answer


def _free_port() -> int:
    """A port that nothing else takes until the server binds it, half a minute later.

    Sockets that ask for any port get one above 32768. Each worker of pytest-xdist draws from a separate part.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = 20000 + 1000 * (worker % 10)
    for port in random.sample(range(first, first + 1000), 1000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"no port is free from {first} to {first + 999}")
