"""Methods, found by looking: one file a method under regularise/ and score/, imported only when asked for.

A method file defines ``METHOD`` whose ``name`` is the file's name. Nothing is registered by import, and no
list is kept by hand; two files of one name are an error.

Presets are found in ``presets.py`` of both folders, which import no torch. The preset named like a method is what a
run of that method starts from, however it was named: --method, --preset or a recipe's ``method``.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pyprune.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from pyprune.config.run import PruneConfig
    from pyprune.methods.base import Method

_PACKAGES = ("pyprune.methods.regularise", "pyprune.methods.score")
_NOT_METHODS = ("base", "presets")

RENAMED = {
    "dress-opt": "dress-paper-opt",
    "dress-recommended": "dress",
    "elder-literal": "elder-paper-literal",
    "elder-recommended": "elder",
    "trsp-recommended": "trsp",
}
"""Name that a preset had -> the one it has."""


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
    return method_modules()[name].startswith("pyprune.methods.score.")


def check_run(config: PruneConfig) -> None:
    """Validate a configuration, together with what its method says of it; nothing is imported for that.

    Raises:
        ConfigError: every problem, also an unknown method and options that it would not read.
    """
    found = _method_problems(config)
    try:
        config.validate()
    except ConfigError as error:
        raise ConfigError([*error.problems, *found]) from None
    if found:
        raise ConfigError(found)


def _method_problems(config: PruneConfig) -> list[str]:
    if config.method == "none":
        return []
    if config.method not in method_modules():
        return [did_you_mean(config.method, method_modules(), "method")]
    if not is_scoring(config.method):
        uniform = f"score.uniform is on, but method {config.method!r} scores nothing: its widths are its own."
        return [uniform] if config.score.uniform else []
    if "regularise" in (*config.stages.before, *config.stages.after):
        return [
            f"method is {config.method!r}, which scores and regularises nothing; take regularise out of stages.before "
            "and stages.after."
        ]
    return []


def check_name(name: str) -> None:
    """Refuse a method that does not exist, without importing any.

    Raises:
        ConfigError: unknown name, with the closest one and all that exist.
    """
    if name not in method_modules():
        raise ConfigError(did_you_mean(name, method_modules(), "method"))


def get_method(name: str) -> Method:
    """The method of this name.

    Raises:
        ConfigError: as :func:`check_name`.
    """
    check_name(name)
    method: Method = import_module(method_modules()[name]).METHOD
    return method


@cache
def presets() -> dict[str, Callable[[], PruneConfig]]:
    """Preset name -> function that builds its options (whose docstring describes it); imports no torch."""
    found: dict[str, Callable[[], PruneConfig]] = {}
    for package in _PACKAGES:
        found |= import_module(f"{package}.presets").PRESETS
    return found


def preset(name: str) -> PruneConfig:
    """The options of a preset.

    Raises:
        ConfigError: there is no preset of this name; the message lists them, or says what it is called now.
    """
    return _maker(name)()


def describe(name: str) -> str:
    """One line about a preset.

    Raises:
        ConfigError: as :func:`preset`.
    """
    return (_maker(name).__doc__ or "").splitlines()[0]


def _maker(name: str) -> Callable[[], PruneConfig]:
    if name in RENAMED:
        raise ConfigError(f"The preset {name!r} is called {RENAMED[name]!r} now; write that.")
    if name not in presets():
        raise ConfigError(did_you_mean(name, presets(), "preset"))
    return presets()[name]


def method_preset(method: str) -> PruneConfig:
    """What a run of a method starts from: the preset of the same name.

    Raises:
        ConfigError: as :func:`check_name`.
    """
    check_name(method)
    return preset(method)
