"""Names, values, allowed values and meanings of options, from the fields, ranges and docstrings of their classes."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

from pyprune.config.base import Config, Range, _plain

_ENTRY = re.compile(r"^(\w+(?:, \w+)*): (.+)$")
_ROLE = re.compile(r":\w+:`~?([^`]+)`")


@dataclass(frozen=True)
class OptionDescription:
    """One option.

    Attributes:
        name: dotted name, as ``--set`` takes it.
        value: its value, plain data.
        allowed: its allowed values, in words.
        meaning: its meaning, in words.
    """

    name: str
    value: Any
    allowed: str
    meaning: str


def describe_options(config: Config, path: str = "") -> Iterator[OptionDescription]:
    """Yield every option of a set of options, those inside it too, in the order of their classes.

    An option that holds options and is left out (null) is described by the ones that it would have; a list of options
    by those of an entry, as ``name[].option``.

    Args:
        config: the options.
        path: their dotted name, with a dot after it.
    """
    hints, meanings = typing.get_type_hints(type(config)), _meanings(type(config))
    for field in fields(config):  # type: ignore[arg-type]
        name, value = f"{path}{config._label(field.name)}", getattr(config, field.name)
        inner = value if isinstance(value, Config) else _config_in(hints[field.name])
        if inner is None or inner is not value:
            allowed = _allowed_values(hints[field.name], field.metadata.get("range"))
            yield OptionDescription(name, _plain_value(value), allowed, meanings.get(field.name, ""))
        if inner is not None:
            entries = "[]" if typing.get_origin(hints[field.name]) is tuple else ""
            yield from describe_options(inner, f"{name}{entries}.")


def _plain_value(value: Any) -> Any:
    """Return plain data, also of options in a list."""
    entries = isinstance(value, tuple) and any(isinstance(entry, Config) for entry in value)
    return [entry.to_dict() for entry in value] if entries else _plain(value)


def _config_in(hint: Any) -> Config | None:
    """Return the options that a field or an entry of its list may hold, with defaults; None if it holds a value."""
    kinds = [kind for kind in typing.get_args(hint) if inspect.isclass(kind) and issubclass(kind, Config)]
    return kinds[0]() if kinds else None


def _allowed_values(hint: Any, limits: Range | None) -> str:
    """Return the allowed values, in words."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = [_allowed_values(kind, limits) for kind in inside if kind is not type(None)]
        return " or ".join([*kinds, *(["null"] if type(None) in inside else [])])
    if origin is Literal:
        return ", ".join(map(str, inside))
    if origin is tuple:
        return f"list of: {_allowed_values(inside[0], limits)}"
    if inspect.isclass(hint) and issubclass(hint, Config):
        return "the options below"
    words = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    return f"{words.get(hint, getattr(hint, '__name__', str(hint)))}{'' if limits is None else _bounds(limits)}"


def _bounds(limits: Range) -> str:
    words = {name: getattr(limits, name) for name in ("at_least", "above", "at_most", "below")}
    return "".join(f", {name.replace('_', ' ')} {value:,.10g}" for name, value in words.items() if value is not None)


def _meanings(kind: type[Config]) -> dict[str, str]:
    """Return option -> its meaning in the docstring of a class, or of a base class."""
    meanings: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__doc__ and base is not object:
            meanings |= _entries(inspect.cleandoc(base.__doc__))
    return meanings


def _entries(text: str) -> dict[str, str]:
    """Return the entries of a docstring's section "Attributes"."""
    _, _, section = text.partition("Attributes:\n")
    entries: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        if not line.startswith(" "):
            break
        entry = _ENTRY.match(line[4:])
        if entry:
            names = entry[1].split(", ")
        words = _plain_words(entry[2] if entry else line)
        for name in names:
            entries[name] = words if entry else f"{entries[name]} {words}"
    return entries


def _plain_words(text: str) -> str:
    return _ROLE.sub(lambda role: role[1].rpartition(".")[2], text).replace("``", "").strip()
