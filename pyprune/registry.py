"""Methods, found by looking: one file a method under regularise/ and score/, imported only when asked for.

A method file defines ``METHOD`` whose ``name`` is the file's name. Nothing is registered by import, and no
list is kept by hand; two files of one name are an error.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pyprune.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from pyprune.regularise.base import Method

_PACKAGES = ("pyprune.regularise", "pyprune.score")
_NOT_METHODS = ("base", "presets")


@cache
def method_modules() -> dict[str, str]:
    """Method name -> module path, without importing any of them.

    Raises:
        ConfigError: two files define the same method name.
    """
    found: dict[str, str] = {}
    for package in _PACKAGES:
        spec = find_spec(package)
        locations = spec.submodule_search_locations if spec else None
        for module in pkgutil.iter_modules(locations or []):
            if module.name in _NOT_METHODS or module.name.startswith("_"):
                continue
            if module.name in found:
                raise ConfigError(
                    f"The method name {module.name!r} is defined twice: {found[module.name]} and {package}."
                )
            found[module.name] = f"{package}.{module.name}"
    return found


def is_scoring(name: str) -> bool:
    """Whether a known method scores structures (it lies under score/ and has no regulariser)."""
    return method_modules()[name].startswith("pyprune.score.")


def get_method(name: str) -> Method:
    """The method of this name.

    Raises:
        ConfigError: unknown name, with the closest one and all that exist.
    """
    modules = method_modules()
    if name not in modules:
        raise ConfigError(did_you_mean(name, modules, "method"))
    method: Method = import_module(modules[name]).METHOD
    return method
