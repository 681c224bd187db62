"""What rounding to bfloat16 leaves of small changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyprune.ops import rounding
from pyprune.ops.rounding import changed_to_bfloat16


def on_bfloat16(*shape: int, seed: int = 0) -> Tensor:
    """Weights of a bfloat16 checkpoint, float32."""
    generator = torch.Generator().manual_seed(seed)
    return (0.02 * torch.randn(*shape, generator=generator)).bfloat16().float()


def kept(before: Tensor, change: Tensor, rounded: Tensor) -> float:
    """Share of a change that is left, by projection on it."""
    return float(((rounded.float() - before) * change).sum() / change.square().sum())


def test_an_update_below_half_a_spacing_stays_on_average() -> None:
    before = on_bfloat16(512, 512)
    change = 1e-5 * on_bfloat16(512, 512, seed=1) / 0.02
    assert kept(before, change, (before + change).bfloat16()) < 0.4, "to nearest most of it would be gone"
    rounded = changed_to_bfloat16(before + change, "w")
    assert rounded.dtype == torch.bfloat16
    assert 0.95 < kept(before, change, rounded) < 1.05
    assert torch.equal(rounded, changed_to_bfloat16(before + change, "w")), "the same each time"
    assert not torch.equal(rounded, changed_to_bfloat16(before + change, "v"))


def test_each_value_goes_to_one_of_its_two_neighbours() -> None:
    before = on_bfloat16(64, 64)
    value = before * (1 + 2**-11)
    rounded = changed_to_bfloat16(value, "w").float()
    spacing = 2.0 ** (torch.frexp(value.abs())[1] - 8).float()
    assert bool(((rounded - value).abs() < spacing).all())
    moved = rounded != before
    assert 0.05 < float(moved.float().mean()) < 0.3, "an eighth of a spacing or less, each by chance"


def test_what_did_not_change_stays_as_it_is() -> None:
    before = on_bfloat16(256, 64)
    changed = before.clone()
    changed[:8] += 1e-5
    rounded = changed_to_bfloat16(changed, "w")
    assert torch.equal(rounded[8:].float(), before[8:])
    assert not torch.equal(rounded[:8].float(), before[:8])
    assert torch.equal(changed_to_bfloat16(before, "w").float(), before)


def test_values_anywhere_between_their_neighbours_go_to_the_nearer_one() -> None:
    value = 0.02 * torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    assert torch.equal(changed_to_bfloat16(value, "w"), value.bfloat16())


def test_long_weights_are_rounded_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    before = on_bfloat16(100, 10)
    monkeypatch.setattr(rounding, "AT_ONCE", 64)
    rounded = changed_to_bfloat16((before + 1e-5).T, "w")
    assert rounded.shape == (10, 100)
    assert bool(((rounded.float() - before.T).abs() <= 2**-11).all())
    assert 0.5 < kept(before.T, torch.full_like(before.T, 1e-5), rounded) < 1.5
    assert changed_to_bfloat16(torch.empty(0, 4), "w").shape == (0, 4)


def test_values_that_are_not_finite_stay_so() -> None:
    value = torch.tensor([float("nan"), float("inf"), -float("inf"), 1 + 2**-12, 1.0])
    rounded = changed_to_bfloat16(value, "w")
    assert bool(rounded[0].isnan())
    assert rounded[1:3].tolist() == [float("inf"), -float("inf")]
    assert rounded[4] == 1
