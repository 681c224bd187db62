"""Run the ``pyprune`` command: parse options, call the stage that does the work, print the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperGroup

from pyprune.cli.bench import bench
from pyprune.cli.evaluate import evaluate
from pyprune.cli.fit import fit
from pyprune.cli.inspect import env, families, inspect, methods
from pyprune.cli.options import options
from pyprune.cli.profile import predict, profile
from pyprune.cli.prune import prune
from pyprune.cli.rework import reconstruct, recover
from pyprune.cli.robustness import robustness
from pyprune.cli.serve import export, serve
from pyprune.errors import LONGEST_NAME

LONGEST_ARGUMENT = 100_000
"""Characters; an error about a longer one would fill the terminal."""


class _Commands(TyperGroup):
    """Refuse arguments that are far too long before an error message of a command repeats them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        longest = max(map(len, args), default=0)
        if longest > LONGEST_ARGUMENT:
            raise typer.BadParameter(f"an argument has {longest:,} characters; at most {LONGEST_ARGUMENT:,} are read")
        names = [arg.partition("=")[0] for arg in args if arg.startswith("-")] + args[:1]
        if max(map(len, names), default=0) > LONGEST_NAME:
            raise typer.BadParameter(f"a command or option has a name of more than {LONGEST_NAME} characters")
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="pyprune",
    cls=_Commands,
    help="Structured pruning of causal language models: prune, evaluate, export, serve, measure.\n\n"
    "Start with: pyprune prune MODEL --method elder --ratio 0.25 --out pruned/",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
COMMANDS: dict[str, Callable[..., None]] = {
    "prune": prune,
    "fit": fit,
    "recover": recover,
    "reconstruct": reconstruct,
    "eval": evaluate,
    "robustness": robustness,
    "export": export,
    "serve": serve,
    "bench": bench,
    "profile": profile,
    "predict": predict,
    "inspect": inspect,
    "methods": methods,
    "families": families,
    "options": options,
    "env": env,
}
PASSING_ON = ("serve",)
"""Commands that pass unknown options to another program; any other command refuses them."""
for name, command in COMMANDS.items():
    app.command(name, context_settings={"ignore_unknown_options": name in PASSING_ON})(command)


def main() -> None:
    """Entry point of the ``pyprune`` command."""
    app()
