"""The distillation loss: by hand, against the masked model, exactly zero for a copy, and its gradient."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from pyprune.config.train import DistillConfig
from pyprune.cut.compact import compact_
from pyprune.cut.mask import mask_
from pyprune.data.tokens import IGNORED, Batch
from pyprune.errors import ConfigError, PlanError
from pyprune.families import decoder_layers, family_for
from pyprune.plan import PrunePlan
from pyprune.train.distill import Distillation
from pyprune.train.loss import causal_loss
from pyprune.train.objective import LossTerms
from tests._support.models import TINY, tiny_batch, tiny_model
from tests._support.plans import axis_plans

CONFIG = DistillConfig(alpha=0.7, temperature=2.0, hidden=0.3, chunk=5)


def batch(rows: int = 3, length: int = 12) -> Batch:
    """Right-padded rows whose first tokens (a prompt) are not predicted."""
    ids = tiny_batch(1, rows, length)
    ids[0, 8:] = IGNORED
    labels = ids.clone()
    labels[:, :4] = IGNORED
    return Batch(ids, labels)


def terms(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    config: DistillConfig = CONFIG,
    plan: PrunePlan | None = None,
    tokens: Batch | None = None,
) -> LossTerms:
    distillation = Distillation(student, teacher, config, plan)
    distillation.start(student)
    try:
        return distillation.terms(student, tokens or batch())
    finally:
        distillation.stop()


def total(found: LossTerms) -> Tensor:
    """What is minimised; distillation always sets it."""
    assert found.total is not None
    return found.total


def streams(model: PreTrainedModel, tokens: Batch) -> list[Tensor]:
    """The output of every decoder layer, by plain hooks."""
    found: list[Tensor] = []
    handles = [layer.register_forward_hook(lambda m, a, out: found.append(out)) for layer in decoder_layers(model)]
    model(input_ids=tokens.inputs, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


def plain_loss(student: PreTrainedModel, teacher: PreTrainedModel, config: DistillConfig, tokens: Batch) -> Tensor:
    """The equations written down once more, with whole logits, for models of equal shape."""
    at = tokens.labels[:, 1:] >= 0
    logits = student(input_ids=tokens.inputs).logits[:, :-1][at]
    with torch.no_grad():
        taught = teacher(input_ids=tokens.inputs).logits[:, :-1][at]
    own, p = (logits / config.temperature).log_softmax(-1), (taught / config.temperature).softmax(-1)
    kl = (p * (p.log() - own)).sum(-1).mean()
    ce = functional.cross_entropy(logits, tokens.labels[:, 1:][at])
    relative = []
    for x, t in zip(streams(student, tokens), streams(teacher, tokens), strict=True):
        x, t = x[:, :-1][at], t[:, :-1][at].detach()
        relative.append(((x - t).norm(dim=-1) ** 2 / t.norm(dim=-1) ** 2).mean())
    return (
        (1 - config.alpha) * ce
        + config.alpha * config.temperature**2 * kl
        + config.hidden * sum(relative, torch.zeros(())) / len(relative)
    )


def test_the_loss_equals_one_computed_by_hand() -> None:
    """Two tokens of vocabulary, worked on paper: KL and CE of known distributions."""
    student, teacher = tiny_model(vocab_size=4), tiny_model(vocab_size=4, seed=5)
    tokens = Batch(torch.tensor([[1, 3, 2]]), torch.tensor([[IGNORED, IGNORED, 2]]))
    with torch.no_grad():
        q = student(input_ids=tokens.ids).logits[0, 1].softmax(-1).tolist()
        p = teacher(input_ids=tokens.ids).logits[0, 1].softmax(-1).tolist()
    kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    found = terms(student, teacher, DistillConfig(alpha=0.25, temperature=1.0), tokens=tokens)
    assert float(found.parts["kl"]) == pytest.approx(kl, rel=1e-4)
    assert float(found.lm) == pytest.approx(-math.log(q[2]), rel=1e-5)
    assert total(found).item() == pytest.approx(-0.75 * math.log(q[2]) + 0.25 * kl, rel=1e-4)


@pytest.mark.parametrize("name", ["llama", "llama-head-dim", "opt", "phi", "gemma3"])
@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_loss_and_gradient_equal_the_plain_equations(name: str, chunk: int) -> None:
    """Tied and untied heads, a head with a bias: all parameters' gradients, whatever the chunk."""
    student, teacher, expected = tiny_model(name), tiny_model(name, seed=3), tiny_model(name)
    found = terms(student, teacher, replace(CONFIG, chunk=chunk))
    wanted = plain_loss(expected, teacher, CONFIG, batch())
    torch.testing.assert_close(total(found), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.lm, causal_loss(expected, batch()), rtol=1e-5, atol=1e-6)
    (3.0 * total(found)).backward()
    (3.0 * wanted).backward()
    for (parameter, p), q in zip(student.named_parameters(), expected.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), parameter
        if p.grad is not None and q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=2e-5, msg=parameter)
    assert all(p.grad is None for p in teacher.parameters())


def test_soft_capped_logits_are_those_of_the_model() -> None:
    student, teacher = (tiny_model("gemma3", seed=s, final_logit_softcapping=2.0) for s in (0, 3))
    found = terms(student, teacher)
    torch.testing.assert_close(total(found), plain_loss(student, teacher, CONFIG, batch()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", sorted(TINY))
def test_an_unpruned_copy_has_exactly_zero_divergence_and_difference(name: str) -> None:
    teacher = tiny_model(name)
    student = copy.deepcopy(teacher)
    found = terms(student, teacher, replace(CONFIG, alpha=1.0))
    assert float(found.parts["kl"]) == 0.0
    assert float(found.parts["hidden"]) == 0.0
    assert total(found).item() == 0.0
    assert float(found.lm) > 1.0


@pytest.mark.parametrize("name", sorted(TINY))
def test_the_cut_model_agrees_with_the_masked_one_on_every_axis(name: str) -> None:
    """Kept channels, the stream's scale, the gauge and dropped layers: all of them wrong would show here."""
    identity = family_for(tiny_model(name)).plan(tiny_model(name).config)
    for axis, plan in axis_plans(identity).items():
        teacher, student = tiny_model(name), tiny_model(name)
        mask_(teacher, plan)
        compact_(student, plan)
        with torch.no_grad():
            found = terms(student, teacher, CONFIG, plan)
            dense = terms(student, tiny_model(name), CONFIG, plan)
        assert float(found.parts["hidden"]) < 1e-8, axis
        assert abs(float(found.parts["kl"])) < 1e-5, axis
        if not plan.is_identity:
            assert float(dense.parts["hidden"]) > 1e-4, axis
            assert float(dense.parts["kl"]) > 1e-4, axis


def test_a_layer_stands_for_those_that_were_removed_behind_it() -> None:
    """Its stream is compared with what the next kept layer, or the head, reads in the dense model."""
    teacher = tiny_model(num_hidden_layers=6)
    plan = family_for(teacher).plan(teacher.config).drop_layers([2, 5])
    student = copy.deepcopy(teacher)
    compact_(student, plan)
    with torch.no_grad():
        found = terms(student, teacher, CONFIG, plan).parts["hidden"]
        own, dense = streams(student, batch()), streams(teacher, batch())
    at = batch().labels[:, 1:] >= 0
    expected = []
    for x, t in zip(own, (dense[k] for k in (0, 2, 3, 5)), strict=True):
        x, t = x[:, :-1][at], t[:, :-1][at]
        expected.append(((x - t).norm(dim=-1) ** 2 / t.norm(dim=-1) ** 2).mean())
    assert float(found) == pytest.approx(float(torch.stack(expected).mean()), rel=1e-5)


def test_layers_before_one_without_attention_are_left_out() -> None:
    teacher = tiny_model(num_hidden_layers=4)
    plan = family_for(teacher).plan(teacher.config).with_layer(2, query_heads=[], kv_heads=[])
    student = copy.deepcopy(teacher)
    compact_(student, plan)
    distillation = Distillation(student, teacher, CONFIG, plan)
    assert distillation.view is not None
    assert distillation.view.pairs == [(0, 0), (2, 2), (3, 3)]


def test_the_teacher_of_a_gauged_student_is_centred() -> None:
    """LayerNorm does not see a shift of all channels, and Phi's cut takes it out: no teacher may differ by it."""
    teacher = tiny_model("phi")
    plan = family_for(teacher).plan(teacher.config).keep_hidden(range(36))
    shifted, student = copy.deepcopy(teacher), copy.deepcopy(teacher)
    compact_(student, plan)
    with torch.no_grad():
        shifted.get_parameter("model.embed_tokens.weight").add_(5.0)
    one, other = (terms(student, model, CONFIG, plan).parts for model in (teacher, shifted))
    torch.testing.assert_close(one["kl"], other["kl"], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(one["hidden"], other["hidden"], rtol=1e-3, atol=1e-5)


def test_masked_tokens_count_in_nothing() -> None:
    """Changing the label of a prompt token, or adding padding, changes nothing; changing a response token does."""
    student, teacher = tiny_model(), tiny_model(seed=3)
    tokens = batch()
    reference = total(terms(student, teacher))
    padded = Batch(
        functional.pad(tokens.ids, (0, 4), value=IGNORED), functional.pad(tokens.labels, (0, 4), value=IGNORED)
    )
    same = total(terms(student, teacher, tokens=padded))
    fewer = tokens.labels.clone()
    fewer[1, 6] = IGNORED
    other = total(terms(student, teacher, tokens=Batch(tokens.ids, fewer)))
    torch.testing.assert_close(reference, same, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(reference, other, rtol=1e-4)


def test_the_teacher_runs_in_eval_mode_and_comes_back_as_it_was() -> None:
    student, teacher = tiny_model("opt"), tiny_model("opt", dropout=0.5)
    reference = terms(student, teacher)
    teacher.train()
    before = {n: p.detach().clone() for n, p in teacher.named_parameters()}
    again = terms(student, teacher)
    assert torch.equal(reference.parts["kl"], again.parts["kl"])
    assert teacher.training
    assert all(p.requires_grad and p.grad is None for p in teacher.parameters())
    assert all(torch.equal(p, before[n]) for n, p in teacher.named_parameters())
    assert not any(m._forward_hooks for m in (*teacher.modules(), *student.modules()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_teacher(dtype: torch.dtype) -> None:
    student, teacher = tiny_model(), tiny_model(seed=3)
    full = terms(student, teacher)
    half = terms(student, copy.deepcopy(teacher).to(dtype))
    for name in ("kl", "hidden"):
        assert float(half.parts[name]) == pytest.approx(float(full.parts[name]), rel=0.05)


def test_autocast_covers_both_models() -> None:
    student, teacher = tiny_model(), tiny_model(seed=3)
    full = terms(student, teacher)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = terms(student, teacher)
    assert total(half).dtype == torch.float32
    assert float(half.parts["kl"]) == pytest.approx(float(full.parts["kl"]), rel=0.05)
    total(half).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in student.parameters())


def test_no_logits_of_more_than_a_chunk_exist() -> None:
    student, teacher = tiny_model(), tiny_model(seed=3)
    seen: list[int] = []
    for model in (student, teacher):
        head = model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        head.register_forward_hook(lambda m, a, out: seen.append(out.shape[0]))
    terms(student, teacher, replace(CONFIG, chunk=4))
    assert max(seen) == 4
    predicted = int(batch().predicted.sum())
    assert sum(seen) == 2 * predicted


def test_a_micro_batch_with_nothing_to_predict_gives_zero() -> None:
    tokens = batch()
    nothing = Batch(tokens.ids, torch.full_like(tokens.labels, IGNORED))
    found = terms(tiny_model(), tiny_model(seed=3), tokens=nothing)
    assert total(found).item() == 0.0
    total(found).backward()


def test_models_that_do_not_belong_together_are_refused() -> None:
    teacher = tiny_model()
    with pytest.raises(ConfigError, match="shares weights"):
        Distillation(teacher, teacher, CONFIG)
    with pytest.raises(ConfigError, match="vocabulary of 384 tokens and the student one of 300"):
        Distillation(tiny_model(vocab_size=300), teacher, CONFIG)
    plan = family_for(teacher).plan(teacher.config).drop_layers([1])
    student = tiny_model()
    compact_(student, plan)
    with pytest.raises(ConfigError, match=r"3 layers of hidden size 48.*4 layers of 48.*Give the plan"):
        Distillation(student, teacher, CONFIG)
    with pytest.raises(PlanError, match="dense model of"):
        Distillation(student, tiny_model(num_hidden_layers=5), CONFIG, plan)
    Distillation(student, teacher, replace(CONFIG, hidden=0.0))


def test_weights_that_leave_the_teacher_out_are_refused() -> None:
    with pytest.raises(ConfigError, match="the teacher would not count"):
        DistillConfig(alpha=0.0).validate()
    with pytest.raises(ConfigError, match=r"alpha is 1.5.*\n.*temperature is 0"):
        DistillConfig(alpha=1.5, temperature=0.0).validate()
