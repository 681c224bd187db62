from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyprune.ops import BackendError, OpError, available_isas, dispatch, slice_gather
from tests.ops.properties import examples
from tests.ops.rule import assert_within_rule

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ANY = [*DTYPES, torch.float64, torch.int8, torch.int16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64]
SCALE = 0.8660254037844386
SHAPES = [(1, 1), (3, 5), (33, 65), (5, 2049), (130, 129)]


def matrix(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(dtype)


def three_quarters(size: int) -> list[int]:
    """Scattered positions."""
    return [i for i in range(size) if i % 4 != 1] or [0]


@pytest.mark.parametrize("dtype", ANY, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_copies_bits_of_any_dtype(backend: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    w = matrix(*shape, torch.float32).mul(50).to(dtype)
    rows, cols = three_quarters(shape[0]), three_quarters(shape[1])
    for own_rows, own_cols in ((rows, cols), (rows, None), (None, cols), (None, None), (rows[::-1], cols[:1])):
        out = slice_gather(w, own_rows, own_cols)
        expected = w[own_rows] if own_rows is not None else w
        expected = expected[:, own_cols] if own_cols is not None else expected
        assert out.is_contiguous()
        assert out.data_ptr() != w.data_ptr()
        assert torch.equal(out.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(33, 65), (5, 2049), (130, 129)], ids=str)
def test_scale_agrees_with_float64(backend: str, shape: tuple[int, int], dtype: torch.dtype, offset: float) -> None:
    w = matrix(*shape, dtype)
    rows, cols = three_quarters(shape[0]), three_quarters(shape[1])
    out = slice_gather(w, rows, cols, SCALE, offset=offset)
    scale = torch.tensor(SCALE).item()
    exact = (w.double()[rows][:, cols] + offset) * scale - offset
    plain = (w[rows][:, cols] + offset) * SCALE - offset
    assert_within_rule(out, exact, plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_backend_gives_the_same_bits(dtype: torch.dtype, use_backend: Callable[[str], None]) -> None:
    w = matrix(37, 70, dtype)
    results = []
    for name in ("python", "triton", *(f"cpp-{isa}" for isa in available_isas())):
        use_backend(name)
        for threads in (1, 2, 8):
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            try:
                results.append(slice_gather(w, three_quarters(37), three_quarters(70), SCALE, offset=1.0))
                results.append(slice_gather(w, three_quarters(37), range(5, 60), SCALE, offset=1.0))
            finally:
                torch.set_num_threads(before)
    assert all(torch.equal(result, results[i % 2]) for i, result in enumerate(results))


@examples(40)
@given(data=st.data(), rows=st.integers(1, 40), cols=st.integers(1, 300), dtype=st.sampled_from(ANY))
def test_any_positions(backend: str, data: st.DataObject, rows: int, cols: int, dtype: torch.dtype) -> None:
    w = matrix(rows, cols, torch.float32).mul(50).to(dtype)
    own_rows = data.draw(st.none() | st.lists(st.integers(0, rows - 1), max_size=50))
    own_cols = data.draw(st.none() | st.lists(st.integers(0, cols - 1), max_size=50))
    out = slice_gather(w, own_rows, own_cols)
    expected = w if own_rows is None else w[own_rows]
    expected = expected if own_cols is None else expected[:, own_cols]
    assert out.shape == expected.shape
    assert torch.equal(out.view(torch.uint8), expected.contiguous().view(torch.uint8))


def test_vectors(backend: str) -> None:
    v = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert slice_gather(v, [3, 1]).tolist() == [4.0, 2.0]
    assert slice_gather(v, None, scale=0.5).tolist() == [0.5, 1.0, 1.5, 2.0]
    assert slice_gather(v, [0], scale=2.0, offset=1.0).tolist() == [3.0]


def test_nan_and_infinity(backend: str) -> None:
    bits = torch.tensor([[0x7FC12345, 0x7F800000, 0x3F800000]], dtype=torch.int32)
    w = bits.view(torch.float32)
    assert torch.equal(slice_gather(w, [0], [0, 1]).view(torch.int32), bits[:, :2]), "payloads are copied"
    out = slice_gather(w, [0], [0, 1, 2], 0.5)
    assert torch.isnan(out[0, 0])
    assert out[0, 1:].tolist() == [math.inf, 0.5]


def test_empty(backend: str) -> None:
    w = torch.ones(3, 4)
    assert slice_gather(w, [], [1]).shape == (0, 1)
    assert slice_gather(w, [0, 1], []).shape == (2, 0)
    assert slice_gather(torch.ones(0, 4), None, [1]).shape == (0, 1)
    assert slice_gather(torch.ones(0), None, scale=0.5).shape == (0,)


def test_non_contiguous(backend: str) -> None:
    w = matrix(20, 30, torch.float32)
    for view in (w.t(), w[::2], w[:, ::3], w[2:9, 3:20], w[0].expand(4, 30)):
        rows, cols = three_quarters(view.shape[0]), three_quarters(view.shape[1])
        assert torch.equal(slice_gather(view, rows, cols), view[rows][:, cols])


def test_parameters_need_no_context(backend: str) -> None:
    out = slice_gather(torch.nn.Parameter(torch.ones(3, 3)), [0, 2], None, 0.5)
    assert not out.requires_grad


def test_bad_arguments() -> None:
    w = torch.ones(3, 4)
    with pytest.raises(OpError, match="0 to 2"):
        slice_gather(w, [3])
    with pytest.raises(OpError, match="-1 to"):
        slice_gather(w, None, [-1])
    with pytest.raises(OpError, match="integers"):
        slice_gather(w, torch.tensor([True, False, True]))
    with pytest.raises(OpError, match="vector without columns"):
        slice_gather(w[0], [0], [0])
    with pytest.raises(OpError, match="a matrix"):
        slice_gather(torch.ones(2, 2, 2), [0])
    with pytest.raises(OpError, match="finite"):
        slice_gather(w, None, None, math.nan)
    with pytest.raises(OpError, match="a scale"):
        slice_gather(w.long(), None, None, 0.5)


def test_wide_elements_run_on_the_reference(use_backend: Callable[[str], None]) -> None:
    w = torch.ones(3, 4, dtype=torch.complex128)
    use_backend("auto")
    assert slice_gather(w, [0, 2], [1]).shape == (2, 1)
    use_backend("triton")
    with pytest.raises(BackendError, match="16 bytes"):
        slice_gather(w, [0, 2], [1])


@pytest.mark.skipif(not available_isas(), reason="the extension is not built")
def test_the_bindings_check_what_they_are_given() -> None:
    module = dispatch.extension()
    assert module is not None
    view = dispatch.tensor_view
    w, out = torch.ones(4, 6), torch.ones(2, 3)
    rows, cols = torch.tensor([0, 3]), torch.tensor([1, 2, 5])

    def call(source: torch.Tensor = w, target: torch.Tensor = out, at: torch.Tensor = rows, threads: int = 1) -> None:
        module.slice_gather(view(source), view(target), view(at), view(cols), 0.5, 0.0, threads)

    call()
    with pytest.raises(ValueError, match="rows is out of range"):
        call(at=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="fit"):
        call(target=torch.ones(3, 3))
    with pytest.raises(ValueError, match="neighbouring"):
        call(source=torch.ones(6, 8)[:, ::2])
    with pytest.raises(ValueError, match="int64"):
        call(at=rows.int())
    with pytest.raises(ValueError, match="threads"):
        call(threads=0)
    with pytest.raises(ValueError, match="bits as integers"):
        module.slice_gather(view(w), view(out), view(rows), view(cols), None, 0.0, 1)


def test_writes_into_a_given_tensor(backend: str) -> None:
    w = torch.randn(5, 7)
    out = torch.full((2, 3), torch.nan)
    assert slice_gather(w, [4, 0], [1, 2, 6], 0.5, out=out) is out
    assert torch.equal(out, w[[4, 0]][:, [1, 2, 6]] * 0.5)
    vector = torch.full((2,), torch.nan)
    assert torch.equal(slice_gather(w[0], [3, 1], out=vector), w[0, [3, 1]])
    assert not vector.isnan().any()
    with pytest.raises(OpError, match="out is"):
        slice_gather(w, [4, 0], out=torch.empty(2, 6))
    with pytest.raises(OpError, match="shares memory"):
        slice_gather(w, [0, 1], out=w[2:4])
