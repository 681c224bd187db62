"""`pyprune options` lists every option: none is without a meaning, and every name can be set."""

from __future__ import annotations

import json

import pytest

from pyprune.cli.options import OTHERS, list_options, options_of
from pyprune.config.describe import describe_options
from pyprune.fit.options import FitOptions
from pyprune.methods.registry import presets
from pyprune.run.recipe import build_config, is_among, switched_off, unread
from tests._support.cli import refused, run


@pytest.mark.parametrize("name", [*presets(), *OTHERS])
def test_every_option_has_a_meaning_and_says_what_it_may_be(name: str) -> None:
    found = list(describe_options(options_of(name)[0]))
    assert len(found) > 15
    assert len({each.name for each in found}) == len(found)
    assert not [each.name for each in found if not (each.meaning and each.allowed)]
    assert not [each.meaning for each in found if "``" in each.meaning or ":class:" in each.meaning]


@pytest.mark.parametrize("name", ["elder-paper", "dress-anneal", "taylor", "flap", "obs"])
def test_every_option_can_be_set_by_its_name(name: str) -> None:
    config = build_config(preset=name)
    idle = [*switched_off(config), *(option for options in unread(config).values() for option in options)]
    outer = build_config(preset=name, recovery="alpaca-lora-distill")  # with a recovery, and options inside it
    for start, recovery in ((config, None), (outer, "alpaca-lora-distill")):
        found = list(describe_options(start))
        null = [f"{each.name}." for each in found if each.value is None]
        for each in found:
            if is_among(each.name, idle) or each.name.startswith(tuple(null)) or "[]" in each.name:
                continue
            settings = [f"{each.name}={json.dumps(each.value)}"]
            if each.name == "score.axes":  # axes that are named close the further ones
                settings.append(f"score.further_axes={json.dumps(list(start.score_options.further_axes))}")
            assert build_config(preset=name, recovery=recovery, settings=settings) == start, settings


def test_the_command_lists_them_and_says_what_nothing_reads() -> None:
    listed = run("options", "elder", "--find", "gates")
    assert listed.exit_code == 0, listed.output
    assert "| elder.gates.search | greedy | greedy, one_shot |" in listed.stdout
    assert "recover.train.steps" not in listed.stdout
    assert "elder.penalty_weight" in listed.stdout.partition("Left out")[2], (
        "the default trains nothing towards the cut"
    )
    published = run("options", "elder-paper", "--find", "penalty_weight")
    assert "| elder.penalty_weight | 0.001 | number, at least 0" in published.stdout
    assert "elder.anneal_share (with elder.schedule 'published')" in published.stdout


def test_the_recommended_name_has_options() -> None:
    listed = run("options", "best", "--find", "ridges")
    assert listed.exit_code == 0, listed.output
    assert "cut.least_squares.ridges" in listed.stdout


def test_an_option_that_nothing_reads_is_found_with_the_reason() -> None:
    listed = run("options", "taylor", "--find", "hidden_multiple")
    assert listed.exit_code == 0, listed.output
    assert "hidden_multiple (with method 'taylor', which removes none of the hidden size" in listed.stdout


def test_a_text_that_is_not_named_is_as_much_as_it_would_be() -> None:
    found = {each.name: each.value for each in list_options(build_config(preset="elder-trained"))}
    named = build_config(preset="elder-trained", settings=["recovery_data.source=x.txt", "cut.data.source=x.txt"])
    for place, data in (("recovery_data", named.recovery_data), ("cut.data", named.cut.data)):
        assert data is not None
        assert (found[f"{place}.samples"], found[f"{place}.sequence_length"]) == (data.samples, data.sequence_length)
    assert found["recovery_data"] is None


def test_the_options_of_fit_are_those_of_its_class() -> None:
    found = json.loads(run("options", "fit", "--json", "-").stdout)
    names = {each["name"] for each in found["options"]}
    assert {"window", "slack", "choices.query_heads", "solve.solutions", "reconstruct.dtype"} <= names
    assert {each["name"]: each["value"] for each in found["options"]}["spare"] == FitOptions().spare


def test_what_is_no_name_or_is_nowhere_is_refused() -> None:
    assert "'elder'" in refused("options", "eldr")
    assert "has 'quux' in its name or meaning" in refused("options", "fit", "--find", "quux")
