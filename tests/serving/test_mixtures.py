"""Mixtures of experts: what ranks can share and vLLM builds, found in config.json before an engine is started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyprune.cut.compact import compact_
from pyprune.errors import CheckpointError, ConfigError
from pyprune.families import family_for, serving_obstacle
from pyprune.families.engines import EXPERT_FOR_EACH_RANK, MIXTURES, STOCK
from pyprune.fit.fit import check_counted
from pyprune.fit.options import FitOptions
from pyprune.plan import PrunePlan
from pyprune.serving.export import export
from pyprune.serving.vllm.command import serve_command
from pyprune.serving.vllm.limits import serving_warnings
from pyprune.serving.vllm.options import given_options
from pyprune.serving.widths import experts_obstacle, layer_experts, layer_widths, sharing_obstacle
from tests._support.cli import run
from tests._support.stock import served_model
from tests._support.tokenizer import tiny_tokenizer

KEPT = {1: [0, 3, 5, 6], 2: [1, 2, 4], 3: range(6), 4: [0, 6]}


def fewer(plan: PrunePlan) -> PrunePlan:
    """Another number of experts in each mixture, whose experts are narrower in one layer."""
    for layer in plan.kept_layers:
        if plan.dense.units("experts", layer):
            plan = plan.with_layer(layer, experts=KEPT.get(layer, range(5)))
    return plan.with_layer(4, ffn=range(36))


def cut(name: str, change: Callable[[PrunePlan], PrunePlan] = fewer) -> tuple[Any, PrunePlan]:
    """A tiny compacted model of a type and its plan."""
    model = served_model(name)
    plan = change(family_for(model).plan(model.config))
    compact_(model, plan)
    return model, plan


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "glm4_moe", "ernie4_5_moe"])
def test_sizes_in_config_json_are_those_of_the_plan(name: str) -> None:
    model, plan = cut(name)
    config = model.config.to_dict()
    assert layer_widths(config) == [layer.widths for layer in plan.layers]
    assert layer_experts(config) == [len(layer.units("experts")) for layer in plan.layers]
    assert len({*layer_experts(config)}) > 2


@pytest.mark.parametrize("damage", [{"decoder_sparse_step": 0}, {"mlp_only_layers": 3}, {"num_hidden_layers": None}])
def test_a_file_that_does_not_say_which_layers_are_mixtures_has_no_widths(damage: dict[str, Any]) -> None:
    config = served_model("qwen3_moe").config.to_dict() | damage
    assert layer_widths(config) == layer_experts(config) == []


@pytest.mark.parametrize(
    ("experts", "ranks", "reason"),
    [
        ([0, 4, 3, 6], 4, "layer 2 has 3 experts, and vLLM needs one for each of 4 ranks (allowed: 4 and more)."),
        ([2, 4, 2], 8, "layers 0,2 have 2 experts, and vLLM needs one for each of 8 ranks"),
        ([2, 4, 2], 3, "Use at most 2 ranks, or keep more experts there."),
        ([0, 4, 3, 6], 3, None),
        ([0, 0], 8, None),
        ([2, 3], 0, None),
        ([], 2, None),
    ],
)
def test_each_rank_needs_an_expert_of_every_layer(experts: list[int], ranks: int, reason: str | None) -> None:
    found = experts_obstacle(experts, ranks)
    assert reason in str(found) if reason else found is None


def test_the_width_of_experts_is_shared_by_ranks_unless_they_have_whole_experts() -> None:
    model, _ = cut("mixtral", lambda plan: plan.with_layer(2, ffn=range(15)).with_layer(3, experts=[0, 1, 2]))
    config = model.config.to_dict()
    assert "layer 2 has 15 FFN channels, which 2 tensor parallel ranks" in str(sharing_obstacle(config, 2))
    assert sharing_obstacle(config, 2, 2) is None
    assert "layer 3 has 3 experts, and vLLM needs one for each of 4 ranks" in str(sharing_obstacle(config, 2, 4))
    assert "3 to 7 experts" in str(sharing_obstacle(config, 2, 2, balanced=True))
    equal, _ = cut("mixtral", lambda plan: plan.with_layer(2, ffn=range(16)))
    assert sharing_obstacle(equal.config.to_dict(), 2, 2, balanced=True) is None


def test_types_whose_class_wants_an_expert_for_each_rank_are_refused_without_expert_parallelism_too() -> None:
    for name, reason in (("qwen3_moe", "has 2 experts, and vLLM needs one for each of 4 ranks"), ("mixtral", None)):
        model = served_model(name)
        plan = family_for(model).plan(model.config).with_layer(2, experts=[0, 1])
        compact_(model, plan)
        found = sharing_obstacle(model.config.to_dict(), 4)
        assert reason in str(found) if reason else found is None
    assert {"qwen2_moe", "qwen3_moe"} <= EXPERT_FOR_EACH_RANK


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("-tp 2", 0),
        ("-tp 2 --enable-expert-parallel", 2),
        ("-tp 2 -dp 3 -ep", 6),
        ("-ep --no-enable-expert-parallel", 0),
    ],
)
def test_the_ranks_of_whole_experts_are_read_from_the_options_of_vllm(words: str, ranks: int) -> None:
    assert given_options(words.split()).expert_ranks == ranks


REFUSED: dict[str, tuple[str, Callable[[PrunePlan], PrunePlan], str]] = {
    "skipped": ("qwen3_moe", lambda plan: plan.with_layer(3, query_heads=[], kv_heads=[]), "layer 3 has lost its att"),
    "heads": (
        "qwen2_moe",
        lambda plan: plan.with_layer(2, query_heads=[0, 1], kv_heads=[0]),
        "layer 2 of this 'qwen2_moe' model as Transformers does: vLLM derives the head size",
    ),
    "window": ("gpt_oss", lambda plan: plan.drop_layers([0]), "sliding window in layers 0, 2, 4"),
    "untested": ("dots1", lambda plan: plan, "the vLLM plugin does not serve it"),
}
"""What vLLM does not carry of a pruned mixture: type, a further cut, part of the reason."""


@pytest.mark.parametrize("case", REFUSED)
def test_what_vllm_cannot_build_is_refused_with_the_reason(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, change, reason = REFUSED[case]
    model, plan = cut(name, lambda plan: change(fewer(plan)))
    written = export(model, tmp_path / "out", plan=plan, tokenizer=tiny_tokenizer())
    assert any(reason in warning for warning in written.warnings), written.warnings
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_installed", lambda: True)
    with pytest.raises(CheckpointError, match=reason.replace("'", ".").replace("(", ".")):
        serve_command(tmp_path / "out")


def test_biases_of_a_compensation_have_no_place_in_layers_that_vllm_builds() -> None:
    config = {"model_type": "pruned_mixtral", "num_hidden_layers": 2}
    assert serving_obstacle(config) is None
    assert "cut.reconstruct=bias" in str(serving_obstacle(config | {"output_bias": True}))
    assert "divide by the stored hidden size" in str(serving_obstacle(config | {"norm_size": 64}))


def test_a_served_mixture_is_exported_without_a_warning_of_its_sizes(tmp_path: Path) -> None:
    model, _ = cut("mixtral", lambda plan: plan.with_layer(2, experts=[0, 3]).with_layer(3, ffn=range(40)))
    warnings = serving_warnings(model.config.to_dict())
    assert not any("serve" in warning for warning in warnings), warnings
    assert {*MIXTURES} <= STOCK


def test_inspect_shows_the_numbers_of_experts(tmp_path: Path) -> None:
    model, plan = cut("qwen3_moe")
    export(model, tmp_path / "out", plan=plan, tokenizer=tiny_tokenizer())
    done = run("inspect", tmp_path / "out", "--json", tmp_path / "facts.json")
    assert done.exit_code == 0, done.output
    rows = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in done.stdout.splitlines() if "|" in line}
    assert rows["experts"] == "2-6"
    assert rows["moe_intermediate_size"] == "36-44"
    assert '"experts": 3' in (tmp_path / "facts.json").read_text()


@pytest.mark.parametrize("name", ["w8a8-int8", "w4a16"])
def test_rounding_that_does_not_reach_experts_is_refused(name: str, tmp_path: Path) -> None:
    """Without this, the experts would stay as they are in files whose config.json calls them rounded."""
    model, plan = cut("mixtral", lambda plan: plan.with_layer(2, experts=[0, 3]))
    with pytest.raises(ConfigError, match=r"keep their dtype.*Write a GGUF file"):
        export(model, tmp_path / "out", plan=plan, tokenizer=tiny_tokenizer(), quantise=name)
    with pytest.raises(ConfigError, match=f"--weights is {name}"):
        check_counted(served_model("mixtral").config, name, budgets=[], options=FitOptions())


def test_llama_cpp_refuses_unequal_numbers_and_names_the_options_that_give_equal_ones(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    model, plan = cut("mixtral")
    export(model, tmp_path / "out", plan=plan, tokenizer=tiny_tokenizer())
    done = run("export", tmp_path / "out", "--out", tmp_path / "model.gguf", "--format", "gguf")
    assert done.exit_code != 0
    assert "its layers have 2 or 3 or 4 or 5 or 6 experts, and a file of llama.cpp has one expert_count" in done.output
    assert "METHOD.ranking=local" in done.output
