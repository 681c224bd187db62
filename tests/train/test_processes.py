"""Several processes of torchrun train, recover and reconstruct together as one does."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pyprune.checkpoint.load import ModelSource
from pyprune.checkpoint.record import read_pruning_json
from pyprune.errors import CheckpointError, ConfigError, DataError
from pyprune.families import family_for
from pyprune.probe.hooks import LayerHooks
from pyprune.run.source import HostCopy, check_alike, report_copies
from pyprune.runtime import processes
from pyprune.runtime.processes import Division
from pyprune.train.memory import training_memory
from pyprune.train.objective import Objective
from pyprune.train.sharded import Sharded, check_shares
from tests._support.cli import run
from tests._support.models import tiny_model
from tests._support.text import write_model, write_text
from tests.train import processes_child
from tests.train.processes_child import CASES, MEASURED, REMOVED, SENT, STORED
from tests.train.test_memory import LENGTH, shapes

CHILD = Path(processes_child.__file__)
STATES = ("interrupted", "resumed", "lean-interrupted", "lean-resumed")
GATES = "sent-gates"
ON_HOST = [name for name in CASES if name.startswith((STORED, SENT)) and name != GATES]
EQUAL = [name for name in CASES if name not in (*STATES, *ON_HOST, GATES, "lean", "memory", "dropout")]
THREE = ("lora", "reconstruct-one-judge", "anneal-early-stop", "dress-one-half")
"""Cases of which three processes have parts of other sizes, or none."""
ROUNDING = 1e-3
"""Of the change that training makes: sums over processes are taken in another order, and Adam makes whole steps of
gradients that are nearly zero."""


def torchrun(number: int, *arguments: str | Path) -> list[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
    return [sys.executable, *launch, *map(str, arguments)]


def launched(number: int, out: Path, *names: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(torchrun(number, CHILD, out, *names), capture_output=True, text=True, timeout=600)


def read(out: Path, name: str, process: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(out / f"{name}-{process}.pt", weights_only=False)
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process reaches."""
    out = tmp_path_factory.mktemp("one")
    processes_child.results(out, [name for name in CASES if name not in STATES])
    return out


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes reach; their interrupted runs have left states."""
    out = tmp_path_factory.mktemp("two")
    result = launched(2, out, *(name for name in CASES if not name.endswith("resumed")))
    assert result.returncode == 0, result.stderr[-4000:]
    return out


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Of all weights together, l2."""
    assert a.keys() == b.keys()
    return sum(float((a[name].float() - b[name].float()).square().sum()) for name in a) ** 0.5


def untrained() -> dict[str, Tensor]:
    return {name: p.detach() for name, p in tiny_model("llama").named_parameters()}


def assert_reached(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same weights, by how far they are from where they began."""
    assert distance(found, expected) < ROUNDING * distance(expected, untrained())


@pytest.mark.second
@pytest.mark.parametrize("name", EQUAL)
def test_two_processes_reach_what_one_does(name: str, one: Path, two: Path) -> None:
    expected, found, other = read(one, name), read(two, name), read(two, name, process=1)
    assert largest_difference(found["weights"], other["weights"]) == 0
    assert distance(expected["weights"], untrained()) > 0.1, "trained"
    assert_reached(found["weights"], expected["weights"])
    before, after = expected["report"].get("history", []), found["report"].get("history", [])
    for mine, theirs in zip(before, after, strict=True):
        for value in ("lm_loss", "penalty", "grad_norm"):
            assert theirs[value] == pytest.approx(mine[value], rel=1e-4), value
        assert theirs["parts"] == pytest.approx(mine["parts"], rel=1e-4)
    assert found["report"].get("tokens") == expected["report"].get("tokens")
    pairs = zip(expected["report"].get("validation", []), found["report"].get("validation", []), strict=True)
    assert all(a == pytest.approx(b, rel=1e-5) for a, b in pairs)


def held_bytes(weights: dict[str, Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in weights.values())


@pytest.mark.second
@pytest.mark.parametrize("name", ON_HOST)
def test_weights_on_the_host_are_held_once_and_the_first_process_has_the_result(
    name: str, one: Path, two: Path
) -> None:
    expected, found, other = read(one, name), read(two, name), read(two, name, process=1)["weights"]
    assert distance(expected["weights"], untrained()) > 0.1, "trained"
    assert_reached(found["weights"], expected["weights"])
    losses = [report["history"][-1]["lm_loss"] for report in (expected["report"], found["report"])]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    if name == "stored-lora":
        assert largest_difference(other, untrained()) == 0, "what is frozen stays, and adapters are not merged into it"
    else:
        assert {n: t.shape for n, t in other.items()} == {n: t.shape for n, t in found["weights"].items()}
        assert held_bytes(other) <= 4 * len(other), "what was trained is in the first alone"


@pytest.mark.second
def test_two_processes_learn_the_gates_that_one_does(one: Path, two: Path) -> None:
    """The gates are none of the model's weights: every process has them all, and the sums of their gradients."""
    expected, *found = read(one, GATES), read(two, GATES), read(two, GATES, process=1)
    assert expected["report"]["removed"] == found[0]["report"]["removed"]
    assert found[0]["report"]["rounds"] == found[1]["report"]["rounds"], "the same in both, bit for bit"
    for mine, theirs in zip(expected["report"]["rounds"], found[0]["report"]["rounds"], strict=True):
        assert max(mine["gates"]) - min(mine["gates"]) > 0.01, "they moved"
        assert theirs["gates"] == pytest.approx(mine["gates"], abs=1e-5)
    steps = zip(*(report["train"]["history"] for report in (expected["report"], found[0]["report"])), strict=True)
    for mine, theirs in steps:
        for value in ("lm_loss", "penalty", "grad_norm"):
            assert theirs[value] == pytest.approx(mine[value], rel=1e-4), value
    assert largest_difference(found[0]["weights"], untrained()) == 0, "the model is where it was"
    assert held_bytes(found[1]["weights"]) <= 4 * len(found[1]["weights"])


def test_a_teacher_that_is_divided_is_held_in_parts() -> None:
    model, teacher = shapes(torch.float32), shapes(torch.float32)
    options: dict[str, Any] = {"device": torch.device("cpu"), "teacher": teacher}
    whole = training_memory(model, MEASURED, Objective(), LENGTH, **options, shares=2).teacher
    part = training_memory(
        shapes(torch.float32), MEASURED, Objective(), LENGTH, **options, teacher_in="shares", shares=64
    )
    rest = sum(p.nbytes for name, p in shapes(torch.float32).named_parameters() if ".layers." not in name)
    assert rest < part.teacher < 0.8 * whole


@pytest.mark.process
@pytest.mark.second
def test_recover_of_two_writes_what_one_writes(tmp_path: Path) -> None:
    """Through the command: both map the checkpoint and its teacher, and the first writes the result."""
    dense, text = write_model(tiny_model("llama"), tmp_path / "dense"), write_text(tmp_path / "text.txt", words=8000)
    pruned, alone, together = (tmp_path / name for name in ("pruned", "alone", "together"))
    options = {"steps": 6, "batch_size": 4, "micro_batch_size": 2, "dtype": "float32", "learning_rate": 1e-2}
    sets = [part for name, value in options.items() for part in ("--set", f"recover.train.{name}={value}")]
    sets += ["--keep-adapter", "--set", "recover.distill.alpha=0.5", "--teacher", str(dense)]
    small = ["--samples", "16", "--sequence-length", "16", "--data", text]
    for arguments in (
        ["prune", dense, "--method", "last", "--ratio", "0.5", "--out", pruned],
        ["recover", pruned, "--out", alone, *small, *sets],
    ):
        assert not run(*arguments).exit_code
    command = torchrun(2, "-m", "pyprune", "recover", pruned, "--out", together, *small, *sets)
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-4000:]
    assert "copy of its own" not in found.stderr, "in the stored dtype they share the pages"
    assert (together / "adapter" / "adapter_model.safetensors").is_file()
    before, *after = (load_file(folder / "model.safetensors") for folder in (pruned, alone, together))
    assert largest_difference(before, after[0]) > 1e-2, "trained"
    assert largest_difference(*after) < 1e-4


@pytest.mark.process
@pytest.mark.second
def test_reconstruct_of_two_writes_what_one_writes(tmp_path: Path) -> None:
    """Through the command: sequences are divided, and the first process writes what both have solved, gains too."""
    dense, text = write_model(tiny_model("gemma3"), tmp_path / "dense"), write_text(tmp_path / "text.txt", words=8000)
    pruned, alone, together = (tmp_path / name for name in ("pruned", "alone", "together"))
    assert not run("prune", dense, "--method", "last", "--ratio", "0.5", "--out", pruned).exit_code
    options = ["--dense", dense, "--calibration", text, "--samples", "16", "--sequence-length", "32"]
    assert not run("reconstruct", pruned, "--out", alone, *options).exit_code
    command = torchrun(2, "-m", "pyprune", "reconstruct", pruned, "--out", together, *options)
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-4000:]
    before, *after = (load_file(folder / "model.safetensors") for folder in (pruned, alone, together))
    assert largest_difference(before, after[0]) > 1e-3, "solved"
    gain = "model.layers.0.post_feedforward_layernorm.weight"
    assert not torch.equal(before[gain], after[0][gain])
    assert largest_difference(*after) < 1e-5


@pytest.mark.second
def test_sums_of_two_agree_to_the_last_bits(one: Path, two: Path) -> None:
    """Two micro batches of one process, or one of each of two: the same products, and a sum of two. A library that
    divides a product by the number of its threads may still round it otherwise."""
    assert largest_difference(read(one, "sgd")["weights"], read(two, "sgd")["weights"]) < 3e-7
    assert largest_difference(read(one, "reconstruct")["weights"], read(two, "reconstruct")["weights"]) < 1e-6


@pytest.mark.second
def test_penalised_channels_shrink_in_whichever_process_they_lie(two: Path) -> None:
    dense = tiny_model("llama").model.embed_tokens.weight.detach()
    found = read(two, "dress-prox")["weights"]["model.embed_tokens.weight"]
    sizes = found.norm(dim=0) / dense.norm(dim=0)
    others = [i for i in range(48) if i not in REMOVED]
    assert float(sizes[REMOVED].max()) < 0.9 < float(sizes[others].min())


@pytest.mark.second
def test_penalised_layers_write_less_in_whichever_process_their_weights_lie(two: Path) -> None:
    dense = branches(untrained())
    sizes = [own / before for own, before in zip(branches(read(two, "elder")["weights"]), dense, strict=True)]
    assert max(sizes[1], sizes[2]) < 0.95 * min(sizes[0], sizes[3]), sizes


def branches(weights: dict[str, Tensor]) -> list[float]:
    """What every layer adds to the stream, l2 over the text of the cases."""
    model = tiny_model("llama")
    model.load_state_dict(weights, strict=False)
    found = [0.0] * model.config.num_hidden_layers

    def add(index: int, before: Tensor, after: Tensor) -> None:
        found[index] = float((after - before).norm())

    LayerHooks(model.model.layers, range(len(found)), add)
    with torch.no_grad():
        model(input_ids=processes_child.SAMPLES, use_cache=False)
    return found


@pytest.mark.second
def test_dropout_of_two_draws_masks_of_its_own(one: Path, two: Path) -> None:
    assert distance(read(one, "dropout")["weights"], read(two, "dropout")["weights"]) > 1e-4
    losses = [read(out, "dropout")["report"]["history"][-1]["lm_loss"] for out in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.second
def test_lean_training_of_two_is_as_good(one: Path, two: Path) -> None:
    """Stochastic rounding draws other bits for parts, so that the weights differ."""
    alone, together = (read(out, "lean")["report"]["history"] for out in (one, two))
    assert together[0]["lm_loss"] == pytest.approx(alone[0]["lm_loss"], rel=1e-3)
    assert together[-1]["lm_loss"] < together[0]["lm_loss"] - 0.1
    assert together[-1]["lm_loss"] == pytest.approx(alone[-1]["lm_loss"], rel=0.02)


@pytest.mark.second
def test_what_each_process_holds_is_predicted(one: Path, two: Path) -> None:
    model = shapes(torch.float32)
    alone, together = (read(out, "memory")["report"]["peak"] for out in (one, two))
    found = training_memory(model, MEASURED, Objective(), LENGTH, device=torch.device("cpu"), shares=2)
    assert together < 0.8 * alone
    assert found.total == pytest.approx(together, rel=0.1)


def copied_states(two: Path, out: Path) -> Path:
    for name in ("states", "lean-states"):
        shutil.copytree(two / name, out / name)
    return out


@pytest.mark.second
def test_an_interrupted_run_goes_on_in_one_process(two: Path, tmp_path: Path) -> None:
    out = copied_states(two, tmp_path)
    expected = _uninterrupted()
    processes_child.results(out, ["resumed"])
    found = read(out, "resumed")
    assert found["report"]["resumed_from"] == 4
    assert_reached(found["weights"], expected)
    with pytest.raises(CheckpointError, match="8-bit moments of a lean training in 2 processes"):
        processes_child.results(out, ["lean-resumed"])


@pytest.mark.process
@pytest.mark.second
def test_three_processes_do_the_same_and_go_on_from_two(two: Path, one: Path, tmp_path: Path) -> None:
    out = copied_states(two, tmp_path)
    result = launched(3, out, *THREE, "resumed")
    assert result.returncode == 0, result.stderr[-4000:]
    for name in THREE:
        assert_reached(read(out, name, process=2)["weights"], read(one, name)["weights"])
    found = read(out, "resumed", process=2)
    assert found["report"]["resumed_from"] == 4
    assert_reached(found["weights"], _uninterrupted())


@pytest.mark.process
@pytest.mark.second
def test_8_bits_go_on_in_as_many_processes_bit_for_bit(two: Path, tmp_path: Path) -> None:
    out = copied_states(two, tmp_path)
    result = launched(2, out, "lean-resumed")
    assert result.returncode == 0, result.stderr[-4000:]
    assert largest_difference(read(out, "lean-resumed")["weights"], read(two, "lean")["weights"]) == 0


def _uninterrupted() -> dict[str, Tensor]:
    model, _ = processes_child._trained(processes_child.ADAM)
    return {name: p.detach() for name, p in model.named_parameters()}


LEARNING_RATE = 1e-2


def prune_arguments(dense: Path, text: Path, out: Path, *more: str) -> list[str]:
    options = {
        "steps": 40, "batch_size": 6, "micro_batch_size": 2, "dtype": "float32", "learning_rate": LEARNING_RATE,
        "checkpoint_interval": 2,
    }  # fmt: skip
    sets = [part for name, value in options.items() for part in ("--set", f"recover.train.{name}={value}")]
    # States at every step: where every process learns the gates for itself, those of two would be in each other's way.
    gates = {
        "gates.first_round_steps": 4, "gates.round_steps": 2, "gates.batch_size": 6, "train.checkpoint_interval": 1,
    }  # fmt: skip
    sets += [part for name, value in gates.items() for part in ("--set", f"elder.{name}={value}")]
    base = ["-m", "pyprune", "prune", dense, "--method", "elder", "--ratio", "0.5", "--calibration", text, "--out", out]
    sets += ["--set", "stages.after=[recover]", "--set", "cut.reconstruct=none"]
    small = ["--samples", "16", "--sequence-length", "16"]
    return [*map(str, base), *small, *sets, *more]


@pytest.fixture(scope="module")
def pruned_alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A dense model, a text, and what one process makes of them."""
    folder = tmp_path_factory.mktemp("alone")
    dense, text = write_model(tiny_model("llama"), folder / "dense"), write_text(folder / "text.txt", words=8000)
    found = run(*prune_arguments(dense, text, folder / "alone")[2:])
    assert not found.exit_code, found.output
    return dense, text, folder / "alone"


@pytest.mark.process
@pytest.mark.second
@pytest.mark.parametrize("placement", ["device", "host"])
def test_a_killed_process_stops_all_and_the_run_goes_on_in_another_number(
    placement: str, pruned_alone: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    """Through the command: one of two processes is killed, and three continue to what one reaches at once."""
    dense, text, alone = pruned_alone
    together = tmp_path / "together"
    arguments = prune_arguments(dense, text, together, "--placement", placement)
    with subprocess.Popen(torchrun(2, *arguments), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        started = _kill_one(run.pid, tmp_path)
        run.communicate(timeout=120)
        assert run.returncode != 0
    assert len(started) == 2
    assert not any(map(_runs, started)), "the other stops, too"
    assert not together.exists()
    resumed = subprocess.run(torchrun(3, *arguments, "--resume"), capture_output=True, text=True, timeout=300)
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    assert resumed.stdout.count("share removed") == 1, "one process prints"
    (stage,) = read_pruning_json(together).provenance["report"]["stages"]
    assert stage["action"] == "recover"
    assert 2 <= stage["resumed_from"] < 40, "it was killed while divided weights were trained"
    weights = [load_file(folder / "model.safetensors") for folder in (alone, together)]
    # A twentieth of one step: where squared gradients are nearly zero, Adam divides by what the order of a sum decides,
    # and that differs between CPUs. A state that is lost or read twice makes steps of difference.
    assert largest_difference(*weights) < LEARNING_RATE / 20


def _kill_one(parent: int, folder: Path) -> list[int]:
    """SIGKILL for one of the processes that torchrun started, while they train weights that are divided.

    Returns their ids, that one's last.
    """
    deadline = time.monotonic() + 200
    # What learns gates writes states deeper; parts of weights are written where several train them.
    while not list(folder.glob(".together*/after-0-recover/step-*/shards")):
        assert time.monotonic() < deadline, "no state was written"
        time.sleep(0.02)
    children = subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True, check=True).stdout.split()
    subprocess.run(["kill", f"-{signal.SIGKILL.value}", children[-1]], check=True)
    return list(map(int, children))


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


HOST_RUNS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    # Gates and regularisation before the cut, all weights against the dense model after it.
    "elder": (
        ("elder", "recover"),
        {
            "stages.before": "[regularise]", "stages.after": "[recover]", "cut.reconstruct": "none", "verify": "true",
            "elder.gates.batch_size": 4,
            "elder.gates.first_round_steps": 4, "elder.gates.round_steps": 2, "elder.schedule": "published",
            "elder.penalty_weight": 0.05, "recover.distill.hidden": 0.5, "recover.distill.teacher_dtype": "bfloat16",
        },
    ),
    # Decided and reconstructed from the files by the first process, adapters after the cut, from a teacher that each
    # process reads by itself.
    "shortgpt": (
        ("recover",),
        {
            "stages.after": "[recover]", "cut.reconstruct": "least_squares", "cut.least_squares.dtype": "auto",
            "recover.adapters": "lora", "recover.rank": 2, "recover.distill.hidden": 0.5,
            "recover.distill.teacher_placement": "files",
        },
    ),
    # Decided by the first process from the files, then a penalty on channels that lie in both.
    "dress": (
        ("dress",),
        {
            "stages.before": "[regularise]", "stages.after": "[]", "cut.reconstruct": "none", "dress.select": "energy",
            "dress.penalty_weight": 0.1, "dress.schedule": "published",
        },
    ),
    # Rotated and reconstructed from the files by the first process.
    "pca": (("recover",), {"stages.after": "[recover]", "hidden_multiple": 4}),
    # Decided by the first process on the model itself; all weights of what fits no stock architecture.
    "taylor": (
        ("recover",),
        {
            "stages.after": "[recover]", "score.ranking": "global", "ratio": 0.2, "recover.adapters": "none",
            "score.layerwise": "false",
        },
    ),
}  # fmt: skip
"""Method -> what trains, and options."""


def host_arguments(method: str, dense: Path, text: Path, out: Path) -> list[str | Path]:
    train = {"steps": 6, "batch_size": 4, "micro_batch_size": 2, "dtype": "float32", "learning_rate": 1e-3}
    trained, given = HOST_RUNS[method]
    sets = {**given, **{f"{name}.train.{key}": value for name in trained for key, value in train.items()}}
    sets.setdefault("ratio", 0.5)
    base: list[str | Path] = ["prune", dense, "--method", method, "--calibration", text, "--out", out]
    base += ["--samples", "16", "--sequence-length", "16"]
    return base + [part for name, value in sets.items() for part in ("--set", f"{name}={value}")]


@pytest.mark.process
@pytest.mark.second
@pytest.mark.parametrize("method", HOST_RUNS)
def test_prune_of_two_that_have_the_model_on_the_host_writes_what_one_writes(method: str, tmp_path: Path) -> None:
    dense, text = write_model(tiny_model("llama"), tmp_path / "dense"), write_text(tmp_path / "text.txt", words=8000)
    alone, together = tmp_path / "alone", tmp_path / "together"
    assert not run(*host_arguments(method, dense, text, alone)).exit_code
    arguments = host_arguments(method, dense, text, together)
    command = torchrun(2, "-m", "pyprune", *arguments, "--placement", "host")
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-4000:]
    said = " ".join(found.stderr.split())
    assert "has the model on the host" in said
    assert ("recover.distill.teacher_dtype is bfloat16" in said) == (method == "elder"), "each has a copy of its own"
    records = [read_pruning_json(folder) for folder in (alone, together)]
    assert records[0].plan == records[1].plan
    assert records[0].plan is not None
    assert records[0].plan != family_for(tiny_model("llama")).plan(tiny_model("llama").config)
    reports = [record.provenance["report"] for record in records]
    assert [r["compact"]["stock"] for r in reports] == [method != "taylor"] * 2
    assert [r["effects"] is None for r in reports] == [method not in ("elder", "dress")] * 2
    assert [r["reconstruction"] is None for r in reports] == [method not in ("shortgpt", "pca", "taylor")] * 2
    assert [len(r["stages"]) for r in reports] == [len(reports[0]["stages"])] * 2
    verified = [r["verified"] for r in reports]
    assert verified[0] is None if method != "elder" else verified[1] == pytest.approx(verified[0], rel=1e-3)
    weights = [load_file(folder / "model.safetensors") for folder in (alone, together)]
    assert largest_difference(*weights) < 1e-4


def test_commands_that_do_not_train_refuse_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests._support.cli import refused

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "torchrun started 4 processes, but 'inspect' works in one" in refused("inspect", "anywhere")


def test_a_batch_that_processes_cannot_share_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "count", lambda: 8)
    check_shares(64)
    with pytest.raises(ConfigError, match=r"recover.train.batch_size is 12, which 8 processes cannot share"):
        check_shares(12, "recover.train.batch_size")


def test_models_that_are_not_alike_or_not_shared_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = write_model(tiny_model("llama"), tmp_path / "dense")
    monkeypatch.setattr(processes, "count", lambda: 2)
    report_copies([HostCopy(ModelSource.of(dense), "dtype", "bfloat16")])
    said = " ".join(capsys.readouterr().err.split())
    assert "dtype is bfloat16" in said
    assert "With dtype=float32 they share" in said
    monkeypatch.setattr(processes, "alike", lambda _: False)
    with pytest.raises(ConfigError, match="different weights in one or in its dense model"):
        check_alike("one", "a", "")
    monkeypatch.setattr(processes, "is_divided", lambda: True)
    with pytest.raises(DataError, match="read different text"):
        processes.check_same_text(lambda: "a")


def test_layers_that_processes_would_leave_out_at_random_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"layerdrop 0\.1: each process would leave out other layers"):
        Sharded(tiny_model("opt", layerdrop=0.1), Division())


def test_without_torchrun_nothing_is_divided() -> None:
    assert processes.count() == 1
    with processes.divide_training():
        assert not processes.is_divided()
