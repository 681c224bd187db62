"""Methods that other packages bring by the entry point ``pyprune.methods``, driven through the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pyprune.checkpoint.record import read_pruning_json
from pyprune.cli.app import app
from pyprune.errors import ConfigError
from pyprune.methods.registry import get_method, method_modules, own_methods, preset, presets
from pyprune.run.recipe import build_config
from tests._support.models import tiny_model
from tests._support.text import write_model

MODULE = """
from dataclasses import replace

from dataclasses import dataclass

from pyprune.config.base import option
from pyprune.config.method import MethodOptions
from pyprune.methods.base import own_options
from pyprune.methods.score import score_method, scoring_config


@dataclass(frozen=True)
class Options(MethodOptions):
    power: int = option(1, at_least=1, at_most=4)


def score(run):
    power = own_options(run.request, Options).power
    for param in run.open_params:
        run.add_elements(param, run.weight(param).abs() ** power)


def paper():
    "The paper's ratio."
    return replace(scoring_config("{name}", Options(power=2)), ratio=0.3)


METHOD = score_method(
    "{name}", "Remove the smallest.", score, text=False, options=Options, presets={{"{preset}-paper": paper}}
)
"""


def install(site: Path, name: str, content: str, value: str | None = None) -> None:
    """A package of one module, with the metadata that an installer writes."""
    (site / f"{name}_of_others.py").write_text(content)
    info = site / f"{name}_of_others-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}_of_others\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[pyprune.methods]\n{name} = {value or f'{name}_of_others'}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


def test_a_method_of_another_package_says_that_it_reads_the_seed(site: Path) -> None:
    install(site, "tally", MODULE.format(name="tally", preset="tally"))
    with pytest.raises(ConfigError, match="seed would do nothing with method 'tally'"):
        build_config(options={"method": "tally"}, settings=["seed=3"])
    drawn = MODULE.format(name="drawn", preset="drawn")
    install(site, "drawn", drawn.replace("text=False", "text=False, seed=True"))
    assert build_config(options={"method": "drawn"}, settings=["seed=3"]).seed == 3


def test_a_method_of_another_package_is_listed_prunes_and_is_recorded(site: Path, tmp_path: Path) -> None:
    install(site, "tally", MODULE.format(name="tally", preset="tally"))
    write_model(tiny_model("llama"), tmp_path / "dense")
    arguments = ["prune", tmp_path / "dense", "--method", "tally", "--ratio", "0.2", "--out", tmp_path / "out"]
    arguments += ["--set", "tally.power=3"]
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    record = read_pruning_json(tmp_path / "out", verify_files=True)
    assert (record.provenance["method"], record.provenance["config"]["method"]) == ("tally", "tally")
    assert record.provenance["config"]["tally"] == {"power": 3}, "a record holds the options of the method that ran"
    wrong = CliRunner().invoke(app, list(map(str, [*arguments[:-1], "tally.power=9", "--overwrite"])))
    assert "tally: power is 9; it must be at most 4" in wrong.stderr
    assert record.plan is not None
    assert any(len(layer.ffn) < record.plan.dense.intermediate_size for layer in record.plan.layers)
    assert build_config(options={"method": "tally"}) == build_config(preset="tally") == preset("tally")
    assert (preset("tally-paper").method, preset("tally-paper").ratio) == ("tally", 0.3)
    with pytest.raises(ConfigError, match="Did you mean 'tally-paper'"):
        preset("tally-papr")


PLAIN = """
from pyprune.methods.base import Method, PlanDecision


def decide(model, samples, request, run):
    return PlanDecision(request.identity.drop_layers([0]))


METHOD = Method("first", "layers", "Drop the first.", decide=decide, regularise=None, reads_text=False)
"""


def test_a_method_without_a_regulariser_and_a_preset_starts(site: Path, tmp_path: Path) -> None:
    install(site, "first", PLAIN)
    write_model(tiny_model("llama"), tmp_path / "dense")
    arguments = ["prune", tmp_path / "dense", "--method", "first", "--out", tmp_path / "out"]
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    plan = read_pruning_json(tmp_path / "out").plan
    assert plan is not None
    assert plan.removed_layers == (0,)


@pytest.mark.process
def test_help_lists_it_without_importing_it(site: Path) -> None:
    install(site, "tally", "raise SystemExit('imported')")
    code = "from pyprune.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "prune", "--help"],
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    method = done.stdout[done.stdout.rindex("--method") : done.stdout.rindex("--ratio ")]
    assert "tally (of other" in " ".join(method.replace("│", " ").split())


def test_a_broken_package_is_refused_only_when_it_is_asked_for(site: Path) -> None:
    install(site, "torn", "raise RuntimeError('half installed')")
    install(site, "empty", "METHOD = 3")
    assert {"torn", "empty"} <= method_modules().keys()
    assert build_config(options={"method": "elder"}) == preset("elder")
    with pytest.raises(ConfigError, match=r"'torn' \(torn_of_others\).*half installed.*Repair or uninstall"):
        build_config(options={"method": "torn"})
    with pytest.raises(ConfigError, match=r"'empty' .* is 3; it must be a module with METHOD"):
        get_method("empty")


def test_two_methods_of_one_name_are_refused(site: Path) -> None:
    install(site, "elder", "")
    with pytest.raises(
        ConfigError, match=r"'elder' is defined twice: pyprune\.methods\.regularise\.elder and elder_of"
    ):
        method_modules()


def test_a_method_without_presets_starts_from_what_all_scoring_methods_do(site: Path) -> None:
    (site / "plain").mkdir()
    (site / "plain/__init__.py").write_text(MODULE.format(name="poll", preset="poll"))
    install(site, "poll", "", value="plain:METHOD")
    found = preset("poll")
    assert (found.method, found.stages.before, found.ratio) == ("poll", (), 0.2)
    assert found.options == get_method("poll").options()


@pytest.mark.parametrize("name", ["none", "two-words"])
def test_a_name_that_no_method_can_have_is_refused(site: Path, name: str) -> None:
    install(site, name, "")
    with pytest.raises(ConfigError, match=rf"'{name}' .* has no name for a method"):
        method_modules()


def test_presets_have_the_name_of_their_method(site: Path) -> None:
    install(site, "thief", MODULE.format(name="thief", preset="elder"))
    with pytest.raises(ConfigError, match=r"brings the preset 'elder-paper'; its presets must be called 'thief'"):
        preset("thief")
    assert "thief" not in {*presets(), *own_methods()}
