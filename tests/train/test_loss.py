"""The chunked loss: its value, its gradient, what it leaves alone and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pyprune.data.tokens import IGNORED, Batch
from pyprune.train.head import last_hidden, logits_of
from pyprune.train.loss import causal_loss, distillation_loss, token_losses
from tests._support.models import TINY, tiny_batch, tiny_model

VOCABULARY = 37


@pytest.fixture(params=[1, 3 * 4 * VOCABULARY, 1 << 20], ids=["a row", "three rows", "all rows"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyprune.train.loss._CHUNK_BYTES", request.param)


class Bigrams(nn.Module):
    """A model whose logits depend on one matrix; it remembers the last ones."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, dtype=torch.float64).to(dtype))
        self.logits = torch.empty(0)

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        self.logits = functional.embedding(input_ids, self.table) * 3
        return SimpleNamespace(logits=self.logits)


def batch_with_padding() -> Batch:
    torch.manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (3, 8))
    labels = ids.clone()
    labels[0, :4] = IGNORED  # a prompt
    ids[1, 5:] = labels[1, 5:] = IGNORED  # padding
    return Batch(ids, labels)


def plain_loss(model: Bigrams, batch: Batch) -> Tensor:
    logits = model(batch.inputs, use_cache=False).logits[:, :-1]
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(wide.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_value_and_gradient_are_those_of_the_plain_loss(dtype: torch.dtype) -> None:
    batch = batch_with_padding()
    exact, model = Bigrams(torch.float64), Bigrams(dtype)
    exact.table.data.copy_(model.table.data)
    (0.7 * plain_loss(exact, batch)).backward()
    found = causal_loss(model, batch)
    (0.7 * found).backward()
    eps = torch.finfo(dtype).eps
    # The logits are rounded to the dtype (up to 12 of them), the loss is taken in float32.
    torch.testing.assert_close(found.double(), plain_loss(exact, batch).detach(), rtol=0, atol=12 * eps + 1e-6)
    assert exact.table.grad is not None
    assert model.table.grad is not None
    largest = float(exact.table.grad.abs().max())
    torch.testing.assert_close(model.table.grad.double(), exact.table.grad, rtol=0, atol=12 * eps * largest + 1e-8)


@pytest.mark.usefixtures("chunk")
def test_without_a_gradient_the_logits_stay() -> None:
    batch, model = batch_with_padding(), Bigrams()
    with torch.no_grad():
        found = causal_loss(model, batch)
    assert torch.equal(model.logits, functional.embedding(batch.inputs, model.table.detach()) * 3)
    torch.testing.assert_close(found, plain_loss(model, batch).detach())


def test_with_a_gradient_there_is_no_second_tensor_of_their_size() -> None:
    batch, model = batch_with_padding(), Bigrams()
    causal_loss(model, batch).backward()
    assert torch.allclose(model.logits.detach()[:, :-1].sum(-1), torch.zeros(3, 7), atol=1e-6)  # softmax - one-hot
    assert torch.equal(model.logits.detach()[:, -1], torch.zeros(3, VOCABULARY))
    assert not torch.equal(model.logits.detach(), torch.zeros(3, 8, VOCABULARY))


def test_nothing_to_predict() -> None:
    model, ids = Bigrams(), torch.randint(0, VOCABULARY, (2, 5))
    loss = causal_loss(model, Batch(ids, torch.full_like(ids, IGNORED)))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert model.table.grad is not None
    assert not model.table.grad.any()


def test_a_second_gradient_is_refused() -> None:
    model = Bigrams()
    loss = causal_loss(model, batch_with_padding())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        loss.backward()


def plain_distillation(logits: Tensor, taught: Tensor, targets: Tensor, alpha: float, temperature: float) -> Tensor:
    """The definition, for autograd."""
    own, q = (logits / temperature).log_softmax(-1), (taught / temperature).softmax(-1)
    kl = (q * (q.log() - own)).sum()
    return (1 - alpha) * functional.cross_entropy(logits, targets, reduction="sum") + alpha * temperature**2 * kl


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_distillation_and_its_gradient_are_those_of_the_definition(
    dtype: torch.dtype, temperature: float, alpha: float
) -> None:
    torch.manual_seed(4)
    logits, taught = ((3 * torch.randn(5, VOCABULARY)).to(dtype) for _ in range(2))
    targets = torch.randint(0, VOCABULARY, (5,))
    exact, leaf = logits.to(torch.float64, copy=True).requires_grad_(), logits.clone().requires_grad_()
    wanted = plain_distillation(exact, taught.double(), targets, alpha, temperature)
    own = 1 * leaf  # what may be written over
    found, sums = distillation_loss(own, taught, targets, alpha, temperature)
    torch.testing.assert_close(found.detach().double(), wanted.detach(), rtol=1e-5, atol=1e-5)
    parts = [plain_distillation(exact, taught.double(), targets, 0.0, temperature)]
    parts.append(plain_distillation(exact, taught.double(), targets, 1.0, temperature) / temperature**2)
    torch.testing.assert_close(sums.double(), torch.stack(parts).detach(), rtol=1e-5, atol=1e-5)
    (0.7 * wanted).backward()
    (0.7 * found).backward()
    assert exact.grad is not None
    assert leaf.grad is not None
    eps = max(torch.finfo(dtype).eps, 1e-6)  # the loss is taken in float32 at least, and compared as one
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=2 * eps, atol=eps * float(exact.grad.abs().max()))
    assert torch.equal(own.detach(), leaf.grad)  # the gradient took the logits' memory


def test_distillation_without_a_gradient_reads_only() -> None:
    torch.manual_seed(4)
    logits, taught = torch.randn(5, VOCABULARY), torch.randn(5, VOCABULARY)
    kept = logits.clone(), taught.clone()
    targets = torch.randint(0, VOCABULARY, (5,))
    found, _ = distillation_loss(logits, taught, targets, 0.5, 2.0)
    torch.testing.assert_close(found, plain_distillation(*kept, targets, 0.5, 2.0))
    assert torch.equal(logits, kept[0])
    assert torch.equal(taught, kept[1])


def test_a_second_gradient_of_the_distillation_is_refused() -> None:
    logits = 1 * torch.randn(2, VOCABULARY, requires_grad=True)
    found, _ = distillation_loss(logits, torch.randn(2, VOCABULARY), torch.tensor([3, 4]), 0.5, 1.0)
    found.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        found.backward()


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_token_losses(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    logits, ids = torch.randn(2, 7, VOCABULARY, dtype=torch.float64).to(dtype), torch.randint(0, VOCABULARY, (2, 7))
    found = token_losses(logits, ids)
    expected = -logits.double().log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    assert found.shape == (2, 6)


@pytest.mark.parametrize("family", sorted(TINY))
def test_the_halves_of_a_model_make_its_logits(family: str) -> None:
    """Granite divides them, which a loss made from the halves must do too."""
    model, ids = tiny_model(family), tiny_batch(0, 2, 12)
    found = logits_of(model, last_hidden(model, ids))
    assert torch.equal(found, model(input_ids=ids, use_cache=False).logits)


@pytest.mark.parametrize("family", ["llama", "opt", "granite", "phi"])
@pytest.mark.parametrize("rows", [1, 64])
def test_the_head_at_predicting_positions_gives_the_same_loss_and_gradient(
    family: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyprune.train.loss.ROWS", rows)
    model = tiny_model(family).double()
    ids = tiny_batch(0, 3, 12)
    labels = ids.clone()
    labels[0, :7] = IGNORED  # a prompt
    ids[2, 5:] = labels[2, 5:] = IGNORED  # padding
    batch = Batch(ids, labels)
    logits = model(input_ids=batch.inputs, use_cache=False).logits[:, :-1].flatten(0, 1)
    expected = functional.cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORED)
    wanted = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    heads: list[int] = []
    handle = model.get_output_embeddings().register_forward_hook(lambda m, i, o: heads.append(o.numel() // o.shape[-1]))
    found = causal_loss(model, batch)
    handle.remove()
    predicting = int(batch.predicted.sum())
    assert heads == [predicting if rows == 1 else 64], "the head is computed where something is predicted"
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for a, b in zip(torch.autograd.grad(found, list(model.parameters()), allow_unused=True), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
