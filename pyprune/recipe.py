"""From a preset, a recipe file and single settings to one validated PruneConfig.

Later sources win: preset, then the recovery that a recipe names, then the recipe itself, then a recovery that is asked
for beside it, then options by name, then ``key.path=value`` settings. A recipe is YAML or JSON with the layout of
:class:`pyprune.config.PruneConfig`, plus optional ``preset`` and ``recovery`` keys.
Without a recipe and without a preset, the method's own default preset is the start; a recipe without one starts from
the plain defaults. `pyprune recover` reads :class:`pyprune.config.RecoverRunConfig` in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyprune.config import PruneConfig, RecoverRunConfig
from pyprune.errors import ConfigError


def build_config(
    *,
    preset: str | None = None,
    recovery: str | None = None,
    recipe: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
) -> PruneConfig:
    """Compose the options of ``pyprune prune``.

    Args:
        preset: name of a preset to start from; it wins over the recipe's own ``preset`` key, and what else the recipe
            says wins over it.
        recovery: name of a recovery to follow the cut; it wins over everything that the recipe says of recovery.
        recipe: path of a YAML or JSON file.
        options: dotted name -> value, for example {"ratio": 0.25, "data.samples": 128}; None values are left out.
        settings: "dotted.name=value" texts; the value is read as YAML.

    Raises:
        ConfigError: an unreadable recipe, an unknown preset or option, values that are not allowed, or a preset of
            another method than the recipe's.
    """
    from pyprune.recovery_presets import prune_options

    data = read_recipe(recipe) if recipe is not None else {}
    named, recovers = (_name_in(data, key, recipe) for key in ("preset", "recovery"))
    chosen = _chosen(options, settings)
    if preset or named:
        start = preset_options(preset or str(named))
    else:
        start = {} if recipe is not None else default_options(chosen)
    if preset:
        _refuse_other_method(preset, start, data, chosen)
    if recovers:
        start = merge(start, prune_options(recovers))
    if recovery:
        data = merge(data, prune_options(recovery))
    return PruneConfig.from_dict(merge(merge(start, data), chosen))


def _refuse_other_method(
    preset: str, start: Mapping[str, Any], recipe: Mapping[str, Any], chosen: Mapping[str, Any]
) -> None:
    """A recipe's method would win over the preset that was asked for, which then did little of what its name says."""
    method = recipe.get("method", start["method"])
    if "method" not in chosen and method != start["method"]:
        raise ConfigError(
            f"The preset {preset!r} is of the method {start['method']!r}, the recipe says method {method!r}; leave one "
            f"of them out, or name the method too (method={start['method']})."
        )


def build_recovery(
    *,
    preset: str | None = None,
    recipe: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
) -> RecoverRunConfig:
    """Compose the options of ``pyprune recover``; arguments as in :func:`build_config`, ``preset`` names a recovery.

    Raises:
        ConfigError: as :func:`build_config`.
    """
    data = read_recipe(recipe) if recipe is not None else {}
    named = preset or _name_in(data, "preset", recipe)
    start: dict[str, Any] = {}
    if named:
        from pyprune.recovery_presets import recovery

        start = recovery(named).to_dict()
    return RecoverRunConfig.from_dict(merge(merge(start, data), _chosen(options, settings)))


def _name_in(data: dict[str, Any], key: str, recipe: str | Path | None) -> str | None:
    """Take the name of a preset out of a recipe's data."""
    named = data.pop(key, None)
    if named is not None and not isinstance(named, str):
        raise ConfigError(f"{key} is {named!r} in {recipe}; expected the name of a {key}.")
    return named


def _chosen(options: Mapping[str, Any] | None, settings: Sequence[str]) -> dict[str, Any]:
    """Options by name, then settings, as nested plain data."""
    chosen: dict[str, Any] = {}
    for name, value in (options or {}).items():
        if value is not None:
            chosen = merge(chosen, nested(name, value))
    for setting in settings:
        chosen = merge(chosen, parse_setting(setting))
    return chosen


def preset_options(name: str) -> dict[str, Any]:
    """Return a preset as plain data.

    Raises:
        ConfigError: there is no preset of this name.
    """
    from pyprune.regularise.presets import preset as find

    return find(name).to_dict()


def default_options(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run starts from when neither a preset nor a recipe was named.

    A plan without a method is applied as it is, without training; a method starts from its default preset.

    Raises:
        ConfigError: there is no method of the chosen name.
    """
    from pyprune.registry import get_method

    method = chosen.get("method", "none" if "plan" in chosen else PruneConfig.method)
    if method == "none":
        return {"method": "none", "stages": {"before": []}}
    return preset_options(get_method(str(method)).default_preset)


def read_recipe(path: str | Path) -> dict[str, Any]:
    """Read a YAML or JSON recipe as plain data.

    Raises:
        ConfigError: the file is missing, is not YAML, or does not hold a mapping.
    """
    import yaml

    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The recipe {path} cannot be read: {error}. Give the path of a YAML file.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"The recipe {path} is not valid YAML: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"The recipe {path} holds {type(data).__name__}; expected a mapping of options.")
    return data


def parse_setting(text: str) -> dict[str, Any]:
    """Read "elder.gates.strength=0.05" as {"elder": {"gates": {"strength": 0.05}}}.

    Raises:
        ConfigError: there is no "=" or no name before it, or the value is not YAML.
    """
    import yaml

    name, equals, value = text.partition("=")
    if not equals or not all(part.strip() for part in name.split(".")):
        raise ConfigError(f"--set got {text!r}; expected key.path=value, for example elder.gates.strength=0.05.")
    try:
        return nested(name.strip(), yaml.safe_load(value))
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {name}: the value {value!r} is not valid YAML: {error}") from error


def nested(name: str, value: Any) -> dict[str, Any]:
    """Return {"a": {"b": value}} for the dotted name "a.b"."""
    first, dot, rest = name.partition(".")
    return {first.strip(): nested(rest, value) if dot else value}


def dotted_names(data: Mapping[str, Any]) -> list[str]:
    """Return ["a.b", "c"] for {"a": {"b": 1}, "c": 2}: the names of all values."""
    found: list[str] = []
    for name, value in data.items():
        below = dotted_names(value) if isinstance(value, Mapping) else []
        found += [f"{name}.{inner}" for inner in below] or [name]
    return found


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``over`` laid on top; mappings are merged, everything else is replaced."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        result[key] = merge(below, value) if both else value  # type: ignore[arg-type]
    return result
