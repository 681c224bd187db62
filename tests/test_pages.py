"""Tables of results and of methods are what commands print, and the conclusions quote figures of these tables."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench.pages import DOCS, add_pages_of_methods, main, reprint
from pyprune.methods.registry import own_methods
from tests._support.paths import REPO

PRINTED = re.compile(r"<!-- printed -->\n.*?<!-- end -->\n", re.DOTALL)
PAGES = sorted(path for path in DOCS.rglob("*.md") if PRINTED.search(path.read_text(encoding="utf-8")))
BY_HAND = ("formats.md", "training-memory.md")
"""The first is compared with its records below; the second is predicted, which takes minutes."""
FIGURE = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?= %|x|[^\w.,]|[.,](?!\d))")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_has_what_its_command_prints(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert reprint(page) == page, f"python -m bench.pages {path.relative_to(REPO)}"


def test_no_table_of_results_is_copied_by_hand() -> None:
    pages = [path for path in (DOCS / "results").glob("*.md") if path.name not in BY_HAND]
    tables = {path.name: PRINTED.sub("", path.read_text(encoding="utf-8")).count("\n|--") for path in pages}
    assert [name for name, count in tables.items() if count] == []


def test_the_page_on_formats_has_the_figures_of_its_records() -> None:
    page = (DOCS / "results" / "formats.md").read_text(encoding="utf-8").replace("`w8a8-int8`", "int8")
    rows = dict(re.findall(r"^\| ((?:dense|pruned)[^|]*) \| (.*) \|$", page, flags=re.MULTILINE))
    lines = (REPO / "bench" / "results" / "formats.jsonl").read_text(encoding="utf-8").splitlines()
    for record in map(json.loads, lines):
        for name, speed in record["summary"].items():
            model, figures = record["models"][name], [record["sizes"][name] / 1e6]
            if record["engine"] == "llamacpp":
                figures += [model["load_seconds"], model["memory"] / 1e6]
            for measured, ratio in (("tokens_per_second", "throughput_increase"), ("latency_ms", "speedup")):
                dense = name.startswith("dense") and speed[ratio] == 1
                figures += [speed[measured]["median"], speed[measured]["mad"], *([] if dense else [speed[ratio]])]
            figures += [record["perplexity"][name][kind] for kind in ("prose", "code")]
            shown = re.findall(r"[\d,]*\.?\d+", rows.pop(name).replace("64 x", ""))
            for figure, text in zip(figures, shown, strict=True):
                unit = 10.0 ** -len(text.partition(".")[2])
                assert abs(figure - float(text.replace(",", ""))) <= 0.501 * unit, (name, text, figure)
    assert rows == {}


def test_the_conclusions_quote_figures_of_the_pages_that_they_link_to() -> None:
    index = (DOCS / "results" / "index.md").read_text(encoding="utf-8")
    missing, quoted = [], 0
    for statement in re.findall(r"^\* \*\*.*?(?=\n\* |\n\n)", index, flags=re.MULTILINE | re.DOTALL):
        linked = re.findall(r"\]\(([\w-]+\.md)\)", statement)
        assert linked, statement
        known = {n for name in linked for n in FIGURE.findall((DOCS / "results" / name).read_text(encoding="utf-8"))}
        figures = FIGURE.findall(re.sub(r"\(.*?\)", "", statement))
        quoted += len(figures)
        missing += [figure for figure in figures if figure not in known]
    assert missing == []
    assert quoted > 15


def test_the_readme_quotes_figures_of_the_pages_that_it_links_to() -> None:
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    section = readme.split("## What it is worth\n")[1].split("\n## ")[0]
    linked = re.findall(r"\]\(docs/results/([\w-]+\.md)\)", section)
    known = {n for name in linked for n in FIGURE.findall((DOCS / "results" / name).read_text(encoding="utf-8"))}
    figures = FIGURE.findall(re.sub(r"\]\(.*?\)", "", section))
    assert [figure for figure in figures if figure not in known] == []
    assert len(figures) > 20


def test_a_changed_output_is_printed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\necho no\necho 'a b'\n```\n\nWords.\n\n<!-- printed -->\nold\n<!-- end -->\n\nMore.\n")
    assert main([str(page)]) == 0
    assert page.read_text().endswith("Words.\n\n<!-- printed -->\n\na b\n\n<!-- end -->\n\nMore.\n")
    places = "```sh\necho {}\n```\n\n<!-- printed -->\n<!-- end -->\n"
    page.write_text(places.format(1) + "\n" + places.format(2))
    assert main([str(page)]) == 0
    assert re.findall(r"printed -->\n\n(.*)\n\n<!-- end", page.read_text()) == ["1", "2"]
    page.write_text("<!-- printed -->\n<!-- end -->\n")
    assert main([str(page)]) == 2
    assert "no code block" in capsys.readouterr().err
    page.write_text("```sh\nfalse\n```\n<!-- printed -->\n<!-- end -->\n")
    assert main([str(page)]) == 2
    assert "'false' ended with 1" in capsys.readouterr().err


def test_a_method_without_a_page_gets_one(tmp_path: Path) -> None:
    add_pages_of_methods(tmp_path)
    assert {path.stem for path in tmp_path.glob("*.md")} == set(own_methods())
    page = reprint((tmp_path / "obs.md").read_text(encoding="utf-8"))
    assert "| obs.damping | 0.01 | 0.01 | 0.01 |" in page
    assert "| obs.damping | added to the second moments" in page
    assert "| recover.train.steps | - | - | 20 |" in page, "what only -trained reads"
    assert "\n| finetune." not in page, "what no preset reads"
