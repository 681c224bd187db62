"""Make the models that a profile measures: the dense sizes, and each kind of cut alone, with random weights.

The time of a layer depends on its shapes and not on the values of weights, so that no checkpoint is read or cut: every
probe is made from the dense model's configuration and the plan's target architecture.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from functools import partial
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyprune.checkpoint.load import ModelSource
from pyprune.errors import CheckpointError, UnsupportedModelError
from pyprune.families import check_table, family_for, serving_obstacle
from pyprune.families.base import BLOCKS
from pyprune.fit.choices import NO_GROUPS, Obstacle, Routers
from pyprune.fit.profile import DENSE
from pyprune.fit.quantities import Widths
from pyprune.fit.sizes import FFN_MULTIPLES
from pyprune.plan import PrunePlan, kv_head_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

STEP = 64
"""Multiple of the FFN widths and hidden sizes of probes if the model is wide enough and no format needs a larger one.
vLLM took as long for a prompt at hidden 432 as at 576 (SmolLM2, bfloat16 on a CPU with AMX)."""

Model = tuple[Path, Mapping[str, Any]]
"""A written probe: its checkpoint folder or GGUF file, and its config.json as plain data."""


def probe_plans(dense: PrunePlan, dtype: str = "bfloat16", routers: Routers = NO_GROUPS) -> dict[str, PrunePlan]:
    """Name -> plan of every probe, the dense model first and the most informative ones next.

    Cuts for which the model is too small are left out (KV groups of a model with one, every second layer of one layer).

    Args:
        dense: the plan that removes nothing.
        dtype: format of the weights. Widths are multiples of its blocks, as in searches: llama.cpp would write matrices
            of other widths in another format than its K-quants.
        routers: of the mixtures.

    Raises:
        UnsupportedModelError: layers differ in their attention, or have other blocks than attention and MLP.
    """
    kinds = list(dense.dense.kinds.values())
    if any(tuple(blocks) != BLOCKS or blocks["attention"] != kinds[0]["attention"] for blocks in kinds):
        raise UnsupportedModelError(
            f"A profile knows models whose layers all have the same attention, and an MLP; this one has {dense.dense}. "
            "Limit parameters instead of times."
        )
    sizes, step = dense.dense, lcm(STEP, FFN_MULTIPLES.get(dtype, 1))
    every_second = range(1, sizes.num_layers, 2)
    plans = {
        DENSE: dense,
        "half of the layers": dense.drop_layers(every_second),
        "half of the FFN": _with_ffn(dense, 1 / 2, step),
        "half of the experts": _with_experts(dense, 1 / 2, routers),
        "no attention in every second layer": _without(dense, every_second, query_heads=(), kv_heads=()),
        "no MLP in every second layer": _without(dense, every_second, ffn=()),
        "three quarters of the hidden size": _with_hidden(dense, 3 / 4, step),
        "a third of the KV groups": _with_groups(dense, 1 / 3),
        "unequal layers": _unequal(dense, step),
        "a quarter of the FFN": _with_ffn(dense, 1 / 4, step),
        "a quarter of the experts": _with_experts(dense, 1 / 4, routers),
        "half of the hidden size": _with_hidden(dense, 1 / 2, step),
        "fewer query heads in each group": _with_queries(dense, 2 / 3),
        "two thirds of the KV groups": _with_groups(dense, 2 / 3),
        "three quarters of the FFN": _with_ffn(dense, 3 / 4, step),
    }
    seen: set[tuple[object, ...]] = set()
    distinct = {}
    for name, plan in plans.items():
        shape = (len(plan.hidden), *map(Widths.of, plan.layers))
        if shape not in seen:
            distinct[name] = plan
        seen.add(shape)
    return distinct


def _without(plan: PrunePlan, layers: Iterable[int], **nothing: tuple[int, ...]) -> PrunePlan:
    for index in layers:
        plan = plan.with_layer(index, **nothing)
    return plan


def _round_to_step(share: float, whole: int, step: int) -> int:
    """Round a share of a size to a multiple of ``step`` if a smaller multiple than the whole size exists."""
    if whole < 2 * step:
        return max(1, round(share * whole))
    return min(max(step, round(share * whole / step) * step), whole)


def _with_ffn(plan: PrunePlan, share: float, step: int) -> PrunePlan:
    for index in plan.kept_layers:
        plan = plan.with_layer(index, ffn=range(_round_to_step(share, plan.dense.units("ffn", index), step)))
    return plan


def _with_experts(plan: PrunePlan, share: float, routers: Routers) -> PrunePlan:
    """Keep a share of the experts of every mixture; of a model without any, nothing changes."""
    for index in plan.kept_layers:
        if whole := plan.dense.units("experts", index):
            plan = plan.with_layer(index, experts=routers.first(routers.nearest(share, whole), whole))
    return plan


def _with_hidden(plan: PrunePlan, share: float, step: int) -> PrunePlan:
    return plan.keep_hidden(range(_round_to_step(share, plan.dense.hidden_size, step)))


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
    """Keep a share of the query heads of every KV group."""
    dense = plan.dense
    kept = max(1, round(share * dense.group_size))
    heads = [q for q in range(dense.num_attention_heads) if q % dense.group_size < kept]
    for index in plan.kept_layers:
        plan = plan.with_layer(index, query_heads=heads)
    return plan


def _unequal(plan: PrunePlan, step: int) -> PrunePlan:
    """Alternate three kinds of layers, with three pairs of query and KV heads if there are three KV groups."""
    dense = plan.dense
    groups = [
        dense.num_key_value_heads,
        max(1, dense.num_key_value_heads * 2 // 3),
        max(1, round(dense.num_key_value_heads / 3)),
    ]
    for index in plan.kept_layers:
        kind = index % 3
        plan = _keep_groups(plan, index, groups[kind])
        width = _round_to_step((1, 1 / 2, 3 / 4)[kind], dense.units("ffn", index), step)
        plan = plan.with_layer(index, ffn=range(width))
    return plan


def dense_config(model: str | Path | ModelSource) -> PretrainedConfig:
    """Return the configuration of a dense model; its weights are not read and may be missing.

    Raises:
        CheckpointError: it is missing or damaged.
        UnsupportedModelError: an unknown family, or a model that was cut to unequal sizes.
    """
    source = ModelSource.of(model)
    is_hub_id = source.name.count("/") == 1 and not source.name.startswith((".", "/", "~"))
    if source.gguf_file is None and not is_hub_id and not os.path.isdir(source.name):
        raise CheckpointError(f"{source.name!r} is neither a folder nor a hub id of the form owner/name.")
    check_table(family_for(source.config), "A search of sizes")
    return source.config


def write_probe(config: PretrainedConfig, plan: PrunePlan, folder: Path, dtype: str, tokenizer: Any = None) -> Path:
    """Write a checkpoint of the plan's sizes with random weights, in a stock architecture if one fits.

    Args:
        config: of the dense model.
        plan: sizes of the probe.
        folder: to create.
        dtype: of the weights: float32, bfloat16 or float16.
        tokenizer: to write as well, for formats that need one.

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


def engine_obstacle(config: PretrainedConfig, engine: str) -> Obstacle:
    """Return (plan) -> why an engine cannot run a plan of a model, or None.

    Args:
        config: of the dense model.
        engine: vllm, transformers or llamacpp.
    """
    if engine == "llamacpp":
        from pyprune.fit.cost import dense_shapes
        from pyprune.serving.gguf.layout import GgufRules

        return GgufRules(config, dense_shapes(config)).obstacle
    return partial(_vllm_obstacle, config) if engine == "vllm" else lambda plan: None


def _vllm_obstacle(config: PretrainedConfig, plan: PrunePlan) -> str | None:
    from pyprune.cut.target import choose_target

    family = family_for(config)
    target = choose_target(family, config, plan)
    if target.stock or family.served_by:
        return serving_obstacle(target.config.to_dict())
    return f"The vLLM plugin serves no sizes per layer for {family.model_type}."


def write_served(
    config: PretrainedConfig, plan: PrunePlan, folder: Path, engine: str, dtype: str, tokenizer: Any = None
) -> Model:
    """Write a probe in the form that an engine reads.

    Args:
        config: of the dense model.
        plan: sizes of the probe.
        folder: to create, for all files of the probe.
        engine: vllm, transformers or llamacpp.
        dtype: of the weights; for llamacpp a format of GGUF files.
        tokenizer: needed by llamacpp.

    Returns:
        (checkpoint folder or GGUF file, its config.json as plain data).

    Raises:
        UnsupportedModelError: the engine cannot run these sizes.
        OutputError: the folder cannot be written.
    """
    if reason := engine_obstacle(config, engine)(plan):
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
