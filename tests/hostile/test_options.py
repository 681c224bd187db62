"""Options: hostile values of every field of the configuration, recipes, and what the commands take beside them."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, Literal

from pyprune.config.base import Config
from pyprune.config.run import PruneConfig, RecoverCheckpointConfig
from tests.hostile._cases import (
    BRIEF,
    CHEAP,
    DRY,
    EVAL,
    PRUNE,
    Case,
    brief,
    case,
    folder_at,
    link,
    nested_json,
    table,
    turns,
    write,
)
from tests.hostile._server import Outcome

# --- --set, of every field ---

DIGITS = "9" * 5000
NO_DATE = "2020-02-30"
"""YAML takes it for a date, which it cannot be; it may still be text."""
COMMON = (
    NO_DATE,
    "!!int abc",
    "!!python/name:os.system",
    "[" * 2000,
    "{a: &a [*a]}",
    "*nowhere",
    "\x1b[2J",
    "'" + "x" * 100_000 + "'",
)
"""Wrong for every field: YAML that is none, or a value of no type that any has."""
HOSTILE: dict[Any, tuple[str, ...]] = {
    int: ("-1", "1" + "0" * 20, ".nan", "many", "1.5", "[1]", "true", DIGITS, "{a: 1}", "0x", "-.inf"),
    float: (".nan", ".inf", "-1", "1e400", "text", "[1.0]", "true", DIGITS, "{}", "-.inf", "1" + "0" * 400),
    bool: ("2", "maybe", "''", "[]", "1.0", "{}"),
    str: ("5", "[]", "{}", "1.5", "true"),
    Literal: ("evil", "5", "[]", "{}", "true", "''"),
    tuple: ("5", "text", "{a: 1}", "[[[]]]", "[.nan]", "true", "[null]"),
    Config: ("5", "text", "[]", "{evil: 1}", "true", "{5: 6}"),
}
"""Kind of field -> values that none of this kind may have."""
RIGHT = {("score.last_layer", "-1")}


def kind_of(hint: Any) -> tuple[Any, bool]:
    """The key of a type hint in :data:`HOSTILE`, and whether None is allowed as well."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [option for option in typing.get_args(hint) if option is not type(None)]
        return kind_of(inner[0])[0], True
    if isinstance(hint, type) and issubclass(hint, Config):
        return Config, False
    return (origin or hint), False


def options_of(config: type[Config], path: str = "") -> Iterator[tuple[str, Any, bool]]:
    """Dotted name, kind and whether None is allowed, of every field and of those inside it."""
    hints = typing.get_type_hints(config)
    for field in fields(config):  # type: ignore[arg-type]
        kind, optional = kind_of(hints[field.name])
        yield f"{path}{field.name}", kind, optional
        inner = [
            h
            for h in (hints[field.name], *typing.get_args(hints[field.name]))
            if isinstance(h, type) and issubclass(h, Config)
        ]
        for below in inner:
            yield from options_of(below, f"{path}{field.name}.")


def is_wrong(name: str, kind: Any, value: str) -> bool:
    """Whether a value is wrong for this field."""
    return (name, value) not in RIGHT and not (kind is str and value == NO_DATE)


def settings(config: type[Config], command: str, every: int) -> Iterator[Case]:
    """Cases of every field; of each ``every``-th, one value in turn is part of the default run."""
    for number, (name, kind, optional) in enumerate(options_of(config)):
        values = [value for value in (*HOSTILE[kind], *COMMON) if is_wrong(name, kind, value)]
        values += [] if optional else ["null"]
        chosen = number // every % len(values) if number % every == 0 else None
        for place, value in enumerate(values):
            words = f"{command.split()[0]}: {name}={brief(value)}"
            yield Case(words, [*command.split(), "--set", f"{name}={value}"], lines=8, slow=place != chosen)


@table(*settings(PruneConfig, DRY, 4), *settings(RecoverCheckpointConfig, f"{BRIEF} --out c", 3))
def test_a_hostile_value_of_a_field(case: Case, refused: Callable[[Case], Outcome]) -> None:
    refused(case)


ELDER = PRUNE + " --out c"


@table(
    *(
        case(f"elder: {setting}", f"{ELDER} --set {setting}", lines=3)
        for setting in (
            "elder.train.seed=-1",
            f"elder.train.seed={2**64}",
            f"seed={2**64}",
            "seed=-1",
            f"data.seed={2**64}",
            "elder.train.weight_decay=.inf",
            "elder.train.learning_rate=.inf",
            "elder.train.dtype=float16",
            "elder.train.steps=-1",
            "elder.train.batch_size=1000000000000",
            "elder.gates.batch_size=1000000000000",
            "elder.gates.learning_rate=.nan",
            "elder.penalty_weight=.nan",
            "elder.layers=[99]",
            "elder.layers=[-1]",
            "elder.layers=[0,0]",
            "elder.layers=[0,1,2,3]",
            "hidden_multiple=1000000000000",
            "device=cuda:99",
            "device=evil",
            "device=meta",
            "dtype=float64",
        )
    ),
    *(
        case(
            f"{method}: {setting}",
            f"prune dense --method {method} --calibration text.txt {CHEAP} --out c --set {setting}",
            lines=3,
        )
        for method, setting in (
            ("dress", "dress.channels=[0,1]"),
            ("dress", "dress.segments=1000000000000"),
            ("loraprune", "loraprune.rank=1000000000000"),
            ("moreau", f"moreau.seed={2**64}"),
            ("moreau", "moreau.draws=1000000000000"),
            ("moreau", "moreau.steps=1000000000000000000000"),
            ("taylor", "score.batch_size=-1"),
            ("taylor", "score.layers=[99]"),
            ("taylor", "score.first_layer=99"),
            ("taylor", "score.last_layer=-99"),
            ("taylor", "score.axes=[heads,heads]"),
            ("taylor", "score.ffn_multiple=1000000000000"),
            ("taylor", "score.iterations=1000000000000"),
            ("random", f"random.seed={2**64}"),
            ("random", "random.seed=-1"),
            ("magnitude", "score.aggregation=evil"),
        )
    ),
    *(
        case(f"recover: {setting}", f"{BRIEF} --out c --set {setting}", lines=3)
        for setting in (
            "recover.rank=1000000000000",
            "recover.alpha=.inf",
            "recover.train.seed=-1",
            f"recover.train.seed={2**64}",
            "recover.train.learning_rate=.inf",
            "recover.train.weight_decay=.inf",
            "recover.train.max_grad_norm=.nan",
            "recover.train.dtype=float16",
            "recover.train.batch_size=1000000000000",
            "recover.distill.chunk=0",
            "recover.distill.temperature=.inf",
        )
    ),
)
def test_a_value_is_refused_before_the_work(case: Case, refused: Callable[[Case], Outcome]) -> None:
    said = refused(case)
    assert "training" not in said.stderr.split("Error: ")[0], "it had begun"


# --- recipes ---

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{k: [*a{i - 1}, *a{i - 1}], l: *a{i - 1}}}\n" for i in range(1, 40)
)
RECIPES: dict[str, str | bytes] = {
    "a list": "[1, 2]",
    "a number": "5",
    "text": "plain words",
    "not YAML": "a: [1, 2",
    "not YAML in another way": "a: b: c",
    "tabs": "a:\n\t- b",
    "binary": bytes(range(256)),
    "not UTF-8": b"method: \xff",
    "control characters": "method: \x01",
    "an unknown option": "evil: 1",
    "an unknown option inside": "data: {evil: 1}",
    "a number as key": "5: 6",
    "nothing as key": "null: 6",
    "a list as key": "? [a]\n: 1",
    "a mapping as key": "? {a: b}\n: 1",
    "a date as key": "2020-02-28: 1",
    "a date that is none": "ratio: 2020-02-30",
    "a time that is none": "ratio: 2020-02-28 25:61:61",
    "text as whole number": "ratio: !!int abc",
    "text as fraction": "ratio: !!float abc",
    "text as truth": "verify: !!bool abc",
    "text as time": "ratio: !!timestamp abc",
    "text as bytes": "ratio: !!binary abc",
    "bytes": "method: !!binary gIGC",
    "a set": "stages: !!set {a, b}",
    "pairs": "stages: !!pairs [a: 1]",
    "a tag of Python": "!!python/object/apply:os.system ['touch owned']",
    "a tag of Python inside": "method: !!python/object/apply:os.system ['touch owned']",
    "an unknown tag": "method: !evil x",
    "an anchor bomb": BOMB,
    "an anchor bomb as a value": BOMB + "method: *a9\n",
    "an anchor bomb as a section": BOMB + "data: *a9\n",
    "an anchor bomb in a field": BOMB + "data: {source: *a9}\n",
    "an anchor bomb of mappings": MERGES + "data: *a39\n",
    "a list in itself": "method: &a [*a]",
    "a mapping in itself": "data: &a {data: *a}",
    "a merge of itself": "data: &a {<<: *a}",
    "a merge of text": "<<: text",
    "an alias of nothing": "method: *nowhere",
    "nested lists": nested_json(100_000),
    "nested lists as a value": "method: " + nested_json(3_000),
    "nested mappings": "a: " + "{a: " * 3_000,
    "nested blocks": "\n".join("  " * depth + "a:" for depth in range(2_000)),
    "two documents": "method: taylor\n---\nmethod: random\n",
    "a number of 5,000 digits": f"ratio: {DIGITS}",
    "a seed of 5,000 digits": f"seed: {DIGITS}",
    "a sexagesimal number": "seed: " + "1:" * 3000 + "1",
    "megabytes of a key": "x" * 3_000_000 + ": 1",
    "megabytes of a value": "method: " + "x" * 3_000_000,
    "thousands of unknown options": "\n".join(f"evil{i}: 1" for i in range(20_000)),
    "escape codes": 'method: "\\e[2J"',
    "an option with escape codes": '"\\e[2J": 1',
    "a preset that is none": "preset: evil",
    "a preset that is a number": "preset: 5",
    "a recovery that is none": "recovery: evil",
    "a recovery that is a list": "recovery: [alpaca-lora]",
    "another version": "version: 99",
    "a version in words": "version: one",
    "a plan that is a number": "plan: 5",
    "sections of the wrong kind": "data: 5\nelder: []\nscore: text\nstages: 1.5",
    "stages that are none": "stages: {before: [evil], after: [5]}",
}


@table(
    *(
        case(f"prune: {what}", f"{DRY} --config r.yaml", write("r.yaml", content), lines=60)
        for what, content in RECIPES.items()
    ),
    *(
        case(f"recover: {what}", f"{BRIEF} --out c --config r.yaml", write("r.yaml", content), lines=60)
        for what, content in RECIPES.items()
        if what in ("a list", "an anchor bomb as a section", "nested lists", "a number as key", "an unknown option")
    ),
    case("a folder", f"{DRY} --config r.yaml", folder_at("r.yaml")),
    case("missing", f"{DRY} --config r.yaml"),
    case("a link to itself", f"{DRY} --config r.yaml", link("r.yaml", "r.yaml")),
    case("a path of 300 characters", f"{DRY} --config {'x' * 300}"),
    case("a path with NUL", [*DRY.split(), "--config", "a\0b"]),
    case("weights", f"{DRY} --config dense/model.safetensors"),
    case("a configuration of something else", f"{DRY} --config dense/config.json", lines=60),
)
def test_a_recipe_that_is(case: Case, refused: Callable[[Case], Outcome]) -> None:
    refused(case)


# --- options of the commands ---

ROBUST = f"robustness dense --ppl text.txt --calibration text.txt {CHEAP} --tokens 256 --out r.jsonl"
BENCH = "bench pruned --against dense --engine transformers"
BAD: dict[str, dict[str, tuple[str, ...]]] = {
    DRY: {
        "--ratio": ("0", "1", "-0.5", "nan", "inf", "1e400", "x", "", "1e-400", "9" * 5000),
        "--ratio-of": ("evil", "", "layers,hidden", "x" * 100_000),
        "--method": ("evil", "", "elder,dress", "../evil", "x" * 100_000, "__init__", "base", "\x1b[2J"),
        "--preset": ("evil", "", "x" * 100_000),
        "--recovery": ("evil", "", "x" * 100_000),
        "--set": (
            "",
            "=",
            "a",
            "=1",
            "a..b=1",
            "a.=1",
            ".a=1",
            "evil=1",
            "x" * 100_000,
            "x" * 100_000 + "=1",
            "a." * 5_000 + "a=1",
            "ratio=",
            "ratio",
            "data=5",
            "data.source.x=1",
        ),
        "--gguf-file": ("missing.gguf", "../x.gguf", "config.json", "x" * 300, "", "a\0b"),
        "--samples": ("0", "-1", "x", str(10**30)),
    },
    f"{EVAL} text.txt": {
        "--tasks": (",,,", " , ", ","),
        "--dtype": ("float8", "", "x" * 100_000),
        "--device": ("evil", "cuda:99", "meta", "", "x" * 100_000, "\x1b[2J"),
        "--protocol": ("evil", "", "ppl-0"),
        "--batch-size": ("0", "-1", "x"),
        "--gguf-file": ("missing.gguf", "x" * 300),
    },
    f"{BRIEF} --out c": {
        "--teacher-revision": ("main",),
        "--teacher-gguf-file": ("x.gguf",),
        "--teacher": ("nowhere/", "text.txt", "", "x" * 300, "/nowhere", "a\0b"),
        "--preset": ("evil", "", "alpaca-lora-distill"),
    },
    ROBUST: {
        "--methods": (",", "", "evil", "taylor,evil", "taylor,taylor", "elder", "x" * 100_000),
        "--ratios": (",", "0", "1", "-1", "nan", "inf", "x", "0.1,0.1", "9" * 5000),
        "--variants": (",", "evil", "bfloat16,bfloat16", "x" * 100_000),
        "--seeds": (",", "-1", "1.5", "x", str(2**64), "9" * 5000, "0,0", "\u0663"),
        "--axes": (",", "evil", "heads,heads", "heads,hidden"),
        "--tokens": ("0", "-1", "x"),
        "--lora-rank": ("0", "-1", str(10**12)),
        "--lora-size": ("0", "-1", "nan", "inf", "2"),
        "--lora-seed": ("-1", str(2**64)),
        "--protocol": ("evil",),
        "--device": ("evil", "cuda:99"),
        "--set": ("evil=1", "score.iterations=-1", "score.axes=[]"),
    },
    BENCH: {
        "--engine": ("evil", ""),
        "--batch-size": ("0", "-1", str(10**12)),
        "--new-tokens": ("0", "-1", str(10**12)),
        "--prompt-tokens": ("0", "-1", "513", str(10**12)),
        "--repeats": ("0", "-1", str(10**30)),
        "--dtype": ("int8", ""),
        "--seed": ("-1", str(2**64), str(10**30)),
        "--against": ("nowhere/", "text.txt", "", "x" * 300, "a\0b"),
    },
    "export dense --out c": {
        "--target": ("evil", "", "x" * 100_000),
        "--dtype": ("int8", "", "float64"),
        "--gguf-file": ("missing.gguf", "x" * 300, "config.json", "../dense/config.json"),
    },
}


def bad_options() -> Iterator[Case]:
    for command, options in BAD.items():
        for option, values in options.items():
            for number, value in enumerate(values):
                words = f"{command.split()[0]} {option} {brief(value)}"
                yield Case(words, [*command.split(), option, value], lines=4, slow=number % 3 > 0)


MODELS = (
    "nowhere/",
    "./nowhere",
    "/nowhere",
    "text.txt",
    "",
    " ",
    "a/b/c",
    "..",
    "x" * 300,
    "x/" + "x" * 300,
    "a\0b",
    "a\nb",
    "\x1b[2J",
    "/dev/null",
)
TAKERS = {
    "prune": "prune --dry-run --method magnitude",
    "eval": "eval --ppl text.txt",
    "export": "export --out c",
    "inspect": "inspect",
    "recover": "recover --data text.txt --out c",
    "serve": "serve",
}


@table(
    *bad_options(),
    *(
        Case(f"{name} of {brief(model)}", [*words.split(), model], slow=slow)
        for number, model in enumerate(MODELS)
        for name, words, slow in turns(TAKERS, number)
    ),
    case("no such command", "evil"),
    case("no such option", "inspect pruned --evil"),
    case("no model", "prune --out c"),
    case("no --out", "prune dense"),
    case("nothing to measure", "eval dense"),
    case("two models", "export dense pruned --out c"),
    case("an option without its value", "export dense --out"),
    case("a megabyte of a command", ["x" * 100_000]),
    case("a megabyte of an option", ["inspect", "pruned", "--" + "x" * 100_000]),
    case("--uniform without scores", f"{PRUNE} --method elder --uniform --dry-run"),
    case("--resume of nothing", "prune dense --plan plan.json --out c --resume"),
    case("--resume of a recovery that never was", f"{BRIEF} --out c --resume"),
    case("a teacher that is not used", f"{BRIEF} --teacher dense --set recover.distill=null --out c"),
    case("distillation without a teacher", f"{BRIEF} --set recover.distill.alpha=0.5 --out c"),
    case(
        "a teacher of other words", f"{BRIEF} --teacher other --out c", lambda folder: _other_teacher(folder), lines=3
    ),  # two warnings come before the work
    case(
        "instructions from prune", f"{PRUNE} --recovery alpaca-lora --dry-run --set recovery_data.source=nowhere.jsonl"
    ),
)
def test_an_option_that_is_wrong(case: Case, refused: Callable[[Case], Outcome]) -> None:
    refused(case)


def _other_teacher(folder: Any) -> None:
    from tests._support.models import tiny_model
    from tests._support.text import write_model

    write_model(tiny_model("llama", vocab_size=300), folder / "other")
