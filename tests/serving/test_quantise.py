"""Quantised export: nearest values of the scales, widths checked before anything is written, who reads the result."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from pyprune.checkpoint.load import load_model
from pyprune.checkpoint.record import read_pruning_json
from pyprune.checkpoint.save import save_checkpoint
from pyprune.checkpoint.shards import TensorFiles
from pyprune.errors import CheckpointError, ConfigError, MissingDependencyError
from pyprune.families import count_parameters
from pyprune.plan import PrunePlan
from pyprune.quality.measure import evaluate
from pyprune.serving import quantise
from pyprune.serving.checkpoints import read_checkpoint
from pyprune.serving.export import export
from pyprune.serving.quantise import SCHEMES, choose_quantisation
from tests._support.cli import refused, run
from tests._support.models import tiny_batch, tiny_model
from tests._support.quantised import cut_model, in_32s, rounded, write_pair
from tests._support.rounded import linear_layers, round_inputs_, rounded_float8, with_weights_of
from tests._support.served import per_layer
from tests._support.tokenizer import tiny_tokenizer

pytest.importorskip("compressed_tensors")

PACKED = [("w8a16", torch.int32), ("w4a16", torch.int32)]


@pytest.fixture(scope="module", params=SCHEMES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The same model with sizes per layer, plain and in every format."""
    out = tmp_path_factory.mktemp(request.param)
    write_pair(out, "llama-head-dim", in_32s, request.param)
    return request.param, out


def test_stored_weights_are_the_nearest_values_of_their_scales(pair: tuple[str, Path]) -> None:
    name, out = pair
    plain, read = load_model(out / "plain")[0], load_model(out / "quantised", quantised=True)[0]
    stored = linear_layers(read)
    for layer, module in linear_layers(plain).items():
        weight = module.weight.detach()
        found = stored[layer].weight.detach()
        if name == "w4a16":
            _nearest_within_clipped_ranges(weight, found)
            continue
        expected = rounded(weight, 8)
        if name == "fp8":
            expected = rounded_float8(weight, weight.abs().amax(-1, keepdim=True) / 448)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def _nearest_within_clipped_ranges(weight: Tensor, found: Tensor) -> None:
    """4 bits: at most 16 values a group, and a smaller squared error than with the range of the largest weight."""
    groups = found.unflatten(-1, (-1, 32))
    assert max(len(group.unique()) for group in groups.flatten(0, 1)) <= 16
    plain_error = (weight - rounded(weight, 4, 32)).unflatten(-1, (-1, 32)).square().sum(-1)
    error = (weight - found).unflatten(-1, (-1, 32)).square().sum(-1)
    assert (error <= plain_error * 1.0001).all()
    assert error.sum() < 0.95 * plain_error.sum()


def test_embeddings_head_norms_and_record_stay(pair: tuple[str, Path]) -> None:
    name, out = pair
    plain, stored = TensorFiles(out / "plain"), TensorFiles(out / "quantised")
    kept = [n for n in plain.names() if "proj" not in n]
    assert "model.embed_tokens.weight" in kept
    assert "model.norm.weight" in kept
    assert all(torch.equal(plain.read(n), stored.read(n)) for n in kept)
    records = [read_pruning_json(out / folder, verify_files=True) for folder in ("plain", "quantised")]
    assert records[0].plan == records[1].plan
    assert records[1].plan is not None
    assert records[1].provenance["method"] == "by hand"
    assert records[1].provenance["parameters"] == records[0].provenance["parameters"]
    assert records[1].provenance["weights"].startswith(f"{name}: ")
    assert f"| weights | {name}: " in (out / "quantised" / "README.md").read_text()
    config = json.loads((out / "quantised" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    assert config["per_layer_config"]["2"]["num_key_value_heads"] == 1


def test_parameters_are_the_model_s_however_its_weights_are_stored(pair: tuple[str, Path], tmp_path: Path) -> None:
    _, out = pair
    foreign, figures = tmp_path / "foreign", tmp_path / "figures.json"
    shutil.copytree(out / "quantised", foreign)
    (foreign / "pruning.json").unlink()
    wanted = count_parameters(load_model(out / "plain")[0])
    for folder in (out / "plain", out / "quantised", foreign):
        result = run("inspect", folder, "--json", figures)
        assert result.exit_code == 0, result.output
        assert json.loads(figures.read_text())["parameters"] == wanted


def test_a_packed_weight_with_another_shape_is_damaged(tmp_path: Path) -> None:
    write_pair(tmp_path, "llama-head-dim", in_32s, "w4a16")
    foreign = tmp_path / "quantised"
    (foreign / "pruning.json").unlink()
    tensors = load_file(foreign / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight_shape"
    for damaged in (torch.tensor([96, -64]), torch.tensor([96, 10**6]), torch.tensor([7, 64]), torch.tensor([96])):
        save_file({**tensors, name: damaged}, foreign / "model.safetensors", {"format": "pt"})
        assert f"{name}, which says its own, is" in refused("inspect", foreign).replace("\n", " ")
    save_file({k: v for k, v in tensors.items() if k != name}, foreign / "model.safetensors", {"format": "pt"})
    assert "is missing" in refused("inspect", foreign).replace("\n", " ")


def test_weights_in_nvfp4_count_as_what_they_stand_for(tmp_path: Path) -> None:
    """Two values in a byte; no shape is stored beside them, as pack-quantized does."""
    write_pair(tmp_path, "llama-head-dim", in_32s, "w4a16")
    foreign = tmp_path / "quantised"
    wanted = json.loads((foreign / "pruning.json").read_text())["provenance"]["parameters"]
    (foreign / "pruning.json").unlink()
    tensors = {k: v for k, v in load_file(foreign / "model.safetensors").items() if not k.endswith("weight_shape")}
    for name in [name for name in tensors if name.endswith("weight_packed")]:
        rows, words = tensors[name].shape
        tensors[name] = torch.zeros(rows, 4 * words, dtype=torch.uint8)
    save_file(tensors, foreign / "model.safetensors", {"format": "pt"})
    assert read_checkpoint(foreign).parameters == wanted


def _write_in_words(folder: Path, method: str, bits: int, *, groups_of_inputs: bool = False) -> int:
    """A folder as GPTQ or AWQ write it, with zeros for weights; returns the parameters that it stands for."""
    model = tiny_model("llama-head-dim")
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        outputs, inputs = tensors.pop(name).shape
        stem, packed = name.removesuffix("weight"), [inputs, outputs]
        packed[0 if method == "gptq" else 1] //= 32 // bits
        tensors[f"{stem}qweight"] = torch.zeros(packed, dtype=torch.int32)
        tensors[f"{stem}qzeros"] = torch.zeros(2, outputs * bits // 32, dtype=torch.int32)
        tensors[f"{stem}scales"] = torch.ones(2, outputs, dtype=torch.float16)
        if groups_of_inputs:
            tensors[f"{stem}g_idx"] = torch.zeros(inputs, dtype=torch.int32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": bits, "group_size": 24}
    (folder / "config.json").write_text(json.dumps(config))
    return count_parameters(model)


@pytest.mark.parametrize(
    ("method", "bits", "groups_of_inputs"), [("gptq", 4, True), ("gptq", 8, False), ("awq", 4, False)]
)
def test_weights_that_other_programs_packed_are_counted_as_what_they_stand_for(
    method: str, bits: int, groups_of_inputs: bool, tmp_path: Path
) -> None:
    wanted = _write_in_words(tmp_path / "foreign", method, bits, groups_of_inputs=groups_of_inputs)
    result = run("inspect", tmp_path / "foreign", "--json", tmp_path / "figures.json")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "figures.json").read_text())["parameters"] == wanted


@pytest.mark.parametrize("damage", ["no scales", "other scales", "no bits"])
def test_packed_weights_that_cannot_be_counted_are_refused(damage: str, tmp_path: Path) -> None:
    _write_in_words(tmp_path, "gptq", 4)
    tensors = load_file(tmp_path / "model.safetensors")
    scales = "model.layers.0.mlp.down_proj.scales"
    if damage == "no bits":
        config = json.loads((tmp_path / "config.json").read_text())
        del config["quantization_config"]["bits"]
        (tmp_path / "config.json").write_text(json.dumps(config))
    elif damage == "no scales":
        del tensors[scales]
    else:
        tensors[scales] = torch.ones(2, 7)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    message = " ".join(refused("inspect", tmp_path).split())
    assert ".qweight of" in message
    assert "not 2 to 8 bits as GPTQ and AWQ write them" in message


@pytest.mark.parametrize(("name", "dtype"), [("w8a8-int8", torch.int8), ("fp8", torch.float8_e4m3fn), *PACKED])
def test_a_stored_weight_has_the_type_of_its_format(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    write_pair(tmp_path, "qwen2", in_32s, name)
    stored = TensorFiles(tmp_path / "quantised")
    weight = "model.layers.0.mlp.up_proj.weight"
    packed = name in ("w8a16", "w4a16")
    assert stored.dtype(f"{weight}_packed" if packed else weight) == dtype
    assert (weight in stored.names()) is not packed
    assert "model.layers.0.self_attn.q_proj.bias" in stored.names()


def test_transformers_loads_the_folder_by_itself(pair: tuple[str, Path]) -> None:
    name, out = pair
    loaded = AutoModelForCausalLM.from_pretrained(out / "quantised", dtype=torch.float32).eval()
    measured = load_model(out / "quantised", quantised=True)[0]
    with torch.no_grad():
        torch.testing.assert_close(loaded(tiny_batch()).logits, measured(tiny_batch()).logits, rtol=0, atol=1e-6)
        own = load_model(out / "plain")[0]
        difference = (own(tiny_batch()).logits - measured(tiny_batch()).logits).abs().max()
    assert difference > 1e-3, f"{name} computes what the plain weights do"


@pytest.mark.parametrize("name", ["w8a8-int8", "fp8"])
def test_inputs_are_rounded_when_a_loaded_model_computes(tmp_path: Path, name: str) -> None:
    """compressed-tensors ends an int8 range at 127.5 steps and vLLM at 127: closer to each other than to unrounded."""
    write_pair(tmp_path, "llama", in_32s, name)
    plain, read = load_model(tmp_path / "plain")[0], load_model(tmp_path / "quantised", quantised=True)[0]
    with_weights_of(plain, read)
    with torch.no_grad():
        unrounded = plain(tiny_batch()).logits
        round_inputs_(plain, name)
        expected, found = plain(tiny_batch()).logits, read(tiny_batch()).logits
    effect = (expected - unrounded).square().mean().sqrt()
    assert effect > 0
    assert (found - unrounded).square().mean().sqrt() > 0.5 * effect
    if name == "fp8":  # the same scale in both
        assert (found - expected).square().mean().sqrt() < 0.5 * effect


def test_int8_takes_any_width_and_bfloat16(tmp_path: Path) -> None:
    model, plan = cut_model("mistral", per_layer, intermediate_size=40)
    report = export(model, tmp_path / "out", plan=plan, dtype="bfloat16", quantise="w8a8-int8")
    assert report.architecture == "PrunedMistralForCausalLM"
    assert report.parameters == count_parameters(model)
    assert report.bytes < export(model, tmp_path / "plain", plan=plan, dtype="bfloat16").bytes
    stored = TensorFiles(tmp_path / "out")
    weight = "model.layers.0.mlp.down_proj.weight"
    assert (stored.dtype(weight), stored.dtype(f"{weight}_scale")) == (torch.int8, torch.bfloat16)
    assert stored.shape(weight) == (104, 24)
    scale = stored.read(f"{weight}_scale").float()
    exact = model.model.layers[0].mlp.down_proj.weight.detach().to(torch.bfloat16).float()
    # Half a step everywhere, but where the end of the range was rounded to bfloat16 with the scale.
    assert ((stored.read(weight).float() * scale - exact).abs() <= scale * 1.01).all()
    assert all(p.is_floating_point() and not hasattr(p, "quantization_scheme") for p in model.parameters())


def test_the_source_model_is_left_alone(tmp_path: Path) -> None:
    model, plan = cut_model("llama", in_32s)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    export(model, tmp_path / "out", plan=plan, quantise="w4a16")
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize(
    ("name", "layer", "size", "multiple", "advice"),
    [
        ("fp8", "model.layers.0.mlp.gate_proj writes", 24, 16, "score.ffn_multiple=16"),
        ("w4a16", "model.layers.0.self_attn.q_proj reads", 104, 32, "hidden_multiple=32"),
        ("w8a16", "model.layers.0.mlp.down_proj reads", 42, 4, "score.ffn_multiple=4"),
    ],
)
def test_widths_are_checked_before_anything_is_written(
    tmp_path: Path, name: str, layer: str, size: int, multiple: int, advice: str
) -> None:
    def cut(plan: PrunePlan) -> PrunePlan:
        if name == "w4a16":
            return plan.keep_hidden(range(104))
        return plan.with_layer(0, ffn=range(size))

    model, plan = cut_model("llama-head-dim", cut)
    with pytest.raises(ConfigError) as caught:
        export(model, tmp_path / "out", plan=plan, quantise=name)
    text = str(caught.value)
    assert f"{layer} {size} channels; {name} needs a multiple of {multiple}." in text
    assert advice in text
    assert "w8a8-int8 takes any width" in text
    assert list(tmp_path.iterdir()) == []


def test_the_largest_group_that_divides_every_width_is_taken() -> None:
    model, _ = cut_model("llama-head-dim", lambda plan: plan, intermediate_size=256)
    assert choose_quantisation(model, "w4a16").group == 128
    narrow, _ = cut_model("llama-head-dim", lambda plan: plan.with_layer(1, ffn=range(64)), intermediate_size=256)
    assert choose_quantisation(narrow, "w4a16").group == 64


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = cut_model("llama", in_32s)

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("in the middle")

    monkeypatch.setattr(quantise, "round_weight", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        export(model, tmp_path / "out", plan=plan, quantise="w8a16")
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(".")] == []


def test_unknown_names_and_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = cut_model("llama", in_32s)
    with pytest.raises(ConfigError, match="Did you mean 'w4a16'"):
        export(model, tmp_path / "out", plan=plan, quantise="w4a61")
    monkeypatch.setattr(quantise, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'pyprune\[vllm\]'"):
        export(model, tmp_path / "out", plan=plan, quantise="fp8")


def test_the_command_writes_measures_and_shows(tmp_path: Path) -> None:
    model, plan = cut_model("llama", in_32s)
    save_checkpoint(model, tiny_tokenizer(), tmp_path / "a", plan=plan, provenance={"method": "by hand"})
    output = run("export", tmp_path / "a", "--quantise", "w8a8-int8", "--out", tmp_path / "q").output
    assert "Weights: w8a8-int8: int8, a scale for each output channel" in output
    assert "w8a8-int8: int8" in run("inspect", tmp_path / "q").output
    (tmp_path / "text.txt").write_text("\n\n".join(f"Paragraph {i} of a text about {i * i}." for i in range(300)))
    found = [
        evaluate(tmp_path / folder, ppl=str(tmp_path / "text.txt"), protocol="ppl-128", max_tokens=1024)
        for folder in ("a", "q")
    ]
    dense, rounded_ = (result.perplexity[0].perplexity for result in found)
    assert rounded_ != dense
    assert rounded_ == pytest.approx(dense, rel=0.05)


def test_a_quantised_folder_is_not_pruned_recovered_or_exported_again(tmp_path: Path) -> None:
    write_pair(tmp_path, "llama", in_32s, "w8a8-int8")
    folder = tmp_path / "quantised"
    reason = "quantised checkpoints are not read here"
    for again in (lambda: load_model(folder), lambda: export(folder, tmp_path / "again")):
        with pytest.raises(CheckpointError, match=reason):
            again()
    text = tmp_path / "text.txt"
    text.write_text("Some words. " * 200)
    for command in (
        ["prune", folder, "--method", "magnitude", "--ratio", "0.2", "--set", f"data.source={text}"],
        ["recover", folder, "--set", f"data.source={text}"],
        ["export", folder, "--format", "gguf"],
    ):
        out = tmp_path / "again"
        assert "quantised" in refused(*command, "--out", out)
        assert not out.exists()


@pytest.mark.parametrize(
    ("file_format", "name", "said"),
    [
        ("safetensors", "q8_0", "belongs to --format gguf; with --format safetensors it is one of w8a8-int8, w8a16"),
        ("gguf", "fp8", "belongs to --format safetensors; with --format gguf it is one of f32, f16"),
        ("safetensors", "w4a61", "Did you mean 'w4a16'?"),
        ("gguf", "q8_O", "Did you mean 'q8_0'?"),
    ],
)
def test_a_format_of_another_kind_of_file_is_refused(tmp_path: Path, file_format: str, name: str, said: str) -> None:
    output = refused("export", tmp_path, "--format", file_format, "--quantise", name, "--out", tmp_path / "o")
    assert said in " ".join(output.split())


@pytest.mark.parametrize("name", ["w8a8-int8", "fp8"])
def test_scales_that_float16_can_hardly_hold_are_rounded_up(tmp_path: Path, name: str) -> None:
    """Rounded down, they would cut the largest weights short; rounded to zero, they would make zeros no numbers."""
    model = tiny_model("llama-head-dim", intermediate_size=48)
    weight = model.get_submodule("model.layers.0.mlp.up_proj").weight
    with torch.no_grad():
        weight.mul_(2e-5)
        weight[0] = 0
        weight[1, 1:] = 0
    wanted = weight.detach().half().float()
    save_checkpoint(model.half(), tiny_tokenizer(), tmp_path / "source", plan=None, provenance={})
    export(tmp_path / "source", tmp_path / "out", quantise=name)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    scale = stored["model.layers.0.mlp.up_proj.weight_scale"]
    assert scale.dtype == torch.float16
    found = stored["model.layers.0.mlp.up_proj.weight"].float() * scale.float()
    assert torch.isfinite(found).all()
    largest = wanted.abs().amax(dim=1)
    torch.testing.assert_close(found.abs().amax(dim=1), largest, rtol=0.07, atol=float(2**-25))
