"""Every variant of the weights is what it says, and nothing else moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyprune.cut.mask import restored
from pyprune.errors import ConfigError
from pyprune.families import named_axes
from pyprune.robustness.perturbations import (
    VARIANTS,
    Adapter,
    VariantError,
    VariantReport,
    is_layer_matrix,
    round_to_int8,
    set_variant_,
)
from tests._support.models import tiny_model


def changed(name: str, model: Any, **adapter: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], VariantReport]:
    """(before, after, report) of one variant."""
    with restored(model) as originals:
        report = set_variant_(model, originals, name, Adapter(**adapter))
        return originals, {n: p.detach().clone() for n, p in model.named_parameters()}, report


@pytest.mark.parametrize("family", ["llama", "qwen2-tied", "opt", "gemma3"])
@pytest.mark.parametrize(("name", "dtype"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_rounding_is_to_numbers_of_that_type(name: str, dtype: torch.dtype, family: str) -> None:
    before, after, report = changed(name, tiny_model(family))
    for key, weight in before.items():
        assert torch.equal(after[key], weight.to(dtype).float())
    assert 0.9 < report.changed <= 1
    # Round to nearest misses by at most half a unit in the last place: 2^-9 and 2^-12, relative.
    assert 0.2 * torch.finfo(dtype).eps < report.relative_size < 0.5 * torch.finfo(dtype).eps


@pytest.mark.parametrize(("rank", "size"), [(1, 0.01), (3, 0.05)])
def test_a_low_rank_update_has_the_asked_rank_and_size(rank: int, size: float) -> None:
    model = tiny_model("llama")
    before, after, report = changed("lora", model, rank=rank, size=size)
    matrices = {p.name for p in named_axes(model) if is_layer_matrix(p)}
    assert len(matrices) == 4 * 7
    for name, weight in before.items():
        update = after[name].double() - weight.double()
        if name not in matrices:
            assert not update.any(), name
            continue
        assert update.norm() / weight.double().norm() == pytest.approx(size, rel=1e-4)
        values = torch.linalg.svdvals(update)
        assert values[rank] < 1e-4 * values[0], f"{name} has more than rank {rank}"
        assert values[rank - 1] > 1e-2 * values[0]
    assert 0 < report.relative_size < size


def test_the_update_is_seeded() -> None:
    model = tiny_model("llama")
    first, again, other = (changed("lora", model, seed=seed)[1] for seed in (0, 0, 1))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])


@pytest.mark.parametrize("family", ["llama", "opt", "phi"])
def test_int8_has_at_most_255_levels_a_row_and_rounds_to_the_nearest(family: str) -> None:
    model = tiny_model(family)
    before, after, _ = changed("int8", model)
    for param in named_axes(model):
        weight, rounded = before[param.name], after[param.name]
        if not is_layer_matrix(param):
            assert torch.equal(weight, rounded)
            continue
        scale = weight.abs().amax(1, keepdim=True) / 127
        levels = rounded / scale
        assert (levels - levels.round()).abs().max() < 1e-4
        assert levels.abs().max() < 127.001
        assert ((rounded - weight).abs() <= scale * 0.5001).all()
        assert not torch.equal(weight, rounded)


def test_int8_of_a_long_row_uses_its_levels() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 20_000, generator=generator)
    weight[1] = 0
    rounded = round_to_int8(weight)
    counts = [len(row.unique()) for row in rounded]
    assert counts[1] == 1
    assert not rounded[1].any()
    assert all(100 < counts[i] <= 255 for i in (0, 2))
    assert rounded.abs().amax(1)[0] == pytest.approx(float(weight[0].abs().max()))


@pytest.mark.parametrize("name", VARIANTS)
def test_float32_is_the_original_again(name: str) -> None:
    model = tiny_model("llama")
    with restored(model) as originals:
        set_variant_(model, originals, name)
        report = set_variant_(model, originals, "float32")
        assert all(torch.equal(p, originals[n]) for n, p in model.named_parameters())
    assert (report.relative_size, report.changed) == (0.0, 0.0)


def test_variants_start_from_the_originals_not_from_one_another() -> None:
    model = tiny_model("llama")
    alone = changed("bfloat16", model)[1]
    with restored(model) as originals:
        set_variant_(model, originals, "int8")
        set_variant_(model, originals, "bfloat16")
        assert all(torch.equal(p, alone[n]) for n, p in model.named_parameters())


def test_weights_beyond_float16_are_refused() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = 1e5
    with pytest.raises(VariantError, match=r"up_proj.weight holds 1e\+05, beyond float16"):
        changed("float16", model)
    changed("bfloat16", model)


def test_an_unknown_variant_and_another_dtype_are_refused() -> None:
    with pytest.raises(ConfigError, match="There is no variant 'int4'; use float32, bfloat16"):
        changed("int4", tiny_model("llama"))
    with pytest.raises(ConfigError, match="load the model so"):
        changed("int8", tiny_model("llama").bfloat16())
