"""Help that stands alone and is fast."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from pyprune.cli.app import app
from pyprune.config.recoveries import RECOVERIES
from pyprune.methods.registry import FORMS, method_modules, presets
from tests._support.cli import run

COMMANDS = ("prune", "fit", "recover", "reconstruct", "eval", "robustness", "export", "serve", "bench", "profile",
            "predict", "inspect", "methods", "families", "options", "env")  # fmt: skip
HEAVY = ("torch", "transformers", "vllm", "lm_eval", "datasets", "peft", "numpy")


@pytest.mark.process
@pytest.mark.parametrize("arguments", [[], *([c] for c in COMMANDS)], ids=lambda a: a[0] if a else "pyprune")
def test_help_needs_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from pyprune.cli.app import app\n"
        f"app({[*arguments, '--help']!r}, standalone_mode=False)\n"
        f"print('LOADED', sorted(set(sys.modules) & set({HEAVY!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage:" in done.stdout
    assert done.stdout.rstrip().endswith("LOADED []")


def test_every_command_is_listed_and_no_other() -> None:
    assert tuple(c.name or c.callback.__name__ for c in app.registered_commands if c.callback) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained(command: str) -> None:
    output = run(command, "--help").output
    for line in output.splitlines():
        if re.match(r"│\s{1,4}(\*\s+)?--\w", line):  # further in, a wrapped explanation names another option
            words = re.sub(r"│|--[\w-]+|<\w+>|\b[A-Z,=]+\b", " ", line).split()
            assert len(words) >= 3, f"no explanation in: {line}"
    if command != "env":
        assert "Example: pyprune" in output


@pytest.mark.parametrize(
    ("command", "phrases"),
    [
        ("prune", ["hidden, experts or parameters", "Default: 0.25", "between 0 and 1", "Replace --out", "--resume"]),
        ("recover", ["that PRUNED was cut from", "Default: the preset's", "Any option by its dotted name", "--resume"]),
        ("eval", ["ppl-2048", "ppl-128", "lm-eval tasks"]),
        ("robustness", ["Default: 10", "ppl-128 or ppl-2048", "default: taylor,smoothgrad,moreau", "is continued"]),
        ("export", ["float32, bfloat16 or float16", "auto (as stored"]),
        ("bench", ["auto (vLLM if installed", "default: 64", "default: 128", "default: 2048"]),
    ],
)
def test_help_names_units_defaults_and_allowed_values(command: str, phrases: list[str]) -> None:
    output = " ".join(run(command, "--help").output.replace("│", " ").split())
    for phrase in phrases:
        assert phrase in output


def test_help_names_every_preset() -> None:
    output = run("prune", "--help").output
    assert [name for name in presets() if name not in output and not name.endswith(FORMS)] == []
    assert [form for form in FORMS if f"NAME{form}" not in output] == []
    for command in ("prune", "recover"):
        output = run(command, "--help").output
        assert [name for name in RECOVERIES if name not in output] == []


def test_help_names_every_method() -> None:
    output = run("prune", "--help").output
    method = output[output.rindex("--method") : output.rindex("--ratio ")]
    assert [name for name in method_modules() if name not in method] == []
