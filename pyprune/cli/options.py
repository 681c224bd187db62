"""List the options of a method or command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyprune.cli.base import guard, output
from pyprune.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from pyprune.config.base import Config
    from pyprune.config.describe import OptionDescription

OTHERS = ("recover", "reconstruct", "fit")
"""Commands with options for --set, in addition to prune, whose options a preset has."""


@guard
def options(
    name: str = "elder",
    *,
    find: str | None = None,
    json_file: str | None = None,
    debug: bool = False,
) -> None:
    """List the options for --set and recipes: name, value, allowed values and meaning of each.

    Example: pyprune options elder --find gates

    Args:
        name (NAME): Method or preset of prune; or recover, reconstruct or fit.
        find (TEXT): Only options whose name or meaning holds this text.
    """
    from pyprune.run.recipe import is_among
    from pyprune.runtime.report import Table

    config, idle, off = options_of(name)
    left_out = [*off, *(option for options in idle.values() for option in options)]
    listed = [each for each in list_options(config) if not is_among(each.name, left_out)]
    if find is not None:
        listed = [each for each in listed if find.lower() in f"{each.name} {each.meaning}".lower()]
        hidden = [option for option in left_out if find.lower() in option.lower()]
        if not listed and not hidden:
            raise ConfigError(f"No option of {name} has {find!r} in its name or meaning. Leave out --find to see all.")
    rows = tuple((each.name, _text(each.value), each.allowed, each.meaning) for each in listed)
    notes = [f"{', '.join(options)} (no stage {stage})" for stage, options in idle.items()]
    note = "; ".join([*notes, *(f"{option} (with {why})" for option, why in off.items())])
    table = Table(f"Options of {name}", ("option", "value", "may be", "what it is"), rows)
    output(
        {"name": name, "options": [vars(each) for each in listed], "unread": idle, "switched_off": off},
        json_file,
        table,
        *([f"Left out, because nothing in this run reads it: {note}."] if note else []),
    )


def list_options(config: Config) -> list[OptionDescription]:
    """List every option; those of a text that is not named have the values that naming one gives them."""
    from pyprune.config.describe import describe_options
    from pyprune.config.run import PruneConfig
    from pyprune.run.recipe import write_out_texts

    options = list(describe_options(config))
    if not isinstance(config, PruneConfig):
        return options
    named = {each.name: each for each in describe_options(write_out_texts(config))}
    unnamed = {"cut.data": config.cut.data, "recovery_data": config.recovery_data}
    inside = [f"{place}." for place, data in unnamed.items() if data is None]
    return [named[each.name] if each.name.startswith(tuple(inside)) else each for each in options]


def options_of(name: str) -> tuple[Config, dict[str, list[str]], dict[str, str]]:
    """Return the options of a name, those that no stage would read, and those that other values switch off."""
    from pyprune.config.run import ReconstructCheckpointConfig, RecoverCheckpointConfig
    from pyprune.fit.options import FitOptions
    from pyprune.methods.registry import presets
    from pyprune.run.recipe import build_config, switched_off, unread

    if name in OTHERS:
        return (RecoverCheckpointConfig, ReconstructCheckpointConfig, FitOptions)[OTHERS.index(name)](), {}, {}
    if name not in presets():
        raise ConfigError(did_you_mean(name, [*presets(), *OTHERS], "method, preset or command"))
    config = build_config(preset=name)
    return config, unread(config), switched_off(config)


def _text(value: Any) -> str:
    """Write a value as a recipe does."""
    import json

    return value if isinstance(value, str) else json.dumps(value)
