"""What older releases of vLLM compute wrongly is refused; the floors of pyproject.toml are releases that were tried."""

from __future__ import annotations

import re
import tomllib

import pytest

from pyprune.serving.releases import HEADS_PER_LAYER, TESTED, vllm_version, why_not_unequal_heads
from pyprune.serving.widths import LayerSizes
from tests._support.paths import REPO

UNEQUAL: list[LayerSizes] = [(0, 0, 8), (4, 2, 8), (4, 2, 6), (2, 1, 8)]
SINCE = ".".join(map(str, HEADS_PER_LAYER))
OLD = f"{HEADS_PER_LAYER[0]}.{HEADS_PER_LAYER[1] - 1}.1"


@pytest.mark.parametrize("version", [OLD, f"{OLD}+cpu", "0.9.0", "0.11.0rc1"])
def test_unequal_query_heads_need_a_newer_vllm(version: str) -> None:
    reason = why_not_unequal_heads(UNEQUAL, version)
    assert reason.startswith(f"layer 1 has 4 query heads and layer 3 2, which vLLM {version} computes wrongly. ")
    assert f"Install vLLM {SINCE} or later" in reason


@pytest.mark.parametrize(
    ("widths", "version"),
    [
        (UNEQUAL, f"{SINCE}.0"),
        (UNEQUAL, f"{SINCE}.0+cpu"),
        (UNEQUAL, f"{SINCE}.1.dev3+g12ab"),
        (UNEQUAL, "1.0.0"),
        (UNEQUAL, "dev"),
        (UNEQUAL, ""),
        ([(4, 2, 8), (0, 0, 4), (4, 1, 0)], OLD),
        ([], OLD),
    ],
)
def test_everything_else_is_not_refused(widths: list[LayerSizes], version: str) -> None:
    assert why_not_unequal_heads(widths, version) == ""


def test_the_version_is_found_under_either_name() -> None:
    found = vllm_version()
    assert found == "" or re.match(r"\d+\.\d+", found)


def test_the_floors_are_releases_that_were_tried() -> None:
    """docs/serving.md names what was tried; pyproject.toml must not promise more."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [vllm] = project["optional-dependencies"]["vllm"]
    [transformers] = [need for need in project["dependencies"] if need.startswith("transformers")]
    page = (REPO / "docs" / "serving.md").read_text(encoding="utf-8")
    section = page[page.index("## Releases") :].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d[\d.]+) \| (\d[\d.]+) \|.*\| yes \|$", section, flags=re.MULTILINE)
    assert vllm.removeprefix("vllm>=") in {f"{release}" for release, _ in rows}
    assert f"Transformers {transformers.removeprefix('transformers>=')}" in section
    assert all(part in section for part in TESTED.split() if part[0].isdigit())
