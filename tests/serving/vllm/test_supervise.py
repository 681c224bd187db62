"""The first process of a served checkpoint, with stand-ins for vLLM: what status it ends with, and what it hands on."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import BinaryIO

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only on Linux is there a first process")

WAIT_S = 120
SCRIPT = """
import ctypes, os, signal, subprocess, sys, time
from pyprune.serving.vllm.supervise import supervise_run

def server():
{body}

if {subreaper}:
    ctypes.CDLL(None).prctl(36, 1)
sys.exit(supervise_run(server))
"""
STOPPED = """
    received = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, _: received.append(number))
    print(os.getpid(), flush=True)
    while not {{signal.SIGTERM, signal.SIGINT}} & set(received):
        time.sleep(0.05)
    time.sleep(0.5)
    print(*map(int, received), flush=True)
"""
ORPHAN = """
    # It ends when its standard input does.
    read, write = os.pipe()
    orphan = "import os; os.fork() or (os.read(0, 1), os._exit(0)); os._exit(0)"
    subprocess.run([sys.executable, "-c", orphan], stdin=read, check=True)
    parent = os.getppid()
    children = lambda: open(f"/proc/{{parent}}/task/{{parent}}/children").read().split()
    assert len(children()) == 2
    os.close(write)
    while len(children()) == 2:
        time.sleep(0.05)
    print("gone")
    sys.exit(0)
"""


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts supervised stand-ins, each in a session of its own; what is left of them goes with the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(body: str, *, subreaper: bool = False) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT.format(body=body.format(), subreaper=subreaper)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=WAIT_S)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("    pass", 1, "The server ended without being asked to"),
        ("    sys.exit(0)", 0, ""),
        ("    sys.exit(2)", 2, ""),
        ("    raise ValueError('no memory')", 1, "no memory"),
        ("    os.kill(os.getpid(), signal.SIGKILL)", 137, ""),
    ],
)
def test_the_status_of_a_server_that_nobody_asked_to_end(start: Start, body: str, status: int, said: str) -> None:
    process = start(body)
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == status
    assert said in errors
    if not said:
        assert errors == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_was_asked_to_end_has_status_0(start: Start, number: signal.Signals) -> None:
    process = start(STOPPED)
    assert int(line(process)) != process.pid
    process.send_signal(signal.SIGUSR1)
    process.send_signal(number)
    said, errors = process.communicate(timeout=WAIT_S)
    assert sorted(map(int, said.split())) == sorted([signal.SIGUSR1, number])
    assert (process.returncode, errors) == (0, "")


@pytest.mark.parametrize(
    ("body", "status"),
    [("signal.signal(signal.SIGTERM, lambda *_: os._exit(3))", 3), ("pass", 0)],
    ids=["it fails while it stops", "it does not listen to signals yet"],
)
def test_the_status_of_a_server_that_is_asked_to_end_and_does_not_return(start: Start, body: str, status: int) -> None:
    process = start(f"    {body}; print(flush=True); time.sleep(1000)")
    line(process)
    process.terminate()
    process.communicate(timeout=WAIT_S)
    assert process.returncode == status


def on_a_terminal(body: str) -> tuple[int, BinaryIO, bytes]:
    """A supervised stand-in that leads the session of a terminal: its process, the other end, and its first line."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", SCRIPT.format(body=body.format(), subreaper=False)])
    output = open(terminal, "rb", buffering=0)  # noqa: SIM115 - the caller closes it
    seen = b""
    while b"\n" not in seen:
        seen += output.read(64)
    return pid, output, seen


def test_ctrl_c_of_a_terminal_reaches_the_server_once() -> None:
    """The terminal itself sends it to both processes."""
    pid, terminal, seen = on_a_terminal(STOPPED)
    with terminal:
        os.write(terminal.fileno(), b"\x03")
        with contextlib.suppress(OSError):  # how Linux says that nobody writes to it any more
            while more := terminal.read(64):
                seen += more
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert seen.splitlines()[1:] in ([b"^C2"], [b"^C", b"2"]), "one SIGINT, not two"


def test_a_closed_terminal_ends_the_server() -> None:
    """It tells the first process alone."""
    pid, terminal, _ = on_a_terminal("    print(flush=True); time.sleep(1000)")
    terminal.close()
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP


def test_a_measured_server_ends_with_a_measurement_that_was_killed() -> None:
    """It is in a session of its own; nothing else would end it, its memory and its port stay taken."""
    server = (
        "from pyprune.serving.vllm import launch; launch.run_vllm = lambda: (print('up', flush=True), time.sleep(600))"
    )
    measured = f"import sys, time; {server}; sys.argv[1:] = ['serve']; launch.main()"
    script = (
        "import os, subprocess, sys, time\n"
        "from pyprune.serving.load.server import server_environment\n"
        f"command = [sys.executable, '-c', {measured!r}]\n"
        "subprocess.Popen(command, env=server_environment(), stdin=subprocess.DEVNULL, start_new_session=True)\n"
        "time.sleep(600)"
    )
    measurement = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert measurement.stdout is not None
    assert measurement.stdout.readline() == "up\n"
    measurement.kill()
    # The pipe closes when nobody is left who could write to it.
    assert measurement.communicate(timeout=WAIT_S)[0] == ""


def test_a_killed_first_process_takes_the_server_with_it(start: Start) -> None:
    process = start(STOPPED)
    line(process)
    process.kill()
    # Its standard output ends with the last process that holds it.
    said, _ = process.communicate(timeout=WAIT_S)
    assert list(map(int, said.split())) == [signal.SIGTERM]


def test_children_that_others_left_behind_are_collected(start: Start) -> None:
    """As in a container, whose first process gets them; here by a setting of Linux."""
    process = start(ORPHAN, subreaper=True)
    said, errors = process.communicate(timeout=WAIT_S)
    assert (process.returncode, errors) == (0, "")
    assert said == "gone\n"
