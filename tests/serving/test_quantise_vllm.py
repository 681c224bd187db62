"""Quantised checkpoints in real vLLM on the CPU, compared with Transformers on dequantised weights and rounded inputs.

Rounding makes small differences large: a value between two steps of int8 that is computed a little differently falls on
the other one. So what is compared is the root mean square over all tokens of the prompts, and the measure of it is what
the rounding itself does. One of them is on a server as well.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pyprune.checkpoint.load import load_model
from pyprune.families import all_families
from pyprune.plan import PrunePlan
from pyprune.runtime.device import int8_products_saturate
from pyprune.serving.engines import engine_environment
from pyprune.serving.quantise import SCHEMES
from tests._support.models import TINY, one_of_each
from tests._support.quantised import in_32s, write_pair
from tests._support.rounded import round_inputs_, with_weights_of
from tests._support.served import REAL_VLLM, opt_per_layer, per_layer, prompts, run_program, uniform
from tests._support.server import Server

pytestmark = REAL_VLLM


@dataclass(frozen=True)
class Served:
    """A tiny model, what is cut from it, how it is quantised, and the dtype that it is served in."""

    model: str
    cut: Callable[[PrunePlan], PrunePlan]
    quantise: str
    dtype: str = "float32"


def _unequal(name: str) -> Callable[[PrunePlan], PrunePlan]:
    return opt_per_layer if name == "opt" else per_layer


LAYERED = [name for name in one_of_each() if all_families()[TINY[name][0]].served_by]
# A hidden size of 104 keeps vLLM from its AMX product, which takes no float32.
CASES = {f"{name}-int8": Served(name, _unequal(name), "w8a8-int8") for name in LAYERED}
CASES |= {f"{name}-fp8": Served(name, in_32s, "fp8") for name in ("llama-head-dim", "opt", "phi3")}
CASES["llama-stock"] = Served("llama", uniform(104), "w8a8-int8")
LOW = {
    f"{name}-{quantise}-bfloat16": Served(name, in_32s, quantise, "bfloat16")
    for name, quantise in (("llama-head-dim", "w8a8-int8"), ("llama-head-dim", "w4a16"), ("opt", "w4a16"))
}
LOW["granite-stock"] = Served("granite", uniform(96), "w8a8-int8", "bfloat16")
EFFECT = {"w8a8-int8": 0.4, "fp8": 0.6}
"""Largest distance from the reference, as a share of what rounding the inputs changes: 0.33 and 0.5 were measured, from
inputs that fall on another step (of which float8 has 8 for every power of two)."""


EXACT = pytest.mark.skipif(int8_products_saturate(), reason="this CPU has no VNNI: its int8 products saturate")


def _marked(*names: str) -> list[Any]:
    """Names of cases; those in int8 are skipped where the CPU has no products for them."""
    return [pytest.param(name, marks=EXACT) if (CASES | LOW)[name].quantise == "w8a8-int8" else name for name in names]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantised")


@pytest.fixture(scope="module")
def served(root: Path) -> dict[str, Tensor]:
    """Case -> log probabilities of the prompts' tokens."""
    found: dict[str, Tensor] = {}
    for dtype, cases in (("float32", CASES), ("bfloat16", LOW)):
        for name, case in cases.items():
            write_pair(root / name, case.model, case.cut, case.quantise, None if dtype == "float32" else dtype)
        found |= _run_vllm({name: root / name / "quantised" for name in cases}, dtype)
    return found


def _run_vllm(folders: dict[str, Path], dtype: str) -> dict[str, Tensor]:
    job = {"models": [str(folder) for folder in folders.values()], "damaged": [], "prompts": prompts()}
    asked = {**job, "new_tokens": 1, "top": 1, "dtype": dtype}
    # On a CPU with AMX, vLLM would round the inputs of 4-bit layers to int8 as well.
    replies = run_program("vllm_child.py", asked, VLLM_CPU_INT4_W4A8="0")
    return {
        name: torch.cat([torch.tensor(answer["prompt"]) for answer in replies[str(folder)]])
        for name, folder in folders.items()
    }


@pytest.mark.parametrize("name", _marked("llama-int8", "llama-stock"))
def test_int8_on_a_compiled_server(name: str, root: Path, served: dict[str, Tensor]) -> None:
    """`pyprune serve` as it is without options, where another process computes other roundings in another order."""
    folder = root / name / "quantised"
    command = [str(Path(sys.executable).parent / "pyprune"), "serve", str(folder)]
    options = ("--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "256")
    with Server(command, folder, root / f"{name}.log", options=options) as server:
        server.wait_until_healthy()
        answers = [server.complete(prompt) for prompt in prompts()]
        assert "Warming up model for the compilation" in server.text()
    found = torch.cat([torch.tensor(answer["prompt"]) for answer in answers])
    expected, unrounded = (_log_probabilities(_reference(root / name, CASES[name], inputs=i)) for i in (True, False))
    effect = _distance(unrounded, expected)
    assert _distance(found, expected) <= EFFECT["w8a8-int8"] * effect
    assert _distance(found, served[name]) <= EFFECT["w8a8-int8"] * effect


def _reference(folder: Path, case: Served, *, inputs: bool) -> PreTrainedModel:
    quantised = load_model(folder / "quantised", quantised=True)[0]
    model = with_weights_of(load_model(folder / "plain")[0], quantised)
    if inputs:
        round_inputs_(model, case.quantise)
    return model


@torch.no_grad()
def _log_probabilities(model: PreTrainedModel) -> Tensor:
    rows = []
    for prompt in prompts():
        found = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        rows.append(found[range(len(prompt) - 1), prompt[1:]])
    return torch.cat(rows)


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).square().mean().sqrt())


@pytest.mark.parametrize("name", _marked(*CASES))
def test_float32_is_transformers_with_rounded_weights_and_inputs(
    name: str, root: Path, served: dict[str, Tensor]
) -> None:
    case = CASES[name]
    expected = _log_probabilities(_reference(root / name, case, inputs=True))
    unrounded = _log_probabilities(_reference(root / name, case, inputs=False))
    distance, effect = _distance(served[name], expected), _distance(unrounded, expected)
    assert distance <= EFFECT[case.quantise] * effect


@pytest.mark.parametrize("name", _marked(*LOW))
def test_bfloat16_is_as_near_to_float32_as_transformers_in_bfloat16(
    name: str, root: Path, served: dict[str, Tensor]
) -> None:
    case = LOW[name]
    rounds = SCHEMES[case.quantise].activations
    expected = _log_probabilities(_reference(root / name, case, inputs=rounds))
    low = _log_probabilities(_reference(root / name, case, inputs=rounds).to(torch.bfloat16))
    plain = _log_probabilities(load_model(root / name / "plain")[0])
    distance = _distance(served[name], expected)
    assert distance <= 2 * _distance(low, expected)
    assert distance < _distance(served[name], plain), "the rounded weights were not used"


def test_adapters_are_prepared_where_those_of_the_dense_family_are() -> None:
    """vLLM refuses them on a head of more than 258,048 words, which Gemma 3 has and its class leaves out."""
    code = (
        "from pyprune.serving.vllm.model import PrunedGemma3ForCausalLM, PrunedLlamaForCausalLM\n"
        "from vllm.model_executor.models.gemma3 import Gemma3ForCausalLM\n"
        "from vllm.model_executor.models.llama import LlamaForCausalLM\n"
        "classes = PrunedGemma3ForCausalLM, Gemma3ForCausalLM, PrunedLlamaForCausalLM, LlamaForCausalLM\n"
        "print(*(len(found.embedding_modules) for found in classes))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=engine_environment(), timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().splitlines()[-1] == "0 0 2 2"


def test_stock_configurations_are_read_as_ever(root: Path) -> None:
    """The plugin registers the pruned configurations; a plain LLaMA stays what vLLM reads."""
    from transformers import LlamaConfig

    LlamaConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=2).save_pretrained(root / "config")
    code = (
        "import sys; from vllm.plugins import load_general_plugins; load_general_plugins()\n"
        "from vllm.transformers_utils.config import get_config\n"
        "config = get_config(sys.argv[1], trust_remote_code=False)\n"
        "print(type(config).__module__, type(config).__name__, config.is_heterogeneous)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(root / "config")],
        capture_output=True,
        text=True,
        env=engine_environment() | {"HF_HUB_OFFLINE": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    name = "transformers.models.llama.configuration_llama LlamaConfig False"
    assert done.stdout.strip().splitlines()[-1] == name
