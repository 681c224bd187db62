"""The memory that the machine has left for a process. Does not import torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

VERSIONS = (("memory.max", "memory.current", ""), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"))
"""Of cgroups 2 and 1: the files of the limit and of the used memory, and the prefix of names in memory.stat."""


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that a process may still take: the available memory, or less if its cgroups allow less.

    Swap is not counted. On systems that do not report available memory (not Linux), it is all memory.

    Args:
        proc: folder of the kernel's tables.
        cgroups: folder of the cgroups.
    """
    available = _figures(proc / "meminfo").get("MemAvailable:")
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if available is None else available * 1024
    return min([machine, *(_left(folder) for folder in _cgroups_of_process(proc, cgroups))])


def _cgroups_of_process(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroups and of all above them, whose limits count as well.

    A container may see paths of its host that it does not have; its cgroup is then the top folder.
    """
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "" or "memory" in controllers.split(","):  # of version 2, or the one of version 1
            top = cgroups / controllers
            folder = top / path.strip("/")
            yield from (each for each in (folder, *folder.parents) if each.is_relative_to(top))


def _left(folder: Path) -> int:
    """Return the bytes that a cgroup may still take; its file cache counts as free."""
    for limit_name, used_name, prefix in VERSIONS:
        limit, used = _text(folder / limit_name).strip(), _text(folder / used_name).strip()
        if limit.isdigit() and used.isdigit():
            kinds = _figures(folder / "memory.stat")
            cache = sum(kinds.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
            return max(0, int(limit) - int(used) + cache)
    return sys.maxsize  # no limit


def _figures(table: Path) -> dict[str, int]:
    """Read a table of names and numbers, without units."""
    rows = [line.split() for line in _text(table).splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
