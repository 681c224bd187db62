"""The record of a checkpoint, ``pruning.json``: the plan, where it came from, and a SHA-256 of every other file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pyprune import __version__
from pyprune.errors import CheckpointError, PlanError, shown
from pyprune.files import CARD_NAME, CHECKPOINT_MANIFEST, file_digest, read_json, seal, unseal, write_text
from pyprune.plan import PrunePlan

RECORD_NAME = CHECKPOINT_MANIFEST
RECORD_VERSION = 1


@dataclass(frozen=True)
class PruningRecord:
    """What ``pruning.json`` holds.

    Attributes:
        plan: what stayed of the dense model; None for a checkpoint that was only trained or converted.
        provenance: method, options, source, sizes, and what was measured; plain JSON data.
        files: path inside the checkpoint, with "/" -> SHA-256 (hex), of every other file of it.
    """

    plan: PrunePlan | None
    provenance: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Indented JSON with a checksum over its own content."""
        body = {
            "version": RECORD_VERSION,
            "pyprune": __version__,
            "plan": self.plan.to_dict() if self.plan is not None else None,
            "provenance": self.provenance,
            "files": self.files,
        }
        return json.dumps(seal(body), indent=2) + "\n"


def read_pruning_json(folder: str | Path, *, verify_files: bool = False) -> PruningRecord:
    """Read and check a checkpoint's ``pruning.json``.

    Args:
        folder: the checkpoint.
        verify_files: also compare the SHA-256 of every file it lists.

    Raises:
        CheckpointError: missing, not JSON, a wrong version, changed after it was written, an invalid plan,
            or (with ``verify_files``) a listed file that is missing or differs.
    """
    path = Path(folder) / RECORD_NAME
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {RECORD_NAME}; it was not written by pyprune.")
    try:
        data = read_json(path)
        version = data["version"]
        plan_data, provenance, files = data["plan"], dict(data["provenance"]), dict(data["files"])
        data["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {shown(error)}. Write the checkpoint again.") from error
    if version != RECORD_VERSION:
        raise CheckpointError(f"{path} has version {shown(version)}; this pyprune reads {RECORD_VERSION}.")
    try:
        unseal(data)
    except ValueError as error:
        raise CheckpointError(
            f"{path} was changed after it was written (its checksum does not match). To use an edited "
            "plan, save it on its own and give it to `pyprune prune --plan`."
        ) from error
    try:
        plan = PrunePlan.from_dict(plan_data) if plan_data is not None else None
    except PlanError as error:
        raise CheckpointError(f"{path} holds an invalid plan: {error}") from error
    record = PruningRecord(plan, provenance, files)
    if verify_files:
        _verify_files(Path(folder), record)
    return record


def _verify_files(folder: Path, record: PruningRecord) -> None:
    for name, digest in record.files.items():
        path = folder / name
        outside = Path(name).is_absolute() or ".." in Path(name).parts
        if outside or not path.is_file():
            raise CheckpointError(f"{folder} lacks the file {name!r} that its {RECORD_NAME} lists.")
        if file_digest(path) != digest:
            raise CheckpointError(
                f"{path} differs from what was written (its SHA-256 does not match {RECORD_NAME}). "
                "The file is truncated or was changed; fetch or write the checkpoint again."
            )


def inherited_facts(source: str | Path, *, verify_files: bool = False) -> dict[str, Any]:
    """What the record of a checkpoint made from another one takes over from its source's, if that has one.

    Returns:
        "training_marks", because the new weights have seen that text too, and everything else under "before"; nothing
        for a hub id and for folders that pyprune did not write.

    Raises:
        CheckpointError: the source's record is damaged; or with ``verify_files`` one of the files it lists.
    """
    if not (Path(source) / RECORD_NAME).is_file():
        return {}
    record = read_pruning_json(source, verify_files=verify_files)
    before = dict(record.provenance)
    marks = before.pop("training_marks", "")
    return {"training_marks": marks, "before": before}


def take_measured(facts: dict[str, Any]) -> dict[str, Any]:
    """Take the figures that were measured out of ``facts``, for a checkpoint of other weights, and return them."""
    return {name: facts.pop(name) for name in ("quality", "speed") if name in facts}


def write_record(folder: Path, record: PruningRecord, digests: Mapping[str, str] | None = None) -> None:
    """Write the model card and ``pruning.json`` of a folder whose other files are complete.

    Args:
        folder: the checkpoint.
        record: plan and provenance.
        digests: file name -> SHA-256 of files that need not be read again.
    """
    known = digests or {}
    # The card is for people, who may edit it; everything a program reads is checked.
    inside = sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in (CARD_NAME, RECORD_NAME))
    names = [p.relative_to(folder).as_posix() for p in inside]
    files = {name: known.get(name) or file_digest(folder / name) for name in names}
    (folder / CARD_NAME).write_text(model_card(record), encoding="utf-8")
    (folder / RECORD_NAME).write_text(replace(record, files=files).to_json(), encoding="utf-8")


def annotate_checkpoint(folder: str | Path, **measured: Any) -> None:
    """Add measured facts (``quality={...}``, ``speed={...}``) to a checkpoint's record and model card.

    Figures of another name that a section holds already stay. A card that somebody edited is left alone.

    Raises:
        CheckpointError: the record is missing or damaged.
    """
    folder = Path(folder)
    record = read_pruning_json(folder)
    merged = {section: {**record.provenance.get(section, {}), **facts} for section, facts in measured.items()}
    provenance = record.provenance | merged
    updated = replace(record, provenance=provenance)
    card = folder / CARD_NAME
    texts = {RECORD_NAME: updated.to_json()}
    if not card.exists() or card.read_text(encoding="utf-8") == model_card(record):
        texts[CARD_NAME] = model_card(updated)
    for name, text in texts.items():
        write_text(folder / name, text)


def model_card(record: PruningRecord) -> str:
    """The README.md of a checkpoint: method, plan, measured quality and speed, how to load it."""
    facts = record.provenance
    stock = not str(facts.get("architecture", "")).startswith("Pruned")
    loading = (
        "This is a stock architecture: plain Transformers and vLLM load it without pyprune."
        if stock
        else "Run `import pyprune.modeling` before `AutoModelForCausalLM.from_pretrained`."
    )
    lines = ["---", "library_name: transformers", "tags: [pyprune, structured-pruning]", "---", ""]
    lines += ["# Pruned with pyprune", "", loading, "", "| | |", "|---|---|"]
    for key in ("source", "method", "architecture", "dtype", "dense_parameters", "parameters"):
        if key in facts:
            lines.append(f"| {key.replace('_', ' ')} | {facts[key]} |")
    for entry in facts.get("recoveries", ()):
        done = entry["report"]
        lines.append(f"| recovered | {done['objective']}, {done['steps']} steps, {done['tokens']:,} tokens |")
    if record.plan is not None:
        lines.append(f"| plan | {record.plan.summary()} |")
    for section in ("quality", "speed"):
        if facts.get(section):
            lines += ["", f"## Measured {section}", "", "| | |", "|---|---|"]
            lines += [f"| {key} | {value} |" for key, value in facts[section].items()]
    return "\n".join(lines) + "\n"
