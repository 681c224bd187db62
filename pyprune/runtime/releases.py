"""Warn of installed packages that pyprune was not tried with: outside of its published bounds."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from multiprocessing import parent_process

from packaging.requirements import Requirement
from packaging.version import Version

from pyprune.runtime.progress import warn


def untried_releases() -> Iterator[str]:
    """Yield name and release of each installed package with an upper bound that is outside of its bounds."""
    try:
        asked = [Requirement(line) for line in requires("pyprune") or ()]
    except PackageNotFoundError:  # the sources, not installed
        return
    for need in asked:
        bounds = {one.operator: Version(one.version) for one in need.specifier}
        try:
            installed = Version(version(need.name))
        except PackageNotFoundError:
            continue
        if "<" not in bounds:
            continue
        if installed >= bounds["<"]:
            yield f"{need.name} {installed} (tried: before {bounds['<']})"
        elif installed < bounds.get(">=", installed):
            yield f"{need.name} {installed} (tried: from {bounds['>=']} on)"


def warn_of_untried_releases() -> None:
    """Print one warning of them, in the first process alone."""
    if parent_process() is None and (found := ", ".join(dict.fromkeys(untried_releases()))):
        warn(f"pyprune was not tried with {found}. Check the results, or install a release that was tried.")
