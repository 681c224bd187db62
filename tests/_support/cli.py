"""The command line, called in this process."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from typer.testing import CliRunner, Result

from pyprune.cli.app import app
from pyprune.cli.base import ERROR_CODE
from pyprune.errors import ConfigError
from pyprune.run.recipe import build_config


def run(*arguments: str | Path) -> Result:
    """Run a command."""
    return CliRunner().invoke(app, [str(a) for a in arguments])


def refused(*arguments: str | Path) -> str:
    """Run a command that must fail without a traceback; return its one message."""
    result = run(*arguments)
    assert result.exit_code == ERROR_CODE, result.output
    assert "Traceback" not in result.output
    assert result.stdout == ""
    return result.stderr


def tiny_elder(checkpoint: Path, text: Path, *more: str | Path) -> list[str | Path]:
    """Return the arguments of an elder run that takes a second."""
    return tiny_prune("elder", checkpoint, text, *more)


def tiny_prune(method: str, checkpoint: Path, text: Path, *more: str | Path) -> list[str | Path]:
    """Return the arguments of a short run of any method that trains."""
    training = {"steps": 2, "batch_size": 2, "micro_batch_size": 2, "warmup_steps": 0, "dtype": "float32"}
    stages = _stages(method, [str(word) for word in more])
    sections = {"regularise": f"{method}.train", "recover": "recover.train", "finetune": "finetune"}
    trained = [section for stage, section in sections.items() if stage in stages]
    sets = {f"{section}.{name}": value for section in trained for name, value in training.items()}
    if method != "dress":
        gates = {"first_round_steps": 2, "round_steps": 1, "batch_size": 2}
        sets |= {f"{method}.gates.{name}": value for name, value in gates.items()}
    settings = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    base = ["prune", checkpoint, "--method", f"{method}-trained", "--ratio", "0.5", "--calibration", text]
    return [*base, "--samples", "4", "--sequence-length", "16", *settings, *more]


def _stages(method: str, more: Sequence[str]) -> set[str]:
    """Stages of the run that these arguments give: options of others are refused."""
    given = {name: value for name, value in pairwise(more) if name in ("--preset", "--config", "--recovery")}
    stages = [value for name, value in pairwise(more) if name == "--set" and value.startswith("stages")]
    try:
        found = build_config(
            preset=given.get("--preset"),
            recovery=given.get("--recovery"),
            recipe=given.get("--config"),
            options={"method": f"{method}-trained"},
            settings=stages,
        ).stages
    except ConfigError:  # which is what a test is about
        return set()
    return {*found.before, *found.after}
