"""DReSS: each solver and schedule does what it is for, on every kind of family, and the cut afterwards is exact."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pyprune.config.run import PruneConfig
from pyprune.config.train import TrainConfig
from pyprune.cut.compact import compact_
from pyprune.cut.mask import masked
from pyprune.errors import ConfigError
from pyprune.families import family_for, named_axes
from pyprune.methods.base import PlanRequest, RunOptions
from pyprune.methods.regularise.dress import METHOD, DressOptions
from pyprune.methods.regularise.dress import training as dress
from pyprune.methods.regularise.dress.channels import channel_scores, select_channels
from pyprune.methods.regularise.dress.training import DressObjective, hidden_slices, regularise_dress
from pyprune.ops import available_isas
from pyprune.plan import PrunePlan
from pyprune.probe.effects import compare, preserved_ratio, snapshot, weight_sums
from pyprune.train.loop import train as run_training
from tests._support.models import tiny_batch, tiny_model

R = tuple(range(36, 48))
TRAIN = TrainConfig(steps=8, batch_size=2, micro_batch_size=2, learning_rate=2e-3, max_grad_norm=None)
FAMILIES = ["llama-head-dim", "mistral", "qwen2", "qwen3-tied", "opt", "phi", "gemma3"]


def samples() -> Tensor:
    return tiny_batch(1, 8, 12)


def plan_of(model: PreTrainedModel, removed: tuple[int, ...] = R) -> PrunePlan:
    plan = family_for(model).plan(model.config)
    return plan.keep_hidden(set(plan.hidden) - set(removed))


def channels_of(model: PreTrainedModel, name: str, dim: int, offset: bool = False) -> Tensor:
    weight = model.get_parameter(name).detach() + (1.0 if offset else 0.0)
    return weight.movedim(dim, 0)[list(R)]


def ratio_after(model: PreTrainedModel, config: DressOptions) -> float:
    ratio = regularise_dress(model, samples(), R, config).preserved_ratio
    assert ratio is not None
    return ratio


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(input_ids=tiny_batch(5), use_cache=False).logits


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_the_penalty_is_the_papers_sum_counted_by_hand(norm: str) -> None:
    model = tiny_model("llama-head-dim")  # tied head
    objective = DressObjective(R, DressOptions(norm=norm, penalty_weight=0.5))  # type: ignore[arg-type]
    objective.setup(model, TRAIN)
    total = 0.0
    for name, parameter in model.named_parameters():
        p = parameter.detach()
        if p.ndim == 1:
            total += float(p[list(R)].abs().sum())
            continue
        reads = any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens"))
        groups = p[:, list(R)].T if reads else p[list(R)]
        total += float(groups.norm(dim=1).sum() if norm == "l2" else groups.abs().sum())
    penalty = objective.step_penalty(model)
    assert penalty is not None
    assert penalty.item() == pytest.approx(0.5 * total, rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_with_a_hidden_axis_is_penalised_in_R_only(family: str) -> None:
    model = tiny_model(family)
    objective = DressObjective(R, DressOptions())
    objective.setup(model, TRAIN)
    penalty = objective.step_penalty(model)
    assert penalty is not None
    penalty.backward()
    for param in named_axes(model):
        dim = param.axis_dim("hidden")
        if dim is None:
            assert param.parameter.grad is None
            continue
        assert param.parameter.grad is not None, param.name
        gradient = param.parameter.grad.movedim(dim, 0)
        assert gradient[list(R)].abs().sum() > 0, param.name
        assert gradient[:36].abs().sum() == 0, param.name


def test_the_penalty_that_is_told_is_the_one_that_was_trained_on() -> None:
    """In the full-parameter ablation it is of every channel."""
    told = {}
    for penalise in ("removed", "all"):
        config = DressOptions(penalise=penalise, penalty_weight=0.01, train=replace(TRAIN, steps=1))  # type: ignore[arg-type]
        report = regularise_dress(tiny_model(), samples(), R, config)
        assert 0.01 * report.penalty_before == pytest.approx(report.train.history[0].penalty, rel=1e-5)
        told[penalise] = report.penalty_before
    assert told["all"] > 2 * told["removed"]


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_subgradient_brings_the_penalised_part_down_and_not_the_rest(norm: str) -> None:
    model = tiny_model()
    before = weight_sums(model, plan_of(model))
    train = replace(TRAIN, steps=60, learning_rate=1e-2)
    config = DressOptions(norm=norm, penalty_weight=0.3 if norm == "l2" else 0.05, train=train)  # type: ignore[arg-type]
    report = regularise_dress(model, samples(), R, config)
    after = weight_sums(model, plan_of(model))
    assert report.preserved_ratio is not None
    assert report.preserved_ratio < 0.3
    assert report.preserved_ratio == preserved_ratio(before, after)
    assert report.penalty_after < 0.3 * report.penalty_before
    kept = sum(s.kept for s in after.values()) / sum(s.kept for s in before.values())
    assert kept > 0.8
    assert report.warnings == []


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_l2_prox_removes_whole_groups(family: str) -> None:
    model = tiny_model(family)
    train = replace(TRAIN, steps=16)
    config = DressOptions(norm="l2", solver="prox", penalty_weight=1.0, prox_step=0.3, train=train)
    assert ratio_after(model, config) < 0.05
    groups = channels_of(model, "model.layers.1.mlp.up_proj.weight", 1)
    zero = (groups == 0).all(dim=1)
    assert zero.any()
    norm = channels_of(model, "model.norm.weight", 0, offset=family == "gemma3")
    assert (norm == 0).any()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize(
    ("op", "options"),
    [
        ("add_group_penalty_", {"norm": "l1", "penalty_weight": 0.05}),
        ("add_group_penalty_", {"norm": "l2", "penalty_weight": 0.3}),
        ("group_soft_threshold", {"solver": "prox", "penalty_weight": 1.0, "prox_step": 0.05}),
        ("group_soft_threshold", {"solver": "prox", "penalise": "all", "penalty_weight": 0.1, "prox_step": 0.05}),
    ],
)
def test_every_step_goes_through_the_ops_and_equals_their_references(
    family: str, op: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, seen = getattr(dress, op), set()

    def counted(*arguments: Any, **keywords: Any) -> Tensor:
        seen.update(id(argument) for argument in arguments)
        result: Tensor = original(*arguments, **keywords)
        return result

    # pyprune's own optimizer has the penalty in its pass; beside another one the ops are called.
    config = DressOptions(train=replace(TRAIN, steps=3, optimizer="adamw"), **options)
    models = {}
    for backend in ("python", "auto"):
        monkeypatch.setenv("PYPRUNE_BACKEND", backend)
        models[backend] = tiny_model(family)
        objective = DressObjective(R, config)
        with monkeypatch.context() as patch:
            patch.setattr(dress, op, counted)
            run_training(models[backend], samples(), config.train, objective)
        for param in named_axes(models[backend]):
            assert (id(param.parameter) in seen) == (param.axis_dim("hidden") is not None), f"{op} of {param.name}"
        seen.clear()
    untouched = dict(tiny_model(family).named_parameters())
    for (name, plain), fast in zip(models["python"].named_parameters(), models["auto"].parameters(), strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-6, msg=name)
        assert not torch.equal(plain, untouched[name])


def test_prox_at_the_learning_rate_is_a_no_op_and_says_so() -> None:
    model = tiny_model()
    config = DressOptions(norm="l2", solver="prox", penalty_weight=1e-3, train=replace(TRAIN, learning_rate=2e-5))
    report = regularise_dress(model, samples(), R, config)
    assert "had no effect" in report.warnings[0]


def test_a_missed_target_is_a_warning() -> None:
    model = tiny_model()
    config = DressOptions(penalty_weight=0.3, target_preserved_ratio=0.01, train=replace(TRAIN, learning_rate=1e-2))
    report = regularise_dress(model, samples(), R, config)
    assert "missed its target" in report.warnings[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_annealing_reaches_exact_zero_and_the_cut_changes_nothing(family: str) -> None:
    model = tiny_model(family)
    plan = plan_of(model)
    config = DressOptions(schedule="anneal", anneal_share=0.5, train=TRAIN)
    assert ratio_after(model, config) == 0.0
    offset = family == "gemma3"
    for param in named_axes(model):
        dim = param.axis_dim("hidden")
        if dim is not None:
            value = param.parameter.detach() + (1.0 if offset and param.row.is_norm_weight else 0.0)
            assert (value.movedim(dim, 0)[list(R)] == 0).all(), param.name
    trained = logits(model)
    with masked(model, plan):
        torch.testing.assert_close(logits(model), trained, rtol=1e-4, atol=1e-4)
    compact_(model, plan)
    torch.testing.assert_close(logits(model), trained, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("solver", ["subgradient", "prox"])
def test_compacted_equals_masked_after_every_solver(solver: str) -> None:
    model = tiny_model("phi")
    plan = plan_of(model)
    config = DressOptions(solver=solver, penalty_weight=0.01, prox_step=1e-2, train=TRAIN)  # type: ignore[arg-type]
    regularise_dress(model, samples(), R, config)
    with masked(copy.deepcopy(model), plan) as reference:
        expected = logits(reference)
    compact_(model, plan)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_the_gauge_is_kept_during_training() -> None:
    model = tiny_model("phi")
    regularise_dress(model, samples(), R, DressOptions(penalty_weight=0.01, train=TRAIN))
    for param in named_axes(model):
        dim = param.axis_dim("hidden")
        if dim is not None and param.row.role in ("embedding", "writer"):
            mean = param.parameter.detach().movedim(dim, 0)[:36].mean(0)
            assert mean.abs().max() < 1e-6, param.name


def test_the_annealed_factor_falls_to_exactly_zero_at_its_share() -> None:
    objective = DressObjective(R, DressOptions(schedule="anneal", anneal_share=0.5))
    objective.setup(tiny_model(), replace(TRAIN, steps=8))
    assert [objective.factor(s) for s in range(9)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert [objective.allows_early_stop(s) for s in (3, 4)] == [False, True]


def test_annealing_in_no_steps_zeroes_the_channels_in_the_first() -> None:
    objective = DressObjective(R, DressOptions(schedule="anneal", anneal_share=0.0))
    objective.setup(tiny_model(), replace(TRAIN, steps=8))
    assert [objective.factor(s) for s in range(3)] == [1.0, 0.0, 0.0]
    assert objective.allows_early_stop(1)
    model = tiny_model()
    regularise_dress(
        model, samples(), R, DressOptions(schedule="anneal", anneal_share=0.0, train=replace(TRAIN, steps=1))
    )
    assert all(float(s.penalty("l2").detach()) == 0 for s in hidden_slices(model, R))


def test_selections() -> None:
    model = tiny_model()
    assert select_channels(model, 3, DressOptions(select="last")) == (45, 46, 47)
    assert select_channels(model, 3, DressOptions(select="first")) == (0, 1, 2)
    segments = select_channels(model, 8, DressOptions(select="segments", segments=4))
    assert segments == (10, 11, 22, 23, 34, 35, 46, 47)
    for count in range(1, 48):
        for pieces in (1, 5, 7, 48):
            chosen = select_channels(model, count, DressOptions(select="segments", segments=pieces))
            assert len(set(chosen)) == len(chosen) == count
    explicit = DressOptions(select="explicit", channels=(5, 2))
    assert select_channels(model, 2, explicit) == (2, 5)
    with pytest.raises(ConfigError, match="ask for 3"):
        select_channels(model, 3, explicit)
    with pytest.raises(ConfigError, match=r"0\.\.47"):
        select_channels(model, 1, DressOptions(select="explicit", channels=(48,)))
    for count in (0, 48):
        with pytest.raises(ConfigError, match="1 to 47"):
            select_channels(model, count, DressOptions())


@pytest.mark.parametrize("family", ["llama", "gemma3", "opt"])
def test_the_score_picks_planted_small_channels(family: str) -> None:
    model = tiny_model(family)
    planted = (3, 17, 40)
    plan = plan_of(model, planted)
    with masked(model, plan):
        assert select_channels(model, 3, DressOptions(select="scored")) == planted
        assert channel_scores(model).count_nonzero() == 45
    scores = channel_scores(model)
    assert scores.min() > 0
    assert scores.mean() == pytest.approx(1.0)


def test_full_parameter_regularisation_shrinks_everything() -> None:
    model = tiny_model()
    before = weight_sums(model, plan_of(model))
    config = DressOptions(penalty_weight=0.3, penalise="all", train=replace(TRAIN, steps=30, learning_rate=1e-2))
    regularise_dress(model, samples(), R, config)
    after = weight_sums(model, plan_of(model))
    assert sum(s.kept for s in after.values()) < 0.7 * sum(s.kept for s in before.values())


def test_resuming_gives_the_same_bits(tmp_path: Path) -> None:
    config = DressOptions(schedule="anneal", train=TRAIN)
    whole = tiny_model()
    regularise_dress(whole, samples(), R, config)

    class Stop(DressObjective):
        def before_step(self, model, step) -> None:  # type: ignore[no-untyped-def]
            if step == 3:
                raise KeyboardInterrupt

    from pyprune.train.loop import train

    with pytest.raises(KeyboardInterrupt):
        train(tiny_model(), samples(), TRAIN, Stop(R, config), checkpoint_dir=tmp_path / "dress")
    resumed = tiny_model()
    regularise_dress(resumed, samples(), R, config, RunOptions(checkpoint_dir=tmp_path, resume=True))
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_method_decides_a_legal_size_and_reports_the_rounding() -> None:
    model = tiny_model()
    request = PlanRequest.of(model, PruneConfig(method="dress", ratio=0.3, hidden_multiple=8))
    decision = METHOD.decide(model, samples(), request)
    assert len(decision.plan.hidden) == 40
    assert any("rounded" in note for note in decision.notes)
    config = PruneConfig(method="dress", options=DressOptions(schedule="anneal", train=TRAIN))
    report = METHOD.regularise(model, samples(), decision.plan, config.options)
    assert report.to_dict()["preserved_ratio"] == 0.0
    compact_(model, decision.plan)
    again = METHOD.regularise(model, samples(), decision.plan, config.options)
    assert again.to_dict()["preserved_ratio"] is None


def test_effects_show_figures_5_and_6() -> None:
    model = tiny_model()
    plan, probe = plan_of(model), tiny_batch(9)
    before = snapshot(model, plan, probe)
    nothing = compare(before, snapshot(model, plan, probe), target_preserved_ratio=0.3)
    assert nothing.preserved_ratio == 1.0
    assert "no effect" in nothing.warnings[0].lower()
    regularise_dress(model, samples(), R, DressOptions(schedule="anneal", train=TRAIN))
    report = compare(before, snapshot(model, plan, probe), target_preserved_ratio=0.05)
    assert report.preserved_ratio == 0.0
    assert report.warnings == []
    assert set(report.matrix_ratios) >= {"self_attn.q_proj.weight", "mlp.down_proj.weight", "lm_head.weight"}
    assert all(removed == 0.0 and kept > 0.5 for removed, kept in report.matrix_ratios.values())
    assert all(removed == 0.0 for removed, _ in report.activation_ratios)
    assert len(report.to_dict()["cosines_after"]) == 4


FUSED = [
    # norm, solver, prox_step, max_grad_norm, family, whether the optimizer takes the penalty over
    ("l2", "subgradient", None, None, "llama-head-dim", True),
    ("l1", "subgradient", None, None, "gemma3", True),
    ("l2", "subgradient", None, None, "phi", True),
    ("l2", "subgradient", None, 0.05, "llama-head-dim", True),
    ("l2", "prox", None, 0.05, "mistral", False),
    ("l2", "prox", 1e-2, 0.05, "gemma3", False),
    ("l2", "prox", 1e-2, None, "phi", False),
]


def dress_options(norm: str, solver: str, prox_step: float | None, clip: float | None) -> DressOptions:
    penalty_weight = 0.3 if norm == "l2" or solver == "prox" else 0.05
    train = replace(TRAIN, max_grad_norm=clip, optimizer="fused_adamw", weight_decay=0.1)
    return DressOptions(norm=norm, solver=solver, prox_step=prox_step, penalty_weight=penalty_weight, train=train)  # type: ignore[arg-type]


@pytest.mark.parametrize(("norm", "solver", "prox_step", "clip", "family", "taken_over"), FUSED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_fused_optimizer_follows_the_same_path(
    norm: str, solver: str, prox_step: float | None, clip: float | None, family: str, taken_over: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    config = dress_options(norm, solver, prox_step, clip)
    models = [tiny_model(family).to(dtype) for _ in range(3)]
    objectives = [DressObjective(R, config), DressObjective(R, config)]
    ours = run_training(models[0], samples(), config.train, objectives[0])
    theirs = run_training(models[1], samples(), replace(config.train, optimizer="adamw"), objectives[1])
    run_training(models[2], samples(), config.train)
    assert [o.in_optimizer for o in objectives] == [taken_over and bool(available_isas()), False]
    limit = 1e-9 if dtype == torch.float64 else 1e-5
    assert ours.losses == pytest.approx(theirs.losses, rel=limit)
    assert [r.penalty for r in ours.history] == pytest.approx([r.penalty for r in theirs.history], rel=limit)
    pairs = list(zip(*(m.parameters() for m in models), strict=True))
    # Where a gradient is noise, float32 rounding decides the direction of a step of 2e-3.
    off = sum(int(((a - b).abs() > limit).sum()) for a, b, _ in pairs)
    assert off <= (0 if dtype == torch.float64 else sum(p.numel() for p, _, _ in pairs) // 1000)
    assert any((a - plain).abs().max() > 1e-3 for a, _, plain in pairs), "the penalty acts"


@pytest.mark.parametrize(("norm", "solver"), [("l2", "subgradient"), ("l2", "prox")])
def test_a_run_with_the_penalty_in_the_optimizer_resumes_to_the_same_bits(
    norm: str, solver: str, tmp_path: Path
) -> None:
    class Interrupted(DressObjective):
        def before_step(self, model: nn.Module, step: int) -> None:
            if step == 5:
                raise KeyboardInterrupt

    config = dress_options(norm, solver, None, None)
    whole, resumed = tiny_model(), tiny_model(seed=7)
    run_training(whole, samples(), config.train, DressObjective(R, config))
    with pytest.raises(KeyboardInterrupt):
        run_training(tiny_model(), samples(), config.train, Interrupted(R, config), checkpoint_dir=tmp_path)
    run_training(resumed, samples(), config.train, DressObjective(R, config), checkpoint_dir=tmp_path, resume=True)
    for (name, a), b in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("family", ["gemma3", "phi"])
def test_the_loops_penalty_gradient_is_that_of_autograd(norm: str, family: str) -> None:
    model, expected = tiny_model(family), tiny_model(family)
    config = DressOptions(norm=norm, penalty_weight=0.3)  # type: ignore[arg-type]
    fast, slow = DressObjective(R, config), DressObjective(R, config)
    for one, objective in ((model, fast), (expected, slow)):
        objective.setup(one, TRAIN)
        for number, parameter in enumerate(one.parameters()):
            if number % 3:  # with and without a gradient from elsewhere
                parameter.grad = torch.full_like(parameter, 0.01)
        frozen = next(n for n, _ in one.named_parameters() if "layers.1" in n and "norm.weight" in n)
        one.get_parameter(frozen).requires_grad_(False).grad = None
    value, penalty = fast.apply_step_penalty(model), slow.step_penalty(expected)
    assert value is not None
    assert penalty is not None
    assert not value.requires_grad
    penalty.backward()
    torch.testing.assert_close(value, penalty.detach())
    for (name, a), b in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        torch.testing.assert_close(a.grad, b.grad, msg=name)


@pytest.mark.parametrize("memory", ["full", "lean"])
def test_the_proximal_map_leaves_frozen_weights_alone(memory: str) -> None:
    model, dtype = (tiny_model(), "float32") if memory == "full" else (tiny_model().bfloat16(), "bfloat16")
    frozen = model.get_parameter("model.layers.0.mlp.up_proj.weight").requires_grad_(False)
    before = frozen.detach().clone()
    config = dress_options("l2", "prox", 1e-2, None)
    objective = DressObjective(R, config)
    run_training(model, samples(), replace(config.train, memory=memory, dtype=dtype), objective)
    assert torch.equal(frozen, before)
    trained, start = (m.get_parameter("model.layers.0.mlp.gate_proj.weight") for m in (model, tiny_model()))
    assert float(trained[:, list(R)].detach().abs().sum()) < float(start[:, list(R)].detach().abs().sum())


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi"])
def test_small_proximal_steps_are_kept_in_bfloat16(family: str) -> None:
    """Steps of 0.1 % round to nearest as nothing; the norms must shrink as they do in float32."""
    lengths = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model(family).to(dtype)
        (table,) = [s for s in hidden_slices(model, R) if s.param.name == "model.embed_tokens.weight"]
        for _ in range(50):
            table.soft_threshold(1e-3)
        lengths[dtype] = table.penalty("l2").item()
    before = hidden_slices(tiny_model(family), R)[0].penalty("l2").item()
    assert before - lengths[torch.float32] == pytest.approx(0.05 * len(R), rel=1e-3)
    assert before - lengths[torch.bfloat16] == pytest.approx(0.05 * len(R), rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_annealed_factor_is_rounded_once_and_zero_is_exact(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family).to(dtype)
    for slices in hidden_slices(model, R):
        weight, offset = slices.param.parameter, slices.offset
        before = weight.detach().clone()
        part = before.index_select(slices.dim, slices.index)
        wide = part if dtype == torch.float64 else part.float()
        slices.shrink(0.3)
        expected = ((wide + offset) * 0.3 - offset).to(dtype)
        assert torch.equal(weight, before.index_copy(slices.dim, slices.index, expected))
        with torch.no_grad():
            weight.movedim(slices.dim, 0)[R[0]] = float("nan")
        slices.shrink(0.0)
        removed = weight.index_select(slices.dim, slices.index)
        assert (removed == -offset).all()
        assert offset or not torch.signbit(removed).any()


def test_the_proximal_map_of_l1_is_refused() -> None:
    with pytest.raises(ConfigError, match="solver is 'prox' with norm 'l1'"):
        DressOptions(norm="l1", solver="prox").validate()


def test_annealing_everything_is_refused() -> None:
    with pytest.raises(ConfigError, match="anneal"):
        DressOptions(penalise="all", schedule="anneal").validate()
