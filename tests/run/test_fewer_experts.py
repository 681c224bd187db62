"""Tokens of a cut mixture may read fewer experts: in config.json, in the record, and exactly as the masked model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pyprune.checkpoint.load import load_model
from pyprune.checkpoint.record import read_pruning_json
from pyprune.cut.mask import mask_
from pyprune.errors import ConfigError
from pyprune.families import family_for
from pyprune.families.mixtures import CHOSEN_COUNTS, FIXED, chosen_experts, experts_read, read_fewer_experts_
from pyprune.run import prune as pipeline
from pyprune.run import stages
from pyprune.run.prune import prune_checkpoint, prune_model_
from pyprune.run.recipe import build_config
from pyprune.run.streamed import NOTE
from tests._support.inferred import INFERRED, tiny_inferred
from tests._support.models import tiny_batch, tiny_model
from tests._support.text import write_model, write_text
from tests.families.test_contract import logits


def options(tmp_path: Path, count: int) -> dict[str, object]:
    text = {"data.source": str(write_text(tmp_path / "text.txt")), "data.samples": 8, "data.sequence_length": 16}
    return {**text, "ratio": 0.3, "cut.experts_per_token": count}


@pytest.mark.parametrize("preset", ["reap", "expert_random"])
@pytest.mark.parametrize("model_type", ["mixtral", "glm4_moe", "gpt_oss"])
def test_tokens_read_fewer_experts(model_type: str, preset: str, tmp_path: Path) -> None:
    model = tiny_inferred(model_type)
    folder = write_model(model, tmp_path / "dense")
    config = build_config(preset=f"{preset}-plain", options=options(tmp_path, 1))
    result = prune_checkpoint(folder, config, out=tmp_path / "out")
    cut, _ = load_model(tmp_path / "out")
    assert cut.config.num_experts_per_tok == 1
    record = read_pruning_json(tmp_path / "out", verify_files=True)
    assert record.provenance["config"]["cut"]["experts_per_token"] == 1
    dense = AutoModelForCausalLM.from_pretrained(folder, num_experts_per_tok=1, dtype=torch.float32).eval()
    mask_(dense, result.plan)
    batch = tiny_batch(batch=2, length=12)
    torch.testing.assert_close(logits(cut, batch), logits(dense, batch), rtol=0, atol=2e-5)
    mask_(model, result.plan)
    assert (logits(model, batch) - logits(dense, batch)).abs().max() > 1e-3, "another number of experts"


ROUTED = [name for name in INFERRED if {*CHOSEN_COUNTS} & {*AutoConfig.for_model(name).to_dict()}]
QUICK = ("qwen3_moe", "granitemoe", "llama4_text")


@pytest.mark.parametrize(
    "model_type", [name if name in QUICK else pytest.param(name, marks=pytest.mark.second) for name in ROUTED]
)
def test_the_modules_of_every_type_read_as_many_as_its_configuration_says(model_type: str) -> None:
    chosen = {} if model_type != "llama4_text" else {"num_experts_per_tok": 2}
    model, batch = tiny_inferred(model_type, **chosen), tiny_batch(batch=2, length=12)
    if "experts" not in family_for(model).sizes(model.config).axes or model_type in FIXED:
        return  # a switch that is off; refused
    before, usual = logits(model, batch), chosen_experts(model.config)
    read_fewer_experts_(model.config, model.modules(), 1)
    made = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).eval()
    made.load_state_dict(model.state_dict())
    assert torch.equal(logits(model, batch), logits(made, batch))
    assert (logits(model, batch) - before).abs().max() > 1e-4
    with experts_read(model.config, model, usual):
        assert torch.equal(logits(model, batch), before)
    assert torch.equal(logits(model, batch), logits(made, batch))


def test_a_model_in_memory_is_cut_with_fewer_experts_for_a_token() -> None:
    model = tiny_inferred("mixtral")
    config = build_config(preset="reap-plain", options={"ratio": 0.3, "cut.experts_per_token": 1})
    prune_model_(model, {"data": tiny_batch(batch=8, length=16)}, config)
    assert model.config.num_experts_per_tok == 1
    assert {module.top_k for module in model.modules() if hasattr(module, "top_k")} == {1}


@pytest.mark.parametrize("place", ["streamed", "in memory"])
def test_what_is_solved_follows_the_experts_that_the_dense_model_reads(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors are measured from the dense model, so that they are larger than from one that reads fewer as well."""
    if place == "in memory":
        monkeypatch.setattr(pipeline, "loading_reason", lambda *_, **__: "In memory.")
    folder = write_model(tiny_inferred("mixtral"), tmp_path / "dense")
    errors, losses = [], []
    for name in ("all", "fewer"):
        if name == "fewer":
            monkeypatch.setattr(stages, "chosen_experts", lambda config: None)
        given = options(tmp_path, 1) | {"dtype": "float32"}
        result = prune_checkpoint(folder, build_config(preset="expert_obs", options=given), out=tmp_path / name)
        assert (NOTE in result.notes) == (place == "streamed")
        errors.append(result.reconstruction["parts"][0]["before"])
        losses.append(min(result.decision["experts"]["scores"]["0"]))
    assert errors[0] > 1.05 * errors[1]
    assert losses[0] > 1.05 * losses[1]


def test_a_layer_may_keep_fewer_experts_where_tokens_read_fewer(tmp_path: Path) -> None:
    folder = write_model(tiny_inferred("mixtral"), tmp_path / "dense")
    config = build_config(preset="reap-plain", options=options(tmp_path, 1) | {"reap.keep": 1, "dtype": "float32"})
    result = prune_checkpoint(folder, config, out=tmp_path / "out")
    assert {len(layer.units("experts")) for layer in result.plan.layers} == {1}


@pytest.mark.parametrize(
    ("model_type", "count", "reason"),
    [
        ("mixtral", 3, "each token of this model reads 2 experts. Give 1 to 2."),
        ("llama", 1, "no mixtures of experts"),
        ("doge", 1, "no mixtures of"),
        ("phimoe", 1, "choose 2 experts whatever"),
    ],
)
def test_what_tokens_cannot_read_is_refused(model_type: str, count: int, reason: str, tmp_path: Path) -> None:
    model = tiny_model("llama") if model_type == "llama" else tiny_inferred(model_type)
    folder = write_model(model, tmp_path / "dense")
    preset = "magnitude" if model_type == "llama" else "reap-plain"
    with pytest.raises(ConfigError, match=reason):
        prune_checkpoint(folder, build_config(preset=preset, options=options(tmp_path, count)), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
