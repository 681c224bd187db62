"""Checkpoints that lie, are damaged or hold more than they should: one error each, and nothing is loaded."""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer

from pyprune.checkpoint.compact import compact_checkpoint
from pyprune.checkpoint.load import load_model, load_tokenizer, stored_dtype, weights_identity
from pyprune.checkpoint.record import (
    PruningRecord,
    annotate_checkpoint,
    check_annotatable,
    inherited_facts,
    read_pruning_json,
)
from pyprune.checkpoint.save import save_checkpoint
from pyprune.checkpoint.shards import TensorFiles, check_finite, read_header, weight_files
from pyprune.errors import CheckpointError, OutputError, PypruneError, UnsupportedModelError
from pyprune.families import family_for
from pyprune.serving.checkpoints import read_checkpoint, verify_checkpoint
from pyprune.serving.export import export
from tests._support.gguf import write_gguf
from tests._support.models import tiny_model
from tests._support.paths import REPO
from tests._support.tokenizer import tiny_tokenizer

RECORD = "pruning.json"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """With a record."""
    return save_checkpoint(tiny_model(), tiny_tokenizer(), tmp_path / "c", plan=None, provenance={"method": "none"})


@pytest.fixture
def foreign(checkpoint: Path) -> Path:
    """Without one: another program wrote it."""
    (checkpoint / RECORD).unlink()
    return checkpoint


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def refused(folder: Path, match: str) -> str:
    """load_model refuses it in one line of bounded length."""
    with pytest.raises(CheckpointError, match=match) as caught:
        load_model(folder)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 1500
    return text


# --- what is verified is what is used ------------------------------------------------------------

STRAY = [
    "zz.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json", "x.pt",
    "x.pth", "x.ckpt", "x.gguf", "x.msgpack", "x.h5", "consolidated.00.x", "Consolidated.safetensors", "params.json",
    "tekken.json", "added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja",
    "chat_template.json", "modeling_x.py", "hf_quant_config.json", "quantize_config.json", "preprocessor_config.json",
    "processor_config.json", "additional_chat_templates/a.jinja", "special_tokens_map.json",
]  # fmt: skip
READERS: dict[str, Callable[[Path], object]] = {
    "load": load_model,
    "inspect and bench": read_checkpoint,
    "vllm": verify_checkpoint,
    "prune": lambda folder: inherited_facts(folder, verify_files=True),
    "export": lambda folder: export(folder, folder.parent / "exported"),
    "compact": lambda folder: compact_checkpoint(folder, identity_plan(), folder.parent / "cut"),
}


def identity_plan() -> Any:
    model = tiny_model()
    return family_for(model).plan(model.config).drop_layers([1])


@pytest.mark.parametrize("name", STRAY)
def test_a_file_beside_the_record_that_a_loader_reads_is_refused(checkpoint: Path, name: str) -> None:
    (checkpoint / name).parent.mkdir(exist_ok=True)
    (checkpoint / name).write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="does not list and a loader would read") as caught:
        read_pruning_json(checkpoint, verify_files=True)
    assert name in str(caught.value)


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_other_weights_beside_the_record(checkpoint: Path, reader: str) -> None:
    READERS[reader](checkpoint)
    for name in ("exported", "cut"):
        if (checkpoint.parent / name).exists():
            (checkpoint.parent / name).rename(checkpoint.parent / f"first-{name}")
    state = load_file(checkpoint / "model.safetensors")
    save_file({k: v * 2 for k, v in state.items()}, checkpoint / "zz.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"zz\.safetensors"):
        READERS[reader](checkpoint)
    assert not {"exported", "cut"} & {p.name for p in checkpoint.parent.iterdir()}


def test_what_no_loader_reads_may_lie_there(checkpoint: Path) -> None:
    for name in ("LICENSE", "notes.md", "notes.txt", "plot.png", ".gitattributes", ".safetensors", "eval.json"):
        (checkpoint / name).write_text("mine")
    (checkpoint / "figures").mkdir()
    (checkpoint / "figures" / "old.safetensors").touch()
    (checkpoint / "README.md").write_text("mine")
    read_pruning_json(checkpoint, verify_files=True)
    load_model(checkpoint)


def test_links_to_the_same_content_are_the_same_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    for path in checkpoint.iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    load_model(tmp_path / "snapshot")
    (tmp_path / "snapshot" / "zz.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"zz\.safetensors"):
        load_model(tmp_path / "snapshot")


def test_a_record_that_is_a_dangling_link_is_not_passed_over(checkpoint: Path) -> None:
    (checkpoint / RECORD).unlink()
    (checkpoint / RECORD).symlink_to("nowhere")
    refused(checkpoint, "has no pruning.json")
    with pytest.raises(CheckpointError):
        verify_checkpoint(checkpoint)


@pytest.mark.parametrize("other", ["../x.safetensors", "/x.safetensors", "sub/x.safetensors", "..", 3])
def test_an_index_that_names_a_file_elsewhere_is_refused_everywhere(foreign: Path, other: Any) -> None:
    (foreign / "model.safetensors").rename(foreign.parent / "x.safetensors")
    index = json.dumps({"metadata": {}, "weight_map": {"model.norm.weight": other}})
    (foreign / "model.safetensors.index.json").write_text(index)
    for reader in (load_model, read_checkpoint, TensorFiles, READERS["compact"]):
        with pytest.raises(CheckpointError, match=r"outside its folder|is damaged"):
            reader(foreign)
    (foreign / "model.safetensors.index.json").rename(foreign / "pytorch_model.bin.index.json")
    refused(foreign, "outside its folder|is damaged")


def test_a_single_file_and_an_index_of_others_are_ambiguous(foreign: Path) -> None:
    (foreign / "zz.safetensors").write_bytes((foreign / "model.safetensors").read_bytes())
    index = foreign / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"model.norm.weight": "model.safetensors"}}')
    assert weight_files(foreign) == [foreign / "model.safetensors"]
    index.write_text('{"weight_map": {"model.norm.weight": "zz.safetensors"}}')
    for reader in (load_model, read_checkpoint, TensorFiles):
        with pytest.raises(CheckpointError, match="some readers take the one, some the other"):
            reader(foreign)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path, max_shard_size="50KB")
    first, second, *_ = sorted(tmp_path.glob("*.safetensors"))
    twice = next(iter(load_file(first).items()))
    save_file(load_file(second) | dict([twice]), second, {"format": "pt"})
    refused(tmp_path, "twice")


def test_a_config_that_names_its_weights_is_refused(foreign: Path) -> None:
    (foreign / "zz.safetensors").write_bytes((foreign / "model.safetensors").read_bytes())
    change_config(foreign, transformers_weights="zz.safetensors")
    refused(foreign, "names the file of its weights")
    with pytest.raises(CheckpointError, match="names the file of its weights"):
        read_checkpoint(foreign)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_is_never_applied_silently(checkpoint: Path, tmp_path: Path, name: str) -> None:
    (checkpoint / name).write_text("{}")
    assert name in refused(checkpoint, "Merge it into its base model first")
    (checkpoint / RECORD).unlink()
    refused(checkpoint, "Merge it")
    for reader in ("inspect and bench", "compact", "export"):
        with pytest.raises(CheckpointError, match="Merge it"):
            READERS[reader](checkpoint)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]


def test_an_adapter_from_elsewhere_is_noticed_after_loading(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.PreTrainedModel._hf_peft_config_loaded", True, raising=False)
    refused(foreign, "holds an adapter, which was put on top")


# --- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(foreign: Path, value: float) -> None:
    state = load_file(foreign / "model.safetensors")
    state["model.layers.2.mlp.up_proj.weight"][3, 5] = value
    save_file(state, foreign / "model.safetensors", {"format": "pt"})
    for reader in (load_model, READERS["compact"], READERS["export"]):
        with pytest.raises(CheckpointError, match=r"model\.layers\.2\.mlp\.up_proj\.weight .* not finite"):
            reader(foreign)
    assert [p.name for p in foreign.parent.iterdir()] == ["c"]


def test_weights_beyond_the_dtype_that_is_asked_for_are_refused(foreign: Path) -> None:
    state = load_file(foreign / "model.safetensors")
    state["model.norm.weight"][0] = 1e5
    save_file(state, foreign / "model.safetensors", {"format": "pt"})
    load_model(foreign)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight .* not finite .* in float16"):
        load_model(foreign, dtype="float16")


def test_finite_covers_every_dtype() -> None:
    for tensor in (torch.ones(3).to(torch.float8_e4m3fn), torch.ones(3, dtype=torch.int8), torch.empty(0)):
        check_finite("x", tensor, "here")
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn):
        with pytest.raises(CheckpointError, match="not finite"):
            check_finite("x", torch.tensor([1.0, float("nan")]).to(dtype), "here")


def test_a_tensor_larger_than_the_config_says_is_not_cut_as_if_it_were_whole(foreign: Path) -> None:
    state = load_file(foreign / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    state[name] = torch.cat([state[name]] * 2)
    save_file(state, foreign / "model.safetensors", {"format": "pt"})
    plan = identity_plan().with_layer(2, ffn=range(9))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight .* has the shape"):
        compact_checkpoint(foreign, plan, foreign.parent / "cut")


def header_of(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        changed = change(header)
        text = (changed if isinstance(changed, str) else json.dumps(changed or header)).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return apply


def set_norm(**facts: Any) -> Callable[[Path], None]:
    return header_of(lambda header: header["model.norm.weight"].update(facts))


HEADERS: dict[str, Callable[[Path], None]] = {
    "shape of text": set_norm(shape=["48"]),
    "shape is text": set_norm(shape="48"),
    "negative shape": set_norm(shape=[-48]),
    "huge shape": set_norm(shape=[1 << 62, 1 << 62]),
    "a float": set_norm(shape=[48.0]),
    "many dimensions": set_norm(shape=[1] * 100_000),
    "unknown dtype": set_norm(dtype="F3"),
    "dtype is a list": set_norm(dtype=[]),
    "offsets of text": set_norm(data_offsets=["0", "192"]),
    "one offset": set_norm(data_offsets=[0]),
    "offsets backwards": set_norm(data_offsets=[192, 0]),
    "overlapping": set_norm(data_offsets=[0, 192]),
    "beyond the file": set_norm(data_offsets=[1 << 40, (1 << 40) + 192]),
    "not an object": header_of(lambda header: [1, 2]),
    "no object inside": header_of(lambda header: {"a": 3}),
    "twice": header_of(lambda header: json.dumps(header)[:-1] + ', "model.norm.weight": {}}'),
    "deep": header_of(lambda header: "[" * 200_000),
    "digits": header_of(lambda header: '{"a": ' + "9" * 9000 + "}"),
    "utf-16": lambda path: path.write_bytes(struct.pack("<Q", 4) + '{}'.encode("utf-16-le")),
    "zero bytes": lambda path: path.write_bytes(b""),
    "length beyond the file": lambda path: path.write_bytes(struct.pack("<Q", 90_000_000) + b"{}"),
    "data too long": lambda path: path.write_bytes(path.read_bytes() + b"\0" * 8),
}  # fmt: skip


@pytest.mark.parametrize("damage", HEADERS)
def test_damaged_headers_are_one_error_for_every_reader(foreign: Path, damage: str) -> None:
    HEADERS[damage](foreign / "model.safetensors")
    refused(foreign, r"model\.safetensors could not be read")
    for reader in (read_checkpoint, TensorFiles, lambda folder: read_header(folder / "model.safetensors")):
        with pytest.raises(CheckpointError, match="could not be read") as caught:
            reader(foreign)
        assert len(str(caught.value)) < 1000


# --- configurations ------------------------------------------------------------------------------

SIZES = ["num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
         "num_key_value_heads", "head_dim", "num_labels"]  # fmt: skip


@pytest.mark.parametrize("value", [2_000_000_000, 10**30, 0, -1, "4", 1.5, [4], True])
@pytest.mark.parametrize("name", SIZES)
def test_impossible_sizes_are_refused_before_memory_is_taken(foreign: Path, name: str, value: Any) -> None:
    change_config(foreign, **{name: value})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert name in refused(foreign, "is damaged|describes a model of")
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


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "x"])
def test_quantised_checkpoints_are_refused_plainly(foreign: Path, method: str) -> None:
    change_config(foreign, quantization_config={"quant_method": method, "bits": 4})
    for reader in (load_model, stored_dtype):
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


# --- whatever libraries raise --------------------------------------------------------------------

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
        load_tokenizer(foreign)
    monkeypatch.setattr(AutoConfig, "from_pretrained", fail)
    with pytest.raises(CheckpointError):
        stored_dtype(foreign)


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
        refused(foreign, "could not be read")


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
    for reader in (load_model, stored_dtype, weights_identity, read_checkpoint):
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


# --- GGUF ----------------------------------------------------------------------------------------


@pytest.fixture
def gguf_folder(tmp_path: Path) -> Path:
    pytest.importorskip("gguf")
    return tmp_path


def refused_gguf(folder: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        load_model(folder, gguf_file="x.gguf")
    assert "\n" not in str(caught.value)


def test_a_whole_gguf_is_read(gguf_folder: Path) -> None:
    write_gguf(gguf_folder / "x.gguf")
    model, tokenizer = load_model(gguf_folder, gguf_file="x.gguf")
    assert len(model.model.layers) == 2
    assert tokenizer is not None


@pytest.mark.parametrize("claimed", [1, 3, 0, 2**31])
def test_a_gguf_with_a_wrong_block_count_is_refused(gguf_folder: Path, claimed: int) -> None:
    write_gguf(gguf_folder / "x.gguf", claimed=claimed)
    refused_gguf(gguf_folder, f"says that it has {claimed} blocks .* but its tensors belong to 2")


@pytest.mark.parametrize("name", ["zz", "blk.0.attn_q.bias", "blk.1.ffn_gate_exps.weight"])
def test_a_gguf_with_tensors_that_nothing_takes_is_refused(gguf_folder: Path, name: str) -> None:
    write_gguf(gguf_folder / "x.gguf", extra=[name])
    refused_gguf(gguf_folder, f"no parameter of its llama model takes \\('{name}'\\)")


def test_rotary_factors_in_a_gguf_are_warned_of(gguf_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(gguf_folder / "x.gguf", extra=["rope_freqs.weight"])
    load_model(gguf_folder, gguf_file="x.gguf")
    assert "scales its rotary frequencies" in capsys.readouterr().err


def test_a_gguf_that_claims_a_large_model_is_refused(gguf_folder: Path) -> None:
    write_gguf(gguf_folder / "x.gguf", hidden=2_000_000)
    refused_gguf(gguf_folder, "describes a model of")


@pytest.mark.parametrize("at", [8, 16, 24])
def test_counts_and_lengths_of_a_gguf_are_bounded_by_the_file(gguf_folder: Path, at: int) -> None:
    write_gguf(gguf_folder / "x.gguf")
    data = bytearray((gguf_folder / "x.gguf").read_bytes())
    data[at : at + 8] = struct.pack("<Q", 1 << 60)
    (gguf_folder / "x.gguf").write_bytes(data)
    refused_gguf(gguf_folder, "could not be read as GGUF")


def test_a_list_of_a_gguf_without_end_is_refused(gguf_folder: Path) -> None:
    """gguf's own reader goes through 2^60 steps here."""
    key, kind, inner, length = b"a", 9, 0, 1 << 60
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", kind, inner, length)
    (gguf_folder / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry)
    refused_gguf(gguf_folder, "list of 1,152,921,504,606,846,976 numbers")


def test_a_truncated_gguf_is_refused(gguf_folder: Path) -> None:
    write_gguf(gguf_folder / "x.gguf")
    data = (gguf_folder / "x.gguf").read_bytes()
    for length in (0, 3, 20, 200, len(data) // 2, len(data) - 200):
        (gguf_folder / "x.gguf").write_bytes(data[:length])
        refused_gguf(gguf_folder, "could not be read as GGUF")


# --- records -------------------------------------------------------------------------------------

RECOVERY = {"report": {"objective": "lora", "steps": 3, "tokens": 400}}
DAMAGED: list[dict[str, Any]] = [
    {"training_marks": 3}, {"training_marks": "no base64!"}, {"training_marks": "AAAA"}, {"training_marks": None},
    {"training_marks": "é"}, {"recoveries": {}}, {"recoveries": [3]}, {"recoveries": [{}]},
    {"recoveries": [{"report": {"objective": "lora", "steps": "3", "tokens": 4}}]},
    {"recoveries": [{"report": {"objective": "lora", "steps": 3}}]}, {"quality": []}, {"quality": 3}, {"speed": "x"},
    {"before": []}, {"report": 3}, {"report": {"decision": []}}, {"method": 3}, {"source": None}, {"architecture": []},
    {"dtype": {}}, {"parameters": "9"}, {"parameters": True}, {"dense_parameters": 1.5}, {"measured_before": 1},
]  # fmt: skip


def write_record(folder: Path, provenance: Any, files: Any = None) -> None:
    (folder / RECORD).write_text(PruningRecord(None, provenance, {} if files is None else files).to_json())


@pytest.mark.parametrize("facts", DAMAGED, ids=str)
def test_damaged_provenance_is_refused_when_it_is_read(tmp_path: Path, facts: dict[str, Any]) -> None:
    write_record(tmp_path, facts)
    with pytest.raises(CheckpointError, match="is damaged") as caught:
        read_pruning_json(tmp_path)
    assert next(iter(facts)) in str(caught.value) or "decision" in str(caught.value)


def test_whole_provenance_is_read(tmp_path: Path) -> None:
    facts = {"training_marks": "AAAAAAAAAAE=", "recoveries": [RECOVERY], "quality": {"ppl": 3.0}, "before": {}}
    write_record(tmp_path, facts | {"parameters": 3, "report": {"decision": {}}, "other": [1]})
    assert read_pruning_json(tmp_path).provenance["recoveries"] == [RECOVERY]


@pytest.mark.parametrize(
    "files",
    [{"/etc/passwd": "0" * 64}, {"../x": "0" * 64}, {"a/../../x": "0" * 64}, {"": "0" * 64}, {"x": "0" * 63},
     {"x": "G" * 64}, {"x": None}, {"pruning.json": "0" * 64}, [["x", "0" * 64]], "x"],
    ids=str,
)  # fmt: skip
def test_damaged_lists_of_files_are_refused(tmp_path: Path, files: Any) -> None:
    write_record(tmp_path, {}, files)
    with pytest.raises(CheckpointError, match="is damaged"):
        read_pruning_json(tmp_path)


def test_annotating_a_folder_that_cannot_be_written_is_refused_beforehand(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(os.listdir(checkpoint))
    check_annotatable(checkpoint)
    assert sorted(os.listdir(checkpoint)) == before
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: allowed(path, mode) and not mode & os.W_OK)
    with pytest.raises(OutputError, match="permission denied"):
        check_annotatable(checkpoint)


FULL = """
import resource, signal, sys
sys.path.insert(0, {repo!r})
from pathlib import Path
from pyprune.errors import OutputError
from pyprune.checkpoint.record import annotate_checkpoint, check_annotatable
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
for attempt in (lambda: check_annotatable({folder!r}), lambda: annotate_checkpoint({folder!r}, quality={{"ppl": 1.0}})):
    try:
        attempt()
    except OutputError as error:
        assert "larger than this process may write" in str(error), error
    else:
        sys.exit("it was written")
"""


def test_annotating_without_room_is_noticed_beforehand_and_leaves_nothing(checkpoint: Path) -> None:
    before = {p.name: p.read_bytes() for p in checkpoint.iterdir()}
    script = FULL.format(repo=str(REPO), folder=str(checkpoint))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {p.name: p.read_bytes() for p in checkpoint.iterdir()} == before


@pytest.mark.parametrize("kind", ["bytes", "folder", "link"])
def test_a_card_that_is_not_ours_is_left_alone(checkpoint: Path, kind: str) -> None:
    card = checkpoint / "README.md"
    card.unlink()
    if kind == "bytes":
        card.write_bytes(b"caf\xe9")
    elif kind == "folder":
        card.mkdir()
    else:
        card.symlink_to("nowhere")
    annotate_checkpoint(checkpoint, quality={"ppl": 2.0})
    assert read_pruning_json(checkpoint).provenance["quality"] == {"ppl": 2.0}
    assert kind != "bytes" or card.read_bytes() == b"caf\xe9"


# --- identity ------------------------------------------------------------------------------------


def test_identity_follows_the_weights_and_nothing_else(foreign: Path) -> None:
    first = weights_identity(foreign)
    assert len(first) == 64
    (foreign / "notes.md").write_text("x")
    (foreign / "tokenizer.json").write_text("{}")
    (foreign / "other.safetensors").write_bytes(b"x")
    assert weights_identity(foreign) == first
    change_config(foreign, rms_norm_eps=0.5)
    second = weights_identity(foreign)
    data = bytearray((foreign / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (foreign / "model.safetensors").write_bytes(data)
    assert len({first, second, weights_identity(foreign)}) == 3


def test_identity_of_a_verified_checkpoint_hashes_nothing_again(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_record = weights_identity(checkpoint)
    monkeypatch.setattr("pyprune.checkpoint.load.file_digest", lambda path: pytest.fail("hashed again"))
    assert weights_identity(checkpoint) == with_record
    monkeypatch.undo()
    (checkpoint / RECORD).unlink()
    assert weights_identity(checkpoint) == with_record


def test_identity_of_what_cannot_be_read_says_what_loading_would(foreign: Path, tmp_path: Path) -> None:
    (foreign / "model.safetensors").unlink()
    for change, error, match in (
        ({}, CheckpointError, r"neither model\.safetensors"),
        ({"model_type": "bert"}, UnsupportedModelError, "Unknown model type 'bert'"),
    ):
        change_config(foreign, **change)
        for reader in (weights_identity, load_model):
            with pytest.raises(error, match=match):
                reader(foreign)
    with pytest.raises(CheckpointError, match="is not a folder"):
        weights_identity(tmp_path / "nowhere")


def test_identity_of_a_gguf_is_the_file(gguf_folder: Path) -> None:
    write_gguf(gguf_folder / "x.gguf")
    first = weights_identity(gguf_folder, gguf_file="x.gguf")
    (gguf_folder / "x.gguf").write_bytes((gguf_folder / "x.gguf").read_bytes() + b"\0")
    assert weights_identity(gguf_folder, gguf_file="x.gguf") != first
    with pytest.raises(CheckpointError, match=r"has no file 'y\.gguf'"):
        weights_identity(gguf_folder, gguf_file="y.gguf")


def test_identity_of_a_hub_id_is_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    file = tmp_path / "models--a--b" / "snapshots" / commit / "config.json"
    monkeypatch.setattr("pyprune.checkpoint.load.cached_file", lambda *args, **options: str(file))
    assert weights_identity("a/b") == commit
