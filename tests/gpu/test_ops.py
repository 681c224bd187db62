"""The Triton kernels compiled for a real GPU."""

from __future__ import annotations

import pytest
import torch

from pyprune.ops import group_soft_threshold, moreau_step
from pyprune.ops.group_soft_threshold import reference
from pyprune.ops.moreau_step import reference as step_reference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (33, 65), (257, 4099)], ids=str)
def test_group_soft_threshold(
    shape: tuple[int, int], dtype: torch.dtype, axis: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYPRUNE_BACKEND", "triton")
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to("cuda", dtype)
    out = torch.full_like(x, float("nan"))
    group_soft_threshold(x, 1.0, axis, out=out)
    exact = reference(x.double(), 1.0, axis)
    unit = torch.finfo(dtype).eps
    assert ((out.double() - exact).abs() <= unit * exact.abs() + torch.finfo(dtype).smallest_normal).all()
    assert torch.equal(out == 0, exact.to(dtype) == 0)


@pytest.mark.parametrize("eta", [0.0, 8.0])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_moreau_step(dtype: torch.dtype, axis: int, eta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYPRUNE_BACKEND", "triton")
    generator = torch.Generator().manual_seed(0)
    delta, grad = (torch.randn(257, 4099, generator=generator).to("cuda", dtype) for _ in range(2))
    scalars = torch.tensor([0.75, 0.1, 0.1 * eta]).tolist()
    exact = step_reference(delta.double(), grad.double(), *scalars, axis)
    moreau_step(delta, grad, 0.1, 0.4, eta, axis)
    unit = torch.finfo(dtype).eps
    # The sum of two terms of about 1 carries their rounding in float32, whatever its own size.
    assert ((delta.double() - exact).abs() <= unit * exact.abs() + 1e-6).all()
