"""Which installed packages are newer than what pyprune was tried with: the upper bounds that it was published with."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from multiprocessing import parent_process

from packaging.requirements import Requirement
from packaging.version import Version

from pyprune.runtime.progress import warn


def untried_releases() -> Iterator[str]:
    """Name and release of each installed package that is at or beyond an upper bound, with that bound."""
    try:
        asked = [Requirement(line) for line in requires("pyprune") or ()]
    except PackageNotFoundError:  # the sources, not installed
        return
    for need in asked:
        bounds = [Version(one.version) for one in need.specifier if one.operator == "<"]
        try:
            installed = Version(version(need.name))
        except PackageNotFoundError:
            continue
        if bounds and installed >= min(bounds):
            yield f"{need.name} {installed} (tried: before {min(bounds)})"


def warn_of_untried_releases() -> None:
    """Name them in one warning; processes that another one started leave that to it."""
    if parent_process() is None and (found := ", ".join(dict.fromkeys(untried_releases()))):
        warn(f"Newer than what pyprune was tried with: {found}. Check what comes out, or install an older release.")
