"""GGUF files of types without a file of their own in a real llama.cpp, as pyprune.families.gguf_types has them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pyprune.checkpoint.save import save_checkpoint
from pyprune.cut.compact import compact_
from pyprune.families import family_for
from pyprune.families.gguf_types import FORMS, NEARLY, REFUSED
from pyprune.families.table import known_types
from pyprune.quality.perplexity import EvaluationText, cut_windows
from pyprune.serving.gguf.layout import GgufRules, open_model, planned_tensors
from pyprune.serving.gguf.perplexity import gguf_perplexity
from pyprune.serving.gguf.write import export_gguf
from tests._support.gguf_types import MEASURED, difference, gguf_model, written
from tests._support.llama_cpp import VOCAB, LlamaCpp, byte_level_tokenizer, values_of

gguf = pytest.importorskip("gguf")

QUICK = ("gpt_oss", "lfm2", "mixtral")
"""Types whose experts are stored in different orders, and one without attention in some layers."""


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.second) for name in MEASURED]
)
def test_llama_cpp_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    model, report, _ = written(name, tmp_path)
    forms = family_for(model).gguf
    assert [report.architecture] == [form.architecture for form in forms if not isinstance(forms, str)]
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


MAMBA = "linear_attention"
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.second
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}}),
        ("deepseek_v3", {"n_group": 4, "topk_group": 2, "n_routed_experts": 12, "num_local_experts": 12}),
        ("dots1", {"n_group": 4, "topk_group": 2, "n_routed_experts": 12, "num_local_experts": 12}),
        (
            "deepseek_v2",
            {"q_lora_rank": None, "num_hidden_layers": 27, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 25},
        ),
        ("granitemoehybrid", {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 46}),
        ("granitemoehybrid", {"position_embedding_type": "rope"}),
        ("nemotron_h", {"layers_block_type": [MAMBA, "full_attention", "moe", MAMBA, "moe"]}),
        ("falcon_mamba", {"mixer_rms_eps": 1e-5}),
        ("glm4_moe_lite", {"rms_norm_eps": 1e-6}),
    ],
    ids=(
        *("YaRN", "groups of experts", "groups without latents", "Lite"),
        *("without experts", "with positions", "with experts", "one epsilon", "one epsilon of GLM"),
    ),
)
def test_variants_are_exact(name: str, values: dict[str, Any], tmp_path: Path) -> None:
    model = gguf_model(name, **values)
    save_checkpoint(model, byte_level_tokenizer(), tmp_path / "model", plan=None, provenance={})
    report = export_gguf(tmp_path / "model", tmp_path / "model.gguf", quantise="f32")
    assert difference(model, report.path) < 1e-5


_SHARING = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]


@pytest.mark.second
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"enable_moe_block": True, "num_experts": 7, "top_k_experts": 2, "moe_intermediate_size": 44},
        {
            **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 2},
            **{"layer_types": _SHARING, "use_double_wide_mlp": True, "final_logit_softcapping": 20.0},
        },
    ],
    ids=("dense", "experts", "embeddings for each layer"),
)
def test_gemma4_with_sizes_by_layer_is_exact_but_for_the_table_of_gelu(values: dict[str, Any], tmp_path: Path) -> None:
    """Gates so large that GELU is the identity or zero show the rest."""
    model = gguf_model("gemma4_text", **values)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gate_proj.weight", "per_layer_input_gate.weight")):
                parameter *= 1e6
            elif name.endswith(("down_proj.weight", "per_layer_projection.weight", "down_proj")):
                parameter *= 1e-6
            elif name.endswith("gate_up_proj"):
                parameter[:, : parameter.shape[1] // 2] *= 1e6
    plan = family_for(model).plan(model.config).drop_layers([0]).keep_hidden(range(96))
    axis = "shared_ffn" if "enable_moe_block" in values else "ffn"
    plan = plan.with_layer(1, **{axis: range(40)}).with_layer(4, **{axis: range(64)})
    if "layer_types" not in values:
        plan = plan.with_layer(1, query_heads=[0, 1], kv_heads=[0])
    assert not compact_(model, plan).stock
    save_checkpoint(model, byte_level_tokenizer(), tmp_path / "model", plan=plan, provenance={})
    report = export_gguf(tmp_path / "model", tmp_path / "model.gguf", quantise="f32")
    assert difference(model, report.path) < 1e-4


def test_gemma4_whose_last_keys_are_of_other_layers_is_refused() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    model = gguf_model("gemma4_text", num_kv_shared_layers=2, layer_types=kinds)
    rules = GgufRules(model.config, [name for name, _ in model.named_parameters()])
    assert "with a window and one without" in str(rules.obstacle(family_for(model).plan(model.config)))


@pytest.mark.second
def test_long_queries_of_ministral_are_scaled(tmp_path: Path) -> None:
    """As Transformers does beyond the length that positions were trained with."""
    rope = YARN | {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1, "mscale": 1.0}
    model, report, _ = written("ministral3", tmp_path, rope_parameters=rope | {"mscale_all_dim": 0.8})
    assert difference(model, report.path) < 1e-5


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


@pytest.mark.parametrize("kept", [range(7), (0, 3, 4, 6)], ids=["dense", "cut"])
def test_experts_are_quantised_and_routers_are_not(kept: Sequence[int], tmp_path: Path) -> None:
    model = gguf_model("mixtral", num_experts_per_tok=len(kept))  # rounding cannot change which experts are chosen
    plan = family_for(model).plan(model.config)
    for layer in plan.kept_layers:
        plan = plan.with_layer(layer, experts=kept)
    assert compact_(model, plan).stock
    save_checkpoint(model, byte_level_tokenizer(), tmp_path / "model", plan=plan, provenance={})
    report = export_gguf(tmp_path / "model", tmp_path / "model.gguf", quantise="q8_0")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(report.path).tensors}
    assert {kinds[f"blk.0.ffn_{part}_exps.weight"] for part in ("gate", "up", "down")} == {"Q8_0"}
    assert kinds["blk.0.ffn_gate_inp.weight"] == "F32"
    assert values_of(report)[f"{report.architecture}.expert_count"] == len(kept)
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
        ("afmoe", {"layer_types": ["sliding_attention"] * 5}, "each fourth of its layers"),
        ("cohere", {"use_qk_norm": True}, "64 layers and more"),
        ("deepseek_v2", {"n_group": 7, "topk_group": 3}, "ranks no groups of experts"),
        ("deepseek_v2", {"q_lora_rank": None}, "models of 26 and 27 layers alone"),
        ("deepseek_v3", {"rope_parameters": YARN}, "mscale and mscale_all_dim"),
        ("deepseek_v3", {"rope_interleave": False}, "channels 2j and 2j"),
        ("ernie4_5_moe", {"moe_layer_start_index": 0, "moe_layer_interval": 2}, "dense layers are the first ones"),
        ("exaone4", {"sliding_window": 6, "sliding_window_pattern": 4}, "windows in models of 64 layers alone"),
        ("falcon_h1", {"tie_word_embeddings": True}, "a head of its own"),
        ("granitemoehybrid", {"mamba_n_groups": 2}, "normalise each of 2 groups"),
        ("mamba", {"intermediate_size": 96}, "256 channels wide"),
        ("nemotron_h", {"layers_block_type": [MAMBA, "full_attention", "mlp", "moe", MAMBA]}, "all dense or all"),
        ("qwen3_5_text", {"linear_key_head_dim": 10}, "equally wide keys and values"),
        ("gemma2", {"layer_types": ["full_attention"] * 5}, "some of its layers have a sliding window"),
        ("gemma2", {"final_logit_softcapping": None}, "limits scores and logits"),
        ("lfm2_moe", {"tie_word_embeddings": False}, "no place for lm_head"),
        ("kimi_linear", {"linear_num_heads": 2}, "heads as its attention"),
        ("llama4_text", {"moe_layers": [2, 4]}, "its mixtures are each layer number 2"),
        ("llama4_text", {"num_local_experts": 128}, "not in models of 128 experts"),
        ("llama4_text", {"no_rope_layers": [1, 1, 0, 1, 1]}, "each fourth"),
        ("llama4_text", {"attention_chunk_size": 64}, "attention_chunk_size = 8192"),
        ("minicpm3", {"scale_emb": 10}, "scale_emb = 12"),
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


@pytest.mark.second
def test_layers_of_any_kind_may_follow_each_other(tmp_path: Path) -> None:
    """As after layers were removed."""
    model = gguf_model("qwen3_next", layer_types=["full_attention", "full_attention", MAMBA, MAMBA, "full_attention"])
    save_checkpoint(model, byte_level_tokenizer(), tmp_path / "model", plan=None, provenance={})
    report = export_gguf(tmp_path / "model", tmp_path / "model.gguf", quantise="f32")
    assert difference(model, report.path) < 1e-4


def test_unequal_numbers_of_experts_are_refused() -> None:
    model = gguf_model("qwen3_moe")
    plan = family_for(model).plan(model.config).with_layer(2, experts=[0, 1, 2])
    rules = GgufRules(model.config, [name for name, _ in model.named_parameters()])
    assert "has one expert_count" in str(rules.obstacle(plan))


def test_a_type_has_a_form_or_a_reason() -> None:
    assert not {*FORMS} & {*REFUSED}
    assert {*FORMS, *NEARLY, *REFUSED} <= {*known_types()}
    assert not {*NEARLY} & {*REFUSED}


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
