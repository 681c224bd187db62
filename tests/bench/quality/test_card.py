"""The card of names: a row is a command as a user types it, and its ratio to the best row is paired."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.quality.__main__ import main
from bench.quality.card import CUTS, GRID
from bench.quality.grid import show
from tests._support.paths import REPO
from tests._support.text import write_text

FILES = ("wikitext2_raw/test.txt", "books/pride_and_prejudice.txt", "c4_sample/valid.jsonl", "c4_sample/train.jsonl.gz")


def test_every_row_is_a_command_that_the_package_takes() -> None:
    import shlex

    from pyprune.run.recipe import build_config

    for cut in CUTS.values():
        assert set(cut.seeded) <= set(cut.rows)
        for words in cut.rows.values():
            given = shlex.split(f"{words} {cut.goal}")
            pairs = list(zip(given[::2], given[1::2], strict=True))
            named = {name.lstrip("-"): value for name, value in pairs if name != "--set"}
            options = {"method": named.get("method"), "ratio": float(named["ratio"])}
            settings = [value for name, value in pairs if name == "--set"]
            assert build_config(preset=named.get("preset"), options=options, settings=settings).ratio > 0


def test_the_dense_model_is_trained_as_the_rows_are() -> None:
    import shlex

    from pyprune.run.recipe import build_config, build_recovery

    cut = CUTS["experts-50-trained"]
    settings, asked = (shlex.split(words)[1::2] for words in (cut.control, cut.goal))
    trained = build_config(preset="reap-trained", options={"ratio": 0.5}, settings=asked[1:])
    assert shlex.split(cut.control)[:2] == ["--teacher", "MODEL"]
    assert build_recovery(settings=settings[1:]).recover == trained.recover


@pytest.mark.second
def test_a_row_is_run_measured_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in FILES[:2]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_text(tmp_path / name, words=4000)
    (tmp_path / FILES[2]).parent.mkdir()
    words = (tmp_path / FILES[0]).read_text()
    (tmp_path / FILES[2]).write_text(json.dumps({"text": words}) + "\n")
    out, records = tmp_path / "out", tmp_path / "card.jsonl"
    arguments = ["card", "--cut", "20", "--row", "random", "--calibration", "mixture", "--seeds", "0"]
    arguments += ["--tokens", "2048", "--data", str(tmp_path), "--out", str(out), "--jsonl", str(records)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "`pyprune prune smollm2 --method random --ratio 0.2 --samples 16 --sequence-length 512" in printed
    dense, cut = (json.loads(line) for line in records.read_text().splitlines())
    assert cut["figures"]["parameters"] < dense["figures"]["parameters"]
    assert all(cut["figures"]["perplexity"][text] > dense["figures"]["perplexity"][text] for text in ("novel", "web"))
    assert cut["figures"]["peak_bytes"] > 5e8
    assert len(list(out.glob("*.npz"))) == 2
    better = json.loads(json.dumps(cut))
    better["case"]["row"] = "better"
    for text in better["figures"]["pieces"]:
        better["figures"]["pieces"][text] = [piece - 0.5 for piece in better["figures"]["pieces"][text]]
        better["figures"]["perplexity"][text] *= 0.6
    table = show([dense, cut, better], GRID.layout)
    assert "times better" in table
    assert "1.65 (1.65 to 1.65)" in table


def test_ratios_compare_rows_of_one_seed() -> None:
    """Rows of one seed read the same text, and only their pieces are pairs."""
    lines = (REPO / "bench" / "results" / "card.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["case"]["cut"].startswith("20 %")]
    seeds = [row["case"]["seed"] for row in rows if (row["case"]["row"], row["case"]["calibration"]) == ("obs", "web")]
    assert len(seeds) == 3
    line = next(line for line in show(rows, GRID.layout).splitlines() if line.startswith("| obs | web |"))
    assert line.count("1.00 (1.00 to 1.00)") == 3
    assert "(36.3 to 38.2)" in line
