"""Mixtures of experts beyond the contract of all inferred types: kinds of layers, shared experts, files and scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pyprune.checkpoint.load import load_model
from pyprune.checkpoint.record import read_pruning_json
from pyprune.cut.compact import compact_
from pyprune.cut.mask import masked
from pyprune.cut.target import choose_target
from pyprune.errors import PlanError, UnsupportedModelError
from pyprune.families import family_for
from pyprune.families.base import MIXTURE
from pyprune.families.infer import tiny_sizes
from pyprune.families.mixtures import kind_values, mlp_kinds
from pyprune.plan import DECODER
from pyprune.probe.activations import gather_moments
from pyprune.probe.experts import ExpertNorms
from pyprune.probe.routers import close_experts
from pyprune.run.prune import prune_checkpoint
from pyprune.run.recipe import build_config
from pyprune.run.streamed import NOTE
from tests._support.cli import run
from tests._support.compare import assert_same_logits
from tests._support.inferred import tiny_inferred
from tests._support.models import tiny_batch
from tests._support.text import write_model, write_text
from tests.families.test_contract import logits
from tests.families.test_inferred import check, plan_of

GROUPS = {"n_routed_experts": 8, "num_local_experts": 8, "n_group": 2, "topk_group": 1}
DATA = {"data.samples": 4, "data.sequence_length": 16}


def tensors(folder: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(folder / "model.safetensors", "pt") as stored:
        return {name: tuple(stored.get_tensor(name).shape) for name in stored.keys()}  # noqa: SIM118


@pytest.mark.parametrize(
    ("model_type", "changed", "expected"),
    [
        ("qwen3_moe", {"mlp_only_layers": [1], "decoder_sparse_step": 2}, "dddmd"),
        ("qwen3_moe", {"num_experts": 0, "num_local_experts": 0}, "ddddd"),
        ("glm4_moe", {"first_k_dense_replace": 3}, "dddmm"),
        ("exaone_moe", {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "dense"]}, "mdmmd"),
        ("ernie4_5_moe", {"moe_layer_start_index": 1, "moe_layer_end_index": 3}, "dmmmd"),
        ("ernie4_5_moe", {"moe_layer_start_index": 0, "moe_layer_interval": 2}, "dmdmd"),
        ("mixtral", {}, "mmmmm"),
    ],
)
def test_configurations_name_the_kinds_of_their_layers(model_type: str, changed: dict[str, int], expected: str) -> None:
    """As the class builds them: a mixture has a tensor of three dimensions."""
    config = AutoConfig.for_model(model_type, **{**tiny_sizes(model_type), **changed})
    kinds = mlp_kinds(config)
    assert "".join("m" if kind == MIXTURE else "d" for kind in kinds) == expected
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(config).model.layers
    assert [any(p.ndim == 3 for p in layer.parameters()) for layer in layers] == [kind == MIXTURE for kind in kinds]


@pytest.mark.parametrize(
    ("model_type", "changed", "expected"),
    [
        ("qwen3_next", {}, "l f lm fm lm"),
        ("qwen3_next", {"mlp_only_layers": [], "decoder_sparse_step": 2}, "l fm l fm l"),
        ("qwen3_next", {"num_experts": 0}, "l f l f l"),
        ("granitemoehybrid", {}, "lm fm lm fm lm"),
        ("granitemoehybrid", {"num_local_experts": 0}, "l f l f l"),
        ("nemotron_h", {"hybrid_override_pattern": "ME*-", "layers_block_type": None}, "l moem f mlp"),
    ],
)
def test_a_kind_is_what_the_mixer_and_what_the_mlp_is(model_type: str, changed: dict[str, Any], expected: str) -> None:
    config = AutoConfig.for_model(model_type, **{**tiny_sizes(model_type), **changed})
    words = {"linear_attention": "l", "full_attention": "f"}
    kinds = [kind.removesuffix("_mixture") for kind in family_for(config).layer_kinds(config)]
    ends = ["m" * kind.endswith("_mixture") for kind in family_for(config).layer_kinds(config)]
    assert " ".join(words.get(kind, kind) + end for kind, end in zip(kinds, ends, strict=True)) == expected


def test_a_kind_that_the_tiny_model_has_not_is_refused() -> None:
    config = AutoConfig.for_model("qwen3_next", **{**tiny_sizes("qwen3_next"), "layer_types": ["conv"] * 5})
    with pytest.raises(UnsupportedModelError, match=r"no layers of the kind 'conv' in 'qwen3_next' models, but only "):
        family_for(config).sizes(config)


def test_kinds_that_share_a_field_have_one_width_in_a_stock_architecture() -> None:
    model = tiny_inferred("lfm2_moe")
    plan = family_for(model).plan(model.config)
    for layer in (2, 4):  # convolutions with experts; those of layer 3, with attention, stay wider
        plan = plan.with_layer(layer, ffn=range(40))
    expected = ("lfm2_moe: widths differ between layers or a sub-block is skipped",)
    assert compact_(model, plan).reasons == expected
    model = tiny_inferred("lfm2_moe")
    assert compact_(model, plan.with_layer(3, ffn=range(4, 44))).stock


def test_kinds_that_follow_from_indices_are_stored() -> None:
    """Jamba's kinds are periods of its configuration: a removed layer would change those of all after it."""
    model = tiny_inferred("jamba")
    plan, words = family_for(model).plan(model.config), model.config.layers_block_type
    report = compact_(model, plan.drop_layers([1]))
    assert report.reasons == ("jamba: its kinds of layers follow from their indices",)
    assert model.config.layers_block_type == model.config.stored_layers_block_type == [words[0], *words[2:]]
    model = tiny_inferred("jamba")
    assert compact_(model, plan.drop_layers([4])).stock
    assert model.config.layers_block_type == words[:4]


def test_heads_of_blocks_that_are_kept_whole_follow_no_other() -> None:
    model = tiny_inferred("minimax_m3_vl_text")
    plan = family_for(model).plan(model.config)
    for layer in (0, 2, 4):
        plan = plan.with_layer(layer, query_heads=range(4), kv_heads=range(2))
    expected = ("minimax_m3_vl_text: blocks that are kept whole have as many heads as the attention",)
    assert compact_(model, plan).reasons == expected


def test_kinds_that_no_configuration_names_are_refused() -> None:
    config = tiny_inferred("glm4_moe").config
    assert kind_values(config, [DECODER, MIXTURE]) == {"first_k_dense_replace": 1}
    with pytest.raises(PlanError, match=r"has dense layers at \[1\] of 2 and mixtures"):
        kind_values(config, [MIXTURE, DECODER])


def test_a_dropped_dense_layer_moves_the_first_mixture() -> None:
    model = tiny_inferred("qwen3_moe")
    assert model.config.mlp_only_layers == [1]
    plan = family_for(model).plan(model.config)
    compact_(model, plan.drop_layers([0]))
    assert model.config.mlp_only_layers == [0]
    model = tiny_inferred("qwen3_moe")
    compact_(model, plan.drop_layers([1, 3]))
    assert model.config.mlp_only_layers == []


def test_shared_experts_become_stock_where_they_are_as_wide_as_a_number_of_experts() -> None:
    dense = tiny_inferred("glm4_moe")
    plan = family_for(dense).plan(dense.config)
    for layer in (2, 3, 4):
        plan = plan.with_layer(layer, ffn=range(4, 40), shared_ffn=range(3 * 36))
    assert compact_(dense, plan).stock
    assert dense.config.moe_intermediate_size == 36
    dense = tiny_inferred("glm4_moe")
    report = compact_(dense, plan.with_layer(2, shared_ffn=range(3 * 36 - 1)))
    assert report.reasons == ("glm4_moe: widths differ between layers or a sub-block is skipped",)
    dense = tiny_inferred("glm4_moe")
    for layer in (2, 3, 4):
        plan = plan.with_layer(layer, shared_ffn=range(20))
    assert compact_(dense, plan).reasons == ("glm4_moe: its shared experts are as wide as a number of experts",)


def test_experts_whose_rows_no_kernel_reads_run_in_a_loop(tmp_path: Path) -> None:
    """Transformers' default kernel reads rows of a multiple of 16 bytes."""
    model = tiny_inferred("mixtral")
    plan = family_for(model).plan(model.config)
    for layer in range(5):
        plan = plan.with_layer(layer, ffn=range(37))
    report = compact_(model, plan)
    assert report.reasons == ("mixtral: its experts need widths that are a multiple of 4, not 37",)
    expected = logits(model, tiny_batch())
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config._experts_implementation == "eager"
    assert_same_logits(logits(loaded, tiny_batch()), expected)


def test_files_of_a_stock_architecture_have_the_form_of_the_hub(tmp_path: Path) -> None:
    model = tiny_inferred("qwen3_moe")
    plan = family_for(model).plan(model.config)
    for layer in (0, 2, 3, 4):
        plan = plan.with_layer(layer, ffn=range(8, 40))
    assert compact_(model, plan).stock
    model.save_pretrained(tmp_path)
    shapes = tensors(tmp_path)
    assert shapes["model.layers.0.mlp.experts.6.down_proj.weight"] == (64, 32)
    assert not any("gate_up_proj" in name for name in shapes)


EXPERTS = {
    "normalised": ("qwen3_moe", {"norm_topk_prob": True}),
    "not normalised": ("qwen3_moe", {"norm_topk_prob": False}),
    "softmax of those chosen, with biases": ("gpt_oss", {}),
    "sigmoid with a correction": ("deepseek_v3", {}),
    "groups": ("glm4_moe", GROUPS),
}
"""What a router makes of its logits -> (type, values of its configuration)."""


@pytest.mark.parametrize("axis", ["experts", "unequal"])
@pytest.mark.parametrize("router", EXPERTS)
def test_removed_experts_are_never_chosen(router: str, axis: str, tmp_path: Path) -> None:
    model_type, values = EXPERTS[router]
    model = tiny_inferred(model_type, **values)
    if router == "groups":
        plan = family_for(model).plan(model.config)
        for layer in (2, 3, 4) if axis == "experts" else (3,):
            plan = plan.with_layer(layer, experts=[0, 3, 5, 6])
    else:
        plan = plan_of(model, axis)
    before = logits(model, tiny_batch())
    with masked(model, plan):
        assert not torch.allclose(logits(model, tiny_batch()), before, atol=1e-3)
    assert torch.equal(logits(model, tiny_batch()), before)  # also the buffers are back, and the routers open
    check(model, plan, tmp_path)
    assert model.config.model_type == (model_type if axis == "experts" else f"pruned_{model_type}")


def test_a_stock_configuration_counts_the_experts_that_are_kept(tmp_path: Path) -> None:
    for model_type, name in (("ernie4_5_moe", "moe_num_experts"), ("solar_open", "n_routed_experts")):
        model = tiny_inferred(model_type)
        compact_(model, plan_of(model, "experts"))
        model.save_pretrained(tmp_path / model_type)
        assert json.loads((tmp_path / model_type / "config.json").read_text())[name] == 4
    model = tiny_inferred("mixtral")
    compact_(model, plan_of(model, "unequal"))
    counts = [config.num_local_experts for config in model.config.per_layer_config]
    assert counts == [2, 6, 3, 7, 7]
    assert [len(layer.mlp.experts.down_proj) for layer in model.model.layers] == counts


def test_the_command_says_that_experts_are_open(tmp_path: Path) -> None:
    rows = json.loads(run("families", write_model(tiny_inferred("mixtral"), tmp_path), "--json", "-").output)
    assert {row[""]: row["value"] for row in rows[str(tmp_path)]}["axis experts"] == "open"


def test_as_many_experts_stay_as_a_token_reads() -> None:
    model = tiny_inferred("mixtral")
    plan = family_for(model).plan(model.config).with_layer(1, experts=[3])
    with pytest.raises(PlanError, match=r"keeps 1 experts of layer 1, and each token .* reads 2. Keep 2 to 7 experts"):
        compact_(model, plan)
    assert compact_(model, plan.with_layer(1, experts=[3, 4])).reasons


@pytest.mark.parametrize(("experts", "numbers"), [([0, 1, 2, 4], "3, 1"), ([0, 4], "1, 1"), ([4, 5, 6], "0, 3")])
def test_groups_of_experts_stay_alike(experts: list[int], numbers: str) -> None:
    model = tiny_inferred("glm4_moe", **GROUPS)
    plan = family_for(model).plan(model.config).with_layer(3, experts=experts)
    with pytest.raises(PlanError, match=f"which are {numbers} of its 2 groups. Keep equally many .* and at least 2"):
        compact_(model, plan)


def test_a_router_without_a_product_is_not_passed_over() -> None:
    norm = torch.nn.LayerNorm(7)
    close_experts(norm, [2], 7)
    with pytest.raises(UnsupportedModelError, match="LayerNorm multiplies its input with no matrix of 7 experts"):
        norm(torch.ones(3, 7))
    close_experts(norm, [], 7)
    norm(torch.ones(3, 7))
    linear = torch.nn.Linear(4, 7)
    close_experts(linear, [2], 7)
    assert linear(torch.ones(3, 4)).isinf().sum(0).tolist() == [0, 0, 3, 0, 0, 0, 0]
    with pytest.raises(RuntimeError):
        linear(torch.ones(3, 5))
    assert torch.nn.functional.linear(torch.ones(3, 4), linear.weight).isfinite().all()  # closed only inside the router


def prune(model: PreTrainedModel, tmp_path: Path, *, preset: str, **options: object) -> tuple[str, ...]:
    folder, text = tmp_path / "dense", tmp_path / "text.txt"
    if not folder.exists():
        write_model(model, folder)
    data = {"data.source": str(write_text(text)), **DATA}
    config = build_config(preset=preset, options={**data, **options})
    return prune_checkpoint(folder, config, out=tmp_path / preset).notes


@pytest.mark.parametrize("model_type", ["qwen3_moe", "glm4_moe", "deepseek_v3", "qwen3_next"])
def test_a_run_cuts_a_mixture_writes_it_and_its_record(model_type: str, tmp_path: Path) -> None:
    """It is streamed, and all writers are solved."""
    notes = " ".join(prune(tiny_inferred(model_type), tmp_path, preset="wanda", ratio=0.2))
    assert NOTE in notes
    assert "experts of" not in notes  # all were solved
    model, _ = load_model(tmp_path / "wanda")  # which compares the files with the record
    assert torch.isfinite(logits(model, tiny_batch())).all()


@pytest.mark.parametrize("preset", ["flap", "obs", "modegpt", "loraprune", "laco"])
def test_methods_that_read_linear_modules_are_refused(preset: str, tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"reads linear modules, and the experts of 'mixtral' models are none"
    ):
        prune(tiny_inferred("mixtral"), tmp_path, preset=preset)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "aria_text"])
def test_norms_of_experts_are_those_of_the_tokens_routed_to_them(model_type: str) -> None:
    """Against the inputs of all products in Transformers' own loop over the experts; Aria's matrices are transposed."""
    model, ids = tiny_inferred(model_type), tiny_batch()
    model.set_experts_implementation("eager")
    name = "model.layers.2.mlp.experts"
    module, norms = model.get_submodule(name), ExpertNorms()
    gather_moments(model, ids, others={name: norms})
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Products(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func in (torch.nn.functional.linear, torch.Tensor.__matmul__, torch.Tensor.matmul):
                seen.append((args[0], args[1]))
            return func(*args, **(kwargs or {}))

    def run(*args: torch.Tensor, **kwargs: object) -> torch.Tensor:
        with Products():
            return type(module).forward(module, *args, **kwargs)

    module.forward = run
    logits(model, ids)
    checked = 0
    for parameter, sums in ((module.gate_up_proj, norms.hidden), (module.down_proj, norms.inner)):
        for expert, weight in enumerate(parameter):
            inputs = [x for x, other in seen if other.shape == weight.shape and torch.equal(other, weight)]
            expected = sum(x.double().square().sum(0) for x in inputs)
            torch.testing.assert_close(sums[expert], torch.as_tensor(expected).double().expand_as(sums[expert]))
            checked += len(inputs)
    assert checked > 4
    assert norms.tokens.sum() == 2 * ids.numel()


def test_dense_layers_and_mixtures_lose_the_same_share(tmp_path: Path) -> None:
    """What the last step of the mixtures leaves of the goal does not go to the one dense layer."""
    prune(tiny_inferred("qwen3_moe"), tmp_path, preset="wanda", ratio=0.2, **{"score.ffn_multiple": 4})
    plan = read_pruning_json(tmp_path / "wanda").plan
    assert plan is not None
    assert [len(layer.ffn) for layer in plan.layers] == [32] * 5


def test_heads_that_differ_between_kinds_need_the_pruned_architecture() -> None:
    """Dense layers and mixtures have one field for their heads; a stock configuration has one value for it."""
    model = tiny_inferred("qwen3_moe")
    family = family_for(model)
    plan = family.plan(model.config)
    dense = next(layer.index for layer in plan.layers if layer.kind == DECODER)
    narrow = plan.with_layer(dense, query_heads=[0, 1, 2, 3], kv_heads=[0, 1])
    assert not choose_target(family, model.config, narrow).stock
    ffn = plan.with_layer(dense, ffn=range(40))  # its width has a field of its own
    assert choose_target(family, model.config, ffn).stock
