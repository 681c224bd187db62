"""The public names: resolved on first use, and never hidden by a folder of their name."""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings
from importlib import import_module

import pytest

import pyprune
from pyprune.runtime.moved import MOVED
from tests._support.paths import REPO

VERBS = ("prune", "prune_", "recover", "evaluate", "export", "bench", "build_config", "PrunePlan")


@pytest.mark.parametrize("name", pyprune._PUBLIC)
def test_every_public_name_resolves_and_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(pyprune, name))
    assert name in dir(pyprune)


def test_the_verbs_are_public_and_callable() -> None:
    assert set(VERBS) <= set(pyprune.__all__)
    assert all(callable(getattr(pyprune, name)) for name in VERBS)


def test_public_functions_stay_functions_once_their_modules_are_loaded() -> None:
    for module in ("pyprune.fit.search", "pyprune.quality.perplexity", "pyprune.cli.evaluate", "pyprune.run.prune"):
        import_module(module)
    from pyprune import evaluate, fit

    assert inspect.isfunction(evaluate)
    assert inspect.isfunction(fit)


@pytest.mark.process
def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, pyprune; from pyprune import PrunePlan, build_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO, check=False).returncode == 0


def test_what_is_not_public_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'evalute'"):
        _ = pyprune.evalute


@pytest.mark.parametrize("former", MOVED)
def test_modules_that_moved_are_found_under_their_former_names_with_a_warning(former: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the folder of a module warns as well
        import_module(former.rpartition(".")[0])
    sys.modules.pop(former, None)
    with pytest.warns(FutureWarning, match=f"{former} is called {MOVED[former]} now"):
        module = import_module(former)
    new = vars(import_module(MOVED[former]))
    assert all(vars(module)[name] is new[name] for name in new if not name.startswith("__"))
