"""The base of all sets of options: ranges with the fields, strict parsing, collected problems."""

from __future__ import annotations

import math
import types
import typing
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

from pyprune.errors import ConfigError, did_you_mean, shown

CONFIG_VERSION = 1
Norm = Literal["l1", "l2"]
MOST_PROBLEMS = 10
"""Sentences of one error; a longer list ends with the number of the others."""
LONGEST_TEXT = 4096
"""Characters of a name or path."""
LARGEST_SEED = 2**32 - 1
"""The seeds of steps and epochs are multiples of the option's, and must be below 2**64."""
LARGEST_INDEX = 10_000_000
"""Largest index of a layer or channel, and number of them; far beyond every model."""
LARGEST_WEIGHT = 1_000_000
"""Largest rate or weight of a penalty: float32 cannot overflow by it alone."""
T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """The numbers that an option, or every entry of a list, may have; None = no limit on that side.

    Attributes:
        at_least: smallest number.
        at_most: largest number.
        above: bound that every number exceeds.
        below: bound that no number reaches.
        unit: unit of the limits, plural (tokens).
        otherwise: other allowed values, as the end of a sentence.
    """

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    unit: str = ""
    otherwise: str = ""

    def problem(self, name: str, value: Any) -> str | None:
        """Return one sentence if ``value`` is outside, else None."""
        if not isinstance(value, Real):
            return f"{name} is {shown(value)}; expected a number."
        broken = self._broken(_as_float(value))
        return f"{name} is {shown(value)}; it must be {broken}{self.otherwise}." if broken else None

    def _broken(self, value: float) -> str | None:
        """Return the limit that the value breaks, in words."""
        if self.above is not None and self.below is not None:
            return None if self.above < value < self.below else f"strictly between {self.above:g} and {self.below:g}"
        if self.at_least is not None and value < self.at_least:
            return f"at least {self._limit(self.at_least)}"
        if self.above is not None and value <= self.above:
            return f"> {self._limit(self.above)}"
        if self.at_most is not None and value > self.at_most:
            return f"at most {self._limit(self.at_most)}"
        if self.below is not None and value >= self.below:
            return f"below {self._limit(self.below)}"
        return None if math.isfinite(value) else "a finite number"

    def _limit(self, value: float) -> str:
        unit = self.unit.removesuffix("s") if value == 1 else self.unit
        return f"{value:,} {unit}".rstrip()


def _as_float(value: Any) -> float:
    """Return the nearest float; infinite for a whole number of hundreds of digits."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def option(default: T, **limits: Any) -> T:
    """Return a dataclass field with a default and the range of its numbers, which :class:`Config` checks.

    Args:
        default: a number, None for an optional one, or a list of indices, which must be distinct.
        limits: at_least, at_most, above, below, unit and otherwise, as in :class:`Range`.
    """
    return field(default=default, metadata={"range": Range(**limits)})


class Config:
    """Base of all option dataclasses: strict parsing, round trip, and collected validation."""

    version: ClassVar[int] = CONFIG_VERSION

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build from plain JSON/YAML data.

        Raises:
            ConfigError: unknown keys (with a suggestion) or values of the wrong type, all together.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(f"The options are {shown(data)}; expected a mapping.")
        problems: list[str] = []
        result = cls._parse(data, "", problems)
        if problems:
            raise ConfigError(_first(problems))
        result.validate()
        return result

    @classmethod
    def _parse(cls, data: Mapping[str, Any], path: str, problems: list[str]) -> Self:
        hints = typing.get_type_hints(cls)
        names = {f.name for f in fields(cls)}  # type: ignore[arg-type]
        values: dict[str, Any] = {}
        for key, value in data.items():
            if key == "version" and path == "":
                if value != CONFIG_VERSION:
                    problems.append(f"version is {shown(value)}; this pyprune reads version {CONFIG_VERSION}.")
                continue
            if key not in names:
                # Nobody reads thousands of problems, and the search for similar names takes a while.
                many = len(problems) >= MOST_PROBLEMS
                problems.append("" if many else did_you_mean(_text(key), names, f"option in {path or cls.__name__}"))
                continue
            values[key] = _coerce(value, hints[key], f"{path}{key}", problems)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data that :meth:`from_dict` reads back to an equal object."""
        return {"version": CONFIG_VERSION, **_plain(asdict(self))}  # type: ignore[call-overload]

    def problems(self) -> Iterable[str]:
        """Yield one sentence for each invalid option (none when all are valid)."""
        return ()

    def validate(self) -> None:
        """Raise :class:`ConfigError` with every problem of this object and of the ones inside it."""
        if problems := [*self.all_problems()]:
            raise ConfigError(_first(problems))

    def all_problems(self) -> Iterator[str]:
        """Yield every problem of this object and of the ones inside it."""
        yield from self._range_problems()
        yield from self.problems()
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if isinstance(value, Config):
                yield from (f"{self._label(f.name)}: {problem}" for problem in value.all_problems())

    def _label(self, name: str) -> str:
        """Return the name that users write for the options in a field."""
        return name

    def _range_problems(self) -> Iterator[str]:
        """Yield one sentence for each number outside its range or not finite, and for each text that can be no name."""
        for f in fields(self):  # type: ignore[arg-type]
            value, allowed = getattr(self, f.name), f.metadata.get("range")
            if allowed is None and isinstance(value, float):
                allowed = Range()
            if isinstance(value, str) and allowed is None:
                problem = _text_problem(f.name, value)
            elif isinstance(value, (tuple, list)) and allowed is not None:
                problem = _list_problem(f.name, value, allowed)
            else:
                problem = None if value is None or allowed is None else allowed.problem(f.name, value)
            if problem:
                yield problem


def _first(problems: Sequence[str]) -> list[str]:
    """Return the first sentences, and the number of the others."""
    more = len(problems) - MOST_PROBLEMS
    return [*problems[:MOST_PROBLEMS], f"There are {more:,} more problems."] if more > 0 else list(problems)


def _text_problem(name: str, value: str) -> str | None:
    if len(value) > LONGEST_TEXT:
        return f"{name} has {len(value):,} characters; at most {LONGEST_TEXT:,} are allowed."
    if any(ord(c) < 32 or 127 <= ord(c) < 160 or 0xD800 <= ord(c) < 0xE000 for c in value):
        return f"{name} is {shown(value)}, which holds a control character or half a character; leave it out."
    return None


def _list_problem(name: str, values: Sequence[Any], allowed: Range) -> str | None:
    for i, value in enumerate(values):
        if problem := allowed.problem(f"{name}[{i}]", value):
            return problem
    twice = next((value for value, count in Counter(values).items() if count > 1), None)
    return None if twice is None else f"{name} names {shown(twice)} twice; name each one once."


def _text(value: Any) -> str:
    return value if isinstance(value, str) else shown(value)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value


def _coerce(value: Any, hint: Any, path: str, problems: list[str]) -> Any:
    """Check ``value`` against a type hint, converting lists to tuples and ints to floats where meant."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _coerce_union(value, hint, path, problems)
    if origin is Literal:
        return _coerce_word(value, typing.get_args(hint), path, problems)
    if is_dataclass(hint) and isinstance(hint, type) and issubclass(hint, Config):
        if isinstance(value, Mapping):
            return hint._parse(value, f"{path}.", problems)
        problems.append(f"{path} is {shown(value)}; expected a mapping of options.")
        return hint()
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            problems.append(f"{path} is {shown(value)}; expected a list.")
            return ()
        return _coerce_list(value, typing.get_args(hint)[0], path, problems)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return _as_float(value)
    if hint is float and isinstance(value, str):
        return _float_from_text(value, path, problems)
    if hint is Any:
        return value
    expected = origin or hint
    if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        problems.append(f"{path} is {shown(value)}; expected {getattr(expected, '__name__', expected)}.")
    return value


def _coerce_word(value: Any, words: Sequence[Any], path: str, problems: list[str]) -> Any:
    if value is False and "off" in words:  # as YAML reads it
        return "off"
    if value not in words:
        problems.append(did_you_mean(_text(value), [str(word) for word in words], f"value of {path}"))
    return value


def _coerce_list(values: Sequence[Any], hint: Any, path: str, problems: list[str]) -> tuple[Any, ...]:
    """Check the entries up to the first wrong one: of a million, one is enough to report."""
    entries: list[Any] = []
    before = len(problems)
    for i, value in enumerate(values):
        entries.append(_coerce(value, hint, f"{path}[{i}]", problems))
        if len(problems) > before:
            break
    return tuple(entries)


def _coerce_union(value: Any, hint: Any, path: str, problems: list[str]) -> Any:
    options = typing.get_args(hint)
    if value is None and type(None) in options:
        return None
    attempts: list[list[str]] = []
    for option in (o for o in options if o is not type(None)):
        trial: list[str] = []
        result = _coerce(value, option, path, trial)
        if not trial:
            return result
        attempts.append(trial)
    problems.extend(attempts[0])
    return value


def _float_from_text(value: str, path: str, problems: list[str]) -> Any:
    """Read text as a number: YAML reads ``1e-3`` (no dot) as text."""
    try:
        return float(value)
    except ValueError:
        problems.append(f"{path} is {shown(value)}; expected a number.")
        return value
