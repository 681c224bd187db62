"""The command line, called in this process."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

from pyprune.cli.app import app
from pyprune.cli.base import ERROR_CODE


def run(*arguments: str | Path) -> Result:
    """Run a command."""
    return CliRunner().invoke(app, [str(a) for a in arguments])


def refused(*arguments: str | Path) -> str:
    """Run a command that must fail the polite way; return its one message."""
    result = run(*arguments)
    assert result.exit_code == ERROR_CODE, result.output
    assert "Traceback" not in result.output
    assert result.stdout == ""
    return result.stderr


def tiny_elder(checkpoint: Path, text: Path, *more: str | Path) -> list[str | Path]:
    """Arguments of a prune run that takes a second."""
    training = {"steps": 2, "batch_size": 2, "micro_batch_size": 2, "warmup_steps": 0, "dtype": "float32"}
    sets = {
        "elder.gates.first_round_steps": 2,
        "elder.gates.round_steps": 1,
        "elder.gates.batch_size": 2,
        **{f"{section}.{name}": value for section in ("elder.train", "finetune") for name, value in training.items()},
    }
    settings = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    base = ["prune", checkpoint, "--ratio", "0.5", "--calibration", text]
    return [*base, "--samples", "4", "--sequence-length", "16", *settings, *more]
