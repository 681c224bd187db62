from __future__ import annotations

import math
import typing
from dataclasses import fields, replace
from typing import Any

import pytest

from pyprune.config.base import LARGEST_SEED, MOST_PROBLEMS, Config, Range
from pyprune.config.data import DataConfig
from pyprune.config.run import PruneConfig, RecoverCheckpointConfig
from pyprune.config.train import LARGEST_BATCH, LONGEST_RUN, RecoverConfig, TrainConfig, largest_divisor
from pyprune.errors import ConfigError
from pyprune.methods.base import own_options
from pyprune.methods.registry import complete_config, get_method, own_methods, preset, presets, read_config
from pyprune.methods.regularise.dress import DressOptions


def classes_below(kind: type[Config]) -> set[type[Config]]:
    return {c for below in kind.__subclasses__() for c in (below, *classes_below(below))}


METHODS = sorted(own_methods())
presets()  # imports every method's options
CLASSES = sorted(
    (c for c in classes_below(Config) if c.__module__.startswith(("pyprune.config.", "pyprune.methods."))),
    key=lambda c: c.__name__,
)
NUMBERS = [
    (c, f.name)
    for c in CLASSES
    for f in fields(c)
    if {int, float} & {*typing.get_args(typing.get_type_hints(c)[f.name]), typing.get_type_hints(c)[f.name]}
]
"""Every option that is a number, an optional number or a list of numbers."""


def range_of(kind: type[Config], name: str) -> Range:
    found = {f.name: f for f in fields(kind)}[name].metadata["range"]
    assert isinstance(found, Range)
    return found


def problems_of(kind: type[Config], **values: Any) -> list[str]:
    """What a configuration that Python built, not a file, is refused for."""
    with pytest.raises(ConfigError) as caught:
        kind(**values).validate()
    return caught.value.problems


def test_options_round_trip() -> None:
    config = read_config({"method": "dress", "ratio": 0.3, "dress": {"norm": "l1", "channels": []}})
    assert own_options(config, DressOptions).norm == "l1"
    assert read_config(config.to_dict()) == config


@pytest.mark.parametrize("method", METHODS)
def test_plain_data_holds_the_options_of_the_method_that_runs_and_no_others(method: str) -> None:
    data = preset(method).to_dict()
    assert [name for name in METHODS if name in data] == [method]
    assert (data["score"] is None) != get_method(method).scores


def test_options_of_another_method_are_refused() -> None:
    with pytest.raises(ConfigError, match="There are options of 'dress', but method is 'elder'; leave them out"):
        read_config({"dress": {"norm": "l1"}})
    with pytest.raises(ConfigError, match=r"score\.axes cannot be used: method 'elder' scores no structures"):
        read_config({"score": {"axes": ["ffn"]}})
    with pytest.raises(ConfigError, match="The options of method 'elder' are a DressOptions; it takes a ElderOptions"):
        complete_config(PruneConfig(method="elder", options=DressOptions()))
    with pytest.raises(ConfigError, match=r"There is no option .options.; .* under its name"):
        read_config({"options": {"norm": "l1"}})


def test_every_problem_is_reported_at_once_with_suggestions() -> None:
    with pytest.raises(ConfigError) as caught:
        read_config({"methd": "x", "ratio": "lots", "elder": {"norm": "l3"}, "seed": 1.5})
    text = str(caught.value)
    assert "Did you mean 'method'" in text
    assert "ratio is 'lots'" in text
    assert "value of elder.norm 'l3'" in text
    assert "seed is 1.5; expected int" in text


def test_values_are_checked_after_types() -> None:
    with pytest.raises(ConfigError) as caught:
        read_config({"ratio": 1.0, "finetune": {"steps": 0, "micro_batch_size": 0}})
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("finetune", "validation_interval", 0),
        ("finetune", "checkpoint_interval", 0),
        ("finetune", "early_stop_patience", 0),
        ("finetune", "early_stop_min_delta", -1.0),
        ("finetune", "max_grad_norm", -1.0),
        ("finetune", "weight_decay", -0.1),
        ("elder", "anneal_share", -0.1),
        ("recover", "dropout", 1.0),
    ],
)
def test_values_that_would_fail_or_do_nothing_in_training(section: str, name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        read_config({section: {name: value}})


def test_a_method_must_exist_and_be_able_to_do_its_stages() -> None:
    """Before a model is loaded, not hours later."""
    with pytest.raises(ConfigError, match="Did you mean 'dress'") as unknown:
        complete_config(PruneConfig(method="dres", ratio=2.0))
    assert len(unknown.value.problems) == 2, "all that is wrong comes together"
    with pytest.raises(ConfigError) as caught:
        read_config({"method": "none"})
    assert len(caught.value.problems) == 2
    with pytest.raises(ConfigError, match="nothing to regularise with"):
        read_config({"method": "none", "plan": "plan.json"})
    with pytest.raises(ConfigError, match="regularises nothing"):
        complete_config(PruneConfig(method="taylor"))
    complete_config(read_config({"method": "none", "plan": "plan.json", "stages": {"before": ["finetune"]}}))


def test_yaml_style_numbers_are_numbers() -> None:
    assert TrainConfig.from_dict({"learning_rate": "1e-3"}).learning_rate == 1e-3
    assert TrainConfig.from_dict({"max_grad_norm": None}).max_grad_norm is None
    assert TrainConfig.from_dict({"max_grad_norm": 2}).max_grad_norm == 2.0


def test_another_version_is_refused() -> None:
    with pytest.raises(ConfigError, match="reads version 1"):
        read_config({"version": 9})


def test_verifying_a_cut_that_is_not_made_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"stages\.prune is off"):
        read_config({"verify": True, "stages": {"prune": False}})


def test_there_are_numbers_to_check() -> None:
    assert len(CLASSES) >= 12
    assert len(NUMBERS) >= 50
    assert (DressOptions, "channels") in NUMBERS


@pytest.mark.parametrize(("kind", "name"), NUMBERS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_every_number_has_a_range_beside_it_that_is_kept(kind: type[Config], name: str) -> None:
    hint = typing.get_type_hints(kind)[name]
    allowed = range_of(kind, name)
    low = allowed.above if allowed.at_least is None else allowed.at_least
    high = allowed.below if allowed.at_most is None else allowed.at_most
    assert low is not None, "no lower limit"
    assert high is not None or hint in (float, float | None), "no upper limit: it may be what memory is taken for"
    outside = [low - 1, -math.inf, math.inf, math.nan, -(10**5000), 10**5000]
    outside += [2 * high + 1] if high is not None else []
    outside += [x for x in (allowed.above, allowed.below) if x is not None]
    listed = typing.get_origin(hint) is tuple
    for value in outside:
        found = problems_of(kind, **{name: (value,) if listed else value})
        assert any(p.startswith(f"{name}[0] is " if listed else f"{name} is ") and "must be" in p for p in found), value
        assert max(map(len, found)) < 300


@pytest.mark.parametrize("text", [".nan", "nan", "inf", "-inf", "1e999", 10**400])
@pytest.mark.parametrize("name", ["weight_decay", "learning_rate", "max_grad_norm", "early_stop_min_delta"])
def test_a_number_that_is_not_finite_is_refused(name: str, text: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        TrainConfig.from_dict({name: text})


@pytest.mark.parametrize("kind", CLASSES, ids=lambda c: c.__name__)
def test_seeds_stay_where_every_use_of_them_is_below_two_to_the_64(kind: type[Config]) -> None:
    if "seed" not in {f.name for f in fields(kind)}:
        return
    allowed = range_of(kind, "seed")
    assert (allowed.at_least, allowed.at_most) == (0, LARGEST_SEED)
    assert LARGEST_SEED * 1_000_003 + LONGEST_RUN * LARGEST_BATCH < 2**64


def test_messages_name_the_limit_that_is_broken() -> None:
    def message(**values: Any) -> str:
        return problems_of(TrainConfig, **values)[0]

    assert message(steps=0) == "steps is 0; it must be at least 1."
    assert message(batch_size=70_000) == "batch_size is 70000; it must be at most 65,536."
    assert message(learning_rate=0.0) == "learning_rate is 0.0; it must be > 0."
    assert message(max_grad_norm=math.inf).startswith("max_grad_norm is inf; it must be a finite number, or null")
    assert message(max_grad_norm=-1.0) == "max_grad_norm is -1.0; it must be > 0, or null for no clipping."
    assert message(steps="many") == "steps is 'many'; expected a number."
    assert problems_of(DataConfig, sequence_length=1) == ["sequence_length is 1; it must be at least 2 tokens."]


@pytest.mark.parametrize(
    ("layers", "phrase"),
    [
        ([0, -3, -4], "layers[1] is -3; it must be at least 0."),
        ([2, 5, 2], "layers names 2 twice"),
        ([0, 2**70], "layers[1] is 1180591620717411303424; it must be at most"),
        ([0, "a", "b"], "elder.layers[1] is 'a'; expected int."),
        ([True], "expected int"),
        ([[1]], "elder.layers[0] is [1]; expected int."),
        (list(range(-1, 500_000)), "layers[0] is -1"),
        (["a"] * 500_000, "expected int"),
    ],
    ids=["negative", "twice", "large", "words", "truth", "nested", "many", "many words"],
)
def test_lists_of_indices_say_their_first_mistake(layers: list[Any], phrase: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config({"elder": {"layers": layers}})
    assert len(caught.value.problems) == 1
    assert phrase in str(caught.value)


@pytest.mark.parametrize("value", ["a\0b", "\x1b[31mred", "a\ud800", "x" * 5000], ids=repr)
@pytest.mark.parametrize(("section", "name"), [("", "plan"), ("", "device"), ("data", "source"), ("data", "field")])
def test_names_hold_no_control_characters(section: str, name: str, value: str) -> None:
    """They would reach file systems, hubs and terminals."""
    with pytest.raises(ConfigError) as caught:
        read_config({section: {name: value}} if section else {name: value})
    assert len(str(caught.value)) < 300
    assert "control character" in str(caught.value) or "5,000 characters" in str(caught.value)
    assert str(caught.value).isprintable()


HUGE = "x" * 1_000_000


@pytest.mark.parametrize(
    "data",
    [
        {HUGE: 1},
        {"elder": {HUGE: 1}},
        {"method": HUGE},
        {"target": HUGE},
        {"ratio": HUGE},
        {"seed": HUGE},
        {"seed": [HUGE] * 100},
        {"elder": [HUGE] * 100},
        {"elder": {"norm": {HUGE: HUGE}}},
        {"elder": {"norm": 10**5000}},
        {"elder": {"layers": HUGE}},
        {"version": 10**5000},
        {10**5000: 1},
        {f"ratio{i}": 1 for i in range(100_000)},
    ],
    ids=lambda _: "data",
)
def test_messages_about_huge_values_are_short(data: dict[Any, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(data)
    assert len(caught.value.args[0]) < 4000
    assert len(caught.value.problems) <= MOST_PROBLEMS + 1


def test_how_many_problems_are_left_out_is_said() -> None:
    with pytest.raises(ConfigError, match=r"There are 40 more problems\."):
        read_config({f"o{i}": 1 for i in range(50)})


@pytest.mark.parametrize("data", [[], None, "ratio", 5])
def test_options_that_are_no_mapping(data: Any) -> None:
    with pytest.raises(ConfigError, match="expected a mapping"):
        read_config(data)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("stages", "trained"),
    [
        ({"method": "elder"}, "regularise"),
        ({"method": "dress", "stages": {"before": [], "after": ["regularise"]}}, "regularise"),
        ({"method": "taylor", "stages": {"before": ["finetune"]}}, "finetune"),
        ({"method": "taylor", "stages": {"before": [], "after": ["finetune"]}}, "finetune"),
        ({"stages": {"before": [], "after": ["recover"]}, "recover": {"adapters": "none"}}, "recover"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_half_precision_is_refused_where_all_weights_are_trained(
    stages: dict[str, Any], trained: str, dtype: str
) -> None:
    """Long before the training, which is hours later, would refuse it."""
    with pytest.raises(ConfigError, match=f"dtype is '{dtype}', but {trained} trains all weights"):
        read_config({**stages, "dtype": dtype})
    read_config({**stages, "dtype": "float32"})


def test_bfloat16_weights_are_fine_where_they_are_trained_lean() -> None:
    for memory in ("auto", "lean"):
        train = {"train": {"dtype": "bfloat16", "memory": memory}}
        assert read_config({"method": "elder", "elder": train, "dtype": "bfloat16"}).dtype == "bfloat16"
        with pytest.raises(ConfigError, match="trains all weights"):
            read_config({"method": "elder", "elder": train, "dtype": "float16"})
    full = {"train": {"dtype": "bfloat16", "memory": "full"}}
    with pytest.raises(ConfigError, match="trains all weights"):
        read_config({"method": "elder", "elder": full, "dtype": "bfloat16"})


def test_half_precision_is_fine_for_scores_gates_and_adapters() -> None:
    for method in ("moreau", "elder"):
        untrained = {"method": method, "stages": {"before": []}, "dtype": "bfloat16"}
        assert read_config(untrained).dtype == "bfloat16"
    lora = {"method": "taylor", "stages": {"before": [], "after": ["recover"]}}
    assert read_config({**lora, "dtype": "bfloat16"}).recover.adapters == "lora"
    with pytest.raises(ConfigError, match="dtype is 'float16', whose smallest number is above most of the gradients"):
        read_config({**lora, "dtype": "float16"})
    gates = {"method": "elder", "stages": {"before": [], "after": []}, "dtype": "float16"}
    with pytest.raises(ConfigError, match="most of the gradients of decide"):
        read_config(gates)
    assert read_config({**gates, "elder": {"layers": [1]}}).deciding_training() is None
    assert RecoverCheckpointConfig.from_dict({"dtype": "bfloat16"}).dtype == "bfloat16"
    with pytest.raises(ConfigError, match="recover trains all weights"):
        RecoverCheckpointConfig.from_dict({"dtype": "bfloat16", "recover": {"adapters": "none"}})


def test_early_stopping_on_a_single_sample_is_refused_before_the_gates() -> None:
    train = {"train": {"early_stop_patience": 5}}
    with pytest.raises(ConfigError, match=r"elder\.train\.early_stop_patience holds a sample out"):
        read_config({"data": {"samples": 1}, "elder": train})
    with pytest.raises(ConfigError, match=r"recover\.train\.early_stop_patience"):
        RecoverCheckpointConfig.from_dict({"data": {"samples": 1}, "recover": train})
    read_config({"method": "elder", "stages": {"before": []}, "data": {"samples": 1}, "elder": train})


def test_weight_decay_that_adam_lacks_is_refused_before_the_work() -> None:
    assert "which has none" in problems_of(TrainConfig, optimizer="adam", weight_decay=0.1)[0]


def test_the_sequences_of_a_pass_divide_the_batch() -> None:
    assert [largest_divisor(12, most) for most in (1, 2, 3, 4, 5, 6, 11, 12, 100)] == [1, 2, 3, 4, 4, 6, 6, 12, 12]
    assert largest_divisor(7, 5) == 1
    config = TrainConfig(batch_size=2, micro_batch_size=8)
    assert config.sequences_per_pass == 2
    assert replace(config, batch_size=64).sequences_per_pass == 8
    assert config.to_dict()["micro_batch_size"] == 8


def test_a_range_is_said_in_the_fields_own_terms() -> None:
    assert RecoverConfig.rank == 32, "the default stays the class's attribute"
    assert range_of(RecoverConfig, "rank").at_least == 1
