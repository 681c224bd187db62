"""The first process of a served checkpoint, with stand-ins for vLLM: what status it ends with, and what it hands on."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only on Linux is there a first process")

WAIT_S = 120
SCRIPT = """
import ctypes, os, signal, subprocess, sys, time
from pyprune.serving.supervise import supervised

def server():
{body}

if {subreaper}:
    ctypes.CDLL(None).prctl(36, 1)
sys.exit(supervised(server))
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
    orphan = "import os, time; os.fork() or (time.sleep(2), os._exit(0)); os._exit(0)"
    subprocess.run([sys.executable, "-c", orphan], check=True)
    parent = os.getppid()
    children = lambda: open(f"/proc/{{parent}}/task/{{parent}}/children").read().split()
    assert len(children()) == 2
    while len(children()) == 2:
        time.sleep(0.05)
    print("gone")
    sys.exit(0)
"""


def start(body: str, *, subreaper: bool = False) -> subprocess.Popen[str]:
    """A supervised stand-in, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(body=body.format(), subreaper=subreaper)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


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
def test_the_status_of_a_server_that_nobody_asked_to_end(body: str, status: int, said: str) -> None:
    process = start(body)
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == status
    assert said in errors
    if not said:
        assert errors == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_was_asked_to_end_has_status_0(number: signal.Signals) -> None:
    process = start(STOPPED)
    assert int(line(process)) != process.pid
    process.send_signal(signal.SIGUSR1)
    process.send_signal(number)
    said, errors = process.communicate(timeout=WAIT_S)
    assert sorted(map(int, said.split())) == sorted([signal.SIGUSR1, number])
    assert (process.returncode, errors) == (0, "")


def test_the_status_of_a_server_that_fails_while_it_stops_is_its_own() -> None:
    process = start("    signal.signal(signal.SIGTERM, lambda *_: os._exit(3)); print(flush=True); time.sleep(1000)")
    line(process)
    process.terminate()
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 3


def test_ctrl_c_of_a_terminal_reaches_the_server_once() -> None:
    """The terminal itself sends it to both processes."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", SCRIPT.format(body=STOPPED.format(), subreaper=False)])
    with open(terminal, "rb", buffering=0) as output:
        seen = b""
        while b"\n" not in seen:
            seen += output.read(64)
        os.write(terminal, b"\x03")
        with contextlib.suppress(OSError):  # how Linux says that nobody writes to it any more
            while more := output.read(64):
                seen += more
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert seen.splitlines()[1:] in ([b"^C2"], [b"^C", b"2"]), "one SIGINT, not two"


def test_a_killed_first_process_takes_the_server_with_it() -> None:
    process = start(STOPPED)
    line(process)
    process.kill()
    # Its standard output ends with the last process that holds it.
    said, _ = process.communicate(timeout=WAIT_S)
    assert list(map(int, said.split())) == [signal.SIGTERM]


def test_children_that_others_left_behind_are_collected() -> None:
    """As in a container, whose first process gets them; here by a setting of Linux."""
    process = start(ORPHAN, subreaper=True)
    said, errors = process.communicate(timeout=WAIT_S)
    assert (process.returncode, errors) == (0, "")
    assert said == "gone\n"
