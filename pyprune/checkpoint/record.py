"""The record of a checkpoint, ``pruning.json``: the plan, where it came from, and a SHA-256 of every other file."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from pyprune.checkpoint.manifest import RECORD_NAME, RECORD_VERSION, PruningRecord
from pyprune.checkpoint.verify import TOKENIZER_CONFIG, digest_without_template
from pyprune.checkpoint.verify import verify_files as verify
from pyprune.errors import CheckpointError, PlanError, shown
from pyprune.families import serving_obstacle
from pyprune.plan import PrunePlan
from pyprune.runtime.disk import disk_errors
from pyprune.runtime.files import CARD_NAME, check_file, file_digest, read_bounded, read_json, unseal, write_text

UNSERVED = "unserved"
"""Entry of the record with the reason why vLLM's own class refuses a stock checkpoint."""


def has_record(folder: str | Path) -> bool:
    """Check whether a folder has a ``pruning.json``, also one that cannot be read; False for a hub id."""
    return os.path.lexists(os.path.join(folder, RECORD_NAME))


def read_record(source: str | Path, *, revision: str | None = None, verify_files: bool = False) -> PruningRecord | None:
    """Read the record of a checkpoint in a folder or on the hub; None where pyprune did not write it.

    Args:
        source: folder, or hub id, whose pruning.json is fetched.
        revision: hub revision.
        verify_files: as in :func:`read_pruning_json`; of a folder only.

    Raises:
        CheckpointError: as :func:`read_pruning_json`.
    """
    if has_record(source):
        return read_pruning_json(source, verify_files=verify_files)
    if os.path.lexists(source) or os.path.isabs(source) or str(source).startswith(("./", "../")):
        return None
    from transformers.utils.hub import cached_file

    kinds = ("missing_entries", "connection_errors", "gated_repo")
    maybe: dict[str, Any] = {f"_raise_exceptions_for_{kind}": False for kind in kinds}
    try:
        path = cached_file(str(source), RECORD_NAME, revision=revision, **maybe)
    except (OSError, ValueError):  # no repository: reading the weights reports it
        return None
    return read_pruning_json(Path(path).parent) if path is not None and _is_record(Path(path)) else None


def _is_record(path: Path) -> bool:
    """Check whether a file of this name in a foreign repository is a record at all."""
    try:
        data = read_json(path)
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and "pyprune" in data


def read_pruning_json(folder: str | Path, *, verify_files: bool = False) -> PruningRecord:
    """Read and check a checkpoint's ``pruning.json``.

    Args:
        folder: the checkpoint.
        verify_files: also compare the files with it (:func:`pyprune.checkpoint.verify.verify_files`).

    Raises:
        CheckpointError: missing, not JSON, a wrong version, changed after it was written, an invalid plan, an entry
            of the wrong kind, or (with ``verify_files``) a file that is missing, differs or is not listed.
    """
    path = Path(folder) / RECORD_NAME
    if not os.path.isfile(path):
        raise CheckpointError(f"{folder} has no {RECORD_NAME}; give a folder that pyprune wrote.")
    try:
        data = read_json(path)
        version = data["version"]
        plan_data, provenance, files = data["plan"], data["provenance"], data["files"]
        tokenizer, cards = data.get("tokenizer_config"), data.get("cards", [])
        data["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {shown(error)}. Write the checkpoint again.") from error
    if version != RECORD_VERSION:
        raise CheckpointError(
            f"{path} has version {shown(version)}; this pyprune reads {RECORD_VERSION}. Write it again."
        )
    try:
        unseal(data)
    except ValueError as error:
        raise CheckpointError(
            f"{path} was changed after it was written (its checksum does not match). To use an edited "
            "plan, save it on its own and give it to `pyprune prune --plan`."
        ) from error
    problem = next(_problems(provenance, files, tokenizer, cards), None)
    if problem is not None:
        raise CheckpointError(f"{path} is damaged: {problem}. Write the checkpoint again.")
    try:
        plan = PrunePlan.from_dict(plan_data) if plan_data is not None else None
    except PlanError as error:
        raise CheckpointError(f"{path} holds an invalid plan: {error} Write the checkpoint again.") from error
    record = PruningRecord(plan, provenance, files, tokenizer, tuple(cards))
    if verify_files:
        verify(Path(folder), record)
    return record


def _problems(provenance: Any, files: Any, tokenizer: Any, cards: Any) -> Iterator[str]:
    """Yield the problems of sections that later work relies on, which would otherwise be noticed only then."""
    if not isinstance(provenance, dict) or not isinstance(files, dict):
        yield "provenance and files are JSON objects"
        return
    yield from _file_problems(files)
    if tokenizer is not None and not _is_sha256(tokenizer):
        yield f"the SHA-256 of tokenizer_config is {shown(tokenizer)}"
    if not isinstance(cards, list) or not all(map(_is_sha256, cards)):
        yield f"cards is {shown(cards)}, not a list of SHA-256"
    kinds: dict[str, type] = dict.fromkeys(("method", "source", "architecture", "dtype"), str)
    kinds |= dict.fromkeys(("quality", "speed", "measured_before", "before", "report"), dict)
    kinds |= dict.fromkeys(("parameters", "dense_parameters"), int)
    for name, kind in kinds.items():
        value = provenance.get(name, kind())
        if type(value) is not kind:
            yield f"{name} is {shown(value)}, not {_KINDS[kind]}"
    report = provenance.get("report")
    if isinstance(report, dict) and not isinstance(report.get("decision", {}), dict):
        yield f"the report's decision is {shown(report['decision'])}, not {_KINDS[dict]}"
    yield from _recovery_problems(provenance.get("recoveries", []))
    if not _are_marks(provenance.get("training_marks", "")):
        yield f"training_marks is {shown(provenance['training_marks'])}, not base64 of whole 8-byte marks"


_KINDS = {str: "text", dict: "a JSON object", int: "a whole number"}


def _file_problems(files: Mapping[str, Any]) -> Iterator[str]:
    for name, digest in files.items():
        path = PurePosixPath(name)
        if not name or path.is_absolute() or ".." in path.parts or name == RECORD_NAME:
            yield f"it lists the file {shown(name)}, which cannot be one of its folder"
        if not _is_sha256(digest):
            yield f"the SHA-256 of {shown(name)} is {shown(digest)}"


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _recovery_problems(recoveries: Any) -> Iterator[str]:
    for entry in recoveries if isinstance(recoveries, list) else [recoveries]:
        report = entry.get("report") if isinstance(entry, dict) else None
        facts = report if isinstance(report, dict) else {}
        numbers = type(facts.get("steps")) is int and type(facts.get("tokens")) is int
        if not numbers or not isinstance(facts.get("objective"), str):
            yield f"recoveries holds {shown(entry)}, not the report of a recovery with its objective, steps and tokens"


def _are_marks(value: Any) -> bool:
    try:
        return isinstance(value, str) and len(base64.b64decode(value, validate=True)) % 8 == 0
    except (binascii.Error, ValueError):
        return False


def take_measured(facts: dict[str, Any]) -> dict[str, Any]:
    """Remove the measured figures from ``facts``, for a checkpoint of other weights, and return them."""
    return {name: facts.pop(name) for name in ("quality", "speed") if name in facts}


def write_record(folder: Path, record: PruningRecord, digests: Mapping[str, str] | None = None) -> None:
    """Write the model card and ``pruning.json`` of a folder whose other files are complete.

    Args:
        folder: the checkpoint.
        record: plan and provenance.
        digests: file name -> SHA-256 of files that need not be read again.
    """
    digests = digests or {}
    # The card is for people, who may edit it; everything a program reads is checked.
    inside = sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in (CARD_NAME, RECORD_NAME))
    names = [p.relative_to(folder).as_posix() for p in inside]
    files = {name: digests.get(name) or file_digest(folder / name) for name in names}
    config = folder / "config.json"
    if config.is_file() and (reason := serving_obstacle(json.loads(config.read_text(encoding="utf-8")))):
        record = replace(record, provenance={**record.provenance, UNSERVED: reason})
    card = model_card(record)
    (folder / CARD_NAME).write_text(card, encoding="utf-8")
    tokenizer = digest_without_template(folder / TOKENIZER_CONFIG)
    whole = replace(record, files=files, tokenizer_config=tokenizer, cards=(_digest(card),))
    (folder / RECORD_NAME).write_text(whole.to_json(), encoding="utf-8")


def check_annotatable(folder: str | Path) -> None:
    """Check before hours of measuring, not after, that :func:`annotate_checkpoint` can add to a checkpoint.

    Raises:
        CheckpointError: the record is missing or damaged.
        OutputError: the folder cannot be written, or its disk has no room for the record.
    """
    folder = Path(folder)
    record = read_pruning_json(folder)
    check_file(folder / RECORD_NAME)
    with disk_errors(folder), tempfile.TemporaryFile(dir=folder) as trial:  # it has no name, or loses it at once
        trial.write(record.to_json().encode())
        trial.flush()
        os.fsync(trial.fileno())


def annotate_checkpoint(folder: str | Path, **measured: Any) -> None:
    """Add measured facts (``quality={...}``, ``speed={...}``) to a checkpoint's record and model card.

    Other figures of a section are kept. A card that somebody edited is not changed.

    Raises:
        CheckpointError: the record is missing or damaged.
        OutputError: it cannot be written; the old one is kept.
    """
    folder = Path(folder)
    record = read_pruning_json(folder)
    merged = {section: {**record.provenance.get(section, {}), **facts} for section, facts in measured.items()}
    provenance = record.provenance | merged
    updated = replace(record, provenance=provenance)
    card = model_card(updated)
    replaceable, old = _card_state(folder / CARD_NAME, record)
    if replaceable:  # the digest of the old card is kept: the process may end between the two writes
        updated = replace(updated, cards=(_digest(card), *old))
    write_text(folder / RECORD_NAME, updated.to_json())
    if replaceable:
        write_text(folder / CARD_NAME, card)


def _card_state(card: Path, record: PruningRecord) -> tuple[bool, tuple[str, ...]]:
    """Return whether a card may be replaced (pyprune wrote it, or it is missing), and its digest."""
    if not os.path.lexists(card):
        return True, ()
    try:
        text = read_bounded(card) if os.path.isfile(card) else None
    except (OSError, ValueError):
        text = None
    if text is None:
        return False, ()
    digest = _digest(text)
    return digest in record.cards, (digest,)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def model_card(record: PruningRecord) -> str:
    """Return the README.md of a checkpoint: method, plan, measured quality and speed, how to load it."""
    facts = record.provenance
    stock = not str(facts.get("architecture", "")).startswith("Pruned")
    loading = (
        "Run `import pyprune.modeling` before `AutoModelForCausalLM.from_pretrained`; a program that does not runs as "
        "`python -m pyprune.modeling PROGRAM ARGS`."
    )
    if stock:
        readers = "Transformers loads" if UNSERVED in facts else "Transformers and vLLM load"
        loading = f"This is a stock architecture: plain {readers} it without pyprune. {facts.get(UNSERVED, '')}".strip()
    lines = ["---", "library_name: transformers", "tags: [pyprune, structured-pruning]", "---", ""]
    lines += ["# Pruned with pyprune", "", loading, "", *_card_table(_card_facts(record))]
    for section in ("quality", "speed"):
        if facts.get(section):
            lines += ["", f"## Measured {section}", "", *_card_table(facts[section].items())]
    return "\n".join(lines) + "\n"


def _card_facts(record: PruningRecord) -> Iterator[tuple[str, Any]]:
    facts = record.provenance
    for key in ("source", "method", "architecture", "dtype", "weights", "dense_parameters", "parameters"):
        if key in facts:
            yield key.replace("_", " "), facts[key]
    for entry in facts.get("recoveries", ()):
        report = entry["report"]
        yield "recovered", f"{report['objective']}, {report['steps']} steps, {report['tokens']:,} tokens"
    if record.plan is not None:
        yield "plan", record.plan.summary()


def _card_table(rows: Iterable[tuple[str, Any]]) -> list[str]:
    """Return the lines of a table without headings, values as they are in the record.

    Not ``report.markdown_table``, which rounds and aligns: a card that is not this text counts as edited by somebody.
    """
    return ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows)]
