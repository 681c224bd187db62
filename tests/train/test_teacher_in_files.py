"""A dense model that stays in its files while it teaches: the same training, with one of its layers in memory."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bench._timing import extra_peak
from pyprune.checkpoint.load import ModelSource, load_model
from pyprune.checkpoint.record import read_pruning_json
from pyprune.config.train import DistillConfig
from pyprune.families import decoder_layers
from pyprune.run import memory as run_memory
from pyprune.runtime import processes
from pyprune.runtime.processes import Division
from pyprune.train import sharded
from pyprune.train.distill import Distillation
from pyprune.train.memory import training_memory
from pyprune.train.recover import recover, recovery_objective
from tests._support.cli import refused, run
from tests._support.models import TINY, tiny_batch, tiny_model
from tests._support.text import write_model, write_text
from tests.train.test_memory import ALL_WEIGHTS, CPU, LENGTH, held, real, samples, shapes

PLACEMENT = "recover.distill.teacher_placement"
TRAINING = {
    "recover.train.steps": 2, "recover.train.batch_size": 4, "recover.train.micro_batch_size": 2,
    "recover.distill.hidden": 0.1, "data.samples": 8, "data.sequence_length": 24,
}  # fmt: skip


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tiny_model("llama"), tmp_path_factory.mktemp("dense") / "dense")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def pruned(dense: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pruned") / "pruned"
    result = run("prune", dense, "--method", "magnitude", "--ratio", "0.3", "--calibration", text, "--out", out)
    assert result.exit_code == 0, result.output
    return out


def recovering(pruned: Path, dense: Path, text: Path, out: Path, *more: str) -> list[str | Path]:
    sets = [part for name, value in TRAINING.items() for part in ("--set", f"{name}={value}")]
    return ["recover", pruned, "--teacher", dense, "--out", out, "--data", text, *sets, *more]


def recovered(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def placement_of(folder: Path) -> str:
    (entry,) = read_pruning_json(folder).provenance["recoveries"]
    return str(entry["config"]["recover"]["distill"]["teacher_placement"])


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that are loaded whole."""
    found: list[str] = []
    original = ModelSource.load

    def spy(source: ModelSource, **options: Any) -> Any:
        found.append(source.name)
        return original(source, **options)

    monkeypatch.setattr(ModelSource, "load", spy)
    return found


@pytest.mark.parametrize("family", sorted(TINY))
def test_a_model_of_files_computes_what_the_loaded_one_does(family: str, tmp_path: Path) -> None:
    folder = write_model(tiny_model(family), tmp_path / "dense")
    loaded, _ = load_model(folder)
    model = ModelSource.of(folder).open_layers(dtype="float32", device="cpu").whole()
    ids = tiny_batch(0, 2, 12)
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(model(input_ids=ids).logits, loaded(input_ids=ids).logits)
    in_layers = [p for layer in decoder_layers(model) for p in layer.parameters()]
    assert all(p.is_meta == (p.ndim > 1) for p in in_layers)
    assert not any(p.requires_grad for p in model.parameters())


def test_a_layer_that_fails_keeps_no_weights(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelSource.of(dense).open_layers(dtype="float32", device="cpu").whole()
    layer = decoder_layers(model)[1]

    def fails(*_: Any, **__: Any) -> Tensor:
        assert not any(p.is_meta for p in layer.parameters())
        raise RuntimeError("planted")

    monkeypatch.setattr(layer.mlp, "forward", fails)
    with pytest.raises(RuntimeError, match="planted"):
        model(input_ids=tiny_batch(0, 1, 8))
    assert all(p.is_meta for p in layer.parameters() if p.ndim > 1)


@pytest.mark.parametrize("adapters", ["lora", "none"])
def test_recover_from_files_writes_the_same_weights(
    pruned: Path, dense: Path, text: Path, tmp_path: Path, loads: list[str], adapters: str
) -> None:
    for placement in ("device", "files"):
        loads.clear()
        options = ("--set", f"{PLACEMENT}={placement}", "--set", f"recover.adapters={adapters}")
        result = run(*recovering(pruned, dense, text, tmp_path / placement, *options))
        assert result.exit_code == 0, result.output
        assert (str(dense) in loads) == (placement == "device")
        assert placement_of(tmp_path / placement) == placement
    one, two = (recovered(tmp_path / placement) for placement in ("device", "files"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    before = recovered(pruned)
    assert any(not torch.equal(one[name], before[name]) for name in one)


def test_prune_learns_from_the_files_that_it_was_given(
    dense: Path, text: Path, tmp_path: Path, loads: list[str]
) -> None:
    sets = [part for name, value in TRAINING.items() for part in ("--set", f"{name}={value}")]
    options = ("--method", "magnitude", "--ratio", "0.3", "--calibration", text, "--set", "stages.after=[recover]")
    for placement in ("device", "files"):
        loads.clear()
        out = tmp_path / placement
        result = run("prune", dense, *options, *sets, "--set", f"{PLACEMENT}={placement}", "--out", out)
        assert result.exit_code == 0, result.output
        assert loads.count(str(dense)) == (2 if placement == "device" else 1)  # the first is what is pruned
    one, two = (recovered(tmp_path / placement) for placement in ("device", "files"))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.second
def test_auto_leaves_the_teacher_in_its_files_where_the_device_cannot_hold_it(
    pruned: Path, dense: Path, text: Path, tmp_path: Path, loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    table = run_memory.memory_table

    def keep(memories: list[Any], device: torch.device, capacity: int) -> str:
        found.append(memories[0][1].total)
        return table(memories, device, capacity)

    monkeypatch.setattr(run_memory, "memory_table", keep)
    for placement in ("device", "files"):
        size = found[0] - 1 if found else 2**22  # which is little enough to be looked at
        monkeypatch.setattr(run_memory, "device_memory", lambda device, size=size: size)
        loads.clear()
        result = run(*recovering(pruned, dense, text, tmp_path / placement))
        assert result.exit_code == 0, result.output
        assert placement_of(tmp_path / placement) == placement
        assert (str(dense) in loads) == (placement == "device")
        assert ("is not loaded while it teaches" in result.stderr) == (placement == "files")
    assert found[1] < found[0]
    message = refused(*recovering(pruned, dense, text, tmp_path / "none", "--set", f"{PLACEMENT}=device"))
    assert f"{PLACEMENT}=files" in " ".join(message.split())


def test_an_interrupted_run_goes_on_with_its_teacher_elsewhere(
    pruned: Path, dense: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another device auto may come to the other place; the result is the same."""
    here, there = (("--set", f"{PLACEMENT}={placement}") for placement in ("device", "files"))
    assert run(*recovering(pruned, dense, text, tmp_path / "straight", *here)).exit_code == 0
    original, calls = Distillation.terms, []

    def interrupted(self: Distillation, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:  # the second step of two passes
            raise KeyboardInterrupt
        return original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Distillation, "terms", interrupted)
        assert run(*recovering(pruned, dense, text, tmp_path / "again", *here)).exit_code == 130
    result = run(*recovering(pruned, dense, text, tmp_path / "again", *there, "--resume"))
    assert result.exit_code == 0, result.output
    one, two = (recovered(tmp_path / name) for name in ("straight", "again"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_files_of_which_no_layer_can_be_read_are_refused(
    pruned: Path, dense: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_files = ("--set", f"{PLACEMENT}=files")
    pickled = tmp_path / "pickled"
    shutil.copytree(dense, pickled)
    weights = load_file(pickled / "model.safetensors")
    (pickled / "model.safetensors").unlink()
    torch.save(weights, pickled / "pytorch_model.bin")
    message = " ".join(refused(*recovering(pruned, pickled, text, tmp_path / "out", *of_files)).split())
    assert "has no safetensors; use 'device'" in message
    assert "GGUF" in str(ModelSource.of(dense, gguf_file="model.gguf").layers_obstacle())
    assert "code of its own" in str(ModelSource.of(dense, trust_remote_code=True).layers_obstacle())
    assert "record" in str(ModelSource.of(pruned).layers_obstacle())
    # and auto loads what cannot be read so
    monkeypatch.setattr(run_memory, "WORTH_A_TABLE", 0.0)
    result = run(*recovering(pruned, pickled, text, tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert placement_of(tmp_path / "out") == "device"


def test_processes_do_not_divide_a_model_of_files(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelSource.of(dense).open_layers(dtype="float32", device="cpu").whole()
    monkeypatch.setattr(processes, "division", lambda: Division(torch.device("cpu"), "first"))
    assert sharded.model_to_read(model) is model


def test_a_resumed_run_finds_the_same_teacher_in_files(dense: Path) -> None:
    student, loaded = tiny_model("llama"), load_model(dense)[0]
    of_files = ModelSource.of(dense).open_layers(dtype="float32", device="cpu").whole()
    facts = [
        Distillation(student, teacher, DistillConfig(teacher_placement=placement)).run_facts()
        for teacher, placement in ((loaded, "device"), (of_files, "files"))
    ]
    assert facts[0] == facts[1]


@pytest.mark.second
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_predicted_peak_is_the_measured_one(dtype: torch.dtype, tmp_path: Path) -> None:
    """In float32 too, of whose weights autocast would keep copies if they were trained."""
    config = replace(ALL_WEIGHTS, distill=DistillConfig(alpha=0.5), train=replace(ALL_WEIGHTS.train, steps=2))
    folder = write_model(real(dtype), tmp_path / "teacher")
    model, teacher = shapes(torch.float32), shapes(dtype)
    predicted = training_memory(
        model, config.train, recovery_objective(model, config, teacher=teacher), LENGTH, device=CPU, teacher=teacher,
        teacher_in="files",
    )  # fmt: skip
    student, of_files = (
        real(torch.float32),
        ModelSource.of(folder).open_layers(dtype=str(dtype).removeprefix("torch."), device="cpu").whole(),
    )
    at_rest = held(student) + sum(p.nbytes for p in of_files.parameters() if not p.is_meta)
    measured = at_rest + extra_peak(lambda: recover(student, samples(), config, teacher=of_files), CPU)
    assert predicted.total == pytest.approx(measured, rel=0.1)
    assert predicted.teacher < 0.7 * held(real(dtype))
