"""Methods, found by looking: one file or folder a method under regularise/, score/, layers/, hidden/ and experts/.

It defines ``METHOD``, with the file's ``name``, the functions of the method, its options and its presets. Nothing is
registered by import, and no list is kept by hand; two files of one name are an error. Declaring a method imports no
torch: functions that compute are imported when they are called. Installed packages bring methods by entry points of the
group ``pyprune.methods``: the method's name -> a module with ``METHOD``, or the method itself. None of them is imported
before somebody asks for it.

A run of a method starts from the preset of the same name, however the method was chosen: by --method, by --preset or by
a recipe's ``method``. NAME chooses, cuts and reconstructs. NAME-plain leaves the reconstruction out, NAME-trained
trains after it, and NAME-paper has the paper's constants (:func:`pyprune.methods.training.make_forms`).
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
from pyprune.methods.base import Method, own_options

_PACKAGES = tuple(f"pyprune.methods.{room}" for room in ("regularise", "score", "layers", "hidden", "experts"))
FORMS = ("-plain", "-trained", "-paper")
"""Ends of the names of the forms that methods have in addition to NAME."""
GROUP = "pyprune.methods"
"""Entry point group of packages that bring methods."""
_NOT_METHODS = ("base",)
RECOMMENDED = "obs"
"""The method that ``best`` stands for: the lowest row of docs/results/names.md for a share of the parameters."""
OTHER_NAMES = {"taylor-recovered": "taylor-trained"} | {
    f"best{end}": f"{RECOMMENDED}{end}" for end in ("", "-plain", "-trained")
}
"""Name that is not the preset's own -> the preset: ``best``, and those of earlier releases."""
TRAINED_BEFORE = ("dress", "elder", "pca", "trsp")
"""Presets that trained after the cut in earlier releases; NAME-trained does now."""


@cache
def own_methods() -> dict[str, str]:
    """Return method name -> module path of pyprune's own methods.

    Raises:
        ConfigError: two files define the same method name.
    """
    modules: dict[str, str] = {}
    for package in _PACKAGES:
        spec = find_spec(package)
        locations = spec.submodule_search_locations if spec else None
        for module in pkgutil.iter_modules(locations or []):
            if module.name in _NOT_METHODS or module.name.startswith("_"):
                continue
            if module.name in modules:
                raise ConfigError(
                    f"The method name {module.name!r} is defined twice: {modules[module.name]} and {package}."
                )
            modules[module.name] = f"{package}.{module.name}"
    return modules


def installed_methods() -> dict[str, EntryPoint]:
    """Return method name -> entry point of an installed package, without importing any of them.

    Raises:
        ConfigError: a name that is no word, is "none", or that two packages (or pyprune and a package) give a method.
    """
    entries: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        if not entry.name.isidentifier() or entry.name == "none":
            raise ConfigError(
                f"{_source(entry)} has no name for a method; it must be letters, digits and underscores, and not none."
            )
        other = own_methods().get(entry.name) or (entries[entry.name].value if entry.name in entries else None)
        if other:
            raise ConfigError(
                f"The method name {entry.name!r} is defined twice: {other} and {entry.value} (entry point of {GROUP}). "
                "Uninstall one of the packages."
            )
        entries[entry.name] = entry
    return entries


def installed_names() -> list[str]:
    """Return the names of the methods that installed packages bring, for a list; clashes are not refused here."""
    return sorted({entry.name for entry in entry_points(group=GROUP)} - own_methods().keys())


def method_modules() -> dict[str, str]:
    """Return method name -> module that defines it, without importing any of them.

    Raises:
        ConfigError: as :func:`own_methods` and :func:`installed_methods`.
    """
    return own_methods() | {name: entry.value for name, entry in installed_methods().items()}


def _source(entry: EntryPoint) -> str:
    return f"The entry point {shown(entry.name)} ({entry.value}) of {GROUP}"


def read_config(data: Mapping[str, Any]) -> PruneConfig:
    """Build a configuration from plain data, and validate it by its own rules and its method's.

    Args:
        data: JSON or YAML data, the options of the method under its name, as :meth:`PruneConfig.to_dict` gives it.

    Raises:
        ConfigError: every problem: unknown keys, values that are not allowed, options of another method.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"The options are {shown(data)}; expected a mapping.")
    method = data.get("method", PruneConfig.method)
    modules = method_modules()
    options = get_method(method).options if isinstance(method, str) and method in modules else MethodOptions
    others = [name for name in data if name != method and name in modules] if isinstance(method, str) else []
    if not isinstance(method, str):  # refused with its value below, and nothing else can be checked
        data = {name: value for name, value in data.items() if name not in modules}
    data = {name: value for name, value in data.items() if name not in others}
    return complete_config(PruneConfig.read(data, options, _naming_problems(method, others)))


def _naming_problems(method: Any, others: Sequence[str]) -> list[str]:
    """Return the problems of a method that does not exist, and of options of methods that do not run."""
    problems = []
    if isinstance(method, str) and method not in (*method_modules(), "none"):
        problems.append(did_you_mean(method, method_modules(), "method"))
    if others:
        problems.append(
            f"There are options of {' and '.join(map(repr, others))}, but method is {shown(method)}; leave them out, "
            "or name the method that you mean."
        )
    return problems


def complete_config(config: PruneConfig) -> PruneConfig:
    """Validate a configuration by its own rules and its method's, and fill in the method's default options.

    Raises:
        ConfigError: every problem, also an unknown method and options that it would not read.
    """
    problems = _method_problems(config)
    if not problems and config.options is None and config.method != "none":
        config = replace(config, options=get_method(config.method).options())
    try:
        config.validate()
    except ConfigError as error:
        raise ConfigError([*error.problems, *problems]) from None
    if problems:
        raise ConfigError(problems)
    return config


def _method_problems(config: PruneConfig) -> list[str]:
    if config.method == "none":
        return []
    if config.method not in method_modules():
        return [did_you_mean(config.method, method_modules(), "method")]
    method = get_method(config.method)
    problems: list[str] = []
    try:
        own_options(config, method.options)
    except ConfigError as error:
        problems += error.problems
    if config.score is not None and not method.scores:
        changed = [f"score.{name}" for name, value in vars(config.score).items() if value != getattr(ScoreConfig, name)]
        problems.append(
            f"{' and '.join(changed) or 'score'} cannot be used: method {config.method!r} scores no structures and "
            "chooses sizes in its own way. Leave it out."
        )
    if method.regularise is None and "regularise" in (*config.stages.before, *config.stages.after):
        problems.append(
            f"method is {config.method!r}, which regularises nothing; take regularise out of stages.before and "
            "stages.after."
        )
    distill = config.recover.distill if "recover" in config.stages.after else None
    if method.rotates and config.plan is None and distill is not None and distill.hidden:
        problems.append(
            f"recover.distill.hidden is {distill.hidden}, which compares the hidden channels with the dense model's, "
            f"but {config.method!r} rotates them before it cuts; set it to 0 and compare the logits (alpha)."
        )
    return problems


def is_of_another(option: str, method: str) -> bool:
    """Check whether an option, by its dotted name or as "name=value", belongs to a method other than this one."""
    first = option.partition("=")[0].partition(".")[0].strip()
    return first != method and first in method_modules()


def check_name(name: str) -> None:
    """Refuse a method that does not exist, without importing any.

    Raises:
        ConfigError: unknown name, with the closest one and all that exist.
    """
    if name not in method_modules():
        raise ConfigError(did_you_mean(name, ("best", *method_modules()), "method"))


def get_method(name: str) -> Method:
    """Return the method of this name.

    Raises:
        ConfigError: as :func:`check_name`, or the package that brings it is broken.
    """
    if name in own_methods():  # a search for others reads the metadata of every installed package
        method: Method = import_module(own_methods()[name]).METHOD
        return method
    check_name(name)
    return _installed_method(installed_methods()[name])


def _installed_method(entry: EntryPoint) -> Method:
    target = _load(entry)
    method = getattr(target, "METHOD", target)
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
    """Return preset name -> function that builds it (its docstring describes it), of pyprune's own methods."""
    return {name: make for method in own_methods() for name, make in presets_of(get_method(method)).items()}


@cache
def score_presets() -> dict[str, str]:
    """Return the scores of pyprune's own methods, and variants of them -> the preset by which scores are compared.

    It is the paper's where there is one, and else the form that neither reconstructs nor trains.
    """
    made = presets()
    names = [name for name in made if not name.endswith(FORMS) and get_method(name.partition("-")[0]).scores]
    forms = {name: [f"{name}-paper", f"{name}-plain", name] for name in names}
    return {name: next(form for form in forms[name] if form in made) for name in names}


def presets_of(method: Method) -> dict[str, Callable[[], PruneConfig]]:
    """Return the presets of a method, with :meth:`Method.default_config` if it brings none of its name."""

    def start() -> PruneConfig:
        return method.default_config()

    start.__doc__ = method.summary
    return {method.name: start, **method.presets}


def preset(name: str) -> PruneConfig:
    """Return the options of a preset.

    Raises:
        ConfigError: there is no preset of this name; the message lists them.
    """
    return _maker(name)()


def _maker(name: str) -> Callable[[], PruneConfig]:
    name, makers = OTHER_NAMES.get(name, name), presets()
    installed = installed_methods() if name not in makers else {}
    method = name.partition("-")[0]
    if method in installed:
        makers = makers | _installed_presets(installed[method])
    if name not in makers:
        raise ConfigError(did_you_mean(name, {*makers, *installed}, "preset"))
    return makers[name]


def _installed_presets(entry: EntryPoint) -> dict[str, Callable[[], PruneConfig]]:
    method = _installed_method(entry)
    wrong = [name for name in method.presets if name.partition("-")[0] != method.name]
    if wrong:
        raise ConfigError(
            f"{_source(entry)} brings the preset {shown(wrong[0])}; its presets must be called {method.name!r} or "
            f"'{method.name}-...'."
        )
    return presets_of(method)


def note_of_name(name: str) -> str | None:
    """Return one line that says what a name stands for, if it is not a preset's own or its meaning changed."""
    if name in OTHER_NAMES:
        return f"{name} is {OTHER_NAMES[name]} in this release."
    if name in TRAINED_BEFORE:
        return f"{name} chooses, cuts and reconstructs; {name}-trained also trains, as {name} did in earlier releases."
    return None


def method_preset(method: str) -> PruneConfig:
    """Return the options that a run of a method starts from: the preset of the same name.

    Raises:
        ConfigError: as :func:`check_name`.
    """
    check_name(method)
    return preset(method)
