"""Heads of latent attention, whose matrices have different numbers of channels for a head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pyprune.cut.compact import compact_
from pyprune.cut.mask import mask_
from pyprune.errors import UnsupportedModelError
from pyprune.families import family_for, named_axes
from pyprune.plan import PrunePlan
from tests._support.inferred import LATENT, tiny_inferred
from tests._support.models import tiny_batch
from tests._support.plans import keep_kv_groups
from tests._support.scores import options, scoring_of
from tests.families.test_inferred import check, everything_of

VALUE, QUERY, KEY_AND_VALUE = 11, 18, 21
"""Channels of a head that the output projection reads, of its query, and of its key and value behind the rank."""


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_a_model_without_a_rank_of_its_queries_is_cut(model_type: str, tmp_path: Path) -> None:
    """DeepSeek-V2-Lite projects queries at once."""
    model = tiny_inferred(model_type, q_lora_rank=None)
    assert model.model.layers[0].self_attn.q_proj.weight.shape[0] == 6 * QUERY
    check(model, everything_of(model), tmp_path)


@pytest.mark.parametrize("model_type", LATENT)
def test_heads_have_their_own_channels_in_every_matrix(model_type: str) -> None:
    model = tiny_inferred(model_type)
    plan = family_for(model).plan(model.config)
    assert plan.dense.blocks(0)["attention"].head_dims == {"qk_head_dim": QUERY, "kv_head_dim": KEY_AND_VALUE}
    attention = model.model.layers[1].self_attn
    whole = {name: getattr(attention, name).weight.detach().clone() for name in ("q_b_proj", "kv_b_proj", "o_proj")}
    for i in plan.kept_layers:
        plan = keep_kv_groups(plan, i, [1, 4])
    mask_(model, plan)
    for name, channels, dim in (("q_b_proj", QUERY, 0), ("kv_b_proj", KEY_AND_VALUE, 0), ("o_proj", VALUE, 1)):
        masked = getattr(attention, name).weight
        heads = zip(whole[name].split(channels, dim), masked.split(channels, dim), strict=True)
        for head, (before, after) in enumerate(heads):
            assert torch.equal(after, before if head in (1, 4) else torch.zeros_like(before)), (name, head)
    assert compact_(model, plan).stock
    config = model.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.v_head_dim) == (2, 2, VALUE)
    assert (config.qk_rope_head_dim, config.head_dim, config.kv_lora_rank) == (8, 8, 14)


def test_a_head_scores_with_its_query_its_key_and_its_value() -> None:
    model = tiny_inferred("youtu")
    run = scoring_of(model, tiny_batch(), options("magnitude"))
    for param in named_axes(model):
        if run.scope.dims(param.row, param.layer):
            run.add_elements(param, param.parameter)
    attention = model.model.layers[2].self_attn
    parts = (
        attention.q_b_proj.weight.view(6, -1),
        attention.kv_b_proj.weight.view(6, -1),
        attention.o_proj.weight.T.reshape(6, -1),
    )
    expected = sum(part.abs().double().sum(1) for part in parts)
    assert torch.allclose(run.scores.group_scores(2, "heads"), expected, rtol=1e-6)


def test_plans_name_the_channels_of_a_head() -> None:
    model = tiny_inferred("youtu")
    plan = keep_kv_groups(family_for(model).plan(model.config), 0, [2])
    sizes = plan.to_dict()["dense"]["kinds"]["decoder"]["blocks"]["attention"]
    assert sizes == {"query_heads": 6, "kv_heads": 6, "head_dim": 11, "qk_head_dim": 18, "kv_head_dim": 21}
    assert PrunePlan.from_json(plan.to_json()) == plan
    assert "head_dim 11, qk_head_dim 18, kv_head_dim 21" in str(plan.dense)


def test_channels_of_a_head_that_no_field_states_are_refused() -> None:
    family = family_for(tiny_inferred("youtu"))
    with pytest.raises(UnsupportedModelError, match=r"channels of a head of the row .*q_b_proj.*'qk_head_dim'"):
        replace(family, head_fields={})
