"""RegularisedAdamW as an optimizer: torch's behaviour, resuming, stepping in backward, and its memory."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from pyprune.config.train import TrainConfig
from pyprune.errors import ConfigError
from pyprune.methods.registry import preset, presets
from pyprune.ops.regularised_adamw import Penalty
from pyprune.train.loop import train
from pyprune.train.loss import causal_loss
from pyprune.train.objective import Objective
from pyprune.train.optimizer import RegularisedAdamW, make_optimizer, uses_own_optimizer
from tests._support.models import tiny_batch, tiny_model

CONFIG = TrainConfig(steps=6, batch_size=4, micro_batch_size=2, learning_rate=1e-3, seed=3, optimizer="fused_adamw")


def assert_equal(left: nn.Module, right: nn.Module) -> None:
    for (name, a), (_, b) in zip(left.named_parameters(), right.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    return tiny_model("llama-head-dim").to(dtype)


def penalties_of(model: nn.Module) -> dict[nn.Parameter, Penalty]:
    """The last six hidden channels of every matrix that ends in the hidden axis."""
    index = torch.arange(42, 48)
    return {p: Penalty(index, 1, "l2", 1e-2) for p in model.parameters() if p.ndim == 2 and p.shape[1] == 48}


def loss_of(model: nn.Module, step: int) -> Tensor:
    return causal_loss(model, tiny_batch(step, 2, 12))


def test_trains_like_torchs_adamw() -> None:
    samples = tiny_batch(1, 12, 16)
    ours, theirs = tiny_model(), tiny_model()
    report = train(ours, samples, CONFIG)
    expected = train(theirs, samples, replace(CONFIG, optimizer="adamw"))
    # Each step moves a weight by about 1e-3. Where a gradient is noise, rounding decides its direction.
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert ((a - b).abs() > 1e-5).float().mean() < 0.001
    assert report.losses == pytest.approx(expected.losses, rel=1e-5)


def test_clipping_in_the_pass_is_torchs_clipping() -> None:
    """The gradients are far above the limit, so a clipping that did nothing would show in the moments."""
    samples, config = tiny_batch(1, 12, 16), replace(CONFIG, max_grad_norm=1e-2)
    states = []
    for optimizer in ("fused_adamw", "adamw"):
        model = tiny_model()

        class Spy(Objective):
            def after_optimizer_step(self, model: nn.Module, optimizer: Any, step: int, learning_rate: float) -> None:
                if step == 2:
                    states.append([optimizer.state[p]["exp_avg"].clone() for p in model.parameters()])

        report = train(model, samples, replace(config, optimizer=optimizer), Spy())  # type: ignore[arg-type]
        assert min(record.grad_norm for record in report.history) > 0.1
    for ours, theirs in zip(*states, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-9)


def test_a_gradient_scale_serves_one_step() -> None:
    model = model_of()
    optimizer = RegularisedAdamW(model.parameters(), 0.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.gradient_scale = 0.5
    optimizer.step()
    first = optimizer.state[next(model.parameters())]["exp_avg"].clone()
    torch.testing.assert_close(first, torch.full_like(first, 0.05))
    optimizer.step()
    torch.testing.assert_close(optimizer.state[next(model.parameters())]["exp_avg"], 0.9 * first + 0.1)


def test_gradients_norms_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read of a tensor on a GPU waits for what was given to it; the number of the step lies on the host."""
    model = model_of()
    optimizer = RegularisedAdamW(model.parameters(), 1e-3, max_tensor_norm=0.5)
    reads: list[str] = []

    def counted(name: str) -> Callable[[Tensor], Any]:
        own = getattr(Tensor, name)
        return lambda tensor: (reads.append(name), own(tensor))[1]

    for name in ("__float__", "__bool__", "item", "tolist"):
        monkeypatch.setattr(Tensor, name, counted(name))
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        reads.clear()
        optimizer.step()
        assert reads == ["tolist"]


def test_without_kernels_torchs_fused_adamw_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    groups = Objective().parameter_groups(model, CONFIG)
    monkeypatch.setattr("pyprune.train.optimizer.available_isas", lambda: ("scalar",))
    assert isinstance(make_optimizer(groups, CONFIG), RegularisedAdamW)
    monkeypatch.setattr("pyprune.train.optimizer.available_isas", tuple)
    assert type(make_optimizer(groups, CONFIG)) is torch.optim.AdamW


def test_an_interrupted_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    class Interrupted(Objective):
        at = 4

        def before_step(self, model: nn.Module, step: int) -> None:
            if step == self.at:
                raise KeyboardInterrupt

    samples = tiny_batch(1, 12, 16)
    whole, resumed = tiny_model(), tiny_model(seed=7)
    train(whole, samples, CONFIG)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_model(), samples, CONFIG, Interrupted(), checkpoint_dir=tmp_path)
    train(resumed, samples, CONFIG, Objective(), checkpoint_dir=tmp_path, resume=True)
    assert_equal(whole, resumed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [32, 8])
def test_state_round_trip_continues_bit_for_bit(bits: int, dtype: torch.dtype) -> None:
    def steps(model: nn.Module, optimizer: RegularisedAdamW, numbers: range) -> None:
        for step in numbers:
            loss_of(model, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def make(model: nn.Module) -> RegularisedAdamW:
        return RegularisedAdamW(model.parameters(), 1e-2, penalties=penalties_of(model), moment_bits=bits, seed=5)

    whole, part, continued = (model_of(dtype) for _ in range(3))
    steps(whole, make(whole), range(4))
    first = make(part)
    steps(part, first, range(2))
    continued.load_state_dict(part.state_dict())
    second = make(continued)
    second.load_state_dict(first.state_dict())
    for key, value in second.state[next(continued.parameters())].items():
        assert value.dtype == (torch.uint8 if "codes" in key else torch.float32)
    steps(continued, second, range(2, 4))
    assert_equal(whole, continued)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=("deep", "pickle")
)
def test_a_copy_is_whole_and_continues_bit_for_bit(copied: Callable[[Any], Any]) -> None:
    model = model_of(torch.bfloat16)
    optimizer = RegularisedAdamW(model.parameters(), 1e-2, penalties=penalties_of(model), moment_bits=8, seed=5)
    with optimizer.stepping_in_backward():
        loss_of(model, 0).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        other_model, other = copied((model, optimizer))
    other.gradient_scale = optimizer.gradient_scale = 0.5
    again, later = copied((other_model, other))
    for m, o in ((model, optimizer), (again, later)):
        loss_of(m, 1).backward()  # type: ignore[no-untyped-call]
        o.step()
    assert_equal(model, again)
    assert later.penalties.keys() == penalties_of(again).keys()


class TestLoadingAState:
    @staticmethod
    def saved(**options: Any) -> dict[str, Any]:
        model = model_of()
        optimizer = RegularisedAdamW(model.parameters(), 1e-2, **options)
        loss_of(model, 0).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return optimizer.state_dict()

    @pytest.mark.parametrize(
        ("saved", "own", "match"),
        [
            ({"moment_bits": 8}, {}, "moment_bits=8, this one moment_bits=32"),
            ({}, {"moment_bits": 8}, "moment_bits=32, this one moment_bits=8"),
            ({"seed": 1}, {"seed": 2}, "seed=1, this one seed=2"),
            ({"stochastic": False}, {}, "stochastic=False, this one stochastic=True"),
        ],
        ids=str,
    )
    def test_other_options_are_refused(self, saved: dict[str, Any], own: dict[str, Any], match: str) -> None:
        optimizer = RegularisedAdamW(model_of().parameters(), 1e-3, **own)
        with pytest.raises(ConfigError, match=match):
            optimizer.load_state_dict(self.saved(**saved))
        assert not optimizer.state
        assert optimizer.param_groups[0]["lr"] == 1e-3, "nothing was loaded"

    @pytest.mark.parametrize(("saved", "own"), [(8, 32), (32, 8)])
    def test_moments_of_the_other_kind_are_refused_where_options_were_not_recorded(self, saved: int, own: int) -> None:
        state = self.saved(moment_bits=saved)
        older = {key: state[key] for key in ("state", "param_groups")}
        optimizer = RegularisedAdamW(model_of().parameters(), moment_bits=own)
        with pytest.raises(ConfigError, match=rf"uint8.*moment_bits={own}|moment_bits={own}.*uint8"):
            optimizer.load_state_dict(older)
        RegularisedAdamW(model_of().parameters(), moment_bits=saved, seed=9).load_state_dict(older)

    def test_moments_of_another_shape_are_refused(self) -> None:
        optimizer = RegularisedAdamW([nn.Parameter(torch.ones(2, 3)) for _ in model_of().parameters()])
        with pytest.raises(ConfigError, match=r"number 0 .*\(2, 3\)"):
            optimizer.load_state_dict(self.saved())

    def test_torchs_state_is_taken_over(self) -> None:
        model = model_of()
        theirs = torch.optim.AdamW(model.parameters())
        loss_of(model, 0).backward()  # type: ignore[no-untyped-call]
        theirs.step()
        ours = RegularisedAdamW(model.parameters())
        ours.load_state_dict(theirs.state_dict())
        first = next(model.parameters())
        assert torch.equal(ours.state[first]["exp_avg"], theirs.state[first]["exp_avg"])


def test_a_gradient_scale_does_not_outlive_a_step_that_raises() -> None:
    optimizer = RegularisedAdamW(model_of().parameters())

    def fails() -> float:
        raise FloatingPointError

    optimizer.gradient_scale = 0.5
    with pytest.raises(FloatingPointError):
        optimizer.step(fails)
    assert optimizer.gradient_scale == 1
    with optimizer.stepping_in_backward():
        optimizer.gradient_scale = 0.5
        optimizer.step()
    assert optimizer.gradient_scale == 1


class TestSteppingInBackward:
    @pytest.mark.parametrize("bits", [32, 8])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_equals_stepping_afterwards(self, dtype: torch.dtype, bits: int) -> None:
        during, after = model_of(dtype), model_of(dtype)
        optimizers = [
            RegularisedAdamW(m.parameters(), 1e-2, weight_decay=0.1, penalties=penalties_of(m), moment_bits=bits)
            for m in (during, after)
        ]
        with optimizers[0].stepping_in_backward():
            for step in range(3):
                loss_of(during, step).backward()  # type: ignore[no-untyped-call]
                assert all(p.grad is None for p in during.parameters())
                optimizers[0].step()
        for step in range(3):
            loss_of(after, step).backward()  # type: ignore[no-untyped-call]
            optimizers[1].step()
            optimizers[1].zero_grad(set_to_none=True)
        assert_equal(during, after)
        loss_of(during, 9).backward()  # type: ignore[no-untyped-call]
        assert all(p.grad is not None for p in during.parameters()), "the hooks are gone after the block"

    def test_clips_each_gradient_by_its_own_norm(self) -> None:
        during, after = model_of(), model_of()
        one, other = (RegularisedAdamW(m.parameters(), 1e-2) for m in (during, after))
        with one.stepping_in_backward(clipping="per_tensor", max_grad_norm=1e-3):
            loss_of(during, 0).backward()  # type: ignore[no-untyped-call]
            one.step()
        loss_of(after, 0).backward()  # type: ignore[no-untyped-call]
        for p in after.parameters():
            nn.utils.clip_grad_norm_(p, 1e-3)
        other.step()
        for a, b in zip(during.parameters(), after.parameters(), strict=True):
            torch.testing.assert_close(a, b)

    def test_at_most_one_gradient_is_alive(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = model_of()
        optimizer = RegularisedAdamW(model.parameters(), 1e-3)
        alive: list[int] = []
        run = optimizer._run

        def watched(*arguments: Any) -> None:
            alive.append(sum(p.grad.nbytes for p in model.parameters() if p.grad is not None))
            run(*arguments)

        monkeypatch.setattr(optimizer, "_run", watched)
        with optimizer.stepping_in_backward():
            loss_of(model, 0).backward()  # type: ignore[no-untyped-call]
        sizes = [p.nbytes for p in model.parameters()]
        assert sorted(alive) == sorted(sizes)
        assert max(alive) == max(sizes), "the largest single gradient, never two"

    @pytest.mark.parametrize(
        ("arguments", "match"),
        [
            ({"clipping": "global", "max_grad_norm": 1.0}, "the norm of all gradients"),
            ({"clipping": "per_tensor"}, "max_grad_norm is None"),
            ({"max_grad_norm": 1.0}, "exactly when clipping"),
            ({"clipping": "per_tensor", "max_grad_norm": 0.0}, "> 0"),
        ],
        ids=str,
    )
    def test_other_combinations_are_refused(self, arguments: dict[str, Any], match: str) -> None:
        model = model_of()
        optimizer = RegularisedAdamW(model.parameters())
        with pytest.raises(ConfigError, match=match), optimizer.stepping_in_backward(**arguments):
            pass
        loss_of(model, 0).backward()  # type: ignore[no-untyped-call]
        assert all(p.grad is not None for p in model.parameters()), "nothing was hooked"

    def test_a_second_gradient_in_one_step_is_refused(self) -> None:
        model = model_of()
        optimizer = RegularisedAdamW(model.parameters())
        with optimizer.stepping_in_backward():
            loss_of(model, 0).backward()  # type: ignore[no-untyped-call]
            with pytest.raises(ConfigError, match="second gradient"):
                loss_of(model, 1).backward()  # type: ignore[no-untyped-call]

    def test_a_state_loaded_inside_the_block_goes_on_with_its_groups(self) -> None:
        """As in a run that goes back to its last good step, at a lower learning rate."""
        during, after = model_of(), model_of()
        one, other = (RegularisedAdamW(m.parameters(), 1e-2) for m in (during, after))
        for model, optimizer in ((during, one), (after, other)):
            loss_of(model, 0).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        state = copy.deepcopy(other.state_dict())
        state["param_groups"][0]["lr"] = 1e-3
        with one.stepping_in_backward():
            one.load_state_dict(state)
            for step in (1, 2):
                loss_of(during, step).backward()  # type: ignore[no-untyped-call]
                one.step()
        other.load_state_dict(state)
        for step in (1, 2):
            loss_of(after, step).backward()  # type: ignore[no-untyped-call]
            other.step()
            other.zero_grad()
        assert_equal(during, after)

    @pytest.mark.parametrize("how", ["thawed", "added", "written"])
    def test_a_gradient_that_no_hook_used_is_refused(self, how: str) -> None:
        model = model_of()
        first, *others = model.parameters()
        optimizer = RegularisedAdamW([first, *others] if how != "added" else others)
        first.requires_grad_(how != "thawed")
        with optimizer.stepping_in_backward():
            first.requires_grad_(True)
            if how == "added":
                optimizer.add_param_group({"params": [first]})
            loss_of(model, 0).backward()  # type: ignore[no-untyped-call]
            if how == "written":
                first.grad = torch.ones_like(first)
            with pytest.raises(ConfigError, match=r"1 parameter\(s\) have a gradient .* zero_grad\(\)"):
                optimizer.step()
            optimizer.zero_grad()
            optimizer.step()
        with optimizer.stepping_in_backward():
            before = first.detach().clone()
            loss_of(model, 1).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        assert not torch.equal(first, before), "entering the block again covers the parameter"

    def test_a_failed_backward_can_be_tried_again_after_zero_grad(self) -> None:
        model = model_of()
        optimizer = RegularisedAdamW(model.parameters())
        first = next(model.parameters())

        def fails(gradient: Tensor) -> None:
            raise FloatingPointError

        with optimizer.stepping_in_backward():
            handle = first.register_hook(fails)  # type: ignore[no-untyped-call]
            with pytest.raises(FloatingPointError):
                loss_of(model, 0).backward()  # type: ignore[no-untyped-call]
            handle.remove()
            optimizer.zero_grad()
            loss_of(model, 0).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        assert optimizer.state[first]["step"] == 1

    def test_closures_and_nesting_are_refused(self) -> None:
        optimizer = RegularisedAdamW(model_of().parameters())
        with optimizer.stepping_in_backward():
            with pytest.raises(ConfigError, match="closure"):
                optimizer.step(lambda: 0.0)
            with pytest.raises(ConfigError, match="already"), optimizer.stepping_in_backward():
                pass


def test_bytes_of_regularising_a_7b_model() -> None:
    """bfloat16 weights, 8-bit moments, one gradient at a time: far below one 80 GB device."""
    config = LlamaConfig(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    optimizer = RegularisedAdamW(model.parameters(), moment_bits=8)
    optimizer.initialise_state()
    parameters = list(model.parameters())
    count = sum(p.numel() for p in parameters)
    weights = sum(p.nbytes for p in parameters)
    moments = sum(t.nbytes for s in optimizer.state.values() for k, t in s.items() if k != "step")
    gradient = max(p.nbytes for p in parameters)
    assert count == 6_738_415_616
    assert weights == 13_476_831_232
    assert moments == 13_897_982_208  # 2 codes a weight, and 8 bytes of scales for every 128
    assert gradient == 262_144_000
    assert weights + moments + gradient == 27_636_957_440
    plain = RegularisedAdamW(model.parameters())
    plain.initialise_state()
    full = sum(t.nbytes for s in plain.state.values() for k, t in s.items() if k != "step")
    assert full == 8 * count
    assert weights + full + weights > 80e9, "with float32 moments and all gradients it does not fit"


def test_bad_arguments() -> None:
    model = model_of()
    with pytest.raises(ConfigError, match="moment_bits is 4"):
        RegularisedAdamW(model.parameters(), moment_bits=4)
    stranger = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ConfigError, match="not among"):
        RegularisedAdamW(model.parameters(), penalties={stranger: Penalty(torch.tensor([0]), 0)})


@pytest.mark.parametrize("name", presets())
def test_every_training_of_a_preset_steps_through_the_own_kernel(name: str) -> None:
    """Also where it clips, as all of them do."""
    for training in preset(name).trainings():
        assert uses_own_optimizer(training.train, torch.device("cuda")), training.name
        assert training.train.max_grad_norm is not None
