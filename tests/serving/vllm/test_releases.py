"""What older releases of vLLM compute wrongly is refused; the floors of pyproject.toml are releases that were tried."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from pyprune.cut.compact import compact_
from pyprune.families import family_for
from pyprune.plan import PrunePlan
from pyprune.serving.export import export
from pyprune.serving.vllm.command import serve_command
from pyprune.serving.vllm.releases import (
    HEADS_PER_LAYER,
    TESTED,
    TRIED_ON_CPU,
    vllm_version,
    why_not_uncompiled_pipeline,
    why_not_unequal_heads,
)
from pyprune.serving.widths import LayerSizes
from tests._support.cli import refused
from tests._support.models import tiny_model
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
        (UNEQUAL, "0.1.dev1+gabc123.cpu"),
        (UNEQUAL, ""),
        ([(4, 2, 8), (0, 0, 4), (4, 1, 0)], OLD),
        ([], OLD),
    ],
)
def test_everything_else_is_not_refused(widths: list[LayerSizes], version: str) -> None:
    assert why_not_unequal_heads(widths, version) == ""


TRIED, LATER, EARLIER = (f"{TRIED_ON_CPU[0]}.{TRIED_ON_CPU[1] + more}.0" for more in (0, 1, -1))


@pytest.mark.parametrize(
    ("ranks", "version", "refuses"),
    [
        (2, f"{TRIED}+cpu", True),
        (2, f"{TRIED}.post1+cpu", True),
        (2, f"{EARLIER}+cpu", False),
        (2, "0.1.dev1+gabc123.cpu", False),
        (1, f"{TRIED}+cpu", False),
        (2, TRIED, False),
        (2, f"{LATER}+cpu", False),
    ],
)
def test_an_uncompiled_pipeline_ends_a_cpu(
    ranks: int, version: str, refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    reason = why_not_uncompiled_pipeline(ranks, version)
    assert ("--enforce-eager, -O0, --enable-lora" in reason) == refuses
    assert bool(reason) == refuses


def fewer_heads(plan: PrunePlan) -> PrunePlan:
    return plan.with_layer(2, query_heads=[0, 3])


def narrower_ffn(plan: PrunePlan) -> PrunePlan:
    return plan.with_layer(2, ffn=range(24))


def test_serve_refuses_them_before_vllm_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_installed", lambda: True)
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_version", lambda: OLD)
    for cut in (fewer_heads, narrower_ffn):
        model = tiny_model("llama-head-dim")
        plan = cut(family_for(model).plan(model.config))
        compact_(model, plan)
        export(model, tmp_path / cut.__name__, plan=plan)
    message = refused("serve", tmp_path / "fewer_heads")
    assert f"{tmp_path / 'fewer_heads'} cannot be served: layer 0 has 6 query heads and layer 2 2" in message
    assert serve_command(tmp_path / "narrower_ffn")


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
    floors = [
        next(s.version for s in Requirement(need).specifier if s.operator == ">=") for need in (vllm, transformers)
    ]
    assert floors[0] in {release for release, _ in rows}
    assert f"Transformers {floors[1]}" in section
    assert all(part in section for part in TESTED.split() if part[0].isdigit())
