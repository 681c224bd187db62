"""Checkpoints in the form of the hub: read, cut from file to file or in memory, and written with the names they had."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from pyprune.checkpoint.load import ModelSource, load_model
from pyprune.checkpoint.record import read_pruning_json
from pyprune.checkpoint.stored import StoredModel
from pyprune.cut.mask import masked
from pyprune.cut.target import choose_target
from pyprune.errors import CheckpointError, PlanError
from pyprune.families import check_plan, family_for
from pyprune.families.infer import causal_types
from pyprune.families.mixtures import TINY_EXPERT_FFN
from pyprune.modeling import pruned_config_class
from pyprune.plan import PrunePlan
from pyprune.run import prune as pipeline
from pyprune.run.cut_on_disk import compact_checkpoint
from pyprune.run.recipe import build_config
from pyprune.run.streamed import NOTE
from tests._support.compare import FLOAT32_ROUNDING, assert_same_logits
from tests._support.inferred import CLOSED, INFERRED, closed_by, tiny_inferred
from tests._support.models import tiny_batch, tiny_model
from tests._support.plans import axis_plans, with_shared
from tests._support.text import write_model, write_text
from tests.families.test_contract import logits
from tests.families.test_towers import prune_by, write_tower
from tests.run.test_streamed import assert_same_folder, both_ways

PREFIXED = ("qwen3_5_moe_text", "qwen3_5_text")
"""Types whose files name the text part of a larger model."""
IN_MEMORY = ("gpt_oss", "granitemoe_swa", "llama4_text", "minimax_m3_vl_text")
"""Mixtures whose files hold the experts of a layer in one tensor, as the model does."""


def has_table(model_type: str) -> bool:
    """Whether files of the type hold other tensors than the model, by Transformers."""
    name = causal_types()[model_type][1]
    return bool(get_checkpoint_conversion_mapping(name) or get_checkpoint_conversion_mapping(model_type))


CONVERTED = ("gpt_neox", *(name for name in INFERRED if has_table(name)), *IN_MEMORY)
FIRST = ("gpt_neox", "mixtral", "glm4_moe")
"""A renamed head; experts one by one; buffers."""
BOTH_TIERS = [pytest.param(name, marks=() if name in FIRST else pytest.mark.second) for name in CONVERTED]


def tiny(model_type: str) -> PreTrainedModel:
    return tiny_model(model_type) if model_type == "gpt_neox" else tiny_inferred(model_type)


def prefixed(model_type: str, name: str) -> str:
    return re.sub(r"^model\.", "model.language_model.", name) if model_type in PREFIXED else name


def rename(folder: Path, new_name: Any) -> None:
    path = folder / "model.safetensors"
    save_file({new_name(name): tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})


def on_the_hub(model: PreTrainedModel, folder: Path) -> Path:
    """Write a model through Transformers' tables."""
    write_model(model, folder)
    rename(folder, lambda name: prefixed(model.config.model_type, name))
    return folder


def uniform_plan(model: PreTrainedModel) -> PrunePlan:
    """A plan whose result is a stock model: the first that its type takes, of layers, channels and experts."""
    family = family_for(model)
    whole = family.plan(model.config)
    narrow = whole
    for i in (i for i in range(whole.dense.num_layers) if whole.dense.units("ffn", i)):
        shared = whole.dense.units("shared_ffn", i) // TINY_EXPERT_FFN * 32  # as many experts as before, or none
        narrow = with_shared(narrow.with_layer(i, ffn=range(8, 40)), i, range(shared or 40))
        if whole.dense.units("experts", i):
            narrow = narrow.with_layer(i, experts=(1, 2, 4, 6))
    last = whole.dense.num_layers - 1
    plans = [plan.drop_layers([last]).keep_hidden(range(8, 48)) for plan in (narrow, whole)]
    plans += [plan.drop_layers([last]) for plan in (narrow, whole)] + [narrow]
    for plan in plans:
        try:
            check_plan(plan, family, model.config)
            if choose_target(family, model.config, plan).stock:
                return plan
        except PlanError:
            pass
    raise AssertionError("No plan leaves a stock model.")


def stored_shapes(folder: Path, model_type: str) -> dict[str, tuple[int, ...]]:
    """The tensors in files of the model of a folder's configuration, by Transformers' tables."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    tensors = revert_weight_conversion(model, dict(model.state_dict()))
    return {prefixed(model_type, name): tuple(tensor.shape) for name, tensor in tensors.items()}


def cut_both_ways(dense: Path, plan: PrunePlan, out: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prune by a plan, streamed and in memory; the files must be the same. Returns the folder."""
    (out / "plan.json").write_text(plan.to_json())
    config = build_config(options={"plan": str(out / "plan.json")})
    assert NOTE in pipeline.prune_checkpoint(dense, config, out=out / "streamed").notes
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "loading_reason", lambda *_, **__: "In memory.")
        assert NOTE not in pipeline.prune_checkpoint(dense, config, out=out / "loaded").notes
    streamed, loaded = (load_file(out / name / "model.safetensors") for name in ("streamed", "loaded"))
    assert streamed.keys() == loaded.keys()
    for name, tensor in streamed.items():
        assert tensor.dtype == loaded[name].dtype, name
        assert torch.equal(tensor, loaded[name]), name
    return out / "streamed"


@pytest.mark.parametrize("model_type", BOTH_TIERS)
def test_what_has_the_form_of_the_hub_keeps_it(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names and shapes are those of Transformers' tables, and the stock class answers as the masked model."""
    model = tiny(model_type)
    dense, plan = on_the_hub(model, tmp_path / "dense"), uniform_plan(model)
    out = cut_both_ways(dense, plan, tmp_path, monkeypatch)
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(out / "model.safetensors").items()}
    assert shapes == stored_shapes(out, model_type)
    if model_type == "mixtral":
        assert "model.layers.3.block_sparse_moe.experts.3.w2.weight" in shapes
        assert "model.layers.3.block_sparse_moe.experts.4.w2.weight" not in shapes
    stock = AutoModelForCausalLM.from_pretrained(out).eval()
    assert type(stock) is type(model)
    assert_answers_as_masked(stock, model, plan)


def assert_answers_as_masked(cut: PreTrainedModel, dense: PreTrainedModel, plan: PrunePlan) -> None:
    with masked(dense, plan):
        expected = logits(dense, tiny_batch())
    tolerance = 1e-4 if dense.config.model_type in CLOSED else FLOAT32_ROUNDING
    assert_same_logits(logits(cut, tiny_batch()), expected, tolerance)


@pytest.mark.parametrize("model_type", BOTH_TIERS)
def test_sizes_by_layer_have_the_form_of_the_hub(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain Transformers reads them after `import pyprune.modeling`, and writes them alike."""
    model = tiny(model_type)
    plan = family_for(model).plan(model.config)
    plan = plan.with_layer(4, ffn=range(7)) if closed_by(model, "unequal") else axis_plans(plan)["unequal"]
    dense = on_the_hub(model, tmp_path / "dense")
    out = cut_both_ways(dense, plan, tmp_path, monkeypatch)
    names = load_file(out / "model.safetensors").keys()
    assert names == stored_shapes(out, model_type).keys()
    assert names <= load_file(dense / "model.safetensors").keys()  # without the last experts of some layers
    pruned = AutoModelForCausalLM.from_pretrained(out).eval()
    assert isinstance(pruned.config, pruned_config_class(model_type))
    assert_answers_as_masked(pruned, model, plan)
    pruned.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == names


@pytest.mark.second
def test_names_that_no_table_gives_back_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense layers of Kimi Linear are called mlp on the hub; Transformers writes the name of its mixtures."""
    model = tiny("kimi_linear")
    dense = on_the_hub(model, tmp_path / "dense")
    rename(dense, lambda name: re.sub(r"(layers\.[01])\.block_sparse_moe\.", r"\1.mlp.", name))
    assert "model.layers.1.mlp.up_proj.weight" in load_file(dense / "model.safetensors")
    out = cut_both_ways(dense, family_for(model).plan(model.config).drop_layers([0]), tmp_path, monkeypatch)
    names = load_file(out / "model.safetensors").keys()
    assert "model.layers.0.mlp.up_proj.weight" in names
    assert "model.layers.1.block_sparse_moe.experts.6.w1.weight" in names


@pytest.mark.second
def test_files_in_the_form_of_memory_keep_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those that earlier releases wrote of models with sizes per layer."""
    model = tiny("mixtral")
    plan = axis_plans(family_for(model).plan(model.config))["unequal"]
    dense = on_the_hub(model, tmp_path / "dense")
    model.save_pretrained(dense, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(dense / "model.safetensors")
    out = cut_both_ways(dense, plan, tmp_path, monkeypatch)
    assert load_file(out / "model.safetensors").keys() == load_file(dense / "model.safetensors").keys()
    assert_answers_as_masked(AutoModelForCausalLM.from_pretrained(out).eval(), model, plan)


def test_experts_are_cut_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a layer are a tensor in memory and many in files; the whole is never made."""
    model = tiny("mixtral")
    dense, whole = on_the_hub(model, tmp_path / "dense"), []
    mapped = StoredModel.map_tensor

    def watched(self: StoredModel, name: str) -> torch.Tensor:
        whole.append(name)
        return mapped(self, name)

    monkeypatch.setattr(StoredModel, "map_tensor", watched)
    compact_checkpoint(dense, axis_plans(family_for(model).plan(model.config))["ffn"], tmp_path / "out")
    assert "model.layers.0.mlp.gate.weight" in whole
    assert not any("experts" in name for name in whole)


EXTRA = {
    "deepseek_v3": ("model.layers.5.", ("eh_proj.weight", "enorm.weight", "self_attn.o_proj.weight")),
    "glm4_moe": ("model.layers.5.", ("eh_proj.weight", "shared_head.norm.weight", "mlp.experts.3.up_proj.weight")),
    "qwen3_next": ("mtp.", ("fc.weight", "layers.0.mlp.experts.0.up_proj.weight")),
    "qwen3_5_text": ("mtp.", ("norm.weight", "layers.0.self_attn.q_proj.weight")),
    "ernie4_5_moe": ("model.mtp_", ("block.0.mlp.up_proj.weight", "emb_norm.0.weight")),
}
"""Type -> names of weights that predict several tokens: their start, and ends."""


def with_extra(model_type: str, folder: Path, **counts: int) -> Path:
    """A checkpoint of the type with weights that predict several tokens, which its configuration counts."""
    dense = on_the_hub(tiny_inferred(model_type, **counts), folder)
    start, ends = EXTRA[model_type]
    path = dense / "model.safetensors"
    save_file(load_file(path) | {start + end: torch.ones(2) for end in ends}, path, {"format": "pt"})
    return dense


@pytest.mark.parametrize(
    ("model_type", "field"),
    [
        ("glm4_moe", "num_nextn_predict_layers"),
        pytest.param("deepseek_v3", "num_nextn_predict_layers", marks=pytest.mark.second),
        pytest.param("ernie4_5_moe", "num_nextn_predict_layers", marks=pytest.mark.second),
        pytest.param("qwen3_next", "num_nextn_predict_layers", marks=pytest.mark.second),
        pytest.param("qwen3_5_text", "mtp_num_hidden_layers", marks=pytest.mark.second),
    ],
)
def test_weights_that_predict_several_tokens_are_left_out_and_named_once(
    model_type: str, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in no class of Transformers; the configuration then counts none."""
    dense = with_extra(model_type, tmp_path / "dense", **{field: 1})
    assert json.loads((dense / "config.json").read_text())[field] == 1
    model, _ = load_model(dense)
    plan = family_for(model).plan(model.config).drop_layers([4])
    cut_both_ways(dense, plan, tmp_path, monkeypatch)
    start, ends = EXTRA[model_type]
    for out in (tmp_path / "streamed", tmp_path / "loaded"):
        assert not any(name.startswith(start + end) for name in load_file(out / "model.safetensors") for end in ends)
        assert json.loads((out / "config.json").read_text())[field] == 0
        notes = read_pruning_json(out).provenance["report"]["notes"]
        said = [note for note in notes if note.startswith("Weights that the model does not use were left out: ")]
        assert len(said) == 1
        assert said[0].endswith(f" (tensors: {len(ends)}).")
        assert_answers_as_masked(AutoModelForCausalLM.from_pretrained(out).eval(), model, plan)


@pytest.mark.parametrize("model_type", ["mixtral", pytest.param("gemma4_text", marks=pytest.mark.second)])
def test_a_run_that_decides_solves_and_verifies_is_the_same_from_files(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts and, of Gemma 4, what layers multiply the stream by are read a layer at a time."""
    dense = on_the_hub(tiny(model_type), tmp_path / "dense")
    data = {"data.source": str(write_text(tmp_path / "text.txt")), "data.samples": 4, "data.sequence_length": 16}
    for preset in ("wanda", "shortgpt"):
        out = tmp_path / preset
        config = build_config(preset=preset, options={**data, "ratio": 0.2, "verify": True})
        assert_same_folder(*both_ways(dense, config, out, monkeypatch))


@pytest.mark.parametrize("end", ["w1", "w2"])
def test_an_expert_of_another_shape_is_refused(end: str, tmp_path: Path) -> None:
    dense = on_the_hub(tiny("mixtral"), tmp_path / "dense")
    path = dense / "model.safetensors"
    name = f"model.layers.2.block_sparse_moe.experts.3.{end}.weight"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name][:-1].clone()}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"experts.3.{end}.weight of .* has the shape"):
        StoredModel(dense)


@pytest.mark.second
def test_a_multimodal_model_leaves_them_out_too(tmp_path: Path) -> None:
    dense = write_tower("qwen3_5", tmp_path / "dense")
    path, config = dense / "model.safetensors", json.loads((dense / "config.json").read_text())
    save_file(load_file(path) | {"mtp.fc.weight": torch.ones(2)}, path, {"format": "pt"})
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (dense / "config.json").write_text(json.dumps(config))
    text, _ = load_model(dense)
    out = prune_by(family_for(text).plan(text.config).drop_layers([2]), dense)
    assert "mtp.fc.weight" not in load_file(out / "model.safetensors")
    assert json.loads((out / "config.json").read_text())["text_config"]["mtp_num_hidden_layers"] == 0
    said = "Weights that the model does not use were left out: mtp.fc (tensors: 1)."
    assert said in read_pruning_json(out).provenance["report"]["notes"]


def test_a_layer_beyond_the_last_that_predicts_nothing_is_refused(tmp_path: Path) -> None:
    """A config.json with too few layers is not taken for one with layers that predict several tokens."""
    dense = on_the_hub(tiny_inferred("glm4_moe"), tmp_path / "dense")
    path = dense / "model.safetensors"
    save_file(load_file(path) | {"model.layers.5.self_attn.o_proj.weight": torch.ones(2)}, path, {"format": "pt"})
    assert "model.layers.5.self_attn.o_proj.weight" in str(ModelSource.of(dense).streaming_obstacle())
    with pytest.raises(CheckpointError, match=r"unexpected keys: model\.layers\.5\.self_attn"):
        load_model(dense)


def test_an_expert_that_is_missing_is_refused(tmp_path: Path) -> None:
    dense = on_the_hub(tiny("mixtral"), tmp_path / "dense")
    path = dense / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.2.block_sparse_moe.experts.3.w3.weight"]
    save_file(tensors, path, {"format": "pt"})
    plan = family_for(tiny("mixtral")).plan(tiny("mixtral").config)
    with pytest.raises(
        CheckpointError, match=r"different numbers of tensors for model.layers.2.mlp.experts.gate_up_proj"
    ):
        compact_checkpoint(dense, plan, tmp_path / "out")
