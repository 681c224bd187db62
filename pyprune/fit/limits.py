"""Budgets as they are written ("memory=120MB, speedup>=1.3"), and the bounds that they mean. No torch here.

Every limit is an upper bound of one :class:`Quantity`. What grows when a model gets better (tokens per second, speedup)
is turned over: 800 tokens/s at 64 x 128 is a generation of at most 64 * 128 / 800 seconds, and a speedup of 1.3 is a
prefill of at most the dense model's over 1.3. A limit keeps the name, the number and the unit it was written with, so
that reports and messages speak as the user did.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pyprune.errors import BudgetError, did_you_mean, shown
from pyprune.fit.quantities import CostModel, Kind, Quantity, predicted
from pyprune.plan import PrunePlan

DEFAULT_CONTEXT = 2048
"""Tokens of the key/value cache that ``memory`` counts, and of the prompt of ``speedup``, where none are named."""
LARGEST_TOKENS = 10_000_000
LARGEST_BATCH = 100_000
LARGEST_NUMBER = 1e18
LONGEST_BUDGET = 2000
"""Characters of a budget that are read."""

BYTES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
SECONDS = {"ms": 1e-3, "s": 1.0}
COUNTS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9}
PLAIN = {"": 1.0}
TIMES = {"": 1.0, "x": 1.0}
OF_DENSE = "%"
"""Unit of what is stated as a share of the dense model's amount."""


@dataclass(frozen=True)
class Measure:
    """Something that a budget can name.

    Attributes:
        kind: of the quantity it limits.
        units: unit -> how many of the base unit (bytes, seconds, parameters, tokens/s) it is; "" = none is needed.
        place: what stands behind the @: nothing, a length ("tokens"), contexts of a length ("contexts", the batch may
            be left out) or a batch and its new tokens, which a prompt's length may follow ("batch").
        at: (batch, tokens) where the budget names none; None = it must.
        is_a: amount (of the quantity itself, limited from above), rate (tokens over seconds) or gain (the dense
            model's amount over the model's); the last two are limited from below.
        example: a budget as it is written.
    """

    kind: Kind
    units: Mapping[str, float]
    place: Literal["nothing", "tokens", "contexts", "batch"]
    at: tuple[int, int] | None
    is_a: Literal["amount", "rate", "gain"]
    example: str

    @property
    def direction(self) -> str:
        """The way in which it is limited."""
        return "<=" if self.is_a == "amount" else ">="


MEASURES: dict[str, Measure] = {
    "parameters": Measure("parameters", COUNTS, "nothing", (1, 0), "amount", "parameters=100M"),
    "memory": Measure("memory", BYTES, "contexts", (1, DEFAULT_CONTEXT), "amount", "memory@4x4096<=1.5GiB"),
    "prefill": Measure("prefill", SECONDS, "tokens", None, "amount", "prefill@2048<=900ms"),
    "time_to_first_token": Measure("prefill", SECONDS, "tokens", None, "amount", "time_to_first_token@512<=200ms"),
    "generation": Measure("generation", SECONDS, "batch", None, "amount", "generation@64x128<=10s"),
    "tokens_per_second": Measure("generation", PLAIN, "batch", None, "rate", "tokens_per_second@64x128>=800"),
    "speedup": Measure("prefill", TIMES, "tokens", (1, DEFAULT_CONTEXT), "gain", "speedup>=1.3"),
    "throughput_increase": Measure("generation", TIMES, "batch", (64, 128), "gain", "throughput_increase>=1.2"),
}
"""Name -> what it means. ``speedup`` and ``throughput_increase`` are the papers' Speedup (one prompt of 2,048 tokens)
and throughput increase (64 prompts, 128 new tokens each)."""


@dataclass(frozen=True)
class Limit:
    """One limit of a budget.

    Attributes:
        measure: its name, a key of :data:`MEASURES`.
        quantity: what it bounds.
        number: as it was written, above 0.
        unit: as it was written; "%" = of the dense model's amount.
    """

    measure: str
    quantity: Quantity
    number: float
    unit: str = ""

    def __str__(self) -> str:
        """As it can be read again: memory@4096<=120MB."""
        place = f"@{self.quantity.place}" if self._means.place != "nothing" else ""
        return f"{self.measure}{place}{self._means.direction}{_number(self.number)}{self.unit}"

    @property
    def is_relative(self) -> bool:
        """Whether the bound depends on what the dense model takes."""
        return self._means.is_a == "gain" or self.unit == OF_DENSE

    def bound(self, dense: float) -> float:
        """The most of the quantity that is allowed, in its own unit (a count, bytes or seconds).

        Args:
            dense: what the dense model takes of it; only relative limits read it.
        """
        if self.unit == OF_DENSE:
            return self.number / 100 * dense
        if self._means.is_a == "gain":
            return dense / self.number
        if self._means.is_a == "rate":
            return self.quantity.batch * self.quantity.tokens / self.number
        return self.number * self._means.units[self.unit]

    def value(self, amount: float, dense: float) -> float:
        """An amount of the quantity as a number of this limit's measure and unit.

        Args:
            amount: in the quantity's own unit, above 0.
            dense: what the dense model takes.
        """
        if self.unit == OF_DENSE:
            return 100 * amount / dense
        if self._means.is_a == "gain":
            return dense / amount
        if self._means.is_a == "rate":
            return self.quantity.batch * self.quantity.tokens / amount
        return amount / self._means.units[self.unit]

    def written(self, amount: float, dense: float) -> str:
        """The same for people, with four digits: 118.2 MB."""
        return f"{_digits(self.value(amount, dense))} {self.unit}".rstrip()

    def reachable(self, amount: float, dense: float) -> str:
        """A limit that a model of this amount just keeps, as it is written: rounded to the safe side."""
        value = self.value(amount, dense)
        step = 10.0 ** (math.floor(math.log10(value)) - 3)
        rounded = (math.floor(value / step) if self._means.direction == ">=" else math.ceil(value / step)) * step
        return str(Limit(self.measure, self.quantity, float(f"{rounded:.4g}"), self.unit))

    def absolute(self, dense: float) -> Limit:
        """The same bound as an amount of the quantity; itself where it depends on no dense model.

        Args:
            dense: what the dense model takes.
        """
        unit = {"parameters": "", "memory": "B"}.get(self.quantity.kind, "s")
        return Limit(self.quantity.kind, self.quantity, self.bound(dense), unit) if self.is_relative else self

    @property
    def _means(self) -> Measure:
        return MEASURES[self.measure]


@dataclass(frozen=True)
class Budget:
    """What a model may take: limits that all hold, at most one in itself and one beside the dense model of a quantity.

    Attributes:
        limits: in the order in which they were written.
    """

    limits: tuple[Limit, ...]

    @classmethod
    def parse(cls, texts: str | Iterable[str]) -> Budget:
        """Read limits, each as NAME[@PLACE]=NUMBER[UNIT]; "=" stands for the direction that the name has.

        Args:
            texts: one text or several, each with one limit or more, separated by commas.

        Raises:
            BudgetError: every limit that cannot be read, and those that contradict or repeat each other.
        """
        parts = [part.strip() for text in ([texts] if isinstance(texts, str) else texts) for part in _split(text)]
        if not any(parts):
            raise BudgetError(f"The budget is empty. Name at least one limit, such as {_examples()}.")
        problems: list[str] = []
        found: list[Limit] = []
        for part in parts:
            try:
                found.append(parse_limit(part))
            except BudgetError as error:
                problems.append(str(error))
        problems += _repeated(found)
        if problems:
            raise BudgetError("\n".join(problems))
        return cls(tuple(found))

    def __str__(self) -> str:
        return ", ".join(map(str, self.limits))

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """What is limited, in the order of the limits."""
        return tuple(dict.fromkeys(limit.quantity for limit in self.limits))

    @property
    def timed(self) -> tuple[Quantity, ...]:
        """What of it takes time, and so depends on a machine."""
        return tuple(quantity for quantity in self.quantities if quantity.is_timed)

    def absolute(self, dense: Mapping[Quantity, float]) -> Budget:
        """The same with every limit that depends on the dense model as a number of its own.

        Args:
            dense: what the dense model takes, measured or predicted.
        """
        return Budget(tuple(limit.absolute(dense[limit.quantity]) for limit in self.limits))

    def dense(self, costs: CostModel, identity: PrunePlan) -> dict[Quantity, float]:
        """What the dense model takes of everything that is limited.

        Raises:
            BudgetError: the cost model does not know a quantity.
        """
        return {quantity: predicted(costs, quantity, identity) for quantity in self.quantities}

    def bounds(self, dense: Mapping[Quantity, float]) -> dict[Quantity, float]:
        """Upper bound of everything that is limited, in the quantity's unit; the tighter of two.

        Args:
            dense: what the dense model takes, from :meth:`dense` or measured.
        """
        found: dict[Quantity, float] = {}
        for limit in self.limits:
            own = limit.bound(dense[limit.quantity])
            found[limit.quantity] = min(own, found.get(limit.quantity, own))
        return found

    def broken(
        self, amounts: Mapping[Quantity, float], dense: Mapping[Quantity, float], slack: float = 0.0
    ) -> tuple[Limit, ...]:
        """The limits that amounts exceed, predicted or measured ones.

        Args:
            amounts: of everything that is limited, in the quantities' units.
            dense: the dense model's.
            slack: share of the bound by which it may be exceeded.
        """
        return tuple(x for x in self.limits if amounts[x.quantity] > x.bound(dense[x.quantity]) * (1 + slack))

    def room(self, amounts: Mapping[Quantity, float], dense: Mapping[Quantity, float]) -> float:
        """Share of the tightest limit that amounts leave unused, below 0 where one is exceeded.

        Args:
            amounts: of everything that is limited, in the quantities' units.
            dense: the dense model's.
        """
        return min(1 - amounts[x.quantity] / x.bound(dense[x.quantity]) for x in self.limits)


_FORM = re.compile(r"(?P<name>[^@<>=\s]+)\s*(@\s*(?P<place>[^<>=]*?))?\s*(?P<sign>[<>=]+)\s*(?P<rest>.*)")
_VALUE = re.compile(r"(?P<number>[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?)\s*(?P<unit>[A-Za-z%/]*)")
_PLACE = re.compile(r"((?P<batch>\d{1,9})\s*[xX×*]\s*)?(?P<tokens>\d{1,9})(\s*\+\s*(?P<prompt>\d{1,9}))?")


def parse_limit(text: str) -> Limit:
    """Read one limit, such as prefill@2048<=900ms.

    Raises:
        BudgetError: an unknown name or unit, a place or number that is not allowed, the wrong direction.
    """
    form = _FORM.fullmatch(text)
    if form is None:
        raise BudgetError(f"{shown(text)} is not a limit; write NAME=NUMBER, such as {_examples()}.")
    name = form["name"]
    if name not in MEASURES:
        raise BudgetError(did_you_mean(name, MEASURES, "limit"))
    measure = MEASURES[name]
    allowed = ("=", measure.direction)
    if form["sign"] not in allowed:
        way = "from above" if measure.direction == "<=" else "from below"
        raise BudgetError(
            f"{shown(text)} uses {form['sign']!r}, but {name} is limited {way}; use {' or '.join(allowed)}, such as "
            f"{measure.example}."
        )
    quantity = _quantity(text, measure, form["place"])
    number, unit = _value(text, name, form["rest"])
    return Limit(name, quantity, number, unit)


def _quantity(text: str, measure: Measure, place: str | None) -> Quantity:
    """What a limit bounds."""
    wanted = {
        "nothing": "takes no @",
        "tokens": "needs the prompt's length in tokens behind the @",
        "contexts": "takes the context's length in tokens behind the @, or contexts x tokens",
        "batch": "needs batch x new tokens behind the @, and + the prompts' length where they are long",
    }[measure.place]
    wrong = f"{shown(text)}: {measure.example.partition('@')[0].partition('=')[0].rstrip('<>')} {wanted}"
    if place is None:
        if measure.at is None:
            raise BudgetError(f"{wrong}, such as {measure.example}.")
        batch, tokens = measure.at
        return Quantity(measure.kind, tokens, batch)
    found = _PLACE.fullmatch(place)
    takes_batch = measure.place in ("contexts", "batch")
    if found is None or measure.place == "nothing" or (found["batch"] is not None and not takes_batch):
        raise BudgetError(f"{wrong}, such as {measure.example}; seen: @{shown(place)[1:-1]}.")
    if found["batch"] is None and measure.place == "batch":
        raise BudgetError(f"{wrong}, such as {measure.example}; seen: @{place}.")
    if found["prompt"] is not None and measure.place != "batch":
        raise BudgetError(f"{wrong}, such as {measure.example}; seen: @{place}.")
    batch, tokens, prompt = int(found["batch"] or 1), int(found["tokens"]), int(found["prompt"] or 0)
    lengths = [tokens] if found["prompt"] is None else [tokens, prompt]
    if not (1 <= batch <= LARGEST_BATCH and all(1 <= length <= LARGEST_TOKENS for length in lengths)):
        raise BudgetError(
            f"{shown(text)}: {batch} x {' + '.join(map(str, lengths))} is out of range; 1 to {LARGEST_BATCH:,} "
            f"sequences of 1 to {LARGEST_TOKENS:,} tokens are allowed."
        )
    return Quantity(measure.kind, tokens, batch, prompt)


def _value(text: str, name: str, rest: str) -> tuple[float, str]:
    """Number and unit of a limit."""
    measure = MEASURES[name]
    found = _VALUE.fullmatch(rest)
    if found is None:
        raise BudgetError(f"{shown(text)}: {shown(rest)} is not a number with a unit, such as in {measure.example}.")
    number, unit = float(found["number"]), found["unit"]
    units = dict(measure.units)
    if measure.is_a == "amount":
        units[OF_DENSE] = 0.01
    if unit not in units:
        names = [each or "none" for each in units]
        alike = [each for each in units if each.lower() == unit.lower()]
        hint = f" Did you mean {alike[0]!r}?" if alike else ""
        unknown = f"Unknown unit {shown(unit)} of {name}.{hint} Available: {', '.join(names)}."
        problem = unknown if unit else f"a unit is missing: {', '.join(names)}."
        raise BudgetError(f"{shown(text)}: {problem}")
    if not 0 < number * units[unit] <= LARGEST_NUMBER:
        raise BudgetError(f"{shown(text)}: the number is {number:g}; it must be above 0 and at most 1e18.")
    return number, unit


def _split(text: str) -> list[str]:
    if len(text) > LONGEST_BUDGET:
        raise BudgetError(f"The budget has {len(text):,} characters; at most {LONGEST_BUDGET:,} are read.")
    return [part for part in text.split(",") if part.strip()]


def _repeated(limits: Sequence[Limit]) -> list[str]:
    """One sentence for each quantity that is limited more than once, in itself or as a share of the dense model.

    One of each is allowed: only the dense model's amount tells which of them is tighter.
    """
    alike: dict[tuple[Quantity, bool], list[Limit]] = {}
    for limit in limits:
        alike.setdefault((limit.quantity, limit.is_relative), []).append(limit)
    return [
        f"{' and '.join(map(str, some))} limit the same quantity, {quantity}; give one of them."
        for (quantity, _), some in alike.items()
        if len(some) > 1
    ]


def _examples() -> str:
    return ", ".join(MEASURES[name].example for name in ("parameters", "memory", "prefill", "speedup"))


def _number(value: float) -> str:
    """The shortest text that is read back as the same number."""
    return str(int(value)) if value == int(value) and value < 1e15 else repr(value)


def _digits(value: float) -> str:
    """Four significant digits, never as a power of ten."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 3 - math.floor(math.log10(value)))}f}" if value > 0 else "0"
