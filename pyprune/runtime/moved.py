"""Modules under the names that the documentation gave them before; each warns once, and goes with the next release."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "pyprune.budget": "pyprune.fit",
    "pyprune.budget.options": "pyprune.fit.options",
    "pyprune.checkpoint.compact": "pyprune.run.cut_on_disk",
    "pyprune.recipe": "pyprune.run.recipe",
}
"""Former name -> today's."""


class MovedModules(MetaPathFinder, Loader):
    """Import a module of :data:`MOVED` from its new place, with a FutureWarning that names it."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Answer for the former names alone."""
        return ModuleSpec(name, self, is_package=name == "pyprune.budget") if name in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module with the names of the one that took its place."""
        new = MOVED[module.__name__]
        warnings.warn(f"{module.__name__} is called {new} now; import that.", FutureWarning, stacklevel=2)
        module.__dict__.update({k: v for k, v in vars(import_module(new)).items() if not k.startswith("__")})


def install() -> None:
    """Answer for former names from now on."""
    sys.meta_path.insert(0, MovedModules())
