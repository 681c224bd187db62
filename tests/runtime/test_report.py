"""Reports: numbers readable, text escaped, files whole, the page self-contained."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from pyprune.errors import ConfigError, OutputError
from pyprune.runtime.charts import BarChart, LineChart, StripChart
from pyprune.runtime.files import write_text
from pyprune.runtime.report import (
    Report,
    Table,
    format_cell,
    markdown_table,
    print_table,
    rich_table,
    to_html,
    to_markdown,
    write_report,
)


def sample() -> Report:
    table = Table(
        "Perplexity",
        ("arm", "PPL", "parameters"),
        (("dense", 28.91, 134_515_008), ("a|b <i>", 1.7e7, None), ("default", 33.4, 109_742_400)),
        note="Lower is better.",
        highlight=2,
    )
    bars = BarChart(
        "Perplexity", "PPL (lower is better)", {"direct": 89.2, "default": 33.4}, 28.9, highlight=("default",)
    )
    lines = LineChart("Loss", "step", "nats/token", {"one": [3.0, 2.5], "two": [3.0, 2.7]})
    return Report("A <b> report", ("One & all.",), (table,), (bars, lines), {"machine": "2 cores"}, ("A note.",))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (1234567, "1,234,567"),
        (33.9071, "33.91"),
        (480.26, "480.3"),
        (12345.6, "12,346"),
        (1.7e7, "1.7e+07"),
        (0.25, "0.250"),
        (0.0, "0.000"),
        (2e-5, "2e-05"),
        (float("nan"), "nan"),
        (True, "yes"),
        ("text", "text"),
    ],
)
def test_cells_are_readable(value: str | int | float | None, text: str) -> None:
    assert format_cell(value) == text


def test_a_row_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="Row 1 of the table 'T' has 1 cells; it needs 2"):
        Table("T", ("a", "b"), ((1, 2), (1,)))


def test_markdown_escapes_aligns_and_highlights() -> None:
    lines = markdown_table(sample().tables[0]).splitlines()
    assert lines[0] == "| arm | PPL | parameters |"
    assert lines[1] == "|---|---:|---:|"
    assert lines[3] == r"| a\|b &lt;i> | 1.7e+07 | - |"
    assert lines[4] == "| **default** | **33.40** | **109,742,400** |"


def test_markdown_has_every_section() -> None:
    text = to_markdown(sample())
    for part in (
        "# A <b> report",
        "One & all.",
        "## Perplexity",
        "Lower is better.",
        "- machine: 2 cores",
        "- A note.",
    ):
        assert part in text


def test_html_is_escaped_and_self_contained() -> None:
    page = to_html(sample())
    assert "A &lt;b&gt; report" in page
    assert "a|b &lt;i&gt;" in page
    assert '<tr class="best"><td>default</td>' in page
    assert page.count("<svg") == 2
    assert "<script" not in page
    assert not re.search(r"(src|href)=\"(?!#)", page), "the page loads something"


def test_a_picture_comes_first_and_commands_are_shown_as_they_are_typed() -> None:
    charts = StripChart("Layers", 4, (2,)), BarChart("Speed", "tokens/s", {"dense": 1.0})
    report = Report("T", ("Text.",), picture=charts, commands={"serve <it>": "pyprune serve 'a b'"})
    page, text = to_html(report), to_markdown(report)
    assert page.index('<figure class="wide"><svg') < page.index("<figure><svg") < page.index("<p>Text.</p>")
    assert "serve &lt;it&gt;<pre>pyprune serve &#x27;a b&#x27;</pre>" in page
    assert "```sh\npyprune serve 'a b'    # serve <it>\n```" in text
    assert "picture" not in to_html(sample()).split("<body>")[1]


def test_both_files_are_written_and_replaced(tmp_path: Path) -> None:
    for _ in range(2):
        markdown, page = write_report(sample(), tmp_path / "new")
    assert markdown.read_text(encoding="utf-8") == to_markdown(sample())
    assert page.read_text(encoding="utf-8") == to_html(sample())
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["report.html", "report.md"]


def test_a_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.md"
    write_text(path, "old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="no room on the disk"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["report.md"]


def test_tables_print_on_a_terminal_and_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    table = sample().tables[0]
    print_table(table)
    assert "| **default** |" in capsys.readouterr().out
    drawn = rich_table(table)
    assert drawn.row_count == 3
    assert drawn.columns[1].justify == "right"
