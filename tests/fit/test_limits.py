"""Budgets: what they mean, that they are read back, and every refusal."""

from __future__ import annotations

import pytest

from pyprune.errors import BudgetError
from pyprune.fit.limits import Budget, Limit, parse_limit
from pyprune.fit.quantities import CostModel, Quantity, Widths
from pyprune.plan import PrunePlan, Sizes

DENSE = 3.0
IDENTITY = PrunePlan.identity("llama", Sizes.decoder(2, 8, 2, 2, 4, 16, 32))


class _Costs(CostModel):
    def base(self, quantity: Quantity, hidden_size: int) -> float:
        return 1.0

    def layer(self, quantity: Quantity, hidden_size: int, widths: Widths) -> float:
        return 1.0

    def head_pair(self, quantity: Quantity) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("text", "quantity", "bound"),
    [
        ("parameters=100M", Quantity("parameters"), 100e6),
        ("parameters<=1234", Quantity("parameters"), 1234),
        ("parameters=1.5B", Quantity("parameters"), 1.5e9),
        ("parameters=80%", Quantity("parameters"), 0.8 * DENSE),
        ("memory=120MB", Quantity("memory", 2048), 120e6),
        ("memory@4096=120kB", Quantity("memory", 4096), 120e3),
        ("memory@4x4096<=1.5GiB", Quantity("memory", 4096, 4), 1.5 * 2**30),
        ("memory=3B", Quantity("memory", 2048), 3),
        ("memory=2KiB", Quantity("memory", 2048), 2048),
        ("memory=2MiB", Quantity("memory", 2048), 2**21),
        ("memory=2GB", Quantity("memory", 2048), 2e9),
        ("prefill@2048<=900ms", Quantity("prefill", 2048), 0.9),
        (" prefill @ 512 = 1.5 s ", Quantity("prefill", 512), 1.5),
        ("time_to_first_token@512<=200ms", Quantity("prefill", 512), 0.2),
        ("generation@64x128<=10s", Quantity("generation", 128, 64), 10),
        ("tokens_per_second@64x128>=800", Quantity("generation", 128, 64), 64 * 128 / 800),
        ("tokens_per_second@4x64+1024>=80", Quantity("generation", 64, 4, 1024), 4 * 64 / 80),
        ("generation @ 4 x 64 + 1024 <= 80%", Quantity("generation", 64, 4, 1024), 0.8 * DENSE),
        ("speedup>=1.3", Quantity("prefill", 2048), DENSE / 1.3),
        ("speedup@512=2x", Quantity("prefill", 512), DENSE / 2),
        ("throughput_increase>=1.2", Quantity("generation", 128, 64), DENSE / 1.2),
    ],
)
def test_what_a_limit_means_and_that_it_is_read_back(text: str, quantity: Quantity, bound: float) -> None:
    (limit,) = Budget.parse(text).limits
    assert limit.quantity == quantity
    assert limit.bound(DENSE) == pytest.approx(bound, rel=1e-12)
    assert parse_limit(str(limit)) == limit


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memroy=120MB", "Did you mean 'memory'"),
        ("memory=120Mb", "Did you mean 'MB'"),
        ("memory=120", "a unit is missing: B, kB, MB, GB, KiB, MiB, GiB, %"),
        ("speedup=30%", "Unknown unit '%' of speedup"),
        ("memory=0MB", "must be above 0"),
        ("memory=-3MB", "must be above 0"),
        ("memory=1e999MB", "at most 1e18"),
        ("memory=nanMB", "is not a number"),
        ("memory=MB", "is not a number"),
        ("memory>=3MB", "limited from above; use = or <="),
        ("memory<3MB", "limited from above; use = or <="),
        ("tokens_per_second@64x128<=3", "limited from below; use = or >="),
        ("prefill<=900ms", "needs the prompt's length"),
        ("prefill@2x2048<=900ms", "needs the prompt's length"),
        ("tokens_per_second@64>=800", "needs batch x new tokens"),
        ("tokens_per_second>=800", "needs batch x new tokens"),
        ("parameters@2048=3M", "takes no @"),
        ("prefill@2048+64<=900ms", "needs the prompt's length"),
        ("memory@4x64+1024=3MB", "takes the context's length"),
        ("generation@4x64+0<=3s", "4 x 64 + 0 is out of range"),
        ("memory@0=3MB", "out of range"),
        ("memory@99999999=3MB", "out of range"),
        ("small", "is not a limit"),
        ("", "is empty"),
        (" , ", "is empty"),
        ("x" * 3000, "at most 2,000"),
    ],
)
def test_refusals_say_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(BudgetError) as caught:
        Budget.parse(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "bound"), [("speedup>=2, prefill@2048<=1s", 1.0), ("prefill@2048<=3s, speedup>=2", 2.0)]
)
def test_of_a_limit_in_itself_and_one_beside_the_dense_model_the_tighter_holds(text: str, bound: float) -> None:
    budget, prefill = Budget.parse(text), Quantity("prefill", 2048)
    assert budget.quantities == (prefill,)
    assert budget.bounds({prefill: 4.0}) == {prefill: bound}
    both = {str(limit) for limit in budget.limits}
    assert {str(limit) for limit in budget.broken({prefill: 3.5}, {prefill: 4.0})} == both
    assert len(budget.broken({prefill: bound * 1.1}, {prefill: 4.0})) == 1
    assert not budget.broken({prefill: bound}, {prefill: 4.0})


def test_several_limits_in_one_text_or_many() -> None:
    one = Budget.parse("memory=120MB, speedup>=1.3")
    assert one == Budget.parse(["memory=120MB", "speedup>=1.3"]) == Budget.parse(str(one))
    assert one.quantities == (Quantity("memory", 2048), Quantity("prefill", 2048))


@pytest.mark.parametrize(
    "text",
    [
        "memory=120MB, memory@2048=130MB",
        "prefill@512<=1s, time_to_first_token@512<=200ms",
        "speedup>=1.3, prefill@2048<=80%",
    ],
)
def test_two_limits_of_one_quantity_are_refused(text: str) -> None:
    with pytest.raises(BudgetError, match="limit the same quantity"):
        Budget.parse(text)


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(BudgetError) as caught:
        Budget.parse("memroy=1MB, parameters=0, memory=3MB, memory=4MB")
    assert len(str(caught.value).splitlines()) == 3


def test_bounds_and_what_breaks_them() -> None:
    budget = Budget.parse("parameters=2, speedup>=1.5")
    dense = budget.dense(_Costs(), IDENTITY)
    assert set(dense.values()) == {3.0}
    assert budget.bounds(dense) == {Quantity("parameters"): 2.0, Quantity("prefill", 2048): 2.0}
    amounts = {Quantity("parameters"): 2.0, Quantity("prefill", 2048): 2.02}
    assert budget.broken(amounts, dense) == budget.limits[1:]
    assert not budget.broken(amounts, dense, slack=0.02)


@pytest.mark.parametrize(
    ("limit", "amount", "written"),
    [
        (Limit("memory", Quantity("memory", 2048), 1, "MB"), 118_234_567.0, "118.2 MB"),
        (Limit("tokens_per_second", Quantity("generation", 128, 64), 1), 10.0, "819.2"),
        (Limit("speedup", Quantity("prefill", 2048), 1), 2.0, "1.500"),
        (Limit("parameters", Quantity("parameters"), 1, "%"), 1.5, "50.00 %"),
    ],
)
def test_amounts_are_written_in_the_units_of_the_limit(limit: Limit, amount: float, written: str) -> None:
    assert limit.write(amount, DENSE) == written
    # What is said to be reachable is never better than the amount itself.
    assert parse_limit(limit.nearest(amount, DENSE)).bound(DENSE) >= amount
    assert parse_limit(limit.nearest(amount, DENSE)).bound(DENSE) <= amount * 1.002
