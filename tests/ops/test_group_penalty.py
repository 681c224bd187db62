from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyprune.ops import BackendError, OpError, add_group_penalty_, available_isas, dispatch, group_penalty
from pyprune.ops.group_penalty.reference import group_penalty as by_autograd
from tests.ops.properties import examples
from tests.ops.rule import assert_equal_for_every_isa_and_thread_count, assert_within_rule

# Triton's interpreter computes in numpy, which warns of NaN and infinity.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALVES = [torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (1, 7), (7, 1), (3, 5), (16, 64), (33, 65), (5, 2049), (130, 129)]
KINDS = ["l1", "l2"]
NAN = math.nan
# Exact in every dtype, so that float64 sees the same one.
STRENGTH = 0.25


def weights(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights with some zeros and a zero row and column, and a gradient."""
    generator = torch.Generator().manual_seed(seed)
    w, grad = torch.randn(*shape, generator=generator), torch.randn(*shape, generator=generator)
    w.view(-1)[::11] = 0
    if min(shape) > 2:
        w[1] = 0
        w[:, 1] = 0
    return w.to(dtype), grad.to(dtype)


def some_of(count: int, seed: int = 0) -> torch.Tensor:
    """About two thirds of the positions, in any order."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[: max(1, count * 2 // 3)]


def selections(count: int) -> list[torch.Tensor]:
    """Positions that are shared between threads in different ways: scattered, neighbours at either end, every one."""
    quarter = count // 4
    ends = [torch.arange(count - quarter, count), torch.arange(quarter), torch.arange(count - 1, count)]
    return [some_of(count), *ends, torch.arange(count)]


def exact(
    w: torch.Tensor, grad: torch.Tensor, index: torch.Tensor, axis: int, kind: str, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The value, and ``grad`` plus STRENGTH times the gradient, by autograd in float64."""
    wide = w.detach().double().requires_grad_()
    value = by_autograd(wide, index, axis, kind, offset)
    (slope,) = torch.autograd.grad(value, wide)
    return value.detach(), grad.double() + STRENGTH * slope


def plain(w: torch.Tensor, grad: torch.Tensor, index: torch.Tensor, axis: int, kind: str) -> torch.Tensor:
    """The gradient as one would write it, every step in the tensors' own dtype."""
    selected = w.index_select(axis, index)
    slope = torch.zeros_like(w)
    if kind == "l1":
        slope.index_copy_(axis, index, selected.sign())
    else:
        norms = selected.norm(dim=1 - axis, keepdim=True)
        slope.index_copy_(axis, index, torch.where(norms == 0, 0, selected / norms))
    return grad + STRENGTH * slope


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_value_and_gradient_agree_with_float64(
    backend: str, shape: tuple[int, int], dtype: torch.dtype, axis: int, kind: str
) -> None:
    w, grad = weights(*shape, dtype=dtype)
    index = some_of(shape[axis])
    right, right_grad = exact(w, grad, index, axis, kind)
    result = grad.clone()
    version = result._version
    value = add_group_penalty_(result, w, index, axis, kind, STRENGTH)
    assert result._version > version, "autograd must learn that the gradient changed"
    assert value.dtype == torch.float32
    assert abs(value.double() - right) <= 2e-7 * right
    assert_within_rule(result, right_grad, plain(w, grad, index, axis, kind))
    others = torch.ones(shape[axis], dtype=torch.bool)
    others[index] = False
    assert torch.equal(result.movedim(axis, 0)[others], grad.movedim(axis, 0)[others]), "outside the index"
    assert group_penalty(w, index, axis, kind) == value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autograd_uses_the_same_gradient(backend: str, dtype: torch.dtype, axis: int, kind: str) -> None:
    w, _ = weights(33, 65, dtype=dtype)
    index = some_of(w.shape[axis])
    direct = torch.zeros_like(w)
    add_group_penalty_(direct, w, index, axis, kind, STRENGTH)
    parameter = torch.nn.Parameter(w.clone())
    (STRENGTH * group_penalty(parameter, index, axis, kind)).backward()  # type: ignore[no-untyped-call]
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, direct)
    assert torch.equal(parameter, w)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_the_gradient_formula(kind: str, axis: int, offset: float) -> None:
    w = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: group_penalty(t, [0, 3], axis, kind, offset=offset), (w,))


def test_by_hand(backend: str) -> None:
    w = torch.tensor([[3.0, 1.0, 0.0], [4.0, -1.0, 2.0]])
    assert group_penalty(w, [0, 2], 1, "l2") == 5 + 2
    assert group_penalty(w, [0, 2], 1, "l1") == 7 + 2
    assert group_penalty(w, [1], -2, "l2").item() == pytest.approx(math.sqrt(21))
    assert group_penalty(w[0], [0, 1], 0, "l2") == 4
    grad = torch.ones(2, 3)
    assert add_group_penalty_(grad, w, [0, 2], 1, "l2", 2.0) == 7
    assert torch.allclose(grad, torch.tensor([[2.2, 1.0, 1.0], [2.6, 1.0, 3.0]]))
    grad = torch.zeros(3)
    assert add_group_penalty_(grad, w[1], [0, 1], 0, "l2", 0.5) == 5
    assert grad.tolist() == [0.5, -0.5, 0.0]


def test_nothing_is_stored_but_the_weight_and_the_index(backend: str) -> None:
    w, _ = weights(16, 64)
    w.requires_grad_()
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    index = torch.tensor([3, 4])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        group_penalty(w, index, 1, "l2")
    assert [t.data_ptr() for t in saved if t.numel() > 2] == [w.data_ptr()]


def test_a_weight_that_changed_since_is_noticed(backend: str) -> None:
    w = torch.nn.Parameter(weights(8, 8)[0])
    value = group_penalty(w, [1, 2], 0, "l2")
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()  # type: ignore[no-untyped-call]


def test_a_second_derivative_is_refused(backend: str) -> None:
    w = weights(4, 4)[0].requires_grad_()
    (grad,) = torch.autograd.grad(group_penalty(w, [0], 0, "l2"), [w], create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        grad.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_groups_and_everything_outside_have_gradient_zero(
    backend: str, dtype: torch.dtype, axis: int, kind: str
) -> None:
    w = torch.randn(40, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    w.movedim(axis, 0)[5] = 0
    w.movedim(axis, 0)[6] = -0.0
    grad = torch.zeros_like(w)
    add_group_penalty_(grad, w, [5, 6, 30], axis, kind, 1.0)
    moved = grad.movedim(axis, 0)
    zero = [k for k in range(40) if k != 30]
    assert (moved[zero] == 0).all()
    assert (moved[30] != 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_offset_penalises_one_plus_w(backend: str, dtype: torch.dtype, kind: str) -> None:
    for shape, axis in (((33,), 0), ((6, 70), 0), ((6, 70), 1)):
        generator = torch.Generator().manual_seed(3)
        w, grad = torch.randn(shape, generator=generator).to(dtype), torch.randn(shape, generator=generator).to(dtype)
        w.view(-1)[3] = -1.0
        index = some_of(shape[axis])
        right, right_grad = exact(w, grad, index, axis, "l1" if len(shape) == 1 else kind, 1.0)
        value = add_group_penalty_(grad, w, index, axis, kind, STRENGTH, offset=1.0)
        assert abs(value.double() - right) <= 2e-7 * right
        unit = torch.finfo(dtype).eps
        assert ((grad.double() - right_grad).abs() <= unit * right_grad.abs() + 2e-7).all()


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity(backend: str, dtype: torch.dtype, axis: int) -> None:
    w = torch.ones(6, 40, dtype=dtype)
    if axis == 1:
        w = w.t().contiguous()
    groups = w.movedim(axis, 0)
    groups[0, 3], groups[1, 2], groups[4, 0] = NAN, -math.inf, NAN
    index = [0, 1, 2]
    for kind in KINDS:
        assert torch.isnan(group_penalty(w, index, axis, kind))
        assert group_penalty(w, [1, 2], axis, kind) == math.inf
    grad = torch.zeros_like(w)
    add_group_penalty_(grad, w, index, axis, "l2", 1.0)
    slopes = grad.movedim(axis, 0)
    assert torch.isnan(slopes[0]).all()
    assert torch.isnan(slopes[1]).nonzero().flatten().tolist() == [2]
    assert slopes[1].nansum() == 0
    assert torch.allclose(slopes[2].float(), torch.full((40,), 40**-0.5), rtol=1e-2)
    assert (slopes[3:] == 0).all()
    grad = torch.zeros_like(w)
    add_group_penalty_(grad, w, index, axis, "l1", 1.0)
    slopes = grad.movedim(axis, 0)
    assert slopes[0].tolist() == [1.0] * 3 + [0.0] + [1.0] * 36
    assert slopes[1, 2] == -1
    assert (slopes[3:] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_broken_gradient_stays_broken_where_it_is(backend: str, dtype: torch.dtype, axis: int, kind: str) -> None:
    w, grad = weights(40, 40, dtype=dtype)
    grad[7, 9], grad[8, 10] = NAN, math.inf
    whole = grad.clone()
    add_group_penalty_(whole, w, range(40), axis, kind, 1.0)
    assert torch.isnan(whole).nonzero().tolist() == [[7, 9]]
    assert torch.isinf(whole).nonzero().tolist() == [[8, 10]]


@pytest.mark.parametrize("upstream", [NAN, math.inf, -1.0])
def test_any_upstream_gradient(backend: str, upstream: float) -> None:
    for dtype in DTYPES:
        w = torch.tensor([[3.0, -4.0], [0.0, 0.0]], dtype=dtype, requires_grad=True)
        for kind in KINDS:
            value = group_penalty(w, [0, 1], 0, kind)
            (grad,) = torch.autograd.grad(value, w, torch.tensor(upstream))
            expected = torch.tensor([1.0, -1.0] if kind == "l1" else [0.6, -0.8]) * upstream
            assert torch.allclose(grad[0].float(), expected, rtol=1e-2, equal_nan=True)
            assert (grad[1] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_squares_beyond_float32_are_handled(backend: str, axis: int, dtype: torch.dtype) -> None:
    w = torch.full((3, 200), 2.0**100, dtype=dtype)
    w[1] = 2.0**-100
    w = w if axis == 0 else w.t().contiguous()
    grad = torch.zeros_like(w)
    value = add_group_penalty_(grad, w, [0, 1], axis, "l2", 1.0)
    assert value.item() == pytest.approx(200**0.5 * 2.0**100, rel=1e-6)
    assert torch.allclose(grad.movedim(axis, 0)[:2].float(), torch.full((2, 200), 200**-0.5), rtol=1e-2)
    assert group_penalty(w, [1], axis, "l2").item() == pytest.approx(200**0.5 * 2.0**-100, rel=1e-6)


def test_the_gradient_of_a_tiny_group_is_never_infinite(backend: str) -> None:
    w = torch.full((2, 3), 1e-44)
    grad = torch.zeros(2, 3)
    add_group_penalty_(grad, w, [0, 1], 0, "l2", 1.0)
    assert ((grad > 0) & (grad <= 3**-0.5)).all()


@pytest.mark.skipif(not available_isas(), reason="the extension is not built")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cpp_is_bit_equal_for_every_isa_and_thread_count(
    dtype: torch.dtype, axis: int, kind: str, use_backend: Callable[[str], None]
) -> None:
    w, grad = weights(131, 517, dtype=dtype)

    def run() -> list[torch.Tensor]:
        results = []
        for index in selections(w.shape[axis]):
            own = grad.clone()
            results += [add_group_penalty_(own, w, index, axis, kind, 0.3), own, group_penalty(w, index, axis, kind)]
        return results

    assert_equal_for_every_isa_and_thread_count(use_backend, run)


@examples(40)
@given(
    rows=st.integers(1, 70),
    cols=st.integers(1, 200),
    axis=st.integers(0, 1),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**16),
)
def test_any_shape_and_index(
    backend: str, rows: int, cols: int, axis: int, kind: str, dtype: torch.dtype, share: float, seed: int
) -> None:
    w, grad = weights(rows, cols, dtype=dtype, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    index = (torch.rand(w.shape[axis], generator=generator) < share).nonzero().flatten()
    right, right_grad = exact(w, grad, index, axis, kind)
    value = add_group_penalty_(grad, w, index, axis, kind, STRENGTH)
    assert abs(value.double() - right) <= 2e-7 * right
    # The storage's rounding, and float32's of a sum whose terms are at most 5 and STRENGTH.
    unit = torch.finfo(dtype).eps
    assert ((grad.double() - right_grad).abs() <= unit * right_grad.abs() + 1e-7).all()


@pytest.mark.parametrize("axis", [0, 1])
def test_selected_columns_far_and_near(backend: str, axis: int) -> None:
    """Whole blocks, blocks with gaps, blocks without any, and the last column."""
    w, grad = weights(9, 700)
    index = torch.tensor([*range(64, 128), 130, 131, 200, 223, 224, 512, 699])
    if axis == 0:
        w, grad = w.t().contiguous(), grad.t().contiguous()
    right, right_grad = exact(w, grad, index, axis, "l2")
    value = add_group_penalty_(grad, w, index, axis, "l2", STRENGTH)
    assert abs(value.double() - right) <= 2e-7 * right
    assert torch.allclose(grad.double(), right_grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_empty(backend: str, kind: str) -> None:
    w, grad = weights(3, 4)
    before = grad.clone()
    assert add_group_penalty_(grad, w, [], 1, kind, 1.0) == 0
    assert torch.equal(grad, before)
    w.requires_grad_()
    group_penalty(w, [], 1, kind).backward()  # type: ignore[no-untyped-call]
    assert w.grad is not None
    assert (w.grad == 0).all()
    assert group_penalty(torch.zeros(0, 5), [1, 2], 1, kind) == 0
    assert group_penalty(torch.zeros(5, 0), [1, 2], 0, kind) == 0


@pytest.mark.parametrize("axis", [0, 1])
def test_non_contiguous_tensors(backend: str, axis: int) -> None:
    w, grad = weights(65, 66)
    view, slopes = w.t()[::2, 3:], grad.t()[::2, 3:]
    expected = slopes.clone()
    value = add_group_penalty_(expected, view.contiguous(), [1, 5, 6], axis, "l2", STRENGTH)
    before = grad.clone()
    assert add_group_penalty_(slopes, view, [1, 5, 6], axis, "l2", STRENGTH) == value
    assert torch.equal(slopes, expected)
    assert torch.equal(grad.t()[1::2], before.t()[1::2])
    assert torch.equal(grad.t()[:, :3], before.t()[:, :3])


def test_higher_ranks_and_a_middle_axis(backend: str, use_backend: Callable[[str], None]) -> None:
    cube = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))
    for axis in (0, 2):
        right, right_grad = exact(cube, torch.zeros(4, 5, 6), torch.tensor([0, 3]), axis, "l2")
        grad = torch.zeros(4, 5, 6)
        assert add_group_penalty_(grad, cube, [0, 3], axis, "l2", STRENGTH).item() == pytest.approx(right.item())
        assert torch.allclose(grad.double(), right_grad)
    if backend != "python":
        with pytest.raises(BackendError, match="middle"):
            group_penalty(cube, [0], 1, "l2")
    use_backend("auto")
    assert group_penalty(cube, [0], 1, "l2").item() == pytest.approx(cube[:, 0].norm().item())


def test_bad_arguments() -> None:
    w, grad = weights(3, 4)
    for match, index in {
        "more than once": [1, 1],
        "0 to 3": [4],
        "-1 to": [-1],
        "integers": torch.tensor([True, False, True, False]),
    }.items():
        with pytest.raises(OpError, match=match):
            group_penalty(w, index, 1, "l2")
    with pytest.raises(OpError, match="Did you mean"):
        group_penalty(w, [1], 1, "l22")
    with pytest.raises(OpError, match="offset is inf"):
        group_penalty(w, [1], 1, "l2", offset=math.inf)
    with pytest.raises(OpError, match="int64"):
        group_penalty(w.long(), [1], 1, "l2")
    for penalty_weight in (-1.0, NAN, math.inf):
        with pytest.raises(OpError, match="penalty_weight is"):
            add_group_penalty_(grad, w, [1], 1, "l2", penalty_weight)
    with pytest.raises(OpError, match="grad has shape"):
        add_group_penalty_(grad[:2], w, [1], 1, "l2", 1.0)
    with pytest.raises(OpError, match="grad has dtype"):
        add_group_penalty_(grad.half(), w, [1], 1, "l2", 1.0)
    memory = torch.ones(20)
    for other in (memory[:12], memory[4:16]):
        with pytest.raises(OpError, match="share memory"):
            add_group_penalty_(other.view(3, 4), memory[:12].view(3, 4), [1], 1, "l2", 1.0)


@pytest.mark.skipif(not available_isas(), reason="the extension is not built")
def test_the_bindings_check_what_they_are_given() -> None:
    module, view = dispatch.extension(), dispatch.tensor_view
    assert module is not None
    w, one, four, real = torch.ones(4, 6), torch.tensor([1]), torch.tensor([4]), torch.tensor([1.0])
    double = w.double()
    index = view(one)

    def call(grad: torch.Tensor | None = None, **changed: object) -> float:
        arguments = {
            "w": view(w),
            "index": index,
            "axis": 0,
            "l1": False,
            "penalty_weight": 1.0,
            "offset": 0.0,
            "threads": 1,
        }
        return float(module.group_penalty(grad=None if grad is None else view(grad), **(arguments | changed)))

    assert call() == pytest.approx(6**0.5)
    for match, changed in {
        "out of range": {"index": view(four)},
        "int64": {"index": view(real)},
        "axis": {"axis": 2},
        "threads": {"threads": 0},
        "offset": {"offset": math.inf},
        "contiguous": {"w": view(w.t())},
        "float64": {"w": view(double)},
    }.items():
        with pytest.raises(ValueError, match=match):
            call(**changed)
    with pytest.raises(ValueError, match="grad is w"):
        call(w)
    with pytest.raises(ValueError, match="shape"):
        call(torch.ones(6, 4))
    memory = torch.ones(40)
    with pytest.raises(ValueError, match="overlap"):
        call(memory[4:28].view(4, 6), w=view(memory[:24].view(4, 6)))
