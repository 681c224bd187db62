"""Second moments are those of the whole product, whatever the panels."""

import pytest
import torch

from pyprune.probe.moments import add_moments_


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 7, 128, 129, 300, 1100])
def test_the_sum_is_that_of_the_whole_product(size, dtype):
    torch.manual_seed(size)
    total, exact = torch.zeros(size, size, dtype=dtype), torch.zeros(size, size, dtype=torch.float64)
    for tokens in (1, 50, 33):
        x = torch.randn(tokens, size, dtype=dtype)
        assert add_moments_(total, x) is total
        exact += x.double().T @ x.double()
    torch.testing.assert_close(total.double(), exact, rtol=0, atol=84 * torch.finfo(dtype).eps * 20)


def test_what_was_there_stays():
    before = torch.full((200, 200), 3.0)
    torch.testing.assert_close(add_moments_(before.clone(), torch.zeros(4, 200)), before, rtol=0, atol=0)
