"""Interruptions: exit code 130, the output absent or whole, and the same command succeeds afterwards."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from pyprune.checkpoint.record import read_pruning_json
from tests.hostile._cases import BRIEF, Case
from tests.hostile._check import check_left, check_message, snapshot
from tests.hostile._server import Outcome, Run, Server

INTERVAL = "checkpoint_interval=1"
COMMANDS = {
    "export": "export pruned --out c",
    "prune": "prune dense --plan plan.json --out c --calibration text.txt --samples 8 --sequence-length 64 "
    "--set stages.before=[finetune] --set finetune.steps=12 --set finetune.batch_size=2 "
    f"--set finetune.micro_batch_size=1 --set finetune.{INTERVAL}",
    "recover": f"{BRIEF} --out c --set recover.train.steps=12 --set recover.train.{INTERVAL}",
}
"""Long enough to be interrupted: a fork of a process that has imported everything takes half a second for each."""
KILLS = {signal.SIGINT: 130, signal.SIGTERM: 130, signal.SIGKILL: -signal.SIGKILL}


def whole(folder: Path) -> bool:
    """Whether the output is there, and then it must be complete."""
    if not (folder / "c").exists():
        return False
    read_pruning_json(folder / "c", verify_files=True)
    return True


def assert_interrupted(outcome: Outcome, number: int, folder: Path, before: dict[str, str]) -> None:
    """The command was interrupted, or had finished; what is left is nothing, or what the message says."""
    done = whole(folder)
    assert outcome.code in ((0, KILLS[number]) if done else (KILLS[number],)), outcome.stderr
    if number == signal.SIGKILL:
        return
    assert not done or not (folder / ".c.work").exists()
    check_message(outcome, Case("", ""))
    if not done:
        check_left(outcome, folder, before)


def assert_goes_on(server: Server, folder: Path, command: str, before: dict[str, str]) -> None:
    """Run the command again, resumed where something was kept, and compare with a run that nothing interrupted."""
    reference = folder.with_name("reference")
    work = folder / ".c.work"
    if not whole(folder) or work.exists():
        again = ["--overwrite"] if whole(folder) else []  # killed after the renaming, before its work folder went
        kept = any(work.rglob("state.json")) or (work / "decision.json").exists()
        kept = kept and (work / "run.json").exists()  # goes first when a finished run removes its work folder
        (outcome,) = server.run(
            Run([*command.split(), *again, *(["--resume"] if kept else [])], str(folder), seconds=60)
        )
        assert outcome.code == 0, outcome.stderr
    assert whole(folder)
    left = {name for name in snapshot(folder).keys() - before.keys() if not (name == "c" or name.startswith("c/"))}
    assert left == set()
    (outcome,) = server.run(Run([*command.replace("--out c", "--out d").split()], str(folder), seconds=60))
    assert outcome.code == 0, outcome.stderr
    (folder / "d").rename(reference)
    found, expected = (load_file(place / "model.safetensors") for place in (folder / "c", reference))
    assert found.keys() == expected.keys()
    assert all(found[name].equal(weight) for name, weight in expected.items())


@pytest.mark.parametrize(
    ("name", "number", "after"),
    [
        ("export", signal.SIGTERM, 0.05),
        ("export", signal.SIGKILL, 0.08),
        ("prune", signal.SIGINT, 0.25),
        ("prune", signal.SIGTERM, 0.35),
        ("prune", signal.SIGKILL, 0.3),
        ("recover", signal.SIGTERM, 0.4),
        *(
            pytest.param(name, number, random.Random(f"{name} {number} {i}").uniform(0.03, 0.8), marks=pytest.mark.fuzz)
            for name in COMMANDS
            for number in KILLS
            for i in range(15)
        ),
    ],
)  # fmt: skip
def test_an_interrupted_command_leaves_what_it_says(
    server: Server, folder: Path, name: str, number: signal.Signals, after: float
) -> None:
    before = snapshot(folder)
    (outcome,) = server.run(Run(COMMANDS[name].split(), str(folder), seconds=60, signals=[(after, number)]))
    assert_interrupted(outcome, number, folder, before)
    assert_goes_on(server, folder, COMMANDS[name], before)


@pytest.mark.parametrize("name", ["export", "prune"])
def test_two_at_once_to_one_place(server: Server, folder: Path, name: str) -> None:
    """Exactly one succeeds; without --overwrite, so the other finds the work folder held, or the output there."""
    before = snapshot(folder)
    outcomes = server.run(*[Run(COMMANDS[name].split(), str(folder), seconds=60)] * 2)
    assert sorted(outcome.code for outcome in outcomes) == [0, 2], [o.stderr for o in outcomes]
    for outcome in outcomes:
        check_message(outcome, Case("", ""))
    assert whole(folder)
    assert all(name == "c" or name.startswith("c/") for name in snapshot(folder).keys() - before.keys())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("after", [0.0, *(pytest.param(i / 10, marks=pytest.mark.fuzz) for i in range(1, 50, 2))])
def test_an_interruption_while_torch_is_imported(folder: Path, number: signal.Signals, after: float) -> None:
    """A process of its own, so many seconds after it began to load torch's libraries."""
    before = snapshot(folder)
    command = [sys.executable, "-m", "pyprune", *COMMANDS["export"].split()]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    ) as process:
        while process.poll() is None and "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
            time.sleep(0.005)
        time.sleep(after)
        process.send_signal(number)
        printed, said = process.communicate(timeout=60)
    outcome = Outcome(process.returncode, printed, said, after, 0)
    assert_interrupted(outcome, number, folder, before)


@pytest.mark.fuzz
@pytest.mark.parametrize("size", [2_000, 3_000, 5_000, 10_000, 30_000, 60_000, 100_000, 200_000, 300_000])
@pytest.mark.parametrize("name", list(COMMANDS))
def test_a_full_disk_at_every_moment(server: Server, folder: Path, name: str, size: int) -> None:
    """A limit on the size of files fails what a full disk would, at another moment for each size; messages fit."""
    before = snapshot(folder)
    (outcome,) = server.run(Run(COMMANDS[name].split(), str(folder), seconds=60, file_bytes=size))
    done = whole(folder)
    assert outcome.code == (0 if done else 2), outcome.stderr
    check_message(outcome, Case("", "", lines=3))
    if not done:
        check_left(outcome, folder, before)
