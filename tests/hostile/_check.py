"""The one checker of all hostile cases."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from pathlib import Path

from tests.hostile._cases import Case
from tests.hostile._server import Outcome, Run, Server

MOST_CHARACTERS = 4_500

_ESCAPE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_PROGRESS = re.compile(
    r"^(.+(: (\w+ )?[\d,.kMGB]+ (done|of .*)|: +\d+%\|.*|: \d+it \[.*)|Memory at the peak: at most about .*"
    r"|Loading torch and .*)$"
)
"""Lines of pyprune and bars of Transformers: how far the work has come, what it holds. No part of a message."""
_USAGE = re.compile(r"^(Usage: |╭─ Error)")


def check(server: Server, case: Case, folder: Path) -> Outcome:
    """Build a case, run it, and assert everything that is asked of it."""
    for step in case.steps:
        step(folder)
    before = snapshot(folder)
    (outcome,) = server.run(Run(case.arguments, str(folder), seconds=case.seconds))
    said = outcome.stderr[-3000:]
    assert outcome.code in case.codes, f"exit code {outcome.code}: {said}"
    check_message(outcome, case)
    assert outcome.growth < case.growth, f"{outcome.growth / 1e6:.0f} MB: {said}"
    if outcome.code:
        assert outcome.stdout == "", "a command that fails prints no figures"
        assert snapshot(folder) == before, said
    if case.then is not None:
        case.then(folder)
    return outcome


def check_message(outcome: Outcome, case: Case) -> None:
    """One line or two, whole, in plain characters. A usage error, which Typer draws as a box, is a form of its own."""
    said = without_progress(outcome.stderr)
    assert "Traceback" not in said, said[-3000:]
    assert _ESCAPE.search(said) is None, repr(said[-3000:])
    assert len(said) <= MOST_CHARACTERS, f"{len(said):,} characters: {said[:500]}"
    assert case.says in said
    if outcome.code == 0:
        return
    if _USAGE.match(said):
        assert len(said.splitlines()) <= 8, said
        return
    # A run may warn before it is stopped; on a slow machine it is stopped later.
    lines = [line for line in said.splitlines() if not line.startswith("Warning: ")]
    assert 1 <= len(lines) <= case.lines, said
    assert any(line.startswith(("Error: ", "Interrupted. ")) for line in lines), said


def check_left(outcome: Outcome, folder: Path, before: dict[str, str]) -> None:
    """After a failure everything is as it was, but for what the message says is kept to go on from."""
    after = snapshot(folder)
    if "--resume" not in outcome.stderr:
        assert after == before, outcome.stderr
    assert {name: content for name, content in after.items() if not name.startswith(".c.work")} == before


def without_progress(text: str) -> str:
    """What is left of stderr without bars and counts, and without empty lines."""
    return "\n".join(line for line in re.split(r"[\r\n]", text) if line.strip() and not _PROGRESS.match(line))


def snapshot(folder: Path) -> dict[str, str]:
    """Everything below a folder, hidden files too: path -> kind and content."""
    found = {}
    for root, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(root) / name
            found[str(path.relative_to(folder))] = _content(path)
    return found


def _content(path: Path) -> str:
    status = path.lstat()
    if path.is_symlink():
        return f"link to {os.readlink(path)}"
    if not stat.S_ISREG(status.st_mode):
        return f"{stat.filemode(status.st_mode)} {status.st_rdev}"
    if status.st_size > 8 << 20:
        return f"{status.st_size} bytes, changed at {status.st_mtime_ns}"
    return hashlib.sha256(path.read_bytes()).hexdigest()
