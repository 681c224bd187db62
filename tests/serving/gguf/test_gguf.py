"""GGUF files: what a real llama.cpp computes from them, what is refused, and that they appear whole."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from pyprune.checkpoint.gguf import read_gguf_header
from pyprune.checkpoint.load import load_model
from pyprune.checkpoint.save import save_checkpoint
from pyprune.checkpoint.tower import text_model
from pyprune.errors import CheckpointError, ConfigError, MissingDependencyError, OutputError, UnsupportedModelError
from pyprune.families import family_for
from pyprune.plan import PrunePlan
from pyprune.serving.checkpoints import read_gguf
from pyprune.serving.gguf import blocks, layout, write
from pyprune.serving.gguf.blocks import FORMATS, NARROW, quantise_values
from pyprune.serving.gguf.write import export_gguf
from tests._support.cli import refused, run
from tests._support.llama_cpp import VOCAB, Case, LlamaCpp, byte_level_tokenizer, identity, values_of
from tests._support.models import tiny_model
from tests._support.plans import keep_kv_groups
from tests._support.towers import tiny_tower

gguf = pytest.importorskip("gguf")

BLOCKS = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
"""Sizes that whole blocks of 32 divide."""
LARGE_BLOCKS = BLOCKS | {"hidden_size": 256, "intermediate_size": 512}
"""Sizes that whole blocks of 256 divide."""


def unequal(plan: PrunePlan) -> PrunePlan:
    """Other heads, KV heads and FFN widths in other layers."""
    heads = keep_kv_groups(plan, 0, [plan.dense.num_key_value_heads - 1])
    return keep_kv_groups(heads, 3, [0, 1], 1).with_layer(1, ffn=range(0, 40, 3)).with_layer(2, ffn=range(7))


def no_attention(plan: PrunePlan) -> PrunePlan:
    return plan.with_layer(1, query_heads=[], kv_heads=[]).with_layer(3, query_heads=[], kv_heads=[])


def no_mlp(plan: PrunePlan) -> PrunePlan:
    """Without the MLP of a layer in the middle, and of the last."""
    return plan.with_layer(1, ffn=[]).with_layer(3, ffn=[])


def fewer(plan: PrunePlan) -> PrunePlan:
    """Two layers and a part of the hidden channels, alike everywhere."""
    return plan.drop_layers([0, 2]).keep_hidden(range(4, 40))


@pytest.mark.parametrize("model_type", ["mistral3", pytest.param("qwen2_5_vl", marks=pytest.mark.second)])
def test_a_text_tower_is_written_as_its_text_model_is(model_type: str, tmp_path: Path) -> None:
    whole = tiny_tower(model_type)
    save_checkpoint(whole, byte_level_tokenizer(), tmp_path / "whole", plan=None, provenance={})
    text = text_model(whole)
    del text.tower
    save_checkpoint(text, byte_level_tokenizer(), tmp_path / "text", plan=None, provenance={})
    reports = [export_gguf(tmp_path / name, tmp_path / f"{name}.gguf", quantise="f32") for name in ("whole", "text")]
    assert "text tower alone" in " ".join(reports[0].notes)
    tensors = [{t.name: t.data for t in gguf.GGUFReader(report.path).tensors} for report in reports]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(np.array_equal(tensors[0][name], tensors[1][name]) for name in tensors[0])


def fewer_heads(plan: PrunePlan) -> PrunePlan:
    """A third of the heads in every layer, and as many hidden channels as they have."""
    groups = plan.dense.num_key_value_heads // 3 or 1
    for layer in range(4):
        plan = keep_kv_groups(
            plan, layer, range(plan.dense.num_key_value_heads - groups, plan.dense.num_key_value_heads)
        )
    return plan.keep_hidden(range(len(plan.layers[0].query_heads) * plan.dense.head_dim))


LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
BOTH_KINDS = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}}

# llama.cpp looks GELU up in a table of float16.
TABLE = 5e-3
CASES = {
    "equal": Case("llama", identity, "llama"),
    "cut alike": Case("llama-head-dim", fewer, "llama"),
    "unequal": Case("llama", unequal, "deci"),
    "no attention": Case("llama", no_attention, "deci"),
    "no mlp": Case("llama", no_mlp, "deci"),
    "biases": Case("llama-mha-bias", identity, "llama"),
    "biases, unequal": Case("llama-mha-bias", lambda plan: plan.with_layer(2, ffn=range(7)), "deci"),
    "rotary factors": Case("llama3-rope", identity, "llama"),
    "rotary factors, unequal": Case("llama3-rope", no_mlp, "deci"),
    "window": Case("mistral-window", unequal, "deci", values={"sliding_window": 40}),
    "mistral": Case("mistral", identity, "llama"),
    "qwen2, cut alike": Case("qwen2", fewer, "llama"),
    "qwen2": Case("qwen2", identity, "qwen2"),
    "qwen2, unequal": Case("qwen2-tied", unequal, "deci"),
    "qwen3": Case("qwen3", identity, "qwen3"),
    "qwen3, cut alike": Case("qwen3-tied", fewer, "qwen3"),
    "qwen3, unequal": Case("qwen3-tied", unequal, "openelm"),
    "qwen3, one width": Case("qwen3-tied", lambda plan: plan.with_layer(1, ffn=range(8)), "openelm"),
    "linear positions": Case("llama", identity, "llama", values={"rope_parameters": LINEAR}),
    "linear positions, qwen2": Case("qwen2", no_mlp, "deci", values={"rope_parameters": LINEAR}),
    "yarn": Case("llama", identity, "llama", values={"rope_parameters": YARN}),
    "yarn, unequal": Case("qwen2", unequal, "deci", values={"rope_parameters": YARN}),
    "yarn, qwen2": Case("qwen2", identity, "qwen2", values={"rope_parameters": YARN}),
    "yarn, qwen3": Case("qwen3", identity, "qwen3", values={"rope_parameters": YARN}),
    "phi": Case("phi", lambda plan: plan.drop_layers([1]), "phi2", TABLE),
    "phi, tied": Case("phi-tied", lambda plan: plan.drop_layers([1]), "phi2", TABLE),
    "phi3": Case("phi3", fewer_heads, "phi3"),
    "olmo2": Case("olmo2", lambda plan: plan.drop_layers([1]), "olmo2"),
    "olmo2, tied": Case("olmo2", fewer_heads, "olmo2", values={"tie_word_embeddings": True}),
    "starcoder2": Case("starcoder2", lambda plan: plan.drop_layers([0]), "starcoder2", TABLE),
    "gpt_neox": Case("gpt_neox", fewer_heads, "gptneox", TABLE),
    "gemma3": Case("gemma3", identity, "gemma3", TABLE),
    "gemma3, cut alike": Case("gemma3", lambda plan: plan.keep_hidden(range(36)), "gemma3", TABLE),
    "gemma3, linear positions": Case("gemma3", identity, "gemma3", TABLE, {"rope_parameters": BOTH_KINDS}),
    "gemma3, windows at unequal distances": Case("gemma3", lambda plan: plan.drop_layers([0]), "gemma3", TABLE),
    "gemma3, no windows": Case("gemma3", identity, "gemma3", TABLE, {"layer_types": ["full_attention"] * 4}),
    "granite": Case("granite", lambda plan: plan.keep_hidden(range(36)), "granite"),
}


def prompts() -> list[list[int]]:
    """Of several lengths, without special tokens."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 100, (length,), generator=generator).tolist() for length in (1, 5, 17)]


@torch.no_grad()
def log_softmax(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Transformers' log probabilities of the next token [vocab]."""
    return torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].double(), -1)


@torch.no_grad()
def largest_difference(model: PreTrainedModel, server: LlamaCpp) -> float:
    """Largest difference of a log probability over all prompts and tokens."""
    worst = 0.0
    for prompt in prompts():
        wanted, found = log_softmax(model, prompt), server.log_probabilities(prompt)
        assert len(found) == VOCAB
        worst = max(worst, *(abs(float(wanted[i]) - value) for i, value in found.items()))
    return worst


def continuation(model: PreTrainedModel, prompt: list[int], length: int, without: list[int]) -> list[int]:
    """The most likely tokens but some that are never taken."""
    ids = list(prompt)
    for _ in range(length):
        found = log_softmax(model, ids)
        found[without] = -torch.inf
        ids.append(int(found.argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("name", CASES)
def test_llama_cpp_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model, report = case.write(tmp_path)
    assert report.architecture == case.architecture
    with LlamaCpp(report.path) as server:
        assert largest_difference(model, server) < case.tolerance
        tokens, ends = server.greedy(prompts()[-1], 8)
        assert tokens == continuation(model, prompts()[-1], 8, ends)
        assert 1 <= len(ends) <= 3


@pytest.mark.parametrize(("quantise", "tolerance"), [("f16", 0.02), ("bf16", 0.2)])
def test_half_precision_is_as_far_off_as_its_rounding(quantise: str, tolerance: float, tmp_path: Path) -> None:
    model, report = CASES["unequal"].write(tmp_path, quantise)
    with LlamaCpp(report.path) as server:
        assert 0 < largest_difference(model, server) < tolerance


def relative_error(model: PreTrainedModel, server: LlamaCpp) -> float:
    """Root mean square error of the log probabilities against their spread; about 1.4 for an unrelated model."""
    errors, spread = [], []
    for prompt in prompts():
        wanted, found = log_softmax(model, prompt), server.log_probabilities(prompt)
        errors += [(float(wanted[i]) - value) ** 2 for i, value in found.items()]
        spread += ((wanted - wanted.mean()) ** 2).tolist()
    return float((sum(errors) / sum(spread)) ** 0.5)


def errors_of(model: PreTrainedModel, kind: str, folder: Path) -> tuple[float, float]:
    """Of llama.cpp with the model in a format: against the model, and against Transformers with the file's values."""
    path = folder / f"{kind}.gguf"
    export_gguf(folder / "model", path, quantise=kind)
    with LlamaCpp(path) as server:
        return relative_error(model, server), relative_error(load_model(folder, gguf_file=path.name)[0], server)


def test_k_quants_are_close_and_closer_than_blocks_of_as_many_bits(tmp_path: Path) -> None:
    model, _ = Case("llama", identity, "llama", values=LARGE_BLOCKS).write(tmp_path)
    found = {kind: errors_of(model, kind, tmp_path) for kind in ("f32", "q8_0", *NARROW, "q4_0")}
    dense = {kind: error for kind, (error, _) in found.items()}
    assert {kind: read_gguf(tmp_path / f"{kind}.gguf").format for kind in found} == {kind: kind for kind in found}
    assert max(as_stored for _, as_stored in found.values()) < 0.06
    assert dense["f32"] < dense["q8_0"] < dense["q6_k"] < dense["q5_k"] < dense["q4_k"] < dense["q4_0"]


@pytest.mark.parametrize(
    ("kind", "head", "narrow", "file_type"),
    [("q4_k", "q6_k", "q5_0", 14), ("q5_k", "q6_k", "q5_1", 16), ("q6_k", "q6_k", "q8_0", 18)],
)
def test_k_quants_keep_rows_of_256_and_leave_others_to_smaller_blocks(
    kind: str, head: str, narrow: str, file_type: int, tmp_path: Path
) -> None:
    def edit(plan: PrunePlan) -> PrunePlan:
        return plan.with_layer(1, ffn=range(96)).with_layer(2, ffn=range(40))

    _, report = Case("llama", edit, "deci", values=LARGE_BLOCKS).write(tmp_path, kind)
    kinds = {tensor.name: tensor.tensor_type.name.lower() for tensor in gguf.GGUFReader(report.path).tensors}
    assert kinds["blk.0.attn_q.weight"] == kinds["blk.0.ffn_down.weight"] == kinds["blk.1.ffn_up.weight"] == kind
    assert kinds["output.weight"] == head
    assert kinds["blk.1.ffn_down.weight"] == narrow
    assert kinds["blk.2.ffn_down.weight"] == "f16"
    assert any(f"1 of 30 matrices are {narrow}" in note and "blk.1.ffn_down" in note for note in report.notes)
    assert any("1 of 30 matrices are f16" in note and "blk.2.ffn_down" in note for note in report.notes)
    assert values_of(report)["general.file_type"] == file_type


def test_rows_are_quantised_one_by_one_whichever_thread_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).standard_normal((37, 512)).astype(np.float32)
    for kind in NARROW:
        found = []
        for threads in (1, 3, 64):
            monkeypatch.setattr(blocks.os, "cpu_count", lambda threads=threads: threads)
            found.append(quantise_values(values, kind))
        assert all((other == found[0]).all() for other in found)
        assert (quantise_values(values[5:6], kind) == found[0][5:6]).all()
        back = gguf.dequantize(found[0], gguf.GGMLQuantizationType[kind.upper()])
        assert 0 < np.sqrt(((back - values) ** 2).mean()) < 0.1


def test_without_llama_cpp_k_quants_are_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks.llama_cpp_quantizer.cache_clear()
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(MissingDependencyError, match="K-quants"):
        export_gguf(tmp_path / "nothing", tmp_path / "x.gguf", quantise="q4_k")


def test_quantised_files_are_close_and_the_more_bits_the_closer(tmp_path: Path) -> None:
    model, _ = Case("llama", identity, "llama", values=BLOCKS).write(tmp_path)
    dense, as_stored = {}, {}
    for kind in (kind for kind in FORMATS if kind not in NARROW):
        dense[kind], as_stored[kind] = errors_of(model, kind, tmp_path)
    # llama.cpp rounds the activations to eight bits too where the weights are in blocks.
    assert max(as_stored.values()) < 0.06
    assert dense["f32"] < dense["f16"] < dense["bf16"] < dense["q8_0"] < 0.06
    assert dense["q8_0"] < min(dense["q5_0"], dense["q5_1"]) < min(dense["q4_0"], dense["q4_1"])
    assert max(dense.values()) < 0.6


def test_blocks_and_sizes_per_layer_go_together(tmp_path: Path) -> None:
    case = Case("llama", lambda plan: no_attention(plan).with_layer(2, ffn=range(32)), "deci", values=BLOCKS)
    model, report = case.write(tmp_path, "q8_0")
    assert not any("f16" in note for note in report.notes)
    with LlamaCpp(report.path) as server:
        assert relative_error(model, server) < 0.06


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q5_1"])
def test_every_matrix_is_in_the_format_that_was_asked_for(kind: str, tmp_path: Path) -> None:
    _, report = Case("llama", identity, "llama", values=BLOCKS).write(tmp_path, kind)
    kinds = {tensor.name: tensor.tensor_type.name.lower() for tensor in gguf.GGUFReader(report.path).tensors}
    assert kinds["blk.0.attn_q.weight"] == kinds["token_embd.weight"] == kind
    assert kinds["output.weight"] == "q8_0"
    assert kinds["blk.0.attn_norm.weight"] == kinds["output_norm.weight"] == "f32"
    assert any("output.weight" in note for note in report.notes) == (kind != "q8_0")


def test_rows_that_are_no_whole_number_of_blocks_are_f16_and_named(tmp_path: Path) -> None:
    _, report = Case("llama", lambda plan: plan.with_layer(1, ffn=range(40)), "deci", values=BLOCKS).write(
        tmp_path, "q4_0"
    )
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(report.path).tensors}
    assert [name for name, kind in kinds.items() if kind == "F16"] == ["blk.1.ffn_down.weight"]
    assert any("1 of " in note and "blk.1.ffn_down.weight" in note for note in report.notes)


@pytest.mark.parametrize(("name", "tokens"), [("linear positions", 4 * 512), ("gemma3, linear positions", 512)])
def test_positions_that_are_scaled_linearly_make_the_context_longer(name: str, tokens: int, tmp_path: Path) -> None:
    """llama.cpp's server takes no longer sequences than the file says; Gemma 3 states the length after it."""
    model, report = CASES[name].write(tmp_path)
    assert model.config.max_position_embeddings == 512
    assert values_of(report)[f"{report.architecture}.context_length"] == tokens


def test_a_window_that_llama_cpp_lacks_bounds_the_context(tmp_path: Path) -> None:
    _, report = CASES["window"].write(tmp_path)
    assert values_of(report)["deci.context_length"] == 40
    assert any("40 tokens instead of 512" in note for note in report.notes)


def test_the_plan_is_in_the_file(tmp_path: Path) -> None:
    model = tiny_model("llama")
    plan = unequal(family_for(model).plan(model.config))
    _, report = CASES["unequal"].write(tmp_path)
    found = PrunePlan.from_dict(json.loads(values_of(report)["pyprune.plan"]))
    assert found.layers == plan.layers


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case("opt", identity, ""), "no architecture for it"),
        (Case("olmo2", lambda plan: plan.keep_hidden(range(36)), ""), "as wide as the hidden size 36"),
        (Case("llama", lambda plan: plan.with_layer(0, query_heads=[], kv_heads=[]), ""), "layer 0, whose attention"),
        (Case("qwen3", unequal, ""), "embedding must be tied"),
        (Case("qwen3-tied", no_mlp, ""), "none of its sub-blocks can be skipped"),
        (Case("phi", unequal, ""), "phi2: sizes differ between layers"),
        (Case("phi", lambda plan: plan.keep_hidden(range(36)), ""), "as wide as the hidden size 36"),
        (Case("phi-tied", lambda plan: plan.keep_hidden(range(36)), ""), "LayerNorm divides by"),
        (Case("granite", no_mlp, ""), "granite: sizes differ between layers"),
        (Case("gemma3", identity, "", values={"query_pre_attn_scalar": 32}), "by the root of 16"),
        (
            Case("gemma3", identity, "", values={"rope_parameters": {**BOTH_KINDS, "sliding_attention": LINEAR}}),
            "windows have plain rotary positions",
        ),
        (Case("llama", identity, "", values={"hidden_act": "gelu"}), "uses silu, the model's gelu"),
        (
            Case(
                "llama",
                identity,
                "",
                values={"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
            ),
            "type 'dynamic'",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_what_llama_cpp_cannot_hold_is_refused_with_the_reason(case: Case, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        case.write(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["model"]


def test_biases_that_compensation_added_need_an_architecture_that_has_them(tmp_path: Path) -> None:
    names = ["model.layers.0.self_attn.o_proj.bias"]
    sizes = layout.GgufSizes(48, 8, ((6, 2, 40),) * 4, tied=False)
    qwen2, qwen3 = tiny_model("qwen2").config, tiny_model("qwen3").config
    assert layout.choose_form(family_for(qwen2), qwen2, sizes, names).architecture == "deci"
    with pytest.raises(UnsupportedModelError, match=r"qwen3: it has no place for model\.layers\.\{i\}\.self_attn"):
        layout.choose_form(family_for(qwen3), qwen3, sizes, names)


def test_values_beyond_float16_are_refused(tmp_path: Path) -> None:
    model = tiny_model("llama", vocab_size=VOCAB)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 1e5
    save_checkpoint(model, byte_level_tokenizer(), tmp_path / "model", plan=None, provenance={})
    with pytest.raises(CheckpointError, match=r"output\.weight holds values beyond 65504.*bf16 or f32"):
        export_gguf(tmp_path / "model", tmp_path / "x.gguf", quantise="q8_0")
    assert export_gguf(tmp_path / "model", tmp_path / "x.gguf", quantise="bf16").quantise == "bf16"


def test_unknown_formats_and_a_missing_package_are_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="q3_k_x"):
        export_gguf(tmp_path / "none", tmp_path / "x.gguf", quantise="q3_k_x")
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(MissingDependencyError, match=r"pyprune\[gguf\]"):
        export_gguf(tmp_path / "none", tmp_path / "x.gguf")


# --- the file ------------------------------------------------------------------------------------


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, report = CASES["equal"].write(tmp_path)
    before, made = report.path.read_bytes(), []

    def failing(planned: Any, formats: Any) -> Any:
        for values in converted(planned, formats):
            made.append(values)
            if len(made) == 5:
                raise OSError(28, "No space left on device")
            yield values

    converted = write.convert_tensors
    monkeypatch.setattr(write, "convert_tensors", failing)
    for out, overwrite in ((report.path, True), (tmp_path / "new.gguf", False)):
        made.clear()
        with pytest.raises(OutputError, match="no room on the disk"):
            export_gguf(tmp_path / "model", out, overwrite=overwrite)
    assert len(made) == 5
    assert report.path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["model", "model.gguf"]


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    part = tmp_path / ".model.gguf.work" / "part"
    part.mkdir(parents=True)
    (part.parent / ".pyprune").touch()
    (part / "model.gguf").write_bytes(b"GGUF and no more")
    _, report = CASES["equal"].write(tmp_path)
    assert read_gguf_header(report.path).blocks == 4
    assert sorted(os.listdir(tmp_path)) == ["model", "model.gguf"]


def test_only_files_of_pyprune_are_replaced(tmp_path: Path) -> None:
    _, report = CASES["equal"].write(tmp_path)
    with pytest.raises(OutputError, match="exists already"):
        export_gguf(tmp_path / "model", report.path)
    assert export_gguf(tmp_path / "model", report.path, quantise="bf16", overwrite=True).bytes < report.bytes
    (tmp_path / "other.gguf").write_bytes(b"GGUF of somebody else")
    with pytest.raises(OutputError, match="not a GGUF file that pyprune wrote"):
        export_gguf(tmp_path / "model", tmp_path / "other.gguf", overwrite=True)
    with pytest.raises(OutputError, match="inside the checkpoint that is read"):
        export_gguf(tmp_path / "model", tmp_path / "model" / "x.gguf")
    with pytest.raises(OutputError, match="is a folder"):
        export_gguf(tmp_path / "model", tmp_path)


def test_our_reader_takes_the_file_and_refuses_a_part_of_it(tmp_path: Path) -> None:
    model, report = CASES["equal"].write(tmp_path)
    assert read_gguf_header(report.path).elements == report.parameters == sum(p.numel() for p in model.parameters())
    again, _ = load_model(tmp_path, gguf_file="model.gguf")
    ids = prompts()[-1]
    assert torch.allclose(log_softmax(again, ids), log_softmax(model, ids), atol=1e-5)
    whole = report.path.read_bytes()
    for length in (len(whole) - 64, len(whole) // 2, 300):
        report.path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"could not be read as GGUF|says that it has"):
            read_gguf_header(report.path)


# --- the command ---------------------------------------------------------------------------------


def test_the_command_says_what_it_wrote(tmp_path: Path) -> None:
    CASES["no mlp"].write(tmp_path)
    result = run("export", tmp_path / "model", "--format", "gguf", "--quantise", "q8_0", "--out", tmp_path / "a.gguf")
    assert result.exit_code == 0, result.output
    assert "llama.cpp architecture deci, q8_0" in result.output
    assert "2 skipped MLPs are written as FFNs of 32 zero channels" in result.output
    assert len(read_gguf_header(tmp_path / "a.gguf").tensors) > 30


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--format", "ggml"), "Unknown file format 'ggml'"),
        (("--format", "gguf", "--quantise", "int8"), "Unknown GGUF format 'int8'"),
        (("--format", "gguf", "--target", "stock", "--dtype", "float16"), "--target, --dtype cannot be combined"),
        (("--quantise", "q8_0"), "belongs to --format gguf"),
    ],
)
def test_options_that_do_not_go_together(options: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    assert reason in " ".join(refused("export", tmp_path, "--out", tmp_path / "x", *options).split())
