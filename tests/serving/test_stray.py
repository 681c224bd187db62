"""Real vLLM reads every *.safetensors of a folder: other weights next to a verified checkpoint must not be served."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pyprune.serving.engines import engine_environment
from tests._support.served import REAL_VLLM, Case, everything, uniform, write_case
from tests._support.server import Server

pytestmark = REAL_VLLM

BIN = Path(sys.executable).parent
STRAY = "zz.safetensors"
REFUSAL = f"holds '{STRAY}', which its pruning.json does not list"
CASES = {
    "stock": Case("llama", uniform(96), "LlamaForCausalLM"),
    "pruned": Case("llama", everything, "PrunedLlamaForCausalLM"),
}


def write_with_other_weights(case: Case, folder: Path) -> None:
    write_case(case, folder)
    state = load_file(folder / "model.safetensors")
    save_file({name: weight * 1.01 for name, weight in state.items()}, folder / STRAY, {"format": "pt"})


@pytest.mark.parametrize("name", CASES)
def test_pyprune_serve_refuses_before_anything_starts(name: str, tmp_path: Path) -> None:
    write_with_other_weights(CASES[name], tmp_path / "model")
    command = [str(BIN / "pyprune"), "serve", str(tmp_path / "model")]
    environment = engine_environment() | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=False)
    assert done.returncode == 2
    assert REFUSAL in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_the_model_class_refuses_under_plain_vllm(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_with_other_weights(CASES["pruned"], folder)
    with Server([str(BIN / "vllm"), "serve", str(folder)], folder, tmp_path / "log") as server:
        assert server.wait_until_it_ends() != 0
        assert server.left_over() == []
        assert f"CheckpointError: {folder} {REFUSAL}" in server.text()
