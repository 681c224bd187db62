"""What a step reads from the GPU: every read waits until the GPU has done all it was given."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

from pyprune.data.tokens import IGNORED, Batch
from pyprune.train.optimizer import RegularisedAdamW

pytestmark = pytest.mark.gpu


@pytest.fixture
def waits() -> Callable[[Callable[[], object]], int]:
    """Counts the times that a call waits for the GPU."""

    def count(call: Callable[[], object]) -> int:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                call()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing" in str(one.message) for one in found)

    return count


def test_a_step_reads_once(waits: Callable[[Callable[[], object]], int]) -> None:
    weights = [torch.nn.Parameter(torch.ones(64, 48, device="cuda")) for _ in range(5)]
    optimizer = RegularisedAdamW(weights, 1e-3, max_tensor_norm=0.5)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()  # makes the moments
    for scale, weight in enumerate(weights, 2):  # at other addresses, with other norms: the tables are made again
        weight.grad = torch.full_like(weight, scale)
    assert waits(optimizer.step) == 1


def test_a_batch_is_moved_and_looked_at_without_waiting(waits: Callable[[Callable[[], object]], int]) -> None:
    ids = torch.randint(0, 50, (4, 16))
    ids[0, 8:] = IGNORED

    def look() -> None:
        moved = Batch(ids, ids.clone()).to("cuda")
        rows = moved.predicting_rows()
        assert not moved.counts_every_token
        assert rows is not None
        assert rows.is_cuda

    assert waits(look) == 0
