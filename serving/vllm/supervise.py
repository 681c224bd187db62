"""Run a server as a child process, to distinguish an end that was asked for from any other.

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
"""Status of a child in which ``run`` returned; ``--help`` and a wrong option exit by themselves."""

_HANDED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
_ASKING = {signal.SIGTERM, signal.SIGINT}
_PR_SET_PDEATHSIG = 1

END_WITH = "PYPRUNE_END_WITH"
"""Variable with the id of a process: when that is killed, the measured server ends too."""


def supervise_run(run: Callable[[], object]) -> int:
    """Call ``run`` in a child process and return the status with which this process is to end.

    It is the child's status (128 plus the number of a signal that killed it), with two exceptions. Where ``run``
    returned, it is 0 after SIGTERM or Ctrl-C, and otherwise 1, with a line on stderr. It is also 0 where one of these
    two signals killed a child that did not handle it yet.

    Signals to this process are handed on. If it is killed itself, the child gets SIGTERM. Orphaned children are waited
    for, as the first process of a container has to. The function returns in the child as well, with the status for its
    end. Outside of Linux ``run`` is called in this process.
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
    """Send this process SIGTERM when its parent is killed."""
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
            # From a process: a terminal signals the child as well, except with SIGHUP when it is closed.
            if info.si_code <= 0 or info.si_signo == signal.SIGHUP:
                os.kill(child, info.si_signo)
        elif (status := _reap(child)) is not None:
            return (status if status >= 0 else 128 - status), asked


def _reap(child: int) -> int | None:
    """Wait for all children that have ended; the exit code of this one, None while it lives."""
    exit_code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return exit_code
        if pid == 0:
            return exit_code
        if pid == child:
            exit_code = os.waitstatus_to_exitcode(status)
