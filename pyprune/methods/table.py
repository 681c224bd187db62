"""The table of installed methods that `pyprune methods` prints and README shows. Imports no torch."""

from __future__ import annotations

from pyprune.methods.base import Method
from pyprune.methods.registry import get_method, method_modules, own_methods, presets_of
from pyprune.runtime.report import Table

REMOVES = {
    "layers": "layers",
    "hidden": "hidden channels",
    "structures": "heads, FFN or hidden channels",
    "experts": "experts",
}
"""Axis of a method -> name of the removed parts."""


def methods_table(*, installed: bool = True) -> Table:
    """Return a row for every method: what it is, what it removes, whether it can train towards the cut, its presets
    (-plain is the preset NAME-plain).

    Args:
        installed: include the methods of other packages, which are imported for this.

    Raises:
        ConfigError: a package that brings one is broken.
    """
    names = method_modules() if installed else own_methods()
    return Table(
        "Methods",
        ("method", "what it does", "removes", "can train towards the cut", "presets"),
        tuple(_row(get_method(name)) for name in names),
    )


def _row(method: Method) -> tuple[str, str, str, str, str]:
    trains = "no" if method.regularise is None else "with -anneal and -paper"
    return (
        method.name,
        method.summary,
        method.removes or REMOVES[method.axis],
        trains,
        ", ".join(name.removeprefix(method.name) or name for name in presets_of(method)),
    )
