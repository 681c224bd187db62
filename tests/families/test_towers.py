"""Text towers of multimodal models: pruned on disk, they answer about an image as the masked model does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForMultimodalLM, PreTrainedModel

from pyprune.checkpoint.load import ModelSource, load_model
from pyprune.checkpoint.multimodal import multimodal_table
from pyprune.checkpoint.tower import WIDTHS, text_model, tower_of, whole_model
from pyprune.cut.mask import mask_
from pyprune.cut.target import choose_target, class_obstacle
from pyprune.errors import ConfigError, UnsupportedModelError
from pyprune.families import family_for, removable_layers
from pyprune.plan import PrunePlan
from pyprune.run.prune import prune_checkpoint
from pyprune.run.recipe import build_config
from pyprune.runtime.report import markdown_table
from pyprune.serving.export import export
from tests._support.compare import assert_same_logits
from tests._support.paths import REPO
from tests._support.text import write_model, write_text
from tests._support.towers import REFUSED, TOWERS, prompt, tiny_tower

FIRST = ("qwen3_vl", "gemma3")
"""Types of the first tier: one whose tower has no causal LM of its own, and one whose has."""
OTHERS = [pytest.param(name, marks=pytest.mark.second) for name in TOWERS if name not in FIRST]
SQUARE = ("qwen2_vl", "qwen2_5_vl")
"""Types whose classes derive the width of a head from the hidden size and the number of heads."""
PROCESSOR = {
    "preprocessor_config.json": '{"image_processor_type": "SiglipImageProcessor"}',
    "processor_config.json": '{"image_seq_length": 4}',
    "chat_template.jinja": "{{ messages }}",
}
CHILD = """
import sys, torch
from transformers import AutoModelForMultimodalLM
folder, inputs, out = sys.argv[1:]
model = AutoModelForMultimodalLM.from_pretrained(folder)
with torch.no_grad():
    torch.save(model(**torch.load(inputs), use_cache=False).logits, out)
assert not any(name.startswith("pyprune") for name in sys.modules)
"""


def write_tower(model_type: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    write_model(tiny_tower(model_type).to(dtype), folder)
    for name, text in PROCESSOR.items():
        (folder / name).write_text(text)
    return folder


def plan_of(text: PreTrainedModel, *, heads: bool = True, hidden: int = 64) -> PrunePlan:
    """Return a plan of equal sizes without the third layer."""
    family = family_for(text)
    plan = family.plan(text.config)
    for index in range(plan.dense.num_layers):
        plan = plan.with_layer(index, ffn=range(index, index + 32))
        if heads and plan.dense.units("kv_heads", index):
            plan = plan.with_layer(index, kv_heads=[1], query_heads=[2, 3])
    plan = plan.drop_layers([2])
    return plan if hidden == 64 else plan.keep_hidden(range(3, 3 + hidden))


def unequal_plan(text: PreTrainedModel) -> PrunePlan:
    """Return a plan of sizes by layer, without the third layer and two blocks."""
    plan = family_for(text).plan(text.config).with_layer(1, ffn=())
    if not plan.dense.units("experts", 3):
        plan = plan.with_layer(3, ffn=range(9))
    for index, heads in {3: ((), ()), 4: ([1], [3])}.items():
        if plan.dense.units("kv_heads", index):
            plan = plan.with_layer(index, kv_heads=heads[0], query_heads=heads[1])
    return plan.drop_layers([2])


def prune_by(plan: PrunePlan, dense: Path) -> Path:
    path, out = dense.parent / "plan.json", dense.parent / "out"
    path.write_text(plan.to_json())
    prune_checkpoint(dense, _options(method="none", plan=str(path)), out=out)
    return out


def _options(**options: Any) -> Any:
    return build_config(preset=None, recovery=None, recipe=None, options=options, settings=())


@torch.no_grad()
def logits(model: PreTrainedModel, model_type: str) -> Tensor:
    return model(**prompt(model_type), use_cache=False).logits  # type: ignore[no-any-return]


def masked_logits(dense: Path, plan: PrunePlan, model_type: str) -> Tensor:
    """Return the logits about an image of the multimodal model whose removed parts are zero."""
    text, _ = load_model(dense)
    tower, family = tower_of(text), family_for(text)
    assert tower is not None
    mask_(text, plan)
    if plan.removed_hidden:
        config = choose_target(family, text.config, plan, class_obstacle(text)).config
        for name, positions in tower.kept_positions(config, plan.hidden).items():
            for dim, kept in positions.items():
                removed = sorted({*range(tower.rest[name].shape[dim])} - {*kept.tolist()})
                tower.rest[name].index_fill_(dim, torch.tensor(removed), 0)
    return logits(whole_model(text), model_type)


def check(model_type: str, folder: Path, planned: Callable[[PreTrainedModel], PrunePlan], *, stock: bool) -> Path:
    """Prune a tower on disk, and compare the written multimodal model with the masked one."""
    dense = write_tower(model_type, folder / "dense")
    plan = planned(load_model(dense)[0])
    expected = masked_logits(dense, plan, model_type)
    out = prune_by(plan, dense)
    model, info = AutoModelForMultimodalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    assert type(model).__name__ == "Pruned" * (not stock) + type(tiny_tower(model_type)).__name__
    assert_same_logits(logits(model, model_type), expected)
    assert {name: (out / name).read_text() for name in PROCESSOR} == PROCESSOR
    return out


@pytest.mark.parametrize("model_type", [*OTHERS, *FIRST])
def test_a_pruned_tower_answers_about_an_image_as_the_masked_model_does(model_type: str, tmp_path: Path) -> None:
    out = check(model_type, tmp_path, lambda text: plan_of(text, heads=model_type not in SQUARE), stock=True)
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "dense", out))
    new = {re.sub(r"\d+", "0", name) for name in after} - {re.sub(r"\d+", "0", name) for name in before}
    assert all(name.endswith("o_proj.bias") for name in new), "Qwen2 without some heads is a LLaMA with biases"
    outside = [name for name in before if any(word in name for word in ("vision", "visual", "projector", "connector"))]
    assert outside
    assert all(torch.equal(before[name], after[name]) for name in outside)


@pytest.mark.parametrize("model_type", [pytest.param(name, marks=pytest.mark.second) for name in WIDTHS])
def test_the_projector_is_cut_with_the_hidden_channels(model_type: str, tmp_path: Path) -> None:
    check(model_type, tmp_path, lambda text: plan_of(text, hidden=48), stock=model_type not in SQUARE)


@pytest.mark.parametrize("model_type", SQUARE)
def test_heads_and_stream_that_are_cut_alike_are_a_stock_model(model_type: str, tmp_path: Path) -> None:
    check(model_type, tmp_path, lambda text: plan_of(text, hidden=32), stock=True)


@pytest.mark.parametrize("model_type", [*OTHERS, *FIRST])
def test_sizes_by_layer_are_a_pruned_multimodal_model(model_type: str, tmp_path: Path) -> None:
    out = check(model_type, tmp_path, unequal_plan, stock=False)
    again = export(out, tmp_path / "again")
    written, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "again", out))
    assert again.architecture.startswith("Pruned")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)


@pytest.mark.parametrize("model_type", ["gemma3", "qwen2_5_vl"])
def test_a_pruned_multimodal_model_generates_from_its_cache(model_type: str, tmp_path: Path) -> None:
    dense = write_tower(model_type, tmp_path / "dense")
    out = prune_by(unequal_plan(load_model(dense)[0]), dense)
    model, inputs = AutoModelForMultimodalLM.from_pretrained(out), prompt(model_type)
    options: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    cached, whole = (model.generate(**inputs, **options, use_cache=use) for use in (True, False))
    assert torch.equal(cached, whole)


def test_a_gemma3_without_hidden_channels_has_a_narrower_projector(tmp_path: Path) -> None:
    out = check("gemma3", tmp_path, lambda text: plan_of(text, hidden=48), stock=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(out / "model.safetensors").items()}
    assert next(shape for name, shape in shapes.items() if name.endswith("mm_input_projection_weight")) == (32, 48)


@pytest.mark.second
@pytest.mark.process
def test_plain_transformers_reads_the_folder_in_a_process_without_pyprune(tmp_path: Path) -> None:
    dense = write_tower("gemma3", tmp_path / "dense")
    plan = plan_of(load_model(dense)[0])
    out = prune_by(plan, dense)
    torch.save(prompt("gemma3"), tmp_path / "inputs.pt")
    command = [sys.executable, "-c", CHILD, str(out), str(tmp_path / "inputs.pt"), str(tmp_path / "logits.pt")]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    assert_same_logits(torch.load(tmp_path / "logits.pt"), masked_logits(dense, plan, "gemma3"))


def test_a_method_calibrates_the_tower_on_text(tmp_path: Path) -> None:
    dense = write_tower("mistral3", tmp_path / "dense")
    text = write_text(tmp_path / "text.txt")
    data = {"source": str(text), "samples": 3, "sequence_length": 24}
    options = _options(method="wanda", ratio=0.3, score={"uniform": True}, data=data)
    result = prune_checkpoint(dense, options, out=tmp_path / "out")
    assert any("text tower" in note for note in result.notes)
    pruned, _ = load_model(tmp_path / "out")
    assert pruned.config.intermediate_size < 48
    again = export(tmp_path / "out", tmp_path / "again")
    assert again.architecture == "Mistral3ForConditionalGeneration"
    with pytest.raises(ConfigError, match="without quantisation"):
        export(tmp_path / "out", tmp_path / "rounded", quantise="fp8")


def test_buffers_of_a_tower_are_written_in_the_dtype_of_the_source(tmp_path: Path) -> None:
    dense = write_tower("gemma4", tmp_path / "dense", dtype=torch.bfloat16)
    out = prune_by(plan_of(load_model(dense)[0]), dense)
    load_model(out)
    assert ModelSource.of(out).dtype == "bfloat16"
    assert any(name.endswith("layer_scalar") for name in load_file(out / "model.safetensors"))


def test_layers_after_which_features_of_images_are_added_are_kept(tmp_path: Path) -> None:
    dense = write_tower("qwen3_vl", tmp_path / "dense")
    text, _ = load_model(dense)
    assert removable_layers(text) == (1, 2, 3, 4)
    with pytest.raises(ConfigError, match="features of images are added after each of its first 1 layers"):
        prune_by(family_for(text).plan(text.config).drop_layers([0]), dense)


def test_scores_give_every_layer_the_same_widths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense, text = write_tower("qwen2_5_vl", tmp_path / "dense"), write_text(tmp_path / "text.txt")
    data = {"source": str(text), "samples": 3, "sequence_length": 24}
    prune_checkpoint(dense, _options(method="taylor", ratio=0.1, data=data), out=tmp_path / "equal")
    config = json.loads((tmp_path / "equal" / "config.json").read_text())
    assert config["model_type"] == "qwen2_5_vl"
    assert config["text_config"]["num_attention_heads"] == 4
    assert "--uniform" in capsys.readouterr().err
    options = _options(method="magnitude", ratio=0.05, score={"layers": [1, 2]})
    prune_checkpoint(dense, options, out=tmp_path / "unequal")
    config = json.loads((tmp_path / "unequal" / "config.json").read_text())
    assert config["model_type"] == "pruned_qwen2_5_vl"
    assert config["pruned_config"]["per_layer_config"].keys() == {"1", "2"}


def test_channels_inside_a_projector_are_reported(tmp_path: Path) -> None:
    dense = write_tower("mistral3", tmp_path / "dense")
    options = _options(method="magnitude", ratio=0.26, score={"axes": ["hidden"]}, hidden_multiple=16)
    result = prune_checkpoint(dense, options, out=tmp_path / "out")
    assert any("its 16 inner channels with the smallest weights are removed too" in note for note in result.notes)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    [inside] = [weights[name] for name in weights if name.endswith("linear_1.weight")]
    before = load_file(dense / "model.safetensors")
    [whole] = [before[name] for name in before if name.endswith("linear_1.weight")]
    assert {tuple(row.tolist()) for row in inside} < {tuple(row.tolist()) for row in whole}, "they are not scaled"


def test_an_unknown_projector_closes_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = write_tower("llava", tmp_path / "dense")
    monkeypatch.delitem(WIDTHS, "llava")
    with pytest.raises(ConfigError, match="knows no cut of the projector"):
        prune_by(plan_of(load_model(dense)[0], hidden=48), dense)


def test_a_tower_that_computes_another_text_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="computes other logits than a 'cohere2' model"):
        text_model(tiny_tower(REFUSED))


def test_types_of_towers_without_a_table_are_refused_by_name(tmp_path: Path) -> None:
    dense = write_tower("gemma3", tmp_path / "dense")
    values = json.loads((dense / "config.json").read_text())
    values |= {"model_type": "glm4v", "text_config": values["text_config"] | {"model_type": "glm4v_text"}}
    (dense / "config.json").write_text(json.dumps(values))
    with pytest.raises(UnsupportedModelError, match="glm4v_text"):
        load_model(dense)


def test_the_table_in_the_documentation_is_the_table() -> None:
    """`pyprune families --markdown` prints it."""
    table = multimodal_table()
    assert {row[0] for row in table.rows} == {*TOWERS}
    assert markdown_table(table) in (REPO / "docs" / "reference" / "families.md").read_text(encoding="utf-8")
