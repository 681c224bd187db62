"""A mixture that is made of a dense model: each channel is in one expert, and the layer gives nearly the same."""

from __future__ import annotations

import torch

from bench.quality.upcycle import upcycled
from tests._support.models import tiny_batch, tiny_model
from tests.families.test_contract import logits


def test_each_channel_is_in_one_expert_and_the_output_is_nearly_the_same() -> None:
    dense = tiny_model("llama", intermediate_size=192)
    text = tiny_batch(batch=64, length=32)
    mixture, entropy = upcycled(dense, text, 8, 6)
    for old, new in zip(dense.model.layers, mixture.model.layers, strict=True):
        rows = torch.cat([new.mlp.experts.gate_up_proj[:, :4].flatten(0, 1), new.mlp.shared_experts.gate_proj.weight])
        assert {tuple(row) for row in rows.tolist()} == {tuple(row) for row in old.mlp.gate_proj.weight.tolist()}
    assert 0.9 < entropy < 1
    test = tiny_batch(seed=5)
    errors = {}
    for chosen in (3, 6):
        found = logits(upcycled(dense, text, 8, chosen)[0], test)
        errors[chosen] = float((found - logits(dense, test)).norm() / logits(dense, test).norm())
    assert errors[6] < errors[3] < 1
    assert errors[6] < 0.5
    assert torch.equal(logits(upcycled(dense, text, 8, 6)[0], test), logits(mixture, test))
