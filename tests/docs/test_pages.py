"""Every page leads somewhere, can be read, and names commands, options, files and targets that exist."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, cast

import pytest
import typer
import yaml

from pyprune.cli.app import app
from pyprune.cli.options import OTHERS, list_options, options_of
from pyprune.methods.registry import presets
from tests._support.pages import PAGES, anchors, blocks, links, name_of, read, sentences
from tests._support.paths import REPO

README = REPO / "README.md"
LONGEST_SENTENCE = 30
"""Words."""
LONGEST_TASK = 60
"""Lines of a page of how-to/."""
NOT_YET = ("CHANGELOG.md",)
"""Pages whose sentences are not counted."""
READ = [page for page in PAGES if not name_of(page).startswith(NOT_YET)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_anchors_and_named_files_exist(page: Path) -> None:
    for target, anchor in links(page):
        if target.startswith(("https://", "mailto:")):
            continue
        file = Path(os.path.normpath(page.parent / target)) if target else page
        assert file.exists(), target
        assert not anchor or file.suffix != ".md" or anchor in anchors(file), f"{target}#{anchor}"
    for name in re.findall(r"`((?:pyprune|serving|tests|bench|csrc|examples|recipes|docs)/[\w/.-]+\.\w+)`", read(page)):
        assert (REPO / name).exists(), name


@pytest.mark.parametrize("page", READ, ids=name_of)
def test_sentences_are_short(page: Path) -> None:
    long = [sentence for sentence in sentences(page) if len(sentence.split()) > LONGEST_SENTENCE]
    assert long == []


@pytest.mark.parametrize("page", sorted((REPO / "docs" / "how-to").glob("*.md")), ids=name_of)
def test_a_task_fits_on_a_screen(page: Path) -> None:
    assert len(read(page).splitlines()) <= LONGEST_TASK


def test_the_readme_is_short() -> None:
    lines = read(README).splitlines()
    assert len(lines) <= 150
    assert 4 <= len(read(README).split()) / len(lines) <= 10


def test_pages_start_with_a_title_and_say_first_what_they_are_for() -> None:
    for page in (page for page in PAGES if page.is_relative_to(REPO / "docs")):
        title, blank, first = read(page).splitlines()[:3]
        assert title.startswith("# "), name_of(page)
        assert blank == "", name_of(page)
        assert first[:1] not in ("", "#", "|", "<"), name_of(page)


def test_commands_and_options_that_pages_name_exist() -> None:
    commands = cast(Any, typer.main.get_command(app)).commands
    seen, unknown = 0, []
    for path in [*PAGES, *sorted((REPO / "recipes").glob("**/*.yaml"))]:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        for name, rest in re.findall(r"(?:pyprune|-m pyprune) ([a-z][\w-]*)((?: [^\n`|;#]*)?)", text):
            if f"`pyprune {name}" in text and name not in commands:
                unknown.append((path.name, name, ""))
            if name not in commands or name == "serve":  # which passes every option of vLLM on
                continue
            known = {option for parameter in commands[name].params for option in parameter.opts}
            used = set(re.findall(r"(?<=\s)--[a-z][\w-]*", rest))
            seen += len(used)
            unknown += [(path.name, name, option) for option in used - known - {"--help"}]
    assert seen > 100
    assert unknown == []


def test_commands_of_pages_have_every_option_that_they_need() -> None:
    commands = cast(Any, typer.main.get_command(app)).commands
    lines = [line for page in PAGES for block in blocks(page) if block.language == "sh" for line in block.lines]
    split = [line.split() for line in lines if line.startswith("pyprune ")]
    assert len(split) > 50
    for _, name, *words in split:
        needed = [p.opts[0] for p in commands[name].params if p.required and p.opts[0].startswith("--")]
        assert [option for option in needed if option not in words] == [], (name, words)


def test_options_of_set_that_pages_name_exist() -> None:
    named = {key for page in PAGES for key in re.findall(r"--set '?([a-z][\w.]*)=", read(page))}
    methods = {key.partition(".")[0] for key in named} & set(presets())
    known = {option.name for name in ("wanda", *methods, *OTHERS) for option in list_options(options_of(name)[0])}
    assert len(named) > 5
    assert named - known == set()


def test_the_make_targets_exist() -> None:
    makefile = (REPO / "Makefile").read_text(encoding="utf-8")
    named = [name for page in PAGES for name in re.findall(r"`make ([\w-]+)", read(page))]
    named += [
        line.split()[1] for page in PAGES for block in blocks(page) for line in block.lines if line[:5] == "make "
    ]
    assert len(named) > 20
    assert [name for name in named if not re.search(rf"^{name}:", makefile, flags=re.MULTILINE)] == []


def test_every_runnable_block_is_of_a_language_that_runs() -> None:
    """A mark is a comment before a block; one that stands before anything else would run nothing."""
    for page in PAGES:
        marked = [block for block in blocks(page) if block.run]
        assert read(page).count("\n<!-- run") == len(marked), name_of(page)
        assert {block.language for block in marked} <= {"sh", "python"}, name_of(page)


def test_the_site_names_every_folder() -> None:
    nav = yaml.safe_load((REPO / "docs" / ".nav.yml").read_text(encoding="utf-8"))["nav"]
    listed = {target for item in nav if isinstance(item, dict) for target in item.values()}
    folders = {path.name for path in (REPO / "docs").iterdir() if path.is_dir() and any(path.glob("*.md"))}
    assert folders - listed == set()
