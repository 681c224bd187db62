"""Stock exports of every family in its variants, in a real vLLM: served exactly, or refused before a server starts.

A configuration holds more than sizes: windows in some layers or all, scaled rotary positions, a tied head. vLLM's stock
classes assert on them, compute from them or read other names for them, which shows only when a model is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyprune.cut.compact import compact_
from pyprune.families import family_for
from pyprune.plan import PrunePlan
from pyprune.serving.export import export
from pyprune.serving.vllm.limits import stock_obstacle
from tests._support.models import TINY, one_of_each, tiny_model
from tests._support.served import (
    NEW_TOKENS,
    OPT_SIZES,
    REAL_VLLM,
    SIZES,
    TOP,
    compare,
    damp_,
    prompts,
    run_program,
)
from tests._support.tokenizer import tiny_tokenizer

pytestmark = REAL_VLLM

FULL, SLIDING = "full_attention", "sliding_attention"
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip
NO_WINDOWS = ("llama", "opt", "phi", "granite", "olmo2", "gpt_neox")
WINDOWED = ("qwen2", "qwen3")
"""Families whose configuration says which layers have windows."""


def ropes(name: str) -> dict[str, dict[str, Any]]:
    """Kinds of scaled positions that the family takes."""
    if name == "phi3":  # one factor for each pair of a head's 32 channels
        long, short = [1 + i / 4 for i in range(16)], [1 + i / 20 for i in range(16)]
        return {"longrope": {"rope_type": "longrope", "long_factor": long, "short_factor": short}}
    return {} if name == "opt" else ROPES


def variants(name: str) -> dict[str, dict[str, Any]]:
    """Variant -> values of the configuration."""
    theta: dict[str, Any] = {"rope_theta": 10000.0}
    if name == "phi":
        theta["partial_rotary_factor"] = 0.5
    found: dict[str, dict[str, Any]] = {"tied": {"tie_word_embeddings": True}, "untied": {"tie_word_embeddings": False}}
    for kind, rope in ropes(name).items():
        scaled = {**theta, **rope}
        of_kinds = {FULL: scaled, SLIDING: {"rope_type": "default", "rope_theta": 5000.0}}
        found[kind] = {"rope_parameters": of_kinds if name == "gemma3" else scaled}
        if name == "phi3":
            # vLLM takes the long factors for every text where its own limit is beyond this, Transformers for long ones.
            found[kind]["original_max_position_embeddings"] = 4
    if name in WINDOWED:
        some = {"use_sliding_window": True, "sliding_window": 6}
        found["windows in some"] = {**some, "max_window_layers": 2, "layer_types": [FULL] * 2 + [SLIDING] * 2}
        found["windows in all"] = {**some, "max_window_layers": 0, "layer_types": [SLIDING] * 4}
        found["windows off"] = {"use_sliding_window": False, "sliding_window": 6}
    elif name not in NO_WINDOWS:
        found["windows"] = {"sliding_window": 6}
    return found


def fewer_heads(plan: PrunePlan) -> PrunePlan:
    """Half of the KV groups, and a narrower FFN, in every layer."""
    groups = plan.dense.num_key_value_heads
    each = plan.dense.num_attention_heads // groups
    kept = range(groups // 2)
    for layer in plan.kept_layers:
        plan = plan.with_layer(layer, query_heads=range(len(kept) * each), kv_heads=kept, ffn=range(24))
    return plan


CUTS: dict[str, Callable[[PrunePlan], PrunePlan]] = {
    "layers": lambda plan: plan.drop_layers([1]),
    "hidden": lambda plan: plan.keep_hidden(range(96)),
    "heads": fewer_heads,
}
SWEEP = [
    (name, variant, cut)
    for name in one_of_each()
    for variant in variants(name)
    for cut in CUTS
    if cut == "layers" or variant in ("tied", "untied", "windows", "windows in some")
]


def write(root: Path, name: str, variant: str, cut: str) -> Path | None:
    """The export, or None where the sizes that stay are of no stock architecture."""
    sizes = OPT_SIZES if name == "opt" else SIZES
    if name == "gpt_neox":  # each query head has a key and a value
        sizes = {key: size for key, size in SIZES.items() if key not in ("num_key_value_heads", "head_dim")}
    model = tiny_model(name, **{**sizes, **variants(name)[variant]})
    damp_(model)
    plan = CUTS[cut](family_for(model).plan(model.config))
    if not compact_(model, plan).stock:
        return None
    out = root / f"{name}-{variant}-{cut}".replace(" ", "-")
    export(model, out, plan=plan, tokenizer=tiny_tokenizer(), provenance={"method": "by hand"})
    return out


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], Path | None]:
    root = tmp_path_factory.mktemp("stock")
    return {case: write(root, *case) for case in SWEEP}


@pytest.fixture(scope="module")
def served(written: dict[tuple[str, str, str], Path | None]) -> dict[str, Any]:
    """What vLLM makes of all of them, those that are refused beforehand included."""
    folders = [str(folder) for folder in written.values() if folder is not None]
    job = {
        "models": [],
        "attempted": folders,
        "damaged": [],
        "prompts": prompts(),
        "new_tokens": NEW_TOKENS,
        "top": TOP,
    }
    found: dict[str, Any] = run_program("vllm_child.py", job)
    return found


@pytest.mark.parametrize(("name", "variant", "cut"), SWEEP)
def test_it_is_served_exactly_or_refused_beforehand(
    name: str, variant: str, cut: str, written: dict[tuple[str, str, str], Path | None], served: dict[str, Any]
) -> None:
    folder = written[name, variant, cut]
    if folder is None:
        pytest.skip("no stock architecture has these sizes")
    answers, reason = served[str(folder)], stock_obstacle(config_of(folder))
    if isinstance(answers, str):
        assert reason, answers
    else:
        assert not reason
        compare(folder, prompts(), answers)


def test_every_family_is_swept() -> None:
    assert {TINY[name][0] for name, _, _ in SWEEP} == {model_type for model_type, _ in TINY.values()}
