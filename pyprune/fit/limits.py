"""Read budgets ("memory=120MB, speedup>=1.3") and turn them into bounds. Does not import torch.

Every limit is an upper bound of one :class:`Quantity`. Measures that grow when a model gets better are inverted: 800
tokens/s at 64 x 128 is a generation of at most 64 * 128 / 800 seconds. A speedup of 1.3 is a prefill of at most the
dense model's over 1.3. A limit keeps its name, number and unit as written, for reports and messages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pyprune.errors import BudgetError, did_you_mean, shown
from pyprune.fit.quantities import CostModel, Kind, Quantity
from pyprune.plan import PrunePlan

DEFAULT_CONTEXT = 2048
"""Default tokens of the key/value cache of ``memory``, and of the prompt of ``speedup``."""
LARGEST_TOKENS = 10_000_000
LARGEST_BATCH = 100_000
LARGEST_NUMBER = 1e18
LONGEST_BUDGET = 2000
"""Most characters of a budget."""

BYTES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
SECONDS = {"ms": 1e-3, "s": 1.0}
COUNTS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9}
PLAIN = {"": 1.0}
TIMES = {"": 1.0, "x": 1.0}
OF_DENSE = "%"
"""Unit of a limit that is a share of the dense model's amount."""


@dataclass(frozen=True)
class Measure:
    """A measure that a budget can limit.

    Attributes:
        kind: of the quantity it limits.
        units: unit -> its size in the base unit (bytes, seconds, parameters, tokens/s); "" = no unit.
        place: the part after the @: nothing, a length ("tokens"), contexts of a length ("contexts", the batch may be
            left out) or a batch and its new tokens, perhaps with a prompt's length ("batch").
        at: default (batch, tokens); None = the budget must name them.
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
        """The sign of its limits."""
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
"""Name -> measure. ``speedup`` and ``throughput_increase`` are the papers' Speedup (one prompt of 2,048 tokens) and
throughput increase (64 prompts, 128 new tokens each)."""


@dataclass(frozen=True)
class Limit:
    """One limit of a budget.

    Attributes:
        measure: a key of :data:`MEASURES`.
        quantity: that it bounds.
        number: as written, above 0.
        unit: as written; "%" = of the dense model's amount.
    """

    measure: str
    quantity: Quantity
    number: float
    unit: str = ""

    def __str__(self) -> str:
        """Write it in the form that :func:`parse_limit` reads: memory@4096<=120MB."""
        place = f"@{self.quantity.place}" if self._means.place != "nothing" else ""
        return f"{self.measure}{place}{self._means.direction}{_number(self.number)}{self.unit}"

    @property
    def is_relative(self) -> bool:
        """Check whether the bound depends on the dense model's amount."""
        return self._means.is_a == "gain" or self.unit == OF_DENSE

    def bound(self, dense: float) -> float:
        """Return the largest allowed amount of the quantity, in its own unit (a count, bytes or seconds).

        Args:
            dense: the dense model's amount; only relative limits read it.
        """
        if self.unit == OF_DENSE:
            return self.number / 100 * dense
        if self._means.is_a == "gain":
            return dense / self.number
        if self._means.is_a == "rate":
            return self.quantity.batch * self.quantity.tokens / self.number
        return self.number * self._means.units[self.unit]

    def value(self, amount: float, dense: float) -> float:
        """Convert an amount of the quantity to this limit's measure and unit.

        Args:
            amount: in the quantity's own unit, above 0.
            dense: the dense model's amount.
        """
        if self.unit == OF_DENSE:
            return 100 * amount / dense
        if self._means.is_a == "gain":
            return dense / amount
        if self._means.is_a == "rate":
            return self.quantity.batch * self.quantity.tokens / amount
        return amount / self._means.units[self.unit]

    def write(self, amount: float, dense: float) -> str:
        """Write an amount in this limit's unit with four digits: 118.2 MB."""
        return f"{_digits(self.value(amount, dense))} {self.unit}".rstrip()

    def nearest(self, amount: float, dense: float) -> str:
        """Write the tightest limit of this measure that a model of this amount keeps, rounded to the safe side."""
        value = self.value(amount, dense)
        step = 10.0 ** (math.floor(math.log10(value)) - 3)
        rounded = (math.floor(value / step) if self._means.direction == ">=" else math.ceil(value / step)) * step
        return str(Limit(self.measure, self.quantity, float(f"{rounded:.4g}"), self.unit))

    def absolute(self, dense: float) -> Limit:
        """Return this bound as an amount of the quantity; itself if it does not depend on the dense model.

        Args:
            dense: the dense model's amount.
        """
        unit = {"parameters": "", "memory": "B"}.get(self.quantity.kind, "s")
        return Limit(self.quantity.kind, self.quantity, self.bound(dense), unit) if self.is_relative else self

    @property
    def _means(self) -> Measure:
        return MEASURES[self.measure]


@dataclass(frozen=True)
class Budget:
    """Limits that a model must keep: at most one absolute and one relative limit of each quantity.

    Attributes:
        limits: in the order as written.
    """

    limits: tuple[Limit, ...]

    @classmethod
    def parse(cls, texts: str | Iterable[str]) -> Budget:
        """Read limits, each as NAME[@PLACE]=NUMBER[UNIT]; "=" means the direction of the measure.

        Args:
            texts: one text or several, each with one limit or more, separated by commas.

        Raises:
            BudgetError: names every limit that cannot be read, and those that contradict or repeat each other.
        """
        parts = [part.strip() for text in ([texts] if isinstance(texts, str) else texts) for part in _split(text)]
        if not any(parts):
            raise BudgetError(f"The budget is empty. Name at least one limit, such as {_examples()}.")
        problems: list[str] = []
        limits: list[Limit] = []
        for part in parts:
            try:
                limits.append(parse_limit(part))
            except BudgetError as error:
                problems.append(str(error))
        problems += _repetitions(limits)
        if problems:
            raise BudgetError("\n".join(problems))
        return cls(tuple(limits))

    def __str__(self) -> str:
        return ", ".join(map(str, self.limits))

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """The limited quantities, in the order of the limits."""
        return tuple(dict.fromkeys(limit.quantity for limit in self.limits))

    @property
    def timed(self) -> tuple[Quantity, ...]:
        """The limited times, which depend on a machine."""
        return tuple(quantity for quantity in self.quantities if quantity.is_timed)

    def absolute(self, dense: Mapping[Quantity, float]) -> Budget:
        """Turn limits that depend on the dense model into absolute ones.

        Args:
            dense: the dense model's amounts, measured or predicted.
        """
        return Budget(tuple(limit.absolute(dense[limit.quantity]) for limit in self.limits))

    def dense(self, costs: CostModel, identity: PrunePlan) -> dict[Quantity, float]:
        """Predict the dense model's amounts of the limited quantities.

        Raises:
            BudgetError: the cost model does not know a quantity.
        """
        return {quantity: costs.predict(quantity, identity) for quantity in self.quantities}

    def bounds(self, dense: Mapping[Quantity, float]) -> dict[Quantity, float]:
        """Return the upper bound of every limited quantity, in its unit; the tighter of two.

        Args:
            dense: the dense model's amounts, from :meth:`dense` or measured.
        """
        bounds: dict[Quantity, float] = {}
        for limit in self.limits:
            bound = limit.bound(dense[limit.quantity])
            bounds[limit.quantity] = min(bound, bounds.get(limit.quantity, bound))
        return bounds

    def broken(
        self, amounts: Mapping[Quantity, float], dense: Mapping[Quantity, float], slack: float = 0.0
    ) -> tuple[Limit, ...]:
        """Return the limits that predicted or measured amounts exceed.

        Args:
            amounts: of every limited quantity, in its unit.
            dense: the dense model's.
            slack: share of the bound by which it may be exceeded.
        """
        return tuple(x for x in self.limits if amounts[x.quantity] > x.bound(dense[x.quantity]) * (1 + slack))

    def room(self, amounts: Mapping[Quantity, float], dense: Mapping[Quantity, float]) -> float:
        """Return the share of the tightest limit that amounts leave unused, below 0 if one is exceeded.

        Args:
            amounts: of every limited quantity, in its unit.
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
    """Read the quantity of a limit."""
    form = {
        "nothing": "takes no @",
        "tokens": "needs the prompt's length in tokens after the @",
        "contexts": "takes the context's length in tokens after the @, or contexts x tokens",
        "batch": "needs batch x new tokens after the @, and + the prompts' length if they are long",
    }[measure.place]
    wrong = f"{shown(text)}: {measure.example.partition('@')[0].partition('=')[0].rstrip('<>')} {form}"
    if place is None:
        if measure.at is None:
            raise BudgetError(f"{wrong}, such as {measure.example}.")
        batch, tokens = measure.at
        return Quantity(measure.kind, tokens, batch)
    match = _PLACE.fullmatch(place)
    batches = {"tokens": (False,), "contexts": (False, True), "batch": (True,)}.get(measure.place, ())
    if (
        match is None
        or (match["batch"] is not None) not in batches
        or (match["prompt"] is not None and measure.place != "batch")
    ):
        raise BudgetError(f"{wrong}, such as {measure.example}; seen: @{shown(place)[1:-1]}.")
    batch, tokens, prompt = int(match["batch"] or 1), int(match["tokens"]), int(match["prompt"] or 0)
    lengths = [tokens] if match["prompt"] is None else [tokens, prompt]
    if not (1 <= batch <= LARGEST_BATCH and all(1 <= length <= LARGEST_TOKENS for length in lengths)):
        raise BudgetError(
            f"{shown(text)}: {batch} x {' + '.join(map(str, lengths))} is out of range; 1 to {LARGEST_BATCH:,} "
            f"sequences of 1 to {LARGEST_TOKENS:,} tokens are allowed."
        )
    return Quantity(measure.kind, tokens, batch, prompt)


def _value(text: str, name: str, rest: str) -> tuple[float, str]:
    """Read the number and unit of a limit."""
    measure = MEASURES[name]
    match = _VALUE.fullmatch(rest)
    if match is None:
        raise BudgetError(f"{shown(text)}: {shown(rest)} is not a number with a unit, such as in {measure.example}.")
    number, unit = float(match["number"]), match["unit"]
    units = {**measure.units, **({OF_DENSE: 0.01} if measure.is_a == "amount" else {})}
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


def _repetitions(limits: Sequence[Limit]) -> list[str]:
    """Describe each quantity with more than one absolute limit, or more than one share of the dense model.

    One of each is allowed: only the dense model's amount decides which of them is tighter.
    """
    alike: dict[tuple[Quantity, bool], list[Limit]] = {}
    for limit in limits:
        alike.setdefault((limit.quantity, limit.is_relative), []).append(limit)
    return [
        f"{' and '.join(map(str, group))} limit the same quantity, {quantity}; give one of them."
        for (quantity, _), group in alike.items()
        if len(group) > 1
    ]


def _examples() -> str:
    return ", ".join(MEASURES[name].example for name in ("parameters", "memory", "prefill", "speedup"))


def _number(value: float) -> str:
    """Write a number as the shortest text that is read as the same number."""
    return str(int(value)) if value == int(value) and value < 1e15 else repr(value)


def _digits(value: float) -> str:
    """Write four significant digits, never as a power of ten."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 3 - math.floor(math.log10(value)))}f}" if value > 0 else "0"
