"""`pyprune fit` with its default engine, a real vLLM: it measures the profile that it needs, and runs what it wrote."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from pyprune.checkpoint.save import save_checkpoint
from pyprune.fit import time_winner as timed
from pyprune.fit.fit import report_of
from pyprune.fit.profile import Profile, profile_folder
from pyprune.fit.profiling.timing import ProfileOptions
from pyprune.fit.quantities import Quantity
from tests._support.cli import run
from tests._support.models import tiny_model
from tests._support.served import REAL_VLLM, SIZES
from tests._support.text import write_text
from tests._support.tokenizer import tiny_tokenizer
from tests.fit.test_fit import arguments

pytestmark = REAL_VLLM


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a dense model and text; profiles are kept in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # a process fewer to start for every engine
    save_checkpoint(tiny_model("llama", **SIZES), tiny_tokenizer(), tmp_path / "dense", plan=None, provenance={})
    write_text(tmp_path / "text.txt", words=1200)
    return tmp_path


def test_a_profile_is_measured_where_there_is_none_and_used_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two probes in place of a dozen and short workloads, each timed once: what is measured is not what is tested.
    short = partial(ProfileOptions, probes=2, repeats=1, prefill=(64,), generation=((2, 8),))
    monkeypatch.setattr(timed, "ProfileOptions", short)
    figures = place / "figures.json"
    asked = "prefill@32=1000%,parameters=80%"
    result = run(*arguments(place, place / "out", asked), "--no-recover", "--json", figures)
    assert result.exit_code == 0, result.output
    assert "There is no profile for this budget" in result.stderr.replace("\n", " ")

    (path,) = profile_folder().glob("*.json")
    profile = Profile.load(path.stem)
    assert (profile.engine, profile.dtype, len(profile.probes)) == ("vllm", "bfloat16", 3)
    limited = Quantity("prefill", 32)
    assert set(profile.quantities) == {limited, Quantity("prefill", 64), Quantity("generation", 8, 2)}
    assert json.loads(figures.read_text())["winner"]["predicted"][str(limited)] > 0

    again = run(*arguments(place, place / "smaller", "prefill@32=1000%,parameters=70%"), "--no-recover")
    assert again.exit_code == 0, again.output
    assert "Using the profile" in again.stderr.replace("\n", " ")


def test_what_was_written_is_run_beside_the_dense_model(place: Path) -> None:
    out, figures = place / "out", place / "figures.json"
    given = arguments(place, out, "parameters=80%", timing=True)
    result = run(*given, "--set", "repeats=1", "--no-recover", "--json", figures)
    assert result.exit_code == 0, result.output
    found = json.loads(figures.read_text())
    speed = found["speed"]
    assert speed["engine"] == "vllm"
    assert speed["models"]["fitted"]["parameters"] == found["winner"]["parameters"]
    assert speed["models"]["fitted"]["parameters"] < speed["models"]["dense"]["parameters"]
    assert "Tokens/s" in (report_of(out) / "report.md").read_text()
