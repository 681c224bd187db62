"""Files that lie, are damaged or lie there without a record: one error each, and nothing is loaded."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pyprune.checkpoint.load import load_model
from pyprune.checkpoint.record import (
    read_pruning_json,
)
from pyprune.checkpoint.shards import TensorFiles, check_finite, read_header, weight_files
from pyprune.errors import CheckpointError
from pyprune.run.cut_on_disk import compact_checkpoint
from pyprune.serving.checkpoints import read_checkpoint, verify_checkpoint
from tests._support.models import tiny_model
from tests._support.suspect import READERS, RECORD, change_config, refused, smaller_plan

STRAY = [
    "zz.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json", "x.pt",
    "x.pth", "x.ckpt", "x.gguf", "x.msgpack", "x.h5", "consolidated.00.x", "Consolidated.safetensors", "params.json",
    "tekken.json", "added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja",
    "chat_template.json", "modeling_x.py", "hf_quant_config.json", "quantize_config.json", "preprocessor_config.json",
    "processor_config.json", "additional_chat_templates/a.jinja", "special_tokens_map.json",
]  # fmt: skip


@pytest.mark.parametrize("name", STRAY)
def test_a_file_next_to_the_record_that_a_loader_reads_is_refused(checkpoint: Path, name: str) -> None:
    (checkpoint / name).parent.mkdir(exist_ok=True)
    (checkpoint / name).write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="does not list and a loader would read") as caught:
        read_pruning_json(checkpoint, verify_files=True)
    assert name in str(caught.value)


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_other_weights_next_to_the_record(checkpoint: Path, reader: str) -> None:
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


@pytest.mark.process
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
    plan = smaller_plan().with_layer(2, ffn=range(9))
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
