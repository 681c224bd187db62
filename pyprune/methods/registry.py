"""Methods, found by looking: one file or folder a method under regularise/, score/, layers/ and hidden/.

It defines ``METHOD``, whose ``name`` is that of the file: what the method does, its options and its presets. Nothing is
registered by import, and no list is kept by hand; two files of one name are an error. Declaring a method imports no
torch: what computes is imported when it is called. Installed packages bring methods by entry points of the group
``pyprune.methods``: the method's name -> a module with ``METHOD``, or the method itself. None of them is imported
before it is asked for.

The preset named like a method is what a run of that method starts from, however it was named: --method, --preset or a
recipe's ``method``.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any

from pyprune.config.method import MethodOptions
from pyprune.config.run import PruneConfig
from pyprune.config.score import ScoreConfig
from pyprune.errors import ConfigError, did_you_mean, shown
from pyprune.methods.base import Method

_PACKAGES = (
    "pyprune.methods.regularise",
    "pyprune.methods.score",
    "pyprune.methods.layers",
    "pyprune.methods.hidden",
)
GROUP = "pyprune.methods"
"""Entry point group of packages that bring methods."""
_NOT_METHODS = ("base",)


@cache
def own_methods() -> dict[str, str]:
    """Method name -> module path of pyprune's own methods.

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


def installed_methods() -> dict[str, EntryPoint]:
    """Method name -> entry point of an installed package, without importing any of them.

    Raises:
        ConfigError: a name that is no word, is "none", or that two packages (or pyprune and a package) give a method.
    """
    found: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        if not entry.name.isidentifier() or entry.name == "none":
            raise ConfigError(
                f"{_source(entry)} has no name for a method; it must be letters, digits and underscores, and not none."
            )
        other = own_methods().get(entry.name) or (found[entry.name].value if entry.name in found else None)
        if other:
            raise ConfigError(
                f"The method name {entry.name!r} is defined twice: {other} and {entry.value} (entry point of {GROUP}). "
                "Uninstall one of the packages."
            )
        found[entry.name] = entry
    return found


def installed_names() -> list[str]:
    """Names of the methods that installed packages bring, also where they clash: what a list can show."""
    return sorted({entry.name for entry in entry_points(group=GROUP)} - own_methods().keys())


def method_modules() -> dict[str, str]:
    """Method name -> where it is defined, without importing any of them.

    Raises:
        ConfigError: as :func:`own_methods` and :func:`installed_methods`.
    """
    return own_methods() | {name: entry.value for name, entry in installed_methods().items()}


def _source(entry: EntryPoint) -> str:
    return f"The entry point {shown(entry.name)} ({entry.value}) of {GROUP}"


def read_config(data: Mapping[str, Any]) -> PruneConfig:
    """Build a configuration from plain data, and validate it with what its method says of it.

    Args:
        data: JSON or YAML data, the options of the method under its name, as :meth:`PruneConfig.to_dict` gives it.

    Raises:
        ConfigError: every problem: unknown keys, values that are not allowed, options of another method.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"The options are {shown(data)}; expected a mapping.")
    method = data.get("method", PruneConfig.method)
    known = method_modules()
    options = get_method(method).options if isinstance(method, str) and method in known else MethodOptions
    others = [name for name in data if name != method and name in known] if isinstance(method, str) else []
    if not isinstance(method, str):  # refused with its value below, and nothing else can be said of it
        data = {name: value for name, value in data.items() if name not in known}
    own = {name: value for name, value in data.items() if name not in others}
    return checked(PruneConfig.read(own, options, _naming_problems(method, others)))


def _naming_problems(method: Any, others: Sequence[str]) -> list[str]:
    """A method that does not exist, and options of methods that do not run, which would do nothing."""
    found = []
    if isinstance(method, str) and method not in (*method_modules(), "none"):
        found.append(did_you_mean(method, method_modules(), "method"))
    if others:
        found.append(
            f"There are options of {' and '.join(map(repr, others))}, but method is {shown(method)}; leave them out, "
            "or name the method that you mean."
        )
    return found


def checked(config: PruneConfig) -> PruneConfig:
    """Validate a configuration together with what its method says of it, and fill in the method's default options.

    Raises:
        ConfigError: every problem, also an unknown method and options that it would not read.
    """
    found = _method_problems(config)
    if not found and config.options is None and config.method != "none":
        config = replace(config, options=get_method(config.method).options())
    try:
        config.validate()
    except ConfigError as error:
        raise ConfigError([*error.problems, *found]) from None
    if found:
        raise ConfigError(found)
    return config


def _method_problems(config: PruneConfig) -> list[str]:
    if config.method == "none":
        return []
    if config.method not in method_modules():
        return [did_you_mean(config.method, method_modules(), "method")]
    method = get_method(config.method)
    found = []
    if config.options is not None and not isinstance(config.options, method.options):
        found.append(
            f"The options of method {config.method!r} are a {type(config.options).__name__}; it takes a "
            f"{method.options.__name__}."
        )
    if config.score is not None and not method.scores:
        given = [f"score.{name}" for name, value in vars(config.score).items() if value != getattr(ScoreConfig, name)]
        found.append(
            f"{' and '.join(given) or 'score'} cannot be used: method {config.method!r} scores no structures, its "
            "sizes are its own. Leave it out."
        )
    if method.regularise is None and "regularise" in (*config.stages.before, *config.stages.after):
        found.append(
            f"method is {config.method!r}, which regularises nothing; take regularise out of stages.before and "
            "stages.after."
        )
    distill = config.recover.distill if "recover" in config.stages.after else None
    if method.rotates and config.plan is None and distill is not None and distill.hidden:
        found.append(
            f"recover.distill.hidden is {distill.hidden}, which compares the hidden channels with the dense model's, "
            f"but {config.method!r} rotates them before it cuts; set it to 0 and compare the logits (alpha)."
        )
    return found


def is_of_another(option: str, method: str) -> bool:
    """Whether an option, by its dotted name or as "name=value", is of a method other than this one."""
    first = option.partition("=")[0].partition(".")[0].strip()
    return first != method and first in method_modules()


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
        ConfigError: as :func:`check_name`, or the package that brings it is broken.
    """
    if name in own_methods():  # looking for others reads the metadata of every installed package
        method: Method = import_module(own_methods()[name]).METHOD
        return method
    check_name(name)
    return _installed_method(installed_methods()[name])


def _installed_method(entry: EntryPoint) -> Method:
    found = _load(entry)
    method = getattr(found, "METHOD", found)
    if not isinstance(method, Method) or method.name != entry.name:
        raise ConfigError(
            f"{_source(entry)} is {shown(method)}; it must be a module with METHOD, or a pyprune.methods.base.Method, "
            f"whose name is {entry.name!r}."
        )
    return method


def _load(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:  # another package's code: it can raise anything
        raise ConfigError(
            f"{_source(entry)} cannot be loaded: {shown(error)}. Repair or uninstall the package that brings it."
        ) from error


@cache
def presets() -> dict[str, Callable[[], PruneConfig]]:
    """Preset name -> function that builds it (its docstring describes it), of our own methods; imports no torch."""
    found: dict[str, Callable[[], PruneConfig]] = {}
    for name in own_methods():
        found |= presets_of(get_method(name))
    return found


@cache
def score_presets() -> dict[str, Callable[[], PruneConfig]]:
    """The presets of our own scoring methods: one for each score, without the forms that a score has besides."""
    scoring = {name for name in own_methods() if get_method(name).scores}
    return {
        name: make
        for name, make in presets().items()
        if name.partition("-")[0] in scoring and not name.endswith(("-paper", "-recovered"))
    }


def presets_of(method: Method) -> dict[str, Callable[[], PruneConfig]]:
    """The presets of a method; where it brings none of its name, a run starts from :meth:`Method.start`."""

    def start() -> PruneConfig:
        return method.start()

    start.__doc__ = method.summary
    return {method.name: start, **method.presets}


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
    return (_maker(name).__doc__ or name).splitlines()[0]


def _maker(name: str) -> Callable[[], PruneConfig]:
    known = presets()
    installed = installed_methods() if name not in known else {}
    method = name.partition("-")[0]
    if method in installed:
        known = known | _installed_presets(installed[method])
    if name not in known:
        raise ConfigError(did_you_mean(name, {*known, *installed}, "preset"))
    return known[name]


def _installed_presets(entry: EntryPoint) -> dict[str, Callable[[], PruneConfig]]:
    method = _installed_method(entry)
    wrong = [name for name in method.presets if name.partition("-")[0] != method.name]
    if wrong:
        raise ConfigError(
            f"{_source(entry)} brings the preset {shown(wrong[0])}; its presets must be called {method.name!r} or "
            f"'{method.name}-...'."
        )
    return presets_of(method)


def method_preset(method: str) -> PruneConfig:
    """What a run of a method starts from: the preset of the same name.

    Raises:
        ConfigError: as :func:`check_name`.
    """
    check_name(method)
    return preset(method)
