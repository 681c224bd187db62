"""Tiny checkpoints to serve, and the comparison of what a server answered with Transformers in float32."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pyprune.checkpoint.load import load_model
from pyprune.cut.compact import compact_
from pyprune.cut.compensate import compensate_
from pyprune.families import family_for
from pyprune.plan import PrunePlan
from pyprune.run.rework import ADAPTER
from pyprune.serving.engines import engine_environment
from pyprune.serving.export import export
from tests._support.answers import (
    NEW_TOKENS,
    TOLERANCE,
    TOP,
    Answer,
    below_most_likely,
    log_probabilities,
    random_prompts,
    served_and_expected,
)
from tests._support.cli import run
from tests._support.families_made import RECOVERY
from tests._support.models import tiny_batch, tiny_model
from tests._support.text import write_text
from tests._support.tiny import VOCAB, damp_
from tests._support.tokenizer import tiny_tokenizer

ANY_VLLM = [
    pytest.mark.serving,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
"""Marks of a file whose tests run a real vLLM."""
REAL_VLLM = [*ANY_VLLM, pytest.mark.second]
"""The same for the second tier: the first starts one engine for one stock export and one with sizes per layer."""

SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
OPT_SIZES = {"hidden_size": 128, "num_attention_heads": 4, "word_embed_proj_dim": 128}


@dataclass(frozen=True)
class Case:
    """A tiny dense model, what is cut from it, and the architecture that must come out.

    ``compensated``: biases hold the mean of what is cut.
    """

    model: str
    cut: Callable[[PrunePlan], PrunePlan]
    architecture: str
    compensated: bool = False


def uniform(hidden: int) -> Callable[[PrunePlan], PrunePlan]:
    """One layer less and a narrower stream: equal sizes in every layer."""
    return lambda plan: plan.drop_layers([1]).keep_hidden(range(hidden))


def narrower(plan: PrunePlan) -> PrunePlan:
    """A narrower FFN and one KV group in every layer."""
    for layer in plan.kept_layers:
        plan = plan.with_layer(layer, query_heads=[2, 3], kv_heads=[1], ffn=range(24))
    return plan


def per_layer(plan: PrunePlan) -> PrunePlan:
    """Fewer query heads here, a KV group less there, narrower FFNs, and a hidden size that heads do not divide."""
    plan = plan.drop_layers([3]).keep_hidden(range(104)).with_layer(0, query_heads=[0, 2], ffn=range(24))
    return plan.with_layer(2, query_heads=[2, 3], kv_heads=[1], ffn=range(8, 40))


def opt_per_layer(plan: PrunePlan) -> PrunePlan:
    """Cut like :func:`per_layer`, for a model with one KV head for each query head."""
    plan = plan.drop_layers([3]).keep_hidden(range(4, 108)).with_layer(0, query_heads=[0, 2], kv_heads=[0, 2])
    return plan.with_layer(1, ffn=range(24)).with_layer(2, query_heads=[3], kv_heads=[3], ffn=range(8, 40))


def skipping(plan: PrunePlan) -> PrunePlan:
    """Layer 0 without attention, layer 1 without MLP."""
    return plan.with_layer(0, query_heads=[], kv_heads=[]).with_layer(1, ffn=[])


def skipping_and_narrower(plan: PrunePlan) -> PrunePlan:
    """Cut like :func:`skipping`, with a narrower attention and MLP in layer 2."""
    return skipping(plan).with_layer(2, query_heads=[0, 2], ffn=range(24))


def everything(plan: PrunePlan) -> PrunePlan:
    """Four layers: no attention, other query heads and FFN, a KV group less, no MLP; and a narrower stream."""
    plan = plan.keep_hidden(range(104)).with_layer(0, query_heads=[], kv_heads=[])
    plan = plan.with_layer(1, query_heads=[1, 3], ffn=range(24)).with_layer(3, ffn=[])
    return plan.with_layer(2, query_heads=[2, 3], kv_heads=[1], ffn=range(8, 40))


def write_case(case: Case, out: Path, **sizes: Any) -> None:
    """Cut the case's model, with other values in its configuration if given, and export it to ``out``."""
    model = tiny_model(case.model, **{**(OPT_SIZES if case.model.startswith("opt") else SIZES), **sizes})
    damp_(model)
    plan = case.cut(family_for(model).plan(model.config))
    if case.compensated:
        assert compensate_(model, plan, tiny_batch(batch=4, length=24)).blocks > 0
    compact_(model, plan)
    report = export(model, out, plan=plan, tokenizer=tiny_tokenizer(), provenance={"method": "by hand"})
    assert report.architecture == case.architecture
    assert [w for w in report.warnings if "head_dim" in w] == []


def prompts(lengths: Sequence[int] = (2, 9, 40, 150)) -> list[list[int]]:
    """Random token ids; by default one prompt is longer than a block of vLLM's cache."""
    return random_prompts(lengths, VOCAB)


def recover_with_adapters(folder: Path, out: Path) -> Path:
    """Recover a pruned checkpoint into ``out``; the folder of the adapters, which belong on ``folder``."""
    settings = [part for key, value in RECOVERY.items() for part in ("--set", f"recover.{key}={value}")]
    text = ["--data", write_text(out.with_suffix(".txt")), "--samples", "8", "--sequence-length", "12"]
    done = run("recover", folder, "--out", out, "--keep-adapter", *text, *settings)
    assert done.exit_code == 0, done.output
    return out / ADAPTER


def run_program(name: str, job: dict[str, Any], **environment: str) -> Any:
    """Run a program of tests/serving/vllm, in which engine and worker live: starting processes is what costs the time.

    tests/serving/vllm/test_server.py has them all apart, and the configuration pickled.

    Args:
        name: of the file.
        job: what it reads from stdin, as JSON.
        environment: more variables.

    Returns:
        What it wrote to stdout, as JSON.
    """
    variables = {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **environment}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parents[1] / "serving" / "vllm" / name)],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env=engine_environment() | variables,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def assert_greedy(rows: Tensor, tokens: Sequence[int]) -> None:
    """Each token is the most likely one of its row [vocabulary]; two that float32 cannot tell apart are as good."""
    assert below_most_likely(rows, tokens) <= TOLERANCE


def compare(model: Any, asked: Sequence[Sequence[int]], answers: Sequence[Answer]) -> None:
    """Prompt tokens, the most likely tokens of every generated position, and the greedy choice itself.

    Args:
        model: what the answers are compared with, or the folder that it is read from.
        asked: the prompts' token ids.
        answers: what was answered to each.
    """
    if isinstance(model, Path):
        model, _ = load_model(model)
    for prompt, answer in zip(asked, answers, strict=True):
        assert len(answer["tokens"]) == len(answer["top"]) == NEW_TOKENS
        assert all(len(top) >= TOP for top in answer["top"])
        expected = log_probabilities(model, [*prompt, *answer["tokens"]])
        torch.testing.assert_close(*served_and_expected(expected, prompt, answer), rtol=0, atol=TOLERANCE)
        assert_greedy(expected[len(prompt) - 1 : -1], answer["tokens"])


def flip_a_weight_bit(folder: Path) -> str:
    """Damage one weight by one bit; the file keeps its length and its header."""
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    return path.name


def truncate_weights(folder: Path) -> str:
    """Cut the end of the weights off."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return path.name


def edit_the_record(folder: Path) -> str:
    """Change pruning.json, which carries a checksum of itself."""
    path = folder / "pruning.json"
    path.write_text(path.read_text().replace("by hand", "by foot"))
    return path.name


def edit_the_config(folder: Path) -> str:
    """Change config.json in a way that every reader accepts."""
    path = folder / "config.json"
    path.write_text(path.read_text() + "\n")
    return path.name


DAMAGE: dict[str, Callable[[Path], str]] = {
    "flipped-bit": flip_a_weight_bit,
    "truncated": truncate_weights,
    "edited-record": edit_the_record,
    "edited-config": edit_the_config,
}
"""What can happen to a checkpoint folder; each returns the name of the file that a message must give."""
