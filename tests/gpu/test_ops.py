"""The Triton kernels compiled for a real GPU."""

from __future__ import annotations

import pytest
import torch

from pyprune.ops import group_soft_threshold
from pyprune.ops.group_soft_threshold import reference

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
