"""What a budget can limit, and the one interface of everything that predicts it. No torch here.

Every quantity is a sum: what the model takes in any case (embedding, head, overhead), one share for each kept layer,
which depends on the hidden size and the layer's widths alone, and one for each pair of query and KV heads beyond the
first. That is what lets a mixed-integer programme choose the widths of all layers at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from pyprune.plan import PrunePlan

Kind = Literal["parameters", "memory", "prefill", "generation"]


@dataclass(frozen=True)
class Widths:
    """Sizes of one kept layer; 0 query heads and 0 KV heads = the attention is skipped, 0 FFN channels = the MLP is.

    Attributes:
        query_heads: kept query heads.
        kv_heads: kept key/value heads.
        ffn: kept FFN channels.
    """

    query_heads: int
    kv_heads: int
    ffn: int


@dataclass(frozen=True)
class Quantity:
    """Something that a model takes and a budget can limit.

    Attributes:
        kind: parameters (a count), memory (bytes of weights and key/value cache), prefill (seconds that one prompt
            takes) or generation (seconds that a batch of prompts takes until all its new tokens are there, the prompts
            included).
        tokens: memory: length of each context in tokens; prefill: length of the prompt; generation: new tokens of
            each sequence. 0 for parameters.
        batch: memory: contexts at a time; generation: sequences at a time. 1 elsewhere.
        prompt: generation: length of each prompt in tokens, so that every new token reads that much of the cache;
            0 = short prompts of different lengths. 0 elsewhere.
    """

    kind: Kind
    tokens: int = 0
    batch: int = 1
    prompt: int = 0

    @property
    def is_timed(self) -> bool:
        """Whether it is a time, which depends on a machine; the others are counted."""
        return self.kind in ("prefill", "generation")

    def __str__(self) -> str:
        """As it is written in a budget: prefill@2048, generation@64x128, memory@4x4096, parameters."""
        return self.kind if self.kind == "parameters" else f"{self.kind}@{self.place}"

    @property
    def place(self) -> str:
        """What stands behind the @ in a budget: 2048, 64x128, 4x64+1024; empty for parameters."""
        if self.kind == "parameters":
            return ""
        batch = f"{self.batch}x" if self.kind == "generation" or self.batch > 1 else ""
        return f"{batch}{self.tokens}" + (f"+{self.prompt}" if self.prompt else "")


class CostModel(Protocol):
    """Predicts quantities: exactly (parameters, memory), or from what was measured on a machine (times)."""

    def fixed(self, quantity: Quantity, hidden_size: int) -> float:
        """What a model of this hidden size takes without any layer, in the quantity's unit."""

    def layer(self, quantity: Quantity, hidden_size: int, widths: Widths) -> float:
        """What one kept layer of these widths takes, in the quantity's unit; a layer that is dropped takes nothing."""

    def head_pair(self, quantity: Quantity) -> float:
        """What every distinct pair of query and KV heads beyond the first adds to a model; not negative."""


def further_head_pairs(layers: Iterable[Widths]) -> int:
    """Distinct pairs of query and KV heads beyond the first among layers with attention.

    vLLM plans the attention of each pair anew in every step.
    """
    return max(0, head_pairs(layers) - 1)


def head_pairs(layers: Iterable[Widths]) -> int:
    """Distinct pairs of query and KV heads among layers that have attention."""
    return len({(layer.query_heads, layer.kv_heads) for layer in layers if layer.query_heads})


def predicted(model: CostModel, quantity: Quantity, plan: PrunePlan) -> float:
    """What a plan takes, in the quantity's unit: the fixed part, its layers, and their further head pairs.

    Raises:
        BudgetError: the cost model does not know the quantity.
    """
    hidden = len(plan.hidden)
    layers = [Widths(*layer.widths) for layer in plan.layers]
    total = model.fixed(quantity, hidden) + sum(model.layer(quantity, hidden, widths) for widths in layers)
    return total + model.head_pair(quantity) * further_head_pairs(layers)
