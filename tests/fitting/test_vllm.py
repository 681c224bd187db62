"""`pyprune fit` with its default engine: the profile that it needs is measured in a real vLLM, kept and used again."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from pyprune.budget.profile import Profile, profile_folder
from pyprune.budget.quantities import Quantity
from pyprune.budget.timing import ProfileOptions
from pyprune.checkpoint.save import save_checkpoint
from pyprune.fitting import timed
from pyprune.fitting.flow import report_of
from tests._support.cli import run
from tests._support.models import tiny_model
from tests._support.served import REAL_VLLM, SIZES
from tests._support.text import write_text
from tests._support.tokenizer import tiny_tokenizer
from tests.fitting.test_fit import arguments

pytestmark = REAL_VLLM


def test_a_profile_is_measured_where_there_is_none_and_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    # Two probes in place of a dozen, each timed once: what is measured is not what is tested.
    monkeypatch.setattr(timed, "ProfileOptions", partial(ProfileOptions, probes=2, repeats=1))
    dense = tiny_model("llama", **SIZES)
    save_checkpoint(dense, tiny_tokenizer(), tmp_path / "dense", plan=None, provenance={})
    write_text(tmp_path / "text.txt", words=1200)
    out, figures = tmp_path / "out", tmp_path / "figures.json"
    given = arguments(tmp_path, out, "prefill@32=1000%,parameters=80%", timing=True)
    result = run(*given, "--set", "repeats=1", "--no-recover", "--json", figures)
    assert result.exit_code == 0, result.output
    assert "There is no profile for this budget" in result.stderr.replace("\n", " ")

    (path,) = profile_folder().glob("*.json")
    profile = Profile.load(path.stem)
    assert (profile.engine, profile.dtype, len(profile.probes)) == ("vllm", "bfloat16", 3)
    assert {Quantity("prefill", 32), Quantity("generation", 128, 64)} <= set(profile.quantities)
    found = json.loads(figures.read_text())
    assert found["winner"]["measured"]["prefill@32"] > 0
    assert found["speed"]["engine"] == "vllm"
    assert found["speed"]["models"]["fitted"]["parameters"] == found["winner"]["parameters"]
    assert "Tokens/s" in (report_of(out) / "report.md").read_text()

    again = run(*arguments(tmp_path, tmp_path / "smaller", "prefill@32=1000%,parameters=70%"), "--no-recover")
    assert again.exit_code == 0, again.output
    assert "Using the profile" in again.stderr.replace("\n", " ")
