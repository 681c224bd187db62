"""Recover or reconstruct a pruned checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pyprune.cli.base import check_out, guard, print_next_commands, say_what_is_loaded, text_options
from pyprune.runtime.progress import warn

if TYPE_CHECKING:
    from pyprune.cut.reconstruct import ReconstructionReport
    from pyprune.runtime.report import Cell
    from pyprune.train.objective import TrainReport


@guard
def recover(
    pruned: str,
    *,
    out: Path | None = None,
    teacher: str | None = None,
    teacher_gguf_file: str | None = None,
    teacher_revision: str | None = None,
    preset: str | None = None,
    config: Path | None = None,
    set_: list[str] | None = None,
    data: str | None = None,
    samples: int | None = None,
    sequence_length: int | None = None,
    keep_adapter: bool = False,
    trust_remote_code: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    debug: bool = False,
) -> None:
    """Train a pruned checkpoint on text or instructions, with the dense model as teacher if given, and write another.

    Example: pyprune recover pruned/ --teacher HuggingFaceTB/SmolLM2-135M --preset alpaca-lora-distill --out recovered/

    Args:
        pruned (PRUNED): Checkpoint folder of a pruned model.
        out (DIR): Folder to create for the recovered checkpoint. Required unless --dry-run.
        teacher (DENSE): Teacher: the model that PRUNED was cut from. Its logits are learnt, and its hidden states if
            distillation uses them. Default: none; only the text is learnt.
        teacher_gguf_file (NAME): Name of a .gguf file inside DENSE. Default: safetensors.
        teacher_revision: Branch, tag or commit of DENSE from the hub. Default: its main branch.
        preset (NAME): Named set of options: alpaca-lora (MoreauPruner's recovery) or alpaca-lora-distill (with a
            teacher).
        data (SOURCE): Text to train on: alpaca, lamini, mixture, wikitext2, ptb, c4, bookcorpus, a datasets id, or a
            .txt/.jsonl(.gz) file. Default: the preset's, else wikitext2.
        keep_adapter: Also write the LoRA adapters alone, in PEFT's format, to the folder adapter inside DIR. Load them
            on top of PRUNED, not of DIR. Default: only merge them.
        dry_run: Print how much memory the training would take; write nothing.
    """
    check_out(out, [config, pruned, teacher, data], dry_run=dry_run, resume=resume, overwrite=overwrite)
    from pyprune.run.recipe import build_recovery

    options = build_recovery(
        preset=preset,
        recipe=config,
        options={
            **text_options(data, samples, sequence_length),
            "recover.distill": {} if teacher is not None else None,  # a teacher alone means the default weights
            "keep_adapter": True if keep_adapter else None,
        },
        settings=set_ or (),
    )
    say_what_is_loaded(pruned)
    from pyprune.checkpoint.load import ModelSource
    from pyprune.run.recover import check_recovery, recover_checkpoint, teacher_source
    from pyprune.run.rework import ADAPTER

    source = ModelSource(pruned, trust_remote_code=trust_remote_code)
    dense = teacher_source(teacher, teacher_gguf_file, teacher_revision, trust_remote_code)
    if dry_run or out is None:
        check_recovery(source, options, teacher=dense)
        return
    report = recover_checkpoint(source, options, out=out, teacher=dense, resume=resume, overwrite=overwrite)
    _print_recovered(report, out)
    if options.keep_adapter:
        print(f"The adapters alone are in {out / ADAPTER}; load them on top of {pruned}, which was not changed.")


def _print_recovered(report: TrainReport, out: Path) -> None:
    from pyprune.runtime.report import Table, print_table

    first, last = report.history[0], report.history[-1]
    rows: list[tuple[str, Cell]] = [
        ("objective", report.objective),
        ("steps", report.steps),
        ("tokens", report.tokens),
        ("language-model loss, first and last step", f"{first.lm_loss:.4f}, {last.lm_loss:.4f}"),
    ]
    rows += [(f"{name}, first and last step", f"{v:.4g}, {last.parts[name]:.4g}") for name, v in first.parts.items()]
    print_table(Table(f"Wrote {out}", ("", "value"), tuple(rows)))
    print_next_commands(out)


@guard
def reconstruct(
    pruned: str,
    *,
    dense: str,
    out: Path,
    dense_gguf_file: str | None = None,
    dense_revision: str | None = None,
    config: Path | None = None,
    set_: list[str] | None = None,
    calibration: str | None = None,
    samples: int | None = None,
    sequence_length: int | None = None,
    trust_remote_code: bool = False,
    overwrite: bool = False,
    debug: bool = False,
) -> None:
    """Solve the weights of a pruned checkpoint in closed form so that it follows its dense model; no training.

    Example: pyprune reconstruct pruned/ --dense HuggingFaceTB/SmolLM2-135M --out reconstructed/

    Args:
        pruned (PRUNED): Checkpoint folder that pyprune prune wrote.
        dense (MODEL): Checkpoint folder or hub id of the model that PRUNED was cut from.
        out (DIR): Folder to create for the reconstructed checkpoint.
        dense_gguf_file (NAME): Name of a .gguf file inside MODEL. Default: safetensors.
        dense_revision: Branch, tag or commit of MODEL from the hub. Default: its main branch.
        calibration (SOURCE): Text to follow the dense model on: mixture (prose, web, code and other languages from the
            hub), mixture-offline, wikitext2, c4, a datasets id, or a .txt/.jsonl(.gz) file. Default: mixture.
        samples: Sequences to draw from it. Default: 144.
        sequence_length: Tokens in a sequence. Default: 256.
    """
    check_out(out, [config, pruned, dense, calibration], dry_run=False, resume=False, overwrite=overwrite)
    from pyprune.run.recipe import build_reconstruction

    text = text_options(calibration, samples, sequence_length)
    options = build_reconstruction(recipe=config, options=text, settings=set_ or ())
    say_what_is_loaded(pruned)
    from pyprune.checkpoint.load import ModelSource
    from pyprune.run.reconstruct import reconstruct_checkpoint

    source = ModelSource(pruned, trust_remote_code=trust_remote_code)
    reference = ModelSource(dense, dense_gguf_file, dense_revision, trust_remote_code)
    report = reconstruct_checkpoint(source, options, dense=reference, out=out, overwrite=overwrite)
    _print_reconstructed(report, out)


def _print_reconstructed(report: ReconstructionReport, out: Path) -> None:
    from pyprune.runtime.report import Table, print_table

    rows: list[tuple[Cell, ...]] = [
        (
            f"{part.layer} {' and '.join(part.blocks)}, {part.role}",
            part.before,
            part.after,
            "the norm's gain alone" if part.rounds == 0 else part.ridge,
        )
        for part in report.parts
    ]
    columns = ("layer", "off before", "off after", "ridge (- = left as it was)")
    print_table(Table(f"Wrote {out}: relative error on text held back", columns, tuple(rows)))
    for note in report.notes():
        if report.solved:
            print(note)
        else:
            warn(note)
    print_next_commands(out)
