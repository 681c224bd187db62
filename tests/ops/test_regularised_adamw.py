from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyprune.ops import BackendError, OpError, add_group_penalty_, available_isas, dispatch
from pyprune.ops.regularised_adamw import Hyper, Moments, Penalty, decode_moment, encode_moment, regularised_adamw
from pyprune.ops.regularised_adamw.reference import Randomness, Scalars, read_moments, step_tensor, write_moments
from tests.ops.properties import examples
from tests.ops.rule import assert_within_rule

# Triton's interpreter computes in numpy, which warns of NaN and infinity.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of a few elements the plain formula may be right by luck; test_any_shape has the small shapes.
SHAPES = [(33, 65), (5, 2049), (130, 129), (601, 5)]
# Exact in float32 together with their product, so that float64 sees the same thresholds.
HYPER = Hyper(lr=2.0**-6, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.125)
STRENGTH = 0.125
PENALTIES = [None, "l1", "l2"]
STEP = 5


def penalty_for(case: Any, size: int, axis: int, *, last: bool = False) -> Penalty | None:
    """Every third group and the last two, out of order; or the last quarter, which are neighbours (DReSS's `last`)."""
    if case is None:
        return None
    index = sorted({*range(0, size, 3), *range(max(0, size - 2), size)}, reverse=True)
    if last:
        index = list(range(size - -(-size // 4), size))
    return Penalty(torch.tensor(index), axis, case, STRENGTH)


def tensors(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, Moments]:
    """Weight (one row and one column are zero), gradient, and moments of a few earlier steps."""
    generator = torch.Generator().manual_seed(seed)
    weight, gradient, first, second = (torch.randn(shape, generator=generator) for _ in range(4))
    if len(shape) == 2:
        weight[0] = 0
        weight[:, -1] = 0
    return weight.to(dtype), gradient.to(dtype), Moments(0.1 * first, 0.1 * second.square() + 0.01)


def exact_step(
    weight: torch.Tensor, gradient: torch.Tensor, moments: Moments, penalty: Penalty | None
) -> tuple[torch.Tensor, Moments]:
    """The reference in float64, on the scalars that every backend rounds to float32."""
    w, m = weight.double(), Moments(moments.first.double(), moments.second.double())
    scalars = Scalars.of(HYPER, STEP, 1.0, torch.float32)
    step_tensor(w, gradient.double(), m, scalars, penalty, Randomness(0, STEP, 0), stochastic=False)
    return w, m


def plain_step(
    w: torch.Tensor, g: torch.Tensor, moments: Moments, penalty: Penalty | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The formulas as one would write them, every step in the weight's own dtype."""
    beta1, beta2 = HYPER.betas
    m, v = moments.first.to(w.dtype), moments.second.to(w.dtype)
    if penalty is not None:
        mask = torch.zeros_like(w).index_fill_(penalty.axis, penalty.index, 1.0)
        norm = w.norm(dim=1 - penalty.axis, keepdim=True)
        slope = w.sign() if penalty.kind == "l1" else torch.where(norm == 0, 0.0, w / norm)
        g = g + STRENGTH * mask * slope
    m = m + (g - m) * (1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    scale = v.sqrt() / math.sqrt(1 - beta2**STEP) + HYPER.eps
    w = w * (1 - HYPER.lr * HYPER.weight_decay) - HYPER.lr / (1 - beta1**STEP) * (m / scale)
    return w, m, v


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("case", PENALTIES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_float64(backend: str, shape: tuple[int, int], dtype: torch.dtype, case: Any, axis: int) -> None:
    _check_against_float64(shape, dtype, penalty_for(case, shape[axis], axis))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("case", PENALTIES[1:], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_neighbours_agree_with_float64(backend: str, shape: tuple[int, int], case: Any, axis: int) -> None:
    """Column kernels share one block of groups among threads in another way than scattered ones."""
    _check_against_float64(shape, torch.float32, penalty_for(case, shape[axis], axis, last=True))


def _check_against_float64(shape: tuple[int, int], dtype: torch.dtype, penalty: Penalty | None) -> None:
    weight, gradient, moments = tensors(shape, dtype)
    exact, exact_moments = exact_step(weight, gradient, moments, penalty)
    plain, first, second = plain_step(weight, gradient, moments, penalty)
    before = gradient.clone()
    regularised_adamw([weight], [gradient], [moments], HYPER, steps=STEP, penalties=[penalty])
    assert torch.equal(gradient, before)
    assert_within_rule(weight, exact, plain)
    # The moments are float32 whatever the weight is.
    assert_within_rule(moments.first, exact_moments.first, first.float())
    assert_within_rule(moments.second, exact_moments.second, second.float())


def test_equals_torchs_adamw_without_a_penalty(backend: str) -> None:
    """Stated tolerance: 1e-6 of the largest weight after 20 steps."""
    shapes = [(33, 65), (7,), (4, 5, 6), (), (0, 3), (300,)]
    generator = torch.Generator().manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
    weights = [p.detach().clone() for p in parameters]
    moments = [Moments.zeros(w) for w in weights]
    theirs = torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(1, 21):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator)
        gradients = [p.grad.clone() for p in parameters if p.grad is not None]
        theirs.step()
        regularised_adamw(weights, gradients, moments, Hyper(1e-2, (0.9, 0.95), 1e-8, 0.1), steps=step)
    for weight, parameter in zip(weights, parameters, strict=True):
        if weight.numel():
            assert (weight - parameter).abs().max() <= 1e-6 * parameter.abs().max().clamp(min=1)


@pytest.mark.parametrize("kind", ["l1", "l2"])
def test_offset_penalises_one_plus_w(backend: str, kind: Any) -> None:
    weight, index = torch.tensor([[-1.0, -1.0], [-0.5, -1.0], [0.5, -1.0]]), torch.tensor([0, 1, 2])
    moments = Moments.zeros(weight)
    penalty = Penalty(index, 0, kind, 1.0, offset=1.0)
    # After one step the first moment is the gradient times 1 - beta1.
    hyper = Hyper(lr=0.0, betas=(0.5, 0.5))
    regularised_adamw([weight], [torch.zeros(3, 2)], [moments], hyper, steps=1, penalties=[penalty])
    assert moments.first.tolist() == [[0.0, 0.0], [0.5, 0.0], [0.5, 0.0]]


@pytest.mark.skipif(not available_isas(), reason="the extension is not built")
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("case", PENALTIES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cpp_is_bit_equal_for_every_isa_and_thread_count(
    dtype: torch.dtype, case: Any, quantised: bool, last: bool, use_backend: Callable[[str], None]
) -> None:
    threads = torch.get_num_threads()
    results = []
    try:
        for isa in available_isas():
            use_backend(f"cpp-{isa}")
            for count in (1, 2, 8):
                torch.set_num_threads(count)
                made = [tensors(s, dtype) for s in ((67, 517), (3,), (131,), (517, 67))]
                weights, gradients = [m[0] for m in made], [m[1] for m in made]
                moments = [Moments.zeros(w, quantised=quantised) for w in weights]
                penalties = [penalty_for(case, w.shape[-1], w.dim() - 1, last=last) for w in weights]
                for step in (1, 2):
                    regularised_adamw(
                        weights, gradients, moments, HYPER, steps=step, penalties=penalties, stochastic=True, seed=3
                    )
                results.append([*weights, *(m.first for m in moments), *(m.second for m in moments)])
    finally:
        torch.set_num_threads(threads)
    for result in results:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.second
@examples(25)
@given(
    rows=st.integers(1, 40),
    cols=st.integers(1, 300),
    axis=st.integers(0, 1),
    case=st.sampled_from(PENALTIES),
    quantised=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_shape(backend: str, rows: int, cols: int, axis: int, case: Any, quantised: bool, seed: int) -> None:
    weight, gradient, moments = tensors((rows, cols), torch.float32, seed)
    if quantised:
        moments = Moments.zeros(weight, quantised=True)
    penalty = penalty_for(case, (rows, cols)[axis], axis)
    first, second = read_moments(moments)
    exact, _ = exact_step(weight, gradient, Moments(first, second), penalty)
    regularised_adamw([weight], [gradient], [moments], HYPER, steps=STEP, penalties=[penalty])
    assert (weight.double() - exact).abs().max() <= 1e-6 * exact.abs().max().clamp(min=1)


class TestRandomBits:
    @pytest.mark.second
    @pytest.mark.parametrize("case", PENALTIES, ids=str)
    @pytest.mark.parametrize("quantised", [False, True])
    def test_every_backend_rounds_alike(self, quantised: bool, case: Any, use_backend: Callable[[str], None]) -> None:
        """Equal bits; a sum that float32 rounds differently may cross a rounding boundary now and then."""
        results = []
        for name in ("python", "triton", *(["cpp"] if available_isas() else [])):
            use_backend(name)
            weight, gradient, _ = tensors((33, 131), torch.bfloat16)
            moments = Moments.zeros(weight, quantised=quantised)
            for step in (1, 2, 3):
                regularised_adamw(
                    [weight], [gradient], [moments], HYPER, steps=step, seed=2**63 + 11, streams=[5],
                    penalties=[penalty_for(case, 131, 1)], stochastic=True,
                )  # fmt: skip
            results.append((weight, moments.first.float(), moments.second.float()))
        for result in results[1:]:
            for a, b in zip(result, results[0], strict=True):
                assert (a != b).float().mean() < 0.01

    def test_seed_step_and_stream_all_matter(self, backend: str) -> None:
        def run(seed: int, step: int, stream: int) -> torch.Tensor:
            weight = torch.ones(600, dtype=torch.bfloat16)
            gradient = torch.ones_like(weight)
            hyper = Hyper(1e-3, (0.0, 0.0))  # the same real step whatever its number is
            regularised_adamw(
                [weight], [gradient], [Moments.zeros(weight)], hyper, steps=step, seed=seed, streams=[stream],
                stochastic=True,
            )  # fmt: skip
            return weight

        base = run(1, 1, 1)
        assert torch.equal(run(1, 1, 1), base)
        for other in ((2, 1, 1), (1, 2, 1), (1, 1, 2), (1 + 2**40, 1, 1)):
            assert not torch.equal(run(*other), base)

    def test_stochastic_rounding_is_unbiased_and_leaves_exact_values(self, backend: str) -> None:
        """1 - 1e-3 lies between the bfloat16 neighbours 0.99609375 and 1."""
        weight = torch.ones(40_000, dtype=torch.bfloat16)
        hyper = Hyper(1e-3, (0.0, 0.0), 0.0)
        arguments: dict[str, Any] = {"steps": 1, "stochastic": True}
        regularised_adamw([weight], [torch.ones_like(weight)], [Moments.zeros(weight)], hyper, **arguments)
        assert set(weight.unique().tolist()) == {0.99609375, 1.0}
        spread = 0.00390625 * 0.5 / 200
        assert abs(weight.double().mean().item() - 0.999) < 5 * spread
        nearest = torch.ones(10, dtype=torch.bfloat16)
        regularised_adamw([nearest], [torch.ones_like(nearest)], [Moments.zeros(nearest)], hyper, steps=1)
        assert torch.equal(nearest, torch.ones_like(nearest)), "which is why rounding to nearest loses small steps"
        exact = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
        before = exact.clone()
        regularised_adamw([exact], [torch.zeros_like(exact)], [Moments.zeros(exact)], Hyper(1e-3), **arguments)
        assert torch.equal(exact, before)


class TestEightBitMoments:
    def values(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """First and second moments over five orders of magnitude, and the unit of the code of each (with its root)."""
        generator = torch.Generator().manual_seed(0)
        spread = torch.randn(1000, generator=generator) * 2
        first, second = torch.randn(1000, generator=generator) * spread.exp(), spread.exp()
        units = []
        for value, mantissa in ((first.abs(), 3), (second.sqrt(), 4)):
            blocks = torch.nn.functional.pad(value, (0, 24)).view(8, 128).amax(1).repeat_interleave(128)[:1000]
            units.append(torch.maximum(value * 2.0**-mantissa, blocks * 2.0**-15))
        return first, second, torch.stack(units).double()

    def test_errors_are_within_one_unit_of_the_code(self) -> None:
        first, second, unit = self.values()
        moments = Moments.zeros(first, quantised=True)
        write_moments(moments, first, second, Randomness(0, 1, 0))
        m, v = read_moments(moments)
        error = torch.stack([m - first, v.sqrt() - second.sqrt()]).abs().double()
        assert (error <= unit * 1.0001).all()
        assert (v > 0).all()

    def test_rounding_is_unbiased(self) -> None:
        first, second, unit = self.values()
        moments = Moments.zeros(first, quantised=True)
        total = torch.zeros(2, 1000, dtype=torch.float64)
        count = 300
        for seed in range(count):
            write_moments(moments, first, second, Randomness(seed, 1, 0))
            m, v = read_moments(moments)
            total += torch.stack([m, v.sqrt()]).double()
        exact = torch.stack([first, second.sqrt()]).double()
        # The standard deviation of one rounding is at most half a unit.
        assert ((total / count - exact).abs() <= 2.5 * unit / math.sqrt(count)).all()

    def test_a_small_second_moment_never_becomes_zero(self, backend: str) -> None:
        weight = torch.zeros(128)
        gradient = torch.full((128,), 1e-9)
        gradient[0] = 1e3
        moments = Moments.zeros(weight, quantised=True)
        regularised_adamw([weight], [gradient], [moments], Hyper(1e-3, eps=0.0), steps=1)
        assert (moments.second > 0).all()
        regularised_adamw([weight], [gradient], [moments], Hyper(1e-3, eps=0.0), steps=2)
        assert torch.isfinite(weight).all()
        assert weight.abs().max() < 1.0

    def test_nan_and_infinity_stay_visible(self, backend: str) -> None:
        weight, gradient = torch.zeros(300), torch.ones(300)
        gradient[5], gradient[200] = math.nan, math.inf
        moments = Moments.zeros(weight, quantised=True)
        regularised_adamw([weight], [gradient], [moments], Hyper(1e-3), steps=1)
        assert torch.isnan(weight).nonzero().flatten().tolist() == [5, 200]
        regularised_adamw([weight], [torch.ones(300)], [moments], Hyper(1e-3), steps=2)
        assert torch.isnan(weight[:256]).all()
        assert torch.isfinite(weight[256:]).all()

    def test_minimises_as_float32_moments_do(self, backend: str) -> None:
        generator = torch.Generator().manual_seed(0)
        target, start = torch.randn(700, generator=generator), torch.randn(700, generator=generator)
        curvature = torch.rand(700, generator=generator) * 10 + 0.1
        losses = []
        for quantised in (False, True):
            weight = start.clone()
            moments = Moments.zeros(weight, quantised=quantised)
            for step in range(1, 81):
                noise = 0.1 * torch.randn(700, generator=torch.Generator().manual_seed(step))
                gradient = curvature * (weight - target) + noise
                regularised_adamw([weight], [gradient], [moments], Hyper(5e-2, (0.9, 0.99)), steps=step)
            losses.append((curvature * (weight - target).square()).sum().item())
        begin = (curvature * (start - target).square()).sum().item()
        assert losses[0] < 0.01 * begin
        assert losses[1] < 1.1 * losses[0]


def test_nan_and_infinity_stay_where_they_are(backend: str) -> None:
    weight, gradient = torch.ones(4, 6), torch.ones(4, 6)
    gradient[0, 3], gradient[1, 2] = math.nan, math.inf
    regularised_adamw([weight], [gradient], [Moments.zeros(weight)], HYPER, steps=1)
    assert torch.isnan(weight).nonzero().tolist() == [[0, 3], [1, 2]]


def test_nan_reaches_its_group_in_l2_penalties_and_infinity_leaves_it_unpenalised(backend: str) -> None:
    weight = torch.ones(4, 6)
    weight[0, 3], weight[1, 2], weight[3, 1] = math.nan, math.inf, math.nan
    free = weight.clone()
    penalty = Penalty(torch.tensor([0, 1, 2]), 0, "l2", 0.1)
    gradient = torch.ones(4, 6)
    regularised_adamw([weight], [gradient], [Moments.zeros(weight)], HYPER, steps=1, penalties=[penalty])
    regularised_adamw([free], [gradient], [Moments.zeros(free)], HYPER, steps=1)
    assert torch.isnan(weight[0]).all()
    assert torch.equal(weight[1], free[1])
    assert torch.isfinite(weight[2]).all()
    assert torch.isnan(weight[3]).sum() == 1


@pytest.mark.parametrize(("shape", "axis"), [((4,), 0), ((4, 1), 0), ((1, 4), 1), ((4, 3), 0), ((3, 4), 1)], ids=str)
def test_the_gradient_of_a_tiny_slice_is_that_of_group_penalty(backend: str, shape: tuple[int, ...], axis: int) -> None:
    """The weight over the slice's norm has no float32."""
    weight, gradient = torch.full(shape, 1e-40), torch.zeros(shape)
    index = torch.tensor([0, 2])
    expected = torch.zeros_like(weight)
    add_group_penalty_(expected, weight, index, axis, "l2", 0.5)
    assert expected.any()
    moments = Moments.zeros(weight)
    # After one step the first moment is the gradient times 1 - beta1.
    hyper = Hyper(lr=0.0, betas=(0.5, 0.5))
    regularised_adamw([weight], [gradient], [moments], hyper, steps=1, penalties=[Penalty(index, axis, "l2", 0.5)])
    torch.testing.assert_close(moments.first, 0.5 * expected, rtol=1e-6, atol=0)
    assert torch.equal(weight, torch.full(shape, 1e-40))


def test_empty_index_empty_tensors_and_no_tensors(backend: str) -> None:
    weight, gradient, moments = tensors((6, 7), torch.float32)
    free, copied = weight.clone(), Moments(moments.first.clone(), moments.second.clone())
    empty = Penalty(torch.zeros(0, dtype=torch.long), 1, "l2", 1.0)
    regularised_adamw([weight], [gradient], [moments], HYPER, steps=2, penalties=[empty])
    regularised_adamw([free], [gradient], [copied], HYPER, steps=2)
    assert torch.equal(weight, free)
    nothing = torch.zeros(0, 3)
    regularised_adamw([nothing], [nothing], [Moments.zeros(nothing)], HYPER, steps=1)
    regularised_adamw([], [], [], HYPER, steps=1)


def test_gradient_scale_and_non_contiguous_gradients(backend: str) -> None:
    weight, gradient, moments = tensors((9, 7), torch.float32)
    scaled, copied = weight.clone(), Moments(moments.first.clone(), moments.second.clone())
    regularised_adamw([weight], [gradient * 0.25], [moments], HYPER, steps=2)
    turned = gradient.t().contiguous().t()
    regularised_adamw([scaled], [turned], [copied], HYPER, steps=2, gradient_scales=[0.25])
    assert torch.equal(weight, scaled)


def test_parameters_are_changed_in_place_and_autograd_is_told(backend: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(5, 5))
    version = parameter._version
    regularised_adamw([parameter], [torch.ones(5, 5)], [Moments.zeros(parameter)], HYPER, steps=1)
    assert parameter._version > version
    assert (parameter < 1).all()


def test_a_middle_axis_runs_on_the_reference(use_backend: Callable[[str], None]) -> None:
    use_backend("auto")
    cube, moments = torch.randn(3, 4, 5), Moments.zeros(torch.zeros(3, 4, 5))
    penalty = Penalty(torch.tensor([1]), 1, "l2", 1.0)
    regularised_adamw([cube], [torch.zeros(3, 4, 5)], [moments], HYPER, steps=1, penalties=[penalty])
    assert (moments.first[:, 1] != 0).all()
    assert (moments.first[:, [0, 2, 3]] == 0).all()
    use_backend("triton")
    with pytest.raises(BackendError, match="middle"):
        regularised_adamw([cube], [cube], [Moments.zeros(cube)], HYPER, steps=1, penalties=[penalty])


@pytest.mark.parametrize("scale", [1.0, 1e-30])
@pytest.mark.parametrize("count", [0, 1, 128, 200_000, (1 << 19) + 130])
def test_decoded_moments_are_encoded_to_the_same_bits(count: int, scale: float) -> None:
    """Also zeros of both signs, blocks of zeros, and those that hold NaN."""
    moments = Moments.zeros(torch.empty(count), quantised=True)
    first = torch.randn(count) * torch.randn(count).mul(4).exp() * scale
    second = first.square() if scale == 1 else first.abs() * scale
    first[300:600] = 0.0
    second[300:600] = 0.0
    first[1000:1001] = second[2000:2001] = torch.nan
    write_moments(moments, first, second, Randomness(0, 1, 2))
    assert moments.first_scale is not None
    assert moments.second_scale is not None
    found = decode_moment(moments.first, moments.first_scale, signed=True)
    assert torch.equal(found.nan_to_num(7), read_moments(moments)[0].nan_to_num(7))
    for codes, scales, signed in (
        (moments.first, moments.first_scale, True),
        (moments.second, moments.second_scale, False),
    ):
        again, spread = encode_moment(decode_moment(codes, scales, signed=signed), signed=signed)
        finite = scales.isfinite().repeat_interleave(128)[:count]
        assert torch.equal(again[finite], codes[finite])
        assert torch.equal(spread.nan_to_num(7), scales.nan_to_num(7))


def test_bad_arguments() -> None:
    w = torch.ones(4, 6)
    m = Moments.zeros(w)

    def call(
        weight: torch.Tensor = w, gradient: torch.Tensor = w, moments: Moments = m, hyper: Hyper = HYPER, **more: Any
    ) -> None:
        regularised_adamw([weight], [gradient], [moments], hyper, **{"steps": 1, **more})

    for match, arguments in {
        "lr is -1": {"hyper": Hyper(-1.0)},
        "betas": {"hyper": Hyper(betas=(0.9, 1.0))},
        "weight_decay is -1e\\+39": {"hyper": Hyper(1.0, weight_decay=1e39)},
        "eps is 1e\\+39": {"hyper": Hyper(eps=1e39)},
        "gradient_scale is inf": {"gradient_scales": [math.inf]},
        "penalty_weight is 1e\\+39": {"penalties": [Penalty(torch.tensor([0]), 0, "l2", 1e39)]},
        "offset is 1e\\+39": {"penalties": [Penalty(torch.tensor([0]), 0, offset=1e39)]},
        "steps count from 1": {"steps": 0},
        "seed": {"seed": -1},
        "shape": {"gradient": w[:2]},
        "dtype": {"gradient": w.half()},
        "contiguous": {"weight": w.t(), "gradient": w.t()},
        "moments.first does not fit": {"moments": Moments.zeros(w[:2])},
        "moments.first_scale": {"moments": Moments(m.first.byte(), m.second.byte(), torch.zeros(2), torch.zeros(1))},
        "int64": {"weight": w.long(), "gradient": w.long()},
        "penalty_weight": {"penalties": [Penalty(torch.tensor([0]), 0, "l2", -1.0)]},
        "Unknown kind": {"penalties": [Penalty(torch.tensor([0]), 0, kind="l3")]},  # type: ignore[arg-type]
        "0 to 3": {"penalties": [Penalty(torch.tensor([4]), 0)]},
        "entries": {"penalties": [None, None]},
    }.items():
        with pytest.raises(OpError, match=match):
            call(**arguments)
    assert torch.equal(w, torch.ones(4, 6))


@pytest.mark.skipif(not available_isas(), reason="the extension is not built")
def test_the_bindings_check_what_they_are_given() -> None:
    module = dispatch.extension()
    assert module is not None
    view = dispatch.tensor_view
    w, g, m, v = (torch.ones(4, 6) for _ in range(4))
    index = torch.tensor([0])

    def make(weight: torch.Tensor = w, state: tuple[torch.Tensor, ...] = (m, v), **more: Any) -> Any:
        arguments = {"penalty": "l2", "index": index, "by_row": True, "penalty_weight": 0.0, "offset": 0.0} | more
        arguments["index"] = view(arguments["index"])
        return module.AdamTensor(
            view(weight), view(g), [view(t) for t in state], [1.0] * 8, step=1, stream=0, **arguments
        )

    for match, arguments in {
        "one": {"weight": g},
        "first moment must be contiguous float32": {"state": (m.t(), v)},
        "24 elements": {"state": (m, v[:2])},
        "uint8": {"state": (m, v, m, v)},
        "2 or 4": {"state": (m,)},
        "unknown penalty": {"penalty": "l3"},
        "out of range": {"index": torch.tensor([4])},
        "int64": {"index": torch.tensor([1.0])},
        "threshold": {"penalty_weight": -1.0},
    }.items():
        with pytest.raises(ValueError, match=match):
            make(**arguments)
    coded = make(state=(*(torch.zeros(4, 6, dtype=torch.uint8) for _ in range(2)), torch.zeros(1), torch.zeros(1)))
    with pytest.raises(ValueError, match="agree"):
        module.regularised_adamw([make(), coded], 0, False, 1)
    with pytest.raises(ValueError, match="threads"):
        module.regularised_adamw([make()], 0, False, 0)


class TestManyWeightsInOneLaunch:
    """Triton: the weights that need the same kernel go together."""

    SHAPES = ((16, 24), (3,), (131,), (40, 64), (5, 67), (64,))

    @pytest.fixture
    def launches(self, use_backend: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The names of the kernels, in the order of their launches."""
        use_backend("triton")
        from pyprune.ops import triton_launch
        from pyprune.ops.group_penalty import triton as sums
        from pyprune.ops.regularised_adamw import triton as kernels

        found: list[str] = []

        def launch(kernel: Any, *arguments: Any, **constants: Any) -> None:
            found.append(kernel.__name__)
            triton_launch.launch(kernel, *arguments, **constants)

        for module in (kernels, sums):
            monkeypatch.setattr(module, "launch", launch)
        return found

    def after(
        self, dtype: torch.dtype, quantised: bool | str, penalties: list[Penalty | None], *, together: bool
    ) -> list[torch.Tensor]:
        """Weights and moments after two steps, in one call a step or in one for each weight."""
        made = [tensors(shape, dtype, seed) for seed, shape in enumerate(self.SHAPES)]
        weights, gradients = [m[0] for m in made], [m[1] for m in made]
        small = [quantised is True or (quantised == "some" and i % 2 == 1) for i in range(len(made))]
        moments = [Moments.zeros(m[0], quantised=True) if own else m[2] for m, own in zip(made, small, strict=True)]
        scales = [0.5, 1.0, 0.25, 0.3, 1.0, 0.7]
        everything = range(len(weights))
        for step in (1, 2):
            for chosen in [list(everything)] if together else [[i] for i in everything]:
                regularised_adamw(
                    [weights[i] for i in chosen], [gradients[i] for i in chosen], [moments[i] for i in chosen], HYPER,
                    steps=step, penalties=[penalties[i] for i in chosen], gradient_scales=[scales[i] for i in chosen],
                    stochastic=True, seed=2**63 + 5, streams=chosen,
                )  # fmt: skip
        return [*weights, *(t for m in moments for t in vars(m).values() if t is not None)]

    @pytest.mark.parametrize("quantised", [False, True, "some"])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_equals_one_launch_for_each(self, launches: list[str], dtype: torch.dtype, quantised: bool | str) -> None:
        none: list[Penalty | None] = [None] * len(self.SHAPES)
        alone = self.after(dtype, quantised, none, together=False)
        assert launches == ["_update"] * 12
        launches.clear()
        together = self.after(dtype, quantised, none, together=True)
        assert launches == ["_update_many"] * (4 if quantised == "some" else 2)
        assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))

    @pytest.mark.second
    @pytest.mark.parametrize("case", PENALTIES[1:], ids=str)
    def test_equals_one_launch_for_each_with_penalties(self, launches: list[str], case: Any) -> None:
        penalties = [
            penalty_for(case, shape[-1], len(shape) - 1) if i in (0, 3, 4) else None
            for i, shape in enumerate(self.SHAPES)
        ]
        alone = self.after(torch.bfloat16, True, penalties, together=False)
        assert launches.count("_update") == 12
        launches.clear()
        together = self.after(torch.bfloat16, True, penalties, together=True)
        assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
        assert [name for name in launches if name.startswith("_update")] == ["_update_many"] * 4

    def test_tables_are_made_once(self, launches: list[str]) -> None:
        from pyprune.ops.regularised_adamw import triton as kernels

        weights = [torch.ones(32, 16) for _ in range(3)]
        gradients = [torch.ones(32, 16) for _ in range(3)]
        moments = [Moments.zeros(w) for w in weights]
        before = kernels.kernel_table.cache_info().misses, kernels.program_owners.cache_info().misses
        for step in range(1, 6):
            regularised_adamw(weights, gradients, moments, HYPER, steps=step)
        assert launches == ["_update_many"] * 5
        assert kernels.kernel_table.cache_info().misses == before[0] + 1
        assert kernels.program_owners.cache_info().misses <= before[1] + 1
