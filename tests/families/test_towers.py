"""Text towers of multimodal models: pruned on disk, they answer about an image as the masked model does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForMultimodalLM, PreTrainedModel

from pyprune.checkpoint.load import ModelSource, load_model
from pyprune.checkpoint.tower import WIDTHS, text_model, tower_of, whole_model
from pyprune.cut.mask import mask_
from pyprune.cut.target import choose_target
from pyprune.errors import ConfigError, UnsupportedModelError
from pyprune.families import family_for
from pyprune.plan import PrunePlan
from pyprune.run.prune import prune_checkpoint
from pyprune.run.recipe import build_config
from pyprune.serving.export import export
from tests._support.compare import assert_same_logits
from tests._support.text import write_model, write_text
from tests._support.towers import REFUSED, TOWERS, prompt, tiny_tower

FIRST = ("qwen3_vl", "gemma3")
"""Types of the first tier: one whose tower has no causal LM of its own, and one whose has."""
OTHERS = [pytest.param(name, marks=pytest.mark.second) for name in TOWERS if name not in FIRST]
WITHOUT_HEADS = ("qwen2_vl", "qwen2_5_vl")
"""Types whose classes derive the width of a head from the hidden size."""
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


def plan_of(text: PreTrainedModel, *, heads: bool = True, hidden: bool = False) -> PrunePlan:
    """Return a plan of equal sizes without the third layer."""
    family = family_for(text)
    plan = family.plan(text.config)
    for index in range(plan.dense.num_layers):
        plan = plan.with_layer(index, ffn=range(index, index + 32))
        if heads and plan.dense.units("kv_heads", index):
            plan = plan.with_layer(index, kv_heads=[1], query_heads=[2, 3])
    plan = plan.drop_layers([2])
    return plan.keep_hidden(range(3, 51)) if hidden else plan


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
        cut = tower.cut(choose_target(family, text.config, plan).config, plan.hidden, 1.0)
        removed = torch.tensor(plan.removed_hidden)
        for name, tensor in tower.rest.items():
            for dim, size in enumerate(cut.rest[name].shape):
                if size != tensor.shape[dim]:
                    tensor.index_fill_(dim, removed, 0)
    return logits(whole_model(text), model_type)


def check(model_type: str, folder: Path, *, hidden: bool) -> Path:
    """Prune a tower on disk, and compare the written multimodal model with the masked one."""
    dense = write_tower(model_type, folder / "dense")
    text, _ = load_model(dense)
    plan = plan_of(text, heads=model_type not in WITHOUT_HEADS, hidden=hidden)
    expected = masked_logits(dense, plan, model_type)
    out = prune_by(plan, dense)
    model, info = AutoModelForMultimodalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    assert type(model).__name__ == type(tiny_tower(model_type)).__name__
    assert_same_logits(logits(model, model_type), expected)
    assert {name: (out / name).read_text() for name in PROCESSOR} == PROCESSOR
    return out


@pytest.mark.parametrize("model_type", [*OTHERS, *FIRST])
def test_a_pruned_tower_answers_about_an_image_as_the_masked_model_does(model_type: str, tmp_path: Path) -> None:
    out = check(model_type, tmp_path, hidden=False)
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "dense", out))
    new = {re.sub(r"\d+", "0", name) for name in after} - {re.sub(r"\d+", "0", name) for name in before}
    assert all(name.endswith("o_proj.bias") for name in new), "Qwen2 without some heads is a LLaMA with biases"
    outside = [name for name in before if any(word in name for word in ("vision", "visual", "projector", "connector"))]
    assert outside
    assert all(torch.equal(before[name], after[name]) for name in outside)


@pytest.mark.parametrize("model_type", [pytest.param(name, marks=pytest.mark.second) for name in WIDTHS])
def test_the_projector_is_cut_with_the_hidden_channels(model_type: str, tmp_path: Path) -> None:
    check(model_type, tmp_path, hidden=True)


def test_a_gemma3_without_hidden_channels_has_a_narrower_projector(tmp_path: Path) -> None:
    out = check("gemma3", tmp_path, hidden=True)
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


def test_cuts_that_the_class_cannot_hold_are_refused(tmp_path: Path) -> None:
    dense = write_tower("qwen3_vl", tmp_path / "dense")
    text, _ = load_model(dense)
    plan = family_for(text).plan(text.config)
    for wrong, reason in {
        plan.drop_layers([0]): "features of images are added after each of its first 1 layers",
        plan.with_layer(1, ffn=range(9)): "no place for sizes that only the architecture 'pruned_qwen3'",
    }.items():
        with pytest.raises(ConfigError, match=reason):
            prune_by(wrong, dense)
    closed = tower_of(load_model(write_tower("qwen2_vl", tmp_path / "other"))[0]).closed_axes()  # type: ignore[union-attr]
    assert closed.keys() == {"hidden", "heads"}
    with pytest.raises(ConfigError, match="--uniform"):
        prune_checkpoint(dense, _options(method="magnitude", ratio=0.2), out=tmp_path / "out")


def test_axes_that_the_projector_closes_are_refused(tmp_path: Path) -> None:
    for model_type, options, reason in (
        ("llava", {"hidden": True}, "knows no cut of the projector"),
        ("qwen2_vl", {}, "derives the width of a head"),
    ):
        dense = write_tower(model_type, tmp_path / model_type / "dense")
        with pytest.raises(ConfigError, match=reason):
            prune_by(plan_of(load_model(dense)[0], **options), dense)


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
