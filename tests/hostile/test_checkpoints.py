"""Checkpoints that pyprune wrote and somebody changed: what is verified is what is used, by every command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.hostile._cases import (
    BRIEF,
    CHEAP,
    EVAL,
    Case,
    Step,
    bit_flipped,
    brief,
    case,
    copied,
    cut_short,
    emptied,
    link,
    now_a_folder,
    record_changed,
    removed,
    table,
    turns,
    write,
    write_json,
)
from tests.hostile._server import Outcome

COMMANDS = {
    "inspect": "inspect pruned",
    "eval": f"{EVAL.replace('dense', 'pruned')} text.txt",
    "export": "export pruned --out c",
    "prune": f"prune pruned --method magnitude --ratio 0.2 --calibration text.txt {CHEAP} --out c",
    "recover": f"{BRIEF} --out c",
    "teacher": f"{BRIEF.replace('pruned', 'dense')} --teacher pruned --out c",
    "bench": "bench pruned --against dense --engine transformers --batch-size 1 --new-tokens 1 --prompt-tokens 4",
}


FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
DAMAGE: dict[str, Callable[[str], Step]] = {
    "cut short": cut_short,
    "with one bit flipped": bit_flipped,
    "removed": removed,
    "a folder": now_a_folder,
    "empty": emptied,
}


STILL_JSON = ("generation_config.json", "with one bit flipped")
"""What an operator may edit, and may look like an edit: a warning then."""


def damaged_files() -> Iterator[Case]:
    number = 0
    for file in (*FILES, "pruning.json"):
        for how, damage in DAMAGE.items():
            if (file, how) == ("pruning.json", "removed"):
                continue  # without a record it is a folder of another program, which has nothing to be compared with
            number += 1
            for name, command, slow in turns(COMMANDS, number):
                codes = (0, 2) if (file, how) == STILL_JSON else (2,)
                yield case(f"{name}: {file} {how}", command, damage(f"pruned/{file}"), slow=slow, codes=codes)


@table(*damaged_files())
def test_a_listed_file_that_was_changed(case: Case, refused: Callable[[Case], Outcome]) -> None:
    refused(case)


def index_of(*names: str) -> dict[str, Any]:
    return {"metadata": {}, "weight_map": {f"weight.{i}": name for i, name in enumerate(names)}}


WEIGHTS = "pruned/model.safetensors"
ADAPTER = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "base_model_name_or_path": "dense"}
STRAY: dict[str, tuple[Step, ...]] = {
    "other weights": (copied("dense/model.safetensors", "pruned/zz.safetensors"),),
    "a shard": (copied(WEIGHTS, "pruned/model-00001-of-00002.safetensors"),),
    "an index of other weights": (
        copied(WEIGHTS, "pruned/other.safetensors"),
        write_json("pruned/model.safetensors.index.json", index_of("other.safetensors")),
    ),
    "an index of the same weights": (write_json("pruned/model.safetensors.index.json", index_of("model.safetensors")),),
    "an index of a file outside": (
        write_json("pruned/model.safetensors.index.json", index_of("../dense/model.safetensors")),
    ),
    "an adapter": (
        write_json("pruned/adapter_config.json", ADAPTER),
        copied(WEIGHTS, "pruned/adapter_model.safetensors"),
    ),
    "the configuration of an adapter": (write_json("pruned/adapter_config.json", ADAPTER),),
    "a pickle": (write("pruned/pytorch_model.bin"),),
    "a GGUF file": (write("pruned/model.gguf", b"GGUF"),),
    "more tokens": (write_json("pruned/added_tokens.json", {"word": 5}),),
    "special tokens": (write_json("pruned/special_tokens_map.json", {"bos_token": "</s>"}),),
    "a vocabulary": (write("pruned/tokenizer.model"),),
    "a vocabulary of another version": (write("pruned/tokenizer.model.v3"),),
    "a chat template": (write("pruned/chat_template.jinja", "{{ 1 / 0 }}"),),
    "code": (write("pruned/modeling_llama.py", "open('owned', 'w')"),),
    "code for generation": (write("pruned/custom_generate/generate.py", "open('owned', 'w')"),),
    "a quantisation": (write_json("pruned/quantize_config.json", {"bits": 4}),),
    "a link to other weights": (link("pruned/extra.safetensors", "../dense/model.safetensors"),),
}


def stray_files() -> Iterator[Case]:
    for number, (what, steps) in enumerate(STRAY.items()):
        for name, command, slow in turns(COMMANDS, number):
            yield Case(f"{name}: {what}", command, steps, slow=slow)


@table(*stray_files())
def test_a_file_beside_an_intact_record(case: Case, refused: Callable[[Case], Outcome]) -> None:
    refused(case)


WRONG: dict[tuple[str, ...], tuple[Any, ...]] = {
    ("version",): (None, "1", 2, [], 10**30),
    ("plan",): (5, "0-3", [], {}, True),
    ("plan", "layers"): (None, 5, {}, [5], [{}], "0-3", []),
    ("plan", "dense"): (None, [], {"num_layers": 1}, {"evil": 1}),
    ("plan", "hidden"): (5, None, "0-99999999", "3-1", "a", ""),
    ("plan", "unknown"): (1,),
    ("provenance",): (None, 5, "x", [1]),
    ("files",): (None, 5, [], [["a"]], "x", {}, {"config.json": 5}, {"../dense/config.json": "0" * 64}),
    ("provenance", "training_marks"): (5, [], {}, "!!!", "YQ==", "\u00e4", "x" * 100),
    ("provenance", "recoveries"): (5, "x", {}, [5], [{}], [{"report": 5}], [{"report": {"steps": "x"}}]),
    ("provenance", "quality"): (5, "x", [1], True),
    ("provenance", "speed"): (5, "x", [1]),
    ("provenance", "architecture"): (5, [], {}),
    ("provenance", "parameters"): ("x", [], {}),
}
"""Path inside the record -> values that it may not have."""
FOR_PEOPLE = ("architecture", "parameters")
"""Entries that are printed and nothing else: a wrong value may be refused or shown."""


def wrong_records() -> Iterator[Case]:
    number = 0
    for path, values in WRONG.items():
        for place, value in enumerate(values):
            number += 1
            for name, command, slow in turns(COMMANDS, number, int(place < 3)):
                words = f"{name}: {'.'.join(path)} is {brief(value)}"
                codes = (0, 2) if path[-1] in FOR_PEOPLE else (2,)
                yield case(words, command, record_changed(*path, to=value), codes=codes, slow=slow)


@table(*wrong_records())
def test_a_record_of_wrong_types_with_a_checksum_that_is_right(case: Case, refused: Callable[[Case], Outcome]) -> None:
    refused(case)


NO_RECORDS: dict[str, str | bytes] = {
    "nested deeply": "[" * 100_000,
    "a number of 5,000 digits": '{"version": ' + "9" * 5000 + "}",
    "not UTF-8": b"\xff\xfe{}",
    "NaN": "NaN",
    "a list": "[]",
}


@table(
    *(
        case(f"{name}: the record is {what}", command, write("pruned/pruning.json", content), slow=slow)
        for number, (what, content) in enumerate(NO_RECORDS.items())
        for name, command, slow in turns(COMMANDS, number, 2)
    ),
    case(
        "the quality of a record that cannot be read",
        f"{COMMANDS['eval']} --annotate",
        write("pruned/pruning.json", "{"),
    ),
    case("the card is a folder", f"{COMMANDS['eval']} --annotate", now_a_folder("pruned/README.md"), codes=(0, 2)),
)
def test_a_record_that_is_none(case: Case, refused: Callable[[Case], Outcome]) -> None:
    refused(case)


@table(
    case("its source", "inspect pruned", record_changed("provenance", "source", to="\x1b[31mred\x07\r\n"), codes=(0,)),
    case(
        "a name of its provenance", "inspect pruned", record_changed("provenance", "\x1b]0;x\x07", to="y"), codes=(0,)
    ),
    case("its method", "inspect pruned", record_changed("provenance", "method", to="\x9b2J"), codes=(0, 2)),
    case("a listed file", "inspect pruned", record_changed("files", "\x1b[2Jfile", to="0" * 64)),
    case("the model's type", "inspect pruned", record_changed("plan", "model_type", to="\x1b[2J"), codes=(0, 2)),
    case("the place of a file", "export \x1b[31m --out c"),
)
def test_escape_codes_are_not_printed(case: Case, refused: Callable[[Case], Outcome]) -> None:
    said = refused(case)
    assert "\x1b" not in said.stdout
    assert "\x9b" not in said.stdout
