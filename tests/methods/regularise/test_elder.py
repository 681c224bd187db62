"""ELDeR/TRSP: gates find planted useless layers, the penalty and the fade act, and the drop afterwards is exact."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pyprune.config.run import PruneConfig
from pyprune.config.train import TrainConfig
from pyprune.cut.compact import compact_
from pyprune.cut.mask import mask_, masked
from pyprune.data.tokens import IGNORED, Batch
from pyprune.errors import ConfigError
from pyprune.families import family_for
from pyprune.methods.base import PlanRequest, RunOptions
from pyprune.methods.layers.shortgpt.score import block_influence
from pyprune.methods.registry import get_method
from pyprune.methods.regularise.elder import METHOD, ElderOptions, GateConfig
from pyprune.methods.regularise.elder.gates import GateObjective, gate_output, layers_to_weigh, learn_layer_gates
from pyprune.methods.regularise.elder.penalty import ElderObjective, regularise_elder
from pyprune.ops import residual_diff_norm
from pyprune.probe.effects import compare, snapshot
from pyprune.probe.hooks import LayerHooks
from pyprune.probe.streams import LayerRunner
from pyprune.train.loop import train
from pyprune.train.loss import causal_loss
from tests._support.compiled import only_traced
from tests._support.models import TINY, tiny_batch, tiny_model

TRAIN = TrainConfig(steps=8, batch_size=2, micro_batch_size=2, learning_rate=2e-3)
GATES = GateConfig(learning_rate=3e-2, penalty_weight=5e-2, first_round_steps=30, round_steps=4, batch_size=2)
P = (1, 2)


def samples() -> Tensor:
    return tiny_batch(1, 8, 12)


def fitted_model(name: str = "llama", **overrides: object) -> PreTrainedModel:
    """A model that has half learned the samples: its layers matter, and the loss still has a gradient."""
    model = tiny_model(name, **overrides)
    train(model, samples(), TrainConfig(steps=10, batch_size=8, micro_batch_size=8, learning_rate=5e-3))
    return model


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(input_ids=tiny_batch(5), use_cache=False).logits


@torch.no_grad()
def make_identity(model: PreTrainedModel, layer: int) -> None:
    mask_(model, family_for(model).plan(model.config).drop_layers([layer]))


@pytest.mark.parametrize("placement", ["residual", "output"])
@pytest.mark.parametrize("family", list(TINY))
def test_gates_of_one_change_nothing_bit_for_bit_and_the_hooks_go(family: str, placement: str) -> None:
    model = tiny_model(family)
    expected = logits(model)
    objective = GateObjective(1, GateConfig(placement=placement))  # type: ignore[arg-type]
    objective.setup(model, TRAIN)
    assert torch.equal(logits(model), expected)
    with torch.no_grad():
        objective.gates[1] = 0.5
    assert not torch.equal(logits(model), expected)
    objective.teardown(model)
    assert torch.equal(logits(model), expected)
    assert not any(m._forward_hooks or "forward" in m.__dict__ for m in model.modules())


@pytest.mark.parametrize("family", list(TINY))
def test_a_residual_gate_of_zero_and_a_skip_are_removal(family: str) -> None:
    model = tiny_model(family)
    with masked(model, family_for(model).plan(model.config).drop_layers(P)):
        expected = logits(model)
    objective = GateObjective(1, GateConfig())
    objective.setup(model, TRAIN)
    with torch.no_grad():
        objective.gates[list(P)] = 0.0
    torch.testing.assert_close(logits(model), expected)
    objective.teardown(model)
    hooks = LayerHooks(family_for(model).layers(model), P, lambda i, before, after: None)
    hooks.skip(1)
    hooks.skip(2)
    torch.testing.assert_close(logits(model), expected)
    hooks.remove()


def test_the_gate_is_exact_at_both_ends() -> None:
    before, after = torch.randn(2, 3, 5) * 1e3, torch.randn(2, 3, 5)
    assert torch.equal(gate_output(torch.tensor(1.0), before, after, "residual"), after)
    assert torch.equal(gate_output(torch.tensor(0.0), before, after, "residual"), before)
    halfway = gate_output(torch.tensor(0.5), before, after, "residual")
    torch.testing.assert_close(halfway, (before + after) / 2)


@pytest.mark.parametrize("planted", [0, 2])
@pytest.mark.parametrize("search", ["greedy", "one_shot"])
def test_a_planted_useless_layer_is_chosen_first(search: str, planted: int) -> None:
    model = tiny_model()
    make_identity(model, planted)
    # Writers that are frozen at zero stay the identity while the rest learns.
    layer = family_for(model).layers(model)[planted]
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    train(model, samples(), TrainConfig(steps=10, batch_size=8, micro_batch_size=8, learning_rate=5e-3))
    model.requires_grad_(True)
    before = logits(model)
    config = ElderOptions(gates=replace(GATES, search=search))  # type: ignore[arg-type]
    report = learn_layer_gates(model, samples(), 2, config)
    assert report.removed[0] == planted
    assert len(set(report.removed)) == 2
    spread = report.rounds[0].gates
    assert max(spread) - min(spread) > 0.1
    assert report.warnings == []
    assert torch.equal(logits(model), before)
    assert len(report.rounds) == (2 if search == "greedy" else 1)


def test_a_masked_gate_is_reported_as_zero_and_not_chosen_twice() -> None:
    report = learn_layer_gates(fitted_model(), samples(), 3, ElderOptions(gates=GATES))
    assert len(set(report.removed)) == 3
    assert [r.step for r in report.rounds] == [30, 34, 38]
    assert report.train.steps == 38
    for earlier, later in zip(report.rounds, report.rounds[1:], strict=False):
        for index in earlier.masked:
            assert later.gates[index] == 0.0
    assert len(report.to_dict()["rounds"]) == 3


def test_the_literal_output_gate_drives_the_last_layers_out() -> None:
    model = fitted_model()
    # The final RMSNorm undoes the last gate's scale, so only the l1 term moves it: always the last layer.
    config = ElderOptions(gates=replace(GATES, placement="output", first_round_steps=30, round_steps=30))
    report = learn_layer_gates(model, samples(), 2, config)
    assert report.removed == (3, 2)


def with_identities(*layers: int) -> PreTrainedModel:
    """A fitted model whose layers of these numbers do nothing: no other layer has as small a block influence."""
    model = fitted_model()
    for layer in layers:
        make_identity(model, layer)
    return model


def test_layers_that_are_not_weighed_have_no_gate_and_stay() -> None:
    # Of all layers, literal gates drive the last one out first; weighed are the two that do nothing.
    model = with_identities(0, 1)
    gates = replace(GATES, placement="output", round_steps=30)
    assert learn_layer_gates(model, samples(), 2, ElderOptions(gates=gates)).removed[0] == 3
    before = logits(model)
    report = learn_layer_gates(model, samples(), 2, ElderOptions(gates=replace(gates, weighed_share=0.5)))
    assert report.weighed == (0, 1)
    assert sorted(report.removed) == [0, 1]
    for choice in report.rounds:
        assert choice.gates[2:] == (1.0, 1.0)
        assert choice.gates[0] != 1.0
    assert torch.equal(logits(model), before)
    # What the penalty is a sum over shrinks with it.
    assert report.train.history[0].penalty == pytest.approx(2 * GATES.penalty_weight)


def test_hooks_are_on_the_weighed_layers_alone() -> None:
    model = tiny_model()
    objective = GateObjective(1, GATES, weighed=(1, 3))
    objective.setup(model, TRAIN)
    assert [bool(layer._forward_hooks) for layer in family_for(model).layers(model)] == [False, True, False, True]
    objective.teardown(model)


@pytest.mark.parametrize(("share", "count", "weighed"), [(0.01, 1, 1), (0.26, 1, 2), (0.25, 3, 3), (0.76, 1, 4)])
def test_the_share_is_rounded_up_and_as_many_are_weighed_as_go(share: float, count: int, weighed: int) -> None:
    config = replace(GATES, weighed_share=share)
    chosen = layers_to_weigh(with_identities(2), samples(), count, config)
    assert len(chosen) == weighed
    assert 2 in chosen
    assert list(chosen) == sorted(chosen)


def test_weighed_layers_are_those_of_the_smallest_block_influence() -> None:
    model = fitted_model()
    influence = block_influence(LayerRunner.of(model), [samples()])
    expected = sorted(sorted(range(4), key=influence.__getitem__)[:2])
    assert list(layers_to_weigh(model, samples(), 1, replace(GATES, weighed_share=0.5))) == expected


def test_gates_that_hardly_moved_are_a_warning() -> None:
    config, model = ElderOptions(gates=replace(GATES, first_round_steps=1)), fitted_model()
    frozen, *others = model.parameters()
    frozen.requires_grad_(False)
    report = learn_layer_gates(model, samples(), 1, config)
    assert "hardly moved" in report.warnings[0]
    assert not frozen.requires_grad, "what was frozen before stays so"
    assert all(p.requires_grad and p.grad is None for p in others)


def test_gate_learning_resumes_to_the_same_rounds(tmp_path: Path) -> None:
    class Stop(GateObjective):
        def before_step(self, model, step) -> None:  # type: ignore[no-untyped-def]
            if step == 33:
                raise KeyboardInterrupt

    model, config = fitted_model(), ElderOptions(gates=GATES)
    expected = learn_layer_gates(model, samples(), 3, config)
    training = TrainConfig(
        optimizer="adam", learning_rate=3e-2, steps=38, batch_size=2, micro_batch_size=2, max_grad_norm=None
    )
    with pytest.raises(KeyboardInterrupt):
        train(model, samples(), training, Stop(3, GATES), checkpoint_dir=tmp_path / "gates")
    resumed = learn_layer_gates(model, samples(), 3, config, run=RunOptions(checkpoint_dir=tmp_path, resume=True))
    assert resumed.train.resumed_from == 32
    assert resumed.removed == expected.removed
    assert resumed.rounds == expected.rounds


def test_counts_that_leave_no_layer_are_refused() -> None:
    for count in (0, 4):
        with pytest.raises(ConfigError, match="1 to 3"):
            learn_layer_gates(tiny_model(), samples(), count, ElderOptions())


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("family", ["llama", "opt", "phi", "gemma3"])
def test_the_penalty_is_the_mean_over_tokens_of_the_layers_change(family: str, norm: str) -> None:
    model = tiny_model(family)
    batch = Batch.of(samples()[:2])
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    hooks = LayerHooks(family_for(model).layers(model), P, lambda i, before, after: seen.update({i: (before, after)}))
    model(input_ids=batch.ids)
    hooks.remove()
    total = 0.0
    for before, after in seen.values():
        for token_in, token_out in zip(before.flatten(0, 1), after.flatten(0, 1), strict=True):
            total += (token_out - token_in).detach().norm(p=1 if norm == "l1" else 2).item() / 24
    objective = ElderObjective(P, ElderOptions(norm=norm, penalty_weight=0.5))  # type: ignore[arg-type]
    objective.setup(model, TRAIN)
    terms = objective.micro_loss(model, batch)
    assert terms.penalty is not None
    assert terms.penalty.item() == pytest.approx(0.5 * total, rel=1e-4)
    objective.teardown(model)
    assert objective.micro_loss(model, batch).penalty is None


def padded_samples() -> Tensor:
    """Four rows, three of them padded, so that no two micro batches hold equally many tokens."""
    data = tiny_batch(1, 4, 16)
    data[0, 4:] = IGNORED
    data[1, 11:] = IGNORED
    data[3, 2:] = IGNORED
    return data


def loss_over_real_tokens(model: PreTrainedModel, data: Tensor, config: ElderOptions) -> tuple[Tensor, Tensor]:
    """Loss and penalty, row by row without padding: sums over the tokens, divided by their number."""
    norms: list[Tensor] = []

    def measure(index: int, before: Tensor, after: Tensor) -> None:
        norms.append(torch.linalg.vector_norm(after - before, int(config.norm[1]), dim=-1).sum())

    hooks = LayerHooks(family_for(model).layers(model), P, measure)
    rows = [row[row >= 0][None] for row in data]
    loss = torch.stack([causal_loss(model, row) * (row.shape[1] - 1) for row in rows]).sum()
    hooks.remove()
    count = sum(row.shape[1] for row in rows)
    return loss / (count - len(rows)), config.penalty_weight * torch.stack(norms).sum() / count


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("micro", [1, 2, 4])
def test_padding_is_no_token_and_the_micro_batch_size_changes_nothing(
    micro: int, norm: str, checkpointing: bool
) -> None:
    data = padded_samples()
    training = TrainConfig(
        optimizer="sgd", learning_rate=1e-2, steps=1, batch_size=4, micro_batch_size=micro, max_grad_norm=None,
        gradient_checkpointing=checkpointing,
    )  # fmt: skip
    config = ElderOptions(norm=norm, penalty_weight=0.5, train=training)  # type: ignore[arg-type]
    expected, model = tiny_model(), tiny_model()
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    loss, penalty = loss_over_real_tokens(expected, data, config)
    (loss + penalty).backward()
    report = regularise_elder(model, data, P, config, RunOptions(validation=data)).train
    assert report.history[0].penalty == pytest.approx(penalty.item(), rel=1e-5)
    assert report.history[0].lm_loss == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in expected.named_parameters():
        assert parameter.grad is not None
        moved = (start[name] - model.get_parameter(name).detach()) / training.learning_rate
        torch.testing.assert_close(moved, parameter.grad, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        validation = sum(term.item() for term in loss_over_real_tokens(model, data, config))
    assert report.validation == [(1, pytest.approx(validation, rel=1e-5))]


def test_a_row_of_padding_alone_has_no_penalty() -> None:
    data = padded_samples()
    with_empty = torch.cat([data[:3], torch.full((1, 16), IGNORED)])
    training = TrainConfig(steps=1, batch_size=3, micro_batch_size=1)
    config = ElderOptions(penalty_weight=0.5, train=training)
    expected = regularise_elder(tiny_model(), data[:3], P, config).train.history[0].penalty
    padded = replace(config, train=replace(training, batch_size=4))
    found = regularise_elder(tiny_model(), with_empty, P, padded).train.history[0].penalty
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("schedule", ["published", "anneal"])
def test_gradient_checkpointing_gives_the_same_weights(schedule: str) -> None:
    config = ElderOptions(penalty_weight=0.1, schedule=schedule, train=TRAIN)  # type: ignore[arg-type]
    plain, checkpointed = tiny_model(), tiny_model()
    first = regularise_elder(plain, samples(), P, config)
    second = regularise_elder(
        checkpointed, samples(), P, replace(config, train=replace(TRAIN, gradient_checkpointing=True))
    )
    assert [r.penalty for r in first.train.history] == pytest.approx([r.penalty for r in second.train.history])
    for a, b in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_gates_learn_the_same_under_gradient_checkpointing() -> None:
    model = fitted_model()
    plain = learn_layer_gates(model, samples(), 2, ElderOptions(gates=GATES))
    checkpointed = learn_layer_gates(
        model, samples(), 2, ElderOptions(gates=GATES, train=TrainConfig(gradient_checkpointing=True))
    )
    for a, b in zip(plain.rounds, checkpointed.rounds, strict=True):
        assert a.gates == pytest.approx(b.gates, rel=1e-4)


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_the_published_penalty_turns_the_layers_into_near_identities(norm: str) -> None:
    model = fitted_model()
    plan = family_for(model).plan(model.config).drop_layers(P)
    probe = tiny_batch(9)
    before = snapshot(model, plan, probe)
    train_config = replace(TRAIN, steps=80, learning_rate=5e-3)
    config = ElderOptions(norm=norm, penalty_weight=1.0 if norm == "l2" else 0.2, train=train_config)  # type: ignore[arg-type]
    report = regularise_elder(model, samples(), P, config)
    assert report.warnings == []
    assert report.train.history[-1].penalty < 0.3 * report.train.history[0].penalty
    effect = compare(before, snapshot(model, plan, probe))
    assert effect.warnings == []
    for i in P:
        assert effect.cosines_after[i] > effect.cosines_before[i]
    with masked(model, plan):
        expected = logits(model)
    compact_(model, plan)
    torch.testing.assert_close(logits(model), expected)


def test_a_penalty_without_effect_says_so_loudly() -> None:
    model = tiny_model()
    plan = family_for(model).plan(model.config).drop_layers(P)
    before = snapshot(model, plan, tiny_batch(9))
    report = regularise_elder(model, samples(), P, ElderOptions(train=replace(TRAIN, learning_rate=1e-7)))
    assert "no effect" in report.warnings[0].lower()
    assert "had no effect" in compare(before, snapshot(model, plan, tiny_batch(9))).warnings[0]


@pytest.mark.parametrize("family", ["llama-head-dim", "qwen3", "opt", "phi", "gemma3"])
def test_annealing_makes_the_layers_the_identity_and_the_drop_changes_nothing(family: str) -> None:
    model = fitted_model(family)
    plan = family_for(model).plan(model.config).drop_layers(P)
    probe = tiny_batch(9)
    before = snapshot(model, plan, probe)
    with masked(model, plan):
        direct = float(model(input_ids=samples(), labels=samples()).loss.detach())
    config = ElderOptions(schedule="anneal", train=replace(TRAIN, steps=30))
    report = regularise_elder(model, samples(), P, config)
    trained = logits(model)
    effect = compare(before, snapshot(model, plan, probe))
    assert effect.warnings == []
    assert all(effect.cosines_after[i] == pytest.approx(1.0, abs=1e-6) for i in P)
    assert report.train.losses[-1] < direct
    compact_(model, plan)
    torch.testing.assert_close(logits(model), trained)


@pytest.mark.filterwarnings("default")  # torch's own, while it traces
def test_annealing_runs_compiled_and_leaves_the_layers_as_they_were() -> None:
    """The layers that become the identity have a compiled forward pass of their own by then."""
    config = ElderOptions(schedule="anneal", anneal_share=0.5, train=replace(TRAIN, steps=6))
    plain, compiled = tiny_model(), tiny_model()
    expected = regularise_elder(plain, samples(), P, config)
    with only_traced():
        config = replace(config, train=replace(config.train, compile=True))
        found = regularise_elder(compiled, samples(), P, config)
    assert found.train.losses == pytest.approx(expected.train.losses, rel=1e-4)
    assert not any("forward" in vars(layer) for layer in family_for(compiled).layers(compiled))


def test_annealing_in_no_steps_is_to_cut_and_then_to_train() -> None:
    config = ElderOptions(schedule="anneal", anneal_share=0.0, train=TRAIN)
    annealed, cut = tiny_model(), tiny_model()
    plan = family_for(cut).plan(cut.config).drop_layers(P)
    regularise_elder(annealed, samples(), P, config)
    compact_(annealed, plan)
    compact_(cut, plan)
    train(cut, samples(), TRAIN)
    torch.testing.assert_close(logits(annealed), logits(cut))


def test_the_annealed_gate_falls_to_exactly_zero_and_stops_computing() -> None:
    objective = ElderObjective(P, ElderOptions(schedule="anneal", anneal_share=0.5))
    model = tiny_model()
    objective.setup(model, replace(TRAIN, steps=8))
    assert [objective.gate_at(s) for s in range(1, 9)] == [0.75, 0.5, 0.25, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert [objective.allows_early_stop(s) for s in (3, 4)] == [False, True]
    objective.before_step(model, 3)
    assert "forward" not in family_for(model).layers(model)[1].__dict__
    objective.before_step(model, 4)
    assert "forward" in family_for(model).layers(model)[1].__dict__
    objective.teardown(model)
    assert "forward" not in family_for(model).layers(model)[1].__dict__


def test_annealing_resumes_to_the_same_bits(tmp_path: Path) -> None:
    class Stop(ElderObjective):
        def micro_loss(self, model, batch):  # type: ignore[no-untyped-def]
            if self.gate == 0.25:
                raise KeyboardInterrupt
            return super().micro_loss(model, batch)

    config = ElderOptions(schedule="anneal", train=TRAIN)
    whole, resumed = tiny_model(), tiny_model()
    regularise_elder(whole, samples(), P, config)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_model(), samples(), TRAIN, Stop(P, config), checkpoint_dir=tmp_path / "elder")
    regularise_elder(resumed, samples(), P, config, RunOptions(checkpoint_dir=tmp_path, resume=True))
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("step", [2, 5])
def test_a_validation_made_up_for_after_resuming_sees_the_annealed_gate(tmp_path: Path, step: int) -> None:
    class PressedDuringUpdate(ElderObjective):
        def after_optimizer_step(self, model, optimizer, at, learning_rate) -> None:  # type: ignore[no-untyped-def]
            if at == step:
                os.kill(os.getpid(), signal.SIGINT)

    config = ElderOptions(schedule="anneal", train=replace(TRAIN, early_stop_patience=9, validation_interval=1))
    held = tiny_batch(2, 4, 12)
    whole, resumed = tiny_model(), tiny_model()
    expected = regularise_elder(whole, samples(), P, config, RunOptions(validation=held)).train
    folder = tmp_path / "elder"
    with pytest.raises(KeyboardInterrupt):
        train(
            tiny_model(), samples(), config.train, PressedDuringUpdate(P, config),
            validation=held, checkpoint_dir=folder,
        )  # fmt: skip
    report = regularise_elder(resumed, samples(), P, config, RunOptions(held, tmp_path, resume=True)).train
    assert report.validation == expected.validation
    assert report.best_step == expected.best_step


@pytest.mark.parametrize("name", ["elder", "trsp"])
def test_the_method_decides_and_regularises(name: str) -> None:
    model = fitted_model()
    config = PruneConfig(method=name, ratio=0.5, options=ElderOptions(gates=GATES, schedule="anneal", train=TRAIN))
    method = get_method(name)
    assert method.name == name
    decision = method.decide(model, samples(), PlanRequest.of(model, config))
    assert len(decision.plan.removed_layers) == 2
    assert sorted(decision.details["gates"]["removed"]) == list(decision.plan.removed_layers)
    report = method.regularise(model, samples(), decision.plan, config.options)
    assert report.warnings == []
    compact_(model, decision.plan)
    after_cut = method.regularise(model, samples(), decision.plan, config.options)
    assert after_cut.to_dict()["removed"] == ()


def test_explicit_layers_skip_stage_one() -> None:
    model = tiny_model()
    request = PlanRequest.of(model, PruneConfig(options=ElderOptions(layers=(0, 3))))
    decision = METHOD.decide(model, samples(), request)
    assert decision.plan.removed_layers == (0, 3)
    assert "given" in decision.notes[0]


def test_the_norm_does_not_depend_on_batch_or_length() -> None:
    before, after = torch.zeros(1, 1, 4), torch.ones(1, 1, 4)
    assert residual_diff_norm(before, after, "l2").item() == 2.0
    assert residual_diff_norm(before.expand(3, 7, 4), after.expand(3, 7, 4), "l2").item() == 2.0
    assert math.isclose(residual_diff_norm(before, after, "l1").item(), 4.0)


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_stage_two_minimises_the_op_and_its_gradient_reaches_the_layer(
    norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def spy(x_in: Tensor, x_out: Tensor, kind: str) -> Tensor:
        assert kind == norm
        value = residual_diff_norm(x_in, x_out, kind)
        calls.append((x_in.detach(), x_out.detach(), value))
        return value

    monkeypatch.setattr("pyprune.methods.regularise.elder.penalty.residual_diff_norm", spy)
    model = tiny_model()
    objective = ElderObjective(P, ElderOptions(norm=norm, penalty_weight=0.5))  # type: ignore[arg-type]
    objective.setup(model, TRAIN)
    terms = objective.micro_loss(model, Batch.of(samples()))
    objective.teardown(model)
    assert len(calls) == len(P)
    by_hand = sum(float(torch.linalg.vector_norm(b - a, int(norm[1]), dim=-1).mean()) for a, b, _ in calls)
    assert terms.penalty is not None
    assert float(terms.penalty.detach()) == pytest.approx(0.5 * by_hand, rel=1e-5)
    terms.penalty.backward()
    reached = [i for i in range(4) if model.model.layers[i].mlp.down_proj.weight.grad is not None]
    assert reached == [0, 1, 2], "the layers of P and what comes before them, not what comes after"
