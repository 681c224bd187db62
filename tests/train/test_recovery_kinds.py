"""LoRA, all weights and distillation on models of any width: what each is for has to happen, and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pyprune.checkpoint.load import load_model
from pyprune.checkpoint.save import save_checkpoint
from pyprune.config.train import DistillConfig, RecoverConfig, TrainConfig
from pyprune.cut.compact import compact_
from pyprune.cut.mask import mask_
from pyprune.data.tokens import IGNORED, Batch
from pyprune.errors import CheckpointError, ConfigError, TrainingError
from pyprune.families import family_for
from pyprune.plan import PrunePlan
from pyprune.train.distill import Distillation
from pyprune.train.lora import projection_names
from pyprune.train.loss import causal_loss
from pyprune.train.recover import recover
from tests._support.compare import assert_same_logits
from tests._support.models import tiny_batch, tiny_model
from tests._support.plans import axis_plans

TRAIN = TrainConfig(steps=6, batch_size=4, micro_batch_size=2, learning_rate=1e-2)
LORA = RecoverConfig(rank=4, alpha=8.0, distill=DistillConfig(alpha=0.9, hidden=0.1), train=TRAIN)
FULL = replace(LORA, adapters="none", train=replace(TRAIN, learning_rate=2e-3))
KINDS = {"lora": LORA, "full": FULL}
WIDTHS = ("unequal", "hidden", "layers", "skipped", "everything")


def samples(rows: int = 32, seed: int = 1, length: int = 16) -> Batch:
    """Rows with a masked prompt of varying length and padding behind some of them."""
    ids = tiny_batch(seed, rows, length)
    labels = ids.clone()
    for row in range(rows):
        labels[row, : 2 + row % 4] = IGNORED
    for row in range(0, rows, 3):
        ids[row, length - row % 5 :] = labels[row, length - row % 5 :] = IGNORED
    return Batch(ids, labels)


def cut(width: str, family: str = "llama") -> tuple[PreTrainedModel, PreTrainedModel, PrunePlan]:
    """(dense teacher, cut student, plan)."""
    teacher, student = tiny_model(family), tiny_model(family)
    plan = axis_plans(family_for(teacher).plan(teacher.config))[width]
    compact_(student, plan)
    return teacher, student, plan


@torch.no_grad()
def distance(student: PreTrainedModel, teacher: PreTrainedModel, plan: PrunePlan | None) -> tuple[float, float]:
    """(KL to the teacher, difference of the residual streams) on text that nothing was trained on."""
    distillation = Distillation(student, teacher, DistillConfig(hidden=1.0), plan)
    distillation.start(student)
    parts = distillation.terms(student, samples(16, seed=9)).parts
    distillation.stop()
    return float(parts["kl"]), float(parts["hidden"])


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def longer(config: RecoverConfig, steps: int = 100) -> RecoverConfig:
    train = replace(config.train, steps=steps, batch_size=8, micro_batch_size=8, warmup_steps=5, decay="cosine")
    return replace(config, train=train)


@torch.no_grad()
def damaged(width: str, family: str = "llama") -> tuple[PreTrainedModel, PreTrainedModel, PrunePlan]:
    """A teacher that the cut student could equal (the masked model), and a student with noise of rank 2 on top."""
    teacher, student, plan = cut(width, family)
    mask_(teacher, plan)
    generator = torch.Generator().manual_seed(4)
    for name in projection_names(student):
        weight = student.get_parameter(f"{name}.weight")
        left, right = (torch.randn(n, 2, generator=generator) for n in weight.shape)
        noise = left @ right.T
        weight += 0.3 * noise * weight.norm() / noise.norm()
    return teacher, student, plan


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_distillation_brings_a_cut_model_back_towards_its_teacher(width: str, kind: str) -> None:
    """The divergence from the dense model, whose other half is gone, falls on text that was not trained on."""
    teacher, student, plan = cut(width)
    before = distance(student, teacher, plan)
    report = recover(student, samples(400), longer(KINDS[kind], 50), teacher=teacher, plan=plan)
    assert report.objective == f"{kind}-distill"
    assert distance(student, teacher, plan)[0] < 0.9 * before[0]


@pytest.mark.parametrize("width", ["unequal", "everything"])
@pytest.mark.parametrize("kind", KINDS)
def test_distillation_repairs_what_can_be_repaired(width: str, kind: str) -> None:
    """Most of the divergence goes where the student can equal its teacher; the text alone does not do that."""
    teacher, student, plan = damaged(width)
    control = copy.deepcopy(student)
    before = distance(student, teacher, plan)
    config = replace(longer(KINDS[kind]), distill=DistillConfig(alpha=1.0, hidden=0.3))
    recover(student, samples(800), config, teacher=teacher, plan=plan)
    recover(control, samples(800), replace(config, distill=None))
    after, without = distance(student, teacher, plan), distance(control, teacher, plan)
    assert after[0] < 0.55 * before[0]
    assert after[1] < 0.55 * before[1]
    assert without[0] > before[0]


@pytest.mark.parametrize("family", ["opt", "phi", "gemma3", "qwen3"])
@pytest.mark.parametrize("kind", KINDS)
def test_distillation_works_for_every_kind_of_family(family: str, kind: str) -> None:
    teacher, student, plan = damaged("everything", family)
    before = distance(student, teacher, plan)
    recover(student, samples(240), longer(KINDS[kind], 30), teacher=teacher, plan=plan)
    assert distance(student, teacher, plan)[0] < 0.8 * before[0]


def test_the_hidden_term_alone_brings_the_residual_streams_together() -> None:
    teacher, student, plan = damaged("everything")
    before = distance(student, teacher, plan)
    config = replace(longer(FULL), distill=DistillConfig(alpha=0.0, hidden=20.0))
    recover(student, samples(800), config, teacher=teacher, plan=plan)
    assert distance(student, teacher, plan)[1] < 0.3 * before[1]


@pytest.mark.parametrize("distil", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_only_what_is_trained(kind: str, distil: bool) -> None:
    teacher, student, plan = cut("unequal")
    config = replace(KINDS[kind], distill=LORA.distill if distil else None)
    before, untouched = weights(student), weights(teacher)
    recover(student, samples(), config, teacher=teacher if distil else None, plan=plan)
    changed = {n for n, p in student.named_parameters() if not torch.equal(p, before[n])}
    expected = {f"{n}.weight" for n in projection_names(student)} if kind == "lora" else set(before)
    assert changed == expected
    for model in (teacher, student):
        assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(torch.equal(p, untouched[n]) for n, p in teacher.named_parameters())
    assert not teacher.training


def test_all_weights_without_a_teacher_is_plain_training_on_the_response() -> None:
    _, student, _ = cut("unequal")
    start = causal_loss(student, samples()).item()
    config = replace(FULL, distill=None, train=replace(FULL.train, batch_size=32, micro_batch_size=8))
    report = recover(student, samples(), config)
    assert report.objective == "full"
    assert report.losses[0] == pytest.approx(start, rel=1e-5)
    assert causal_loss(student, samples()).item() < start


def test_the_reported_terms_make_up_the_gradient() -> None:
    """One plain gradient step of the whole objective, taken by hand from its terms."""
    teacher, student, plan = cut("everything")
    expected = copy.deepcopy(student)
    distillation = Distillation(expected, teacher, DistillConfig(alpha=0.9, hidden=0.1), plan)
    distillation.start(expected)
    data = samples(6)
    found = distillation.terms(expected, data)
    distillation.stop()
    assert found.total is not None
    found.total.backward()
    before = weights(student)
    train = TrainConfig(
        optimizer="sgd", learning_rate=1.0, steps=1, batch_size=6, micro_batch_size=2, max_grad_norm=None
    )
    report = recover(student, data, replace(FULL, train=train), teacher=teacher, plan=plan)
    for name, p in expected.named_parameters():
        assert p.grad is not None
        moved = before[name] - student.get_parameter(name).detach()
        torch.testing.assert_close(moved, p.grad, rtol=1e-3, atol=1e-5)
    step = report.history[0]
    assert step.lm_loss == pytest.approx(float(found.lm), rel=1e-4)
    assert step.parts == pytest.approx({n: float(v) for n, v in found.parts.items()}, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_distillation_resumes_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    teacher, whole, plan = cut("everything")
    part = copy.deepcopy(whole)
    config = replace(KINDS[kind], dropout=0.1 if kind == "lora" else 0.0)
    expected = recover(whole, samples(), config, teacher=teacher, plan=plan)
    with monkeypatch.context() as patch:
        patch.setattr(Distillation, "terms", failing_at(8, KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            recover(part, samples(), config, teacher=teacher, plan=plan, checkpoint_dir=tmp_path)
    other = tiny_model("llama", seed=3)
    with pytest.raises(CheckpointError, match="teacher_sha256"):
        recover(part, samples(), config, teacher=other, plan=plan, checkpoint_dir=tmp_path, resume=True)
    report = recover(part, samples(), config, teacher=teacher, plan=plan, checkpoint_dir=tmp_path, resume=True)
    assert report.resumed_from == 3
    assert report.history == expected.history
    for a, b in zip(whole.parameters(), part.parameters(), strict=True):
        assert torch.equal(a, b)


def failing_at(call: int, error: type[BaseException] | None) -> Callable[..., object]:
    """``Distillation.terms`` that raises at one call, or gives NaN there."""
    original, calls = Distillation.terms, [0]

    def terms(self: Distillation, student: PreTrainedModel, batch: Batch) -> object:
        calls[0] += 1
        found = original(self, student, batch)
        if calls[0] == call and error is not None:
            raise error
        if calls[0] == call and found.total is not None:
            return replace(found, total=found.total * float("nan"))
        return found

    return terms


def test_a_divergence_that_is_not_finite_stops_with_the_last_good_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, student, plan = cut("unequal")
    reference = copy.deepcopy(student)
    recover(reference, samples(), replace(FULL, train=replace(FULL.train, steps=2)), teacher=teacher, plan=plan)
    monkeypatch.setattr(Distillation, "terms", failing_at(8, None))
    config = replace(FULL, train=replace(FULL.train, last_good_interval=1))
    with pytest.raises(TrainingError, match="step 4"):
        recover(student, samples(), config, teacher=teacher, plan=plan)
    for a, b in zip(reference.parameters(), student.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not any(m._forward_hooks for m in (*teacher.modules(), *student.modules()))


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_changes_nothing_but_memory(kind: str) -> None:
    teacher, plain, plan = cut("everything")
    checkpointed = copy.deepcopy(plain)
    config = replace(KINDS[kind], train=replace(KINDS[kind].train, steps=2))
    recover(plain, samples(), config, teacher=teacher, plan=plan)
    again = replace(config, train=replace(config.train, gradient_checkpointing=True))
    recover(checkpointed, samples(), again, teacher=teacher, plan=plan)
    for a, b in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_early_stopping_validates_the_whole_objective() -> None:
    teacher, student, plan = cut("unequal")
    train = replace(FULL.train, early_stop_patience=3, validation_interval=2)
    report = recover(
        student, samples(), replace(FULL, train=train), teacher=teacher, plan=plan, validation=samples(8, seed=4)
    )
    distillation = Distillation(student, teacher, DistillConfig(alpha=0.9, hidden=0.1), plan)
    distillation.start(student)
    with torch.no_grad():
        total = distillation.terms(student, samples(8, seed=4)).total
    distillation.stop()
    assert total is not None
    assert float(total) == pytest.approx(min(loss for _, loss in report.validation), rel=1e-4)


@pytest.mark.parametrize("width", ["unequal", "everything"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_recovered_model_is_saved_and_loaded(tmp_path: Path, width: str, kind: str) -> None:
    teacher, student, plan = cut(width)
    recover(student, samples(), KINDS[kind], teacher=teacher, plan=plan)
    save_checkpoint(student, None, tmp_path / "out", plan=plan, provenance={})
    loaded, _ = load_model(tmp_path / "out")
    with torch.no_grad():
        assert_same_logits(loaded(tiny_batch()).logits, student(tiny_batch()).logits, 0.0)


def test_bfloat16_training_takes_the_teacher_along() -> None:
    teacher, student, plan = cut("hidden")
    config = replace(LORA, train=replace(TRAIN, dtype="bfloat16", steps=20))
    report = recover(student.bfloat16(), samples(), config, teacher=teacher.bfloat16(), plan=plan)
    assert report.history[-1].parts["kl"] < report.history[0].parts["kl"]
    assert all(p.dtype == torch.bfloat16 for p in student.parameters())


def test_what_is_missing_or_would_be_ignored_is_refused() -> None:
    teacher, student, plan = cut("unequal")
    before = weights(student)
    with pytest.raises(ConfigError, match="none was given"):
        recover(student, samples(), LORA)
    with pytest.raises(ConfigError, match="would not be used"):
        recover(student, samples(), replace(LORA, distill=None), teacher=teacher)
    full = replace(FULL, train=replace(FULL.train, memory="full"))
    with pytest.raises(ConfigError, match="bfloat16"):
        recover(copy.deepcopy(student).bfloat16(), samples(), full, teacher=teacher, plan=plan)
    with pytest.raises(ConfigError, match="rank is 0"):
        recover(student, samples(), replace(LORA, rank=0), teacher=teacher, plan=plan)
    assert all(torch.equal(p, before[n]) for n, p in student.named_parameters())
    assert not any(m._forward_hooks for m in (*teacher.modules(), *student.modules()))
