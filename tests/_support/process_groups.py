"""The living processes of a group, as /proc has them: command lines, and the memory that they hold now."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

MEMORY_KINDS = {"RssAnon": "anonymous", "RssFile": "file", "RssShmem": "shared"}
"""Field of ``status`` in /proc -> kind of memory: private, pages of files (each process counts shared ones), shared."""
_FIELD = re.compile(rf"^({'|'.join(MEMORY_KINDS)}):\s+(\d+) kB$", re.MULTILINE)


def group_processes(group: int) -> dict[int, str]:
    """Return process id -> command line; ended processes that nobody collected have none and do not count."""
    return {int(folder.name): command for folder, command in _commands(group)}


def group_memory(group: int) -> dict[str, dict[str, int]]:
    """Return program -> kind of memory -> bytes held now; processes of one name are added up."""
    memory: dict[str, dict[str, int]] = {}
    for folder, command in _commands(group):
        with contextlib.suppress(OSError):
            status = (folder / "status").read_text(errors="replace")
            held = memory.setdefault(command.split()[0].rpartition("/")[2], dict.fromkeys(MEMORY_KINDS.values(), 0))
            for field, kilobytes in _FIELD.findall(status):
                held[MEMORY_KINDS[field]] += 1024 * int(kilobytes)
    return memory


def group_resident_bytes(group: int) -> int:
    """Return the sum of the bytes that each process holds now."""
    return sum(sum(kinds.values()) for kinds in group_memory(group).values())


def _commands(group: int) -> Iterator[tuple[Path, str]]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            command = b" ".join(words).decode("utf-8", errors="replace").strip()
            if command and os.getpgid(int(folder.name)) == group:
                yield folder, command
