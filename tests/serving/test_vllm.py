"""Exported checkpoints served by real vLLM in float32 give Transformers' log probabilities."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pyprune.compact import compact_
from pyprune.families import family_for
from pyprune.load import load_model
from pyprune.plan import PrunePlan
from pyprune.serving.engines import engine_environment
from pyprune.serving.export import export
from tests._support.models import VOCAB, tiny_model
from tests._support.tokenizer import tiny_tokenizer

pytestmark = [
    pytest.mark.serving,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]

Answers = list[dict[str, Any]]
NEW_TOKENS, TOP = 6, 4
TOLERANCE = 1e-5
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
OPT_SIZES = {"hidden_size": 128, "num_attention_heads": 4, "word_embed_proj_dim": 128}


@dataclass(frozen=True)
class Case:
    """A tiny dense model, what is cut from it, and the architecture that must come out."""

    model: str
    cut: Callable[[PrunePlan], PrunePlan]
    architecture: str


def _uniform(hidden: int) -> Callable[[PrunePlan], PrunePlan]:
    return lambda plan: plan.drop_layers([1]).keep_hidden(range(hidden))


def _per_layer(plan: PrunePlan) -> PrunePlan:
    """Fewer query heads here, a KV group less there, narrower FFNs, and a hidden size that heads do not divide."""
    plan = plan.drop_layers([3]).keep_hidden(range(104)).with_layer(0, query_heads=[0, 2], ffn=range(24))
    return plan.with_layer(2, query_heads=[2, 3], kv_heads=[1], ffn=range(8, 40))


def _opt_per_layer(plan: PrunePlan) -> PrunePlan:
    """The same without groups: every query head has a KV head of its own. The last layer has the widths of no other."""
    plan = plan.drop_layers([3]).keep_hidden(range(4, 108)).with_layer(0, query_heads=[0, 2], kv_heads=[0, 2])
    return plan.with_layer(1, ffn=range(24)).with_layer(2, query_heads=[3], kv_heads=[3], ffn=range(8, 40))


def _skipping(plan: PrunePlan) -> PrunePlan:
    """Layer 0 without attention, layer 1 without MLP."""
    return plan.with_layer(0, query_heads=[], kv_heads=[]).with_layer(1, ffn=[])


CASES = {
    "llama": Case("llama-head-dim", _uniform(96), "LlamaForCausalLM"),
    "llama-as-mistral": Case("llama", _uniform(70), "MistralForCausalLM"),
    "qwen2-as-llama": Case("qwen2", _uniform(96), "LlamaForCausalLM"),
    "qwen3": Case("qwen3-tied", _uniform(72), "Qwen3ForCausalLM"),
    "skipped-blocks": Case("llama-head-dim", _skipping, "PrunedLlamaForCausalLM"),
    "mistral-per-layer": Case("mistral", _per_layer, "PrunedMistralForCausalLM"),
    "qwen2-per-layer": Case("qwen2", _per_layer, "PrunedQwen2ForCausalLM"),
    "qwen3-per-layer": Case("qwen3", _per_layer, "PrunedQwen3ForCausalLM"),
    "opt-per-layer": Case("opt", _opt_per_layer, "PrunedOPTForCausalLM"),
    "opt-skipped-blocks": Case("opt-untied", _skipping, "PrunedOPTForCausalLM"),
}
PROCESSES_CASE = Case("llama-mha-bias", _per_layer, "PrunedLlamaForCausalLM")
"""Served with the engine and its worker in processes of their own, as `vllm serve` does: the plugin is loaded in each
of them, and the configuration travels pickled."""


def _prompts() -> list[list[int]]:
    """Several lengths, one of them longer than a block of vLLM's cache."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (2, 9, 40, 150)]


def _export(case: Case, out: Path) -> None:
    model = tiny_model(case.model, **(OPT_SIZES if case.model.startswith("opt") else SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # The shared models are harsh on purpose: over 150 tokens Transformers' own float32 logits are 2e-5
                # away from float64. Damped, rounding stays far below the tolerance and a wrong rule does not.
                parameter.mul_(0.5)
    plan = case.cut(family_for(model).plan(model.config))
    compact_(model, plan)
    report = export(model, out, plan=plan, tokenizer=tiny_tokenizer(), provenance={"method": "by hand"})
    assert report.architecture == case.architecture
    assert [w for w in report.warnings if "head_dim" in w] == []


def _serve(folders: list[Path], *, one_process: bool = False) -> dict[str, Answers]:
    """What vLLM makes of the prompts: one engine after the other, in a process that is not this one.

    With ``one_process`` engine and worker live in that process too, and model classes are imported there: starting
    processes is what costs the time.
    """
    models = [str(folder) for folder in folders]
    job = {"models": models, "prompts": _prompts(), "new_tokens": NEW_TOKENS, "top": TOP, "eager": one_process}
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if one_process else "1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("vllm_child.py"))],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env=engine_environment() | environment,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: dict[str, Answers] = json.loads(done.stdout)
    return answers


def _compare(folder: Path, answers: Answers) -> None:
    """Prompt tokens, the most likely tokens of every generated position, and the greedy choice itself."""
    model, _ = load_model(folder)
    for prompt, answer in zip(_prompts(), answers, strict=True):
        tokens = [*prompt, *answer["tokens"]]
        with torch.no_grad():
            expected = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        own = expected[range(len(prompt) - 1), prompt[1:]]
        torch.testing.assert_close(torch.tensor(answer["prompt"]), own, rtol=0, atol=TOLERANCE)
        for step, top in enumerate(answer["top"]):
            row = expected[len(prompt) - 1 + step]
            ids = [int(token) for token in top]
            torch.testing.assert_close(torch.tensor(list(top.values())), row[ids], rtol=0, atol=TOLERANCE)
            assert row[answer["tokens"][step]] >= row.max() - TOLERANCE


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Answers]]:
    """Every case exported and served."""
    root = tmp_path_factory.mktemp("served")
    for name, case in CASES.items():
        _export(case, root / name)
    answers = _serve([root / name for name in CASES], one_process=True)
    return {name: (root / name, answers[str(root / name)]) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_served_log_probabilities_are_transformers(name: str, served: dict[str, tuple[Path, Answers]]) -> None:
    _compare(*served[name])


def test_per_layer_widths_through_engine_processes(tmp_path: Path) -> None:
    _export(PROCESSES_CASE, tmp_path / "out")
    _compare(tmp_path / "out", _serve([tmp_path / "out"])[str(tmp_path / "out")])
