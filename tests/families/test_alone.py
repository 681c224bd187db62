"""Types without a table: whole layers alone are removed, and a removed layer is the identity."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from pyprune.checkpoint.load import load_model
from pyprune.checkpoint.save import save_checkpoint
from pyprune.cut.compact import compact_
from pyprune.cut.mask import mask_, masked
from pyprune.errors import ConfigError, PlanError, UnsupportedModelError
from pyprune.families import count_parameters, family_for, find_family, parameter_shapes, parameters_after
from pyprune.families.alone import family_of_layers
from pyprune.plan import PrunePlan
from pyprune.probe.streams import LayerRunner
from pyprune.run.prune import prune_checkpoint
from pyprune.run.recipe import build_config
from pyprune.run.result import PruneResult
from tests._support.alone import ALONE, REFUSED, tiny_alone
from tests._support.cli import run
from tests._support.compare import assert_same_logits
from tests._support.inferred import NOT_INFERRED
from tests._support.models import tiny_batch
from tests._support.remote import write_remote
from tests._support.text import write_model, write_text
from tests.families.test_contract import cached_logits, logits
from tests.families.test_inferred import assert_same_generation, load_fresh

REMOVED = ((1, 4), (1, 2), (2, 3), (4, 5, 6, 7), (0, 1, 2, 3), (7,), (3,))
"""Layers that are removed from 8: the first choice that a type allows."""


def plan_of(model: PreTrainedModel) -> PrunePlan:
    """The plan without the first of the choices of layers that the type can lose."""
    family = family_for(model)
    whole = family.plan(model.config)
    plans = [whole.drop_layers(removed) for removed in REMOVED]
    return next(plan for plan in plans if family.plan_obstacle(model.config, plan) is None)


def pair_of(model_type: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The masked and the compacted model of a type."""
    dense = tiny_alone(model_type)
    plan, shapes = plan_of(dense), parameter_shapes(dense)
    masked_model = copy.deepcopy(dense)
    mask_(masked_model, plan)
    report = compact_(dense, plan)
    assert report.stock
    assert report.parameters == count_parameters(dense) == parameters_after(family_for(dense), shapes, plan)
    return masked_model, dense


@pytest.mark.parametrize("model_type", ALONE)
def test_masked_equals_compacted(model_type: str) -> None:
    """On text that is longer than the windows, and generated with a cache after padding on the left."""
    expected, model = pair_of(model_type)
    assert_same_logits(logits(model, tiny_batch()), logits(expected, tiny_batch()))
    assert_same_generation(model, expected)


@pytest.mark.second
@pytest.mark.parametrize("model_type", ALONE)
def test_the_contract_holds_after_reload_and_layer_by_layer(model_type: str, tmp_path: Path) -> None:
    expected, model = pair_of(model_type)
    ids = tiny_batch()
    assert_runs_layer_by_layer(expected, ids)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert type(loaded) is type(model)
    assert_same_logits(logits(loaded.eval(), ids), logits(expected, ids))
    if "past_key_values" in loaded(ids[:, :9], use_cache=True):
        assert_same_logits(cached_logits(loaded, ids, prompt=9), cached_logits(expected, ids, prompt=9))
    assert_same_generation(loaded, expected)


@pytest.mark.second
@pytest.mark.parametrize("model_type", ALONE)
def test_the_names_in_files_are_those_of_the_source(model_type: str, tmp_path: Path) -> None:
    """With layers counted anew, whatever the tables of Transformers make of them."""
    dense = write_model(tiny_alone(model_type), tmp_path / "dense")
    model, tokenizer = load_model(dense)
    plan = plan_of(model)
    compact_(model, plan)
    save_checkpoint(model, tokenizer, tmp_path / "out", plan=plan, provenance={})
    written, source = (load_file(folder / "model.safetensors").keys() for folder in (tmp_path / "out", dense))
    unnumbered = [{re.sub(r"(?<=\.)\d+(?=\.)", "N", name) for name in names} for names in (written, source)]
    assert unnumbered[0] <= unnumbered[1]
    again, _ = load_model(tmp_path / "out")
    assert_same_logits(logits(again, tiny_batch()), logits(model, tiny_batch()))


def assert_runs_layer_by_layer(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Layers that are called one by one compute what the model computes."""
    with torch.no_grad():
        runner = LayerRunner.of(model)
        streams = [runner.embed(ids)]
        runner.through_(streams)
        with runner.continue_from(streams[0]) as end:
            found = end(ids, use_cache=False).logits
    assert_same_logits(found, logits(model, ids))


@pytest.mark.process
@pytest.mark.second
def test_a_fresh_process_loads_every_type(tmp_path: Path) -> None:
    expected = {}
    for model_type in ALONE:
        _, model = pair_of(model_type)
        model.save_pretrained(tmp_path / model_type)
        expected[model_type] = logits(model, tiny_batch())
    load_fresh(tmp_path, *expected)
    for model_type, values in expected.items():
        assert_same_logits(torch.load(tmp_path / model_type / "fresh.pt"), values)


def test_every_type_without_a_table_is_listed() -> None:
    assert sorted((*ALONE, *REFUSED)) == sorted(NOT_INFERRED)


@pytest.mark.second
def test_the_lists_are_true() -> None:
    found = {name: family_of_layers(name) for name in NOT_INFERRED}
    assert {name for name, family in found.items() if not isinstance(family, str)} == set(ALONE)
    for name, reason in REFUSED.items():
        assert reason in str(found[name]), (name, found[name])


@pytest.mark.parametrize(
    ("model_type", "values", "removed", "reason"),
    [
        ("jamba", {}, (3,), ""),
        ("jamba", {"attn_layer_period": 4, "attn_layer_offset": 1}, (0, 1, 2, 3), ""),
        ("qwen3_moe", {"mlp_only_layers": [2, 5]}, (1, 4), ""),
        ("qwen3_moe", {"decoder_sparse_step": 2}, (1, 4), ""),
        ("deepseek_v3", {"first_k_dense_replace": 3}, (1, 4), ""),
        ("recurrent_gemma", {}, (1, 4), ""),
        ("lfm2_moe", {"num_dense_layers": 2}, (1, 4), ""),
        ("nemotron_h", {"moe_latent_size": 24}, (0, 5), ""),
    ],
)
def test_patterns_follow_the_layers_or_are_refused(
    model_type: str, values: dict[str, object], removed: tuple[int, ...], reason: str
) -> None:
    model = tiny_alone(model_type, **values)
    plan = family_for(model).plan(model.config).drop_layers(removed)
    if reason:
        with pytest.raises(PlanError, match=reason):
            compact_(model, plan)
        return
    with masked(model, plan):
        expected = logits(model, tiny_batch())
    compact_(model, plan)
    assert_same_logits(logits(model, tiny_batch()), expected)


def test_scores_divided_by_the_index_of_a_layer_are_refused_where_that_index_changes() -> None:
    model = tiny_alone("gpt2", scale_attn_by_inverse_layer_idx=True)
    whole = family_for(model).plan(model.config)
    with pytest.raises(PlanError, match=r"(scaling|scale|index).*\n.*table"):
        compact_(model, whole.drop_layers([3]))
    with masked(model, whole.drop_layers([7])):
        expected = logits(model, tiny_batch())
    compact_(model, whole.drop_layers([7]))
    assert_same_logits(logits(model, tiny_batch()), expected)


def test_masked_layers_compute_again_after_the_block() -> None:
    model = tiny_alone("gpt2")
    dense = logits(model, tiny_batch())
    with masked(model, plan_of(model)):
        assert not torch.equal(logits(model, tiny_batch()), dense)
    assert torch.equal(logits(model, tiny_batch()), dense)


def prune(folder: Path, preset: str, work: Path, **options: object) -> PruneResult:
    data = {"data.source": str(write_text(work / "text.txt")), "data.samples": 4, "data.sequence_length": 16}
    config = build_config(preset=preset, options={"ratio": 0.25, **data, **options})
    return prune_checkpoint(folder, config, out=work / "out", trust_remote_code="auto_map" in _config_text(folder))


def _config_text(folder: Path) -> str:
    return (folder / "config.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("preset", ["shortgpt", "sleb-plain", "shortened_llama-plain", "elder-plain"])
@pytest.mark.parametrize("model_type", ["gpt2", "xlstm"])
def test_methods_of_layers_prune_a_checkpoint(model_type: str, preset: str, tmp_path: Path) -> None:
    folder = write_model(tiny_alone(model_type), tmp_path / "dense")
    result = prune(folder, preset, tmp_path, verify=True)
    assert result.verified is not None
    assert result.verified["masked_perplexity"] == pytest.approx(result.verified["compacted_perplexity"], rel=1e-5)
    assert any("was not reconstructed" in text for text in result.warnings) is (preset == "shortgpt")
    model, _ = load_model(tmp_path / "out")
    assert type(model).__name__.startswith("Pruned") is False
    assert len(family_for(model).layers(model)) == 6


@pytest.mark.second
@pytest.mark.parametrize("model_type", ["gpt2", "jetmoe"])
def test_recovery_trains_what_is_left(model_type: str, tmp_path: Path) -> None:
    folder = write_model(tiny_alone(model_type), tmp_path / "dense")
    options = {"recover.train.steps": 2, "recover.train.warmup_steps": 1}
    result = prune(folder, "shortgpt-trained", tmp_path, **options)
    assert [stage["action"] for stage in result.stages] == ["recover"]


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("laco", {}),
        ("sleb-plain", {"sleb.unit": "mlp"}),
        ("shortened_llama-plain", {"shortened_llama.form": "taylor_plus"}),
    ],
)
def test_a_method_that_needs_a_table_names_one_that_does_not(
    preset: str, options: dict[str, object], tmp_path: Path
) -> None:
    folder = write_model(tiny_alone("gpt2"), tmp_path / "dense")
    with pytest.raises(UnsupportedModelError, match=r"needs a table .*\n.*--method shortgpt-plain"):
        prune(folder, preset, tmp_path, **options)
    with pytest.raises(ConfigError, match=r"closed in this 'gpt2' model: the type has no table.*Open axes: layers"):
        prune(folder, "wanda", tmp_path)


def test_layers_that_hand_more_than_the_stream_to_each_other_are_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_alone("zaya", num_experts_per_tok=1)
    assert "hand states" in str(family_of_layers("zaya"))
    monkeypatch.setattr("pyprune.families.alone.REFUSED", {})
    family_of_layers.cache_clear()
    try:
        with pytest.raises(UnsupportedModelError, match=r"give each other more than the stream.*\n.*--method last"):
            LayerRunner.of(model)
        with pytest.raises(PlanError, match="logits differ"):
            compact_(model, family_for(model).plan(model.config).drop_layers([3]))
    finally:
        family_of_layers.cache_clear()


def test_code_of_a_repository_loses_layers(tmp_path: Path) -> None:
    """Layers with positional arguments that return tuples, a list by layer, and an index of a name of its own."""
    folder = write_remote(tmp_path / "dense", kinds=["add", "gate", "gate", "add", "gate", "add"])
    result = prune(folder, "shortgpt-plain", tmp_path, ratio=0.4, verify=True)
    assert result.verified is not None
    assert result.verified["masked_perplexity"] == pytest.approx(result.verified["compacted_perplexity"], rel=1e-5)
    model, _ = load_model(tmp_path / "out", trust_remote_code=True)
    kinds = json.loads(_config_text(folder))["kinds"]
    assert model.config.kinds == [kinds[i] for i in result.plan.kept_layers]
    assert len(model.stack) == 4


def test_code_that_depends_on_the_number_of_layers_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = write_remote(tmp_path / "dense", by_depth=True)
    with pytest.raises(PlanError, match=r"depend on their index or number.*\n.*table"):
        prune(folder, "shortgpt-plain", tmp_path)
    assert not (tmp_path / "out").exists()


def test_the_command_lists_types_of_whole_layers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("pyprune.families.table.known_types", lambda: ["llama", "mixtral", "gpt2", "xlstm", "bert"])
    tables = json.loads(run("families", "--json", "-").output)
    assert tables["Layers alone"] == [{"count": 2, "types": "gpt2, xlstm"}]
    assert "it is an encoder" in tables["Refused"][0]["reason"]
    folder = write_model(tiny_alone("gpt2"), tmp_path / "dense")
    cells = {row[""]: row["value"] for row in json.loads(run("families", folder, "--json", "-").output)[str(folder)]}
    assert cells["table"] == "none"
    assert cells["axis layers"] == "open"
    assert cells["axis hidden"] == "closed: the type has no table of its parameters"
    assert find_family("gpt2") is not None
