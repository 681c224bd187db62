"""inspect, methods and env."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pyprune.cli.base import Debug, JsonFile, guarded, output
from pyprune.errors import how_to_install

if TYPE_CHECKING:
    from pyprune.report import Cell


@guarded
def inspect(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint folder.")],
    json_file: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Print what a checkpoint is: plan, sizes, parameters, bytes, architecture, provenance.

    Example: pyprune inspect pruned/
    """
    from pyprune.checkpoint.record import read_record
    from pyprune.report import Table
    from pyprune.serving.checkpoints import read_checkpoint

    checkpoint = read_checkpoint(folder)  # verifies it
    record = read_record(checkpoint.folder)
    rows: list[tuple[str, Cell]] = [
        ("architecture", checkpoint.architecture),
        ("loads without pyprune", "yes" if checkpoint.is_stock else "no"),
        ("parameters", checkpoint.parameters),
        ("bytes of weights", checkpoint.bytes),
    ]
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    rows += [(n, checkpoint.config[n]) for n in (*names, "intermediate_size") if checkpoint.config.get(n)]
    if record is None:
        rows.append(("plan", "none (not written by pyprune)"))
    elif record.plan is None:
        rows.append(("plan", "none (not cut)"))
    else:
        rows.append(("plan", record.plan.summary()))
        rows.append(("removed layers", ", ".join(map(str, record.plan.removed_layers)) or "none"))
    provenance = record.provenance if record else {}
    shown_above = {name for name, _ in rows}
    rows += [
        (k, v)
        for k, v in provenance.items()
        if isinstance(v, str | int | float) and k not in shown_above and k != "training_marks"
    ]
    data = {
        "folder": str(folder),
        "architecture": checkpoint.architecture,
        "parameters": checkpoint.parameters,
        "bytes": checkpoint.bytes,
        "plan": record.plan.to_dict() if record and record.plan else None,
        "provenance": provenance,
    }
    output(data, json_file, Table(str(folder), ("", "value"), tuple(rows)))


@guarded
def methods(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, as README has it.")] = False,
    debug: Debug = False,
) -> None:
    """List every method with what it removes and its presets, those of other packages too.

    Example: pyprune methods
    """
    from pyprune.methods.table import methods_table
    from pyprune.report import markdown_table, print_table

    if markdown:
        typer.echo(markdown_table(methods_table()))
    else:
        print_table(methods_table())


@guarded
def env(json_file: JsonFile = None, debug: Debug = False) -> None:
    """Print versions, the CPU's instruction set, the backend of each operation, and whether vLLM is there."""
    from pyprune.ops import backend_report
    from pyprune.report import Table
    from pyprune.serving.engines import vllm_installed
    from pyprune.serving.stats import environment_record

    record = environment_record()
    data = {**record, "vllm": vllm_installed(), "backends": backend_report()}
    rows: list[tuple[str, str]] = [(name, version) for name, version in record["versions"].items()]
    rows += [
        ("python", record["python"]),
        ("system", record["system"]),
        ("device", f"{record['device']} ({record['cpus']} CPUs)"),
        ("instruction sets", ", ".join(record["isa"]) or "baseline"),
        ("vLLM", "installed" if data["vllm"] else f"not installed: {how_to_install('vllm')}"),
        *((f"ops: {name}", text) for name, text in data["backends"].items()),
    ]
    output(data, json_file, Table("Environment", ("", "value"), tuple(rows)))
