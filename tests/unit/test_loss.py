"""The chunked loss: its value, its gradient, what it leaves alone and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pyprune.loss import causal_loss, token_losses
from pyprune.tokens import IGNORED, Tokens

VOCABULARY = 37


@pytest.fixture(params=[1, 3 * 4 * VOCABULARY, 1 << 20], ids=["a row", "three rows", "all rows"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyprune.loss._CHUNK_BYTES", request.param)


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


def batch_with_padding() -> Tokens:
    torch.manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (3, 8))
    labels = ids.clone()
    labels[0, :4] = IGNORED  # a prompt
    ids[1, 5:] = labels[1, 5:] = IGNORED  # padding
    return Tokens(ids, labels)


def plain_loss(model: Bigrams, batch: Tokens) -> Tensor:
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
    loss = causal_loss(model, Tokens(ids, torch.full_like(ids, IGNORED)))
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


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_token_losses(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    logits, ids = torch.randn(2, 7, VOCABULARY, dtype=torch.float64).to(dtype), torch.randint(0, VOCABULARY, (2, 7))
    found = token_losses(logits, ids)
    expected = -logits.double().log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    assert found.shape == (2, 6)
