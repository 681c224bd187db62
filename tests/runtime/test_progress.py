"""How far long steps are: lines in a log, and no frames of bars; messages next to the bars of other libraries."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tqdm.auto import tqdm

from pyprune.runtime import progress
from pyprune.runtime.progress import LogLines, end_bars, say, track


class Clock:
    """A clock that stands still between items."""

    now = 1000.0

    def tick(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(progress.time, "perf_counter", lambda: found.now)
    return found


def items(clock: Clock, count: int, seconds: float) -> Iterator[int]:
    for number in range(count):
        yield number
        clock.tick(seconds)


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_long_step_says_how_far_it_is_and_what_is_left(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track(items(clock, 30, 60), "reconstructing layers", total=30)) == list(range(30))
    said = lines_of(capsys)
    # The time of an item passes when the next one is asked for.
    assert said[0] == "reconstructing layers: 2 of 30, about 14 min left"
    assert said[14] == "reconstructing layers: 16 of 30, about 13 min left"
    assert said[-1] == "reconstructing layers: 30 done"
    assert len(said) == 30


def test_many_quick_items_have_a_line_for_every_tenth_or_minute(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    list(track(items(clock, 2000, 0.1), "short", total=2000))  # 200 s: tenths of 20 s
    short = lines_of(capsys)
    assert len(short) == 11
    list(track(items(clock, 36_000, 0.1), "long", total=36_000))  # an hour: tenths of 6 min
    assert 55 <= len(lines_of(capsys)) <= 62
    list(track(items(clock, 200, 0.2), "forty seconds", total=200))  # tenths of 4 s, lines of 10
    assert len(lines_of(capsys)) == 4


def test_what_takes_under_two_seconds_is_silent(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    list(track(items(clock, 10, 0.1), "quick", total=10))
    assert lines_of(capsys) == []
    list(track(items(clock, 10, 0.3), "not so quick", total=10))
    assert lines_of(capsys) == ["not so quick: 10 done"]


def test_without_a_total_there_is_no_end_to_tell(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    list(track(items(clock, 5, 15), "reading"))
    assert lines_of(capsys) == [*(f"reading: {n}" for n in (2, 3, 4, 5)), "reading: 5 done"]


def test_facts_and_the_name_of_a_part_stand_in_the_line(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    lines = LogLines("recover", 100, "step")
    clock.tick(30)
    lines.update(10, ", loss 2.5")
    lines.end(100, ", loss 2.1")
    assert lines_of(capsys) == [
        "recover: step 10 of 100, about 4 min left, loss 2.5",
        "recover: step 100 done, loss 2.1",
    ]


def test_a_bar_inside_a_bar_shows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich takes a second live display for a mistake."""
    from rich.console import Console

    terminal = Console(stderr=True, force_terminal=True)
    monkeypatch.setattr(progress, "console", lambda: terminal)
    assert [(a, b) for a in track([1, 2], "outer") for b in track([3, 4], "inner")] == [(1, 3), (1, 4), (2, 3), (2, 4)]


FOREIGN = """
import time
from pyprune.runtime import progress
progress.GAP_S = 0.2
progress.bars_as_lines()
progress.bars_as_lines()
from tqdm.auto import tqdm
from huggingface_hub.utils import tqdm as of_hub
for _ in tqdm(range(20), desc="Loading weights"):
    time.sleep(0.05)
with of_hub(total=4_000_000, unit="B", unit_scale=True, desc="model.safetensors", disable=None) as bar:
    for _ in range(20):
        time.sleep(0.05)
        bar.update(200_000)
for _ in tqdm(range(3), desc="quick"):
    pass
for _ in tqdm(range(20), desc="off", disable=True):
    time.sleep(0.05)
"""


@pytest.mark.process
def test_bars_of_other_libraries_are_lines_of_a_log() -> None:
    done = subprocess.run([sys.executable, "-c", FOREIGN], capture_output=True, text=True, check=True)
    said = done.stderr.splitlines()
    assert "\r" not in done.stderr
    assert "%|" not in done.stderr
    weights = [line for line in said if line.startswith("Loading weights: ")]
    assert 3 <= len(weights) <= 6
    assert all(" of 20, under a minute left" in line for line in weights)
    download = [line for line in said if line.startswith("model.safetensors: ")]
    assert 3 <= len(download) <= 6
    assert all("MB of 4.00MB, under a minute left" in line or "kB of 4.00MB" in line for line in download)
    assert len(said) == len(weights) + len(download)


@pytest.mark.process
@pytest.mark.parametrize("method", ["taylor", "shortgpt"])
def test_a_command_in_a_log_draws_no_bar(method: str, tmp_path: Any) -> None:
    from tests._support.models import tiny_model
    from tests._support.text import write_model, write_text

    folder, text = write_model(tiny_model("llama"), tmp_path / "m"), write_text(tmp_path / "t.txt")
    words = ["prune", folder, "--method", method, "--ratio", "0.3", "--calibration", text, "--samples", "4"]
    words += ["--sequence-length", "32", "--set", "cut.reconstruct=least_squares", "--out", tmp_path / "out"]
    done = subprocess.run(
        [sys.executable, "-m", "pyprune", *map(str, words)], capture_output=True, text=True, check=True
    )
    assert "%|" not in done.stderr
    assert "\r" not in done.stderr


def test_what_is_said_after_open_bars_has_a_line_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    bars = [tqdm(total=3, desc="Loading weights"), tqdm(total=3, desc="Loading more")]
    end_bars()
    say("Interrupted. Nothing was changed.")
    assert all(bar.disable for bar in bars)
    assert capfd.readouterr().err.splitlines()[-1] == "Interrupted. Nothing was changed."
