"""Outputs: nothing that pyprune did not write is replaced, and a command that fails leaves nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pyprune.checkpoint.record import read_pruning_json
from tests.hostile._cases import (
    BRIEF,
    CHEAP,
    EVAL,
    Case,
    Step,
    case,
    copied,
    cut_short,
    folder_at,
    link,
    table,
    turns,
    write,
    write_json,
)
from tests.hostile._check import check_left, check_message, snapshot
from tests.hostile._server import Outcome, Run, Server

LONG = "x" * 300
WRITERS = {
    "prune": "prune dense --plan plan.json",
    "export": "export pruned",
    "recover": BRIEF,
}
"""Commands that write a folder, and succeed where it may be written."""

OWN = copied("pruned", "c")
PLACES: dict[str, tuple[str, tuple[Step, ...]]] = {
    "a dangling link": ("c", (link("c", "nowhere"),)),
    "a link to a folder": ("c", (folder_at("real"), link("c", "real"))),
    "a link to itself": ("c", (link("c", "c"),)),
    "a file": ("c", (write("c"),)),
    "the current folder": (".", ()),
    "the current folder in a roundabout way": ("dense/..", ()),
    "an ancestor of the current folder": ("..", ()),
    "a folder in a file": ("text.txt/c", ()),
    "far below a file": ("text.txt/a/b/c", ()),
    "a name of 300 characters": (LONG, ()),
    "a parent of 300 characters": (f"{LONG}/c", ()),
    "a name with NUL": ("c\0d", ()),
    "a device": ("/dev/null", ()),
    "nothing that can be made": ("/proc/nothing/c", ()),
    "a program's config.json": ("c", (write_json("c/config.json", {"editor": "vi"}),)),
    "a program's metrics.json": ("c", (write_json("c/metrics.json", {"requests": 1}),)),
    "a repository": ("c", (write("c/.git/HEAD"), write_json("c/config.json", {}))),
    "sources": ("c", (write("c/src/main.py"), write_json("c/config.json", {}))),
    "a thesis": ("c", (write("c/thesis.tex"),)),
    "a record that is not valid": (
        "c",
        (write_json("c/pruning.json", {"files": {"thesis.tex": ""}}), write("c/thesis.tex")),
    ),
    "a model of somebody else": ("c", (copied("dense", "c"),)),
    "a checkpoint and a thesis": ("c", (OWN, write("c/thesis.tex"))),
    "a checkpoint and a hidden file": ("c", (OWN, write("c/.notes"))),
    "a checkpoint and a folder": ("c", (OWN, write("c/notes/day.txt"))),
    "a checkpoint and an empty folder": ("c", (OWN, folder_at("c/results"))),
    "a checkpoint and a link": ("c", (OWN, link("c/original", "../dense"))),
    "a checkpoint and other weights": ("c", (OWN, write("c/zz.safetensors"))),
    "work of somebody else in its way": ("c", (write(".c.work/thesis.tex"),)),
    "a file in the way of its work": ("c", (write(".c.work"),)),
}


def output_cases() -> Iterator[Case]:
    commands = {
        f"{name} {more}": f"{command} {more}" for more in ("", "--overwrite") for name, command in WRITERS.items()
    }
    for number, (place, (out, steps)) in enumerate(PLACES.items()):
        for name, command, slow in turns(commands, number, 2):
            yield Case(f"{name} to {place}", [*command.split(), "--out", out], steps, slow=slow)


@table(*output_cases())
def test_a_folder_that_may_not_be_written(case: Case, refused: Callable[[Case], Outcome]) -> None:
    refused(case)


INSIDE = (copied("dense", "c/dense"), copied("pruned", "c/pruned"), copied("text.txt", "c/text.txt"))
INSIDE += (copied("plan.json", "c/plan.json"), copied("recipe.yaml", "c/recipe.yaml"))
MAGNITUDE = "--method magnitude --ratio 0.2"
UNEQUAL = f"{MAGNITUDE} --set score.ranking=global"
"""Layers of unequal widths."""


@table(
    case("export of what --out holds", "export c/dense --out c --overwrite", *INSIDE),
    case("export of what --out is", "export pruned --out pruned --overwrite"),
    case("export of what --out is, without --overwrite", "export pruned --out pruned"),
    case("export of what --out is, by another name", "export pruned --out dense/../pruned --overwrite"),
    case("export of what --out is, by a link", "export link --out pruned --overwrite", link("link", "pruned")),
    case("prune of what --out holds", f"prune c/dense {MAGNITUDE} --out c --overwrite", *INSIDE),
    case("prune of what --out is", f"prune dense {MAGNITUDE} --out dense --overwrite"),
    case("prune with text in --out", f"prune dense --calibration c/text.txt {CHEAP} --out c --overwrite", *INSIDE),
    case("prune with the plan in --out", "prune dense --plan c/plan.json --out c --overwrite", *INSIDE),
    case("prune with the plan of --out", "prune dense --plan pruned --out pruned --overwrite"),
    case("prune with the record of --out", "prune dense --plan pruned/pruning.json --out pruned --overwrite"),
    case("prune with the recipe in --out", "prune dense --config c/recipe.yaml --out c --overwrite", *INSIDE),
    case("recover what --out is", f"{BRIEF} --out pruned --overwrite"),
    case("recover what --out holds", f"{BRIEF.replace('pruned', 'c/pruned')} --out c --overwrite", *INSIDE),
    case("recover with the teacher in --out", f"{BRIEF} --teacher c/dense --out c --overwrite", *INSIDE),
    case("recover with the teacher as --out", f"{BRIEF} --teacher dense --out dense --overwrite"),
    case("recover with text in --out", f"{BRIEF} --data c/text.txt --out c --overwrite", *INSIDE),
    case("recover with the recipe in --out", f"{BRIEF} --config c/recipe.yaml --out c --overwrite", *INSIDE),
    case(
        "prune with the model card of --out as text",
        f"prune dense --calibration pruned/README.md {CHEAP} --out pruned --overwrite",
    ),
)
def test_what_is_read_is_not_replaced(case: Case, refused: Callable[[Case], Outcome]) -> None:
    refused(case)


BROKEN = (copied("dense", "broken"), cut_short("broken/model.safetensors"))


@pytest.mark.second
@table(
    case("export", "export broken --out a/b/c", *BROKEN),
    case("prune", f"prune broken {MAGNITUDE} --out a/b/c", *BROKEN),
    case("recover", f"{BRIEF.replace('pruned', 'broken')} --out a/b/c", *BROKEN),
    case("prune without text", f"prune dense --calibration nothing.txt {CHEAP} --out a/b/c"),
    case("prune of short text", f"prune dense --calibration s.txt {CHEAP} --out a/b/c", write("s.txt", "short")),
    case("prune by a plan that does not fit", "prune dense --plan p.json --out a/b/c", write_json("p.json", {})),
    case("prune of nothing", "prune dense --method magnitude --ratio 1e-9 --out a/b/c"),
    case("prune to a stock architecture that does not fit", f"prune dense {UNEQUAL} --set target=stock --out a/b/c"),
    case("robustness", "robustness broken --ppl text.txt --out a/b/c.jsonl", *BROKEN),
    case("export to a target that is none", "export dense --target nothing --out a/b/c"),
)
def test_parents_that_were_missing_do_not_stay(case: Case, refused: Callable[[Case], Outcome]) -> None:
    refused(case)


def is_checkpoint(name: str) -> Step:
    """Check that a whole checkpoint is there, and nothing beside the case's files."""

    def look(folder: Path) -> None:
        read_pruning_json(folder / name, verify_files=True)
        assert not list(folder.glob(".*")), list(folder.glob(".*"))

    return look


@table(
    *(
        case(f"{name} {more}", f"{command} --out c {more}", *steps, codes=(0,), then=is_checkpoint("c"))
        for name, command in WRITERS.items()
        for more, steps in {"": (), "--overwrite": (OWN,)}.items()
    ),
    case("export over an empty folder", "export pruned --out c --overwrite", folder_at("c"), codes=(0,)),
    case("export below missing folders", "export pruned --out a/b/c", codes=(0,), then=is_checkpoint("a/b/c")),
    case(
        "export over a checkpoint whose card was edited",
        "export dense --out c --overwrite",
        OWN,
        write("c/README.md"),
        codes=(0,),
        then=is_checkpoint("c"),
    ),
)
def test_what_pyprune_wrote_is_replaced(case: Case, refused: Callable[[Case], Outcome]) -> None:
    refused(case)


# --- files of figures ---

MEASURERS = {"inspect": "inspect pruned", "eval": f"{EVAL} text.txt", "env": "env"}
JSON_PLACES: dict[str, tuple[str, tuple[Step, ...]]] = {
    "a folder": ("f", (folder_at("f"),)),
    "a file in no folder": ("nowhere/f.json", ()),
    "a file in a file": ("text.txt/f.json", ()),
    "a thesis": ("thesis.tex", (write("thesis.tex"),)),
    "another program's figures": ("other.json", (write_json("other.json", {"requests": 1}),)),
    "a link to a thesis": ("f.json", (write("thesis.tex"), link("f.json", "thesis.tex"))),
    "a link into no folder": ("f.json", (link("f.json", "nowhere/f.json"),)),
    "a link to itself": ("f.json", (link("f.json", "f.json"),)),
    "a link to a folder": ("f.json", (folder_at("d"), link("f.json", "d"))),
    "a name of 300 characters": (LONG, ()),
    "a name with NUL": ("f\0.json", ()),
    "an empty name": ("", ()),
    "the current folder": (".", ()),
}


def json_cases() -> Iterator[Case]:
    for number, (place, (path, steps)) in enumerate(JSON_PLACES.items()):
        for name, command, slow in turns(MEASURERS, number):
            yield Case(f"{name} --json to {place}", [*command.split(), "--json", path], steps, slow=slow)


BENCH = "bench pruned --against dense --engine transformers --batch-size 1 --new-tokens 1 --prompt-tokens 4 --repeats 1"
BENCH += " --dtype float32"
ROBUST = "robustness dense --ppl text.txt --calibration text.txt --samples 2 --sequence-length 16 --tokens 256"
ROBUST += " --methods magnitude --ratios 0.1 --variants bfloat16"


@table(
    *json_cases(),
    case("inspect --json to a file of the checkpoint", "inspect pruned --json pruned/config.json"),
    case("inspect --json to the record", "inspect pruned --json pruned/pruning.json"),
    case("inspect --json into the checkpoint", "inspect pruned --json pruned/figures.json"),
    case("eval --json to its text", f"{EVAL} text.txt --json text.txt"),
    case("eval --json to its text, by a link", f"{EVAL} text.txt --json link", link("link", "text.txt")),
    case("eval --json to the weights", f"{EVAL} text.txt --json dense/model.safetensors"),
    case("eval --annotate without a record", f"{EVAL} text.txt --annotate"),
    case("bench --json to its samples", f"{BENCH} --jsonl s.json --json s.json"),
    case(
        "bench --json to its samples, by a link",
        f"{BENCH} --jsonl s.json --json l",
        write("s.json", ""),
        link("l", "s.json"),
    ),
    case("bench --json to its text", f"{BENCH} --ppl text.txt --protocol ppl-128 --json text.txt"),
    case("bench --json to a thesis", f"{BENCH} --json thesis.tex", write("thesis.tex")),
    case("bench --json to a file of DENSE", f"{BENCH} --json dense/config.json"),
    case("bench --jsonl to a folder", f"{BENCH} --jsonl d", folder_at("d")),
    case("bench --jsonl in no folder", f"{BENCH} --jsonl nowhere/s.jsonl"),
    case("bench --jsonl to a thesis", f"{BENCH} --jsonl thesis.tex", write("thesis.tex")),
    case("bench --jsonl to a model's file", f"{BENCH} --jsonl dense/config.json"),
    case("bench --annotate without a record", f"{BENCH.replace('pruned', 'dense')} --annotate"),
    case("robustness --out beside somebody's notes.md", f"{ROBUST} --out notes.jsonl", write("notes.md")),
    case("robustness --out to somebody's lines", f"{ROBUST} --out n.jsonl", write("n.jsonl", '{"a": 1}\n')),
    case("robustness --out to a thesis", f"{ROBUST} --out thesis.tex", write("thesis.tex")),
    case("robustness --out to its text", f"{ROBUST} --out text.txt"),
    case("robustness --out to a name of tables", f"{ROBUST} --out notes.md"),
    case("robustness --out to a folder", f"{ROBUST} --out d", folder_at("d")),
    case("robustness --out in no folder", f"{ROBUST} --out text.txt/notes.jsonl"),
    case("robustness --out to a dangling link", f"{ROBUST} --out l", link("l", "nowhere/n.jsonl")),
    case("robustness --out to a link to a thesis", f"{ROBUST} --out l", write("thesis.tex"), link("l", "thesis.tex")),
    case("robustness --out with a folder for its tables", f"{ROBUST} --out notes.jsonl", folder_at("notes.md")),
    case("robustness --out to a name of 300 characters", f"{ROBUST} --out {LONG}"),
    case("robustness --json to its rows", f"{ROBUST} --out n.jsonl --json n.jsonl"),
    case("robustness --json to its tables", f"{ROBUST} --out n.jsonl --json n.md"),
    case("robustness --json to a thesis", f"{ROBUST} --out n.jsonl --json thesis.tex", write("thesis.tex")),
)
def test_a_file_that_may_not_be_written(case: Case, refused: Callable[[Case], Outcome]) -> None:
    refused(case)


def holds_figures(name: str) -> Step:
    return lambda folder: json.loads((folder / name).read_text())["parameters"]


def link_stayed(folder: Path) -> None:
    assert (folder / "l").is_symlink()
    holds_figures("real/f.json")(folder)


def link_to_null_stayed(folder: Path) -> None:
    assert os.readlink(folder / "l") == "/dev/null"
    assert Path("/dev/null").is_char_device()


@table(
    case("a new file", "inspect pruned --json f.json", codes=(0,), then=holds_figures("f.json")),
    case(
        "a link, which is followed",
        "inspect pruned --json l",
        write("real/f.json", ""),
        link("l", "real/f.json"),
        codes=(0,),
        then=link_stayed,
    ),
    case(
        "a link to a file that is to come",
        "inspect pruned --json l",
        folder_at("real"),
        link("l", "real/f.json"),
        codes=(0,),
        then=link_stayed,
    ),
    case("a link to a device", "inspect pruned --json l", link("l", "/dev/null"), codes=(0,), then=link_to_null_stayed),
    case("standard output by its path", "inspect pruned --json /dev/stdout", codes=(0,)),
)
def test_figures_go_where_they_are_sent(case: Case, refused: Callable[[Case], Outcome]) -> None:
    refused(case)


def test_a_device_is_written_to_and_stays_one(server: Server, folder: Path) -> None:
    device = folder / "null"
    try:
        os.mknod(device, 0o666 | 0o020000, os.makedev(1, 3))
        device.write_text("")
    except OSError:
        pytest.skip("devices may not be made here")
    (outcome,) = server.run(Run(["inspect", "pruned", "--json", "null"], str(folder)))
    assert outcome.code == 0, outcome.stderr
    assert device.is_char_device()


def test_a_pipe_is_written_to_and_stays_one(server: Server, folder: Path) -> None:
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        (outcome,) = server.run(Run(["inspect", "pruned", "--json", "pipe"], str(folder)))
        assert outcome.code == 0, outcome.stderr
        assert json.loads(os.read(reader, 1 << 16))["parameters"]
    finally:
        os.close(reader)
    assert pipe.is_fifo()


@pytest.mark.parametrize("command", WRITERS)
def test_a_limit_on_files_leaves_nothing(server: Server, folder: Path, command: str) -> None:
    before = snapshot(folder)
    (outcome,) = server.run(Run(f"{WRITERS[command]} --out c".split(), str(folder), file_bytes=10_000))
    assert outcome.code == 2, outcome.stderr
    check_message(outcome, Case("", command))
    assert "no room on the disk" not in outcome.stderr
    check_left(outcome, folder, before)
