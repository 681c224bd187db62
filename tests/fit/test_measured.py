"""The fit of a profile: planted coefficients, what it cannot hold, workloads between measured ones, drift."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from pyprune.errors import BudgetError
from pyprune.families import family_for
from pyprune.fit.choices import Routers
from pyprune.fit.cost import Costs, ExactCosts
from pyprune.fit.measured import PAIRS, MeasuredCosts, distinct_experts, features, ratios_to_dense, relative_seconds
from pyprune.fit.profile import DENSE, Probe, Profile, Timing
from pyprune.fit.profiling.probes import probe_plans
from pyprune.fit.quantities import Quantity, Widths
from pyprune.plan import BlockSizes, PrunePlan, Sizes, attention_and_mlp
from tests._support.cli import run
from tests._support.stock import served_model
from tests.fit._profiles import GENERATION, PLANTED, PREFILL, fake_profile, identity, planted


def _plan() -> PrunePlan:
    """One that no probe has: unequal layers, other widths, another hidden size."""
    plan = identity().drop_layers([3]).keep_hidden(range(320))
    plan = plan.with_layer(1, query_heads=range(2), kv_heads=range(1), ffn=range(900))
    return plan.with_layer(5, query_heads=[], kv_heads=[]).with_layer(6, ffn=[])


def _seconds(plan: PrunePlan, quantity: Quantity) -> float:
    return planted(Probe.of("", plan), quantity)


@pytest.mark.parametrize("quantity", [PREFILL, GENERATION], ids=str)
def test_planted_coefficients_predict_plans_that_were_not_measured(quantity: Quantity) -> None:
    costs = MeasuredCosts(fake_profile())
    assert costs.predict(quantity, _plan()) == pytest.approx(_seconds(_plan(), quantity), rel=1e-6)
    assert costs.predict(quantity, identity()) == pytest.approx(_seconds(identity(), quantity), rel=1e-6)
    assert costs.fits[quantity].residual < 1e-6


def test_the_layers_add_up_to_all_but_the_head_pairs() -> None:
    costs = MeasuredCosts(fake_profile())
    plan = _plan()
    layers = sum(costs.layer(PREFILL, 320, Widths(*layer.widths)) for layer in plan.layers)
    rest = costs.predict(PREFILL, plan) - costs.base(PREFILL, 320) - layers
    assert rest == pytest.approx(PLANTED[PAIRS], rel=1e-4), "layer 1 has heads of its own"
    assert costs.head_pair(PREFILL) == pytest.approx(PLANTED[PAIRS], rel=1e-4)


def test_a_batch_touches_more_experts_than_a_token() -> None:
    assert distinct_experts(8, 2, 1) == pytest.approx(2)
    assert distinct_experts(8, 2, 16) == pytest.approx(8 * (1 - 0.75**16))
    assert distinct_experts(2, 2, 1) == distinct_experts(2, 2, 100) == 2
    assert distinct_experts(0, 2, 5) == 0


@pytest.mark.parametrize("dense_layers", [0, 1])
def test_times_of_mixtures_follow_from_the_experts_that_a_step_touches(dense_layers: int, tmp_path: Path) -> None:
    """Halving the experts saves little of a token, which reads two in any case, and much of a batch."""
    blocks = {**attention_and_mlp(8, 4, 64, 1536), "mlp": BlockSizes({"ffn": 1536, "experts": 16})}
    layers = ("dense",) * dense_layers + ("mixture",) * (8 - dense_layers)
    kinds = {"dense": attention_and_mlp(8, 4, 64, 4096), "mixture": blocks}
    sizes = Sizes(512, 1000, {name: kinds[name] for name in dict.fromkeys(layers)}, layers)
    dense = PrunePlan.identity("mixtral", sizes)
    plans = probe_plans(dense, routers=Routers(1, 2))
    assert {"half of the experts", "a quarter of the experts"} <= {*plans}
    probes = [Probe.of(name, plan) for name, plan in plans.items()]
    quantities = [Quantity("generation", 64, batch) for batch in (1, 16)]

    def seconds(probe: Probe, quantity: Quantity) -> float:
        return sum(PLANTED[name] * value for name, value in features(sizes, probe, 2, quantity.batch).items())

    timings = [Timing(p.name, q, 0, float(i), seconds(p, q)) for q in quantities for i, p in enumerate(probes)]
    facts = ("transformers", "float32", {}, {}, "mixtral", sizes, {"num_experts_per_tok": 2})
    costs = MeasuredCosts(Profile(*facts, tuple(probes), tuple(timings)))
    plan = dense.with_layer(2, experts=range(3)).with_layer(5, experts=range(11), ffn=range(768))
    saved = []
    for quantity in quantities:
        assert costs.predict(quantity, plan) == pytest.approx(seconds(Probe.of("", plan), quantity), rel=1e-6)
        saved.append(1 - costs.predict(quantity, plans["half of the experts"]) / costs.predict(quantity, dense))
    assert abs(saved[0]) < 1e-6 < 0.1 < saved[1]
    stored = MeasuredCosts(Profile.load(costs.profile.save(tmp_path / "profile.json")))
    assert stored.predict(quantities[1], plan) == pytest.approx(costs.predict(quantities[1], plan))


def test_predict_shows_stored_parameters_and_those_that_a_token_reads(tmp_path: Path) -> None:
    config = served_model("mixtral").config
    identity = family_for(config).plan(config)
    probes = [Probe.of(name, plan) for name, plan in probe_plans(identity, routers=Routers(1, 2)).items()]
    timings = [Timing(probe.name, PREFILL, 0, float(i), 1.0) for i, probe in enumerate(probes)]
    facts = ("transformers", "float32", {}, {}, "mixtral", identity.dense, config.to_dict())
    profile = Profile(*facts, tuple(probes), tuple(timings)).save(tmp_path / "profile.json")
    plan = identity.with_layer(0, experts=range(3)).with_layer(3, experts=range(2))
    (tmp_path / "plan.json").write_text(plan.to_json())
    facts_file = tmp_path / "predicted.json"
    done = run("predict", tmp_path / "plan.json", "--profile", profile, "--allow-mismatch", "--json", facts_file)
    assert done.exit_code == 0, done.output
    predicted = json.loads(facts_file.read_text())["predicted"]
    costs = ExactCosts.of(config)
    assert predicted["parameters"]["plan"] == costs.predict(Quantity("parameters"), plan)
    assert predicted["parameters that a token reads"]["plan"] == costs.active(plan, 2)
    saved = {name: predicted[name]["dense"] - predicted[name]["plan"] for name in [*predicted][1:3]}
    assert saved["parameters"] > 100 * saved["parameters that a token reads"] > 0, "rows of routers alone"


def test_what_the_features_cannot_hold_shows_in_the_probe_left_out() -> None:
    def curved(probe: Probe, quantity: Quantity) -> float:
        return planted(probe, quantity) + sum((layer.ffn / 1536) ** 4 for layer in probe.layers) * 0.02

    straight, bent = MeasuredCosts(fake_profile()).fits[PREFILL], MeasuredCosts(fake_profile(curved)).fits[PREFILL]
    assert abs(straight.left_out_worst[1]) < abs(bent.left_out_worst[1]) / 2
    assert abs(bent.left_out["half of the FFN"]) > 0.05
    assert bent.left_out_median > straight.left_out_median


def test_coefficients_are_never_negative() -> None:
    def shrinking(probe: Probe, quantity: Quantity) -> float:
        return 1.0 - 1e-9 * sum(layer.ffn for layer in probe.layers)

    fit = MeasuredCosts(fake_profile(shrinking)).fits[PREFILL]
    assert min(fit.coefficients.values()) >= 0


def test_drift_of_the_machine_cancels() -> None:
    slow = fake_profile()
    drifting = replace(slow, timings=tuple(replace(t, seconds=t.seconds * (1 + t.start / 100)) for t in slow.timings))
    (seconds, spread), (still, _) = relative_seconds(drifting.timings, PREFILL), relative_seconds(slow.timings, PREFILL)
    for name in still:
        if name != DENSE:
            # The last turns come after the last dense one, beyond which nothing can be interpolated.
            assert seconds[name] / seconds[DENSE] == pytest.approx(still[name] / still[DENSE], rel=0.02)
    assert spread["half of the FFN"] < 0.05


def test_turns_are_compared_with_the_dense_ones_of_their_group() -> None:
    profile = fake_profile()
    again = tuple(replace(t, group=1, start=t.start + 1000, seconds=3 * t.seconds) for t in profile.timings)
    both = replace(profile, timings=profile.timings + again)
    (one, _), (two, _) = relative_seconds(profile.timings, PREFILL), relative_seconds(both.timings, PREFILL)
    for name in one:
        assert two[name] / two[DENSE] == pytest.approx(one[name] / one[DENSE])


def test_a_dense_model_that_was_timed_before_counts_by_its_median() -> None:
    def turn(probe: str, start: float, seconds: float) -> Timing:
        return Timing(probe, PREFILL, 0, start, seconds)

    dense = [turn(DENSE, number, seconds) for number, seconds in enumerate((1.0, 1.0, 1.0, 1.0, 2.0))]
    other = [turn("half", 10 + number, 0.5) for number in range(5)]
    assert ratios_to_dense([*dense, *other])["half"] == [0.5] * 5, "not of the last dense turn, which was slow"


def test_lengths_between_measured_ones_are_interpolated() -> None:
    lengths = [Quantity("prefill", 512), Quantity("prefill", 2048)]
    costs = MeasuredCosts(fake_profile(lambda p, q: planted(p, q) * q.tokens, lengths))
    wanted = planted(Probe.of("", _plan()), PREFILL) * 896
    assert costs.predict(Quantity("prefill", 896), _plan()) == pytest.approx(wanted, rel=1e-6)


def test_batches_between_measured_ones_are_interpolated() -> None:
    batches = [Quantity("generation", 128, batch) for batch in (1, 64)]
    costs = MeasuredCosts(fake_profile(lambda p, q: planted(p, q) * q.batch, batches))
    wanted = planted(Probe.of("", _plan()), GENERATION) * 8
    assert costs.predict(Quantity("generation", 128, 8), _plan()) == pytest.approx(wanted, rel=1e-6)


def test_prompts_between_measured_ones_are_interpolated() -> None:
    prompts = [Quantity("generation", 64, 4, prompt) for prompt in (512, 1536)]
    costs = MeasuredCosts(fake_profile(lambda p, q: planted(p, q) * q.prompt, prompts))
    wanted = planted(Probe.of("", _plan()), GENERATION) * 1024
    assert costs.predict(Quantity("generation", 64, 4, 1024), _plan()) == pytest.approx(wanted, rel=1e-6)
    with pytest.raises(BudgetError, match=r"generation@4x64 is outside .*--generation 4x64"):
        costs.predict(Quantity("generation", 64, 4), _plan())


@pytest.mark.parametrize(
    "quantity",
    [Quantity("prefill", 4096), Quantity("prefill", 100), Quantity("generation", 64, 64), Quantity("generation", 128)],
    ids=str,
)
def test_workloads_outside_are_refused_with_what_there_is(quantity: Quantity) -> None:
    costs = MeasuredCosts(fake_profile())
    with pytest.raises(BudgetError, match=r"is outside .*(prefill@512|generation@64x128).*pyprune profile") as caught:
        costs.base(quantity, 512)
    profile = costs.profile
    command = f"pyprune profile MODEL --engine {profile.engine} --dtype {profile.dtype} --device cpu --prefill "
    assert command in str(caught.value), "another engine or dtype would not help"
    given = str(caught.value).partition(command)[2].replace(" --generation ", ",").split(",")
    assert set(given) - {"none"} == {q.place for q in (*profile.quantities, quantity)}, "and what is known must stay"


def test_beside_an_accelerator_a_profile_of_the_cpu_is_measured_again_to_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(import_module("pyprune.fit.profile"), "accelerators", lambda: ["A Card"])
    profile = fake_profile()
    assert "--device cpu --out FILE --prefill" in profile.remeasure_command()
    assert "--device cpu --prefill" in replace(profile, engine="llamacpp").remeasure_command()


def test_what_is_counted_is_refused() -> None:
    with pytest.raises(BudgetError, match="memory@2048 is counted"):
        MeasuredCosts(fake_profile()).base(Quantity("memory", 2048), 512)


def _without(profile: Profile, names: set[str]) -> Profile:
    return replace(profile, timings=tuple(t for t in profile.timings if t.probe not in names))


def test_too_few_probes_are_refused() -> None:
    profile = fake_profile()
    others = {probe.name for probe in profile.probes if probe.name != DENSE}
    with pytest.raises(BudgetError, match=r"of 1 models \(dense\)"):
        MeasuredCosts(_without(profile, others))
    with pytest.raises(BudgetError, match="of 0 models"):
        MeasuredCosts(_without(profile, {DENSE}))


def test_times_come_from_what_was_measured() -> None:
    measured = MeasuredCosts(fake_profile())
    costs = Costs(measured, measured)
    assert costs.predict(GENERATION, identity()) == pytest.approx(_seconds(identity(), GENERATION))
    assert costs.predict(PREFILL, _plan()) == pytest.approx(_seconds(_plan(), PREFILL))
    assert measured.layer(PREFILL, 512, Widths(0, 0, 0)) < measured.layer(PREFILL, 512, Widths(8, 4, 1536)) / 10
