"""Products of half-precision matrices in float32, on a CPU that is declared to have no instructions for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pyprune.runtime import products
from pyprune.runtime.modes import evaluation_mode, training
from pyprune.runtime.products import products_in, products_in_float32
from pyprune.train.loss import causal_loss
from tests._support.models import tiny_batch, tiny_model
from tests._support.products import products_seen, without_instructions

HALF = [torch.bfloat16, torch.float16]
SHAPES = [(5, 7, 9), (9, 5, 7), (7, 9, 5), (1, 3, 4), (4, 4, 4)]
Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("block", [1, 20, products.BLOCK], ids="block {}".format)
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("batch", [(), (3,)], ids=["matrix", "batch"])
def test_a_product_is_the_exact_one_rounded_once(
    block: int, dtype: torch.dtype, shape: tuple[int, int, int], batch: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "BLOCK", block)
    rows, inner, columns = shape
    a, b = drawn(*batch, rows, inner, dtype=dtype), drawn(*batch, inner, columns, dtype=dtype)
    added = drawn(*batch, rows, columns, dtype=dtype)
    plus = torch.baddbmm if batch else torch.addmm
    ways: list[Product] = [
        lambda c, x, y: x @ y,
        lambda c, x, y: plus(c, x, y),
        lambda c, x, y: plus(c, x, y, beta=0.5, alpha=-2),
        lambda c, x, y: plus(c, x, y, beta=0),
    ]
    for way in ways:
        with products_seen() as seen, products.Float32Products({dtype}):
            found = way(added, a, b)
        exact = way(added.double(), a.double(), b.double())
        assert found.dtype == dtype
        assert seen == {torch.float32}
        # One rounding of the result, and those of float32 sums, which matter where terms cancel.
        torch.testing.assert_close(found.double(), exact, rtol=0.5 * torch.finfo(dtype).eps, atol=1e-5)


def test_no_more_than_a_block_of_the_larger_operands_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "BLOCK", 64)
    sizes: list[int] = []
    real = Tensor.float

    def converted(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return real(tensor)

    monkeypatch.setattr(Tensor, "float", converted)
    weight, x = drawn(100, 8, dtype=torch.bfloat16), drawn(4, 8, dtype=torch.bfloat16)
    with products.Float32Products({torch.bfloat16}):
        y = functional.linear(x, weight)
        y.t() @ x
        y @ weight
    assert max(sizes) <= 64
    assert sum(sizes) > 2 * weight.numel(), "in parts"


@pytest.mark.parametrize("family", ["llama", "opt", "gemma3"])
def test_training_and_evaluation_multiply_in_float32_and_hold_what_they_held(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_instructions(monkeypatch)
    model = tiny_model(family).bfloat16()
    saved: set[torch.dtype] = set()

    def pack(tensor: Tensor) -> Tensor:
        saved.add(tensor.dtype) if tensor.ndim > 1 and tensor.shape in shapes else None
        return tensor

    shapes = {p.shape for p in model.parameters() if p.ndim == 2}
    with products_seen() as seen, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        with evaluation_mode(model), torch.no_grad():
            before = causal_loss(model, tiny_batch(1, 2, 8))
        with training(model, torch.device("cpu"), gradient_checkpointing=False):
            causal_loss(model, tiny_batch(1, 2, 8)).backward()
    assert seen == {torch.float32}
    assert saved == {torch.bfloat16}, "the graph keeps no converted weight"
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.bfloat16}
    wide = tiny_model(family).bfloat16().float()
    with evaluation_mode(wide), torch.no_grad():
        assert float(before) == pytest.approx(float(causal_loss(wide, tiny_batch(1, 2, 8))), rel=1e-2)


def test_a_dtype_that_was_asked_for_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    without_instructions(monkeypatch)
    model = torch.nn.Linear(4, 4).bfloat16()
    x = torch.ones(2, 4).bfloat16()
    with products_seen() as seen, products_in("bfloat16"), evaluation_mode(model):
        model(x)
    with products_seen() as inside, evaluation_mode(model), products_in("bfloat16"):
        model(x)
    with products_seen() as auto, products_in("auto"), evaluation_mode(model):
        model(x)
    with products_seen() as inference, evaluation_mode(model), torch.inference_mode():
        model(x)
    assert inference == {torch.float32}
    assert (seen, inside, auto) == ({torch.bfloat16}, {torch.bfloat16}, {torch.float32})


def test_it_is_reported_once_and_only_where_it_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    half, whole = torch.nn.Linear(4, 4).bfloat16(), torch.nn.Linear(4, 4)
    without_instructions(monkeypatch)
    with products_in_float32(whole):
        assert not products.are_in_float32()
    assert not capsys.readouterr().err
    for _ in range(2):
        with products_in_float32(half):
            assert products.are_in_float32()
    assert capsys.readouterr().err.count("products of bfloat16 weights are computed in float32") == 1
