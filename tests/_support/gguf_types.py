"""Tiny models of inferred types as GGUF files, cut with equal sizes, and what llama.cpp computes from them.

``python -m tests._support.gguf_types FILE [TYPE ...]`` measures every type, or those that it names, one at a time, and
appends a row of JSON for each.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from pyprune.checkpoint.save import save_checkpoint
from pyprune.cut.compact import compact_
from pyprune.families import all_families
from pyprune.families.base import cut_axes
from pyprune.families.gemma4 import GIVEN
from pyprune.families.gguf_types import FORMS
from pyprune.serving.gguf.layout import GgufRules
from pyprune.serving.gguf.write import GgufReport, export_gguf
from tests._support.llama_cpp import VOCAB, LlamaCpp, byte_level_tokenizer
from tests._support.stock import served_model, uniform_cut

_EACH_HEAD = {"num_key_value_heads": 4}
_WIDE_WINDOW = {"sliding_window": 300}
VALUES: dict[str, dict[str, Any]] = {
    "cohere": {"use_qk_norm": False},
    "cohere2": {"sliding_window": 6},
    "cwm": _WIDE_WINDOW,
    "dots1": _EACH_HEAD,
    "exaone4": {"sliding_window": None, "sliding_window_pattern": 0, "layer_types": ["full_attention"] * 5},
    "exaone_moe": {"mlp_layer_types": ["dense", *["sparse"] * 4], "first_k_dense_replace": 1},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma4_text": {"tie_word_embeddings": True},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    **{name: {"mamba_n_groups": 1} for name in ("bamba", "granitemoehybrid")},
    "hyperclovax": {"use_post_norm": False},
    "kimi_linear": {
        **{"q_lora_rank": None, "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", *["sparse"] * 4]},
    },
    **{name: {"expand": 2, "intermediate_size": 256} for name in ("falcon_mamba", "mamba")},
    "ministral": _WIDE_WINDOW,
    "olmoe": _EACH_HEAD,
    "qwen2_moe": {"mlp_only_layers": []},
    **{name: {"linear_key_head_dim": 12} for name in ("qwen3_5_moe_text", "qwen3_5_text")},
    "qwen3_next": {"mlp_only_layers": [], "linear_key_head_dim": 12},
    "qwen3_moe": {"norm_topk_prob": True, "mlp_only_layers": []},
    "smollm3": {"no_rope_layer_interval": 4, "use_sliding_window": False},
}
"""Type -> values that published models have or llama.cpp needs, besides those of stock exports."""
MEASURED = sorted(({*FORMS} | {*GIVEN}) - {*all_families()})
"""The types without tests of their own."""
REMOVED = {"afmoe": [4], "llama4_text": [4], "smollm3": [4]}
"""Type -> the layers that can be removed."""
PROMPTS = (1, 5, 17, 40)
"""Tokens of the prompts."""


def gguf_model(name: str, **changes: Any) -> PreTrainedModel:
    """Make a tiny model of an inferred type; the buffers that a checkpoint holds are random as well."""
    model = served_model(name, **{"vocab_size": VOCAB, **VALUES.get(name, {}), **changes})
    generator = torch.Generator().manual_seed(2)
    for key, buffer in model.named_buffers():
        if key in model.state_dict():
            mean = 1.0 if key.endswith("layer_scalar") else 0.0
            buffer.copy_(mean + 0.3 * torch.randn(buffer.shape, generator=generator))
    return model


def written(name: str, folder: Path, **changes: Any) -> tuple[PreTrainedModel, GgufReport, tuple[str, ...]]:
    """Cut a tiny model along most axes that it has; return it, the file made of it in float32, and the axes."""
    model = gguf_model(name, **changes)
    rules = GgufRules(model.config, [key for key, _ in model.named_parameters()])
    plan, cut = uniform_cut(model, removed=REMOVED.get(name, [1]), obstacle=rules.obstacle)
    cut = tuple(axis for axis in cut if axis in cut_axes(plan))
    cut = (
        (*cut, "experts")
        if any("experts" in block.axes for block in plan.dense.kinds.get("mixture", {}).values())
        else cut
    )
    assert compact_(model, plan).stock
    save_checkpoint(model, byte_level_tokenizer(), folder / "model", plan=plan, provenance={})
    return model, export_gguf(folder / "model", folder / "model.gguf", quantise="f32"), cut


@torch.no_grad()
def difference(model: PreTrainedModel, path: Path) -> float:
    """Return the largest difference of a log probability of llama.cpp from Transformers', over all tokens."""
    generator, worst = torch.Generator().manual_seed(1), 0.0
    with LlamaCpp(path) as server:
        for length in PROMPTS:
            prompt = torch.randint(3, 100, (length,), generator=generator)
            expected = torch.log_softmax(model(prompt[None]).logits[0, -1].double(), -1)
            found = server.log_probabilities(prompt.tolist())
            assert len(found) == len(expected)
            worst = max(worst, *(abs(float(expected[i]) - value) for i, value in found.items()))
    return worst


def measure(name: str) -> dict[str, Any]:
    """Return the row of a type."""
    with tempfile.TemporaryDirectory() as folder:
        model, report, cut = written(name, Path(folder))
        worst = difference(model, report.path)
    versions = {package: version(package) for package in ("pyprune", "transformers", "xllamacpp", "gguf", "torch")}
    return {
        "type": name, "architecture": report.architecture, "axes": cut, "quantise": "f32", "prompts": PROMPTS,
        "largest_difference": float(f"{worst:.2e}"), "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": platform.processor() or platform.machine(), "versions": versions,
    }  # fmt: skip


if __name__ == "__main__":
    for model_type in sys.argv[2:] or MEASURED:
        row = json.dumps(measure(model_type))
        with open(sys.argv[1], "a", encoding="utf-8") as stream:
            print(row, file=stream)
        print(row)
