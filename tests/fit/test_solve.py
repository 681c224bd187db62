"""The search: equal to brute force, different solutions, and what it says when nothing fits."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import pytest

from pyprune.errors import BudgetError, ConfigError
from pyprune.fit.choices import DROPPED, Choice, ChoiceOptions, LayerScores, Search, Space, UnitScores
from pyprune.fit.limits import Budget
from pyprune.fit.measured import MeasuredCosts
from pyprune.fit.quantities import CostModel, Quantity, Widths
from pyprune.fit.solve import Solution, SolveOptions, plan_of, solve
from pyprune.plan import PrunePlan, Sizes
from tests.fit._profiles import PLANTED, PREFILL, SIZES, fake_profile, identity, planted

DENSE = Sizes.decoder(4, 48, 6, 2, 8, 40, 384)
IDENTITY = PrunePlan.identity("llama", DENSE)
SPACE = Space.of(IDENTITY, ChoiceOptions(ffn_multiple=8, ffn_shares=(0.5, 0.2)))


class Costs(CostModel):
    """Parameters that are counted, and a prefill in which blocks cost something by being there.

    Args:
        per_pair: seconds of each head pair beyond the first.
    """

    def __init__(self, per_pair: float = 0.0) -> None:
        self.per_pair = per_pair

    def base(self, quantity: Quantity, hidden_size: int) -> float:
        return 0.2 if quantity.kind == "prefill" else 100.0 * hidden_size

    def layer(self, quantity: Quantity, hidden_size: int, widths: Widths) -> float:
        assert widths != DROPPED
        if quantity.kind == "prefill":
            fixed = 0.02 * bool(widths.kv_heads) + 0.03 * bool(widths.ffn)
            return fixed + 2e-3 * widths.query_heads + 2e-5 * hidden_size * widths.ffn
        return float(hidden_size * (16 * (widths.query_heads + widths.kv_heads) + 3 * widths.ffn))

    def head_pair(self, quantity: Quantity) -> float:
        return self.per_pair if quantity.kind == "prefill" else 0.0


def _search(seed: int, hidden: dict[int, float] | None = None) -> Search:
    draw = random.Random(seed)
    layers = []
    for layer in SPACE.layers:
        heads = {pair: draw.random() * (1 - pair[1] / 2) for pair in layer.heads}
        ffn = {width: draw.random() * (1 - width / 40) for width in layer.ffn}
        gone = draw.random() * 2
        layers.append(
            tuple(
                Choice(w, gone if w == DROPPED else heads[w.query_heads, w.kv_heads] + ffn[w.ffn]) for w in layer.widths
            )
        )
    return Search(IDENTITY, tuple(layers), hidden or {48: 0.0})


def _pairs(widths: Iterable[Widths]) -> int:
    return len({(w.query_heads, w.kv_heads) for w in widths} - {(0, 0)})


def _amount(quantity: Quantity, hidden: int, choices: tuple[Choice, ...], costs: Costs) -> float:
    kept = [choice.widths for choice in choices if choice.widths != DROPPED]
    layers = sum(costs.layer(quantity, hidden, widths) for widths in kept)
    further = max(0, _pairs(kept) - 1) if quantity.kind == "prefill" else 0
    return costs.base(quantity, hidden) + layers + costs.per_pair * further


def _brute_force(search: Search, budget: Budget, pairs: int | None = None, costs: Costs | None = None) -> float:
    costs = costs or Costs()
    bounds = budget.bounds(budget.dense(costs, IDENTITY))
    best = float("inf")
    for hidden, offset in search.hidden.items():
        for choices in itertools.product(*search.layers):
            loss = offset + sum(choice.loss for choice in choices)
            if loss >= best or all(choice.widths == DROPPED for choice in choices):
                continue
            fits = all(_amount(q, hidden, choices, costs) <= bound for q, bound in bounds.items())
            if fits and (pairs is None or _pairs(c.widths for c in choices) <= pairs):
                best = loss
    return best


EXACT = SolveOptions(solutions=1, gap=0.0)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("text", ["parameters=80%", "parameters=40%", "speedup>=1.3", "parameters=70%, speedup>=1.2"])
def test_equals_brute_force(text: str, seed: int) -> None:
    search, budget = _search(seed), Budget.parse(text)
    (found,) = solve(search, budget, Costs(), EXACT)
    assert found.loss == pytest.approx(_brute_force(search, budget), abs=1e-9)
    assert not budget.broken(found.predicted, budget.dense(Costs(), IDENTITY))


def test_equals_brute_force_with_few_head_pairs() -> None:
    search, budget = _search(3), Budget.parse("parameters=50%")
    (found,) = solve(search, budget, Costs(), SolveOptions(solutions=1, gap=0.0, head_pairs=1))
    free = solve(search, budget, Costs(), EXACT)[0]
    assert _pairs(free.widths) > 1  # else the test says nothing
    assert _pairs(found.widths) == 1
    assert found.loss == pytest.approx(_brute_force(search, budget, pairs=1), abs=1e-9)


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("pairs", [None, 2])
@pytest.mark.parametrize("text", ["speedup>=1.3", "parameters=70%, speedup>=1.5", "speedup>=2"])
def test_equals_brute_force_where_head_pairs_cost_something(text: str, pairs: int | None, seed: int) -> None:
    search, budget, costs = _search(seed), Budget.parse(text), Costs(per_pair=0.1)
    (found,) = solve(search, budget, costs, SolveOptions(solutions=1, gap=0.0, head_pairs=pairs))
    assert found.loss == pytest.approx(_brute_force(search, budget, pairs, costs), abs=1e-9)
    dense = budget.dense(costs, IDENTITY)
    assert not budget.broken(found.predicted, dense)
    amounts = {q: costs.predict(q, _first_units(found)) for q in budget.quantities}
    assert amounts == pytest.approx(dict(found.predicted)), "the search adds up what is predicted of its plan"


def _first_units(solution: Solution) -> PrunePlan:
    """A plan of the solution's widths."""
    layer = LayerScores((2.0, 1.0), (1.0,) * 6, tuple(map(float, range(40, 0, -1))))
    return plan_of(solution, _search(0), UnitScores((layer,) * 4))


@pytest.mark.parametrize("limited", [None, 4])
def test_unequal_heads_that_a_profile_makes_costly_keep_the_limit(limited: int | None) -> None:
    """The layers alone would keep it, so that without the cost of further pairs the answer breaks it."""
    slow_pairs = {**PLANTED, "head pairs": 20e-3}
    costs = MeasuredCosts(fake_profile(lambda probe, quantity: planted(probe, quantity, slow_pairs)))
    assert costs.head_pair(PREFILL) == pytest.approx(20e-3, rel=1e-3)

    class Blind(MeasuredCosts):
        def head_pair(self, quantity: Quantity) -> float:
            return 0.0

    # Three quarters of the heads go for nothing in layers 0 to 2, which is enough time without the pair that they make.
    space = Space.of(identity(), ChoiceOptions(ffn_shares=(), skips=(), head_counts=2))
    layers = tuple(
        tuple(Choice(w, 0.0 if w == space.dense_widths or i < 3 else 1.0) for w in layer.widths)
        for i, layer in enumerate(space.layers)
    )
    search = Search(identity(), layers, {SIZES.hidden_size: 0.0})
    saved = costs.layer(PREFILL, 512, Widths(8, 4, 1536)) - costs.layer(PREFILL, 512, Widths(2, 1, 1536))
    bound = costs.predict(PREFILL, identity()) - 2.5 * saved
    budget = Budget.parse(f"{PREFILL}<={bound:.6f}s")
    options = SolveOptions(solutions=1, gap=0.0, head_pairs=limited)
    (blind,) = solve(search, budget, Blind(costs.profile), options)
    (found,) = solve(search, budget, costs, options)

    def kept(solution: Solution) -> bool:
        layer = LayerScores((1.0,) * 4, (1.0,) * 8, (1.0,) * 1536)
        return costs.predict(PREFILL, plan_of(solution, search, UnitScores((layer,) * 8))) <= bound

    assert _pairs(blind.widths) == 2
    assert not kept(blind), "else the test says nothing"
    assert kept(found)
    assert set(found.widths) == {Widths(2, 1, 1536)}, "one pair in all layers"


@pytest.mark.parametrize(("offset", "chosen"), [(0.01, 32), (10.0, 48)])
def test_the_hidden_size_is_chosen_by_its_loss(offset: float, chosen: int) -> None:
    search, budget = _search(4, {48: 0.0, 32: offset}), Budget.parse("parameters=60%")
    (found,) = solve(search, budget, Costs(), EXACT)
    assert found.hidden_size == chosen
    assert found.loss == pytest.approx(_brute_force(search, budget), abs=1e-9)


def test_solutions_differ_and_come_from_several_families() -> None:
    options = SolveOptions(solutions=6, different_layers=2, variants=("best", "layers", "blocks", "widths", "spread"))
    found = solve(_search(0), Budget.parse("parameters=70%"), Costs(), options)
    assert {"best", "layers", "widths"} <= {solution.variant for solution in found}
    assert all(a.differs(b) >= 2 for a, b in itertools.combinations(found, 2))
    assert [s.loss for s in found] == sorted(s.loss for s in found)
    dense = Widths(6, 2, 40)
    by_variant = {solution.variant: solution for solution in found}
    assert set(by_variant["layers"].widths) <= {dense, DROPPED}
    assert all(w.kv_heads and w.ffn for w in by_variant["widths"].widths)


def test_the_same_input_gives_the_same_solutions() -> None:
    budget = Budget.parse("parameters=70%, speedup>=1.2")
    assert solve(_search(5), budget, Costs()) == solve(_search(5), budget, Costs())


def test_a_budget_that_the_dense_model_keeps_removes_nothing() -> None:
    (found,) = solve(_search(0), Budget.parse("parameters=100%"), Costs(), EXACT)
    assert found.loss == 0
    assert set(found.widths) == {Widths(6, 2, 40)}


def test_nothing_reaches_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    solve(_search(0), Budget.parse("parameters=70%"), Costs())
    assert capfd.readouterr().out == ""


def test_a_limit_that_nothing_keeps_is_named_with_what_can_be_reached() -> None:
    with pytest.raises(BudgetError) as caught:
        solve(_search(0), Budget.parse("parameters=5%, speedup>=1.1"), Costs())
    message = str(caught.value)
    assert "parameters<=5% cannot be kept" in message
    assert "speedup" not in message
    reachable = Budget.parse(message.partition("can reach is ")[2].split(" (")[0])
    assert solve(_search(0), reachable, Costs(), EXACT)


def test_limits_that_exclude_each_other_are_named_together() -> None:
    class Opposed(Costs):
        """A wide MLP saves time and costs parameters."""

        def layer(self, quantity: Quantity, hidden_size: int, widths: Widths) -> float:
            if quantity.kind == "prefill":
                return 1.0 - widths.ffn / 100
            return super().layer(quantity, hidden_size, widths)

    layers = tuple(tuple(c for c in layer if c.widths.kv_heads and c.widths.ffn) for layer in _search(0).layers)
    search = Search(IDENTITY, layers, {48: 0.0})
    with pytest.raises(BudgetError) as caught:
        solve(search, Budget.parse("parameters=50%, prefill@2048<=2.7s"), Opposed())
    message = str(caught.value)
    assert "each can be kept alone" in message
    offers = [line.removeprefix("- ") for line in message.splitlines() if line.startswith("- ")]
    assert len(offers) == 2
    for offer in offers:
        assert solve(search, Budget.parse(offer.replace(" with ", ", ")), Opposed(), EXACT)


def test_the_plan_keeps_the_best_units_of_every_width() -> None:
    layer = LayerScores((1.0, 2.0), (1.0, 1.0, 1.0, 2.0, 2.0, 2.0), tuple(map(float, range(40))))
    scores = UnitScores((layer,) * 4)
    search, budget = _search(0), Budget.parse("parameters=60%")
    found: Solution = solve(search, budget, Costs(), EXACT)[0]
    plan = plan_of(found, search, scores)
    assert [x.widths for x in plan.layers] == [(w.query_heads, w.kv_heads, w.ffn) for w in found.widths if w != DROPPED]
    for kept in plan.layers:
        assert kept.ffn == tuple(range(40 - len(kept.ffn), 40))
    assert Costs().predict(Quantity("parameters"), plan) == pytest.approx(found.predicted[Quantity("parameters")])


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="variants is empty"):
        solve(_search(0), Budget.parse("parameters=60%"), Costs(), SolveOptions(variants=()))
