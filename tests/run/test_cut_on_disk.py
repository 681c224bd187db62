"""Compaction from file to file equals compaction in memory bit for bit."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pyprune.checkpoint.load import load_model
from pyprune.checkpoint.record import read_pruning_json
from pyprune.checkpoint.save import save_checkpoint
from pyprune.checkpoint.shards import Entry, TensorFiles, write_shards
from pyprune.cut.compact import compact_
from pyprune.errors import CheckpointError, OutputError, PlanError
from pyprune.families import family_for
from pyprune.plan import PrunePlan
from pyprune.run.cut_on_disk import compact_checkpoint
from tests._support.models import TINY, tiny_batch, tiny_model
from tests._support.plans import axis_plans
from tests._support.tokenizer import tiny_tokenizer


def dense_folder(folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32, shard: str = "50GB") -> Path:
    tiny_model(name).to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def plan_for(folder: Path, which: str) -> PrunePlan:
    model, _ = load_model(folder)
    return axis_plans(family_for(model).plan(model.config))[which]


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()}


def assert_same_bits(left: Path, right: Path) -> None:
    a, b = all_tensors(left), all_tensors(right)
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype
        assert torch.equal(tensor.view(-1).view(torch.uint8), b[name].view(-1).view(torch.uint8)), name


@pytest.mark.parametrize("which", ["hidden", "everything", "layers"])
@pytest.mark.parametrize("name", sorted(TINY))
def test_equals_the_path_through_memory(tmp_path: Path, name: str, which: str) -> None:
    dense = dense_folder(tmp_path / "dense", name)
    plan = plan_for(dense, which)
    report = compact_checkpoint(dense, plan, tmp_path / "streamed", provenance={"method": "test"})
    model, tokenizer = load_model(dense)
    expected = compact_(model, plan)
    save_checkpoint(model, tokenizer, tmp_path / "memory", plan=plan, provenance={})
    assert report == expected
    assert_same_bits(tmp_path / "streamed", tmp_path / "memory")
    for file in ("config.json", "generation_config.json"):
        left, right = (json.loads((tmp_path / d / file).read_text()) for d in ("streamed", "memory"))
        assert left == right
    record = read_pruning_json(tmp_path / "streamed", verify_files=True)
    assert record.plan == plan
    assert record.provenance["method"] == "test"
    assert record.provenance["parameters"] == expected.parameters
    loaded, _ = load_model(tmp_path / "streamed")
    batch = tiny_batch()
    assert torch.equal(loaded(input_ids=batch).logits, model.eval()(input_ids=batch).logits)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_keeps_its_dtype(tmp_path: Path, dtype: str) -> None:
    dense = dense_folder(tmp_path / "dense", "qwen2", getattr(torch, dtype))
    plan = plan_for(dense, "everything")
    compact_checkpoint(dense, plan, tmp_path / "streamed")
    model, tokenizer = load_model(dense, dtype=dtype)
    compact_(model, plan)
    save_checkpoint(model, tokenizer, tmp_path / "memory", plan=plan, provenance={})
    assert_same_bits(tmp_path / "streamed", tmp_path / "memory")
    assert read_pruning_json(tmp_path / "streamed").provenance["dtype"] == dtype


def test_shards_in_and_out(tmp_path: Path) -> None:
    whole = dense_folder(tmp_path / "whole")
    parts = dense_folder(tmp_path / "parts", shard="40KB")
    assert len(list(parts.glob("*.safetensors"))) > 2
    plan = plan_for(whole, "everything")
    compact_checkpoint(whole, plan, tmp_path / "one")
    compact_checkpoint(parts, plan, tmp_path / "many", max_shard_bytes=30_000)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert_same_bits(tmp_path / "one", tmp_path / "many")
    first, _ = load_model(tmp_path / "one")
    second, _ = load_model(tmp_path / "many")
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor is gone before the next one is read."""
    dense = dense_folder(tmp_path / "dense")
    plan = plan_for(dense, "hidden")
    alive: list[Any] = []
    most = 0
    read = TensorFiles.read

    def watched(self: TensorFiles, name: str) -> torch.Tensor:
        nonlocal most
        import weakref

        tensor = read(self, name)
        alive[:] = [r for r in alive if r() is not None]
        alive.append(weakref.ref(tensor))
        most = max(most, len(alive))
        return tensor

    monkeypatch.setattr(TensorFiles, "read", watched)
    compact_checkpoint(dense, plan, tmp_path / "out")
    assert most == 1


def test_pieces_smaller_than_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of a few rows, of half a row, and of more than all give the same file."""
    dense = dense_folder(tmp_path / "dense")
    plan = plan_for(dense, "everything")
    for nbytes in (1 << 20, 1000, 16):
        monkeypatch.setattr("pyprune.cut.compact.Buffers.nbytes", nbytes)
        compact_checkpoint(dense, plan, tmp_path / str(nbytes))
    digests = [read_pruning_json(tmp_path / str(n), verify_files=True).files for n in (1 << 20, 1000, 16)]
    assert digests[0] == digests[1] == digests[2]


def test_the_disk_is_given_work_early_and_its_failure_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = dense_folder(tmp_path / "dense")
    plan = plan_for(dense, "everything")
    compact_checkpoint(dense, plan, tmp_path / "late")
    flushed: list[int] = []
    monkeypatch.setattr("pyprune.checkpoint.shards.FLUSH_BYTES", 1)
    monkeypatch.setattr("pyprune.checkpoint.shards._FLUSH", flushed.append)
    compact_checkpoint(dense, plan, tmp_path / "early")
    assert flushed
    assert_same_bits(tmp_path / "early", tmp_path / "late")

    def fails(descriptor: int) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr("pyprune.checkpoint.shards._FLUSH", fails)
    with pytest.raises(OutputError, match="the disk is gone"):
        compact_checkpoint(dense, plan, tmp_path / "failed")
    assert not (tmp_path / "failed").exists()


def test_a_flush_that_failed_before_others_succeeded_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    failed = threading.Event()

    def fails_once(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            failed.set()
            raise OSError("the disk is full")

    def pieces() -> Iterator[torch.Tensor]:
        yield torch.ones(1)
        assert failed.wait(60)
        for _ in range(199):
            yield torch.ones(1)

    monkeypatch.setattr("pyprune.checkpoint.shards.FLUSH_BYTES", 1)
    monkeypatch.setattr("pyprune.checkpoint.shards._FLUSH", fails_once)
    with pytest.raises(OSError, match="the disk is full"):
        write_shards(tmp_path, [Entry("a", torch.float32, (200,))], iter([("a", pieces())]), 1 << 20)


def test_the_tokenizer_is_copied_byte_for_byte(tmp_path: Path) -> None:
    dense = dense_folder(tmp_path / "dense")
    tiny_tokenizer(chat_template=True).save_pretrained(dense)
    (dense / "additional_chat_templates").mkdir()
    (dense / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}")
    compact_checkpoint(dense, plan_for(dense, "hidden"), tmp_path / "out")
    record = read_pruning_json(tmp_path / "out", verify_files=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "additional_chat_templates/tool.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (dense / name).read_bytes()
        assert name in record.files
    _, tokenizer = load_model(tmp_path / "out")
    assert tokenizer("a b")["input_ids"] == tiny_tokenizer()("a b")["input_ids"]


def test_what_transformers_does_not_load_is_left_out(tmp_path: Path) -> None:
    dense = dense_folder(tmp_path / "dense", "llama-head-dim")  # tied
    tensors = load_file(dense / "model.safetensors")
    assert "lm_head.weight" not in tensors
    extra = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    plan = plan_for(dense, "hidden")
    compact_checkpoint(dense, plan, tmp_path / "without")
    save_file(tensors | extra, dense / "model.safetensors", {"format": "pt"})
    compact_checkpoint(dense, plan, tmp_path / "with")
    assert_same_bits(tmp_path / "without", tmp_path / "with")


def test_decoders_without_the_head_around_them(tmp_path: Path) -> None:
    dense = dense_folder(tmp_path / "dense", "opt")
    plan = plan_for(dense, "hidden")
    compact_checkpoint(dense, plan, tmp_path / "usual")
    tensors = load_file(dense / "model.safetensors")
    save_file({k.removeprefix("model."): v for k, v in tensors.items()}, dense / "model.safetensors", {"format": "pt"})
    compact_checkpoint(dense, plan, tmp_path / "bare")
    assert_same_bits(tmp_path / "usual", tmp_path / "bare")


class TestRefusals:
    def test_an_existing_output(self, tmp_path: Path) -> None:
        dense = dense_folder(tmp_path / "dense")
        plan = plan_for(dense, "hidden")
        (tmp_path / "out").mkdir()
        with pytest.raises(OutputError, match="exists"):
            compact_checkpoint(dense, plan, tmp_path / "out")
        compact_checkpoint(dense, plan, tmp_path / "out", overwrite=True)

    def test_a_plan_of_another_model(self, tmp_path: Path) -> None:
        dense = dense_folder(tmp_path / "dense")
        plan = plan_for(dense_folder(tmp_path / "other", "qwen3"), "hidden")
        with pytest.raises(PlanError):
            compact_checkpoint(dense, plan, tmp_path / "out")

    def test_missing_and_foreign_tensors_leave_nothing(self, tmp_path: Path) -> None:
        dense = dense_folder(tmp_path / "dense")
        plan = plan_for(dense, "hidden")
        tensors = load_file(dense / "model.safetensors")
        gone = {k: v for k, v in tensors.items() if k != "model.norm.weight"}
        save_file(gone, dense / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
            compact_checkpoint(dense, plan, tmp_path / "out")
        save_file(tensors | {"model.extra": torch.ones(2)}, dense / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=r"model\.extra"):
            compact_checkpoint(dense, plan, tmp_path / "out")
        assert [p.name for p in tmp_path.iterdir()] == ["dense"]

    @pytest.mark.parametrize("damage", ["truncate", "header", "length", "index", "none"])
    def test_damaged_files(self, tmp_path: Path, damage: str) -> None:
        dense = dense_folder(tmp_path / "dense", shard="40KB" if damage == "index" else "50GB")
        plan = plan_for(dense, "hidden")
        path = dense / "model.safetensors"
        if damage == "index":
            (dense / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b.safetensors"}}')
        elif damage == "none":
            path.unlink()
        else:
            data = bytearray(path.read_bytes())
            if damage == "truncate":
                del data[-100:]
            elif damage == "header":
                data[20] = 0xFF
            else:
                data[7] = 0xFF
            path.write_bytes(bytes(data))
        with pytest.raises(CheckpointError, match=r"damaged|outside|neither model\.safetensors|could not be read"):
            compact_checkpoint(dense, plan, tmp_path / "out")

    def test_tensors_that_were_not_announced(self, tmp_path: Path) -> None:
        entry = Entry("a", torch.float32, (2,))
        with pytest.raises(RuntimeError, match="announced"):
            write_shards(tmp_path, [entry], iter([("b", [torch.ones(2)])]), 100)
        with pytest.raises(RuntimeError, match="announced"):
            write_shards(tmp_path, [entry], iter([("a", [torch.ones(1)])]), 100)
        with pytest.raises(RuntimeError, match="more tensors"):
            write_shards(tmp_path, [entry], iter([("a", [torch.ones(2)]), ("b", [torch.ones(2)])]), 100)


@pytest.mark.process
@pytest.mark.parametrize("which", ["hidden", "everything"])
@pytest.mark.parametrize("name", ["qwen2-tied", "opt", "phi-tied", "gemma3"])
def test_a_head_of_its_own_stays_although_the_config_says_tied(tmp_path: Path, name: str, which: str) -> None:
    """Transformers leaves such a head untied; it must neither be dropped nor be taken for the embedding."""
    dense = dense_folder(tmp_path / "dense", name)
    plan = plan_for(dense, which)
    tensors = load_file(dense / "model.safetensors")
    embedding = next(t for n, t in tensors.items() if n.endswith("embed_tokens.weight"))
    tensors["lm_head.weight"] = embedding.flip(0).clone()
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    assert json.loads((dense / "config.json").read_text()).get("tie_word_embeddings", True)
    compact_checkpoint(dense, plan, tmp_path / "streamed")
    model, _ = load_model(dense)
    compact_(model, plan)
    loaded, _ = load_model(tmp_path / "streamed")
    assert torch.equal(loaded(input_ids=tiny_batch()).logits, model.eval()(input_ids=tiny_batch()).logits)


def test_generation_values_that_are_only_read_are_copied_as_they_are(tmp_path: Path) -> None:
    """As LLaMA 2 has them: a temperature without sampling, which Transformers reads and refuses to write."""
    dense = dense_folder(tmp_path / "dense")
    file = dense / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "temperature": 0.9, "top_p": 0.6}))
    compact_checkpoint(dense, plan_for(dense, "ffn"), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (written["temperature"], written["top_p"]) == (0.9, 0.6)


def test_the_dense_model_is_never_replaced_and_a_damaged_one_not_read(tmp_path: Path) -> None:
    dense = tmp_path / "dense"
    save_checkpoint(tiny_model("llama"), None, dense, plan=None, provenance={})
    plan = plan_for(dense, "ffn")
    with pytest.raises(OutputError, match="is what the command reads"):
        compact_checkpoint(dense, plan, dense, overwrite=True)
    weights = bytearray((dense / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (dense / "model.safetensors").write_bytes(weights)
    with pytest.raises(CheckpointError, match="differs from what was written"):
        compact_checkpoint(dense, plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_the_source_was_trained_on_is_remembered(tmp_path: Path) -> None:
    dense, marks = tmp_path / "dense", "AAAAAAAAAAE="
    facts = {"method": "dress", "training_marks": marks, "quality": {"ppl": 7.0}}
    save_checkpoint(tiny_model("llama"), None, dense, plan=None, provenance=facts)
    compact_checkpoint(dense, plan_for(dense, "ffn"), tmp_path / "out")
    known = read_pruning_json(tmp_path / "out").provenance
    assert known["training_marks"] == marks
    assert known["before"]["quality"] == {"ppl": 7.0}
    assert "quality" not in known, "the dense model's figures are not the cut one's"
