"""Every table of the result pages is what a command prints, and the conclusions quote figures of these pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.pages import DOCS, add_pages_of_methods, main, reprint
from pyprune.methods.registry import own_methods
from tests._support.paths import REPO

PRINTED = re.compile(r"<!-- printed -->\n.*?<!-- end -->\n", re.DOTALL)
RESULTS = sorted(path for path in (DOCS / "results").glob("*.md") if PRINTED.search(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_page_of_results_has_what_its_command_prints(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert [line for line in PRINTED.sub("", page).splitlines() if line.startswith("|")] == [], "copied by hand"
    assert reprint(page) == page, f"python -m bench.pages {path.relative_to(REPO)}"


def test_a_changed_output_is_printed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\necho no\necho 'a b'\n```\n\nWords.\n\n<!-- printed -->\nold\n<!-- end -->\n\nMore.\n")
    assert main([str(page)]) == 0
    assert page.read_text().endswith("Words.\n\n<!-- printed -->\n\na b\n\n<!-- end -->\n\nMore.\n")
    page.write_text("<!-- printed -->\n<!-- end -->\n")
    assert main([str(page)]) == 2
    assert "no code block" in capsys.readouterr().err
    page.write_text("```sh\nfalse\n```\n<!-- printed -->\n<!-- end -->\n")
    assert main([str(page)]) == 2
    assert "'false' ended with 1" in capsys.readouterr().err


def test_a_method_without_a_page_gets_one(tmp_path: Path) -> None:
    add_pages_of_methods(tmp_path)
    assert {path.stem for path in tmp_path.glob("*.md")} == set(own_methods())
