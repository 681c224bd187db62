"""Charts as data, drawn as plain SVG: bars, lines, points, and a row of squares. No drawing library is needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TypeVar

from pyprune.runtime.svg import SERIES, Drawing, text_width


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars with their values next to them.

    Attributes:
        title: of the comparison.
        unit: label of the value axis, with the unit and which direction is better.
        bars: label -> value, top to bottom.
        reference: a value to draw as a dashed line (the dense model's); None = none.
        reference_label: name of the dashed line.
        highlight: labels of the bars in the accent colour.
        logarithmic: a logarithmic value axis, for values that span decades.
    """

    title: str
    unit: str
    bars: Mapping[str, float]
    reference: float | None = None
    reference_label: str = "dense"
    highlight: tuple[str, ...] = ()
    logarithmic: bool = False


@dataclass(frozen=True)
class LineChart:
    """Curves over a common axis.

    Attributes:
        title: of the chart.
        x_label: label of the horizontal axis, with the unit.
        y_label: label of the vertical axis, with the unit.
        lines: label -> y values, one a position; None = the line has no point there.
        positions: names of the positions, which are equally far apart; empty = they are numbered from 1.
        x: label -> x values of its line, instead of positions.
        logarithmic: a logarithmic vertical axis, for values that span decades.
    """

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[float | None]]
    positions: tuple[str, ...] = ()
    x: Mapping[str, Sequence[float]] = field(default_factory=dict)
    logarithmic: bool = False


@dataclass(frozen=True)
class PointChart:
    """Points in a plane with their names; those of a front are joined.

    Attributes:
        title: of the chart.
        x_label: label of the horizontal axis, with the unit and which direction is better.
        y_label: label of the vertical axis, with the unit and which direction is better.
        points: label -> (x, y).
        front: labels of the points that no other beats in both, joined by a line.
        reference: label of the point in another colour (the dense model); None = none.
        logarithmic: a logarithmic vertical axis, for values that span decades.
    """

    title: str
    x_label: str
    y_label: str
    points: Mapping[str, tuple[float, float]]
    front: Sequence[str] = ()
    reference: str | None = None
    logarithmic: bool = False


@dataclass(frozen=True)
class StripChart:
    """A row of numbered squares, some of which are missing: the layers of a model.

    Attributes:
        title: of the chart.
        count: number of squares, from 0.
        missing: numbers of those that are drawn as gaps.
    """

    title: str
    count: int
    missing: Sequence[int]


@dataclass(frozen=True)
class HeatChart:
    """Rows of squares in groups, each as dark as its value is large among those of its row.

    Attributes:
        title: of the chart.
        x_label: what a column is.
        groups: name of a group -> name of a row -> values of its columns, at least 0.
        marked: name of a group -> columns in another colour.
        mark: what these columns are.
    """

    title: str
    x_label: str
    groups: Mapping[str, Mapping[str, Sequence[float]]]
    marked: Mapping[str, Sequence[int]] = field(default_factory=dict)
    mark: str = ""


Chart = BarChart | HeatChart | LineChart | PointChart | StripChart
Label = TypeVar("Label")
MARGIN, TITLE, SMALL = 18.0, 15.0, 12.0
"""Pixels around a chart, and sizes of its letters."""
PLOT_TOP, PLOT_BOTTOM = 52.0, 52.0
"""Pixels above the plot for the title, and below it for the ticks and the label of the axis."""
HEAT_ROW, HEAT_GAP = 14.0, 10.0
"""Pixels of a row of squares, and between two groups of rows."""


def pareto_front(points: Mapping[Label, Sequence[float]]) -> list[Label]:
    """Return the labels of the points that no other beats: at most as much of everything, and less of something.

    Args:
        points: label -> its figures, of which less is better (negate one of which more is better).
    """

    def beats(a: Sequence[float], b: Sequence[float]) -> bool:
        return tuple(a) != tuple(b) and all(x <= y for x, y in zip(a, b, strict=True))

    return [label for label, point in points.items() if not any(beats(other, point) for other in points.values())]


def format_number(value: float) -> str:
    """Write a measured number with four digits: 33.9071 -> "33.91", 1.7e7 -> "1.7e+07"."""
    if not math.isfinite(value):
        return str(value)
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.3g}"
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"


def draw_chart(chart: Chart, width: float = 730, height: float | None = None, description: str = "") -> Drawing:
    """Draw a chart.

    Args:
        chart: to draw.
        width: in pixels; text has the same size at any width.
        height: in pixels; None = by its contents. A strip has a fixed one.
        description: what it shows, for those who cannot see it.
    """
    if isinstance(chart, BarChart):
        usual = PLOT_TOP + PLOT_BOTTOM + 28 * len(chart.bars)
    elif isinstance(chart, HeatChart):
        usual = PLOT_TOP + PLOT_BOTTOM + sum(len(rows) * HEAT_ROW + HEAT_GAP for rows in chart.groups.values())
    else:
        usual = 330.0
    drawing = Drawing(width, 92 if isinstance(chart, StripChart) else height or usual, chart.title, description)
    drawing.text(MARGIN, 30, chart.title, size=TITLE, bold=True)
    if isinstance(chart, BarChart):
        _draw_bars(drawing, chart)
    elif isinstance(chart, HeatChart):
        _draw_heat(drawing, chart)
    elif isinstance(chart, StripChart):
        _draw_strip(drawing, chart)
    elif isinstance(chart, PointChart):
        _draw_points(drawing, chart)
    else:
        _draw_lines(drawing, chart)
    return drawing


class Scale:
    """A value axis: where values are drawn, and its ticks.

    Args:
        values: that it holds; those that are not finite are left out, and so are those <= 0 on a logarithmic axis.
        start: pixel of the low end.
        end: pixel of the high end.
        logarithmic: equal factors are equally long.
        padded: leave room beyond the outermost values; otherwise the axis begins at 0.
    """

    def __init__(
        self, values: Iterable[float], start: float, end: float, *, logarithmic: bool = False, padded: bool = True
    ) -> None:
        self.start, self.end = start, end
        self._logarithmic = logarithmic
        shown = [self._measure(value) for value in values if self.holds(value)]
        low, high = min(shown, default=0.0), max(shown, default=1.0)
        room = 0.1 * (high - low) or 0.1 * abs(high) or 1.0
        self._low = low - room if padded or logarithmic else min(low, 0.0)
        if not logarithmic and low >= 0.0:
            self._low = max(self._low, 0.0)  # no room for values that a count or a time cannot have
        self._high = high + (room if padded else 0.0)
        if self._high <= self._low:
            self._high = self._low + 1.0

    def _measure(self, value: float) -> float:
        return math.log10(value) if self._logarithmic else value

    def holds(self, value: float) -> bool:
        """Return whether a value has a place on the axis."""
        return math.isfinite(value) and (value > 0 or not self._logarithmic)

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        share = (self._measure(value) - self._low) / (self._high - self._low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return round values within the axis: three to seven of them, or the decades and what divides them."""
        if self._logarithmic:
            low, high = math.floor(self._low), math.ceil(self._high)
            parts = (1, 2, 5) if self._high - self._low < 3 else (1,)
            values = [part * 10.0**power for power, part in product(range(low, high + 1), parts)]
            return [value for value in values if self._low <= math.log10(value) <= self._high]
        power = 10 ** math.floor(math.log10((self._high - self._low) / 5))
        step = next(power * n for n in (1, 2, 5, 10) if (self._high - self._low) / (power * n) <= 6)
        first = math.ceil(self._low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self._high / step + 1e-9) + 1)]


def _tick(value: float) -> str:
    return f"{value:,.10g}" if abs(value) < 1e5 else f"{value:.3g}"


def _left(labels: Iterable[str]) -> float:
    """Return where a plot begins to the right of its labels."""
    return MARGIN + max((text_width(label, SMALL) for label in labels), default=0.0) + 8


def _draw_bars(drawing: Drawing, chart: BarChart) -> None:
    left = min(_left(chart.bars), drawing.width / 2)
    widest = max((text_width(format_number(value), SMALL) for value in chart.bars.values()), default=0.0)
    shown = [*chart.bars.values(), *([] if chart.reference is None else [chart.reference])]
    scale = Scale(shown, left, drawing.width - MARGIN - widest - 6, logarithmic=chart.logarithmic, padded=False)
    top, bottom = PLOT_TOP, drawing.height - PLOT_BOTTOM
    step = (bottom - top) / max(len(chart.bars), 1)
    _x_axis(drawing, scale, bottom, chart.unit, top)
    for row, (label, value) in enumerate(chart.bars.items()):
        y = top + row * step
        colour = "accent" if label in chart.highlight else "plain"
        end = scale.at(value) if scale.holds(value) else left
        drawing.rectangle(left, y + 0.19 * step, max(end - left, 0), 0.62 * step, colour, corner=2)
        drawing.text(left - 8, y + step / 2 + 4, label, size=SMALL, anchor="end")
        drawing.text(max(end, left) + 5, y + step / 2 + 4, format_number(value), size=SMALL)
    if chart.reference is not None and scale.holds(chart.reference):
        x = scale.at(chart.reference)
        drawing.line([(x, top - 4), (x, bottom)], "soft", dashed=True)
        side = "end" if x > drawing.width * 0.7 else "start"
        label = f"{chart.reference_label} {format_number(chart.reference)}"
        drawing.text(x + (-4 if side == "end" else 4), top - 6, label, "soft", size=11, anchor=side)


def _x_axis(drawing: Drawing, scale: Scale, bottom: float, label: str, top: float) -> None:
    """Draw ticks with lines up to ``top``, and the label below."""
    for value in scale.ticks():
        x = scale.at(value)
        drawing.line([(x, top), (x, bottom)], "line")
        drawing.text(x, bottom + 16, _tick(value), "soft", size=SMALL, anchor="middle")
    drawing.text((scale.start + scale.end) / 2, bottom + 36, label, "soft", size=SMALL, anchor="middle")


def _y_axis(drawing: Drawing, scale: Scale, left: float, right: float, label: str) -> None:
    for value in scale.ticks():
        y = scale.at(value)
        drawing.line([(left, y), (right, y)], "line")
        drawing.text(left - 7, y + 4, _tick(value), "soft", size=SMALL, anchor="end")
    middle = (scale.start + scale.end) / 2
    drawing.text(MARGIN + 4, middle, label, "soft", size=SMALL, anchor="middle", upright=True)


def _plane_left(scale: Scale) -> float:
    """Return where the plot begins to the right of the vertical axis's label and ticks."""
    return _left(map(_tick, scale.ticks())) + 18


def _draw_lines(drawing: Drawing, chart: LineChart) -> None:
    values = [value for line in chart.lines.values() for value in line if value is not None]
    keys = 20.0 * bool(chart.lines)
    y = Scale(values, drawing.height - PLOT_BOTTOM, PLOT_TOP + keys, logarithmic=chart.logarithmic)
    left, right = _plane_left(y), drawing.width - MARGIN - 10
    _y_axis(drawing, y, left, right, chart.y_label)
    places = _line_places(drawing, chart, left, right, y.start)
    key = left
    for number, (label, line) in enumerate(chart.lines.items()):
        colour = SERIES[number % len(SERIES)]
        pairs = zip(places(label), line, strict=False)
        points = [(x, y.at(value)) for x, value in pairs if value is not None and y.holds(value)]
        drawing.line(points, colour, thick=2)
        if chart.positions or chart.x or len(points) == 1:
            for x, height in points:
                drawing.circle(x, height, 3.5, colour)
        drawing.line([(key, PLOT_TOP), (key + 18, PLOT_TOP)], colour, thick=2)
        drawing.text(key + 23, PLOT_TOP + 4, label, size=SMALL)
        key += 23 + text_width(label, SMALL) + 16


def _line_places(
    drawing: Drawing, chart: LineChart, left: float, right: float, bottom: float
) -> Callable[[str], Sequence[float]]:
    """Draw the horizontal axis of a line chart, and return label -> pixels of the points of its line."""
    count = max([len(chart.positions), *map(len, chart.lines.values())], default=0)
    if not chart.positions:
        values = [v for line in chart.x.values() for v in line] if chart.x else [0.0, float(max(count, 1))]
        scale = Scale(values, left, right, padded=bool(chart.x))
        _x_axis(drawing, scale, bottom, chart.x_label, bottom)
        return lambda label: [scale.at(v) for v in chart.x.get(label, range(1, count + 1))]
    inset = min(40.0, (right - left) / (2 * count))
    places = [left + inset + n * (right - left - 2 * inset) / max(count - 1, 1) for n in range(count)]
    for x, name in zip(places, chart.positions, strict=False):
        drawing.text(x, bottom + 16, name, "soft", size=SMALL, anchor="middle")
    drawing.text((left + right) / 2, bottom + 36, chart.x_label, "soft", size=SMALL, anchor="middle")
    return lambda _: places


def _draw_strip(drawing: Drawing, chart: StripChart) -> None:
    step = (drawing.width - 2 * MARGIN) / max(chart.count, 1)
    for number in range(chart.count):
        missing = number in chart.missing
        left = MARGIN + number * step
        drawing.rectangle(left, 44, 0.86 * step, 32, "plain-line" if missing else "accent", corner=2, dashed=missing)
        colour = "soft" if missing else "paper"
        drawing.text(left + 0.43 * step, 64, str(number), colour, size=min(11, 0.45 * step), anchor="middle")


def _draw_heat(drawing: Drawing, chart: HeatChart) -> None:
    names = _left(chart.groups)
    left = names + _left(row for rows in chart.groups.values() for row in rows) - MARGIN
    columns = max((len(values) for rows in chart.groups.values() for values in rows.values()), default=1)
    step = min(HEAT_ROW, (drawing.width - MARGIN - left) / columns)
    top = PLOT_TOP
    for group, rows in chart.groups.items():
        drawing.text(MARGIN, top + 11, group, size=SMALL)
        for row, values in rows.items():
            drawing.text(left - 8, top + 11, row, "soft", size=11, anchor="end")
            largest = max(values, default=0.0) or 1.0
            for column, value in enumerate(values):
                colour = "second" if column in chart.marked.get(group, ()) else "accent"
                opacity = 0.06 + 0.94 * value / largest
                drawing.rectangle(left + column * step, top, 0.86 * step, 0.86 * HEAT_ROW, colour, opacity=opacity)
            top += HEAT_ROW
        top += HEAT_GAP
    drawing.text(left, top + 10, f"{chart.x_label} 0 to {columns - 1}", "soft", size=SMALL)
    if chart.mark:
        key = left + text_width(f"{chart.x_label} 0 to {columns - 1}", SMALL) + 24
        drawing.rectangle(key, top, 12, 12, "second")
        drawing.text(key + 18, top + 10, chart.mark, "soft", size=SMALL)


def _draw_points(drawing: Drawing, chart: PointChart) -> None:
    y = Scale(
        [y for _, y in chart.points.values()],
        drawing.height - PLOT_BOTTOM,
        PLOT_TOP,
        logarithmic=chart.logarithmic,
    )
    left, right = _plane_left(y), drawing.width - MARGIN
    x = Scale([x for x, _ in chart.points.values()], left, right)
    _y_axis(drawing, y, left, right, chart.y_label)
    _x_axis(drawing, x, y.start, chart.x_label, y.end)
    places = {
        label: (x.at(point[0]), y.at(point[1]))
        for label, point in chart.points.items()
        if x.holds(point[0]) and y.holds(point[1])
    }
    drawing.line(sorted(places[label] for label in chart.front if label in places), "accent")
    for label, (across, down) in places.items():
        colour = "soft" if label == chart.reference else "accent" if label in chart.front else "plain"
        figures = ", ".join(map(format_number, chart.points[label]))
        drawing.circle(across, down, 4.5, colour, f"{label}: {figures}")
    _name_points(drawing, places, left, right)


def _name_points(drawing: Drawing, places: Mapping[str, tuple[float, float]], left: float, right: float) -> None:
    """Write the label of each point next to it, where it meets no other label and no other point, if it can."""
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in places.values()]

    def crossed(box: tuple[float, float, float, float]) -> int:
        outside = box[0] < left or box[2] > right
        return 9 * outside + sum(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in taken)

    for label, (x, y) in places.items():
        width = text_width(label, 11)
        boxes = {
            (anchor, base): (start, y + base - 9, start + width, y + base + 3)
            for (anchor, start), base in product((("start", x + 7), ("end", x - 7 - width)), (-4.0, 12.0, 4.0))
        }
        (anchor, base), box = min(boxes.items(), key=lambda item: crossed(item[1]))
        taken.append(box)
        drawing.text(x + (7 if anchor == "start" else -7), y + base, label, size=11, anchor=anchor)
