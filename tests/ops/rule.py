"""The tolerance rule: an implementation may be at most twice as wrong as plain low-precision torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pyprune.ops import available_isas


def assert_within_rule(out: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> None:
    """Check ``|out - exact| <= 2 |plain - exact|`` in the largest element.

    Args:
        out: what the implementation under test returned.
        exact: the float64 reference on the same (rounded) inputs.
        plain: the same formula in torch, every step in ``out``'s dtype.
    """
    assert out.dtype == plain.dtype
    assert out.shape == exact.shape
    error = (out.double() - exact).abs()
    assert not torch.isnan(error).any(), "an element was not written, or is NaN without reason"
    allowed = 2 * (plain.double() - exact).abs().max()
    assert error.max() <= allowed, f"error {error.max():.3e}, allowed {allowed:.3e}"


def assert_equal_for_every_isa_and_thread_count(
    select: Callable[[str], None], run: Callable[[], Sequence[torch.Tensor]]
) -> None:
    """Check that the C++ kernels give the same bits for every instruction set and number of threads.

    Args:
        select: the fixture ``use_backend``.
        run: makes the results from fresh inputs.
    """
    threads = torch.get_num_threads()
    results = []
    try:
        for isa in available_isas():
            select(f"cpp-{isa}")
            for count in (1, 2, 3, 8):
                torch.set_num_threads(count)
                results.append(run())
    finally:
        torch.set_num_threads(threads)
    for result in results:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
