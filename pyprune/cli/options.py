"""List the options of a method or command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pyprune.cli.base import guard, output
from pyprune.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from pyprune.config.base import Config
    from pyprune.config.describe import OptionDescription
    from pyprune.runtime.report import Table

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
    from pyprune.methods.registry import OTHER_NAMES, presets
    from pyprune.run.recipe import build_config, switched_off, unread

    if name in OTHERS:
        return (RecoverCheckpointConfig, ReconstructCheckpointConfig, FitOptions)[OTHERS.index(name)](), {}, {}
    if name not in (*presets(), *OTHER_NAMES):
        raise ConfigError(did_you_mean(name, [*presets(), *OTHERS], "method, preset or command"))
    config = build_config(preset=name)
    return config, unread(config), switched_off(config)


ALWAYS_LISTED = ("ratio", "ratio_of", "data.source", "data.samples", "data.sequence_length")
"""Shared options that the table of a method has even if every preset leaves them at their default."""


def method_tables(name: str) -> list[Table]:
    """Return what a method's presets are, the values that they set, and what its own options mean.

    An option that a preset does not read has a dash.

    Raises:
        ConfigError: there is no method of this name.
    """
    from pyprune.config.describe import describe_options
    from pyprune.config.run import PruneConfig
    from pyprune.config.train import TrainConfig
    from pyprune.methods.registry import check_name, get_method, presets_of
    from pyprune.run.recipe import is_among
    from pyprune.runtime.report import Table

    check_name(name)
    makers = presets_of(get_method(name))
    usual = {each.name: each.value for each in describe_options(PruneConfig())}
    training = {each.name: each.value for each in describe_options(TrainConfig())}
    columns: dict[str, dict[str, Any]] = {}
    own: dict[str, OptionDescription] = {}
    for preset in makers:
        config, idle, off = options_of(preset)
        left_out = [*off, *(option for options in idle.values() for option in options), "method"]
        read = [each for each in describe_options(config) if not is_among(each.name, left_out)]
        columns[preset] = {each.name: each.value for each in read}
        own |= {each.name: each for each in read if each.name.startswith(f"{name}.")}

    def is_set(option: str) -> bool:
        values = [column[option] for column in columns.values() if option in column]
        last = option.rpartition(".")[2]
        default = training[last] if ".train." in option and last in training else usual.get(option)
        return option in ALWAYS_LISTED or any(value != default and value != [] for value in values)

    listed = dict.fromkeys(option for column in columns.values() for option in column if is_set(option))
    rows = tuple((option, *(_cell(column, option) for column in columns.values())) for option in listed)
    meanings = tuple((each.name, each.meaning, each.allowed) for each in own.values() if ".train." not in each.name)
    described = tuple((preset, (maker.__doc__ or "").strip()) for preset, maker in makers.items())
    return [
        Table("Presets", ("preset", "what it does"), described),
        Table("Values", ("option", *columns), rows),
        *([Table("Options of the method", ("option", "what it is", "may be"), meanings)] if meanings else []),
    ]


def _cell(values: Mapping[str, Any], option: str) -> str | None:
    return _text(values[option]) if option in values else None


def _text(value: Any) -> str:
    """Write a value as a recipe does."""
    import json

    return value if isinstance(value, str) else json.dumps(value)
