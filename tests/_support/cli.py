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
    return tiny_prune("elder", checkpoint, text, *more)


def tiny_prune(method: str, checkpoint: Path, text: Path, *more: str | Path) -> list[str | Path]:
    """The same for any of the papers' methods that train."""
    training = {"steps": 2, "batch_size": 2, "micro_batch_size": 2, "warmup_steps": 0, "dtype": "float32"}
    sections = (f"{method}.train", "recover.train", "finetune")
    sets = {f"{section}.{name}": value for section in sections for name, value in training.items()}
    if method != "dress":
        gates = {"first_round_steps": 2, "round_steps": 1, "batch_size": 2}
        sets |= {f"{method}.gates.{name}": value for name, value in gates.items()}
    settings = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    base = ["prune", checkpoint, "--method", method, "--ratio", "0.5", "--calibration", text]
    return [*base, "--samples", "4", "--sequence-length", "16", *settings, *more]
