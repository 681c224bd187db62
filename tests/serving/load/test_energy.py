"""Counters of energy, found and sampled: a powercap folder and an NVML of our own."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyprune.serving.engines import EngineError
from pyprune.serving.load import energy
from pyprune.serving.load.client import measured_span
from pyprune.serving.load.energy import Counter, EnergyMeter, find_counters
from pyprune.serving.load.gpus import memory_in_use, visible_gpus


def write_zone(root: Path, zone: str, name: str, microjoules: int, largest: int = 1_000_000_000) -> Path:
    folder = root / zone
    folder.mkdir(parents=True)
    for file, value in (("name", name), ("energy_uj", microjoules), ("max_energy_range_uj", largest)):
        (folder / file).write_text(f"{value}\n")
    return folder / "energy_uj"


def test_packages_and_memory_are_counted_once(tmp_path: Path) -> None:
    write_zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    write_zone(tmp_path, "intel-rapl:0:0", "core", 4_000_000)
    write_zone(tmp_path, "intel-rapl:0:1", "dram", 1_500_000)
    write_zone(tmp_path, "intel-rapl:1", "psys", 9_000_000)
    write_zone(tmp_path, "intel-rapl-mmio:0", "package-0", 5_000_000)
    write_zone(tmp_path, "intel-rapl:2", "package-1", 0).unlink()  # as where it is root's alone
    found = find_counters(tmp_path)
    assert [(counter.name, counter.read()) for counter in found] == [("CPU package-0", 5.0), ("CPU dram", 1.5)]
    assert find_counters(tmp_path / "none") == []


def meter(*counters: Counter) -> tuple[EnergyMeter, Callable[[float], None]]:
    """A meter, and what takes a sample at a time."""
    now = [0.0]
    found = EnergyMeter(counters, clock=lambda: now[0])

    def at(moment: float) -> None:
        now[0] = moment
        found.sample()

    return found, at


def test_energy_between_two_times(tmp_path: Path) -> None:
    file = write_zone(tmp_path, "intel-rapl:0", "package-0", 0)
    found, at = meter(*find_counters(tmp_path))
    for second, joules in enumerate((100, 110, 140)):
        file.write_text(str(joules * 10**6))
        at(second)
    assert found.joules(0, 2) == pytest.approx(40)
    assert found.joules(0.5, 1.5) == pytest.approx(5 + 15)
    assert found.joules(-0.1, 1) is None, "not sampled"
    assert found.joules(1, 2.1) is None, "not sampled"


def test_a_counter_that_starts_again(tmp_path: Path) -> None:
    file = write_zone(tmp_path, "intel-rapl:0", "package-0", 990_000_000)
    found, at = meter(*find_counters(tmp_path))
    at(0)
    file.write_text("5000000")
    at(1)
    file.write_text("8000000")
    at(2)
    assert found.joules(0, 1) == pytest.approx(15)
    assert found.joules(0, 2) == pytest.approx(18)


def test_a_counter_that_goes_away_ends_the_sampling(tmp_path: Path) -> None:
    file = write_zone(tmp_path, "intel-rapl:0", "package-0", 0)
    found, at = meter(*find_counters(tmp_path))
    at(0)
    at(1)
    file.unlink()
    at(2)
    assert found.joules(0, 1) == 0
    assert found.joules(0, 2) is None


def test_a_meter_samples_while_it_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "SAMPLE_S", 0.001)
    sampled = threading.Event()
    reads: list[float] = []

    def read() -> float:
        reads.append(float(len(reads)))
        if len(reads) == 5:
            sampled.set()
        return reads[-1]

    with EnergyMeter([Counter("one", read)]):
        assert sampled.wait(60), "by a thread of its own"
    with EnergyMeter([]) as none:
        pass
    assert none.joules(0, 1) is None


class NVMLError(Exception):
    """As NVML's package calls it."""


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """NVIDIA's library with two GPUs."""
    found = types.ModuleType("pynvml")
    functions = {
        "NVMLError": NVMLError,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": ["GPU-a", "GPU-b"].index,
        "nvmlDeviceGetIndex": lambda handle: handle,
        "nvmlDeviceGetName": lambda handle: "one kind",
        "nvmlDeviceGetTotalEnergyConsumption": lambda handle: 1000 * (handle + 1),
        "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(used=10**9 * (handle + 1)),
    }
    for name, function in functions.items():
        setattr(found, name, function)
    monkeypatch.setitem(sys.modules, "pynvml", found)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    return found


def refuse(_handle: int) -> float:
    raise NVMLError("Not Supported")


@pytest.mark.parametrize(
    ("visible", "names", "memory"),
    [(None, ["GPU 0", "GPU 1"], 3 * 10**9), ("1", ["GPU 1"], 2 * 10**9), ("GPU-b", ["GPU 1"], 2 * 10**9)],
)
def test_gpus_that_are_visible_are_counted(
    nvml: types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    visible: str | None,
    names: list[str],
    memory: int,
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = find_counters(tmp_path)
    assert [counter.name for counter in found] == names
    assert found[-1].read() == 2.0, "joules"
    assert memory_in_use(visible_gpus()) == memory
    monkeypatch.setattr(nvml, "nvmlDeviceGetTotalEnergyConsumption", refuse)
    assert find_counters(tmp_path) == [], "a GPU older than Volta"


def test_an_index_of_different_gpus_may_be_another_one_s(
    nvml: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "nvmlDeviceGetName", lambda handle: f"kind {handle}")
    assert len(visible_gpus()) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert visible_gpus() == []
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert [gpu.name for gpu in visible_gpus()] == ["GPU 1"]


def test_a_gpu_that_does_not_tell_its_memory(nvml: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo", refuse)
    assert memory_in_use(visible_gpus()) is None
    monkeypatch.setattr(nvml, "nvmlInit", lambda: refuse(0))
    assert visible_gpus() == [], "no driver"
    assert memory_in_use([]) is None


def test_the_span_is_from_the_first_request_to_the_last_answer() -> None:
    assert measured_span({"start_times": [11.0, 10.0, 12.0], "latencies": [5.0, 1.0, 3.0]}) == (10.0, 16.0)
    assert measured_span({"latencies": [5.0]}) is None


@pytest.mark.parametrize("told", [{}, {"latencies": [5.0]}, {"latencies": ["soon", None]}])
def test_times_of_another_release_are_said(told: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="wrote a result without what is needed"):
        measured_span({"start_times": [11.0, 10.0], **told})
