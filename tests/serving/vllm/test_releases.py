"""Faults of a release of vLLM are refused there alone; the floors of pyproject.toml are releases that were tried."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from pyprune.serving.vllm.releases import (
    NEWEST,
    OLDEST,
    TESTED,
    uncompiled_pipeline_obstacle,
    vllm_version,
)
from pyprune.serving.vllm.workarounds import WORKAROUNDS, Workaround
from tests._support.paths import REPO

TRIED, LATER, EARLIER = (f"{NEWEST[0]}.{NEWEST[1] + more}.0" for more in (0, 1, -1))


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
    reason = uncompiled_pipeline_obstacle(ranks, version)
    assert ("--enforce-eager, -O0, --enable-lora" in (reason or "")) == refuses


def test_the_version_is_found_under_either_name() -> None:
    found = vllm_version()
    assert found == "" or re.match(r"\d+\.\d+", found)


def test_the_floors_are_releases_that_were_tried() -> None:
    """docs/operations/releases.md names what was tried; pyproject.toml must not promise more."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [vllm] = project["optional-dependencies"]["vllm"]
    [transformers] = [need for need in project["dependencies"] if need.startswith("transformers")]
    section = (REPO / "docs" / "operations" / "releases.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d[\d.]+) \| (\d[\d.]+) \|.*\| yes \|$", section, flags=re.MULTILINE)
    floors = [
        next(s.version for s in Requirement(need).specifier if s.operator == ">=") for need in (vllm, transformers)
    ]
    assert floors[0] in {release for release, _ in rows}
    assert f"Transformers {floors[1]}" in section
    assert all(part in section for part in TESTED.split() if part[0].isdigit())
    assert floors[0].startswith(".".join(map(str, OLDEST)) + ".")


@pytest.mark.parametrize("workaround", WORKAROUNDS, ids=lambda workaround: workaround.where)
def test_a_workaround_exists_and_a_supported_release_needs_it(workaround: Workaround) -> None:
    module, _, name = workaround.where.partition(":")
    source = (REPO / "serving" / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    assert re.search(rf"^(def |class )?{name}\b", source, flags=re.MULTILINE), "it has moved"
    extras = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    needs = [Requirement(need) for need in (*extras["vllm"], *extras["gguf"])]
    [need] = [n for n in needs if n.name == ("xllamacpp" if module.startswith("gguf.") else "vllm")]
    [floor] = [Version(bound.version) for bound in need.specifier if bound.operator == ">="]
    assert floor.release[:2] <= Version(workaround.release).release, "no supported release was seen to need it"


def test_modules_that_name_a_release_are_among_the_workarounds() -> None:
    listed = {f"{w.where.partition(':')[0].replace('.', '/')}.py" for w in WORKAROUNDS}
    pattern = re.compile(r"vLLM 0\.\d+|xllamacpp 20\d\d|is_faulty_cpu_build")
    asking = {"vllm/command.py", "vllm/model.py", "vllm/workarounds.py"}  # the second name only calls what is listed
    for path in (REPO / "serving").rglob("*.py"):
        name = path.relative_to(REPO / "serving").as_posix()
        if pattern.search(path.read_text(encoding="utf-8")):
            assert name in listed | asking, f"{name} names a release; enter it in serving/vllm/workarounds.py"
