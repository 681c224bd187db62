"""What a recipe or a --set value may hold: written by anyone, it ends in options or in one short message."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from pyprune.errors import ConfigError, did_you_mean
from pyprune.methods.registry import presets
from pyprune.run.recipe import RECIPE_BYTES, build_config, build_recovery, nest, parse_setting, read_recipe, read_yaml
from pyprune.run.text import text_configs

HOSTILE = {
    "anchor": ("&a 5", "anchors (&) and aliases (*) are not read"),
    "alias": ("[&a 1, *a]", "anchors (&) and aliases (*) are not read"),
    "endless anchor": ("&a [*a]", "anchors (&) and aliases (*) are not read"),
    "unknown alias": ("*nothing", "anchors (&) and aliases (*) are not read"),
    "tag": ("!!int abc", "tags (!) are not read"),
    "python tag": ("!!python/object/apply:os.system [echo]", "tags (!) are not read"),
    "long tag": (f"!{'t' * 50_000} x", "tags (!) are not read"),
    "binary tag": ("!!binary aGVsbG8=", "tags (!) are not read"),
    "merge anchor": ("{<<: *b}", "anchors (&) and aliases (*) are not read"),
    "name twice": ("{a: 1, a: 2}", "the name 'a' occurs twice"),
    "number as a name": ("{1: 2}", "this is no name of an option"),
    "nothing as a name": ("{null: 2}", "this is no name of an option"),
    "truth as a name": ("{yes: 2}", "this is no name of an option"),
    "list as a name": ("{? [a] : 2}", "this is no name of an option"),
    "digits": ("9" * 5000, "a number has 5,000 characters"),
    "hexadecimal digits": ("0x" + "f" * 5000, "a number has 5,002 characters"),
    "sexagesimal digits": (":".join(["1"] * 3000), "a number has 5,999 characters"),
    "no digits": ("0b_", "invalid literal for int()"),
    "deep lists": ("[" * 50_000, "more than 20 lists and mappings"),
    "deep mappings": ("{a: " * 20_000, "more than 20 lists and mappings"),
    "deep blocks": ("- " * 50_000, "more than 20 lists and mappings"),
    "NUL": ("\0", "#x0000"),
    "escape code": ("\x1b[31m", "#x001b"),
    "half a character": ("\ud800", "#xd800"),
    "character beyond Unicode": ('"\\U00110000"', "chr()"),
    "two documents": ("---\n1\n--- 2", "found another document"),
    "not closed": ("[1, 2", "expected"),
    "long word that is none": (f"@{'x' * 50_000}", "cannot start any token"),
    "long directive": (f"%{'x' * 50_000}", "expected"),
}


@pytest.mark.parametrize(("text", "phrase"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_values_are_refused_in_one_short_line(text: str, phrase: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_setting(f"data.source={text}")
    message = str(caught.value)
    assert message.startswith("--set data.source: the value ")
    assert phrase in message
    assert len(message) < 500
    assert message.isprintable(), "it has one line and no escape codes"


@pytest.mark.parametrize(("text", "phrase"), [x for x in HOSTILE.values() if "\ud800" not in x[0]])
def test_hostile_recipes_are_refused_in_one_short_line(text: str, phrase: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_recipe(path)
    assert str(caught.value).startswith(f"The recipe {path} is not valid YAML: ")
    assert phrase in str(caught.value)
    assert len(str(caught.value)) < 300 + len(str(path))
    assert str(caught.value).isprintable()


def test_the_place_of_a_mistake_is_named(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("ratio: 0.5\nelder:\n  train: &t\n    steps: 3\n")
    with pytest.raises(ConfigError, match="line 3, column 10: anchors"):
        read_recipe(path)


@pytest.mark.parametrize("text", ["2020-02-30", "2020-02-03", "2020-02-03 10:00:00", "=", "<<"])
def test_dates_are_text(text: str) -> None:
    assert parse_setting(f"data.split={text}") == {"data": {"split": text}}
    with pytest.raises(ConfigError, match="seed is '"):
        build_config(settings=[f"seed={text}"])


def test_plain_values_stay_what_they_are() -> None:
    text = "a: {b: [1, -2, 0x1f, 1.5, 1.0e-3, true, off, null, ~, 'x', \"y\"]}\nc: |\n  two\n  lines\nd: 1_000\n"
    values = [1, -2, 31, 1.5, 1e-3, True, False, None, None, "x", "y"]
    assert read_yaml(text, "it") == {"a": {"b": values}, "c": "two\nlines\n", "d": 1000}
    assert read_yaml('{"a": [1, {"b": "c"}]}', "it") == {"a": [1, {"b": "c"}]}
    assert read_yaml("", "it") is None


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


def make_long(path: Path) -> Path:
    path.write_text("#" * (RECIPE_BYTES + 1))
    return path


def make_binary(path: Path) -> Path:
    path.write_bytes(b"\xff\xfe\x00")
    return path


@pytest.mark.parametrize(
    ("make", "phrase"),
    [
        (make_folder, "Is a directory"),
        (make_long, "more than 1,000,000 bytes"),
        (make_binary, "codec can't decode"),
        (lambda path: Path("/dev/zero"), "more than 1,000,000 bytes"),
        (lambda path: path / "\0", "embedded null byte"),
        (lambda path: path / ("x" * 300), "cannot be read: "),
        (lambda path: path / "\x1b[31m", "No such file"),
    ],
)
def test_files_that_are_no_recipe(make: Any, phrase: str, tmp_path: Path) -> None:
    for build in (build_config, build_recovery):
        path = make(tmp_path / build.__name__)
        with pytest.raises(ConfigError) as caught:
            build(recipe=path)
        assert "cannot be read: " in str(caught.value)
        assert phrase in str(caught.value)
        assert len(str(caught.value)) < 500
        assert str(caught.value).isprintable()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_recipe_that_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("ratio: 0.5")
    path.chmod(0)
    with pytest.raises(ConfigError, match="Permission denied"):
        read_recipe(path)


def test_an_anchor_bomb_is_neither_grown_nor_shown(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    path = tmp_path / "bomb.yaml"
    path.write_text("\n".join([*lines, "ratio: *a29"]))
    with pytest.raises(ConfigError) as caught:
        build_config(recipe=path)
    assert len(str(caught.value)) < 300 + len(str(path))


@pytest.mark.parametrize(
    ("setting", "phrase"),
    [
        ("=5", "--set got '=5'"),
        ("elder=5", "elder is 5; expected a mapping"),
        ("elder.train=null", "elder.train is None; expected a mapping"),
        ("elder.gates=[1]", "elder.gates is [1]; expected a mapping"),
        ("stages=null", "stages is None; expected a mapping"),
        ("recovery_data=5", "recovery_data is 5; expected a mapping"),
        ("method=[1]", "method is [1]; expected str"),
        ("ratio=.nan", "ratio is nan"),
        ("elder.train.weight_decay=.inf", "weight_decay is inf"),
        ("elder.train.seed=-1", "seed is -1"),
        (f"elder.train.seed={2**64}", "seed is 18446744073709551616"),
        ("data.samples=1000000000", "at most 100,000,000"),
        ("recover.rank=1000000000", "at most 65,536"),
        (".".join("a" * 100_000) + "=1", "expected key.path=value"),
        ("x" * 1_000_000 + "=1", "Unknown option"),
        ("ratio=" + "x" * 1_000_000, "expected a number"),
        ("x" * 1_000_000, "expected key.path=value"),
    ],
    ids=lambda text: text[:20],
)
def test_settings_that_are_no_options(setting: str, phrase: str) -> None:
    started = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        build_config(preset="elder", settings=[setting])
    assert phrase in str(caught.value)
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("elder.train.steps=20", "Presets of elder with it: elder-anneal, elder-paper"),
        ("elder.schedule=anneal", "this run has no stage 'regularise'"),
        ("finetune.steps=3", "this run has no stage 'finetune'"),
        ("recovery_data.source=mine.txt", "this run has no stage 'recover'"),
        ("elder.train.checkpoint_interval=5", "this run has no stage 'regularise'"),
    ],
)
def test_options_that_no_stage_reads_are_refused(setting: str, says: str) -> None:
    preset = "taylor" if setting.startswith("recovery") else None
    given = ["elder.layers=[1]"] if "interval" in setting else []  # no gates are learnt, which read it too
    with pytest.raises(ConfigError) as caught:
        build_config(preset=preset, settings=[*given, setting])
    assert says in str(caught.value)
    assert f"{setting.partition('=')[0]} would do nothing" in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        ["elder.gates.penalty_weight=0.01"],
        ["elder.train.dtype=float32", "elder.train.checkpoint_interval=5"],
        ["method=elder-trained", "recover.train.steps=3"],
        ["finetune.steps=3", "stages.after=[finetune]"],
        ["seed=1"],
        ["method=trsp", "seed=1"],
        ["method=dress", "hidden_multiple=16"],
        ["method=taylor", "score.axes=[hidden]", "hidden_multiple=16"],
        ["method=taylor", "score.axes=[heads]", "score.heads_unit=query_head", "score.allow_empty=true"],
    ],
    ids=lambda settings: settings[0],
)
def test_options_that_a_stage_or_the_gates_read_are_taken(settings: list[str]) -> None:
    assert build_config(settings=settings)


def test_off_is_a_word_where_it_is_an_option() -> None:
    """YAML reads it as false."""
    config = build_config(preset="dress-trained", settings=["recover.train.copies=off"])
    assert config.recover.train.copies == "off"
    with pytest.raises(ConfigError, match="copies 'True'"):
        build_config(preset="dress-trained", settings=["recover.train.copies=on"])


@pytest.mark.parametrize(
    ("preset", "settings", "off", "why"),
    [
        ("dress-anneal", [], "dress.penalty_weight=0.1", "dress.schedule 'anneal'"),
        ("dress-anneal", [], "dress.solver=prox", "dress.schedule 'anneal'"),
        ("dress-anneal", [], "dress.norm=l1", "dress.schedule 'anneal'"),
        ("loraprune-paper", [], "loraprune.train.checkpoint_interval=4", "loraprune.train, which keeps nothing"),
        ("dress-paper", [], "dress.anneal_share=0.1", "dress.schedule 'published'"),
        ("dress-paper", [], "dress.prox_step=0.1", "dress.solver 'subgradient'"),
        ("dress-paper", [], "dress.segments=3", "dress.select 'last'"),
        ("elder-anneal", [], "elder.penalty_weight=0.1", "elder.schedule 'anneal'"),
        ("trsp-paper", [], "trsp.anneal_share=0.1", "trsp.schedule 'published'"),
        ("elder", ["elder.layers=[1]"], "elder.gates.batch_size=2", "elder.layers [1]"),
        ("elder-trained", ["recover.adapters=none"], "recover.rank=8", "recover.adapters 'none'"),
        ("elder", [], "hidden_multiple=16", "method 'elder', which removes none of the hidden size"),
        ("taylor", [], "hidden_multiple=16", "method 'taylor', which removes none of the hidden size"),
        ("taylor", ["score.axes=[ffn]"], "score.heads_unit=query_head", "score.axes ['ffn']"),
        ("taylor", ["score.axes=[heads]"], "score.ffn_multiple=64", "score.axes ['heads']"),
        ("taylor", ["score.axes=[hidden]"], "score.allow_empty=true", "score.axes ['hidden']"),
        ("taylor", [], "seed=1", "method 'taylor', which draws nothing by it (data.seed draws the text)"),
        ("dress-paper", [], "seed=1", "method 'dress', which draws nothing by it"),
        ("random", [], "seed=1", "method 'random', which draws nothing by it (random.seed is its own)"),
        ("elder", ["elder.layers=[1]"], "seed=1", "method 'elder', which draws nothing by it"),
        ("elder", ["plan=plan.json"], "seed=1", "plan 'plan.json', which decides what is removed"),
        ("dress", ["plan=plan.json"], "hidden_multiple=16", "plan 'plan.json', which decides what is removed"),
        ("taylor", ["plan=plan.json"], "score.ranking=local", "plan 'plan.json', which decides what is removed"),
    ],
)
def test_options_that_other_values_switch_off_are_refused(preset: str, settings: list[str], off: str, why: str) -> None:
    name = off.partition("=")[0]
    assert build_config(preset=preset, settings=settings)
    with pytest.raises(ConfigError, match=f"{re.escape(name)} would do nothing with {re.escape(why)}"):
        build_config(preset=preset, settings=[*settings, off])


def test_options_that_a_given_value_switches_on_are_taken() -> None:
    config = build_config(preset="dress-paper", settings=["dress.solver=prox", "dress.prox_step=0.1"])
    assert config.options.prox_step == 0.1
    with pytest.raises(ConfigError, match=r"recover\.rank would do nothing with recover\.adapters 'none'"):
        build_recovery(settings=["recover.adapters=none", "recover.rank=8"])


def test_dress_penalises_in_its_paper_preset_alone() -> None:
    assert build_config(preset="dress-paper", settings=["dress.penalty_weight=5e-3"]).options.penalty_weight == 5e-3
    with pytest.raises(ConfigError, match=r"dress\.penalty_weight would do nothing"):
        build_config(options={"method": "dress"}, settings=["dress.penalty_weight=5e-3"])


def test_a_smaller_batch_needs_no_second_option() -> None:
    config = build_config(preset="elder-anneal", settings=["elder.train.batch_size=2"])
    assert (config.options.train.batch_size, config.options.train.micro_batch_size) == (2, 8)
    assert config.options.train.sequences_per_pass == 2


def test_a_name_of_many_parts_is_no_recursion() -> None:
    data, depth = nest(".".join("a" * 100_000), 5), 0
    while isinstance(data, dict):
        data, depth = data["a"], depth + 1
    assert (data, depth) == (5, 100_000)


@pytest.mark.parametrize("key", ["preset", "recovery"])
def test_a_name_in_a_recipe_that_is_no_text(key: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{key}: [{', '.join(['x'] * 100_000)}]")
    with pytest.raises(ConfigError) as caught:
        build_config(recipe=path)
    assert str(caught.value).startswith(f"{key} is ['x', ")
    assert len(str(caught.value)) < 400


def test_an_unknown_name_of_a_megabyte_is_cut_off_and_not_compared() -> None:
    started = time.monotonic()
    message = did_you_mean("elder" * 200_000, ["elder"] * 1000, "method")
    assert time.monotonic() - started < 1
    assert message.startswith("Unknown method 'elderelder")
    assert "Did you mean" not in message
    assert "..." in message
    assert did_you_mean("eldr", ["elder"], "method") == "Unknown method 'eldr'. Did you mean 'elder'? Available: elder."
    many = did_you_mean("bset", ["best", *"abcdefghijkl"], "method")
    assert many == "Unknown method 'bset'. Did you mean 'best'? Available: a, b, best, c, d, e, f, g and 5 more."


def test_other_text_of_the_cut_is_as_much_as_the_method_reads() -> None:
    config = build_config(preset="elder", settings=["cut.data.source=mixture", "data.samples=40"])
    assert config.cut.data is not None
    assert (config.cut.data.samples, config.cut.data.sequence_length) == (40, config.data.sequence_length)
    own = build_config(preset="elder", settings=["cut.data={source: mixture, samples: 9}"])
    assert own.cut.data is not None
    assert (own.cut.data.samples, own.cut.data.sequence_length) == (9, own.data.sequence_length)
    scores = build_config(preset="taylor-paper", settings=["recovery_data.source=wikitext2", "stages.after=[recover]"])
    assert scores.recovery_data is not None
    assert scores.recovery_data.samples > scores.data.samples, "a score reads little"
    after = build_config(preset="elder", settings=["recovery_data.source=wikitext2", "stages.after=[recover]"])
    assert after.recovery_data is not None
    assert after.recovery_data.samples == after.data.samples


def test_text_that_a_preset_reads_twice_is_named_once() -> None:
    given = {"data.source": "mixture", "data.samples": 9, "data.sequence_length": 64}
    config = build_config(preset="dress-paper", options=given)
    assert config.recovery_data is not None
    assert (config.recovery_data.source, config.recovery_data.sequence_length) == ("mixture", 64)
    assert config.recovery_data.samples == 250, "the paper's share of the text"
    own = build_config(preset="dress-paper", options=given, settings=["recovery_data.source=ptb"])
    assert own.recovery_data is not None
    assert (own.recovery_data.source, own.recovery_data.sequence_length) == ("ptb", 64)


def test_the_window_of_another_text_is_its_own(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("preset: elder\nrecovery: alpaca-lora\ndata: {sequence_length: 2048}\n")
    config = build_config(recipe=recipe)
    assert config.recovery_data is not None
    assert (config.data.sequence_length, config.recovery_data.sequence_length) == (2048, 256)


@pytest.mark.parametrize(
    ("preset", "setting", "words"),
    [
        ("taylor-plain", "cut.least_squares.held_back=0.3", "would do nothing with cut.reconstruct 'none'"),
        ("taylor-plain", "cut.batch_size=3", "would do nothing with cut.reconstruct 'none'"),
        ("flap-paper", "cut.least_squares.readers=true", "would do nothing with cut.reconstruct 'bias'"),
        ("loraprune", "score.batch_size=1", "with method 'loraprune', which does not read text in batches"),
        ("magnitude", "score.batch_size=1", "with method 'magnitude', which does not read text in batches"),
        ("wanda", "score.layerwise=false", "with method 'wanda', which takes no gradients of layers"),
        ("elder-paper-oneshot", "elder.gates.round_steps=3", "with elder.gates.search 'one_shot'"),
    ],
)
def test_options_that_others_switch_off_are_refused(preset: str, setting: str, words: str) -> None:
    settings = [setting]
    if preset == "elder-paper-oneshot":
        preset, settings = "elder", ["elder.gates.search=one_shot", setting]
    with pytest.raises(ConfigError, match=re.escape(words)):
        build_config(preset=preset, settings=settings)


def test_explicit_layers_need_no_text() -> None:
    config = build_config(preset="elder", settings=["elder.layers=[1]"])
    assert config.options is not None
    assert not config.options.reads_text


@pytest.mark.parametrize("name", [name for name in presets() if "paper" not in name])
@pytest.mark.parametrize(
    "settings",
    [
        ["cut.reconstruct=least_squares"],
        ["cut.reconstruct=least_squares", "cut.data.samples=12"],
        ["stages.after=[recover]", "recovery_data.sequence_length=64"],
        ["verify=true"],
    ],
)
def test_the_text_that_is_given_serves_every_use_without_its_own(name: str, settings: list[str]) -> None:
    try:
        config = build_config(preset=name, options={"data.source": "mine.txt", "data.bos": True}, settings=settings)
    except ConfigError:
        pytest.skip("the method does not take these options")
    texts = text_configs(config)
    assert {source for text in texts.values() for source in text.sources} == {"mine.txt"}
    assert all(text.bos for text in texts.values())


def test_text_that_names_its_source_keeps_it() -> None:
    settings = ["cut.reconstruct=least_squares", "cut.data.source=ptb", "stages.after=[recover]"]
    config = build_config(preset="taylor", options={"data.source": "mine.txt"}, settings=settings)
    assert {use: text.sources for use, text in text_configs(config).items()} == {
        "data": ("mine.txt",), "cut.data": ("ptb",), "recovery_data": ("mine.txt",)
    }  # fmt: skip
