"""Configurations that cannot be, and whatever libraries raise on damaged files: one error each."""

from __future__ import annotations

import json
import os
import resource
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from pyprune.checkpoint.load import ModelSource, load_model
from pyprune.checkpoint.tokenizer import load_tokenizer
from pyprune.errors import CheckpointError, PypruneError, UnsupportedModelError
from pyprune.families import all_families
from pyprune.serving.checkpoints import read_checkpoint
from tests._support.gguf import write_gguf
from tests._support.models import tiny_model
from tests._support.suspect import READERS, change_config, refused
from tests._support.text import write_model
from tests._support.tokenizer import tiny_tokenizer

SIZES = ["num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
         "num_key_value_heads", "head_dim", "num_labels"]  # fmt: skip


def _dtype(folder: Path) -> str | None:
    return ModelSource.of(folder).dtype


def _version(folder: Path) -> str:
    return ModelSource.of(folder).version


@pytest.mark.parametrize("value", [2_000_000_000, 10**30, 0, -1, "4", 1.5, [4], True])
@pytest.mark.parametrize("name", SIZES)
def test_impossible_sizes_are_refused_before_memory_is_taken(foreign: Path, name: str, value: Any) -> None:
    change_config(foreign, **{name: value})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert name in refused(foreign, "allowed are whole numbers|describes a model of")
    with pytest.raises(CheckpointError):
        READERS["compact"](foreign)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "kilobytes"


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"num_hidden_layers": 4000}, "describes 4000 layers, but its files hold 39 tensors"),
        ({"vocab_size": 9_000_000}, "describes a model of"),
        ({"hidden_size": 6_000_000, "head_dim": 8}, "describes a model of"),
        ({"head_dim": 9_000_000}, "describes a model of"),
    ],
)
def test_sizes_are_compared_with_what_the_files_hold(foreign: Path, values: dict[str, int], match: str) -> None:
    change_config(foreign, **values)
    refused(foreign, match)


def test_sizes_are_compared_with_the_length_of_a_bin(foreign: Path) -> None:
    torch.save(load_file(foreign / "model.safetensors"), foreign / "pytorch_model.bin")
    (foreign / "model.safetensors").unlink()
    load_model(foreign)
    change_config(foreign, vocab_size=9_000_000)
    refused(foreign, "describes a model of")


def test_a_bin_that_unpacks_to_more_than_it_is_is_refused(foreign: Path) -> None:
    (foreign / "model.safetensors").unlink()
    with zipfile.ZipFile(foreign / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", b"\0" * 50_000_000)
    refused(foreign, "unpacks to 50,000,000 bytes")


def test_an_empty_bin_is_a_damaged_file_and_not_ctrl_c(foreign: Path) -> None:
    (foreign / "model.safetensors").unlink()
    (foreign / "pytorch_model.bin").touch()
    refused(foreign, r"pytorch_model\.bin is empty")


@pytest.mark.parametrize("model_type", ["gemma3_text", "llama"])
def test_a_model_of_several_parts_is_called_that(foreign: Path, model_type: str) -> None:
    """Whatever its type says: its text part is one of the known ones, and its files are whole."""
    change_config(foreign, model_type=model_type, text_config={"hidden_size": 64}, vision_config={})
    with pytest.raises(UnsupportedModelError, match=r"several parts \(vision_config\).*Save its language_model"):
        load_model(foreign)


def test_a_vision_tower_larger_than_the_files_is_not_built(foreign: Path) -> None:
    """The rest of a multimodal model is compared with the files too."""
    text = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 1}
    change_config(foreign, model_type="gemma3", text_config=text, vision_config={})
    refused(foreign, r"describes a model of [\d,]+ parameters, but its files hold")
    change_config(foreign, vision_config={"hidden_size": 1 << 60})
    refused(foreign, r"vision_config\.hidden_size = ")
    change_config(foreign, vision_config={}, text_config={"model_type": ["gemma3_text"]})
    with pytest.raises(UnsupportedModelError, match="gemma3_text"):
        load_model(foreign)


def test_weights_named_as_a_part_of_a_larger_model_are_called_that() -> None:
    with pytest.raises(UnsupportedModelError, match="has the name of a text part of a larger model"):
        all_families()["llama"].match("language_model.model.embed_tokens.weight")
    with pytest.raises(UnsupportedModelError, match="add a row in pyprune/families"):
        all_families()["llama"].match("model.layers.0.router.weight")


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "x"])
def test_quantised_checkpoints_are_refused_plainly(foreign: Path, method: str) -> None:
    change_config(foreign, quantization_config={"quant_method": method, "bits": 4})
    for reader in (load_model, _dtype):
        with pytest.raises(CheckpointError, match="quantised checkpoints are not read"):
            reader(foreign)


def test_attention_that_is_not_there(foreign: Path) -> None:
    change_config(foreign, _attn_implementation="flash_attention_2")
    if not torch.cuda.is_available():
        refused(foreign, "could not be read|not installed")
    change_config(foreign, _attn_implementation="kernels-community/attention")
    refused(foreign, "attention from the hub")


def test_a_config_that_is_too_long_or_too_deep_is_refused(foreign: Path) -> None:
    for text in ("[" * 100_000, " " * (17 << 20), '{"a": ' + "9" * 9000 + "}", "[]", '"x"', "\ud800\udfff"):
        (foreign / "config.json").write_bytes(text.encode("utf-8", errors="surrogatepass"))
        with pytest.raises(CheckpointError, match=r"config\.json"):
            load_model(foreign)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            read_checkpoint(foreign)
    (foreign / "config.json").write_text(json.dumps({"model_type": "x" * 1_000_000}))
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(foreign)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "values",
    [{"vocab_size": "x"}, {"architectures": 3}, {"architectures": [3]}, {"num_attention_heads": 0}, {"head_dim": "8"},
     {"max_position_embeddings": []}, {"hidden_size": -8}, {"text_config": 3, "vocab_size": None}],
    ids=str,
)  # fmt: skip
def test_what_is_served_has_a_config_that_makes_sense(foreign: Path, values: dict[str, Any]) -> None:
    change_config(foreign, **values)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_checkpoint(foreign)


RAISED = [
    TypeError, AttributeError, IndexError, ZeroDivisionError, OverflowError, RecursionError, EOFError, AssertionError,
    MemoryError, ImportError, PermissionError, type("PanicException", (BaseException,), {}),
]  # fmt: skip


@pytest.mark.parametrize("kind", RAISED, ids=lambda kind: kind.__name__)
def test_whatever_a_library_raises_is_one_checkpoint_error(
    foreign: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise kind("first line\nsecond line" + "x" * 1_000_000)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
    refused(foreign, "first line second line|needs more memory")
    with pytest.raises(CheckpointError):
        load_tokenizer(str(foreign))
    monkeypatch.setattr(AutoConfig, "from_pretrained", fail)
    with pytest.raises(CheckpointError):
        _ = ModelSource.of(foreign).dtype


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_ctrl_c_stays_what_it_is(foreign: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]) -> None:
    def stop(*args: Any, **kwargs: Any) -> None:
        raise kind

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", stop)
    with pytest.raises(kind):
        load_model(foreign)


def test_a_damaged_tokenizer_is_one_error(foreign: Path) -> None:
    for text in ("", "[]", '{"model": 3}', "[" * 100_000, "null"):
        (foreign / "tokenizer.json").write_text(text)
        refused(foreign, r"could not be read|tokenizer\.json (is not valid JSON|holds)")


def test_a_panic_of_rust_is_one_line_and_other_words_come_through(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "x.gguf", merges=["t1 t2"])  # the tokenizers library panics: t1t2 is in no vocabulary
    with pytest.raises(CheckpointError, match="PanicException"):
        load_model(tmp_path, gguf_file="x.gguf")
    assert "panicked" not in capfd.readouterr().err
    real = AutoTokenizer.from_pretrained

    def talkative(*args: Any, **kwargs: Any) -> Any:
        os.write(2, b"a warning of a library\n")
        return real(*args, **kwargs)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", talkative)
    tiny_model().save_pretrained(tmp_path / "m")
    tiny_tokenizer().save_pretrained(tmp_path / "m")
    load_model(tmp_path / "m")
    assert capfd.readouterr().err.count("a warning of a library") == 1


@pytest.mark.parametrize(
    "name", ["x" * 300, "a/" + "b" * 300, "a\nb", "\x1b[31mred", "a/b\x00c", "~", "a b", "é/ü", ""]
)
def test_odd_names_are_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for reader in (load_model, _dtype, _version, read_checkpoint):
        with pytest.raises(PypruneError) as caught:
            reader(name)
        text = str(caught.value)
        assert text.isprintable()
        assert len(text) < 2500


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("nowhere")
    for place in (tmp_path / "file", tmp_path / "pipe", Path("/dev/null"), tmp_path / "link"):
        refused(place, "is not a folder")
        with pytest.raises(CheckpointError):
            read_checkpoint(place)


def test_pipes_in_a_folder_are_not_waited_for(foreign: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        (foreign / name).unlink()
        os.mkfifo(foreign / name)
        with pytest.raises(CheckpointError):
            load_model(foreign)
        with pytest.raises(CheckpointError):
            read_checkpoint(foreign)


WRONG_VALUES: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"pad_token_id": 999}, r"pad_token_id = 999; allowed are 0 to 383"),
    ("llama", {"hidden_size": "48"}, r"hidden_size = '48'; allowed are whole numbers"),
    ("llama", {"hidden_act": "swishy"}, r"hidden_act = 'swishy'; allowed are the activations of Transformers"),
    ("llama", {"dtype": "float99"}, r"dtype = 'float99'; allowed are the dtypes of torch"),
    ("llama", {"num_attention_heads": 7}, r"hidden size \(48\) is not a multiple of the number of att.* \(7\)"),
    ("llama", {"num_key_value_heads": 4}, r"weights have other shapes than the sizes in config\.json"),
    ("llama", {"rms_norm_eps": None}, r"Field 'rms_norm_eps' expected float, got NoneType"),
    ("llama", {"rope_parameters": None, "rope_scaling": {"type": "ntk-aware", "factor": 2}},
     r"rope_scaling\.rope_type = 'ntk-aware'; allowed are default, dynamic"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, r"Missing required keys .*factor"),
    ("phi3", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [1], "short_factor": [1]},
              "original_max_position_embeddings": 64}, r"short_factor field must have length 4, got 1"),
    ("qwen2", {"layer_types": ["full_attention"] * 3}, r"layer_types = .*allowed are lists of 4 entries"),
    ("qwen2", {"layer_types": ["weird"] * 4}, r"entries must be in \('full_attention'"),
    ("llama", {"rms_norm_eps": float("nan")}, r"rms_norm_eps = nan; allowed are finite numbers"),
    ("llama", {"rms_norm_eps": -1.0}, r"rms_norm_eps = -1\.0; allowed are numbers above 0"),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}},
     r"rope_parameters\.rope_theta = inf; allowed are finite numbers"),
    ("granite", {"logits_scaling": float("nan")}, r"logits_scaling = nan; allowed are finite"),
    ("gemma3", {"query_pre_attn_scalar": None}, r"Field 'query_pre_attn_scalar' expected int"),
]  # fmt: skip
"""Model, values in its config.json -> what is said: the field, its value, what is allowed."""


@pytest.mark.parametrize(("name", "values", "said"), WRONG_VALUES, ids=lambda value: str(value)[:40])
def test_a_wrong_value_is_no_damage(name: str, values: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = write_model(tiny_model(name), tmp_path / "c")
    change_config(folder, **values)
    message = refused(folder, said)
    assert "damaged" not in message
    assert "truncated" not in message


@pytest.mark.parametrize(
    "file",
    ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"],
)
def test_a_file_that_ends_early_is_named(file: str, tmp_path: Path) -> None:
    folder = write_model(tiny_model("llama"), tmp_path / "c")
    (folder / file).write_bytes((folder / file).read_bytes()[:60])
    assert file in refused(folder, "damaged")


@pytest.mark.parametrize("change", [
    lambda text: "\ufeff" + text, lambda text: "// sizes\n" + text, lambda text: text.rstrip().removesuffix("}") + ",}",
])  # fmt: skip
def test_what_is_no_json_says_what_it_may_not_hold(change: Any, tmp_path: Path) -> None:
    folder = write_model(tiny_model("llama"), tmp_path / "c")
    path = folder / "config.json"
    path.write_text(change(path.read_text()), encoding="utf-8")
    assert "byte order mark, comments and commas" in refused(folder, r"config\.json is not valid JSON")
