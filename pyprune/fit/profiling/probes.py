"""The models that a profile measures: the dense sizes, and each kind of cut by itself, with random weights.

How long a layer takes depends on its shapes and on no value of a weight, so that no checkpoint has to be read or cut:
every probe is made from the dense model's configuration and the plan's target architecture.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyprune.checkpoint.load import ModelSource
from pyprune.errors import UnsupportedModelError
from pyprune.families import family_for
from pyprune.fit.profile import DENSE
from pyprune.fit.sizes import FFN_MULTIPLES
from pyprune.plan import PrunePlan, kv_head_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

STEP = 64
"""Unless a format wants more, probes have FFN widths and hidden sizes in multiples of it where the model is wide
enough, as the rules for sizes want them: vLLM took as long for a prompt at hidden 432 as at 576 (SmolLM2, bfloat16 on a
CPU with AMX)."""

Model = tuple[Path, Mapping[str, Any]]
"""A written probe: its checkpoint folder or GGUF file, and its config.json as plain data."""


def probe_plans(dense: PrunePlan, dtype: str = "bfloat16") -> dict[str, PrunePlan]:
    """Name -> plan of every probe, the dense model first and the most telling ones next.

    A cut that a model is too small for is left out (KV groups of a model with one, every second layer of one layer).

    Args:
        dense: the plan that removes nothing.
        dtype: format of the weights. Probes are multiples of what searches in it take: matrices of other widths would
            be in another format, for llama.cpp's K-quants.
    """
    sizes, step = dense.dense, lcm(STEP, FFN_MULTIPLES.get(dtype, 1))
    every_second = range(1, sizes.num_layers, 2)
    plans = {
        DENSE: dense,
        "half of the layers": dense.drop_layers(every_second),
        "half of the FFN": _with_ffn(dense, 1 / 2, step),
        "no attention in every second layer": _without(dense, every_second, query_heads=(), kv_heads=()),
        "no MLP in every second layer": _without(dense, every_second, ffn=()),
        "three quarters of the hidden size": _with_hidden(dense, 3 / 4, step),
        "a third of the KV groups": _with_groups(dense, 1 / 3),
        "unequal layers": _unequal(dense, step),
        "a quarter of the FFN": _with_ffn(dense, 1 / 4, step),
        "half of the hidden size": _with_hidden(dense, 1 / 2, step),
        "fewer query heads in each group": _with_queries(dense, 2 / 3),
        "two thirds of the KV groups": _with_groups(dense, 2 / 3),
        "three quarters of the FFN": _with_ffn(dense, 3 / 4, step),
    }
    seen: set[tuple[object, ...]] = set()
    found = {}
    for name, plan in plans.items():
        shape = (len(plan.hidden), *(layer.widths for layer in plan.layers))
        if shape not in seen:
            found[name] = plan
        seen.add(shape)
    return found


def _without(plan: PrunePlan, layers: Iterable[int], **nothing: tuple[int, ...]) -> PrunePlan:
    for index in layers:
        plan = plan.with_layer(index, **nothing)
    return plan


def _in_steps(share: float, whole: int, step: int) -> int:
    """A share of a size as a multiple of ``step``, where there is room for one between nothing and all of it."""
    if whole < 2 * step:
        return max(1, round(share * whole))
    return min(max(step, round(share * whole / step) * step), whole)


def _with_ffn(plan: PrunePlan, share: float, step: int) -> PrunePlan:
    width = range(_in_steps(share, plan.dense.intermediate_size, step))
    for index in plan.kept_layers:
        plan = plan.with_layer(index, ffn=width)
    return plan


def _with_hidden(plan: PrunePlan, share: float, step: int) -> PrunePlan:
    return plan.keep_hidden(range(_in_steps(share, plan.dense.hidden_size, step)))


def _with_groups(plan: PrunePlan, share: float) -> PrunePlan:
    kept = max(1, round(share * plan.dense.num_key_value_heads))
    for index in plan.kept_layers:
        plan = _keep_groups(plan, index, kept)
    return plan


def _keep_groups(plan: PrunePlan, index: int, kept: int) -> PrunePlan:
    dense = plan.dense
    heads = [q for q in range(dense.num_attention_heads) if kv_head_of(q, dense) < kept]
    return plan.with_layer(index, query_heads=heads, kv_heads=range(kept))


def _with_queries(plan: PrunePlan, share: float) -> PrunePlan:
    """The same number of query heads fewer in every KV group."""
    dense = plan.dense
    kept = max(1, round(share * dense.group_size))
    heads = [q for q in range(dense.num_attention_heads) if q % dense.group_size < kept]
    for index in plan.kept_layers:
        plan = plan.with_layer(index, query_heads=heads)
    return plan


def _unequal(plan: PrunePlan, step: int) -> PrunePlan:
    """Three kinds of layers in turn, with three pairs of query and KV heads where there are as many KV groups."""
    dense = plan.dense
    groups = [
        dense.num_key_value_heads,
        max(1, dense.num_key_value_heads * 2 // 3),
        max(1, round(dense.num_key_value_heads / 3)),
    ]
    for index in plan.kept_layers:
        kind = index % 3
        plan = _keep_groups(plan, index, groups[kind])
        width = _in_steps((1, 1 / 2, 3 / 4)[kind], dense.intermediate_size, step)
        plan = plan.with_layer(index, ffn=range(width))
    return plan


def dense_config(model: str | Path | ModelSource) -> PretrainedConfig:
    """Return the configuration of a dense model; its weights are not read and may be missing.

    Raises:
        CheckpointError: there is none, or it is damaged.
        UnsupportedModelError: a family that pyprune does not know, or a model that was cut to unequal sizes.
    """
    config = ModelSource.of(model).config
    family_for(config)
    return config


def write_probe(config: PretrainedConfig, plan: PrunePlan, folder: Path, dtype: str, tokenizer: Any = None) -> Path:
    """Write a checkpoint of the plan's sizes with random weights, in a stock architecture where one fits.

    Args:
        config: of the dense model.
        plan: what stays of it.
        folder: to create.
        dtype: of the weights: float32, bfloat16 or float16.
        tokenizer: to write beside them, for formats that need one.

    Raises:
        OutputError: the folder cannot be written.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from pyprune.checkpoint.save import save_checkpoint
    from pyprune.cut.target import choose_target
    from pyprune.runtime.device import DTYPES

    target = choose_target(family_for(config), config, plan)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(target.config, dtype=DTYPES[dtype])
    return save_checkpoint(model, tokenizer, folder, plan=plan, provenance={"weights": "random"})


def why_not_served(config: PretrainedConfig, plan: PrunePlan, engine: str) -> str:
    """Why an engine cannot run a plan; empty when nothing is known against it.

    Args:
        config: of the dense model.
        plan: what stays of it.
        engine: vllm, transformers or llamacpp.
    """
    return refusals(config, engine)(plan)


def refusals(config: PretrainedConfig, engine: str) -> Callable[[PrunePlan], str]:
    """What answers :func:`why_not_served` for many plans of one model.

    Args:
        config: of the dense model.
        engine: vllm, transformers or llamacpp.
    """
    if engine == "llamacpp":
        from pyprune.fit.cost import dense_shapes
        from pyprune.serving.gguf.layout import GgufRules

        rules = GgufRules(config, dense_shapes(config))
        return lambda plan: rules.obstacle(plan) or ""
    return partial(_why_not_vllm, config) if engine == "vllm" else lambda plan: ""


def _why_not_vllm(config: PretrainedConfig, plan: PrunePlan) -> str:
    from pyprune.cut.target import choose_target

    family = family_for(config)
    if family.served_by or choose_target(family, config, plan).stock:
        return ""
    return f"The vLLM plugin serves no sizes per layer for {family.model_type}."


def write_served(
    config: PretrainedConfig, plan: PrunePlan, folder: Path, engine: str, dtype: str, tokenizer: Any = None
) -> Model:
    """Write a probe in the form that an engine reads.

    Args:
        config: of the dense model.
        plan: what stays of it.
        folder: to create; all of the probe is inside.
        engine: vllm, transformers or llamacpp.
        dtype: of the weights; for llamacpp a format of GGUF files.
        tokenizer: which llamacpp needs.

    Returns:
        (checkpoint folder or GGUF file, its config.json as plain data).

    Raises:
        UnsupportedModelError: the engine has no place for these sizes.
        OutputError: the folder cannot be written.
    """
    reason = why_not_served(config, plan, engine)
    if reason:
        raise UnsupportedModelError(reason)
    if engine != "llamacpp":
        write_probe(config, plan, folder, dtype)
        return folder, json.loads((folder / "config.json").read_text())
    from pyprune.serving.gguf.write import export_gguf

    checkpoint = write_probe(config, plan, folder / "checkpoint", "float32", tokenizer)
    values = json.loads((checkpoint / "config.json").read_text())
    file = export_gguf(checkpoint, folder / "model.gguf", quantise=dtype).path
    shutil.rmtree(checkpoint)
    return file, values
