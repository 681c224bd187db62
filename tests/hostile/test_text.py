"""Text for calibration, recovery and measuring."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile._cases import (
    BRIEF,
    EVAL,
    READS,
    Case,
    Step,
    case,
    folder_at,
    gzipped,
    link,
    nested_json,
    table,
    turns,
    write,
)
from tests.hostile._server import Outcome

READERS = {"calibration": READS, "perplexity": EVAL}
OTHER_READERS = {
    "recovery": f"{BRIEF} --out c --data",
    "robustness": "robustness dense --ppl text.txt --out r.jsonl --calibration",
    "robustness, perplexity": "robustness dense --calibration text.txt --out r.jsonl --ppl",
    "bench": "bench pruned --against dense --engine transformers --ppl",
}
"""Commands that read the text that follows them."""
PROSE = ("Plain words of a text that somebody wrote. " * 200).encode()
FIRST = json.dumps({"text": "plain words " * 50}) + "\n"


def lines(*records: str) -> str:
    """JSON lines, the first of them good."""
    return FIRST + "\n".join(records) + "\n"


FILES: dict[str, tuple[str, bytes | str]] = {
    "empty": ("t.txt", b""),
    "white space": ("t.txt", b" \n\t\n" * 1000),
    "a byte-order mark": ("t.txt", b"\xef\xbb\xbf"),
    "one NUL": ("t.txt", PROSE + b"\0" + PROSE),
    "only NUL": ("t.txt", bytes(10_000)),
    "Latin-1": ("t.txt", PROSE + "Grün".encode("latin-1")),
    "UTF-16": ("t.txt", "Plain words. ".encode("utf-16") * 200),
    "encoded surrogates": ("t.txt", PROSE + b"\xed\xa0\x80"),
    "a cut character": ("t.txt", PROSE + b"\xe2\x82"),
    "noise": ("t.txt", bytes(range(255, 127, -1)) * 50),
    "a few words": ("t.txt", b"short"),
    "no gzip": ("t.txt.gz", PROSE),
    "an empty gzip": ("t.txt.gz", b""),
    "a gzip of nothing": ("t.txt.gz", gzip.compress(b"")),
    "a gzip of binary": ("t.txt.gz", gzip.compress(bytes(1000))),
    "a gzip with a wrong method": ("t.txt.gz", b"\x1f\x8b\x07" + gzip.compress(PROSE)[3:]),
    "empty lines": ("t.jsonl", b"\n\n\n"),
    "no JSON": ("t.jsonl", "plain words\n"),
    "one line that is no JSON": ("t.jsonl", lines("{text: 5}")),
    "a line cut short": ("t.jsonl", lines('{"text": "plain wo')),
    "a list": ("t.jsonl", lines("[1, 2]")),
    "a number": ("t.jsonl", lines("5")),
    "null": ("t.jsonl", lines("null")),
    "text alone": ("t.jsonl", lines('"plain"')),
    "a field of another type": ("t.jsonl", lines('{"text": 5}')),
    "a field of nothing": ("t.jsonl", lines('{"text": null}')),
    "a nested field": ("t.jsonl", lines('{"text": {"text": "a"}}')),
    "no field": ("t.jsonl", lines("{}")),
    "another field": ("t.jsonl", '{"body": "plain words"}\n'),
    "a field with megabytes as its name": ("t.jsonl", json.dumps({"x" * 3_000_000: "a"}) + "\n"),
    "thousands of fields": ("t.jsonl", json.dumps({f"field {i}": "a" for i in range(20_000)}) + "\n"),
    "a field with escape codes": ("t.jsonl", json.dumps({"\x1b[2J": "a"}) + "\n"),
    "a lone surrogate": ("t.jsonl", lines('{"text": "words \\ud800 ' + "words " * 100 + '"}')),
    "a lone surrogate in a name": ("t.jsonl", lines('{"\\udfff": "a"}')),
    "nested lists": ("t.jsonl", lines(nested_json(100_000))),
    "nested objects": ("t.jsonl", lines('{"a":' * 100_000)),
    "a number of 5,000 digits": ("t.jsonl", lines('{"text": ' + "9" * 5000 + "}")),
    "not UTF-8": ("t.jsonl", FIRST.encode() + b'{"text": "\xff"}\n'),
    "instructions without output": ("t.jsonl", '{"instruction": "a", "output": "b"}\n{"instruction": "a"}\n'),
    "instructions of numbers": ("t.jsonl", '{"instruction": 5, "output": 6}\n'),
    "instructions of lone surrogates": ("t.jsonl", '{"instruction": "\\ud800", "output": "\\udfff"}\n' * 20),
}


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def without_end(data: bytes) -> bytes:
    return data[:-4]


def wrong_sum(data: bytes) -> bytes:
    return data[:-8] + bytes(8)


def garbled(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes(b ^ 0xFF for b in data[middle : middle + 20]) + data[middle + 20 :]


def followed(data: bytes) -> bytes:
    return data + b"someone's own"


@table(
    *(
        case(f"{name}: {what}", f"{command} {file}", write(file, content), slow=slow)
        for number, (what, (file, content)) in enumerate(FILES.items())
        for name, command, slow in turns(READERS, number)
    ),
    *(
        case(
            f"{name}: {kind} gzip {how.__name__}",
            f"{command} t.{kind}.gz",
            gzipped(f"t.{kind}.gz", content, how),
            slow=slow,
        )
        for number, how in enumerate((half, without_end, wrong_sum, garbled, followed))
        for kind, content in {"txt": PROSE, "jsonl": (FIRST * 20).encode()}.items()
        for name, command, slow in turns(READERS, number)
    ),
    *(
        case(f"recovery: {what}", f"{BRIEF} --out c --data {file}", write(file, content))
        for what, (file, content) in FILES.items()
        if what in ("empty", "one NUL", "no gzip", "a lone surrogate", "nested lists", "instructions of numbers")
    ),
)
def test_a_file_that_holds(case: Case, refused: Callable[[Case], Outcome]) -> None:
    refused(case)


SOURCES = {
    "a missing file": "missing.txt",
    "a missing file in a missing folder": "no/missing.txt",
    "a folder": "folder.txt",
    "the current folder": ".",
    "a model": "dense",
    "a dangling link": "dangling.txt",
    "a link to itself": "loop.txt",
    "300 characters": "x" * 300 + ".txt",
    "300 characters in a folder": "a/" + "x" * 300 + ".txt",
    "300 characters without a suffix": "x" * 300,
    "5,000 characters": "./" + "x/" * 2500,
    "a megabyte": "x" * 100_000,
    "nothing": "",
    "a space": " ",
    "NUL": "a\0b.txt",
    "escape codes": "\x1b[31m.txt",
    "a line break": "a\nb.txt",
    "a name that is none": "wikitext3",
    "a device": "/dev/null",
    "a package that is not there": "package:nothing/file.txt",
    "a package and no file": "package:json",
    "a file outside a package": "package:json/../../../../etc/passwd",
    "a home that is none": "~nobody-here/text.txt",
    "an address": "https://example.com/text.txt",
}
SETTING = (folder_at("folder.txt"), link("dangling.txt", "nowhere"), link("loop.txt", "loop.txt"))


@table(
    *(
        Case(f"{name}: {what}", [*command.split(), source], SETTING, slow=slow)
        for number, (what, source) in enumerate(SOURCES.items())
        for name, command, slow in turns(READERS, number)
    ),
    *(
        Case(f"{name}: {what}", [*command.split(), SOURCES[what]], SETTING, slow=slow)
        for number, what in enumerate(("a missing file", "a folder", "300 characters", "NUL"))
        for name, command, slow in turns(OTHER_READERS, number)
    ),
)
def test_a_source_that_is(case: Case, refused: Callable[[Case], Outcome]) -> None:
    refused(case)


NUMBERS = ("0", "-1", "100000000", "1000000000", "10000000000000000000000", "1.5", "nan", "many", "")
READ = "prune dense --method wanda --ratio 0.2 --calibration text.txt --dry-run"


@table(
    *(
        Case(f"{option} {n or 'nothing'}, {name}", [*command.split(), option, n, *more.split()], slow=slow)
        for option, more in {"--samples": "--sequence-length 16", "--sequence-length": "--samples 2"}.items()
        for place, n in enumerate(NUMBERS)
        for name, command, slow in turns({"prune": READ, "recover": "recover pruned --data text.txt --out c"}, place)
    ),
    *(
        Case(f"--max-tokens {n or 'nothing'}", [*EVAL.split(), "text.txt", "--max-tokens", n])
        for n in ("0", "-1", "x", "")
    ),
    case("--max-tokens beyond the text", f"{EVAL} text.txt --max-tokens {10**30}", codes=(0, 2)),
    *(
        case(
            f"recovery_data: {n} samples",
            f"{READS} text.txt --set stages.after=[finetune] --set recovery_data.samples={n}",
        )
        for n in (0, -1, 10**8, 10**9, 10**30)
    ),
    case("instructions for calibration", f"{READS} text.txt --set data.layout=instructions"),
    case("instructions that are none", f"{BRIEF} --out c --set data.layout=instructions"),
    case("a field of plain text", f"{READS} text.txt --set data.field=body"),
    case("a field that is not there", f"{READS} t.jsonl --set data.field=body", write("t.jsonl", FIRST * 50)),
    case("a split that is none", f"{READS} wikitext2 --set data.split=evil"),
    case("an unknown protocol", "eval dense --ppl text.txt --protocol ppl-1"),
    case("longer than the model", f"{READ} --samples 2 --sequence-length 513"),
)
def test_a_number_of_samples_or_tokens(case: Case, refused: Callable[[Case], Outcome]) -> None:
    refused(case)


LARGE: dict[str, Any] = {"seconds": 200.0, "growth": 5 << 29}
"""Text is read whole: a few times its size, which is at most 2 GiB, and as long as that takes."""


def one_block(megabytes: int) -> Step:
    """Write so much text without a line's end."""

    def step(folder: Path) -> None:
        with (folder / "t.txt").open("wb") as stream:
            for _ in range(megabytes):
                stream.write(b"word " * 200_000)

    return step


@table(
    case("calibration: 420 MB in one block", f"{READS} t.txt", one_block(420), codes=(0, 2), slow=True, **LARGE),
    # The tiny tokenizer makes a token of every byte, and all tokens of a text that is measured are held.
    case("perplexity: 50 MB in one block", f"{EVAL} t.txt", one_block(50), codes=(0, 2), slow=True, **LARGE),
    case(
        "a gzip that grows a thousandfold",
        f"{EVAL} t.txt.gz",
        gzipped("t.txt.gz", bytes(2_000)),
        codes=(2,),
    ),
    case(
        "a gzip of gigabytes",
        f"{EVAL} t.txt.gz",
        lambda folder: (folder / "t.txt.gz").write_bytes(gzip.compress(b"a" * 4_000_000, 9) * 700),
        slow=True,
        **LARGE,
    ),
)
def test_text_beyond_all_bounds(case: Case, refused: Callable[[Case], Outcome]) -> None:
    refused(case)
