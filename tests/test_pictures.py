"""The pictures of the documentation are those that `python -m bench.pictures` writes from the records."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.pictures.__main__ import main, pictures
from bench.pictures.plan import append_plan, plan
from pyprune.plan import PrunePlan, Sizes
from pyprune.runtime.svg import COLOURS
from tests._support.paths import REPO

PICTURES = REPO / "docs" / "pictures"


def test_the_committed_pictures_are_those_of_the_records(tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path)]) == 0
    written = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    committed = {path.name: path.read_text(encoding="utf-8") for path in PICTURES.iterdir()}
    assert set(committed) == set(written)
    different = [name for name in written if committed[name] != written[name]]
    assert not different, "run `python -m bench.pictures`"


@pytest.mark.parametrize("name", pictures())
def test_a_picture_says_what_it_shows_and_has_no_colour_for_one_kind_of_page(name: str) -> None:
    text = (PICTURES / f"{name}.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findtext(f"{space}desc") or "") > 60
    assert not re.search(r"#[0-9a-f]{6}|fill=|stroke=", re.sub("<style>.*</style>", "", text))
    used = {element.attrib["class"].removesuffix("-line") for element in root.iter() if "class" in element.attrib}
    assert used <= set(COLOURS)
    for element in root.iter():
        assert float(element.get("x", 0)) <= float(root.attrib["width"])
        assert float(element.get("y", 0)) <= float(root.attrib["height"])


def test_every_picture_is_shown_with_words_for_those_who_cannot_see_it() -> None:
    pages = [REPO / "README.md", *(REPO / "docs").rglob("*.md")]
    shown = {}
    for page in pages:
        for alt, target in re.findall(r"!\[([^\]]*)\]\(([^)\s]+\.svg)\)", page.read_text(encoding="utf-8")):
            assert alt, f"{page}: {target} has no words"
            shown[(page.parent / target).resolve().name] = alt
    assert set(shown) == {f"{name}.svg" for name in pictures()}


def test_a_plan_is_recorded_and_drawn(tmp_path: Path) -> None:
    dense = PrunePlan.identity("llama", Sizes.decoder(4, 64, 4, 2, 16, 48, 100))
    cut = dense.drop_layers([2]).with_layer(1, kv_heads=[0], query_heads=[0, 1], ffn=range(24))
    (tmp_path / "plan.json").write_text(cut.to_json())
    append_plan(tmp_path / "plan.jsonl", tmp_path / "plan.json", "pyprune prune model")
    drawn = plan(tmp_path / "plan.jsonl").render()
    assert "Of 4 query heads, layers keep 0 to 4, 10 in all; of 48 FFN channels 0 to 48, 120 of 192 in all." in drawn
    assert drawn.count("stroke-dasharray") == 2 + 1 + 4 + 1 + 1
