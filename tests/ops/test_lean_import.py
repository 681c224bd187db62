"""`import pyprune` and `pyprune --help` stay fast because they import nothing heavy."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "vllm", "lm_eval", "datasets", "peft")
REPORT = f"print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)"


def heavy_modules_after(code: str) -> str:
    """What a fresh interpreter has loaded of HEAVY after running ``code``: the last line of its stderr."""
    result = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\n{REPORT}"], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stderr.strip().splitlines()[-1]


@pytest.mark.process
@pytest.mark.parametrize(
    "module", ["pyprune", "pyprune.config.base", "pyprune.plan", "pyprune.errors", "pyprune.methods.registry"]
)
def test_import_is_lean(module: str) -> None:
    assert heavy_modules_after(f"import {module}") == "[]"


@pytest.mark.process
@pytest.mark.skipif(importlib.util.find_spec("pyprune.cli.app") is None, reason="there is no pyprune.cli.app yet")
def test_help_is_lean() -> None:
    code = (
        "sys.argv = ['pyprune', '--help']\n"
        "from pyprune.cli.app import main\n"
        "try:\n    code = main()\n"
        "except SystemExit as stop:\n    code = stop.code\n"
        "assert not code, code"
    )
    assert heavy_modules_after(code) == "[]"
