"""Counted parameters and bytes, against models and exported files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from pyprune.checkpoint.save import save_checkpoint
from pyprune.checkpoint.shards import read_header, weight_files
from pyprune.cut.compact import compact_
from pyprune.errors import BudgetError, ConfigError
from pyprune.families import family_for, parameter_shapes, parameters_after
from pyprune.fit.choices import ChoiceOptions
from pyprune.fit.cost import Costs, ExactCosts
from pyprune.fit.formats import WEIGHT_FORMATS
from pyprune.fit.quantities import Quantity
from pyprune.plan import PrunePlan
from pyprune.serving.export import export
from pyprune.serving.gguf.blocks import BLOCKS
from pyprune.serving.gguf.write import export_gguf
from pyprune.serving.quantise import SCHEMES
from tests._support.inferred import tiny_inferred
from tests._support.llama_cpp import VOCAB, byte_level_tokenizer
from tests._support.models import TINY, tiny_model
from tests._support.plans import axis_plans

PARAMETERS = Quantity("parameters")


def _identity(model: PreTrainedModel) -> PrunePlan:
    return family_for(model).plan(model.config)


@pytest.mark.parametrize("name", TINY)
def test_parameters_are_those_of_the_table(name: str) -> None:
    model = tiny_model(name)
    costs = ExactCosts.of(model.config)
    for plan in axis_plans(_identity(model)).values():
        expected = parameters_after(family_for(model), parameter_shapes(model), plan)
        assert costs.predict(PARAMETERS, plan) == expected


def _stored_bytes(folder: Path) -> int:
    return sum(place.entry.nbytes for file in weight_files(folder) for place in read_header(file))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama-head-dim", "llama-mha-bias", "qwen3", "opt", "gemma3"])
def test_memory_is_the_bytes_of_the_written_tensors(name: str, dtype: str, tmp_path: Path) -> None:
    for label in ("heads", "unequal", "skipped"):
        model = tiny_model(name)
        plan = axis_plans(_identity(model))[label]
        costs = ExactCosts.of(model.config, dtype)
        compact_(model, plan)
        folder = save_checkpoint(model, None, tmp_path / label, plan=plan, provenance={}, dtype=dtype)
        assert costs.predict(Quantity("memory", 0), plan) == _stored_bytes(folder)


@pytest.mark.parametrize(
    ("quantise", "width"),
    [*((kind, 64) for kind in ("f32", "f16", "bf16", "q8_0", "q4_0", "q5_1")), ("q4_k", 256), ("q6_k", 256)],
)
@pytest.mark.parametrize("label", ["identity", "unequal", "skipped-mlp"])
def test_memory_is_the_bytes_of_a_gguf_file(label: str, quantise: str, width: int, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    # Sizes that blocks divide, FFN widths that they do not: both kinds of matrices are in the file.
    sizes = {"hidden_size": width, "intermediate_size": width, "num_attention_heads": 4}
    model = tiny_model("llama-head-dim", vocab_size=VOCAB, **sizes)
    whole = _identity(model)
    plans = axis_plans(whole) | {"skipped-mlp": whole.with_layer(1, ffn=[])}
    costs = ExactCosts.of(model.config, quantise)
    compact_(model, plans[label])
    folder = save_checkpoint(model, byte_level_tokenizer(), tmp_path / "c", plan=plans[label], provenance={})
    file = export_gguf(folder, tmp_path / "model.gguf", quantise=quantise).path
    data = file.stat().st_size - gguf.GGUFReader(file).data_offset
    assert costs.predict(Quantity("memory", 0), plans[label]) == data


def test_blocks_are_those_of_the_package() -> None:
    gguf = pytest.importorskip("gguf")
    assert {name: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]] for name in BLOCKS} == BLOCKS
    assert {name for name, form in WEIGHT_FORMATS.items() if form.layout == "gguf"} == set(BLOCKS)


def test_the_cache_counts_kv_heads_where_attention_is() -> None:
    config = tiny_model("llama-head-dim").config
    plan = _identity(tiny_model("llama-head-dim"))
    skipped = plan.with_layer(0, query_heads=[], kv_heads=[]).with_layer(1, query_heads=[0, 1, 2], kv_heads=[0])
    costs = ExactCosts.of(config, "float32")
    weights = costs.predict(Quantity("memory", 0), skipped)
    # Two whole layers of 2 KV heads and one of 1, keys and values of 16 channels, 4 bytes each.
    assert costs.predict(Quantity("memory", 100, 3), skipped) - weights == 5 * 2 * 16 * 4 * 300
    assert ExactCosts.of(config, "float32", kv_item=2).predict(Quantity("memory", 100, 3), skipped) - weights == (
        5 * 2 * 16 * 2 * 300
    )


def test_latent_attention_is_counted_with_a_cache_that_does_not_know_heads(tmp_path: Path) -> None:
    model = tiny_inferred("youtu")
    plan, shapes = axis_plans(_identity(model))["everything"], parameter_shapes(model)
    assert ExactCosts.of(model.config).predict(PARAMETERS, plan) == parameters_after(family_for(model), shapes, plan)
    costs = ExactCosts.of(model.config, "float32", ranks=2)
    weights = costs.predict(Quantity("memory", 0), plan)
    # A rank of 14 and 8 rotated channels for all heads, 4 bytes each, on both ranks of every layer with attention.
    layers = sum(layer.keeps("attention") for layer in plan.layers)
    assert costs.predict(Quantity("memory", 100, 3), plan) - weights == layers * 2 * (14 + 8) * 4 * 300
    compact_(model, plan)
    folder = save_checkpoint(model, None, tmp_path / "cut", plan=plan, provenance={}, dtype="float32")
    assert weights == _stored_bytes(folder)


def test_ranks_that_hold_the_same_kv_head_each_have_a_cache_of_it() -> None:
    config = tiny_model("llama-head-dim").config
    plan = _identity(tiny_model("llama-head-dim"))
    skipped = plan.with_layer(0, query_heads=[], kv_heads=[]).with_layer(1, query_heads=[0, 1, 2], kv_heads=[0])
    for ranks, heads in ((1, 5), (2, 6), (4, 12)):
        costs = ExactCosts.of(config, "float32", ranks=ranks)
        weights = costs.predict(Quantity("memory", 0), skipped)
        assert costs.predict(Quantity("memory", 100), skipped) - weights == heads * 2 * 16 * 4 * 100


@pytest.mark.parametrize("scheme", list(SCHEMES))
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_memory_is_the_bytes_of_quantised_tensors(name: str, scheme: str, tmp_path: Path) -> None:
    model = tiny_model(name, hidden_size=256, intermediate_size=384, num_attention_heads=8).to(torch.bfloat16)
    plan = _identity(model).with_layer(1, ffn=range(128)).with_layer(2, ffn=[])
    costs = ExactCosts.of(model.config, scheme)
    compact_(model, plan)
    export(model, tmp_path / "out", plan=plan, quantise=scheme)
    assert costs.predict(Quantity("memory", 0), plan) == _stored_bytes(tmp_path / "out")


@pytest.mark.parametrize(("multiple", "group"), [(0, 128), (64, 64), (32, 32)])
def test_scales_of_four_bit_weights_are_counted_for_the_widths_that_may_come(
    multiple: int, group: int, tmp_path: Path
) -> None:
    model = tiny_model("llama", hidden_size=256, intermediate_size=384, num_attention_heads=4).to(torch.bfloat16)
    plan = _identity(model).with_layer(1, ffn=range(multiple or 128))
    choices = ChoiceOptions(ffn_multiple=multiple) if multiple else None
    costs = ExactCosts.of(model.config, "w4a16", choices=choices)
    assert costs.weights.group == group
    compact_(model, plan)
    export(model, tmp_path / "out", plan=plan, quantise="w4a16")
    assert costs.predict(Quantity("memory", 0), plan) == _stored_bytes(tmp_path / "out")


def test_unknown_formats_and_times_are_refused() -> None:
    config = tiny_model().config
    with pytest.raises(ConfigError, match="Did you mean 'q8_0'"):
        ExactCosts.of(config, "q8")
    prefill = Quantity("prefill", 2048)
    with pytest.raises(BudgetError, match="prefill@2048 is a time"):
        ExactCosts.of(config).base(prefill, 48)
    with pytest.raises(BudgetError, match="pyprune profile MODEL"):
        Costs(ExactCosts.of(config)).base(prefill, 48)


def test_rotary_factors_in_a_gguf_file_count(tmp_path: Path) -> None:
    """LLaMA 3's: llama.cpp cannot compute them from the metadata."""
    gguf = pytest.importorskip("gguf")
    model = tiny_model("llama3-rope", vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_attention_heads=4)
    folder = save_checkpoint(model, byte_level_tokenizer(), tmp_path / "c", plan=None, provenance={})
    file = export_gguf(folder, tmp_path / "model.gguf", quantise="q8_0").path
    data = file.stat().st_size - gguf.GGUFReader(file).data_offset
    costs = ExactCosts.of(model.config, "q8_0")
    assert costs.extra > 0
    assert costs.predict(Quantity("memory", 0), _identity(model)) == data
