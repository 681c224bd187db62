"""The public names: resolved on first use, each of them what it says, and never hidden by a sub-module."""

from __future__ import annotations

import inspect
import pkgutil
import subprocess
import sys
from importlib import import_module

import pytest

import pyprune
from tests._support.paths import REPO

VERBS = ("prune", "prune_", "recover", "evaluate", "export", "bench", "build_config", "PrunePlan")


@pytest.mark.parametrize("name", pyprune._PUBLIC)
def test_every_public_name_resolves_and_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(pyprune, name))
    assert name in dir(pyprune)


def test_the_verbs_are_public_and_callable() -> None:
    assert set(VERBS) <= set(pyprune.__all__)
    assert all(callable(getattr(pyprune, name)) for name in VERBS)


def test_no_sub_module_is_called_like_a_public_name() -> None:
    modules = {module.name for module in pkgutil.iter_modules(pyprune.__path__)} | {"serving"}
    assert modules & set(pyprune._PUBLIC) == set()


def test_evaluate_stays_a_function_once_its_modules_are_loaded() -> None:
    for module in ("pyprune.quality.perplexity", "pyprune.quality.tasks", "pyprune.cli.evaluate", "pyprune.pipeline"):
        import_module(module)
    from pyprune import evaluate

    assert inspect.isfunction(evaluate)


@pytest.mark.process
def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, pyprune; from pyprune import PrunePlan, build_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO, check=False).returncode == 0


def test_what_is_not_public_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'evalute'"):
        _ = pyprune.evalute
