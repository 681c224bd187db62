"""Plans: what is accepted is what is used, everything else is refused before the cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.hostile._cases import (
    Case,
    Step,
    brief,
    case,
    copied,
    folder_at,
    json_changed,
    link,
    mutated,
    nested_json,
    table,
    write,
    write_json,
)
from tests.hostile._server import Outcome

APPLY = "prune dense --dry-run --plan p.json"
COPY = copied("plan.json", "p.json")


def plan_mutated(seed: int) -> Step:
    """Change one thing somewhere in the plan."""

    def step(folder: Path) -> None:
        (folder / "p.json").write_text(json.dumps(mutated(json.loads((folder / "plan.json").read_text()), seed)))

    return step


@table(*(case(f"mutation {s}", APPLY, plan_mutated(s), codes=(0, 2), lines=6, slow=s >= 10) for s in range(400)))
def test_a_plan_with_one_change(case: Case, refused: Callable[[Case], Outcome], folder: Path) -> None:
    said = refused(case)
    if said.code == 0:
        assert json.loads(said.stdout) == json.loads((folder / "p.json").read_text()), "something of it was ignored"


KIND = ("dense", "kinds", "decoder")
WRONG: dict[tuple[str | int, ...], tuple[Any, ...]] = {
    ("version",): (None, 0, 1, 3, "2", [], 1.5),
    ("model_type",): (None, 5, "", "qwen2", "bert", []),
    ("dense",): (None, [], 5, {}),
    ("dense", "hidden_size"): (0, 47, 10**30),
    ("dense", "kinds"): (None, [], {}, {"decoder": {}}),
    (*KIND, "layers"): (None, 4, "", "0-4", "0-2", "1-3", f"0-{10**30}"),
    (*KIND, "blocks"): (None, [], {}, {"attention": {}}),
    (*KIND, "blocks", "attention", "head_dim"): (0, 7, 10**30, None),
    (*KIND, "blocks", "attention", "kv_heads"): (0, 4, 10**30, "2", None),
    (*KIND, "blocks", "mlp", "ffn"): (0, 41, 10**30),
    (*KIND, "blocks", "mlp", "unknown"): (1, "x"),
    ("dense", "unknown"): (1,),
    ("hidden",): (5, None, [0, 1], "", "0-48", "5,3", "3,3", "0-", "-1", "a", "0-9999999", "0-99999999999999999999"),
    ("layers",): (None, 5, {}, [], [5], [{}], "0-3", [[]]),
    ("layers", 0, "index"): (None, -1, 4, 2, "0", 1.5, 10**30),
    ("layers", 0, "kind"): (None, 0, "attention", ""),
    ("layers", 0, "blocks"): (None, [], {}, "mlp", {"mpl": {"ffn": "0-39"}}),
    ("layers", 0, "blocks", "attention"): (None, {}, [], {"query_heads": "0-5"}),
    ("layers", 0, "blocks", "attention", "query_heads"): (None, 5, "", "0", "6", "0-5,0-5", "1-0", "\u0663"),
    ("layers", 0, "blocks", "attention", "kv_heads"): ("", "0", "2", [0]),
    ("layers", 0, "blocks", "mlp", "ffn"): ("", "40", "0-40", "0-39,0-39", "x", "0--1", "9" * 5000, "0-" + "9" * 5000),
    ("layers", 0, "blocks", "unknown"): ({}, None),
    ("layers", 0, "unknown"): (1, None),
    ("unknown",): (1, {}),
    ("hiden",): ("0-3",),
}
"""Path inside a plan -> values that it may not have."""


def wrong_values() -> Iterator[Case]:
    for path, values in WRONG.items():
        for number, value in enumerate(values):
            yield case(
                f"{'.'.join(map(str, path))} is {brief(value)}",
                APPLY,
                COPY,
                json_changed("p.json", *path, to=value),
                lines=6,
                slow=number % 3 > 0,
            )


HUGE = "0-9999999"
FILES: dict[str, tuple[Step, ...]] = {
    "missing": (),
    "empty": (write("p.json", ""),),
    "a folder": (folder_at("p.json"),),
    "a folder with a record that is none": (write("p.json/pruning.json", "{}"),),
    "a dangling link": (link("p.json", "nowhere"),),
    "binary": (write("p.json", bytes(range(256))),),
    "not UTF-8": (write("p.json", b'{"version": "\xff"}'),),
    "weights": (copied("dense/model.safetensors", "p.json"),),
    "a list": (write("p.json", "[]"),),
    "a number": (write("p.json", "1"),),
    "nested lists": (write("p.json", nested_json(100_000)),),
    "nested objects": (write("p.json", '{"a":' * 100_000),),
    "a number of 5,000 digits": (write("p.json", '{"version": ' + "9" * 5000 + "}"),),
    "a range repeated a thousand times": (COPY, json_changed("p.json", "hidden", to=",".join([HUGE] * 1000))),
    "a range repeated in every layer": (
        write_json(
            "p.json",
            {
                "version": 1,
                "model_type": "llama",
                "dense": {},
                "hidden": HUGE,
                "layers": [{"index": i, "query_heads": HUGE, "kv_heads": HUGE, "ffn": HUGE} for i in range(200)],
            },
        ),
    ),
    "a million layers": (COPY, json_changed("p.json", "layers", to=[{}] * 1_000_000)),
    "megabytes of a key": (COPY, json_changed("p.json", "x" * 3_000_000, to=1)),
    "megabytes of a value": (COPY, json_changed("p.json", "model_type", to="x" * 3_000_000)),
    "escape codes": (COPY, json_changed("p.json", "\x1b[31m", to="\x1b[2J")),
}


@table(
    *wrong_values(),
    *(Case(what, APPLY, steps, lines=6) for what, steps in FILES.items()),
    case("a path of 300 characters", f"prune dense --dry-run --plan {'x' * 300}"),
    case("a path with NUL", ["prune", "dense", "--dry-run", "--plan", "a\0b"]),
    case("the plan of another model", "prune pruned --dry-run --plan plan.json", lines=6),
    case("a model that was cut by it", "prune pruned --dry-run --plan pruned", lines=6),
    case("a dense model as plan", "prune dense --dry-run --plan dense"),
)
def test_a_plan_that_is_none(case: Case, refused: Callable[[Case], Outcome]) -> None:
    refused(case)
