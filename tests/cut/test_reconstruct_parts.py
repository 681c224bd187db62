"""What reconstruction is made of: its least squares, the order of its steps, and who is held back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from pyprune.cut.least_squares import NormalEquations
from pyprune.cut.projections import Tally, choose
from pyprune.cut.reconstruct import text_chunks
from pyprune.cut.steps import steps_of
from pyprune.cut.walk import chunks_of
from pyprune.data.tokens import Batch
from pyprune.errors import DataError
from pyprune.families import family_for
from pyprune.families.base import BLOCKS
from pyprune.probe.streams import LayerRunner, Part, parts_of
from pyprune.runtime import processes
from tests._support.models import TINY, tiny_batch, tiny_model


def equations(x: torch.Tensor, r: torch.Tensor, weight: torch.Tensor, *, constant: bool) -> NormalEquations:
    found = NormalEquations(torch.zeros(x.shape[1] + constant, r.shape[1]), constant=constant)
    for some in torch.arange(len(x)).split(30):
        found.add(x[some], r[some], weight[some])
    return found


@pytest.mark.parametrize("constant", [False, True])
def test_the_solution_is_that_of_weighted_ridge_regression(constant: bool) -> None:
    torch.manual_seed(0)
    x, r, weight = torch.randn(200, 7) + 1, torch.randn(200, 5), torch.rand(200) + 0.1
    ridge = 0.3
    given = torch.cat([x, torch.ones(200, 1)], dim=1) if constant else x
    rows = given.double() * weight.double()[:, None]
    penalty = ridge * rows[:, :7].square().sum(0).mean()
    extra = torch.eye(rows.shape[1], dtype=torch.float64)[:7] * penalty.sqrt()
    wanted = torch.cat([r.double() * weight.double()[:, None], torch.zeros(7, 5, dtype=torch.float64)])
    expected = torch.linalg.lstsq(torch.cat([rows, extra]), wanted).solution
    found = equations(x, r, weight, constant=constant).solve(ridge)
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def test_what_is_not_determined_has_no_solution() -> None:
    x = torch.zeros(20, 3)
    assert equations(x, torch.randn(20, 2), torch.ones(20), constant=False).solve(0.0) is None


def test_the_ridge_holds_weights_where_they_start_and_errors_are_those_of_the_start() -> None:
    torch.manual_seed(0)
    x, y, start = torch.randn(200, 7), torch.randn(200, 5), torch.randn(7, 5)
    found = NormalEquations(start, constant=False)
    found.add(x, y)
    lacking = equations(x, y - x @ start, torch.ones(200), constant=False)
    torch.testing.assert_close(found.error(), float((y - x @ start).double().square().sum()), rtol=1e-6, atol=0)
    for ridge in (0.1, 10.0):
        solution, change = found.solve(ridge), lacking.solve(ridge)
        assert solution is not None
        assert change is not None
        torch.testing.assert_close(solution, start.double() + change, rtol=1e-5, atol=1e-6)


def test_ridges_are_tried_from_the_largest_down_until_one_is_worse() -> None:
    errors = {10.0: 0.9, 1.0: 0.5, 0.1: 0.6, 0.01: 0.4}
    tried: list[float] = []

    def solutions(ridges: Sequence[float]) -> Iterator[tuple[float, Callable[[], None]]]:
        for ridge in ridges:
            yield ridge, lambda ridge=ridge: tried.append(ridge)

    def error() -> Tally:
        return Tally({"text": errors[tried[-1]] if tried else 1.0}, {"text": 1.0})

    choice = choose([], solutions, (0.01, 0.1, 1.0, 10.0), error, lambda: None)
    assert choice.ridge == 1.0
    assert tried == [10.0, 1.0, 0.1, 1.0], "the last solves the best once more, on all sequences"


def test_of_every_kind_of_text_a_share_is_held_back() -> None:
    ids = torch.arange(20)[:, None]
    kinds = ["prose"] * 16 + ["code"] * 3 + ["poem"]
    chunks = list(chunks_of(ids, ids >= 0, kinds, 0.125, batch_size=5))
    held = {row for some, _, _, held_back in chunks if held_back for row in some.flatten().tolist()}
    assert held == {4, 12, 17}
    assert sorted(row for some, *_ in chunks for row in some.flatten().tolist()) == list(range(20))
    assert all(len(some) <= 5 and len({kinds[row] for row in some.flatten()}) == 1 for some, *_ in chunks)


def test_removed_parts_belong_to_the_writer_before_them() -> None:
    family = family_for(tiny_model("llama"))
    plan = family.plan(tiny_model("llama").config).drop_layers([2]).with_layer(1, ffn=[])
    steps, lost = steps_of(family, plan)
    assert not lost
    assert [(str(step.part), step.exact) for step in steps] == [
        ("layer 0 attention", True),
        ("layer 0 mlp", True),
        ("layer 1 attention", False),
        ("layer 3 attention", False),
        ("layer 3 mlp", False),
    ]
    assert steps[2].absorbs == (Part(1, ("mlp",)), *parts_of(family, 2, BLOCKS))


def test_errors_are_relative_to_each_kind() -> None:
    tally = Tally()
    tally.add("a", torch.tensor(1.0), torch.tensor(4.0))
    tally.add("b", torch.tensor(9.0), torch.tensor(9.0))
    tally.add("a", torch.tensor(0.0), torch.tensor(12.0))
    assert tally.relative() == {"a": 0.25, "b": 1.0}
    assert tally.overall() == 0.625


@pytest.mark.parametrize("name", TINY)
def test_parts_one_after_the_other_are_the_layers_bit_for_bit(name: str) -> None:
    model = tiny_model(name)
    ids = tiny_batch()
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True, use_cache=False).hidden_states
        runner = LayerRunner(model, family_for(model))
        stream = runner.embed(ids)
        for index in range(3):
            assert torch.equal(stream, expected[index])
            with runner.layer(index) as layer:
                for part in runner.parts(index):
                    stream = runner.run(layer, part, stream)
        assert torch.equal(stream, expected[3])


def test_more_processes_than_passes_take_shorter_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One has nothing to do otherwise, which would end a run after all that came before the reconstruction."""
    model = tiny_model("llama")
    runner, samples = LayerRunner(model, family_for(model)), Batch.of(tiny_batch(batch=16, length=8))

    def passes(batch_size: int | None = None) -> list[int]:
        return [len(chunk.ids) for chunk in text_chunks(runner, samples, None, 0.25, batch_size)[0]]

    whole = passes()
    assert len(whole) == 2
    shares = []
    monkeypatch.setattr(processes, "is_divided", lambda: True)
    monkeypatch.setattr(processes, "alike", lambda _: True)
    monkeypatch.setattr(processes, "count", lambda: 4)
    for number in range(4):
        monkeypatch.setattr(processes, "number", lambda number=number: number)
        shares.append(passes())
    assert all(shares)
    assert sum(map(sum, shares)) == sum(whole) == 16
    with pytest.raises(DataError, match="makes 2 forward passes, and 4 processes share them"):
        passes(batch_size=16)
