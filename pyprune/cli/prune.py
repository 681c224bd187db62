"""Prune a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pyprune.cli.base import check_out, guard, print_next_commands, say_what_is_loaded, text_options
from pyprune.cli.sizes import warn_of_slow_checkpoint
from pyprune.methods.registry import FORMS, installed_names, own_methods, presets
from pyprune.methods.registry import preset as find_preset
from pyprune.runtime.progress import say, warn

if TYPE_CHECKING:
    from pyprune.config.run import PruneConfig
    from pyprune.run.result import PruneResult
    from pyprune.runtime.report import Cell

REMOVES = {
    "layers": "remove layers",
    "hidden": "remove hidden channels",
    "experts": "remove experts of mixtures",
    "parameters": "remove the heads and FFN channels of the smallest score",
}
"""Unit of a method's ratio -> what the method does, in the help of --method."""

INSTALLED = installed_names()  # once: it reads the metadata of every package


def _methods() -> str:
    by_unit: dict[str, list[str]] = {unit: [] for unit in REMOVES}
    for name in own_methods():
        by_unit[str(find_preset(name).ratio_of)].append(name)
    parts = [f"{', '.join(names)} ({REMOVES[unit]})" for unit, names in by_unit.items()]
    if INSTALLED:
        parts.append(f"{', '.join(INSTALLED)} (of other packages)")
    return ", ".join(parts)


def _presets() -> str:
    methods = [*own_methods(), *INSTALLED]
    others = [name for name in presets() if name not in methods and not name.endswith(FORMS)]
    return (
        "Named options: NAME of a method (choose, cut and reconstruct), NAME-plain (without the reconstruction), "
        "NAME-trained (then trained on text and the dense logits), NAME-paper (the paper's constants); "
        f"also {', '.join(others)}."
    )


@guard
def prune(
    model: str,
    *,
    out: Path | None = None,
    method: Annotated[
        str | None,
        typer.Option(
            help=f"{_methods()}, none (only apply --plan). Default: elder, or none where only a plan is given."
        ),
    ] = None,
    ratio: float | None = None,
    ratio_of: str | None = None,
    config: Path | None = None,
    preset: Annotated[str | None, typer.Option(metavar="NAME", help=_presets())] = None,
    set_: list[str] | None = None,
    recovery: str | None = None,
    uniform: bool = False,
    plan: Path | None = None,
    calibration: str | None = None,
    samples: int | None = None,
    sequence_length: int | None = None,
    gguf_file: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    placement: str = "auto",
    dry_run: bool = False,
    debug: bool = False,
) -> None:
    """Prune MODEL and write an ordinary checkpoint folder to --out.

    Example: pyprune prune HuggingFaceTB/SmolLM2-135M --method elder --ratio 0.25 --out pruned/

    Args:
        model (MODEL): Checkpoint folder or hub id (owner/name).
        out (DIR): Folder to create for the pruned checkpoint. Required unless --dry-run.
        ratio: Share to remove, between 0 and 1; the count is rounded down. Default: 0.25.
        ratio_of (UNIT): Unit of --ratio: layers, hidden, experts or parameters. Default: the method's own.
        recovery (NAME): Training after the cut: alpaca-lora (LoRA on Alpaca's instructions) or alpaca-lora-distill
            (with the dense model as teacher). Default: the preset's own.
        uniform: Give every layer the same widths, so that a stock architecture fits (scoring methods; all layers may be
            cut). Default: each layer its own.
        plan (FILE): Plan (JSON, or a pruned checkpoint) to apply instead of deciding one.
        calibration (SOURCE): Text to score, to reconstruct and to train on: mixture (prose, web, code, other
            languages), mixture-offline, wikitext2, ptb, c4, alpaca, bookcorpus (more names: pyprune options), a
            datasets id, or a .txt/.jsonl(.gz) file. Default: the preset's.
        placement (WHERE): Where processes of torchrun keep MODEL while nothing trains: device (a whole copy each), host
            (one copy, in the first process), or auto: host if it fills more than half of a device.
        dry_run: Print the plan as JSON and its sizes; write nothing.
    """
    check_out(out, [config, model, calibration], dry_run=dry_run, resume=resume, overwrite=overwrite)
    from pyprune.run.recipe import build_config

    options = build_config(
        preset=preset,
        recovery=recovery,
        recipe=config,
        options={
            "method": method,
            "ratio": ratio,
            "ratio_of": ratio_of,
            "score.uniform": uniform or None,
            "plan": str(plan) if plan is not None else None,
            **text_options(calibration, samples, sequence_length),
        },
        settings=set_ or (),
    )
    say_what_is_loaded(model)
    _warn_of_unread_text(options, calibration, samples, sequence_length)
    from pyprune.checkpoint.load import ModelSource
    from pyprune.run.prune import plan_checkpoint, prune_checkpoint

    source = ModelSource(model, gguf_file, revision, trust_remote_code)
    if dry_run:
        decision = plan_checkpoint(source, options, placement=placement)
        say(decision.plan.summary(), "bold")
        for warning in decision.warnings:
            warn(warning)
        for note in decision.notes:
            say(f"Note: {note}", "dim")
        print(decision.plan.to_json())
    elif out is not None:
        result = prune_checkpoint(source, options, out=out, resume=resume, overwrite=overwrite, placement=placement)
        _print_pruned(result)
        print_next_commands(out)
        if result.compact is not None:
            warn_of_slow_checkpoint(out, config=options)


def _warn_of_unread_text(
    config: PruneConfig, calibration: str | None, samples: int | None, sequence_length: int | None
) -> None:
    """Warn of text options that this run does not read; a script may give every method the same options."""
    from pyprune.run.text import text_configs

    read = text_configs(config)
    if "data" in read:
        return
    given: dict[str, tuple[object, Sequence[object]]] = {
        "--calibration": (calibration, [data.source for data in read.values()]),
        "--samples": (samples, [data.samples for data in read.values()]),
        "--sequence-length": (sequence_length, [data.sequence_length for data in read.values()]),
    }
    idle = [name for name, (value, used) in given.items() if value is not None and value not in used]
    if idle:
        planned = config.plan is not None
        why = "the plan decides what is removed" if planned else f"method {config.method!r} decides without text"
        rest = f"the text of {' and '.join(read)} is another one" if read else "nothing else of this run reads text"
        warn(f"{', '.join(idle)} would do nothing: {why}, and {rest}.")


def _print_pruned(result: PruneResult) -> None:
    from pyprune.runtime.report import Table, print_table

    rows: list[tuple[str, Cell]] = [("plan", result.plan.summary())]
    removed = result.plan.removed_layers
    if removed:
        rows.append(("removed layers", ", ".join(map(str, removed))))
    if result.compact is None:
        rows.append(("applied", "no (stages.prune is off): the shapes are dense"))
    else:
        rows += [
            ("parameters before", result.compact.dense_parameters),
            ("parameters after", result.compact.parameters),
            ("share removed", f"{result.compact.removed_share:.2%}"),
            ("architecture", result.compact.architecture),
            ("loads without pyprune", result.compact.stock),
        ]
    if result.effects is not None and result.effects.preserved_ratio is not None:
        rows.append(("preserved |W| of the removed parts", f"{result.effects.preserved_ratio:.2%}"))
    if result.verified is not None:
        rows += [(name.replace("_", " "), f"{value:.6g}") for name, value in result.verified.items()]
    rows += [("note", note) for note in result.notes]
    print_table(Table(f"Wrote {result.out}", ("", "value"), tuple(rows)))
