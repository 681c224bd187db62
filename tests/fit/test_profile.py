"""Profiles as files: round trip, names, damage, and uses for which they say nothing."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from pyprune.errors import BudgetError
from pyprune.fit import profile as module
from pyprune.fit.profile import (
    Profile,
    check_stored,
    find_profile,
    installed_versions,
    profile_folder,
    stored_as,
    this_machine,
)
from pyprune.fit.quantities import Quantity, Widths, further_head_pairs, head_pairs
from pyprune.plan import PrunePlan
from tests._support.cli import refused
from tests.fit._profiles import GENERATION, MACHINE, PREFILL, SIZES, VERSIONS, fake_profile, identity


def test_a_file_is_read_back_as_it_was(tmp_path: Path) -> None:
    profile = fake_profile(quantities=(PREFILL, GENERATION, Quantity("generation", 64, 4, 1024)))
    back = Profile.load(profile.save(tmp_path / "p.json"))
    assert back.identity() == profile.identity()
    assert back.probes == profile.probes
    assert back.quantities == profile.quantities
    assert [t.seconds for t in back.timings] == pytest.approx([t.seconds for t in profile.timings])
    assert (tmp_path / "p.json").stat().st_size < 50_000


def test_profiles_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    profile = fake_profile()
    check_stored()
    assert profile.name == "llama-8x512-8q4kv-1536-v1000-transformers-float32"
    path = profile.save(stored_as(profile.name))
    assert path == tmp_path / "pyprune" / "profiles" / f"{profile.name}.json"
    assert Profile.load(profile.name).identity() == profile.identity()
    with pytest.raises(BudgetError, match=f"Did you mean '{profile.name}'"):
        Profile.load(profile.name[:-2])


def test_a_folder_of_profiles_that_cannot_be_made_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(
        import_module("pyprune.fit.profiling.timing"), "take_profile", lambda *_: pytest.fail("it was measured")
    )
    said = " ".join(refused("profile", tmp_path).split())
    assert "where profiles are kept" in said
    assert "--out" in said


def test_a_name_or_path_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(BudgetError, match=r"There is no profile .mine. in .*pyprune profile MODEL"):
        find_profile("mine")
    with pytest.raises(BudgetError, match=r"There is no profile '.*gone\.json'"):
        find_profile(tmp_path / "gone.json")
    for name in ("../up", "", "a b", "x" * 300):
        with pytest.raises(BudgetError, match="is not a name for a profile"):
            stored_as(name)


def test_a_relative_cache_folder_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert profile_folder() == Path.home() / ".cache" / "pyprune" / "profiles"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"profile": 99}', '{"profile": 1}', "null", "\x00"])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(BudgetError, match=r"p\.json"):
        Profile.load(tmp_path / "p.json")


def test_a_changed_figure_is_noticed(tmp_path: Path) -> None:
    path = fake_profile().save(tmp_path / "p.json")
    data = json.loads(path.read_text())
    data["timings"][0][4] *= 2
    path.write_text(json.dumps(data))
    with pytest.raises(BudgetError, match="was changed by hand"):
        Profile.load(path)


def pretend(monkeypatch: pytest.MonkeyPatch, machine: Any = MACHINE, versions: Any = VERSIONS) -> None:
    """Take this machine and the packages on it for others."""
    module = sys.modules[Profile.__module__]  # by its path, pyprune.fit is the function
    monkeypatch.setattr(module, "this_machine", lambda _: dict(machine))
    monkeypatch.setattr(module, "installed_versions", lambda _: dict(versions))


def test_what_it_was_made_for_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    fake_profile().check(identity(), engine="transformers", dtype="float32")
    pretend(monkeypatch, versions={**VERSIONS, "pyprune": "9.9"})
    fake_profile().check()


OTHER = PrunePlan.identity("llama", replace(SIZES, layers=SIZES.layers[:1] * 9))


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ({"machine": {**MACHINE, "cpu": "cpu two"}}, "machine.cpu was 'cpu one', now 'cpu two'"),
        ({"machine": {**MACHINE, "device": "gpu"}}, "machine.device was 'cpu one', now 'gpu'"),
        ({"machine": {**MACHINE, "threads": "1"}}, "machine.threads was '2', now '1'"),
        ({"versions": {**VERSIONS, "transformers": "6.0"}}, "versions.transformers was '5.19.0', now '6.0'"),
        ({"versions": {}}, "versions.transformers was '5.19.0', now None"),
        ({"engine": "vllm"}, "engine was 'transformers', now 'vllm'"),
        ({"dtype": "bfloat16"}, "dtype was 'float32', now 'bfloat16'"),
        ({"plan": OTHER}, "dense.kinds.decoder.layers was '0-7', now '0-8'"),
        ({"plan": replace(identity(), model_type="qwen3")}, "model_type was 'llama', now 'qwen3'"),
    ],
)
def test_other_uses_are_refused_and_warned_of(
    use: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = fake_profile()
    pretend(monkeypatch, **{name: use[name] for name in ("machine", "versions") if name in use})
    given = {name: value for name, value in use.items() if name not in ("machine", "versions")}
    with pytest.raises(BudgetError, match="--allow-mismatch") as caught:
        profile.check(**given)
    assert message in str(caught.value)
    profile.check(**given, allow=True)
    assert message in capsys.readouterr().err


@pytest.mark.process
def test_this_machine_and_its_packages_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    here = replace(fake_profile(), machine=this_machine(), versions=installed_versions("transformers"))
    here.check()
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    with pytest.raises(BudgetError, match=r"machine.threads was .* now .77."):
        here.check()
    monkeypatch.undo()
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    with pytest.raises(BudgetError, match=r"machine\.variables.*VLLM_CPU_OMP_THREADS_BIND"):
        here.check()
    monkeypatch.undo()
    monkeypatch.setenv("MKL_NUM_THREADS", "1")
    with pytest.raises(BudgetError, match=r"machine\.variables.*MKL_NUM_THREADS"):
        here.check()
    monkeypatch.undo()
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_PLUGINS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("LD_PRELOAD", "")
    here.check()
    monkeypatch.undo()
    monkeypatch.setattr(module.metadata, "version", lambda name: "0.0.1")
    with pytest.raises(BudgetError, match=r"versions.torch was .* now .0.0.1."):
        here.check()


def test_head_pairs_are_counted_where_attention_is() -> None:
    layers = [Widths(9, 3, 1), Widths(0, 0, 1), Widths(6, 2, 1), Widths(9, 3, 0), Widths(6, 3, 1)]
    assert head_pairs(layers) == 3
    assert head_pairs([Widths(0, 0, 5)]) == 0
    assert further_head_pairs(layers) == 2
    assert further_head_pairs([Widths(0, 0, 5)]) == further_head_pairs([Widths(9, 3, 1)]) == 0
