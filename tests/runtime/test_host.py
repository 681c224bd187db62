"""The memory that a machine has left for a process, from tables of the kernel written by the tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pyprune.runtime.host import available_memory

GIB = 1 << 30


def machine(folder: Path, cgroup: str) -> Path:
    """Tables of a machine that has 8 GiB available."""
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(f"MemTotal: {16 * GIB >> 10} kB\nMemFree: 1 kB\nMemAvailable: {8 * GIB >> 10} kB\n")
    (folder / "self" / "cgroup").write_text(cgroup)
    return folder


def group(folder: Path, limit: str, used: int, cache: int, *, version: int = 2) -> None:
    """A cgroup's files."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    prefix = "" if version == 2 else "total_"
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{prefix}inactive_file {cache - 5}\n{prefix}active_file 5\n")


def test_what_is_available_counts_and_not_what_there_is(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path / "proc", ""), tmp_path / "none") == 8 * GIB


def test_a_cgroup_leaves_its_limit_less_what_is_used_and_no_cache(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path / "proc", "0::/a/b\n"), tmp_path / "groups"
    group(groups / "a" / "b", "max", 3 * GIB, GIB)
    assert available_memory(proc, groups) == 8 * GIB
    group(groups / "a", str(4 * GIB), 3 * GIB, GIB)  # the limit of the group above
    assert available_memory(proc, groups) == 2 * GIB
    group(groups / "a" / "b", str(GIB), 2 * GIB, 10)
    assert available_memory(proc, groups) == 0


@pytest.mark.parametrize("path", ["/pod/one", "/of/the/host"])
def test_a_cgroup_of_version_1_and_one_whose_path_a_container_does_not_see(tmp_path: Path, path: str) -> None:
    proc, groups = machine(tmp_path / "proc", f"5:cpu:/x\n4:memory:{path}\n0::/\n"), tmp_path / "groups"
    group(groups / "cpu" / "x", "1", 1, 5, version=1)
    group(groups / "memory", str(4 * GIB), 2 * GIB, GIB, version=1)
    assert available_memory(proc, groups) == 3 * GIB


def test_a_system_that_does_not_say_is_taken_to_have_all_its_memory(tmp_path: Path) -> None:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert available_memory(tmp_path / "none", tmp_path / "none") == whole
    assert 0 < available_memory() <= whole
