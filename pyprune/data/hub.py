"""Data sets of the Hugging Face hub: the ones with a short name, and any other by its id."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pyprune.data.documents import PARAGRAPH, Corpus
from pyprune.data.records import C4_WINDOWS, Record, instruction_documents, is_instruction, text_documents
from pyprune.errors import DataError, MissingDependencyError, shown
from pyprune.runtime.limits import brief, foreign_errors

_PARQUET = "refs/convert/parquet"
_HELD_OUT_SEED = 42
"""Of LLM-Pruner's split (post_training.py: train_test_split(test_size=2000, shuffle=True, seed=42))."""


@dataclass(frozen=True)
class HubSource:
    """One data set that has a short name.

    Attributes:
        repository: datasets id.
        config: the configuration's name, or None.
        revision: the branch; refs/convert/parquet where the main branch is a loading script, which
            datasets >= 4 refuses.
        files: split -> file pattern; empty when the repository's own splits are used.
        splits: the splits that exist.
        evaluation_split: the split that perplexities are reported on.
        field: the column with the text (ignored for instruction records).
        joiner, max_windows, instructions: see :class:`~pyprune.data.documents.Corpus`.
        held_out: records that are "validation" and not "train", if the repository has one split only: the same rows
            that LLM-Pruner holds out. 0 = the repository has both splits.
        cross_documents: whether a window runs on from one document into the next unless the options say otherwise.
    """

    repository: str
    config: str | None = None
    revision: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    splits: tuple[str, ...] = ("train", "validation", "test")
    evaluation_split: str = "test"
    field: str = "text"
    joiner: str = PARAGRAPH
    max_windows: int | None = None
    instructions: bool = False
    held_out: int = 0
    cross_documents: bool = True


def _instructions(repository: str) -> HubSource:
    return HubSource(
        repository,
        splits=("train", "validation"),
        evaluation_split="validation",
        instructions=True,
        held_out=2000,
    )


def _wikipedia(language: str) -> HubSource:
    return HubSource(
        "wikimedia/wikipedia",
        files={"train": f"20231101.{language}/train-00000-of-*.parquet"},
        splits=("train",),
        evaluation_split="train",
    )


HUB_SOURCES: dict[str, HubSource] = {
    "wikitext2": HubSource("Salesforce/wikitext", config="wikitext-2-raw-v1"),
    "ptb": HubSource(
        "ptb-text-only/ptb_text_only",
        revision=_PARQUET,
        files={split: f"penn_treebank/{split}/*.parquet" for split in ("train", "validation", "test")},
        evaluation_split="validation",
        field="sentence",
    ),
    "c4": HubSource(
        "allenai/c4",
        files={
            "train": "en/c4-train.00000-of-01024.json.gz",
            "validation": "en/c4-validation.00000-of-00008.json.gz",
        },
        splits=("train", "validation"),
        evaluation_split="validation",
        joiner=" ",
        max_windows=C4_WINDOWS,
    ),
    # The cleaned set: "a refined version of the Alpaca dataset comprising about 50,000 samples" (MoreauPruner), which
    # is what LLM-Pruner's protocol recovers on.
    "alpaca": _instructions("yahma/alpaca-cleaned"),
    "lamini": _instructions("MBZUAI/LaMini-instruction"),
    # LLM-Pruner, whose protocol MoreauPruner follows, takes each sample out of one record that is long enough.
    "bookcorpus": HubSource(
        "bookcorpus/bookcorpus",
        revision=_PARQUET,
        files={"train": "plain_text/*train/0000.parquet"},
        splits=("train",),
        evaluation_split="train",
        joiner=" ",
        cross_documents=False,
    ),
    "codeparrot": HubSource(
        "codeparrot/codeparrot-clean-valid", splits=("train",), evaluation_split="train", field="content"
    ),
    **{f"wikipedia-{language}": _wikipedia(language) for language in ("de", "es", "ru", "zh")},
}
"""Every named data set, in one place. Only the first shard of C4, BookCorpus and each Wikipedia is downloaded."""


def check_datasets(source: str) -> None:
    """Refuse a hub data set if the package `datasets` is missing, without importing it.

    Raises:
        MissingDependencyError: it is missing.
    """
    try:
        missing = importlib.util.find_spec("datasets") is None
    except ValueError:  # something stands in for it
        missing = False
    if missing:
        raise _missing_package(source)


def _missing_package(source: str) -> MissingDependencyError:
    return MissingDependencyError("datasets", "data", f"The data source {source!r}")


def read_named(name: str, split: str, field: str | None) -> Corpus:
    """Read one split of a data set of :data:`HUB_SOURCES`.

    Args:
        name: its short name.
        split: one of its splits.
        field: the column with the text; None = the usual one.

    Raises:
        DataError: it has no such split or column, or cannot be loaded or read.
        MissingDependencyError: the package `datasets` is missing.
    """
    entry = HUB_SOURCES[name]
    rows = _rows_of(name, split)
    records = _each(name, rows, _chosen(name, rows, entry, split))
    instructions = entry.instructions and field is None
    if instructions:
        documents = tuple(instruction_documents(records))
    else:
        documents = tuple(text_documents(records, field or entry.field))
    return Corpus(name, documents, entry.joiner, entry.max_windows, instructions)


def _chosen(name: str, rows: Iterable[Record], entry: HubSource, split: str) -> np.ndarray[Any, Any] | None:
    """Return the rows of a split, bool [rows]; None = all of them."""
    if not entry.held_out:
        return None
    count = len(rows) if isinstance(rows, Sized) else 0
    if count <= entry.held_out:
        raise DataError(
            f"The data set {name!r} has {count:,} records, but {entry.held_out:,} of them are held out as its "
            "validation split; the download is not the whole set. Remove it from the cache and try again."
        )
    chosen = np.zeros(count, dtype=np.bool_)
    chosen[np.random.default_rng(_HELD_OUT_SEED).permutation(count)[: entry.held_out]] = True
    return chosen if split == "validation" else ~chosen


def read_hub_id(source: str, split: str, field: str | None) -> Corpus:
    """Read one split of any data set of the hub.

    Args:
        source: "org/name" or "org/name:config".
        split: one of the repository's own.
        field: the column with the text; None = an instruction layout, else "text".

    Raises:
        DataError: it has no such split or column, or cannot be loaded or read.
        MissingDependencyError: the package `datasets` is missing.
    """
    rows = _rows_of(source, split)
    first = next(iter(_each(source, rows)), None)
    if first is not None and field is None and is_instruction(first[1]):
        return Corpus(source, tuple(instruction_documents(_each(source, rows))), instructions=True)
    return Corpus(source, tuple(text_documents(_each(source, rows), field)))


def fetch(source: str, split: str) -> None:
    """Download a split of a data set, unless the cache has it, for a run that reads it after other work.

    Args:
        source: a name of :data:`HUB_SOURCES`, "org/name" or "org/name:config".
        split: one of its splits.

    Raises:
        DataError: it has no such split, or cannot be loaded.
        MissingDependencyError: the package `datasets` is missing.
    """
    _rows_of(source, split)


def _rows_of(source: str, split: str) -> Iterable[Record]:
    """Load all records of the stored split that holds a split."""
    entry = HUB_SOURCES.get(source)
    if entry is None:
        repository, _, config = source.partition(":")
        return _load_rows(source, repository, config or None, split)
    if split not in entry.splits:
        raise DataError(f"{source} has no split {shown(split)}. Available: {', '.join(entry.splits)}.")
    files = {split: entry.files[split]} if entry.files else None
    loaded = "train" if entry.held_out else split
    return _load_rows(source, entry.repository, entry.config, loaded, revision=entry.revision, data_files=files)


def _load_rows(
    source: str,
    repository: str,
    config: str | None,
    split: str,
    *,
    revision: str | None = None,
    data_files: Mapping[str, str] | None = None,
) -> Iterable[Record]:
    """Call `datasets.load_dataset` and turn its errors into one clear error."""
    try:
        import datasets
    except ImportError as error:
        raise _missing_package(source) from error
    options: dict[str, Any] = {"split": split, "revision": revision}
    if data_files is not None:
        # One shard only: the sizes recorded for the whole data set cannot match.
        options |= {"data_files": dict(data_files), "verification_mode": "no_checks"}
    try:
        rows: Iterable[Record] = datasets.load_dataset(repository, config, **options)
    except Exception as error:  # hub, HTTP, parquet and split errors share no base class
        raise DataError(
            f"The data set {source!r} ({repository}, split {split!r}) could not be loaded: {brief(error)}. "
            "Check the name, the split and the network, or give a local .txt or .jsonl(.gz) file; to "
            "calibrate, mixture-offline needs none."
        ) from error
    return rows


def _each(
    source: str, rows: Iterable[Record], chosen: np.ndarray[Any, Any] | None = None
) -> Iterator[tuple[str, Record]]:
    """Yield the records of a data set, which is read only now; errors of damaged files become a DataError."""
    with foreign_errors(
        DataError, f"The data set {source!r} cannot be read", "Remove it from the cache and try again."
    ):
        for number, row in enumerate(rows):
            if chosen is None or chosen[number]:
                yield f"{source}, row {number}", row
