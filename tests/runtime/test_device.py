"""Which dtype is computed in, and what memory a device has left."""

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Literal, Self

import pytest
import torch

from pyprune.runtime import device
from pyprune.runtime.device import GPU_MARGIN, device_memory, park, working_dtype


@pytest.fixture(autouse=True)
def _measured_anew() -> Iterator[None]:
    device.cpu_is_faster_in_bfloat16.cache_clear()
    yield
    device.cpu_is_faster_in_bfloat16.cache_clear()


@pytest.mark.parametrize(("float32", "bfloat16", "chosen"), [(2.0, 1.0, "bfloat16"), (1.0, 1.9, "float32")])
def test_auto_is_what_this_cpu_multiplies_faster_in(
    float32: float, bfloat16: float, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    def timed(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        clock[0] += bfloat16 if left.dtype == torch.bfloat16 else float32
        return left  # a product in bfloat16 takes seconds on a CPU that has no instructions for it

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    monkeypatch.setattr(device, "is_masked", lambda dtype: False)
    monkeypatch.setattr(device.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch.Tensor, "__matmul__", timed)
    assert working_dtype("auto", torch.device("cpu")) == chosen
    spent = clock[0]
    assert working_dtype("auto", torch.device("cpu")) == chosen
    assert clock[0] == spent > 0  # asked once


@pytest.mark.parametrize(
    ("dtype", "place", "chosen"),
    [
        ("auto", "cpu", "float32"),
        ("auto", "meta", "bfloat16"),
        ("float32", "meta", "float32"),
        ("bfloat16", "cpu", "bfloat16"),
    ],
)
def test_without_instructions_nothing_is_measured_and_what_is_named_stays(
    dtype: Literal["auto", "float32", "bfloat16"], place: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured() -> Any:
        raise AssertionError("measured")

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    monkeypatch.setattr(device, "cpu_is_faster_in_bfloat16", measured)
    assert working_dtype(dtype, torch.device(place)) == chosen


@pytest.mark.process
@pytest.mark.skipif(platform.machine() not in device.X86, reason="oneDNN masks instructions of x86 alone")
def test_a_masked_cpu_counts_as_one_without_instructions() -> None:
    """As oneDNN, whose products they are, says of itself: torch names what the CPU has."""
    ask = "import sys, torch; from pyprune.runtime.device import has_products; torch.cpu.get_capabilities = lambda: "
    ask += "{'avx512_bf16': True, 'avx512_fp16': True}; cpu = torch.device('cpu'); "
    ask += "sys.exit(has_products(torch.bfloat16, cpu) or has_products(torch.float16, cpu))"
    masked = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    assert subprocess.run([sys.executable, "-c", ask], env=masked, check=False).returncode == 0


@pytest.mark.process
@pytest.mark.skipif(platform.machine() not in device.X86, reason="oneDNN masks instructions of x86 alone")
def test_int8_products_saturate_without_vnni() -> None:
    """And with it they do not, where a CPU has it."""
    ask = "import sys; from pyprune.runtime.device import int8_products_saturate; sys.exit(int8_products_saturate())"
    masks = ["AVX2"] + (["DEFAULT"] if torch.cpu.get_capabilities().get("avx512_vnni") else [])
    environments = [os.environ | {"ONEDNN_MAX_CPU_ISA": mask} for mask in masks]
    codes = [subprocess.run([sys.executable, "-c", ask], env=env, check=False).returncode for env in environments]
    assert codes == [1, 0][: len(masks)]


class Moved(torch.nn.Module):
    """Keeps where it was moved to; this machine may have one place only."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def to(self, place: object) -> Self:
        self.places.append(str(place))
        return self


def test_a_model_leaves_its_accelerator_for_a_while_and_comes_back_after_an_error() -> None:
    model = Moved()
    seen: list[str] = []

    def fail() -> None:
        with park(model, torch.device("cuda", 0)):
            seen.extend(model.places)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen == ["cpu"]
    assert model.places == ["cpu", "cuda:0"]
    with park(model, torch.device("cpu")):
        pass
    assert model.places == ["cpu", "cuda:0"], "it is there already"


def test_a_gpu_has_what_is_free_and_what_its_allocator_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the card's total: another process may have most of it."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (600, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 250)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 50)
    assert device_memory(torch.device("cuda")) == int(800 * (1 - GPU_MARGIN))


def test_an_empty_card_of_80_gb_has_what_the_recipes_are_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(78.7 * 2**30), int(79.2 * 2**30)))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    assert 76 * 2**30 <= device_memory(torch.device("cuda")) < 77 * 2**30


def test_a_cpu_has_what_the_machine_has_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyprune.runtime.device.available_memory", lambda: 123)
    assert device_memory(torch.device("cpu")) == 123
