"""Shared parts of tables: groups of rows, and obstacles of stock architectures to a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pyprune.families.base import Axis, Block, Dimension, Role, Row, StockTarget
from pyprune.plan import PrunePlan

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LAYER = "model.layers.{i}."
EMBEDDING = Row("model.embed_tokens.weight", ("vocab", "hidden"), "embedding")
HEAD = Row("lm_head.weight", ("vocab", "hidden"), "head")
HEAD_NORMS = (
    Row(LAYER + "self_attn.q_norm.weight", ("head_dim",), "inner", "attention"),
    Row(LAYER + "self_attn.k_norm.weight", ("head_dim",), "inner", "attention"),
)
"""Norms of every single query and key head (Qwen3, Gemma 3)."""


def norm_rows(name: str, role: Role, block: Block | None = None, *, bias: bool = False) -> tuple[Row, ...]:
    """Make the rows of a norm over the hidden axis.

    Args:
        name: of the module.
        role: pre_norm, post_norm or final_norm.
        block: the sub-block that the norm serves alone; None for several or none.
        bias: whether it may have one (LayerNorm).
    """
    weight = Row(f"{name}.weight", ("hidden",), role, block)
    return (weight, replace(weight, pattern=f"{name}.bias")) if bias else (weight,)


def input_rows(name: str, counts: Dimension, block: Block, *, bias: bool = False) -> tuple[Row, ...]:
    """Make the rows of a projection that reads the stream.

    Args:
        name: of the module.
        counts: axis of its output; several axes if several projections are fused in it.
        block: the sub-block that it belongs to.
        bias: whether it may have one.
    """
    weight = Row(f"{name}.weight", (counts, "hidden"), "reader", block)
    return (weight, Row(f"{name}.bias", (counts,), "inner", block)) if bias else (weight,)


def output_rows(name: str, axis: Axis, block: Block) -> tuple[Row, ...]:
    """Make the rows of the projection that writes to the stream; it may have a bias, which compensation adds.

    Args:
        name: of the module.
        axis: of its input.
        block: the sub-block.
    """
    weight = Row(f"{name}.weight", ("hidden", axis), "writer", block)
    return weight, Row(f"{name}.bias", ("hidden",), "writer", block)


def attention_rows(
    layer: str = LAYER, *, output: str = "o_proj", biases: bool = False, width_norm: bool = False
) -> tuple[Row, ...]:
    """Make the rows of separate projections of queries, keys and values, and of the output projection.

    Args:
        layer: pattern of a layer, with the dot at its end.
        output: name of the output projection.
        biases: whether queries, keys and values may have biases.
        width_norm: queries and keys are normalised over their whole width, by ``q_norm`` and ``k_norm``.
    """
    prefix = layer + "self_attn."
    rows: list[Row] = []
    axes: dict[str, Axis] = {"q": "heads", "k": "kv_heads", "v": "kv_heads"}
    for name, axis in axes.items():
        projection = input_rows(f"{prefix}{name}_proj", axis, "attention", bias=biases)
        if width_norm and name != "v":
            rows += [replace(row, width_norm="input") for row in projection]
            rows.append(Row(f"{prefix}{name}_norm.weight", (axis,), "inner", "attention", width_norm="weight"))
        else:
            rows += projection
    return (*rows, *output_rows(f"{prefix}{output}", "heads", "attention"))


def gated_mlp_rows(*, biases: bool = False) -> tuple[Row, ...]:
    """Make the rows of an MLP ``down(act(gate) * up)``; gate and up may have biases if ``biases``."""
    return (
        *input_rows(LAYER + "mlp.gate_proj", "ffn", "mlp", bias=biases),
        *input_rows(LAYER + "mlp.up_proj", "ffn", "mlp", bias=biases),
        *output_rows(LAYER + "mlp.down_proj", "ffn", "mlp"),
    )


def plain_mlp_rows(up: str, down: str) -> tuple[Row, ...]:
    """Make the rows of an MLP ``down(act(up))`` that may have biases on both.

    Args:
        up: pattern of the module that reads the stream.
        down: of the one that writes it.
    """
    return (*input_rows(up, "ffn", "mlp", bias=True), *output_rows(down, "ffn", "mlp"))


def decoder_rows(
    attention: tuple[Row, ...] = (),
    mlp: tuple[Row, ...] = (),
    *,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    norm_bias: bool = False,
) -> tuple[Row, ...]:
    """Make the table of a LLaMA-like decoder: one norm before each sub-block.

    Args:
        attention: rows of the attention; empty = :func:`attention_rows`.
        mlp: rows of the MLP; empty = :func:`gated_mlp_rows`.
        attention_bias: whether queries, keys and values may have biases.
        mlp_bias: whether gate and up may have biases.
        norm_bias: whether norms may have biases (LayerNorm).
    """
    return (
        EMBEDDING,
        *norm_rows(LAYER + "input_layernorm", "pre_norm", "attention", bias=norm_bias),
        *(attention or attention_rows(biases=attention_bias)),
        *norm_rows(LAYER + "post_attention_layernorm", "pre_norm", "mlp", bias=norm_bias),
        *(mlp or gated_mlp_rows(biases=mlp_bias)),
        *norm_rows("model.norm", "final_norm", bias=norm_bias),
        HEAD,
    )


Obstacle = Callable[["PretrainedConfig", PrunePlan], "str | None"]
"""(dense config, plan) -> reason why a stock architecture cannot hold the plan, or None."""


def first_obstacle(*checks: Obstacle) -> Obstacle:
    """Combine checks into one that returns the first obstacle."""
    return lambda config, plan: next(filter(None, (check(config, plan) for check in checks)), None)


def width_obstacle(config: PretrainedConfig, plan: PrunePlan) -> str | None:
    """Explain why no stock architecture can hold the plan's widths; None if one can."""
    return None if plan.is_uniform else "widths differ between layers or a sub-block is skipped"


def heads_obstacle(config: PretrainedConfig, plan: PrunePlan) -> str | None:
    """Explain why the sliced hidden size breaks the rule that heads divide it; None if it does not."""
    # A closed attention has no heads in a plan.
    hidden, heads = len(plan.hidden), len(plan.layers[0].query_heads) or config.num_attention_heads
    return None if hidden % heads == 0 else f"hidden {hidden} is not a multiple of {heads} heads"


def square_obstacle(config: PretrainedConfig, plan: PrunePlan) -> str | None:
    """Explain why heads and hidden size do not fit an architecture that derives one from the other, or None."""
    hidden, heads = len(plan.hidden), len(plan.layers[0].query_heads)
    if heads * plan.dense.head_dim == hidden:
        return None
    return f"{heads} heads of {plan.dense.head_dim} channels are not as wide as the stream of {hidden}"


def output_bias_obstacle(name: str) -> Obstacle:
    """Make the check of an architecture without biases on output projections: it cannot hold a compensated model."""
    reason = f"{name} has no biases on its output projections"
    return lambda config, plan: reason if getattr(config, "output_bias", False) else None


def tied_head_obstacle(config: PretrainedConfig, plan: PrunePlan) -> str | None:
    """Explain why a stock LayerNorm cannot hold the sliced hidden size of a model with a tied head, or None."""
    tied = config.tie_word_embeddings and len(plan.hidden) != plan.dense.hidden_size
    return "a tied head reads what the LayerNorm gauge shifts" if tied else None


QKV_BIASES: tuple[tuple[str, Axis], ...] = (
    (LAYER + "self_attn.q_proj.bias", "heads"),
    (LAYER + "self_attn.k_proj.bias", "kv_heads"),
    (LAYER + "self_attn.v_proj.bias", "kv_heads"),
)
_UP_BIASES: tuple[tuple[str, Axis], ...] = (
    (LAYER + "mlp.gate_proj.bias", "ffn"),
    (LAYER + "mlp.up_proj.bias", "ffn"),
)


def biased_target(model_type: str, obstacle: Obstacle, *, qkv_biases: bool = False) -> StockTarget:
    """Make a target with LLaMA's two switches for biases, ``attention_bias`` and ``mlp_bias``.

    Each switch stands for all projections of a block, so biases that the source lacks become zeros.

    Args:
        model_type: of the target.
        obstacle: see :class:`StockTarget`.
        qkv_biases: the source always has biases on q, k and v, with no switch in its configuration (Qwen2).
    """
    flags, zeros = partial(_bias_flags, qkv_biases), partial(_zero_biases, qkv_biases)
    return StockTarget(model_type, obstacle, flags, zeros)


def _bias_flags(always_qkv: bool, config: PretrainedConfig) -> dict[str, Any]:
    qkv, output, up = _biases_of(always_qkv, config)
    return {"attention_bias": qkv or output, "mlp_bias": up or output}


def _zero_biases(always_qkv: bool, config: PretrainedConfig) -> tuple[tuple[str, Axis], ...]:
    qkv, output, up = _biases_of(always_qkv, config)
    zeros = QKV_BIASES if output and not qkv else ()
    zeros += _UP_BIASES if output and not up else ()
    # A source with q/k/v biases alone (Qwen2) has none on the output projection.
    if qkv and not output and not getattr(config, "attention_bias", False):
        zeros += ((LAYER + "self_attn.o_proj.bias", "hidden"),)
    return zeros


def _biases_of(always_qkv: bool, config: PretrainedConfig) -> tuple[bool, bool, bool]:
    """Return whether a LLaMA-like source has biases on (q, k, v; output projections by compensation; gate and up)."""
    qkv = always_qkv or bool(getattr(config, "attention_bias", False))
    return qkv, bool(getattr(config, "output_bias", False)), bool(getattr(config, "mlp_bias", False))
