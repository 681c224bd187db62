"""Records with named fields -> documents: lines of a .jsonl file, rows of a table (.csv) and of a hub data set."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from io import StringIO
from itertools import chain
from typing import Any

from pyprune.data.documents import PARAGRAPH, Corpus, Document
from pyprune.errors import DataError, shown
from pyprune.runtime.files import parse_json
from pyprune.runtime.limits import brief

C4_WINDOWS = 256
"""C4 is evaluated on at most this many windows (docs/reference/evaluation.md)."""
RECORD_CHARACTERS = 64 << 20
"""A line of a .jsonl file: parsed, empty lists take twenty times their text."""
MOST_DOCUMENTS = 2**24
"""Documents of a local file: each takes some 250 bytes, however short it is."""
_NAMES_SHOWN = 20
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

Record = Mapping[str, Any]
Numbered = Iterable[tuple[str, Record]]
"""(place of the record, for messages; the record), one by one: fields that no document needs are not kept."""


def split_lines(source: str, text: str, separator: str) -> list[str]:
    """Split a text, unless that makes too many documents for memory.

    Raises:
        DataError: it makes more than :data:`MOST_DOCUMENTS`.
    """
    count = text.count(separator) + 1
    if count > MOST_DOCUMENTS:
        raise DataError(
            f"{source!r} has {count:,} documents or lines; at most {MOST_DOCUMENTS:,} are read. Give a part of it."
        )
    return text.split(separator)


def parse_jsonl(source: str, text: str, field: str | None) -> Corpus:
    """Read a .jsonl file: instruction records, C4's records, or any others with a text field.

    Args:
        source: the name in errors.
        text: the content of the file.
        field: the field with the text; None = an instruction layout, else "text".

    Raises:
        DataError: a line is no JSON object, or lacks the field, or does not hold text in it.
    """
    return _corpus(source, _lines(source, text), field)


def parse_table(source: str, text: str, field: str | None, delimiter: str) -> Corpus:
    """Read a .csv or .tsv file, whose first line names its fields, as :func:`parse_jsonl` reads its records.

    Args:
        source: the name in errors.
        text: the content of the file.
        field: the field with the text; None = an instruction layout, else "text".
        delimiter: between two values of a line; values may be quoted and then hold it, and line ends.

    Raises:
        DataError: as for :func:`parse_jsonl`, or the quotes of a value do not match.
    """
    return _corpus(source, _rows(source, text, delimiter), field)


def _corpus(source: str, records: Iterator[tuple[str, Record]], field: str | None) -> Corpus:
    first = next(records, None)
    if first is None:
        return Corpus(source, ())
    everything = chain([first], records)
    if field is None and is_instruction(first[1]):
        return Corpus(source, tuple(instruction_documents(everything)), instructions=True)
    c4 = {"text", "timestamp", "url"} <= first[1].keys()
    return Corpus(
        source,
        tuple(d for d in text_documents(everything, field) if d.text.strip()),
        joiner=" " if c4 else PARAGRAPH,
        max_windows=C4_WINDOWS if c4 else None,
    )


def _lines(source: str, text: str) -> Iterator[tuple[str, Record]]:
    for number, line in enumerate(split_lines(source, text, "\n"), start=1):
        if line.strip():
            where = f"{source!r}, line {number}"
            yield where, _parse_record(where, line)


def _rows(source: str, text: str, delimiter: str) -> Iterator[tuple[str, Record]]:
    before = csv.field_size_limit(RECORD_CHARACTERS)
    reader = csv.DictReader(StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        for row in reader:
            yield f"{source!r}, line {reader.line_num}", {str(name): value for name, value in row.items()}
    except csv.Error as error:
        raise DataError(
            f"{source!r}, line {reader.line_num} is no row of a table ({error}). Correct its quotes, or give .jsonl."
        ) from error
    finally:
        csv.field_size_limit(before)


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


def is_instruction(record: Record) -> bool:
    """Check whether a record is an instruction, by the names of Alpaca (output) or LaMini (response)."""
    return "instruction" in record and ("output" in record or "response" in record)


def instruction_documents(records: Numbered) -> Iterator[Document]:
    """Lay instruction records out as Stanford Alpaca does.

    Raises:
        DataError: a field is missing or does not hold text.
    """
    for where, record in records:
        yield _instruction_document(where, record)


def text_documents(records: Numbered, field: str | None) -> Iterator[Document]:
    """Take the text of each record.

    Args:
        records: the records, with their places.
        field: with the text; None = "text".

    Raises:
        DataError: a field is missing or does not hold text.
    """
    for where, record in records:
        yield Document.plain(_field_of(where, record, field or "text", automatic=field is None))


def _field_of(where: str, record: Record, name: str, *, automatic: bool = False) -> str:
    value = record.get(name)
    if isinstance(value, str):
        return _encodable(where, name, value)
    there = list_names(map(str, record))
    if name in record:
        raise DataError(f"{where}: field {shown(name)} is {type(value).__name__}, not text. Fields there: {there}.")
    hint = " Name the one that holds the text with the option field." if automatic else ""
    raise DataError(f"{where} has no field {shown(name)}. Fields there: {there}.{hint}")


def list_names(names: Iterable[str]) -> str:
    """Format names for a message, in order, as many as one can read."""
    ordered = sorted(names)
    more = len(ordered) - _NAMES_SHOWN
    text = ", ".join(shown(name)[1:-1] for name in ordered[:_NAMES_SHOWN]) or "none"
    return f"{text} and {more:,} more" if more > 0 else text


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


def _instruction_document(where: str, record: Record) -> Document:
    alpaca = "output" in record or "response" not in record
    instruction = _field_of(where, record, "instruction")
    response = _field_of(where, record, "output" if alpaca else "response")
    extra = _input_of(where, record, "input" if alpaca or "context" not in record else "context").strip()
    template = _ALPACA_WITH_INPUT if extra else _ALPACA_WITHOUT_INPUT
    question = f"{instruction}{PARAGRAPH}{extra}" if extra else instruction
    prompt = template.format(instruction=instruction, input=extra)
    return Document(prompt + response, (("user", question), ("assistant", response)), prompt)


def _input_of(where: str, record: Record, name: str) -> str:
    """Return the input of an instruction (Dolly: context), which may be missing, empty in any way, or a number."""
    value = record.get(name) or ""
    if isinstance(value, str):
        return _encodable(where, name, value)
    if isinstance(value, int | float):
        return str(value)
    raise DataError(f"{where}: field {name!r} is {type(value).__name__}, not text. Make it text, or leave it out.")
