"""Prove an inferred table before it is used: on a tiny model, cutting must equal masking."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pyprune.cut.mask import mask_
from pyprune.errors import UnsupportedModelError
from pyprune.families import Family, all_families, family_of_type
from pyprune.families.infer import tiny_sizes, undisturbed
from pyprune.plan import PrunePlan

ERROR = 1e-3
"""Largest relative difference of logits that rounding explains; a wrong rule makes more than 1e-2."""
Cut = Callable[[PreTrainedModel, PrunePlan], object]
_at_work: set[str] = set()


def assert_proven(family: Family, cut: Cut) -> None:
    """Refuse an inferred table that fails on a tiny model of its type; it takes a second, once in a process.

    Args:
        family: of a model that is to be cut.
        cut: compaction in place, which may ask for the proof itself.

    Raises:
        UnsupportedModelError: the message has the difference.
    """
    name = family.model_type
    if family.layers_alone or name in all_families() or name in _at_work:
        return
    _at_work.add(name)
    try:
        error = error_of_cut(name, cut)
    finally:
        _at_work.remove(name)
    if not error < ERROR:
        raise UnsupportedModelError(
            f"The table that pyprune inferred for the model type {name!r} is wrong: it cuts a tiny model to logits "
            f"that are {error:.2%} off. Nothing was cut. Please report the type and the version of Transformers."
        )


@cache
def error_of_cut(model_type: str, cut: Cut) -> float:
    """Return the relative difference between the logits of a cut tiny model and of a masked one."""
    family = family_of_type(model_type)
    with undisturbed(), torch.no_grad():
        model = _tiny_model(model_type)
        plan = _plan_of_open_axes(family, model)
        masked, ids = copy.deepcopy(model), torch.arange(3, 20)[None]
        mask_(masked, plan)
        cut(model, plan)
        expected = masked(ids, use_cache=False).logits
        return float((model(ids, use_cache=False).logits - expected).norm() / expected.norm())


def _tiny_model(model_type: str) -> PreTrainedModel:
    """Build a tiny model whose norms and biases are random too."""
    config = AutoConfig.for_model(model_type, **tiny_sizes(model_type))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        if parameter.ndim > 1:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(0.3 * noise)
    return model  # type: ignore[no-any-return]


def _plan_of_open_axes(family: Family, model: PreTrainedModel) -> PrunePlan:
    """Return a plan that removes something from every open axis, not the same in every layer."""
    closed, plan = family.closed_axes(model.config), family.plan(model.config)
    dense = plan.dense
    attention, mlp = ([i for i in range(dense.num_layers) if dense.units(axis, i)] for axis in ("query_heads", "ffn"))
    if "heads" not in closed and attention:
        plan = plan.with_layer(
            attention[0], kv_heads=[1], query_heads=[dense.blocks(attention[0])["attention"].group_size]
        )
    if "ffn" not in closed and mlp:
        plan = plan.with_layer(mlp[0], ffn=range(5, 30)).with_layer(mlp[2 % len(mlp)], ffn=range(9))
    for axis, kept in (("shared_ffn", range(5, 30)), ("experts", (1, 2, 4, 6))):
        plan = plan.with_layer(4, **{axis: kept}) if dense.units(axis, 4) else plan
    if "layers" not in closed:
        plan = plan.drop_layers([next(i for i in (1, 2, 3) if [i] != attention[:1])])
    return plan if "hidden" in closed else plan.keep_hidden(range(3, dense.hidden_size - 8))
