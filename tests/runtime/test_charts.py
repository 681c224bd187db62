"""Charts and drawings: well-formed, the same for the same data, every colour readable on both kinds of page."""

from __future__ import annotations

import re
from html import unescape
from xml.etree import ElementTree

import pytest

from pyprune.runtime.charts import (
    BarChart,
    Chart,
    HeatChart,
    LineChart,
    PointChart,
    Scale,
    StripChart,
    draw_chart,
    format_number,
)
from pyprune.runtime.svg import COLOURS, SERIES, Drawing

NAME = 'runs/a$^$b <i> & "c"'
CHARTS: dict[str, Chart] = {
    "bars": BarChart(NAME, NAME, {NAME: 1.0, "b": 3.0}, 2.0, NAME, (NAME,)),
    "bars over decades": BarChart("t", "u", {"a": 1.0, "b": 1e6, "none": 0.0}, logarithmic=True),
    "no bars": BarChart("t", "u", {}),
    "lines": LineChart(NAME, NAME, NAME, {NAME: [3.0, 2.5], "two": [3.0, 2.7]}),
    "no lines": LineChart("t", "x", "y", {}),
    "lines at places": LineChart("t", "x", "y", {"a": [1.0, None, 100.0]}, ("1", "4", "16"), logarithmic=True),
    "lines over values": LineChart("t", "x", "y", {"a": [1.0, 2.0]}, x={"a": [10.0, 30.0]}),
    "points": PointChart(NAME, NAME, NAME, {NAME: (1.0, 1.0), "b": (2.0, 3.0)}, (NAME,), "b"),
    "equal points": PointChart("t", "x", "y", {"a": (1.0, 1.0), "b": (1.0, 1.0), "c": (float("nan"), 1.0)}),
    "heat": HeatChart(NAME, "expert", {NAME: {"a": [0, 1], "b": [0, 0]}, "2": {"a": [3, 1]}}, {NAME: [1]}, NAME),
    "strip": StripChart(NAME, 3, (1,)),
}


@pytest.mark.parametrize("name", CHARTS)
def test_charts_are_well_formed_and_reproducible(name: str) -> None:
    svg = draw_chart(CHARTS[name]).render(standalone=True)
    assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    assert "nan" not in re.sub(r"<title>.*?</title>", "", svg)
    assert svg == draw_chart(CHARTS[name]).render(standalone=True)
    assert ElementTree.fromstring(svg)[0].text == CHARTS[name].title


def shapes(chart: Chart, kind: str) -> list[dict[str, str]]:
    return [dict(e.attrib) for e in ElementTree.fromstring(draw_chart(chart).render()).iter(kind)]


def test_bars_are_as_long_as_their_values() -> None:
    short, long = (float(bar["width"]) for bar in shapes(CHARTS["bars"], "rect"))
    assert long == pytest.approx(3 * short, rel=0.01)
    assert [bar["class"] for bar in shapes(CHARTS["bars"], "rect")] == ["accent", "plain"]


def test_squares_are_darker_the_larger_their_value_is_in_its_row() -> None:
    chart = HeatChart("t", "x", {"g": {"a": [0, 2, 4], "b": [7, 0, 0]}}, {"g": [0]}, "marked")
    squares = shapes(chart, "rect")[:-1]  # the last one is the key's
    assert [float(square.get("opacity", 1)) for square in squares] == [0.06, 0.53, 1, 1, 0.06, 0.06]
    assert [square["class"] for square in squares] == ["second", "accent", "accent"] * 2


def test_a_strip_draws_the_missing_squares_as_gaps() -> None:
    counts = [draw_chart(StripChart("t", 5, gone)).render().count("stroke-dasharray") for gone in ((), (1,), (1, 3))]
    assert counts == [0, 1, 2]


def test_a_line_stops_where_it_has_no_value() -> None:
    points = shapes(CHARTS["lines at places"], "circle")
    assert [float(point["cx"]) for point in points] == sorted(float(point["cx"]) for point in points)
    assert len(points) == 2
    assert float(points[1]["cy"]) < float(points[0]["cy"])


def test_points_show_their_names_and_figures() -> None:
    chart = PointChart("t", "x", "y", {'a "<b>': (1.0, 2.0), "b": (3.0, 4.0)}, front=["b"])
    titles = re.findall(r"<circle[^>]*><title>([^<]*)</title>", draw_chart(chart).render())
    assert [unescape(text) for text in titles] == ['a "<b>: 1.00, 2.00', "b: 3.00, 4.00"]


@pytest.mark.parametrize(
    ("values", "logarithmic", "ticks"),
    [
        ([0.0, 10.0], False, ["0", "2", "4", "6", "8", "10"]),
        ([32.0, 405.0], False, ["0", "100", "200", "300", "400"]),
        ([30.0, 700.0], True, ["50", "100", "200", "500"]),
        ([0.00012, 0.00034], False, ["0.0001", "0.00015", "0.0002", "0.00025", "0.0003", "0.00035"]),
    ],
)
def test_ticks_are_round(values: list[float], logarithmic: bool, ticks: list[str]) -> None:
    scale = Scale(values, 0, 100, logarithmic=logarithmic)
    assert [f"{value:.10g}" for value in scale.ticks()] == ticks
    assert all(0 <= scale.at(value) <= 100 for value in (*values, *scale.ticks()))


def test_numbers_have_four_digits() -> None:
    assert [format_number(value) for value in (33.9071, 480.26, 12345.6, 1.7e7, 2e-5, 0.0)] == [
        "33.91", "480.3", "12,346", "1.7e+07", "2e-05", "0.000",
    ]  # fmt: skip


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", COLOURS)
def test_colours_can_be_read(name: str, dark: bool) -> None:
    """WCAG 2: 4.5 to 1 for text, which paper on accent is as well, 3 to 1 for lines; gridlines say nothing."""
    low, high = sorted(luminance(COLOURS[which][dark]) for which in (name, "paper"))
    least = 1.0 if name in ("paper", "line") else 4.5 if name in {"ink", "soft", *SERIES} else 2.5
    assert (high + 0.05) / (low + 0.05) >= least


def test_a_drawing_has_its_colours_for_both_pages_and_text_for_those_who_cannot_see_it() -> None:
    drawing = Drawing(100, 50, "A <title>", "What it shows.")
    drawing.text(1, 2, "a < b", "soft")
    drawing.arrow(0, 0, 10, 0)
    svg = drawing.render(standalone=True)
    assert "<title>A &lt;title&gt;</title><desc>What it shows.</desc>" in svg
    assert 'role="img"' in svg
    assert re.search(r"svg \.soft\{fill:#5d6778\}.*prefers-color-scheme:dark.*svg \.soft\{fill:#a0a9b8\}", svg)
    assert 'class="paper"' in svg
    assert 'class="paper"' not in drawing.render()
