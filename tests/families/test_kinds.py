"""A family whose layers are of two kinds, one with a closed block: invented, so that no model is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pyprune.cut.compact import tensor_cut
from pyprune.errors import PlanError, UnsupportedModelError
from pyprune.families import Family, Row, StockClasses, check_plan, parameters_after, shapes_after
from pyprune.families.base import decoder_blocks
from pyprune.families.common import attention_rows, gated_mlp_rows, norm_rows, output_rows
from pyprune.plan import BlockSizes, PrunePlan

LAYER = "model.layers.{i}."
ROWS = (
    Row("model.embed_tokens.weight", ("vocab", "hidden"), "embedding"),
    *norm_rows(LAYER + "input_layernorm", "pre_norm"),
    *attention_rows(),
    Row(LAYER + "mixer.in_proj.weight", ("inner", "hidden"), "reader", "mixer"),
    Row(LAYER + "mixer.conv.weight", ("inner", "inner"), "inner", "mixer"),
    Row(LAYER + "mixer.out_proj.weight", ("hidden", "inner"), "writer", "mixer"),
    *gated_mlp_rows(),
    # One name in both kinds of layers, with other axes.
    Row(LAYER + "extra.weight", ("hidden", "slots"), "writer", "extra", kind="mixing"),
    Row(LAYER + "extra.weight", ("hidden", "inner"), "writer", "mlp", kind="attending"),
)
KINDS: dict[str, dict[str, tuple[str, ...]]] = {
    "attending": {"attention": ("heads", "kv_heads"), "mlp": ("ffn",)},
    "mixing": {"mixer": (), "extra": ("slots",), "mlp": ("ffn",)},
}


def layer_kinds(config: Any) -> tuple[str, ...]:
    return tuple("attending" if kind == "full_attention" else "mixing" for kind in config.layer_types)


def block_sizes(family: Family, config: Any, kind: str) -> dict[str, BlockSizes]:
    blocks = decoder_blocks(family, config, kind)
    if kind == "attending":
        return blocks
    return {"mixer": BlockSizes(), "extra": BlockSizes({"slots": 3}), "mlp": BlockSizes({"ffn": 10})}


def invented(rows: tuple[Row, ...] = ROWS) -> Family:
    classes = StockClasses.locate("llama", "Llama")
    return Family("invented", classes, rows, (), kinds=KINDS, layer_kinds=layer_kinds, block_sizes=block_sizes)


CONFIG: Any = SimpleNamespace(
    layer_types=["conv", "full_attention", "conv"],
    num_hidden_layers=3,
    hidden_size=12,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=5,
    intermediate_size=7,
    vocab_size=20,
    tie_word_embeddings=False,
)
MIXING = {
    "mixer.in_proj.weight": (9, 12),
    "mixer.conv.weight": (9, 3),
    "mixer.out_proj.weight": (12, 9),
    "extra.weight": (12, 3),
    **{f"mlp.{name}_proj.weight": (10, 12) for name in ("gate", "up")},
    "mlp.down_proj.weight": (12, 10),
}
ATTENDING = {
    "self_attn.q_proj.weight": (20, 12),
    "self_attn.k_proj.weight": (10, 12),
    "self_attn.v_proj.weight": (10, 12),
    "self_attn.o_proj.weight": (12, 20),
    "extra.weight": (12, 3),
    **{f"mlp.{name}_proj.weight": (7, 12) for name in ("gate", "up")},
    "mlp.down_proj.weight": (12, 7),
}
SHAPES: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (20, 12)} | {
    f"model.layers.{i}.{name}": shape
    for i, parameters in enumerate((MIXING, ATTENDING, MIXING))
    for name, shape in {"input_layernorm.weight": (12,), **parameters}.items()
}


def test_every_axis_is_cut_at_the_sizes_of_its_kind_of_layer() -> None:
    family = invented()
    plan = family.plan(CONFIG).keep_hidden(range(8)).drop_layers([2])
    plan = plan.with_layer(0, ffn=[1, 4, 9], slots=[2]).with_layer(1, query_heads=[2, 3], kv_heads=[1], ffn=[0, 6])
    check_plan(plan, family, CONFIG)
    assert PrunePlan.from_json(plan.to_json()) == plan
    assert shapes_after(family, SHAPES, plan) == {
        "model.embed_tokens.weight": (20, 8),
        "model.layers.0.input_layernorm.weight": (8,),
        "model.layers.0.mixer.in_proj.weight": (9, 8),
        "model.layers.0.mixer.conv.weight": (9, 3),
        "model.layers.0.mixer.out_proj.weight": (8, 9),
        "model.layers.0.extra.weight": (8, 1),
        "model.layers.0.mlp.gate_proj.weight": (3, 8),
        "model.layers.0.mlp.up_proj.weight": (3, 8),
        "model.layers.0.mlp.down_proj.weight": (8, 3),
        "model.layers.1.input_layernorm.weight": (8,),
        "model.layers.1.self_attn.q_proj.weight": (10, 8),
        "model.layers.1.self_attn.k_proj.weight": (5, 8),
        "model.layers.1.self_attn.v_proj.weight": (5, 8),
        "model.layers.1.self_attn.o_proj.weight": (8, 10),
        "model.layers.1.extra.weight": (8, 3),
        "model.layers.1.mlp.gate_proj.weight": (2, 8),
        "model.layers.1.mlp.up_proj.weight": (2, 8),
        "model.layers.1.mlp.down_proj.weight": (8, 2),
    }
    whole = sum(rows * columns for rows, columns in ((9, 12), (9, 3), (12, 9), (12, 3), (10, 12), (10, 12), (12, 10)))
    assert (
        parameters_after(family, SHAPES, family.plan(CONFIG))
        - parameters_after(family, SHAPES, family.plan(CONFIG).drop_layers([2]))
        == whole + 12
    )  # its norm too


def test_one_name_in_two_kinds_of_layers_is_cut_by_the_row_of_each() -> None:
    family = invented()
    plan = family.plan(CONFIG).with_layer(0, slots=[0, 2]).with_layer(1, ffn=[3])
    cuts = [tensor_cut(f"model.layers.{i}.extra.weight", family, plan, tied=False) for i in range(3)]
    assert [None if cut is None or cut.columns is None else cut.columns.tolist() for cut in cuts] == [
        [0, 2],
        None,
        None,
    ]


def test_a_closed_block_stays_while_others_go() -> None:
    family = invented()
    plan = family.plan(CONFIG).with_layer(0, ffn=[])
    check_plan(plan, family, CONFIG)
    kept = shapes_after(family, SHAPES, plan)
    assert {name.removeprefix("model.layers.0.") for name in kept if name.startswith("model.layers.0.")} == {
        "input_layernorm.weight",
        *(name for name in MIXING if not name.startswith("mlp.")),
    }


def test_a_block_that_has_no_placeholder_goes_only_with_its_layer() -> None:
    family = invented()
    with pytest.raises(PlanError, match="removes the block 'extra' of layer 2 alone"):
        check_plan(family.plan(CONFIG).with_layer(2, slots=[]), family, CONFIG)
    with pytest.raises(UnsupportedModelError, match="'mixer' of 'invented' can only be left out with its whole layer"):
        family.block_modules("mixer")


def test_a_plan_of_other_kinds_is_refused() -> None:
    other: Any = SimpleNamespace(**vars(CONFIG) | {"layer_types": ["full_attention", "conv", "conv"]})
    with pytest.raises(PlanError, match="Apply a plan to the dense model that it was made for"):
        check_plan(invented().plan(CONFIG), invented(), other)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (Row(LAYER + "a.weight", ("ffm", "hidden"), "reader", "mlp"), "Unknown axis .* 'ffm'. Did you mean 'ffn'"),
        (Row(LAYER + "a.weight", ("ffn", "hidden"), "reader", "mpl"), "Unknown block .* 'mpl'. Did you mean 'mlp'"),
        (Row(LAYER + "a.weight", ("ffn", "hidden"), "reader", "mlp", kind="mixin"), "Did you mean 'mixing'"),
        (Row(LAYER + "a.weight", ("ffn", "hidden"), "reader", "attention"), "Unknown axis .* 'ffn'"),
        (Row(LAYER + "a.weight", ("heads", "hidden"), "reader", "attention", kind="mixing"), "Unknown block"),
        (Row(LAYER + "a.weight", ("ffn", "hidden"), "reader"), "Unknown axis"),
    ],
    ids=["axis", "block", "kind", "axis of another block", "block of another kind", "no block"],
)
def test_a_row_with_a_typo_is_refused(row: Row, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        invented((*ROWS, row))


def output_matrices(name: str) -> Family:
    return invented((*ROWS, *output_rows(f"{LAYER}mixer.{name}", "inner", "mixer")))


def test_a_block_with_several_outputs_is_no_place_for_a_bias() -> None:
    assert invented().output_projection("mixer") == "mixer.out_proj"
    with pytest.raises(UnsupportedModelError, match="through 2 matrices"):
        output_matrices("second").output_projection("mixer")
