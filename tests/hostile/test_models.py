"""Model folders of other programs: nothing vouches for them, and nothing in them may do more than fail."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.hostile._cases import (
    CHEAP,
    DRY,
    EVAL,
    READS,
    Case,
    Step,
    brief,
    case,
    emptied,
    json_changed,
    mutated,
    nested_json,
    now_a_folder,
    removed,
    table,
    turns,
    write,
    write_json,
)
from tests.hostile._server import Outcome

MEASURE = f"{EVAL} text.txt"
WEIGHTS = "dense/model.safetensors"
CONFIG = "dense/config.json"
TOKENIZER = "dense/tokenizer.json"
USERS = {
    "export": "export dense --out c",
    "plan": "prune dense --plan plan.json --out c",
    "random": "prune dense --method random --ratio 0.2 --out c",
    "magnitude": "prune dense --method magnitude --ratio 0.2 --out c",
    "wanda": f"{READS} text.txt",
    "eval": MEASURE,
    "robustness": f"robustness dense --ppl text.txt --calibration text.txt {CHEAP} --out r.jsonl",
}
READERS = {"inspect": "inspect dense", "prune": DRY}

# --- weights ---


def safetensors(header: Any, data: bytes = bytes(16), length: int | None = None) -> bytes:
    """A file of that header (JSON data, or raw bytes), whose length field may be wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def one(**changes: Any) -> dict[str, Any]:
    """The header of one tensor of four floats."""
    return {"model.norm.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}}


HEADERS: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": b"1234567",
    "a header of no length": safetensors(b"", length=0),
    "a header longer than the file": safetensors(one(), length=10**6),
    "a header of 2^63 bytes": safetensors(one(), length=2**63),
    "a header that is not JSON": safetensors(b"{not json}"),
    "a header that is not UTF-8": safetensors(b"\xff\xfe"),
    "a header nested deeply": safetensors(nested_json(100_000).encode()),
    "a list as header": safetensors([]),
    "a number as header": safetensors(5),
    "a number as tensor": safetensors({"a": 5}),
    "a tensor without anything": safetensors({"a": {}}),
    "a dtype that is a number": safetensors(one(dtype=5)),
    "an unknown dtype": safetensors(one(dtype="F3")),
    "a shape that is text": safetensors(one(shape="4")),
    "a shape of text": safetensors(one(shape=["4"])),
    "a negative shape": safetensors(one(shape=[-4])),
    "a shape beyond all bounds": safetensors(one(shape=[10**30])),
    "a shape that overflows": safetensors(one(shape=[2**33, 2**33])),
    "a shape that is nothing": safetensors(one(shape=None)),
    "one offset": safetensors(one(data_offsets=[0])),
    "offsets that are text": safetensors(one(data_offsets=["0", "16"])),
    "offsets backwards": safetensors(one(data_offsets=[16, 0])),
    "offsets beyond the file": safetensors(one(data_offsets=[0, 10**12])),
    "offsets that are fractions": safetensors(one(data_offsets=[0.5, 16])),
    "offsets that are nothing": safetensors(one(data_offsets=None)),
    "metadata that is a list": safetensors({"__metadata__": [], **one()}),
    "metadata that nests": safetensors({"__metadata__": {"a": {"b": 1}}, **one()}),
    "other tensors": safetensors({"other": one()["model.norm.weight"]}),
}
SHOWN = ("other tensors", "metadata that is a list", "metadata that nests")
"""What inspect may show, since it counts the tensors and leaves the rest to those who load them."""


@table(
    *(
        case(
            f"{name}: {what}",
            command,
            write(WEIGHTS, content),
            codes=(0, 2) if name == "inspect" and what in SHOWN else (2,),
            slow=slow,
        )
        for number, (what, content) in enumerate(HEADERS.items())
        for name, command, slow in turns(READERS, number)
    ),
    case("export: a folder", "export dense --out c", now_a_folder(WEIGHTS)),
    case("inspect: a folder", "inspect dense", now_a_folder(WEIGHTS)),
    case("eval: missing", MEASURE, removed(WEIGHTS)),
    case("inspect: missing", "inspect dense", removed(WEIGHTS)),
)
def test_weights_that_are_none(case: Case, refused: Callable[[Case], Outcome]) -> None:
    refused(case)


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return exec, ("open('owned', 'w').close()",)


NO_SAFETENSORS = removed(WEIGHTS)
BINARIES: dict[str, bytes] = {
    "no bytes": b"",
    "text": b"someone's own\n",
    "a zip file cut short": b"PK\x03\x04" + bytes(40),
    "code": pickle.dumps(Evil()),
    "code, in an old protocol": pickle.dumps({"lm_head.weight": Evil()}, protocol=2),
    "a pickle that never ends": b"\x80\x02" + b"(" * 100_000,
}


@table(
    *(
        case(f"{name}: {what}", command, NO_SAFETENSORS, write("dense/pytorch_model.bin", content))
        for what, content in BINARIES.items()
        for name, command in {"export": USERS["export"], "prune": DRY}.items()
    ),
)
def test_no_code_of_a_pickle_runs(case: Case, refused: Callable[[Case], Outcome]) -> None:
    refused(case)


INDEX = "dense/model.safetensors.index.json"
INDICES: dict[str, Any] = {
    "a file outside": {"weight_map": {"lm_head.weight": "../pruned/model.safetensors"}},
    "a file by its whole path": {"weight_map": {"lm_head.weight": "/etc/passwd"}},
    "a file that is not there": {"weight_map": {"lm_head.weight": "gone.safetensors"}},
    "a number": {"weight_map": {"lm_head.weight": 5}},
    "a list": {"weight_map": ["model.safetensors"]},
    "nothing": {"weight_map": {}},
    "no map": {},
    "text": "model.safetensors",
    "an empty name": {"weight_map": {"lm_head.weight": ""}},
    "a name with NUL": {"weight_map": {"lm_head.weight": "a\0b"}},
    "a name of 300 characters": {"weight_map": {"lm_head.weight": "x" * 300}},
}


@table(
    *(
        case(f"{name}: {what}", command, NO_SAFETENSORS, write_json(INDEX, content), slow=slow)
        for number, (what, content) in enumerate(INDICES.items())
        for name, command, slow in turns({"inspect": "inspect dense", "export": USERS["export"]}, number)
    ),
    case("inspect: nested deeply", "inspect dense", NO_SAFETENSORS, write(INDEX, nested_json(100_000))),
    case("export: nested deeply", "export dense --out c", NO_SAFETENSORS, write(INDEX, nested_json(100_000))),
)
def test_an_index_that_names(case: Case, refused: Callable[[Case], Outcome]) -> None:
    refused(case)


def weight_set(name: str, value: float) -> Step:
    """Set one number of a tensor."""

    def step(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        tensors[name].view(-1)[-1] = value
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return step


@table(
    *(
        case(
            f"{name}: {value} in {weight}",
            command,
            weight_set(weight, float(value)),
            slow=value != "nan" and place % 2 == 1,
        )
        for place, (name, command) in enumerate(USERS.items())
        for value in ("nan", "inf")
        for weight in ("model.layers.0.mlp.down_proj.weight",)
    ),
    case("export: nan in a norm", USERS["export"], weight_set("model.norm.weight", float("nan"))),
    case("export: inf in the head", USERS["export"], weight_set("lm_head.weight", float("-inf"))),
)
def test_weights_that_are_not_numbers(case: Case, refused: Callable[[Case], Outcome]) -> None:
    refused(case)


# --- configuration ---

SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
)  # fmt: skip
ABSURD_SIZES = (-1, 0, 10**10, 2**31, 10**30, "x", [1], 1.5, {})


def sizes() -> Iterator[Case]:
    for name in SIZES:
        for value in ABSURD_SIZES:
            slow = (SIZES.index(name) + ABSURD_SIZES.index(value)) % 3 > 0
            yield case(f"{name} is {brief(value)}", DRY, json_changed(CONFIG, name, to=value), slow=slow)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
VALUES: dict[str, tuple[Any, ...]] = {
    "quantization_config": (GPTQ, {**GPTQ, "quant_method": "awq"}, {"quant_method": "evil"}, {}, 5, "x", [1]),
    "_attn_implementation": ("flash_attention_2", "kernels-community/flash-attn", "evil", 5),
    "attn_implementation": ("flash_attention_3",),
    "dtype": ("float8", "int4", 5, ["float32"], "evil"),
    "torch_dtype": ("evil", 5),
    "architectures": (5, "LlamaForCausalLM", ["Evil"], [5], {}, [], None),
    "model_type": (5, [], None, "", "bert", "evil", "\x1b[31m", "x" * 10_000),
    "hidden_act": ("evil", 5, None, []),
    "rope_parameters": (5, "x", [1], {"rope_type": "evil"}, {"rope_theta": "x"}, {"rope_type": "llama3"}),
    "rms_norm_eps": ("x", None, [1]),
    "max_position_embeddings": (-1, 0, "x", [1], 10**30),
    "head_dim": (-1, 0, "x", 10**10, 7),
    "text_config": (5, [], {"a": 1}),
    "layer_types": (5, ["evil"] * 4, []),
    "tie_word_embeddings": ("x", 5),
    "attention_bias": (True, "yes"),
    "pad_token_id": (-1, 10**9, "x", [[]]),
    "transformers_version": (5, []),
    "attention_dropout": ("x", -1, 7),
    "initializer_range": ("x",),
}
HARMLESS = {
    "quantization_config", "_attn_implementation", "attn_implementation", "dtype", "torch_dtype", "architectures",
    "rope_parameters", "max_position_embeddings", "text_config", "layer_types", "tie_word_embeddings", "pad_token_id",
    "transformers_version", "attention_dropout", "initializer_range", "rms_norm_eps",
}  # fmt: skip
"""Options whose wrong values Transformers may pass over or mend: success is right as well as an error."""


def values() -> Iterator[Case]:
    for name, found in VALUES.items():
        for number, value in enumerate(found):
            codes = (0, 2) if name in HARMLESS else (2,)
            slow = number >= (1 if name in HARMLESS else 2)
            yield case(f"{name} is {brief(value)}", DRY, json_changed(CONFIG, name, to=value), codes=codes, slow=slow)


CONTENTS: dict[str, str | bytes] = {
    "empty": "",
    "a list": "[]",
    "a number": "5",
    "null": "null",
    "nested deeply": '{"model_type": "llama", "a": ' + nested_json(100_000) + "}",
    "nested objects": '{"a":' * 100_000,
    "a number of 5,000 digits": '{"model_type": "llama", "vocab_size": ' + "9" * 5000 + "}",
    "not UTF-8": b'{"model_type": "\xff\xfe"}',
    "a lone surrogate": '{"model_type": "\\ud800"}',
    "UTF-16": '{"model_type": "llama"}'.encode("utf-16"),
    "NUL": b"\0" * 100,
    "cut short": '{"model_type": "llama", ',
}


@table(
    *sizes(),
    *values(),
    *(
        case(f"{name}: config.json is {what}", command, write(CONFIG, content), slow=slow)
        for number, (what, content) in enumerate(CONTENTS.items())
        for name, command, slow in turns(READERS, number)
    ),
    case("config.json is a folder", DRY, now_a_folder(CONFIG)),
    case("config.json is missing", DRY, removed(CONFIG)),
    case("inspect: config.json is a folder", "inspect dense", now_a_folder(CONFIG)),
    case("inspect: architectures is a number", "inspect dense", json_changed(CONFIG, "architectures", to=5)),
    case(
        "inspect: an architecture with escape codes",
        "inspect dense",
        json_changed(CONFIG, "architectures", to=["\x1b[2J"]),
        codes=(0, 2),
    ),
    case("inspect: text_config is a number", "inspect dense", json_changed(CONFIG, "text_config", to=5), codes=(0, 2)),
    case("inspect: no vocab_size", "inspect dense", write_json(CONFIG, {"model_type": "llama"})),
    *(
        case(
            f"generation_config.json is {what}",
            "export dense --out c",
            write("dense/generation_config.json", content),
            codes=(0, 2),
            slow=number % 4 > 0,
        )
        for number, (what, content) in enumerate(CONTENTS.items())
    ),
)
def test_a_configuration_that_is_damaged(case: Case, refused: Callable[[Case], Outcome]) -> None:
    said = refused(case)
    assert "\x1b" not in said.stdout


EVIL = "open('owned', 'w').close()"


@table(
    *(
        case(
            f"{name}: auto_map in {file} is {brief(to)}",
            command,
            write("dense/evil.py", EVIL),
            json_changed(f"dense/{file}", "auto_map", to=to),
            *more,
            codes=codes,
        )
        for name, command in {"prune": DRY, "eval": MEASURE, "inspect": "inspect dense"}.items()
        for file, to, more, codes in (
            ("config.json", {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}, (), (0, 2)),
            ("config.json", {"AutoConfig": "../../evil.C"}, (json_changed(CONFIG, "model_type", to="evil"),), (2,)),
            ("tokenizer_config.json", {"AutoTokenizer": ["evil.T", None]}, (), (0, 2)),
        )
        if not (name == "inspect" and codes == (2,))
        if (name, file) != ("inspect", "tokenizer_config.json")
    ),
)
def test_no_code_of_a_model_folder_runs(case: Case, refused: Callable[[Case], Outcome], folder: Path) -> None:
    refused(case)
    assert not list(folder.rglob("owned"))


# --- tokenizers ---


def tokenizer_mutated(seed: int) -> Step:
    """Change one thing somewhere in tokenizer.json, the vocabulary aside, or in its configuration."""

    def step(folder: Path) -> None:
        path = folder / (TOKENIZER if seed % 3 else "dense/tokenizer_config.json")
        data = json.loads(path.read_text())
        vocabulary = data.get("model", {}).pop("vocab", None)
        changed = mutated(data, seed)
        if vocabulary is not None and isinstance(changed.get("model"), dict):
            changed["model"].setdefault("vocab", vocabulary)
        path.write_text(json.dumps(changed))

    return step


TOKENIZER_FILES = {"tokenizer.json": TOKENIZER, "tokenizer_config.json": "dense/tokenizer_config.json"}
TOKENIZER_CODES = {"tokenizer.json": (2,), "tokenizer_config.json": (0, 2)}
"""What stands in tokenizer_config.json may be left out, and much of it is."""


def token_ids_shifted(by: int) -> Step:
    """Give the tokens ids that the model has no rows for."""

    def step(folder: Path) -> None:
        data = json.loads((folder / TOKENIZER).read_text())
        data["model"]["vocab"] = {word: number + by for word, number in data["model"]["vocab"].items()}
        (folder / TOKENIZER).write_text(json.dumps(data))

    return step


@table(
    *(case(f"mutation {seed}", MEASURE, tokenizer_mutated(seed), codes=(0, 2), slow=seed >= 10) for seed in range(300)),
    *(
        case(f"{name} is {what}", MEASURE, write(file, content), codes=TOKENIZER_CODES[name], slow=slow)
        for number, (what, content) in enumerate(CONTENTS.items())
        for name, file, slow in turns(TOKENIZER_FILES, number)
    ),
    case("missing", MEASURE, removed(TOKENIZER), removed("dense/tokenizer_config.json")),
    case("a folder", MEASURE, now_a_folder(TOKENIZER)),
    case("empty", f"{READS} text.txt", emptied(TOKENIZER)),
    case("ids beyond the model", MEASURE, token_ids_shifted(1000)),
    case("ids beyond the model, in calibration", f"{READS} text.txt", token_ids_shifted(1000)),
    case("ids beyond 32 bits", MEASURE, token_ids_shifted(2**32)),
    case("ids below zero", MEASURE, token_ids_shifted(-100)),
    case("huge ids", MEASURE, token_ids_shifted(2**31)),
)
def test_a_tokenizer_that_is_damaged(case: Case, refused: Callable[[Case], Outcome]) -> None:
    refused(case)


TEMPLATES = {
    "that raises": "{{ raise_exception('no') }}",
    "that divides by zero": "{{ 1 / 0 }}",
    "that never ends": "{% for i in range(10**9) %}{% for j in range(10**9) %}{% endfor %}{% endfor %}",
    "that eats memory": "{{ 'x' * 10**10 }}",
    "that eats memory by and by": "{% set n = namespace(x='x') %}"
    "{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "that grows a number": "{{ 10 ** (10 ** 10) }}",
    "that is not one": "{% for %}",
    "that reaches for Python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "that opens a file": "{{ cycler.__init__.__globals__.os.system('touch owned') }}",
    "that gives nothing": "",
    "that gives a number": "{{ messages | length }}",
    "that nests without end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "of nothing that is there": "{{ a.b.c.d }}",
}
HARMLESS_TEMPLATES = ("that gives a number",)


@table(
    *(
        case(
            f"a template {what}",
            f"{READS} text.txt --set data.chat_template=true",
            json_changed("dense/tokenizer_config.json", "chat_template", to=template),
            codes=(0, 2) if what in HARMLESS_TEMPLATES else (2,),
        )
        for what, template in TEMPLATES.items()
    ),
    *(
        case(
            f"a template that is {brief(value)}",
            f"{READS} text.txt --set data.chat_template=true",
            json_changed("dense/tokenizer_config.json", "chat_template", to=value),
        )
        for value in (5, [1], {"a": 1}, None)
    ),
    case("a template where there is none", f"{READS} text.txt --set data.chat_template=true"),
)
def test_a_chat_template(case: Case, refused: Callable[[Case], Outcome], folder: Path) -> None:
    refused(case)
    assert not (folder / "owned").exists()
