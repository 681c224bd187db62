"""GGUF files of types without a file of their own in a real llama.cpp, as pyprune.families.gguf_types has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pyprune.checkpoint.save import save_checkpoint
from pyprune.families import all_families, family_for
from pyprune.families.gguf_types import FORMS, NEARLY, REFUSED
from pyprune.families.table import known_types
from pyprune.quality.perplexity import EvaluationText, cut_windows
from pyprune.serving.gguf.layout import GgufRules, open_model, planned_tensors
from pyprune.serving.gguf.perplexity import gguf_perplexity
from pyprune.serving.gguf.write import export_gguf
from tests._support.gguf_types import difference, gguf_model, written
from tests._support.llama_cpp import LlamaCpp, byte_level_tokenizer, values_of

gguf = pytest.importorskip("gguf")

INFERRED = sorted({*FORMS} - {*all_families()})
QUICK = ("gpt_oss", "mixtral")
"""Types whose experts are stored in different orders."""


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.second) for name in INFERRED]
)
def test_llama_cpp_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    model, report, _ = written(name, tmp_path)
    assert report.architecture == FORMS[name].architecture
    assert difference(model, report.path) < (5e-3 if name in NEARLY else 1e-5)


@pytest.mark.parametrize(
    "name",
    ["gpt_oss", *(pytest.param(n, marks=pytest.mark.second) for n in ("cohere2", "exaone_moe", "gemma2", "olmo3"))],
)
def test_any_layers_may_have_a_window(name: str, tmp_path: Path) -> None:
    """As after layers were removed; prompts are longer than the window."""
    kinds = ["full_attention" if slides == "f" else "sliding_attention" for slides in "fssfs"]
    model = gguf_model(name, layer_types=kinds, sliding_window=6)
    save_checkpoint(model, byte_level_tokenizer(), tmp_path / "model", plan=None, provenance={})
    report = export_gguf(tmp_path / "model", tmp_path / "model.gguf", quantise="f32")
    assert difference(model, report.path) < (5e-3 if name in NEARLY else 1e-5)


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("name", "rope"),
    [("gpt_oss", YARN), pytest.param("qwen3_moe", YARN | {"attention_factor": 1.3}, marks=pytest.mark.second)],
)
def test_positions_scaled_by_yarn_are_exact(name: str, rope: dict[str, Any], tmp_path: Path) -> None:
    model, report, _ = written(name, tmp_path, rope_parameters=rope)
    assert report.notes == ()
    assert difference(model, report.path) < 1e-5


def test_bounds_of_yarn_that_llama_cpp_rounds_are_reported(tmp_path: Path) -> None:
    """The published GPT-OSS has such bounds."""
    model, report, _ = written("gpt_oss", tmp_path, rope_parameters=YARN | {"truncate": False})
    assert "llama.cpp rounds the bounds" in " ".join(report.notes)
    assert 1e-4 < difference(model, report.path) < 0.05


def test_experts_are_quantised_and_routers_are_not(tmp_path: Path) -> None:
    model = gguf_model("mixtral", num_experts_per_tok=7)  # rounding cannot change which experts are chosen
    save_checkpoint(model, byte_level_tokenizer(), tmp_path / "model", plan=None, provenance={})
    report = export_gguf(tmp_path / "model", tmp_path / "model.gguf", quantise="q8_0")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(report.path).tensors}
    assert {kinds[f"blk.0.ffn_{part}_exps.weight"] for part in ("gate", "up", "down")} == {"Q8_0"}
    assert kinds["blk.0.ffn_gate_inp.weight"] == "F32"
    assert 1e-5 < difference(model, report.path) < 0.3


def test_experts_are_read_one_by_one_from_the_files_of_the_hub(tmp_path: Path) -> None:
    model = gguf_model("dots1")
    save_checkpoint(model, byte_level_tokenizer(), tmp_path / "model", plan=None, provenance={})
    tensors = {tensor.name: tensor for tensor in planned_tensors(open_model(tmp_path / "model"))}
    experts, gate = model.model.layers[4].mlp.experts, model.model.layers[4].mlp.gate
    assert tensors["blk.4.ffn_up_exps.weight"].shape == (7, 44, 128)
    assert (tensors["blk.4.ffn_up_exps.weight"].make() == experts.gate_up_proj[:, 44:].detach().numpy()).all()
    assert (tensors["blk.4.exp_probs_b.bias"].make() == gate.e_score_correction_bias.numpy()).all()


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("cohere", {"use_qk_norm": True}, "64 layers and more"),
        ("dots1", {"n_group": 7, "topk_group": 2}, "no groups of experts"),
        ("ernie4_5_moe", {"moe_layer_start_index": 0, "moe_layer_interval": 2}, "dense layers are the first ones"),
        ("exaone4", {"sliding_window": 6, "sliding_window_pattern": 4}, "windows in models of 64 layers alone"),
        ("gemma2", {"layer_types": ["full_attention"] * 5}, "some of its layers have a sliding window"),
        ("gemma2", {"final_logit_softcapping": None}, "limits scores and logits"),
        ("mixtral", {"attention_bias": True, "hidden_act": "gelu"}, "uses silu, the model's gelu"),
        ("olmoe", {"num_key_value_heads": 2}, "query heads has a key and a value"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob = True"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "no place for model.layers.{i}.mlp.gate_proj"),
        ("smollm3", {"no_rope_layers": [1, 1, 0, 1, 1]}, "each fourth"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_an_architecture_cannot_hold_is_refused_with_the_reason(
    name: str, values: dict[str, Any], reason: str
) -> None:
    model = gguf_model(name, **values)
    rules = GgufRules(model.config, [name for name, _ in model.named_parameters()])
    assert reason in str(rules.obstacle(family_for(model).plan(model.config)))


def test_unequal_numbers_of_experts_are_refused() -> None:
    model = gguf_model("qwen3_moe")
    plan = family_for(model).plan(model.config).with_layer(2, experts=[0, 1, 2])
    rules = GgufRules(model.config, [name for name, _ in model.named_parameters()])
    assert "sizes differ between layers" in str(rules.obstacle(plan))


def test_a_type_has_a_form_or_a_reason() -> None:
    assert not {*FORMS} & {*REFUSED}
    assert {*FORMS, *NEARLY, *REFUSED} <= {*known_types()}


def test_windows_of_gemma_begin_with_its_first_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, report, _ = written("gemma", tmp_path)
    asked: list[Any] = []

    def cut(*args: Any) -> torch.Tensor:
        asked.append(args[-1])
        return cut_windows(*args)

    monkeypatch.setattr("pyprune.serving.gguf.perplexity.cut_windows", cut)
    text = EvaluationText("random", torch.arange(3, 35), "0")
    gguf_perplexity(report.path, text, "ppl-128", window=16)
    assert asked == [values_of(report)["tokenizer.ggml.bos_token_id"]]


def test_greedy_tokens_follow_from_an_exported_mixture(tmp_path: Path) -> None:
    model, report, axes = written("mixtral", tmp_path)
    assert axes == ("layers", "hidden", "heads", "ffn", "experts")
    with LlamaCpp(report.path) as server:
        tokens, ends = server.greedy([5, 9, 30], 4)
    ids = torch.tensor([[5, 9, 30]])
    for _ in range(4):
        with torch.no_grad():
            logits = model(ids).logits[0, -1]
        logits[ends] = -torch.inf
        ids = torch.cat([ids, logits.argmax()[None, None]], 1)
    assert ids[0, 3:].tolist() == tokens
