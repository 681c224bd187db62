"""Inferred families: the contract of every type without a table, and the types that cannot be inferred."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pyprune.checkpoint.load import ModelSource, load_model
from pyprune.cut.compact import compact_
from pyprune.cut.mask import mask_
from pyprune.cut.proof import error_of_cut
from pyprune.cut.target import choose_target
from pyprune.errors import ConfigError, PlanError, UnsupportedModelError
from pyprune.families import (
    Family,
    all_families,
    count_parameters,
    dense_family,
    family_for,
    find_family,
    parameter_shapes,
    parameters_after,
    shapes_after,
)
from pyprune.families.engines import CONDITIONS, NEARLY, NOT_ON_CPU, REFUSED, STOCK
from pyprune.families.infer import causal_types, inferred_family
from pyprune.families.table import gguf_table, open_table, vllm_table
from pyprune.plan import PrunePlan
from pyprune.run.prune import prune_checkpoint
from pyprune.run.recipe import build_config
from pyprune.runtime.report import markdown_table
from tests._support.cli import refused, run
from tests._support.compare import FLOAT32_ROUNDING, assert_same_logits
from tests._support.inferred import (
    CLOSED,
    DENSE,
    GIVEN,
    INFERRED,
    LATENT,
    NOT_INFERRED,
    PUBLISHED,
    WITHOUT_EXPERTS,
    closed_by,
    tiny_inferred,
)
from tests._support.models import tiny_batch
from tests._support.paths import REPO
from tests._support.plans import axis_plans, keep_kv_groups
from tests._support.text import write_model, write_text
from tests.families.test_contract import AXES, cached_logits, logits

IDENTICAL = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "granite", "starcoder2", "olmo2")
"""Types with a table whose rows inference finds as well."""
PRODUCTS = (
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2_moe",
    "mimo_v2_flash",
    "minimax_m3_vl_text",
    "nemotron_h",
    "qwen3_5_moe_text",
    "qwen3_next",
)
"""Hybrids with mixtures of experts."""
HYBRIDS = ("bamba", "falcon_h1", "granitemoehybrid-dense", "nemotron_h-dense")
"""Hybrids whose layers return tuples, hold computed buffers, or have other names in files."""
FRESH = """
import json, sys, torch, pyprune.modeling
from transformers import AutoModelForCausalLM
from tests._support.models import tiny_batch
for folder in sys.argv[1:]:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")), (folder, info)
    with torch.no_grad():
        torch.save(model.eval()(tiny_batch(), use_cache=False).logits, folder + "/fresh.pt")
"""


def everything_of(model: PreTrainedModel) -> PrunePlan:
    """The plan that cuts every axis at once, without whole layers or heads where they are closed."""
    plan, closed = plan_of(model, "everything"), family_for(model).closed_axes(model.config)
    if "heads" in closed:
        return plan_of(model, "skipped").with_layer(1, ffn=range(9)).drop_layers([3]).keep_hidden(plan.hidden)
    if "layers" not in closed:
        return plan
    unequal = plan_of(model, "unequal").with_layer(0, query_heads=[], kv_heads=[])
    return unequal if "hidden" in closed else unequal.keep_hidden(plan.hidden)


def plan_of(model: PreTrainedModel, axis: str) -> PrunePlan:
    reason = dense_family(model).variant_obstacle(model.config)
    if reason:
        pytest.skip(reason)
    plans = axis_plans(family_for(model).plan(model.config))
    if axis not in plans:
        pytest.skip("this configuration has one query head per KV head, or no experts")
    return plans[axis]


def check(dense: PreTrainedModel, plan: PrunePlan, folder: Path, rounding: float = FLOAT32_ROUNDING) -> None:
    """The contract of one plan: masked equals compacted, also through the cache and after save and load."""
    shapes, ids = parameter_shapes(dense), tiny_batch()
    masked, model = copy.deepcopy(dense), dense
    tolerance = 1e-4 if dense.config.model_type in CLOSED else rounding
    mask_(masked, plan)
    report = compact_(model, plan)
    expected = logits(masked, ids)
    assert_same_logits(logits(model, ids), expected, tolerance)
    assert report.parameters == count_parameters(model) == parameters_after(family_for(masked), shapes, plan)
    assert report.stock is not report.architecture.startswith("Pruned")
    model.save_pretrained(folder)
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert type(loaded) is type(model)
    assert_same_logits(logits(loaded.eval(), ids), expected, tolerance)
    assert_same_logits(cached_logits(loaded, ids, prompt=9), cached_logits(masked, ids, prompt=9), tolerance)
    assert_same_generation(loaded, masked, tolerance)


def assert_same_generation(
    model: PreTrainedModel, masked: PreTrainedModel, tolerance: float = FLOAT32_ROUNDING
) -> None:
    """Generate with a cache from prompts of two lengths, the shorter one padded on the left."""
    ids = tiny_batch(length=9)
    mask = torch.ones_like(ids)
    mask[0, :4] = ids[0, :4] = 0
    answers = []
    for each in (model, masked):
        each.generation_config.eos_token_id = None
        options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        answers.append(each.generate(ids, attention_mask=mask, **options))
    assert torch.equal(answers[0].sequences, answers[1].sequences)
    assert_same_logits(torch.stack(answers[0].logits), torch.stack(answers[1].logits), tolerance)


@pytest.mark.parametrize("model_type", [*INFERRED, *WITHOUT_EXPERTS])
def test_everything_at_once(model_type: str, tmp_path: Path) -> None:
    model = tiny_inferred(model_type)
    check(model, everything_of(model), tmp_path)


@pytest.mark.second
@pytest.mark.parametrize("axis", [*AXES, "experts"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("model_type", [*INFERRED, *WITHOUT_EXPERTS])
def test_every_axis(model_type: str, tied: bool, axis: str, tmp_path: Path) -> None:
    dense = tiny_inferred(model_type, tied=tied)
    plan = plan_of(dense, axis)
    if axis != "identity" and plan.is_identity:
        pytest.skip("this type has no such axis")
    if reason := closed_by(dense, axis):
        with pytest.raises(PlanError, match=reason):
            compact_(dense, plan)
    else:
        check(dense, plan, tmp_path)


@pytest.mark.second
@pytest.mark.parametrize("model_type", [*INFERRED, *WITHOUT_EXPERTS])
def test_the_sizes_of_a_published_model_are_cut(model_type: str) -> None:
    """What a class is by default is one of its published models; its shapes are compared, no weights are made."""
    config = AutoConfig.for_model(model_type.removesuffix("-dense"), **PUBLISHED.get(model_type, {}))
    heads = getattr(config, "num_attention_heads", None)
    for name, size in (("head_dim", config.hidden_size // heads), ("num_key_value_heads", heads)) if heads else ():
        if vars(config).get(name, size) is None:  # Transformers cannot build such a model; every published one has it
            setattr(config, name, size)
    family = family_for(config)
    plan = family.plan(config)
    plan = plan.keep_hidden(range(plan.dense.hidden_size * 3 // 4))
    if "layers" not in family.closed_axes(config):
        plan = plan.drop_layers([1])
    attention, mlp = ([i for i in plan.kept_layers if plan.dense.units(axis, i)] for axis in ("kv_heads", "ffn"))
    for index in attention if "heads" not in family.closed_axes(config) else ():
        plan = keep_kv_groups(plan, index, [0])
    for index in mlp:
        plan = plan.with_layer(index, ffn=range(256))
    with torch.device("meta"):
        shapes = parameter_shapes(AutoModelForCausalLM.from_config(config))
        for each in (plan, *(plan.with_layer(index, ffn=range(128)) for index in mlp[:1])):
            cut = AutoModelForCausalLM.from_config(choose_target(family, config, each).config)
            assert sorted(shapes_after(family, shapes, each).values()) == sorted(parameter_shapes(cut).values())


@pytest.mark.parametrize("model_type", DENSE)
def test_inferred_sizes_name_their_axes(model_type: str) -> None:
    """No two axes have the same size, unless the type's own classes make them so; and masking changes something."""
    model = tiny_inferred(model_type)
    sizes = family_for(model).sizes(model.config)
    channels = {sizes.hidden_size, sizes.num_attention_heads * sizes.head_dim}
    blocks = [block for kind in sizes.kinds.values() for block in kind.values()]
    widths = {n for block in blocks for axis, n in block.axes.items() if axis.endswith("ffn")}
    others = {sizes.vocab_size, sizes.num_key_value_heads * sizes.head_dim, sizes.num_layers}
    assert len(channels | others | widths) == len(channels) + 3 + len(widths)
    experts = {block.axes["experts"] for block in blocks if "experts" in block.axes}
    assert not experts & (channels | others | widths)
    axes = {(name, axis) for name, kind in sizes.kinds.items() for axis in kind["mlp"].axes}
    named = len([axis for _, axis in axes if axis.endswith("ffn")])
    assert len(widths) == named - (model_type in ("hunyuan_v1_moe", "llama4_text"))  # shared as wide as others
    assert len(channels) == 1 if model_type in ("helium", "stablelm", "olmoe") else 2


@pytest.mark.process
@pytest.mark.second
def test_a_fresh_process_loads_every_type(tmp_path: Path) -> None:
    expected = {}
    for model_type in INFERRED:
        model = tiny_inferred(model_type)
        compact_(model, everything_of(model))
        model.save_pretrained(tmp_path / model_type)
        expected[model_type] = logits(model, tiny_batch())
    load_fresh(tmp_path, *expected)
    for model_type, values in expected.items():
        assert_same_logits(torch.load(tmp_path / model_type / "fresh.pt"), values)


@pytest.mark.process
def test_a_fresh_process_loads_a_type_without_a_table(tmp_path: Path) -> None:
    model = tiny_inferred("smollm3")
    compact_(model, plan_of(model, "everything"))
    model.save_pretrained(tmp_path / "smollm3")
    values = json.loads((tmp_path / "smollm3" / "config.json").read_text())
    assert values["model_type"] == "pruned_smollm3"
    assert values["architectures"] == ["PrunedSmolLM3ForCausalLM"]
    assert len(values["no_rope_layers"]) == len(values["layer_types"]) == 4
    load_fresh(tmp_path, "smollm3")
    assert_same_logits(torch.load(tmp_path / "smollm3" / "fresh.pt"), logits(model, tiny_batch()))


def load_fresh(work: Path, *names: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", FRESH, *(str(work / name) for name in names)]
    ran = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr[-3000:]


def test_the_pruned_classes_of_an_inferred_type_exist_by_name_where_pickles_look() -> None:
    import pyprune.modeling
    from pyprune.modeling import configuration, models

    for module, name in ((configuration, "PrunedSmolLM3Config"), (models, "PrunedSmolLM3ForCausalLM")):
        cls = getattr(pyprune.modeling, name)
        assert getattr(module, name) is cls
        assert pickle.loads(pickle.dumps(cls)) is cls
        with pytest.raises(AttributeError):
            _ = module.PrunedNothing
    config = AutoConfig.for_model("pruned_smollm3", num_hidden_layers=3)
    assert type(config) is configuration.PrunedSmolLM3Config


@pytest.mark.parametrize(
    "model_type", ["smollm3", "cohere2", "olmo", "apertus", "lfm2", "mamba2", "nemotron_h", "youtu"]
)
def test_a_run_on_files_writes_what_a_run_in_memory_writes(model_type: str, tmp_path: Path) -> None:
    """Checkpoints with buffers (Apertus) or other names (Nemotron-H) among them."""
    dense = tiny_inferred(model_type)
    plan = plan_of(dense, "everything")
    (tmp_path / "plan.json").write_text(plan.to_json())
    config = build_config(options={"plan": str(tmp_path / "plan.json")})
    result = prune_checkpoint(write_model(dense, tmp_path / "dense"), config, out=tmp_path / "out")
    assert "Streamed from file to file" in " ".join(result.notes)
    written, _ = load_model(tmp_path / "out")
    compact_(dense, plan)
    assert_same_logits(logits(written, tiny_batch()), logits(dense, tiny_batch()))


@pytest.mark.second
@pytest.mark.parametrize("model_type", [*DENSE, *HYBRIDS, "lfm2", "qwen3_5_text", *LATENT, *PRODUCTS, *GIVEN])
def test_a_method_chooses_cuts_and_reconstructs(model_type: str, tmp_path: Path) -> None:
    folder = write_model(tiny_inferred(model_type), tmp_path / "dense")
    data = {"data.source": str(write_text(tmp_path / "text.txt")), "data.samples": 4, "data.sequence_length": 16}
    # Layers of Doge and MiniCPM3 do not just add to the stream, and the experts of LLaMA 4 read all tokens.
    preset = {"doge": "wanda-plain", "minicpm3": "wanda-plain", "llama4_text": "taylor"}.get(model_type, "wanda")
    axes = ["ffn"] if model_type == "laguna" else ["heads", "ffn"]
    config = build_config(preset=preset, options={"ratio": 0.2, **data, "score.closed_ends": 0, "score.axes": axes})
    result = prune_checkpoint(folder, config, out=tmp_path / "out")
    assert result.compact is not None
    assert result.compact.removed_share > 0.1
    model, _ = load_model(tmp_path / "out")
    assert torch.isfinite(logits(model, tiny_batch())).all()


@pytest.mark.parametrize("preset", ["shortgpt", "dress"])
@pytest.mark.parametrize("model_type", ["lfm2", "mamba", *HYBRIDS, "youtu", "qwen3_next"])
def test_closed_blocks_are_walked_past_and_their_outputs_solved(model_type: str, preset: str, tmp_path: Path) -> None:
    folder = write_model(tiny_inferred(model_type), tmp_path / "dense")
    data = {"data.source": str(write_text(tmp_path / "text.txt")), "data.samples": 4, "data.sequence_length": 16}
    result = prune_checkpoint(
        folder, build_config(preset=preset, options={"ratio": 0.25, **data}), out=tmp_path / "out"
    )
    assert result.compact is not None
    assert result.compact.removed_share > 0.05
    assert model_type in PRODUCTS or not any("experts" in text for text in result.warnings)
    model, _ = load_model(tmp_path / "out")
    assert torch.isfinite(logits(model, tiny_batch())).all()


@pytest.mark.second
@pytest.mark.parametrize("preset", ["shortgpt", "dress", "wanda"])
@pytest.mark.parametrize("model_type", ["bamba", "falcon_h1"])
def test_layers_with_several_values_or_computed_buffers_are_streamed(
    model_type: str, preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of Bamba return two values, and those of Falcon-H1 have buffers that no file holds."""
    folder = write_model(tiny_inferred(model_type), tmp_path / "dense")
    data = {"data.source": str(write_text(tmp_path / "text.txt")), "data.samples": 4, "data.sequence_length": 16}
    config = build_config(preset=preset, options={"ratio": 0.25, **data})
    result = prune_checkpoint(folder, config, out=tmp_path / "streamed")
    assert any("Streamed from file to file" in note for note in result.notes)
    monkeypatch.setattr(ModelSource, "streaming_obstacle", lambda source: "this is a test")
    prune_checkpoint(folder, config, out=tmp_path / "loaded")
    streamed, loaded = (load_model(tmp_path / name)[0] for name in ("streamed", "loaded"))
    assert_same_logits(logits(streamed, tiny_batch()), logits(loaded, tiny_batch()))


def test_a_method_on_heads_that_no_layer_has_is_refused(tmp_path: Path) -> None:
    folder = write_model(tiny_inferred("mamba"), tmp_path / "dense")
    data = {"data.source": str(write_text(tmp_path / "text.txt")), "data.samples": 4, "data.sequence_length": 16}
    config = build_config(preset="wanda", options={**data, "score.axes": ["heads"]})
    with pytest.raises(ConfigError, match=r"score.axes is \['heads'\], of which the open layers of this 'mamba' model"):
        prune_checkpoint(folder, config, out=tmp_path / "out")


@pytest.mark.parametrize("model_type", IDENTICAL)
def test_inference_finds_the_rows_of_tables(model_type: str) -> None:
    """A table may hold biases that its configurations never have; every other row is the same."""
    inferred, table = inferred_family(model_type), all_families()[model_type]
    assert not isinstance(inferred, str), inferred
    rows = {row.pattern: row for row in table.rows}
    for row in inferred.rows:
        assert rows.pop(row.pattern) == row
    assert all(row.is_bias for row in rows.values()), rows
    for name in ("norm", "gauge", "unit_offset_norm", "scaled_embedding", "layers_path", "attention_module"):
        assert getattr(inferred, name) == getattr(table, name), name


def test_heads_that_are_normalised_or_held_back_one_by_one_are_cut() -> None:
    """Norms of Cohere with a weight for every head, and the sinks of Granite, one number a head."""
    for model_type, name, shape in (("cohere", "q_norm.weight", (1, 16)), ("granite_swa", "sinks", (1,))):
        model = tiny_inferred(model_type)
        compact_(model, family_for(model).plan(model.config).with_layer(0, query_heads=[2], kv_heads=[1]))
        assert model.get_parameter(f"model.layers.0.self_attn.{name}").shape == shape


def test_buffers_of_kept_layers_keep_their_values() -> None:
    model = tiny_inferred("apertus")
    for index, layer in enumerate(model.model.layers):
        layer.mlp.act_fn.beta.fill_(index)
    compact_(model, family_for(model).plan(model.config).drop_layers([0, 2]))
    assert [layer.mlp.act_fn.beta.item() for layer in model.model.layers] == [1, 3, 4]


def test_layers_of_a_model_with_an_unknown_list_are_closed() -> None:
    model = tiny_inferred("smollm3")
    model.config.layer_temperatures = [1.0] * 5
    with pytest.raises(PlanError, match=r"cuts the axis layers.* layer_temperatures of its configuration"):
        compact_(model, plan_of(model, "layers"))
    compact_(model, plan_of(model, "heads"))


def test_a_layer_that_is_never_idle_is_kept() -> None:
    """Doge multiplies the stream by factors in every layer, which no zero of a writer takes out."""
    model = tiny_inferred("doge")
    with pytest.raises(PlanError, match=r"axis layers.* also where its blocks write nothing"):
        compact_(model, plan_of(model, "layers"))


def test_a_variant_that_means_something_else_is_refused() -> None:
    config = AutoConfig.for_model("stablelm", use_parallel_residual=True)
    with pytest.raises(UnsupportedModelError, match=r"use_parallel_residual is True: .*input_layernorm"):
        family_for(config)


def test_layers_that_read_the_tokens_that_earlier_layers_chose_are_refused() -> None:
    config = AutoConfig.for_model("glm_moe_dsa", indexer_types=["full", "shared"] * 39)
    with pytest.raises(UnsupportedModelError, match="the tokens that earlier layers chose"):
        family_for(config)


def test_a_closed_axis_is_refused_with_its_reason() -> None:
    model = tiny_inferred("nanochat", tied=True)
    plan = plan_of(model, "hidden")
    with pytest.raises(PlanError, match=r"cuts the axis hidden, which is closed .* final norm has no weight"):
        compact_(model, plan)
    compact_(model, plan_of(tiny_inferred("nanochat", tied=True), "heads"))


def test_a_method_on_a_closed_axis_is_refused_before_it_decides(tmp_path: Path) -> None:
    folder = write_model(tiny_inferred("nanochat", tied=True), tmp_path / "dense")
    data = {"data.source": str(write_text(tmp_path / "text.txt")), "data.samples": 4, "data.sequence_length": 16}
    config = build_config(preset="dress", options=data)
    with pytest.raises(ConfigError, match=r"dress removes from the axis hidden, .* Open axes: layers, heads, ffn"):
        prune_checkpoint(folder, config, out=tmp_path / "out")


def test_the_tables_in_the_documentation_are_the_tables() -> None:
    """`pyprune families --markdown` prints it."""
    text = (REPO / "docs" / "reference" / "families.md").read_text(encoding="utf-8")
    for table in map(markdown_table, (open_table([*all_families(), *INFERRED]), vllm_table(), gguf_table())):
        assert table in text, table


def test_the_command_answers_for_one_model(tmp_path: Path) -> None:
    folder = write_model(tiny_inferred("nanochat", tied=True), tmp_path / "dense")
    output = run("families", folder, "--json", "-").output
    cells = {row[""]: row["value"] for row in json.loads(output)[str(folder)]}
    assert cells["type"] == "nanochat"
    assert cells["table"] == "inferred"
    assert cells["hidden_size"] == 62
    assert cells["decoder layers"].startswith("5 layers of attention (query_heads 6, kv_heads 3, head_dim 16) and mlp")
    assert cells["axis heads"] == "open"
    assert cells["axis hidden"].startswith("closed: its head is tied")


@pytest.mark.parametrize(("model_type", "block"), [("falcon_mamba", "mixer"), ("mamba", "mixer")])
def test_the_command_says_which_block_closes_the_heads(model_type: str, block: str, tmp_path: Path) -> None:
    folder = write_model(tiny_inferred(model_type), tmp_path / "dense")
    rows = json.loads(run("families", folder, "--json", "-").output)[str(folder)]
    assert {row[""]: row["value"] for row in rows}["axis heads"] == f"closed: {block} is kept whole"


def test_the_command_lists_types_and_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyprune.families.table.known_types", lambda: ["llama", "smollm3", "xlnet"])
    tables = json.loads(run("families", "--json", "-").output)
    assert [(row["type"], row["table"]) for row in tables["Model types"]] == [("llama", "own"), ("smollm3", "inferred")]
    assert "; nor whole layers removed: each position sees" in tables["Refused"][0]["reason"]


def test_each_type_has_one_verdict_of_vllm() -> None:
    verdicts = [*STOCK, *NEARLY, *REFUSED, *NOT_ON_CPU]
    assert len(verdicts) == len({*verdicts})
    assert {*verdicts, *CONDITIONS} <= {*all_families(), *INFERRED}


@pytest.mark.parametrize(
    ("name", "reason"), [("mimo_v2_flash", "pyprune has no layout"), ("doge", "has no architecture")]
)
def test_a_type_without_a_gguf_form_is_refused_with_the_reason(name: str, reason: str, tmp_path: Path) -> None:
    folder = write_model(tiny_inferred(name), tmp_path / "dense")
    message = refused("export", folder, "--format", "gguf", "--out", tmp_path / "model.gguf")
    assert f"A {name} model cannot be written as GGUF: " in message
    assert reason in message


def test_a_wrong_table_is_refused_before_anything_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma's norms multiply by 1 + w; a table that says w is found by a cut of a tiny model."""
    right = inferred_family("gemma")
    assert isinstance(right, Family)
    wrong = replace(right, unit_offset_norm=False)
    model = tiny_inferred("gemma")
    weights = model.model.norm.weight.detach().clone()
    for module in ("pyprune.families", "pyprune.cut.proof", "pyprune.cut.compact", "pyprune.cut.mask"):
        for name in ("family_for", "family_of_type"):
            monkeypatch.setattr(f"{module}.{name}", lambda *_: wrong, raising=False)
    error_of_cut.cache_clear()
    try:
        with pytest.raises(UnsupportedModelError, match=r"inferred for the model type 'gemma' is wrong: .*% off"):
            compact_(model, right.plan(model.config).keep_hidden(range(40)))
    finally:
        error_of_cut.cache_clear()
    assert torch.equal(model.model.norm.weight, weights)


def test_inference_does_not_depend_on_the_state_of_torch() -> None:
    inferred_family.cache_clear()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with torch.device("meta"), torch.inference_mode():
        assert find_family("smollm3") is not None
    assert torch.equal(torch.rand(3), expected)


def test_a_type_that_cannot_be_inferred_names_the_parameter() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'rwkv'.*No table could be inferred for it: .*nor whole layers"):
        family_for(AutoConfig.for_model("rwkv"))
    assert find_family("no_such_type") is None


def test_every_type_of_transformers_is_listed() -> None:
    """A type that a release adds belongs to one of the lists."""
    listed = [*INFERRED, *NOT_INFERRED, *all_families()]
    assert len(listed) == len(set(listed))
    assert sorted(causal_types()) == sorted(listed)


@pytest.mark.second
def test_the_lists_are_true() -> None:
    assert {name for name in (*INFERRED, *NOT_INFERRED) if not isinstance(inferred_family(name), str)} == set(INFERRED)
