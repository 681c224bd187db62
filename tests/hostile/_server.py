"""Runs commands of pyprune in forked children of one process that has imported everything once.

A child is a real process: it has an exit code, a file of its own for stderr (also of what C and Rust print), a limit on
its memory and its time, and it cannot harm the next one. Starting Python and importing torch for every input would take
five seconds each; a fork takes a few milliseconds.

    python -m tests.hostile._server     reads one JSON list of runs a line, answers with one JSON list of outcomes
"""

from __future__ import annotations

import functools
import gc
import io
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import tqdm

MACHINE_GUARD = 3 << 30
"""Bytes of address space that a child may add: far beyond what any case is allowed, and less than the machine has."""

COLOURS = ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TERMINAL_WIDTH")
"""Make a program believe that a file is a terminal."""


@dataclass(frozen=True)
class Run:
    """One command.

    Attributes:
        arguments: of ``pyprune``.
        folder: the current folder.
        seconds: after which it is killed.
        file_bytes: the largest file that it may write, as ``ulimit -f``; None = no limit.
        signals: (seconds after the start, number) of signals that it gets.
    """

    arguments: Sequence[str]
    folder: str
    seconds: float = 20.0
    file_bytes: int | None = None
    signals: Sequence[tuple[float, int]] = ()


@dataclass(frozen=True)
class Outcome:
    """What became of it.

    Attributes:
        code: exit code; minus the signal's number if one killed it.
        stdout, stderr: what it printed, undecodable bytes escaped.
        seconds: how long it ran.
        growth: bytes by which its resident memory grew at most.
    """

    code: int
    stdout: str
    stderr: str
    seconds: float
    growth: int


class Server:
    """The client's side: starts the process and talks to it."""

    def __init__(self, process: subprocess.Popen[str], scratch: Path) -> None:
        self._process = process
        self._scratch = scratch

    @classmethod
    @contextmanager
    def started(cls, scratch: Path, warm_up: Sequence[Sequence[str]] = ()) -> Iterator[Self]:
        """A server that ends with the block.

        Args:
            scratch: where what is printed is kept for a moment.
            warm_up: commands that it runs in itself first, so that what they import is there in every child.
        """
        env = {name: value for name, value in os.environ.items() if name not in COLOURS}
        env |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
        command = [sys.executable, "-m", __name__, str(scratch)]
        root = Path(__file__).parents[2]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root, env=env
        ) as process:
            server = cls(process, scratch)
            try:
                server._ask([list(map(str, arguments)) for arguments in warm_up])
                yield server
            finally:
                process.kill()

    def run(self, *runs: Run) -> list[Outcome]:
        """Run commands, all at the same time, to their ends."""
        return [Outcome(**answer) for answer in self._ask([asdict(run) for run in runs])]

    def _ask(self, question: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the server of the hostile cases has ended"
        return json.loads(answer)


# --- the server's side ---


def serve(scratch: Path) -> None:
    """Answer the requests on stdin."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a warm-up prints must not look like an answer
    # tqdm's own lock is shared with every child of the server: one that is killed while it holds it would stop them
    # all. It is set here because each class of bars keeps for good the lock that it finds at its first bar.
    tqdm.std.tqdm.set_lock(threading.RLock())
    _warm_up(json.loads(sys.stdin.readline()))
    print(json.dumps("ready"), file=answers, flush=True)
    gc.freeze()
    for line in sys.stdin:
        outcomes = _run_all([Run(**run) for run in json.loads(line)], scratch)
        print(json.dumps([asdict(outcome) for outcome in outcomes]), file=answers, flush=True)


def _warm_up(commands: Sequence[Sequence[str]]) -> None:
    import gguf  # noqa: F401
    import peft  # noqa: F401
    import torch
    import transformers  # noqa: F401  (keeps the stderr that it finds for its log, so not below)
    import typer.main

    from pyprune.cli.app import main

    # Typer builds all commands anew at every start, which takes as long as a fork: once is enough for all children.
    typer.main.get_command = functools.cache(typer.main.get_command)
    torch.set_num_threads(1)
    for arguments in commands:
        sys.argv = ["pyprune", *arguments]
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said), suppress(SystemExit):
            main()


@dataclass
class _Child:
    run: Run
    place: Path
    pid: int
    began: float
    ready: float | None = None
    sent: int = 0
    outcome: Outcome | None = None


def _run_all(runs: Sequence[Run], scratch: Path) -> list[Outcome]:
    children = [_start(run, scratch / str(number)) for number, run in enumerate(runs)]
    before = _memory()["VmRSS"]
    while any(child.outcome is None for child in children):
        for child in (c for c in children if c.outcome is None):
            _look_after(child, before)
        time.sleep(0.002)
    return [child.outcome for child in children if child.outcome is not None]


def _start(run: Run, place: Path) -> _Child:
    place.mkdir(exist_ok=True)
    for name in ("out", "err"):
        (place / name).write_bytes(b"")  # a child that is killed at once would leave what the last one printed
    sys.stdout.flush()
    sys.stderr.flush()
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _be_the_child(run, place)
    return _Child(run, place, pid, began)


def _be_the_child(run: Run, place: Path) -> None:
    """Become the command, as Python would run it; never returns."""
    code = 1
    try:
        os.setsid()
        for number, name in enumerate((os.devnull, place / "out", place / "err")):
            flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            os.dup2(os.open(name, flags), number)
        os.chdir(run.folder)
        limit = _memory()["VmSize"] + MACHINE_GUARD
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if run.file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (run.file_bytes, run.file_bytes))
        code = _exit_code(run.arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _exit_code(arguments: Sequence[str]) -> int:
    from pyprune.cli.app import main

    sys.argv = ["pyprune", *arguments]
    sys.modules["__main__"].__package__ = None  # or usage errors name this module as the program
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _look_after(child: _Child, before: int) -> None:
    pid, status, usage = os.wait4(child.pid, os.WNOHANG)
    seconds = time.monotonic() - child.began
    if pid:
        printed = [(child.place / name).read_text(errors="backslashreplace") for name in ("out", "err")]
        growth = usage.ru_maxrss * 1024 - before
        child.outcome = Outcome(os.waitstatus_to_exitcode(status), *printed, seconds, growth)
        return
    if child.run.signals:
        _send_what_is_due(child)
    if seconds > child.run.seconds:
        os.killpg(child.pid, signal.SIGKILL)


def _send_what_is_due(child: _Child) -> None:
    """Signals count from when the command is ready for them: a fork on a busy machine is not at once."""
    now = time.monotonic()
    if child.ready is None:
        if not _catches(child.pid, signal.SIGTERM):
            return
        child.ready = now
    due = [number for after, number in child.run.signals if child.ready + after <= now]
    for number in due[child.sent :]:
        os.kill(child.pid, number)
    child.sent = len(due)


def _catches(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def _memory() -> Mapping[str, int]:
    """Bytes of this process, by the names of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    found = (line.partition(":") for line in lines if line.endswith("kB"))
    return {name: int(value.split()[0]) * 1024 for name, _, value in found}


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
