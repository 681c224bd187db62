"""Run one `vllm serve` in a separate process group on the loopback interface."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from pyprune.serving.engines import LOAD_TIMEOUT_S, ModelProcess, measured_environment
from pyprune.serving.load.capacity import ServerFacts, server_facts
from pyprune.serving.vllm.supervise import END_WITH

HOST = "127.0.0.1"
POLL_S = 0.1
ANSWER_SHOWN = 500
"""Characters of an answer that an error quotes."""
START_PATIENCE = 8
"""A start may take this many times as long as it may be silent."""
TOKENS = re.compile(r"^vllm:(?:prompt|generation)_tokens_total.*", re.MULTILINE)


class Server(ModelProcess):
    """A server that answers, until it is closed.

    Args:
        command: that starts it, up to its address.
        model: its name, for messages.
        environment: of its processes; None = :func:`server_environment`.
        cwd: folder that it is started in; None = this process's.
        patience: seconds in which it must be healthy, counted from the last that it wrote.

    Attributes:
        url: its address.
        load_seconds: from its start until it was healthy.
        facts: that it reports.

    Raises:
        EngineError: it ended, wrote nothing for ``patience`` seconds and was not healthy, or was not healthy after
            eight times that; the message has the end of its log.
    """

    def __init__(
        self,
        command: Sequence[str],
        model: str,
        *,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        patience: float = LOAD_TIMEOUT_S,
    ) -> None:
        self._port = free_port()
        self.url = f"http://{HOST}:{self._port}"
        started, address = time.perf_counter(), ["--host", HOST, "--port", str(self._port)]
        super().__init__([*command, *address], "server", model, environment or server_environment(), cwd=cwd)
        try:
            self._wait_until_healthy(started, patience)
            self.load_seconds = time.perf_counter() - started
            log = Path(self._log.name)
            self.facts: ServerFacts = server_facts(
                log.read_text(encoding="utf-8", errors="replace"), self.get("/metrics") or ""
            )
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Return the id of the server's first process, and of the group of all its processes."""
        return self._process.pid

    def exit_status(self, patience: float = 0.0) -> int | None:
        """Return the status of the first process, after waiting ``patience`` seconds at most; None while it lives."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=patience)
        return self._process.returncode

    def check(self) -> None:
        """Raise :class:`EngineError` if the server has ended."""
        if self._process.poll() is not None:
            raise self.error(f"The server of {self.model} ended with status {self._process.returncode}")

    def get(self, path: str) -> str | None:
        """Return the answer to a request; None without one, or for another status than 200."""
        answer = self._request("GET", path, timeout=10)
        return answer[1] if answer is not None and answer[0] == HTTPStatus.OK else None

    def metrics(self) -> str:
        """Return the answer of /metrics.

        Raises:
            EngineError: there is none.
        """
        return self._text_of(self._request("GET", "/metrics", timeout=10), "/metrics")

    def tokens(self) -> tuple[str, ...] | None:
        """Return the lines of /metrics that count tokens; they change while the server answers requests.

        None without an answer, or without such lines.
        """
        return tuple(TOKENS.findall(self.get("/metrics") or "")) or None

    def post(self, path: str, body: object, timeout: float = 120) -> str:
        """Return the answer to a request with a body, which is sent as JSON.

        Raises:
            EngineError: there is none in ``timeout`` seconds, or its status is not 200.
        """
        return self._text_of(self._request("POST", path, json.dumps(body), timeout=timeout), path)

    def _text_of(self, answer: tuple[int, str] | None, path: str) -> str:
        """Return the text of an answer, or raise the error if there is none."""
        if answer is None:
            self.check()
            raise self.error(f"The server of {self.model} gave no answer to {path}")
        status, text = answer
        if status != HTTPStatus.OK:
            said = " ".join(text.split())[:ANSWER_SHOWN]
            raise self.error(f"The server of {self.model} answered {path} with status {status}: {said}")
        return text

    def _request(self, method: str, path: str, body: str | None = None, *, timeout: float) -> tuple[int, str] | None:
        """Ask the server: status and text; None where it gives no answer."""
        # Not urllib, which would use a proxy of the user's.
        headers = {} if body is None else {"Content-Type": "application/json"}
        with closing(HTTPConnection(HOST, self._port, timeout=timeout)) as connection:
            try:
                connection.request(method, path, body, headers)
                answer = connection.getresponse()
                text = answer.read().decode("utf-8", errors="replace")
            except (OSError, HTTPException):
                return None
        return answer.status, text

    def ask_to_end(self) -> None:
        """See :meth:`ModelProcess.ask_to_end`."""
        self._process.terminate()

    def _wait_until_healthy(self, started: float, patience: float) -> None:
        written, last = 0, started + START_PATIENCE * patience  # some logs go on while nothing else does
        while self.get("/health") is None:
            self.check()
            if (
                size := os.stat(self._log.name).st_size
            ) != written:  # a large model is read, and compiled, part by part
                written, started = size, time.perf_counter()
            if time.perf_counter() > last:
                raise self.error(f"The server of {self.model} was not healthy for {START_PATIENCE * patience:.0f} s")
            if time.perf_counter() - started > patience:
                raise self.error(f"The server of {self.model} wrote nothing and was not healthy for {patience:.0f} s")
            time.sleep(POLL_S)


def server_environment() -> dict[str, str]:
    """Return the environment of a measured server: it answers without a key, and its log has the facts."""
    ours = {name: value for name, value in measured_environment().items() if name != "VLLM_API_KEY"}
    return {**ours, END_WITH: str(os.getpid()), "VLLM_LOGGING_LEVEL": "INFO", "VLLM_CONFIGURE_LOGGING": "1"}


def free_port() -> int:
    """Return a port on which nothing listens at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
