"""A server as a child process, so that its end can be told apart: asked for, or not.

vLLM 0.32 ends with status 0 also when its engine has died, and what restarts services on failure (systemd, Docker,
Kubernetes) then leaves it down. The first process is therefore a small one that only waits, hands signals on and
chooses the status.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

ENDED_BY_ITSELF = 1
_RETURNED = 70
"""Status of a child that came to its end without an exit of its own, which ``--help`` and a wrong option have."""

_HANDED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
_ASKING = {signal.SIGTERM, signal.SIGINT}
_PR_SET_PDEATHSIG = 1

END_WITH = "PYPRUNE_END_WITH"
"""Variable with the process that a measured server is to end with, which may be killed and then ends none itself."""


def supervised(run: Callable[[], object]) -> int:
    """Call ``run`` in a child process and return the status with which this process is to end.

    It is the child's own, 128 and the number for one that a signal killed, with two exceptions. Where ``run`` returned
    it is 0 after SIGTERM or Ctrl-C, and 1, with a line on stderr, without; and it is 0 where one of these two killed a
    child that did not handle it yet. Signals that this process gets are handed on. If it is killed itself, the child
    gets SIGTERM. Children that others left behind are waited for, as the first process of a container has to. Returns
    in the child as well, with the status for its end. Only on Linux is there a child.
    """
    if sys.platform != "linux":
        run()
        return 0
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, the status of a child is lost
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDED_ON | {signal.SIGCHLD})
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        end_with(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        run()
        return _RETURNED
    status, asked = _wait(child)
    if asked and status in (_RETURNED, *(128 + number for number in _ASKING)):
        return 0
    if status != _RETURNED:
        return status
    print("The server ended without being asked to; the end of vLLM's log says why.", file=sys.stderr, flush=True)
    return ENDED_BY_ITSELF


def end_with(parent: int) -> None:
    """Have this process asked to end when its parent is killed."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it was killed before that
        sys.exit(128 + signal.SIGKILL)


def _wait(child: int) -> tuple[int, bool]:
    """Hand signals on until a child ends: (its status as a shell writes it, whether it was asked to end)."""
    asked = False
    while True:
        info = signal.sigwaitinfo(_HANDED_ON | {signal.SIGCHLD})
        if info.si_signo != signal.SIGCHLD:
            asked = asked or info.si_signo in _ASKING
            # From a process. What a terminal sends the child has as well, but for SIGHUP, when it is closed.
            if info.si_code <= 0 or info.si_signo == signal.SIGHUP:
                os.kill(child, info.si_signo)
        elif (status := _reap(child)) is not None:
            return (status if status >= 0 else 128 - status), asked


def _reap(child: int) -> int | None:
    """Wait for all children that have ended; the exit code of this one, None while it lives."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            found = os.waitstatus_to_exitcode(status)
