"""The training loop: exact accumulation, schedules, early stopping, failures, and resuming bit for bit."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from pyprune.config.train import TrainConfig, micro_batch_for
from pyprune.data.tokens import IGNORED
from pyprune.errors import CheckpointError, ConfigError, DataError, OutputError, TrainingError
from pyprune.train.loop import train
from pyprune.train.loss import causal_loss
from pyprune.train.objective import LossTerms, Objective
from pyprune.train.samples import batch_indices
from pyprune.train.schedule import learning_rate_factor
from pyprune.train.state import TrainState, latest_state, load_state, save_state
from tests._support.models import tiny_batch, tiny_model

CONFIG = TrainConfig(steps=6, batch_size=4, micro_batch_size=2, learning_rate=1e-3, seed=3)


def samples(count: int = 12, seed: int = 1) -> Tensor:
    return tiny_batch(seed, count, 16)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def assert_equal(left: nn.Module, right: nn.Module) -> None:
    for (name, a), (_, b) in zip(left.named_parameters(), right.named_parameters(), strict=True):
        assert torch.equal(a, b), name


class InterruptAt(Objective):
    """Raises in the second micro batch of a step, when half of its gradient is there."""

    def __init__(self, step: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.at, self.error, self.step, self.micros = step, error, 0, 0

    def before_step(self, model: nn.Module, step: int) -> None:
        self.step, self.micros = step, 0

    def micro_loss(self, model: nn.Module, batch: Tensor) -> LossTerms:
        self.micros += 1
        if self.step == self.at and self.micros == 2:
            raise self.error
        return super().micro_loss(model, batch)


class PoisonAt(Objective):
    def __init__(self, step: int) -> None:
        self.at, self.step = step, 0

    def before_step(self, model: nn.Module, step: int) -> None:
        self.step = step

    def micro_loss(self, model: nn.Module, batch: Tensor) -> LossTerms:
        loss = causal_loss(model, batch)
        return LossTerms(loss * float("nan") if self.step == self.at else loss)


def test_the_loss_is_the_one_transformers_computes() -> None:
    model, batch = tiny_model(), samples(3)
    assert torch.allclose(causal_loss(model, batch), model(input_ids=batch, labels=batch).loss)


def test_training_lowers_the_loss_and_reports_every_step() -> None:
    model = tiny_model()
    report = train(model, samples(), replace(CONFIG, steps=20, learning_rate=5e-3))
    assert report.stopped == "steps"
    assert [r.step for r in report.history] == list(range(1, 21))
    assert report.losses[-1] < report.losses[0] - 0.3
    assert report.tokens == 20 * 4 * 16
    assert not model.training
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dtype_that_this_machine_lacks_is_warned_of_before_the_first_step(
    dtype: Literal["float32", "bfloat16"], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_model("llama"), samples(), replace(CONFIG, dtype=dtype), InterruptAt(1))
    assert ("has no bfloat16 arithmetic" in capsys.readouterr().err) is (dtype == "bfloat16")


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_accumulation_weights_tokens_exactly_when_samples_are_padded(micro: int) -> None:
    data = samples(4)
    data[0, 3:] = IGNORED
    data[2, 9:] = IGNORED
    expected = tiny_model()
    causal_loss(expected, data).backward()
    model = tiny_model()
    before = weights(model)
    config = TrainConfig(
        optimizer="sgd", learning_rate=1.0, steps=1, batch_size=4, micro_batch_size=micro, max_grad_norm=None
    )
    report = train(model, data, config)
    for name, p in expected.named_parameters():
        assert p.grad is not None
        moved = before[name] - model.get_parameter(name).detach()
        torch.testing.assert_close(moved, p.grad, rtol=1e-4, atol=1e-6)
    assert report.losses[0] == pytest.approx(causal_loss(tiny_model(), data).item(), rel=1e-5)


def test_clipping_bounds_the_update() -> None:
    model = tiny_model()
    before = weights(model)
    config = TrainConfig(optimizer="sgd", learning_rate=1.0, steps=1, batch_size=2, max_grad_norm=0.01)
    report = train(model, samples(2), config)
    moved = sum(float((before[n] - p.detach()).square().sum()) for n, p in model.named_parameters()) ** 0.5
    assert report.history[0].grad_norm > 0.01
    assert moved == pytest.approx(0.01, rel=1e-2)


@pytest.mark.parametrize("steps", [2, 3])
def test_a_warm_up_without_an_end_is_warned_of(steps: int) -> None:
    report = train(tiny_model(), samples(2), replace(CONFIG, steps=steps, warmup_steps=2))
    assert any("takes the whole run" in text for text in report.warnings) == (steps == 2)


def test_schedules() -> None:
    linear = TrainConfig(steps=6, warmup_steps=2, decay="linear")
    factors = [learning_rate_factor(s, linear) for s in range(1, 7)]
    assert factors == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])
    cosine = TrainConfig(steps=5, decay="cosine")
    falling = [learning_rate_factor(s, cosine) for s in range(1, 6)]
    assert falling[0] == 1.0
    assert falling == sorted(falling, reverse=True)
    assert 0 < falling[-1] < 0.2
    assert learning_rate_factor(4, TrainConfig(steps=5)) == 1.0


def test_each_epoch_sees_each_sample_once() -> None:
    seen = torch.cat([batch_indices(12, 4, step, seed=5) for step in (1, 2, 3)])
    assert sorted(seen.tolist()) == list(range(12))
    later = torch.cat([batch_indices(12, 4, step, seed=5) for step in (4, 5, 6)])
    assert sorted(later.tolist()) == list(range(12))
    assert seen.tolist() != later.tolist()
    assert len(batch_indices(3, 8, 1, seed=0)) == 8


def test_micro_batch_size_fits_a_token_budget() -> None:
    assert micro_batch_for(8, 256) == 8
    assert micro_batch_for(64, 2048) == 1
    assert micro_batch_for(6, 1000) == 2


def test_a_micro_batch_that_does_not_divide_the_batch_is_the_next_smaller_that_does() -> None:
    """The passes are those of the divisor itself, bit for bit."""
    passes: dict[int, list[int]] = {}
    losses: dict[int, list[float]] = {}
    for size in (3, 2, 64):
        sizes = passes.setdefault(size, [])

        class Counted(Objective):
            def micro_loss(self, model: torch.nn.Module, batch: Tensor) -> LossTerms:
                sizes.append(len(batch))  # noqa: B023 - used within this turn
                return super().micro_loss(model, batch)

        model = tiny_model()
        config = replace(CONFIG, steps=2, batch_size=4, micro_batch_size=size)
        losses[size] = train(model, samples(), config, Counted()).losses
    assert passes == {3: [2] * 4, 2: [2] * 4, 64: [4] * 2}
    assert losses[3] == losses[2]


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_equal_seeds_give_equal_bits_and_leave_the_global_stream_alone(optimizer: str) -> None:
    config = replace(CONFIG, optimizer=optimizer)
    first, second, third = tiny_model("opt"), tiny_model("opt"), tiny_model("opt")
    for model in (first, second, third):
        model.config.dropout = 0.1
        for layer in model.model.decoder.layers:
            layer.dropout = 0.1
    train(first, samples(), config)
    torch.manual_seed(99)
    torch.rand(7)
    state = torch.get_rng_state()
    train(second, samples(), config)
    assert torch.equal(state, torch.get_rng_state())
    train(third, samples(), replace(config, seed=4))
    assert_equal(first, second)
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), third.parameters(), strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_checkpointing_changes_nothing_but_memory(dtype: str) -> None:
    plain, checkpointed = tiny_model(), tiny_model()
    config = replace(CONFIG, steps=2, dtype=dtype)
    train(plain, samples(), config)
    train(checkpointed, samples(), replace(config, gradient_checkpointing=True))
    for a, b in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert not checkpointed.is_gradient_checkpointing
    assert all(p.dtype == torch.float32 for p in plain.parameters())


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("decay", ["constant", "cosine"])
def test_an_interrupted_run_resumes_to_the_same_bits(tmp_path: Path, error: type[BaseException], decay: str) -> None:
    config = replace(CONFIG, decay=decay, warmup_steps=2)
    whole = tiny_model()
    expected = train(whole, samples(), config)
    part = tiny_model()
    with pytest.raises(error):
        train(part, samples(), config, InterruptAt(4, error), checkpoint_dir=tmp_path)
    resumed = tiny_model(seed=7)
    objective = InterruptAt(0)
    report = train(resumed, samples(), config, objective, checkpoint_dir=tmp_path, resume=True)
    assert_equal(whole, resumed)
    assert report.resumed_from == 3
    assert report.history == expected.history
    assert report.tokens == expected.tokens
    again = tiny_model(seed=8)
    train(again, samples(), config, objective, checkpoint_dir=tmp_path, resume=True)
    assert_equal(whole, again)


def test_early_stopping_resumes_to_the_same_bits(tmp_path: Path) -> None:
    config = replace(CONFIG, steps=12, learning_rate=3e-2, early_stop_patience=2, validation_interval=1)
    whole = tiny_model()
    expected = train(whole, samples(), config, validation=samples(4, 9))
    with pytest.raises(KeyboardInterrupt):
        train(tiny_model(), samples(), config, InterruptAt(3), validation=samples(4, 9), checkpoint_dir=tmp_path)
    resumed = tiny_model(seed=7)
    report = train(
        resumed, samples(), config, InterruptAt(0),
        validation=samples(4, 9), checkpoint_dir=tmp_path, resume=True,
    )  # fmt: skip
    assert_equal(whole, resumed)
    assert report.validation == expected.validation
    assert report.best_step == expected.best_step


def test_a_real_ctrl_c_during_the_update_waits_for_it(tmp_path: Path) -> None:
    class PressedDuringUpdate(Objective):
        def after_optimizer_step(self, model, optimizer, step, learning_rate) -> None:  # type: ignore[no-untyped-def]
            if step == 2:
                os.kill(os.getpid(), signal.SIGINT)

    whole = tiny_model()
    train(whole, samples(), CONFIG)
    model = tiny_model()
    with pytest.raises(KeyboardInterrupt):
        train(model, samples(), CONFIG, PressedDuringUpdate(), checkpoint_dir=tmp_path)
    newest = latest_state(tmp_path)
    assert newest is not None
    assert newest.name == "step-000002"
    train(model, samples(), CONFIG, checkpoint_dir=tmp_path, resume=True)
    assert_equal(whole, model)


def test_ctrl_c_in_the_validation_that_stops_a_run_does_not_restart_it(tmp_path: Path) -> None:
    config = replace(CONFIG, early_stop_patience=2, validation_interval=1)

    class Worsening(Objective):
        def __init__(self, pressed_at: int = 0, validations: int = 0) -> None:
            self.pressed_at, self.validations = pressed_at, validations

        def validation_penalty(self, model: nn.Module) -> float:
            self.validations += 1
            if self.validations == self.pressed_at:
                os.kill(os.getpid(), signal.SIGINT)
            return 100.0 * self.validations

    whole, model = tiny_model(), tiny_model()
    expected = train(whole, samples(), config, Worsening(), validation=samples(4, 9))
    assert (expected.steps, expected.stopped) == (3, "early_stop")
    with pytest.raises(KeyboardInterrupt):
        train(model, samples(), config, Worsening(3), validation=samples(4, 9), checkpoint_dir=tmp_path)
    done = json.loads((tmp_path / "step-000003" / "state.json").read_text())
    assert [step for step, _ in done["validation"]] == [1, 2], "nobody waited for the third to end"
    third = Worsening(validations=2)
    report = train(model, samples(), config, third, validation=samples(4, 9), checkpoint_dir=tmp_path, resume=True)
    assert report.validation == expected.validation
    assert (report.steps, report.stopped) == (3, "early_stop")
    assert_equal(whole, model)


def test_resuming_with_another_validation_text_is_refused(tmp_path: Path) -> None:
    config = replace(CONFIG, early_stop_patience=2, validation_interval=1)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_model(), samples(), config, InterruptAt(3), validation=samples(4, 9), checkpoint_dir=tmp_path)
    with pytest.raises(CheckpointError, match="validation_sha256"):
        train(tiny_model(), samples(), config, validation=samples(4, 8), checkpoint_dir=tmp_path, resume=True)


def test_periodic_checkpoints_keep_only_the_newest_and_hold_no_pickle(tmp_path: Path) -> None:
    train(tiny_model(), samples(), replace(CONFIG, checkpoint_interval=2), checkpoint_dir=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000006"]
    names = {p.name for p in (tmp_path / "step-000006").iterdir()}
    assert names == {"state.json", "weights.safetensors"}, "nobody reads the moments of a run that has ended"


def test_a_checkpoint_of_the_same_step_takes_the_place_of_the_earlier_one(tmp_path: Path) -> None:
    for value in (1, 2):
        save_state(tmp_path, TrainState(3, {}, {"weights": {"w": torch.full((2,), float(value))}}))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]
    assert load_state(tmp_path / "step-000003").tensors["weights"]["w"].tolist() == [2, 2]


def test_a_fresh_run_does_not_overwrite_a_checkpoint(tmp_path: Path) -> None:
    train(tiny_model(), samples(), CONFIG, checkpoint_dir=tmp_path)
    with pytest.raises(OutputError, match="already holds"):
        train(tiny_model(), samples(), CONFIG, checkpoint_dir=tmp_path)


def test_resuming_another_run_names_what_differs_before_tensors_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tiny_model(), samples(), CONFIG, checkpoint_dir=tmp_path)
    monkeypatch.setattr("pyprune.train.state.read_whole", lambda *_: pytest.fail("tensors were read"))
    other = replace(CONFIG, learning_rate=2e-3)
    with pytest.raises(CheckpointError, match="learning_rate"):
        train(tiny_model(), samples(), other, checkpoint_dir=tmp_path, resume=True)
    with pytest.raises(CheckpointError, match="samples_sha256"):
        train(tiny_model(), samples(12, 2), CONFIG, checkpoint_dir=tmp_path, resume=True)


@pytest.mark.parametrize("damage", ["truncate", "alter", "json", "missing"])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, damage: str) -> None:
    train(tiny_model(), samples(), CONFIG, checkpoint_dir=tmp_path)
    folder = latest_state(tmp_path)
    assert folder is not None
    tensors = folder / "weights.safetensors"
    if damage == "truncate":
        tensors.write_bytes(tensors.read_bytes()[:-100])
    elif damage == "alter":
        data = bytearray(tensors.read_bytes())
        data[-1] ^= 1
        tensors.write_bytes(data)
    elif damage == "json":
        (folder / "state.json").write_text("{")
    else:
        tensors.unlink()
    with pytest.raises(CheckpointError, match="damaged"):
        train(tiny_model(), samples(), CONFIG, checkpoint_dir=tmp_path, resume=True)


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyprune.train.state.save_file", full)
    with pytest.raises(OutputError, match="no room on the disk"):
        train(tiny_model(), samples(), CONFIG, checkpoint_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_resume_without_a_folder_or_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="checkpoint_dir"):
        train(tiny_model(), samples(), CONFIG, resume=True)
    fresh, reference = tiny_model(), tiny_model()
    train(fresh, samples(), CONFIG, checkpoint_dir=tmp_path, resume=True)
    train(reference, samples(), CONFIG)
    assert_equal(fresh, reference)


@pytest.mark.parametrize("at", [1, 4])
def test_a_loss_that_is_not_finite_restores_the_last_good_state(tmp_path: Path, at: int) -> None:
    model, config = tiny_model(), replace(CONFIG, last_good_interval=1)
    with pytest.raises(TrainingError, match=f"nan at step {at} of 6") as caught:
        train(model, samples(), config, PoisonAt(at), checkpoint_dir=tmp_path)
    assert caught.value.step == at
    # Step k's loss is finite for the weights after step k - 1: those after step at - 2 are proven good.
    reference = tiny_model()
    if at > 2:
        train(reference, samples(), replace(CONFIG, steps=at - 2))
    assert_equal(model, reference)
    assert (tmp_path / "last-good" / "weights.safetensors").is_file()


def test_the_last_good_weights_are_copied_once_in_an_interval(tmp_path: Path) -> None:
    model, reference = tiny_model(), tiny_model()
    with pytest.raises(TrainingError, match="those after step 3, the last copy"):
        train(model, samples(), replace(CONFIG, last_good_interval=3), PoisonAt(6), checkpoint_dir=tmp_path)
    train(reference, samples(), replace(CONFIG, steps=3))
    assert_equal(model, reference)


def test_without_copies_a_failure_leaves_the_weights_and_says_so(tmp_path: Path) -> None:
    model, reference, config = tiny_model(), tiny_model(), replace(CONFIG, copies="off")
    with pytest.raises(TrainingError, match="no copy of earlier ones was kept"):
        train(model, samples(), config, PoisonAt(4), checkpoint_dir=tmp_path)
    train(reference, samples(), replace(CONFIG, steps=3))
    assert_equal(model, reference)
    assert not (tmp_path / "last-good").exists()


def test_early_stopping_without_copies_ends_with_the_last_weights_and_says_so() -> None:
    model = tiny_model()
    config = replace(CONFIG, steps=40, learning_rate=3e-2, early_stop_patience=3, validation_interval=2, copies="off")
    report = train(model, samples(), config, validation=samples(4, 9))
    assert report.stopped == "early_stop"
    assert any("copies is 'off'" in warning for warning in report.warnings)


def test_weights_blown_up_by_a_step_are_rolled_back() -> None:
    model = tiny_model()
    before = weights(model)

    class Blow(Objective):
        def after_optimizer_step(self, model, optimizer, step, learning_rate) -> None:  # type: ignore[no-untyped-def]
            next(model.parameters()).fill_(float("inf"))

    with pytest.raises(TrainingError, match="step 2"):
        train(model, samples(), CONFIG, Blow())
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])


def test_early_stopping_keeps_the_best_weights() -> None:
    model = tiny_model()
    config = replace(CONFIG, steps=40, learning_rate=3e-2, early_stop_patience=3, validation_interval=2)
    held_out = samples(4, 9)
    report = train(model, samples(), config, validation=held_out)
    assert report.stopped == "early_stop"
    assert report.best_step is not None
    assert report.steps == report.best_step + 2 * 3
    best = min(loss for _, loss in report.validation)
    total = sum(causal_loss(model, row[None]).item() for row in held_out) / 4
    assert total == pytest.approx(best, rel=1e-4)


def test_early_stopping_without_validation_holds_some_out_and_says_so() -> None:
    config = replace(CONFIG, early_stop_patience=2, validation_interval=2)
    report = train(tiny_model(), samples(), config)
    assert "held out" in report.warnings[0]
    with pytest.raises(ConfigError, match="validation"):
        train(tiny_model(), samples(1), config)


def test_nothing_is_kept_before_the_objective_has_settled() -> None:
    class Scheduled(Objective):
        def allows_early_stop(self, step: int) -> bool:
            return step >= 5

    config = replace(CONFIG, steps=8, learning_rate=3e-2, early_stop_patience=1, validation_interval=1)
    report = train(tiny_model(), samples(), config, Scheduled(), validation=samples(4, 9))
    assert report.best_step is not None
    assert report.best_step >= 5


def test_bad_samples_are_refused() -> None:
    model = tiny_model()
    with pytest.raises(DataError, match="int64"):
        train(model, torch.zeros(3, dtype=torch.int64), CONFIG)
    with pytest.raises(DataError, match="allows 512"):
        train(model, torch.zeros(1, 513, dtype=torch.int64), CONFIG)
    with pytest.raises(DataError, match="vocabulary"):
        train(model, torch.full((1, 8), 384), CONFIG)
    with pytest.raises(DataError, match="padding"):
        train(model, torch.full((1, 8), IGNORED), CONFIG)


def test_half_precision_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match="bfloat16"):
        train(tiny_model().to(torch.bfloat16), samples(), replace(CONFIG, memory="full"))
    for memory in ("auto", "lean"):
        with pytest.raises(ConfigError, match="float16"):
            train(tiny_model().to(torch.float16), samples(), replace(CONFIG, dtype="bfloat16", memory=memory))
    frozen = tiny_model().to(torch.float16).requires_grad_(False)
    with pytest.raises(ConfigError, match="are float16, whose smallest number is above most of the gradients"):
        train(frozen, samples(), CONFIG)
    with pytest.raises(ConfigError, match="float64, which memory 'lean' does not train"):
        train(tiny_model().double(), samples(), replace(CONFIG, dtype="bfloat16", memory="lean"))
    with pytest.raises(ConfigError, match="weight_decay"):
        train(tiny_model(), samples(), replace(CONFIG, optimizer="adam", weight_decay=0.1))
