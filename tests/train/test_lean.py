"""Lean memory: bfloat16 weights, 8-bit moments, steps inside backward; reached by the options of a training."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyprune.config.train import RecoverConfig, TrainConfig
from pyprune.errors import ConfigError, TrainingError
from pyprune.methods.regularise.dress import DressOptions
from pyprune.methods.regularise.dress.training import DressObjective, regularise_dress
from pyprune.train.loop import train
from pyprune.train.loss import causal_loss
from pyprune.train.objective import LossTerms, Objective
from pyprune.train.optimizer import RegularisedAdamW
from pyprune.train.recover import recover
from tests._support.models import tiny_batch, tiny_model

ONE_PASS = TrainConfig(
    steps=6, batch_size=4, micro_batch_size=4, learning_rate=1e-3, seed=3, dtype="bfloat16", memory="lean"
)
PASSES = {"one pass": ONE_PASS, "two passes": replace(ONE_PASS, micro_batch_size=2)}


def samples(count: int = 12, seed: int = 1) -> Tensor:
    return tiny_batch(seed, count, 16)


def assert_equal(left: nn.Module, right: nn.Module) -> None:
    for (name, a), (_, b) in zip(left.named_parameters(), right.named_parameters(), strict=True):
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name


class Watched(Objective):
    """Looks at the optimizer and at the gradients that are alive when a step's smooth part has ended."""

    def __init__(self) -> None:
        self.moments: set[torch.dtype] = set()
        self.gradients = 0
        self.most = 0
        self.handles: list[Any] = []

    def setup(self, model: nn.Module, config: TrainConfig) -> None:
        def count(_: Tensor) -> None:
            self.most = max(self.most, sum(p.grad is not None for p in model.parameters()))

        self.handles = [p.register_post_accumulate_grad_hook(count) for p in model.parameters()]

    def teardown(self, model: nn.Module) -> None:
        for handle in self.handles:
            handle.remove()

    def after_optimizer_step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, learning_rate: float
    ) -> None:
        for state in optimizer.state.values():
            self.moments |= {t.dtype for key, t in state.items() if "exp_avg" in key and "scale" not in key}


@pytest.mark.parametrize("kind", PASSES)
def test_weights_are_bfloat16_moments_have_8_bits_and_the_loss_falls(kind: str) -> None:
    model, watched = tiny_model(), Watched()
    config = replace(PASSES[kind], steps=20)
    report = train(model, samples(), config, watched)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert watched.moments == {torch.uint8}
    assert report.losses[-1] < report.losses[0] - 0.1
    # Stepping in backward frees each gradient before the next is complete; two passes have to keep all of them.
    assert watched.most == (1 if kind == "one pass" else len(list(model.parameters())))


def test_lean_follows_full_training_to_the_rounding_of_its_weights() -> None:
    """Both runs see the same text; without clipping they take the same steps but for rounding."""
    full, lean = tiny_model(), tiny_model()
    config = replace(ONE_PASS, steps=12, max_grad_norm=None)
    expected = train(full, samples(), replace(config, memory="full"))
    found = train(lean, samples(), config)
    assert found.losses == pytest.approx(expected.losses, rel=0.01)
    # The first norms: later ones are of weights that have gone their own ways by some roundings.
    first = [[r.grad_norm for r in report.history[:4]] for report in (found, expected)]
    assert first[0] == pytest.approx(first[1], rel=0.05)


def test_each_gradient_is_clipped_by_its_own_norm() -> None:
    """A limit so small that Adam's first step, which knows no scale but eps, shrinks with it."""
    moved = {}
    for limit in (None, 1e-9):
        model = tiny_model()
        before = [p.detach().clone() for p in model.parameters()]
        train(model, samples(), replace(ONE_PASS, steps=1, max_grad_norm=limit, learning_rate=0.1))
        steps = (p.detach() - b for p, b in zip(model.parameters(), before, strict=True))
        moved[limit] = sum(float(step.abs().sum()) for step in steps)
    assert moved[1e-9] < 0.2 * moved[None]


@pytest.mark.parametrize("kind", PASSES)
def test_an_interrupted_run_resumes_to_the_same_bits(tmp_path: Path, kind: str) -> None:
    class Stop(Objective):
        def before_step(self, model: nn.Module, step: int) -> None:
            if step == 4:
                raise KeyboardInterrupt

    whole, part, config = tiny_model(), tiny_model(), PASSES[kind]
    train(whole, samples(), config)
    with pytest.raises(KeyboardInterrupt):
        train(part, samples(), config, Stop(), checkpoint_dir=tmp_path)
    resumed = tiny_model()
    train(resumed, samples(), config, checkpoint_dir=tmp_path, resume=True)
    assert_equal(whole, resumed)


@pytest.mark.parametrize("copies", ["off", "host"])
def test_a_gradient_that_is_not_finite_never_reaches_its_weight(copies: str) -> None:
    class Poison(Objective):
        def micro_loss(self, model: nn.Module, batch: Any) -> LossTerms:
            loss = causal_loss(model, batch)
            if loss.requires_grad and self.step == 4:
                loss.register_hook(lambda g: g * float("nan"))
            return LossTerms(loss)

        def before_step(self, model: nn.Module, step: int) -> None:
            self.step = step

    model, reference = tiny_model(), tiny_model()
    config = replace(ONE_PASS, copies=copies, last_good_interval=1)
    with pytest.raises(TrainingError, match="gradient is nan at step 4") as caught:
        train(model, samples(), config, Poison())
    assert ("no copy" in str(caught.value)) == (copies == "off")
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    if copies == "host":
        train(reference, samples(), replace(config, steps=3))
        assert_equal(model, reference)


@pytest.mark.parametrize(("norm", "solver", "prox_step"), [("l2", "subgradient", None), ("l2", "prox", 0.3)])
@pytest.mark.parametrize("kind", PASSES)
def test_the_penalty_acts(norm: str, solver: str, prox_step: float | None, kind: str) -> None:
    removed = range(36, 48)
    weight = 0.3
    options: dict[str, Any] = {"norm": norm, "solver": solver, "prox_step": prox_step}
    plain, pressed = tiny_model(), tiny_model()
    config = replace(PASSES[kind], steps=12, learning_rate=3e-3)
    regularise_dress(plain, samples(), removed, DressOptions(**options, penalty_weight=0.0, train=config))
    report = regularise_dress(pressed, samples(), removed, DressOptions(**options, penalty_weight=weight, train=config))
    assert report.penalty_after < 0.9 * report.penalty_before
    pressed_table, plain_table = (m.model.embed_tokens.weight.detach().float() for m in (pressed, plain))
    assert pressed_table[:, 36:].norm() < 0.95 * plain_table[:, 36:].norm()
    assert float(pressed_table[:, :36].norm()) == pytest.approx(float(plain_table[:, :36].norm()), rel=0.05)


def test_auto_is_lean_for_bfloat16_weights_and_full_for_others() -> None:
    for dtype, expected in ((torch.float32, torch.float32), (torch.bfloat16, torch.uint8)):
        model, watched = tiny_model().to(dtype), Watched()
        train(model, samples(), replace(ONE_PASS, memory="auto", optimizer="fused_adamw"), watched)
        assert watched.moments == {expected}
        assert {p.dtype for p in model.parameters()} == {dtype}


def test_adapters_stay_float32_over_a_lean_base() -> None:
    model = tiny_model()
    before = copy.deepcopy(model).to(torch.bfloat16)
    report = recover(model, samples(), RecoverConfig(rank=4, train=replace(ONE_PASS, steps=12, learning_rate=1e-2)))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert report.losses[-1] < report.losses[0]
    changed = [n for (n, p), q in zip(model.named_parameters(), before.parameters(), strict=True) if not p.equal(q)]
    assert changed
    assert all("proj" in name for name in changed)


def test_what_lean_memory_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="optimizer 'sgd'"):
        replace(ONE_PASS, optimizer="sgd").validate()
    with pytest.raises(ConfigError, match="dtype is 'float32'"):
        replace(ONE_PASS, dtype="float32").validate()


def test_an_objective_that_reads_gradients_gets_all_of_them() -> None:
    class Reads(Watched):
        def before_optimizer_step(self, model: nn.Module, step: int, gradient_scale: float) -> None:
            self.gradients = sum(p.grad is not None for p in model.parameters())

    model, objective = tiny_model(), Reads()
    train(model, samples(), ONE_PASS, objective)
    assert objective.gradients == len(list(model.parameters()))


def test_a_copied_optimizer_keeps_its_limit() -> None:
    optimizer = RegularisedAdamW([nn.Parameter(torch.ones(3))], max_tensor_norm=0.5)
    assert copy.deepcopy(optimizer).max_tensor_norm == 0.5


@pytest.mark.parametrize("memory", ["full", "lean"])
def test_a_penalty_outside_the_optimizer_is_not_clipped(memory: str) -> None:
    """A penalty whose gradient is far above the limit moves Adam's moments as if there were no clipping."""

    class Pressed(Watched):
        def step_penalty(self, model: nn.Module) -> Tensor:
            return 1e4 * sum(p.float().sum() for p in model.parameters())  # type: ignore[return-value]

        def before_optimizer_step(self, model: nn.Module, step: int, gradient_scale: float) -> None:
            self.least = min(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
            self.scale = gradient_scale

    objective = Pressed()
    train(tiny_model(), samples(), replace(ONE_PASS, steps=1, memory=memory, max_grad_norm=0.1), objective)
    assert objective.least == pytest.approx(1e4, rel=0.01)
    assert objective.scale == 1.0


def test_an_objective_with_a_gradient_of_its_own_making_is_stepped_after_backward() -> None:
    class Own(Objective):
        def apply_step_penalty(self, model: nn.Module) -> Tensor | None:
            for p in model.parameters():
                assert p.grad is not None
                p.grad.add_(0.1)
            return torch.tensor(0.0)

    report = train(tiny_model(), samples(), ONE_PASS, Own())
    assert report.steps == ONE_PASS.steps


def test_annealed_channels_reach_zero_on_schedule_in_bfloat16() -> None:
    """Steps of 0.1 % round to nothing in bfloat16; half-way the channels must be about half of what they were."""
    model = tiny_model().to(torch.bfloat16)
    before = model.model.embed_tokens.weight.detach().float().clone()
    objective = DressObjective(range(36, 48), DressOptions(schedule="anneal", anneal_share=1.0))
    objective.setup(model, replace(ONE_PASS, steps=1000))
    with torch.no_grad():
        for step in range(1, 501):
            objective._shrink(step)
        half = model.model.embed_tokens.weight.detach().float()
        assert float(half[:, 36:].norm() / before[:, 36:].norm()) == pytest.approx(0.5, rel=0.05)
        for step in range(501, 1001):
            objective._shrink(step)
    assert int(model.model.embed_tokens.weight[:, 36:].count_nonzero()) == 0
    assert torch.equal(model.model.embed_tokens.weight[:, :36].float(), before[:, :36])


def test_best_weights_of_an_earlier_part_are_not_put_back_without_copies(tmp_path: Path) -> None:
    class Stop(Objective):
        def before_step(self, model: nn.Module, step: int) -> None:
            if step == 5:
                raise KeyboardInterrupt

    config = replace(
        ONE_PASS, steps=8, early_stop_patience=9, validation_interval=2, copies="device", learning_rate=1e-3
    )
    held_out = samples()  # the text itself, on which every step is better than the one before
    model = tiny_model()
    with pytest.raises(KeyboardInterrupt):
        train(model, samples(), config, Stop(), validation=held_out, checkpoint_dir=tmp_path)
    again = replace(config, copies="off")
    report = train(model, samples(), again, validation=held_out, checkpoint_dir=tmp_path, resume=True)
    whole = tiny_model()
    train(whole, samples(), again, validation=held_out)
    assert report.best_step == 8
    assert_equal(model, whole)
