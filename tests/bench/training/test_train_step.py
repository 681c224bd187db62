"""The whole-step bench at toy size: three implementations of each form, timed and weighed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.training import step_parts, train_step
from bench.training.step_parts import BACKWARD, COPY, FORWARD, NORM, OPTIMIZER, PARTS, PENALTY, REST, TEACHER
from bench.training.train_step import FORMS, FULL, LABELS, LEAN, PLAIN, PLAIN_NARROW
from pyprune.data.tokens import IGNORED, Batch
from tests._support.compiled import graphs, only_traced
from tests._support.tokenizer import tiny_tokenizer

SHAPES = LlamaConfig(
    vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=21, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip


def test_every_form_is_timed_and_weighed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = AutoModelForCausalLM.from_config(SHAPES)
    monkeypatch.setattr(train_step, "the_model", lambda folder: ("tiny", model, None))
    monkeypatch.setattr(train_step, "PROFILED", 1)
    path = tmp_path / "steps.jsonl"
    train_step.main(["--batch", "2", "--length", "16", "--repeats", "2", "--jsonl", str(path)])
    records = [json.loads(line) for line in path.read_text().splitlines()]
    names = [PLAIN, FULL, LEAN]
    assert [(r["op"], r["implementation"]) for r in records] == [(LABELS[f], n) for f in FORMS for n in names]
    assert all(record["samples"] == 2 for record in records)
    peaks = {(r["op"], r["implementation"]): r["peak_bytes"] for r in records}
    for form in ("dress", "elder", "distil"):
        assert peaks[LABELS[form], LEAN] < 0.6 * peaks[LABELS[form], PLAIN]
    printed = capsys.readouterr().out
    assert "tokens/s" in printed
    train_step.main(["--only-table", "--jsonl", str(path)])
    again = capsys.readouterr().out
    assert [line for line in again.splitlines() if line.startswith("| ") and line not in printed] == []
    assert again.count(LABELS["lora"]) == 2 * len(names), "times and parts"
    parts = {(r["op"], r["implementation"]): r["parts_ms"] for r in records}
    for (op, name), found in parts.items():
        assert sorted(found) == sorted(PARTS)
        taken = {part for part, milliseconds in found.items() if milliseconds > 0}
        expected = {FORWARD, BACKWARD, OPTIMIZER, REST}
        expected |= {TEACHER} if op == LABELS["distil"] else set()
        expected |= {COPY, PENALTY} if name != PLAIN else set()
        expected |= {PENALTY} if op == LABELS["dress"] else set()
        assert taken == expected | (set() if name == LEAN else {NORM}), (op, name)


def test_the_memory_of_recipes_is_predicted_without_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_step, "LLAMA_2", {"tiny": SHAPES})
    monkeypatch.setattr(train_step, "RECIPES", ("llama-7b-moreau",))
    train_step.main(["--recipes"])
    printed = capsys.readouterr().out
    assert "llama-7b-moreau, LLaMA-2-tiny" in printed
    assert "| recover.train | full | 4 x 256 tokens |" in printed


def test_a_part_within_another_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    class Owner:
        def outer(self) -> None:
            clock[0] += 20
            self.inner()
            clock[0] += 3

        def inner(self) -> None:
            clock[0] += 80

    def step() -> None:
        clock[0] += 1
        owner.outer()

    monkeypatch.setattr(step_parts._Stopwatch, "_now", lambda _: clock[0])
    owner = Owner()
    watched = [(owner, "outer", BACKWARD), (owner, "inner", OPTIMIZER)]
    found = step_parts.time_parts(step, watched, 2, torch.device("cpu"))
    taken = {part: milliseconds for part, milliseconds in found.items() if milliseconds}
    assert taken == {BACKWARD: 23.0, OPTIMIZER: 80.0, REST: 1.0}
    assert vars(owner) == {}, "it is as it was"


def test_what_does_not_fit_alone_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ratios are then to the plain loop that fits."""
    real = train_step.contender

    def small(name: str, *args: Any) -> Any:
        if name in (PLAIN, FULL):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(name, *args)

    monkeypatch.setattr(train_step, "contender", small)
    path = tmp_path / "steps.jsonl"
    options = ["--shapes", "tiny", "--batch", "1", "--length", "16", "--repeats", "1", "--forms", "dress"]
    train_step.main([*options, "--jsonl", str(path)])
    records = {r["implementation"]: r for r in map(json.loads, path.read_text().splitlines())}
    assert list(records) == [PLAIN, PLAIN_NARROW, FULL, LEAN]
    assert {name for name, record in records.items() if record.get("failed") == "out of memory"} == {PLAIN, FULL}
    assert records[FULL]["peak_bytes"] is None
    assert records[FULL]["predicted_bytes"] > 2 * records[LEAN]["predicted_bytes"]
    first, second = capsys.readouterr().out.split("| sum |")
    assert second.count("| DReSS") == 2
    lines = [line.split(" | ") for line in first.splitlines() if line.startswith("| DReSS")]
    faster = {line[1]: line[5] for line in lines}
    assert faster[PLAIN_NARROW] == "1.00"
    assert faster[PLAIN] == faster[FULL] == "-"
    assert float(faster[LEAN]) > 0


def test_padding_is_what_passes_hold_beyond_their_tokens() -> None:
    """Lengths 2, 8, 2, 8 in steps of four: in pairs of like length nothing is padded, in any order a half may be."""
    ids = torch.full((4, 10), IGNORED)
    for row, length in enumerate((2, 8, 2, 8)):
        ids[row, :length] = 5
    printed = train_step.padding_table(Batch.of(ids), 4)
    assert "4 records, steps of 4; 50.0% where all are as long as the cutoff" in printed
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith(("| 1", "| 2", "| 4"))]
    assert [row[:2] for row in rows] == [["1", "0.0%"], ["2", "0.0%"], ["4", "37.5%"]]
    assert rows[0][2] == "0.0%"
    assert rows[2][2] == "37.5%"


def test_padding_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    records = [{"instruction": f"say {i} " * (1 + i % 9), "output": "word " * (1 + i % 5)} for i in range(100)]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    monkeypatch.setattr(train_step, "the_model", lambda _: ("tiny", None, tiny_tokenizer()))
    train_step.main(["--padding", str(tmp_path / "records.jsonl")])
    assert "90 records, steps of 64" in capsys.readouterr().out


def test_passes_by_tokens_hold_no_more_of_them_and_every_record() -> None:
    ids = torch.full((6, 10), IGNORED)
    for row, length in enumerate((3, 9, 3, 5, 4, 9)):
        ids[row, :length] = row
    passes = train_step.split_by_tokens(Batch.of(ids), 12)
    assert [tuple(micro.ids.shape) for micro in passes] == [(3, 4), (1, 5), (1, 9), (1, 9)]
    assert [micro.ids[:, 0].tolist() for micro in passes] == [[0, 2, 4], [3], [1], [5]]


def test_ways_to_split_a_step_are_timed_in_turns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [{"instruction": f"say {i} " * (1 + i % 2), "output": "word " * (1 + i % 2)} for i in range(100)]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    model, path = AutoModelForCausalLM.from_config(train_step.SHAPES["tiny"]), tmp_path / "steps.jsonl"
    monkeypatch.setattr(train_step, "RECORDS_IN_A_PASS", (4, 16))
    monkeypatch.setattr(train_step, "TOKENS_IN_A_PASS", (8192,))
    monkeypatch.setattr(train_step, "the_model", lambda _: ("tiny", model, tiny_tokenizer()))
    options = ["--passes", str(tmp_path / "records.jsonl"), "--repeats", "1", "--jsonl", str(path)]
    train_step.main(options)
    printed = capsys.readouterr().out
    names = [json.loads(line)["implementation"] for line in path.read_text().splitlines()]
    ways = {"records": train_step.RECORDS_IN_A_PASS, "tokens": train_step.TOKENS_IN_A_PASS}
    assert names == [f"{number} {what}" for what, numbers in ways.items() for number in numbers]
    assert all(f"| {name} | " in printed for name in names)
    assert "| 4 records | 16 | " in printed


@pytest.mark.second
@pytest.mark.filterwarnings("default")  # torch's own, while it traces
def test_compiled_layers_are_timed_beside_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = AutoModelForCausalLM.from_config(SHAPES), tmp_path / "steps.jsonl"
    monkeypatch.setattr(train_step, "the_model", lambda folder: ("tiny", model, None))
    options = ["--compiled", "--forms", "lora", "--batch", "2", "--length", "16", "--repeats", "1"]
    before = graphs()
    with only_traced():
        train_step.main([*options, "--jsonl", str(path)])
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["implementation"] for r in records] == [PLAIN, FULL, LEAN, train_step.COMPILED]
    assert graphs() > before, "something was compiled"
