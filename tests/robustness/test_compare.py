"""`pyprune robustness`: every variant and method end to end on a tiny model, resumable, and true to what it says."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import pyprune.robustness.compare as module
from pyprune.cli.app import app
from pyprune.cli.base import ERROR_CODE, INTERRUPTED_CODE
from pyprune.config.train import RecoverConfig, TrainConfig
from pyprune.cut.mask import masked
from pyprune.data.sampling import sample_sequences
from pyprune.errors import CheckpointError, ConfigError, DataError
from pyprune.methods.score import smoothgrad
from pyprune.methods.score._descent import Noise
from pyprune.plan import PrunePlan
from pyprune.quality.perplexity import evaluate_perplexity, evaluation_text
from pyprune.robustness.compare import check_robustness, jaccard, removed_units
from pyprune.robustness.options import METHODS, RobustnessConfig
from pyprune.robustness.perturbations import VARIANTS, Adapter, set_variant_
from pyprune.robustness.result import RobustnessResult
from tests._support.models import tiny_model
from tests._support.scores import decision_of
from tests._support.text import write_model, write_text
from tests._support.tokenizer import tiny_tokenizer


@pytest.fixture
def texts(tmp_path: Path) -> tuple[Path, Path]:
    """Calibration and test text."""
    return write_text(tmp_path / "calibration.txt"), write_text(tmp_path / "test.txt", words=300, seed=9)


def config(texts: tuple[Path, Path], **changes: Any) -> RobustnessConfig:
    small: dict[str, Any] = {
        "methods": ("taylor", "moreau"),
        "ratios": (0.1, 0.2),
        "variants": ("bfloat16", "lora"),
        "texts": (str(texts[1]),),
        "max_tokens": 512,
        "options": {"data.source": str(texts[0]), "data.samples": 3, "data.sequence_length": 24},
    }
    if {"moreau", "smoothgrad"} & {*changes.get("methods", ("moreau",))}:
        small["settings"] = ("moreau.steps=2",)
    if "lora" in changes.get("variants", small["variants"]):
        small["adapter"] = Adapter(rank=2, size=0.2)
    return RobustnessConfig(**(small | changes))


def run(options: RobustnessConfig, out: Path | None = None, model: Any = None) -> RobustnessResult:
    return check_robustness(model or tiny_model("llama"), tiny_tokenizer(), options, out=out)


def numbers(result: RobustnessResult) -> list[dict[str, Any]]:
    return result.to_dict()["rows"]  # type: ignore[no-any-return]


def test_every_method_and_variant_has_its_row(texts: tuple[Path, Path], tmp_path: Path) -> None:
    options = config(texts, methods=METHODS, variants=VARIANTS, seeds=(0, 1), max_tokens=128)
    model = tiny_model("llama")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    result = run(options, tmp_path / "rows.jsonl", model)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters()), "the model was changed"
    pairs = [*(("float32", v) for v in VARIANTS), ("bfloat16", "float16")]
    expected = [
        (seed, m, r, against, v) for seed in (0, 1) for m in METHODS for r in (0.1, 0.2) for against, v in pairs
    ]
    assert [(r.seed, r.method, r.ratio, r.against, r.variant) for r in result.rows] == expected
    assert len(result.scorings) == 2 * 4 * 5, "one scoring a seed, method and variant, whatever the ratios"
    for row in result.rows:
        assert 0.6 * row.ratio < row.removed <= row.ratio
        assert row.difference == row.perplexity - row.reference
        for share in row.jaccard.values():
            assert share is None or 0 < share <= 1
    different = {row.variant for row in result.rows if row.jaccard["ffn"] != 1}
    assert "lora" in different, "a large update must show in the sets"
    assert len({row.perplexity for row in result.rows}) > len(result.rows) // 4
    samples = {seed: {r.reference for r in result.rows if r.seed == seed} for seed in (0, 1)}
    assert samples[0] != samples[1], "the calibration seed had no effect"
    # The paper's own comparison: float16 against bfloat16 is put together from the two.
    of = {(r.seed, r.method, r.ratio, r.against, r.variant): r for r in result.rows}
    direct = of[0, "taylor", 0.2, "bfloat16", "float16"]
    assert direct.perplexity == of[0, "taylor", 0.2, "float32", "float16"].perplexity
    assert direct.reference == of[0, "taylor", 0.2, "float32", "bfloat16"].perplexity


def test_weights_that_a_variant_does_not_change_give_the_same_everything(texts: tuple[Path, Path]) -> None:
    model = tiny_model("llama").bfloat16().float()
    result = run(config(texts, variants=("bfloat16", "lora"), methods=METHODS), model=model)
    for row in result.rows:
        if row.variant == "bfloat16":
            assert row.difference == 0
            assert set(row.jaccard.values()) <= {1.0, None}
        else:
            assert row.difference != 0
    notes = result.report().notes
    assert any("bfloat16 changes no weight" in note for note in notes)


@pytest.mark.parametrize("axes", [("heads", "ffn"), ("hidden",)])
def test_every_row_is_a_direct_masked_measurement(axes: Any, texts: tuple[Path, Path]) -> None:
    # The larger ratio first: a mask that stayed on would show at the smaller one.
    options = config(texts, ratios=(0.2, 0.1), variants=("int8",), axes=axes)
    result = run(options)
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    samples = sample_sequences(tokenizer, options.of("taylor").data).ids
    originals = {n: p.detach().clone() for n, p in model.named_parameters()}
    for row in result.rows:
        wanted = replace(options.of(row.method), ratio=row.ratio)
        plans: dict[str, PrunePlan] = {}
        measured: dict[str, float] = {}
        for variant in ("float32", "int8"):
            set_variant_(model, originals, variant)
            plans[variant] = decision_of(model, samples, wanted).plan
            with masked(model, plans[variant]):
                found = evaluate_perplexity(model, tokenizer, str(texts[1]), "ppl-128", max_tokens=512)
            measured[variant] = found.perplexity
        assert (row.reference, row.perplexity) == (measured["float32"], measured["int8"])
        gone = [removed_units(plans[v]) for v in ("float32", "int8")]
        assert row.jaccard == {axis: jaccard(gone[0][axis], gone[1][axis]) for axis in axes}
        assert result.unpruned[str(texts[1]), "float32"] != row.reference
    assert len(result.rows) == 4


def test_calibration_does_not_read_the_test_text(texts: tuple[Path, Path]) -> None:
    with pytest.raises(DataError, match=r"is used already: it is a test text.*Give another text."):
        run(replace(config(texts), texts=(str(texts[0]),)))


def test_another_configuration_or_tokenizer_is_measured_again(texts: tuple[Path, Path], tmp_path: Path) -> None:
    options = config(texts, methods=("magnitude",), variants=("bfloat16",))
    out = tmp_path / "rows.jsonl"
    first = run(options, out)
    model = tiny_model("llama")
    model.config.rms_norm_eps = 0.5
    for module_ in model.modules():
        if hasattr(module_, "variance_epsilon"):
            module_.variance_epsilon = 0.5
    other = run(options, out, model)
    assert {row.reference for row in other.rows}.isdisjoint(row.reference for row in first.rows)
    lines = len(out.read_text().splitlines())
    shifted = evaluation_text(tiny_tokenizer(), str(texts[1]))
    shifted = replace(shifted, token_ids=shifted.token_ids.roll(1))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "evaluation_text", lambda *_, **__: shifted)
        again = run(options, out)
    assert {row.reference for row in again.rows}.isdisjoint(row.reference for row in first.rows)
    assert len(out.read_text().splitlines()) > lines
    assert numbers(run(options, out)) == numbers(first)


def test_overlaps_by_hand() -> None:
    whole = PrunePlan.identity("llama", PrunePlan.from_dict(tiny_plan()).dense)
    first = whole.with_layer(1, query_heads=(3, 4, 5), kv_heads=(1,), ffn=range(2, 40)).keep_hidden(range(46))
    second = whole.with_layer(1, ffn=[0, *range(3, 40)]).with_layer(2, ffn=range(39))
    a, b = removed_units(first), removed_units(second)
    assert a["heads"] == {(1, 0), (1, 1), (1, 2)}
    assert a["ffn"] == {(1, 0), (1, 1)}
    assert a["hidden"] == {(-1, 46), (-1, 47)}
    assert b["ffn"] == {(1, 1), (1, 2), (2, 39)}
    assert jaccard(a["ffn"], b["ffn"]) == pytest.approx(1 / 4)
    assert jaccard(a["heads"], b["heads"]) == 0
    assert jaccard(b["heads"], b["hidden"]) is None
    dropped = removed_units(whole.drop_layers([3]))
    assert len(dropped["heads"]) == 6
    assert len(dropped["ffn"]) == 40


def tiny_plan() -> dict[str, Any]:
    from pyprune.families import family_for

    model = tiny_model("llama")
    return family_for(model).plan(model.config).to_dict()


def test_smoothgrad_gets_the_draws_of_moreau(texts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[tuple[str, int, float, int]]] = {"smoothgrad": [], "moreau": []}
    weights = Noise.weights
    current = ["moreau"]

    def spy(self: Noise, param: Any, delta: Tensor | None, draw: int) -> Tensor:
        seen[current[0]].append((param.name, draw, self.sigma, self.seed))
        return weights(self, param, delta, draw)

    monkeypatch.setattr(Noise, "weights", spy)
    for method in seen:
        current[0] = method
        settings = ("moreau.steps=3", "moreau.draws=2", "moreau.seed=7")
        run(config(texts, methods=(method,), variants=("bfloat16",), settings=settings))
    assert set(seen["smoothgrad"]) == set(seen["moreau"])
    assert {draw for _, draw, _, _ in seen["moreau"]} == set(range(6))
    assert smoothgrad.METHOD.scorer is not None


def test_without_new_noise_smoothgrad_repeats_the_same_draws_too() -> None:
    fixed = RobustnessConfig(settings=("moreau.redraw=false", "moreau.steps=9"))
    assert fixed.of("smoothgrad").options.draws == 1
    assert RobustnessConfig().of("smoothgrad").options.draws == 10
    with pytest.raises(ConfigError, match=r"smoothgrad\.draws is not read: smoothgrad gets the noise of moreau"):
        RobustnessConfig(settings=("smoothgrad.draws=50",)).validate()
    assert RobustnessConfig().of("smoothgrad-paper") == RobustnessConfig().of("smoothgrad")
    assert RobustnessConfig().of("moreau-converged").options.tolerance == 0.05
    assert RobustnessConfig().of("moreau").options.tolerance is None
    assert RobustnessConfig().of("taylor").hidden_multiple == 1, "the scorings that are on record are known by it"


def test_every_method_reads_the_same_text_whatever_its_preset_and_their_order(texts: tuple[Path, Path]) -> None:
    options = {"data.source": str(texts[0]), "data.samples": None, "data.sequence_length": None}
    for methods in (("wanda", "taylor", "flap", "loraprune"), ("taylor", "wanda")):
        chosen = RobustnessConfig(methods=methods, options=options)
        for method in methods:
            data = chosen.of(method).data
            assert (data.samples, data.sequence_length) == (10, 128)
    small = config(texts, methods=("flap", "taylor"), ratios=(0.2,), variants=("bfloat16",))
    result = run(small)
    assert result.conditions["calibration"].startswith("3 samples x 24 tokens")
    assert "left out of flap" in result.conditions["compensation"]


def test_obs_reads_the_text_of_the_others_and_scores_in_float32() -> None:
    chosen = RobustnessConfig(methods=("taylor", "obs"), options={"data.source": None})
    taylor, obs = (chosen.of(method) for method in chosen.methods)
    assert obs.data == taylor.data
    assert obs.options.dtype == "float32"
    assert obs.score_options.further_axes == (), "ranked to several ratios, of which only some would open heads"


def test_the_table_says_how_far_from_the_minimiser_the_steps_ended(texts: tuple[Path, Path], tmp_path: Path) -> None:
    small = config(texts, methods=("taylor", "moreau"), ratios=(0.2,), variants=("bfloat16",))
    result = run(small, tmp_path / "rows.jsonl")
    for facts in result.scorings:
        assert (facts.steps, facts.residual is None) == ((2, False) if facts.method == "moreau" else (None, True))
    assert run(small, tmp_path / "rows.jsonl").scorings == result.scorings, "kept with the record"


def test_the_hidden_axis_is_a_share_of_the_channels(texts: tuple[Path, Path]) -> None:
    result = run(config(texts, axes=("hidden",), ratios=(0.05, 0.25)))
    for row in result.rows:
        assert set(row.jaccard) == {"hidden"}
        assert row.jaccard["hidden"] is not None
    removed = {row.ratio: row.removed for row in result.rows}
    assert removed[0.05] < 2.5 / 48, "5 % of 48 channels are 2, not rounded to a multiple of 8"
    assert 0.2 < removed[0.25] < 0.3
    assert "ratio of hidden" in result.conditions["open"]


def test_an_interrupted_run_continues_to_the_same_table(
    texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = config(texts)
    whole = run(options, tmp_path / "whole.jsonl")
    out = tmp_path / "rows.jsonl"
    calls = [0]
    real = module.evaluate_perplexity

    def counted(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == 9:
            raise KeyboardInterrupt
        return real(*arguments, **named)

    monkeypatch.setattr(module, "evaluate_perplexity", counted)
    model = tiny_model("llama")
    with pytest.raises(KeyboardInterrupt):
        run(options, out, model)
    fresh = tiny_model("llama")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), fresh.parameters(), strict=True))
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    assert sum(record["kind"] == "perplexity" for record in kept) == 8
    assert not (tmp_path / "rows.md").exists()
    again = run(options, out)
    assert numbers(again) == numbers(whole)
    done = calls[0]
    assert done - 9 == sum(json.loads(x)["kind"] == "perplexity" for x in out.read_text().splitlines()) - 8
    third = run(options, out)
    assert calls[0] == done, "a finished run measures nothing again"
    assert numbers(third) == numbers(whole)
    assert [s.seconds for s in third.scorings] == [s.seconds for s in again.scorings]
    assert (tmp_path / "rows.md").read_text().startswith("# Robustness")
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix not in (".txt",)) == [
        "rows.jsonl", "rows.md", "whole.jsonl", "whole.md",
    ]  # fmt: skip


@pytest.mark.second
def test_what_changes_the_result_is_not_taken_from_the_file(texts: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    options = config(texts, methods=("taylor",), ratios=(0.2,), variants=("lora",))
    first = numbers(run(options, out))
    for other in (
        replace(options, adapter=Adapter(rank=2, size=0.1)),
        replace(options, max_tokens=256),
        replace(options, seeds=(3,)),
        replace(options, settings=("taylor.form=vectorize",)),
    ):
        mixed = numbers(run(other, out))
        assert mixed == numbers(run(other)), "the file of another run changed the result"
        assert mixed != first
    assert numbers(run(options, out, tiny_model("llama", seed=4))) != first
    assert numbers(run(options, out)) == first
    more = run(replace(options, ratios=(0.1, 0.2), variants=("lora", "int8")), out)
    assert [row for row in numbers(more) if row["ratio"] == 0.2 and row["variant"] == "lora"] == first


def test_other_calibration_text_in_the_same_file_is_scored_again(texts: tuple[Path, Path], tmp_path: Path) -> None:
    options, out = config(texts, methods=("taylor",), variants=("bfloat16",), ratios=(0.2,)), tmp_path / "rows.jsonl"
    first = numbers(run(options, out))
    lines = len(out.read_text().splitlines())
    assert numbers(run(options, out)) == first
    assert len(out.read_text().splitlines()) == lines
    write_text(texts[0], seed=77)
    again = numbers(run(options, out))
    assert again == numbers(run(options, tmp_path / "fresh.jsonl"))
    assert again != first


def test_an_option_that_no_score_reads_makes_no_new_scoring(
    texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every new option of recovery or of the cut would make all recorded scorings useless."""
    options, out = config(texts, methods=("magnitude",)), tmp_path / "kept.jsonl"
    first = run(options, out)
    lines = out.read_text().splitlines()
    of = RobustnessConfig.of
    monkeypatch.setattr(
        RobustnessConfig,
        "of",
        lambda self, method: replace(of(self, method), recover=RecoverConfig(rank=3), finetune=TrainConfig(steps=7)),
    )
    assert numbers(run(options, out)) == numbers(first)
    assert out.read_text().splitlines() == lines


def test_one_scoring_serves_every_ratio(texts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    real = module.RobustnessRun.score
    monkeypatch.setattr(module.RobustnessRun, "score", lambda self, s, c: calls.append(c) or real(self, s, c))
    run(config(texts, ratios=(0.1, 0.15, 0.2)))
    assert len(calls) == 2 * 3, "2 methods, 3 variants with float32"


def test_plans_are_those_of_the_method(texts: tuple[Path, Path], tmp_path: Path) -> None:
    """Ranking one scoring to several ratios gives what `pyprune prune` would decide for each."""
    options = config(texts, methods=("moreau",), variants=("bfloat16",))
    run(options, tmp_path / "rows.jsonl")
    records = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    (dense,) = [r for r in records if r["kind"] == "scores" and r["variant"] == "float32"]
    samples = sample_sequences(tiny_tokenizer(), options.of("moreau").data).ids
    for ratio in (0.1, 0.2):
        wanted = replace(options.of("moreau"), ratio=ratio)
        decision = decision_of(tiny_model("llama"), samples, wanted)
        assert PrunePlan.from_dict(dense["plans"][str(ratio)]) == decision.plan
        assert float(Fraction(str(ratio))) == ratio


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"methods": ("taylr",)}, "Did you mean 'taylor'"),
        ({"variants": ("int9",)}, "Did you mean 'int8'"),
        ({"ratios": (0.1, 1.5)}, "ratio is 1.5"),
        ({"ratios": (0.1, 0.1)}, "none of them twice"),
        ({"methods": ()}, "at least one"),
        ({"seeds": (-1,)}, r"seeds\[0\] is -1"),
        ({"protocol": "ppl-127"}, "Did you mean 'ppl-128'"),
        ({"adapter": Adapter(rank=0, size=2.0, seed=-1)}, "rank is 0"),
        ({"adapter": Adapter(rank=4), "variants": ("bfloat16",)}, "nothing reads the options of the variant lora"),
        ({"settings": ("score.iterations=2",)}, "one round"),
        ({"settings": ("score.ranking=local", "score.heads=3", "score.ffn=20")}, "one round"),
        ({"settings": ("scor.axes=[ffn]",)}, "Did you mean 'score'"),
        ({"settings": ("score.rankin=local",)}, "Did you mean 'ranking'"),
        ({"settings": ("method=wanda",)}, "method is set by robustness itself.*use --methods"),
        ({"settings": ("data.seed=7",)}, "use --seeds"),
        ({"settings": ("score.axes=[ffn]",)}, "use --axes"),
        ({"options": {"ratio": 0.5}}, "use --ratios"),
        ({"settings": ("dtype=bfloat16",)}, "does not read the option dtype"),
        ({"settings": ("recover.train.steps=2",)}, "recover.train.steps would do nothing"),
    ],
)
def test_options_that_do_not_fit_are_refused(changes: dict[str, Any], words: str, texts: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match=words):
        run(config(texts, **changes))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"ratios": (0.1, 0.9)}, ConfigError, "ratio 0.9 cannot be reached"),
        ({"settings": ("score.first_layer=9",)}, ConfigError, "no range of the model's layers"),
        ({"settings": ("data.sequence_length=4096",)}, DataError, "4096"),
    ],
)
def test_what_no_score_could_mend_is_found_before_anything_is_computed(
    changes: dict[str, Any], error: Any, words: str, texts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "evaluate_perplexity", lambda *_, **__: pytest.fail("something was measured"))
    with pytest.raises(error, match=words):
        run(config(texts, **changes))


def test_tables_of_somebody_else_are_not_replaced(texts: tuple[Path, Path], tmp_path: Path) -> None:
    folder = write_model(tiny_model("llama"), tmp_path / "dense")
    (tmp_path / "notes.md").write_text("# My notes\n")
    done = CliRunner().invoke(app, arguments(texts, folder, "--out", str(tmp_path / "notes.jsonl")))
    assert done.exit_code == ERROR_CODE
    assert "is not a report of robustness" in " ".join(done.stderr.split())
    assert (tmp_path / "notes.md").read_text() == "# My notes\n"
    assert not (tmp_path / "notes.jsonl").exists()


@pytest.mark.parametrize(
    ("out", "figures", "words"),
    [
        ("rows.md", "figures.json", "is where the tables are written"),
        ("rows.jsonl", "rows.jsonl", "for something else"),
        ("rows.jsonl", "rows.md", "where the tables are written"),
    ],
)
def test_no_output_replaces_another(
    out: str, figures: str, words: str, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = write_model(tiny_model("llama"), tmp_path / "dense")
    more = ["--out", str(tmp_path / out), "--json", str(tmp_path / figures)]
    done = CliRunner().invoke(app, arguments(texts, folder, *more))
    assert done.exit_code == ERROR_CODE
    assert words in " ".join(done.stderr.split())
    assert not (tmp_path / out).exists()


def test_a_file_of_something_else_is_left_alone(texts: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "notes.txt"
    out.write_text("my notes\n")
    with pytest.raises(CheckpointError, match="line 1 was not written by pyprune robustness"):
        run(config(texts), out)
    assert out.read_text() == "my notes\n"


def test_a_model_in_another_dtype_is_refused(texts: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="computed in float32"):
        run(config(texts), model=tiny_model("llama").bfloat16())


def arguments(texts: tuple[Path, Path], folder: Path, *more: str) -> list[str]:
    small = ["--methods", "taylor,smoothgrad", "--ratios", "0.1,0.2", "--variants", "float16,int8", "--tokens", "256"]
    data = ["--calibration", str(texts[0]), "--samples", "3", "--sequence-length", "24", "--ppl", str(texts[1])]
    return ["robustness", str(folder), *small, *data, "--set", "moreau.steps=2", *more]


@pytest.mark.second
def test_the_command_prints_and_keeps_the_tables(texts: tuple[Path, Path], tmp_path: Path) -> None:
    folder = write_model(tiny_model("llama"), tmp_path / "dense")
    out, figures = tmp_path / "rows.jsonl", tmp_path / "figures.json"
    more = ["--axes", "ffn", "--seeds", "0,5", "--out", str(out), "--json", str(figures)]
    done = CliRunner().invoke(app, arguments(texts, folder, *more))
    assert done.exit_code == 0, done.output
    data = json.loads(figures.read_text())
    assert len(data["rows"]) == 2 * 2 * 2 * 2
    assert {row["seed"] for row in data["rows"]} == {0, 5}
    assert set(data["rows"][0]["jaccard"]) == {"ffn"}
    written = out.with_suffix(".md").read_text()
    for heading in ("Summary", "ppl-128 on", "The variants", "The scores"):
        assert heading in done.stdout
        assert heading in written
    assert "Jaccard ffn" in done.stdout
    assert "2 draws, numbered and seeded as moreau's" in written
    before = out.read_bytes()
    again = CliRunner().invoke(app, arguments(texts, folder, *more))
    assert again.stdout == done.stdout, "the same command prints the same tables"
    assert out.read_bytes() == before


def test_the_command_says_what_an_interrupted_run_kept(
    texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = write_model(tiny_model("llama"), tmp_path / "dense"), tmp_path / "rows.jsonl"
    scores: list[Any] = []

    def interrupted(self: Any, samples: Tensor, options: Any) -> Any:
        scores.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(module.RobustnessRun, "score", interrupted)
    done = CliRunner().invoke(app, arguments(texts, folder, "--out", str(out)))
    assert done.exit_code == INTERRUPTED_CODE
    assert scores
    assert "Finished rows are in" in " ".join(done.stderr.split())


def test_the_theorem_is_printed_without_a_model() -> None:
    done = CliRunner().invoke(app, ["robustness", "--check-theorem", "--json", "-"])
    assert done.exit_code == 0, done.output
    checks = json.loads(done.stdout)["theorem"]
    assert len(checks) == 5
    assert all(c["moreau"] <= c["proved"] < c["plain"] for c in checks)
    table = CliRunner().invoke(app, ["robustness", "--check-theorem"]).stdout
    assert "not covered by the theorem" in table


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--ratios", "a"], "--ratios has 'a'"),
        (["--seeds", "0,x"], "--seeds has 'x'"),
        (["--methods", "wanda2"], "Unknown method"),
        (["--lora-size", "0"], "size is 0.0"),
        (["--set", "moreau.sigma=-1"], "sigma is -1"),
    ],
)
def test_wrong_options_of_the_command(more: list[str], words: str, texts: tuple[Path, Path], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*arguments(texts, tmp_path, "--out", str(tmp_path / "o.jsonl")), *more])
    assert done.exit_code == ERROR_CODE
    assert words in " ".join(done.stderr.split())


def test_the_check_of_the_theorem_takes_no_model() -> None:
    given = ["model", "--ppl", "x.txt", "--seeds", "0", "--out", "mine.jsonl"]
    done = CliRunner().invoke(app, ["robustness", "--check-theorem", *given])
    assert done.exit_code == ERROR_CODE
    said = " ".join(done.stderr.split())
    assert "MODEL, --seeds, --ppl, --out do nothing together with --check-theorem" in said


@pytest.mark.parametrize("out", [".", "", os.devnull])
def test_rows_need_a_file_of_their_own(out: str, texts: tuple[Path, Path], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, arguments(texts, tmp_path, "--out", out))
    assert done.exit_code == ERROR_CODE
    said = " ".join(done.stderr.split())
    assert "is a folder; name a file" in said or "is no regular file" in said


def test_a_model_is_needed() -> None:
    done = CliRunner().invoke(app, ["robustness"])
    assert done.exit_code == ERROR_CODE
    assert "--check-theorem" in done.stderr
