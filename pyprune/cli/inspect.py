"""Print facts about a checkpoint, the methods and the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import typer

from pyprune.cli.base import guard, output
from pyprune.errors import install_command

if TYPE_CHECKING:
    from pyprune.checkpoint.manifest import PruningRecord
    from pyprune.runtime.report import Cell
    from pyprune.serving.checkpoints import Checkpoint

Rows = list[tuple[str, "Cell"]]
MEASURED = ("quality", "speed")
"""Sections of a record that hold figures."""


@guard
def inspect(
    folder: str,
    *,
    json_file: str | None = None,
    debug: bool = False,
) -> None:
    """Print a checkpoint's architecture, parameters, bytes, sizes and plan, how it was made, and its measured figures.

    The record of how it was made may be long; --json has all of it.

    Example: pyprune inspect pruned/

    Args:
        folder (DIR): Checkpoint folder.
    """
    from pyprune.checkpoint.record import read_record
    from pyprune.runtime.report import Table
    from pyprune.serving.checkpoints import read_checkpoint
    from pyprune.serving.widths import COLUMNS, layer_experts, layer_widths

    checkpoint = _use_loaded_sizes(read_checkpoint(folder))  # verifies it
    record = read_record(checkpoint.folder)
    provenance = record.provenance if record else {}
    rows = [*_sizes(checkpoint), *_plan(record)]
    shown_above = {name for name, _ in rows}
    rows += [(k, v) for k, v in _short_facts(provenance) if k not in shown_above and k != "training_marks"]
    rows += [(f"{section}: {k}", v) for section in MEASURED for k, v in _short_facts(provenance.get(section))]
    data = {
        "folder": folder,
        "architecture": checkpoint.architecture,
        "parameters": checkpoint.parameters,
        "bytes": checkpoint.bytes,
        "layers": [
            dict(zip(COLUMNS, widths, strict=True)) | ({"experts": count} if count else {})
            for widths, count in zip(layer_widths(checkpoint.config), layer_experts(checkpoint.config), strict=False)
        ],
        "plan": record.plan.to_dict() if record and record.plan else None,
        "provenance": provenance,
    }
    output(data, json_file, Table(folder, ("", "value"), tuple(rows)))


def _use_loaded_sizes(checkpoint: Checkpoint) -> Checkpoint:
    """Take sizes and parameters from the model that the checkpoint loads as, if pyprune can load it.

    Files may hold more (a tied head, buffers of early releases), and config.json may leave sizes to its class.
    """
    from pyprune.checkpoint.configuration import read_dense_files
    from pyprune.errors import CheckpointError, UnsupportedModelError

    if "quantization_config" in checkpoint.config:
        return checkpoint
    try:
        files = read_dense_files(checkpoint.folder)
    except (CheckpointError, UnsupportedModelError):
        return checkpoint
    stated = {name: value for name, value in checkpoint.config.items() if value is not None}
    parameters = sum(map(prod, files.shapes.values()))
    return replace(checkpoint, config={**files.config.to_dict(), **stated}, parameters=parameters)


def _sizes(checkpoint: Checkpoint) -> Rows:
    """List the sizes that engines load; unequal widths as least and most, 0 for a skipped block."""
    from pyprune.plan import spread
    from pyprune.serving.widths import HEAD_FIELDS, ffn_fields, layer_experts, layer_widths

    config = checkpoint.config
    layers, fields, experts = layer_widths(config), ffn_fields(config), layer_experts(config)
    widths = {name: spread(heads) for name, heads in zip(HEAD_FIELDS, zip(*layers, strict=True), strict=False)}
    for name in dict.fromkeys(fields):
        own = [layer[2] for layer, field in zip(layers, fields, strict=False) if field == name]
        widths |= {name: spread(own)} if own else {}
    if any(experts):
        widths["experts"] = spread(filter(None, experts))
    rows: Rows = [
        ("architecture", checkpoint.architecture),
        ("loads without pyprune", "yes" if checkpoint.is_stock else "no"),
        ("parameters", checkpoint.parameters),
        ("bytes of weights", checkpoint.bytes),
    ]
    for name in ("num_hidden_layers", "hidden_size", *HEAD_FIELDS, "head_dim", *dict.fromkeys(fields), "experts"):
        if value := widths.get(name) or config.get(name):
            rows.append((name, value))
    return rows


def _plan(record: PruningRecord | None) -> Rows:
    if record is None:
        return [("plan", "none (not written by pyprune)")]
    if record.plan is None:
        return [("plan", "none (not cut)")]
    removed = ", ".join(map(str, record.plan.removed_layers)) or "none"
    return [("plan", record.plan.summary()), ("removed layers", removed)]


def _short_facts(facts: Any) -> Rows:
    """Return the facts that fit on a line."""
    named = facts.items() if isinstance(facts, Mapping) else ()
    return [(name, value) for name, value in named if isinstance(value, str | int | float)]


@guard
def methods(
    name: str | None = None,
    *,
    markdown: bool = False,
    debug: bool = False,
) -> None:
    """List every method, also those of other packages, with the units that it removes and its presets.

    With NAME: the presets of this method, the values that they set, and the meaning of its own options.

    Example: pyprune methods obs

    Args:
        name (NAME): A method.
        markdown: Print Markdown, as the documentation has it.
    """
    from pyprune.cli.options import method_tables
    from pyprune.methods.table import methods_table
    from pyprune.runtime.report import markdown_table, print_table

    tables = [methods_table()] if name is None else method_tables(name)
    for number, table in enumerate(tables):
        if not markdown:
            print_table(table)
        else:
            typer.echo("\n" * (number > 0) + f"{table.title}:\n\n" * (name is not None) + markdown_table(table))


@guard
def families(
    model: str | None = None,
    *,
    markdown: bool = False,
    json_file: str | None = None,
    debug: bool = False,
) -> None:
    """List the model types with their open axes, those that lose whole layers alone, and why others are refused.

    With MODEL: its sizes and open axes alone, or the reason why it cannot be pruned. Its weights are not read.

    Example: pyprune families HuggingFaceTB/SmolLM3-3B

    Args:
        model (MODEL): Folder or hub id of a dense model.
        markdown: Print Markdown, as docs/reference/families.md has it.
    """
    from pyprune.checkpoint.load import ModelSource
    from pyprune.checkpoint.multimodal import multimodal_table
    from pyprune.families import family_for, find_family
    from pyprune.families.table import (
        gguf_table,
        known_types,
        layers_table,
        model_table,
        open_table,
        refused_table,
        vllm_table,
    )
    from pyprune.runtime.progress import track
    from pyprune.runtime.report import markdown_table

    if model is not None:
        source = ModelSource.of(model)
        tables = [model_table(family_for(source.config), source.config, model, source.closed_axes)]
    else:
        multimodal = multimodal_table()
        named = {row[0] for row in multimodal.rows}
        types = [name for name in known_types() if name not in named]
        for name in track(types, "looking at model types"):
            find_family(name)  # is kept for the tables
        tables = [open_table(types), layers_table(types), refused_table(types), vllm_table(), gguf_table(), multimodal]
    if markdown:
        typer.echo("\n\n".join(map(markdown_table, tables)))
        return
    data = {table.title: [dict(zip(table.columns, row, strict=True)) for row in table.rows] for table in tables}
    if model is None:
        opened, alone, refused = len(tables[0].rows), tables[1].rows[0][0], len(tables[2].rows)
        towers = len(tables[-1].rows)
        counts = (
            f"{opened} types and {towers} multimodal ones can be pruned, {alone} lose whole layers alone, "
            f"{refused} are refused."
        )
    output(data, json_file, *tables, *([counts] if model is None else []))


@guard
def env(*, json_file: str | None = None, debug: bool = False) -> None:
    """Print versions, the CPU's instruction set, the backend of each operation, and whether vLLM is installed."""
    from pyprune.ops import backend_report
    from pyprune.runtime.report import Table
    from pyprune.serving.engines import vllm_installed
    from pyprune.serving.stats import environment_record

    record = environment_record()
    data = {**record, "vllm": vllm_installed(), "backends": backend_report()}
    rows = [
        *record["versions"].items(),
        ("python", record["python"]),
        ("system", record["system"]),
        ("device", f"{record['device']} ({record['cpus']} CPUs)"),
        ("instruction sets", ", ".join(record["isa"]) or "baseline"),
        ("vLLM", "installed" if data["vllm"] else f"not installed: {install_command('vllm')}"),
        *((f"ops: {name}", text) for name, text in data["backends"].items()),
    ]
    output(data, json_file, Table("Environment", ("", "value"), tuple(rows)))
