"""Experts that take over what others added: their down projections are solved together."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pyprune.config.cut import ReconstructConfig
from pyprune.cut.compact import compact_
from pyprune.cut.least_squares import BlockEquations, NormalEquations
from pyprune.cut.mask import mask_
from pyprune.cut.reconstruct import ReconstructionReport, reconstruct_, reconstruct_compacted_
from pyprune.families import family_for
from pyprune.families.mixtures import chosen_experts, read_fewer_experts_
from pyprune.plan import PrunePlan
from tests._support.compare import assert_same_logits
from tests._support.inferred import tiny_inferred
from tests._support.models import tiny_batch
from tests.families.test_contract import logits

TEXT = tiny_batch(batch=48, length=24, seed=3)
TYPES = {
    "mixtral": "experts alone, all weights normalised",
    "gpt_oss": "transposed matrices, with biases",
    "deepseek_v3": "shared experts beside them",
    "qwen2_moe": "a shared expert behind a gate",
    "granitemoeshared": "shared experts in a module of their own",
    "afmoe": "a norm after them",
}
LATER = ("aria_text", "ernie4_5_moe", "hunyuan_v1_moe", "lfm2_moe", "minimax_m2", "nemotron_h", "qwen3_next", "phimoe")


def plan_of(model: PreTrainedModel) -> PrunePlan:
    plan = family_for(model).plan(model.config)
    for layer in plan.layers:
        plan = plan.with_layer(layer.index, experts=[0, 1, 3, 5]) if layer.units("experts") else plan
    return plan


def repetitive(model_type: str) -> PreTrainedModel:
    """A model whose last experts add what the others add on the same tokens, times a matrix near the identity."""
    model = tiny_inferred(model_type)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 3 and len(parameter) == 7:
                parameter[4:] = parameter[:3] + 0.1 * parameter[4:]
                parameter[2] = parameter[3] + 0.1 * parameter[2]
            if "experts" not in name and "down" not in name and parameter.ndim == 2 and len(parameter) == 7:
                parameter.mul_(0.5)
    return model


def errors(model: PreTrainedModel, plan: PrunePlan) -> tuple[float, float, ReconstructionReport]:
    """Relative errors of the logits on other text: cut, and reconstructed and cut."""
    solved, plain, test = copy.deepcopy(model), copy.deepcopy(model), tiny_batch(batch=12, length=24, seed=9)
    report = reconstruct_(solved, plan, TEXT)
    expected, found = logits(model, test), []
    for each in (plain, solved):
        reference = copy.deepcopy(each)
        mask_(reference, plan)
        compact_(each, plan)
        assert_same_logits(logits(each, test), logits(reference, test))
        found.append(float((logits(each, test) - expected).norm() / expected.norm()))
    return found[0], found[1], report


@pytest.mark.parametrize("bound", [4096, 0], ids=["joint", "one at a time"])
@pytest.mark.parametrize("model_type", [*TYPES, *(pytest.param(name, marks=pytest.mark.second) for name in LATER)])
def test_kept_experts_take_over(model_type: str, bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each form of a mixture; the layer itself checks that it adds what was solved for (ExpertWriters)."""
    monkeypatch.setattr("pyprune.cut.experts.JOINT_INPUTS", bound)
    model = repetitive(model_type)
    plan = plan_of(model)
    before, after, report = errors(model, plan)
    solved = [part for part in report.parts if part.blocks == ("mlp",) and part.taken]
    assert not report.not_solved
    assert len(solved) >= min(2, sum(bool(layer.units("experts")) for layer in plan.layers))
    assert min(part.after / part.before for part in solved) < 0.97
    assert after < before


def test_experts_are_solved_in_bfloat16_too() -> None:
    model = repetitive("deepseek_v3")
    report = reconstruct_(model, plan_of(model), TEXT, options=ReconstructConfig(dtype="bfloat16"))
    assert not report.not_solved
    assert any(part.taken and part.blocks == ("mlp",) for part in report.parts)


def test_removed_experts_and_readers_keep_their_values() -> None:
    model = repetitive("mixtral")
    before = copy.deepcopy(model)
    reconstruct_(model, plan_of(model), TEXT)
    old, new = before.model.layers[0].mlp.experts, model.model.layers[0].mlp.experts
    assert torch.equal(old.gate_up_proj, new.gate_up_proj)
    assert [torch.equal(old.down_proj[i], new.down_proj[i]) for i in range(7)] == [i in (2, 4, 6) for i in range(7)]


def test_a_cut_model_is_solved_as_the_dense_one_is() -> None:
    model = repetitive("deepseek_v3")
    plan = plan_of(model)
    whole, cut = copy.deepcopy(model), copy.deepcopy(model)
    reconstruct_(whole, plan, TEXT)
    compact_(whole, plan)
    compact_(cut, plan)
    reconstruct_compacted_(cut, plan, model, TEXT)
    assert_same_logits(logits(cut, TEXT[:4]), logits(whole, TEXT[:4]), 1e-3)


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("plan_of_what", ["whole", "experts"])
def test_a_cut_that_reads_fewer_experts_follows_the_dense_model(plan_of_what: str, model_type: str) -> None:
    """Also where nothing is removed; in memory, and after the cut."""
    dense = repetitive(model_type)
    usual, test = chosen_experts(dense.config), tiny_batch(batch=12, length=24, seed=9)
    plan = plan_of(dense) if plan_of_what == "experts" else family_for(dense).plan(dense.config)
    fewer = copy.deepcopy(dense)
    read_fewer_experts_(fewer.config, fewer.modules(), usual - 1)
    plain, solved, after = (copy.deepcopy(fewer) for _ in range(3))
    report = reconstruct_(solved, plan, TEXT, dense_experts=usual)
    assert chosen_experts(solved.config) == usual - 1
    for each in (plain, solved, after):
        compact_(each, plan)
    reconstruct_compacted_(after, plan, dense, TEXT)
    assert_same_logits(logits(after, test), logits(solved, test), 1e-3)
    expected = logits(dense, test)
    plain_error, solved_error = (float((logits(each, test) - expected).norm()) for each in (plain, solved))
    assert any(part.taken for part in report.parts)
    assert solved_error < plain_error


@pytest.mark.parametrize("model_type", ["cohere2_moe", "llama4_text"])
def test_layers_that_do_more_than_add_up_keep_their_experts(model_type: str) -> None:
    """Cohere takes the mean with the shared experts, and the experts of LLaMA 4 read all tokens."""
    model = tiny_inferred(model_type)
    before = copy.deepcopy(model)
    report = reconstruct_(model, plan_of(model), TEXT)
    count = sum("experts" in name and "down_proj" in name for name, p in model.named_parameters() if p.ndim == 3)
    assert len(report.not_solved) == count
    assert any(f"experts of {count} layers keep their values" in note for note in report.notes())
    for (name, old), new in zip(before.named_parameters(), model.parameters(), strict=True):
        assert old.ndim < 3 or torch.equal(old, new), name


@pytest.mark.parametrize("weighted", [False, True])
def test_blocks_are_solved_as_one_system(weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyprune.cut.least_squares.SWEEPS", 40)
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    starts, sizes = [draw(5, 3), draw(4, 3), draw(6, 3)], (5, 4, 6)
    blocks, whole = BlockEquations(starts), NormalEquations(torch.cat(starts), constant=False)
    for _ in range(3):
        x, y = draw(40, 15), draw(40, 3)
        weight = torch.rand(40, generator=generator) if weighted else None
        parts = []
        for columns in x.split(sizes, 1):
            rows = torch.rand(40, generator=generator) < 0.6
            columns[~rows] = 0
            parts.append((rows.nonzero().flatten(), columns[rows]))
        blocks.add(parts, y, weight)
        whole.add(x, y, weight)
    assert blocks.error() == pytest.approx(whole.error(), rel=1e-5)
    for ridge in (10.0, 0.1):
        expected, found = whole.solve(ridge), blocks.solve(ridge)
        assert expected is not None
        assert found is not None
        torch.testing.assert_close(found, expected.float(), rtol=1e-3, atol=1e-4)
    assert blocks.nbytes > 3 * 40 * 3 * 4


@pytest.mark.parametrize("weighted", [False, True])
def test_blocks_of_few_tokens_have_the_same_solution_by_their_tokens(
    weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    starts = [draw(60, 3), draw(10, 3), draw(7, 3)]
    chunks = []
    for _ in range(2):
        rows = [draw(40).argsort()[:count] for count in (20, 30, 0)]
        parts = [(places, draw(len(places), len(start))) for places, start in zip(rows, starts, strict=True)]
        chunks.append((parts, draw(40, 3), torch.rand(40, generator=generator) if weighted else None))

    def solved() -> list[Tensor]:
        blocks, found = BlockEquations(starts), []
        for chunk in chunks:
            blocks.add(*chunk)
            for ridge in (1.0, 0.1):
                solution = blocks.solve(ridge)
                assert solution is not None
                found.append(solution)
            blocks.forget_sums()
        return found

    by_tokens = solved()
    monkeypatch.setattr(BlockEquations, "_tokens", lambda self, number: 1000)
    for ours, by_inputs in zip(by_tokens, solved(), strict=True):
        torch.testing.assert_close(ours, by_inputs, rtol=1e-3, atol=1e-4)
    assert torch.equal(by_tokens[-1][70:], starts[2]), "what no token reads stays as it was"


def test_a_block_without_tokens_is_singular_without_a_ridge() -> None:
    starts = [torch.ones(2, 3), torch.ones(2, 3)]
    blocks = BlockEquations(starts)
    blocks.add([(torch.arange(5), torch.randn(5, 2)), (torch.arange(0), torch.zeros(0, 2))], torch.randn(5, 3))
    assert blocks.solve(0.0) is None
    solution = blocks.solve(0.1)
    assert solution is not None
    assert torch.allclose(solution[2:], starts[1], atol=1e-5)  # what no token reads stays as it was
