"""Sources of text: hub data sets, local files, and text shipped inside an installed package.

Reading and tokenising are separate on purpose: this module chooses the reader for a name and knows nothing of tokens.
:mod:`pyprune.data.sampling` and :mod:`pyprune.quality.perplexity` build on it. The readers: :mod:`~pyprune.data.hub`,
:mod:`~pyprune.data.files` with the layouts of :mod:`~pyprune.data.records` and :mod:`~pyprune.data.layouts`, and
:mod:`~pyprune.data.packages`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from pyprune.config.data import MIXTURES, DataConfig
from pyprune.data.documents import Corpus as Corpus
from pyprune.data.documents import Document as Document
from pyprune.data.files import check_file, local_path, read_text
from pyprune.data.hub import HUB_SOURCES as HUB_SOURCES
from pyprune.data.hub import check_datasets, fetch, read_hub_id, read_named
from pyprune.data.layouts import parse_packaged, parse_plain
from pyprune.data.packages import packaged_file
from pyprune.data.packages import packaged_text as packaged_text
from pyprune.data.records import parse_jsonl, parse_table
from pyprune.errors import DataError, did_you_mean, shown

PACKAGE_PREFIX = "package:"
_READERS: dict[str, Callable[[str, str, str | None], Corpus]] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines"), parse_jsonl),
    ".csv": partial(parse_table, delimiter=","),
    ".tsv": partial(parse_table, delimiter="\t"),
}
"""Ending of a file with named fields -> its reader, (source, text, field) -> corpus."""
_LOCAL_SUFFIXES = (".txt", *_READERS, ".gz")
_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+(:[\w.-]+)?$")


def evaluation_split(source: str) -> str:
    """Return the split that perplexities of ``source`` are reported on ("test" for unnamed sources)."""
    return HUB_SOURCES[source].evaluation_split if source in HUB_SOURCES else "test"


def crosses_documents(source: str) -> bool:
    """Return whether a window of ``source`` runs on into the next document, unless the options say otherwise."""
    return HUB_SOURCES[source].cross_documents if source in HUB_SOURCES else True


def read_corpus(source: str, split: str = "train", field: str | None = None) -> Corpus:
    """Read every document of a source.

    Args:
        source: a name of :data:`HUB_SOURCES`, a datasets id ("org/name" or "org/name:config"), a local
            .txt, .jsonl or .csv file (optionally .gz), or "package:NAME/FILE" (text inside an installed package).
        split: of a hub data set; ignored for local files and packages.
        field: the column or jsonl field with the text; None = "text" or an instruction layout.

    Raises:
        DataError: the source is unknown, missing, unreachable, empty, binary or malformed, or a mixture of several.
        MissingDependencyError: a hub data set without the package `datasets`.
    """
    check_source(source)
    if source in HUB_SOURCES:
        corpus = read_named(source, split, field)
    elif source.startswith(PACKAGE_PREFIX):
        corpus = _read_packaged(source, field)
    elif _is_local(source):
        corpus = _read_local(source, field)
    else:
        corpus = read_hub_id(source, split, field)
    if not any(document.text.strip() for document in corpus.documents):
        raise DataError(f"{source!r} is empty: it holds no text. Give a source with text.")
    return corpus


def check_source(source: str) -> None:
    """Refuse a source that cannot be read, without reading it: for runs that need its text after long work.

    Of a mixture, the sources in it are checked one by one (``DataConfig.sources``).

    Raises:
        DataError: a local file (or one of a package) that does not exist, is no regular file, is too large, may not be
            read or is JSON as a whole; or a name of no source, or of a mixture.
        MissingDependencyError: a hub data set without the package `datasets`.
    """
    if source in MIXTURES:
        raise DataError(
            f"{source!r} is a mixture of several texts, for calibration and training (data.source). Name one text, "
            f"for example {MIXTURES[source][0].source!r}."
        )
    if source.startswith(PACKAGE_PREFIX):
        _check_text_file(packaged_file(source.removeprefix(PACKAGE_PREFIX)))
    elif source not in HUB_SOURCES and _is_local(source):
        _check_text_file(local_path(source))
    elif source in HUB_SOURCES or _HUB_ID.fullmatch(source):
        check_datasets(source)
    else:
        hint = did_you_mean(source, [*HUB_SOURCES, *MIXTURES], "data source")
        raise DataError(
            f"{hint} A datasets id (org/name), a local .txt/.jsonl(.gz) path or "
            f"{PACKAGE_PREFIX}NAME/FILE works as well."
        )


def check_sources(sources: Iterable[str]) -> None:
    """Refuse sources as :func:`check_source` does, the first one that cannot be read."""
    for source in sources:
        check_source(source)


def look_up(texts: Iterable[tuple[str, str]]) -> None:
    """Look texts up before any work: check that files exist, and download data sets.

    Args:
        texts: (source, split) of each.

    Raises:
        DataError, MissingDependencyError: as :func:`check_source`; also a data set that cannot be loaded.
    """
    pairs = list(texts)
    check_sources(source for source, _ in pairs)
    for source, split in pairs:
        if has_splits(source):
            fetch(source, split)


def look_up_samples(configs: Iterable[DataConfig]) -> None:
    """Look up the texts that samples are drawn from; see :func:`look_up`."""
    look_up((part.source, part.split) for config in configs for part in config.parts)


def has_splits(source: str) -> bool:
    """Check whether a source is a data set of the hub, with splits, and not a file, which is read whole."""
    return source in HUB_SOURCES or not (source.startswith(PACKAGE_PREFIX) or _is_local(source))


def _is_local(source: str) -> bool:
    # Unlike Path.exists, os.path.exists answers for names that no system allows, too.
    return source.endswith(_LOCAL_SUFFIXES) or source.startswith(("/", "./", "../", "~")) or os.path.exists(source)


def _ends(name: str, ending: str) -> bool:
    """Check whether a file name has an ending, in any case, with or without .gz."""
    return name.lower().removesuffix(".gz").endswith(ending)


def _check_text_file(path: Path) -> None:
    check_file(path)
    if _ends(path.name, ".json"):
        raise DataError(
            f"{shown(str(path))} is JSON by its name, which would be read as prose. If it has one object a line, call "
            "it .jsonl; a list becomes that with: jq -c '.[]' FILE.json > FILE.jsonl"
        )


def _read_local(source: str, field: str | None) -> Corpus:
    path = local_path(source)
    text = read_text(path)
    records = _parse_records(source, path.name, text, field)
    return parse_plain(source, text) if records is None else records


def _read_packaged(source: str, field: str | None) -> Corpus:
    name = source.removeprefix(PACKAGE_PREFIX)
    text = packaged_text(name)
    file_name = name.rsplit("/", 1)[-1]
    records = _parse_records(source, file_name, text, field)
    return parse_packaged(source, file_name, text) if records is None else records


def _parse_records(source: str, name: str, text: str, field: str | None) -> Corpus | None:
    """Return the documents of a file with named fields, by its name; None for plain text."""
    for ending, read in _READERS.items():
        if _ends(name, ending):
            return read(source, text, field)
    if field is not None:
        raise DataError(
            f"field is {shown(field)}, but {source!r} is plain text; field is for .jsonl, .csv and hub data only."
        )
    return None


def text_sha256(text: str) -> str:
    """Return the SHA-256 of a text's UTF-8 bytes, hexadecimal."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
