"""Name the quantities that a budget limits, and the interface of the models that predict them. Does not import torch.

Every quantity is a sum of three parts: a base (embedding, head, overhead), a share for each kept layer, and a share for
each pair of query and KV heads beyond the first. A layer's share depends only on the hidden size and its widths.
Because of this sum a mixed-integer programme can choose the widths of all layers at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pyprune.plan import DECODER, LayerPlan, PrunePlan

Kind = Literal["parameters", "memory", "prefill", "generation"]


class Widths(NamedTuple):
    """Sizes of one kept layer; 0 query heads and 0 KV heads = the attention is skipped, 0 FFN channels = the MLP is.

    The FFN channels of a mixture are those of an expert.

    A layer that has no such block has 0 of its units too. Other blocks and axes are kept whole.

    Attributes:
        query_heads: kept query heads.
        kv_heads: kept key/value heads.
        ffn: kept FFN channels.
        kind: of the layer.
        experts: kept experts, between which the router of a mixture chooses.
    """

    query_heads: int
    kv_heads: int
    ffn: int
    kind: str = DECODER
    experts: int = 0

    @classmethod
    def of(cls, layer: LayerPlan) -> Widths:
        """Return the sizes of a layer of a plan."""
        return cls(*layer.widths, layer.kind, len(layer.units("experts")))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers alone; that of experts is there for mixtures only."""
        return (*self[:3], self.experts) if self.experts else self[:3]


@dataclass(frozen=True)
class Quantity:
    """A cost of a model that a budget can limit.

    Attributes:
        kind: parameters (a count), memory (bytes of weights and key/value cache), prefill (seconds for one prompt) or
            generation (seconds for a batch of prompts and all its new tokens).
        tokens: memory: length of each context in tokens; prefill: length of the prompt; generation: new tokens of
            each sequence. 0 for parameters.
        batch: memory: contexts at a time; generation: sequences at a time. 1 elsewhere.
        prompt: generation: length of each prompt in tokens, which every new token reads from the cache; 0 = short
            prompts of different lengths. 0 elsewhere.
    """

    kind: Kind
    tokens: int = 0
    batch: int = 1
    prompt: int = 0

    @property
    def is_timed(self) -> bool:
        """Check whether it is a time, which depends on a machine; the others are counted."""
        return self.kind in ("prefill", "generation")

    def __str__(self) -> str:
        """Write it as in a budget: prefill@2048, generation@64x128, memory@4x4096, parameters."""
        return self.kind if self.kind == "parameters" else f"{self.kind}@{self.place}"

    @property
    def place(self) -> str:
        """The part after the @ in a budget: 2048, 64x128, 4x64+1024; empty for parameters."""
        if self.kind == "parameters":
            return ""
        batch = f"{self.batch}x" if self.kind == "generation" or self.batch > 1 else ""
        return f"{batch}{self.tokens}" + (f"+{self.prompt}" if self.prompt else "")


class CostModel(ABC):
    """Predicts quantities: exactly (parameters, memory), or from measurements on a machine (times)."""

    @abstractmethod
    def base(self, quantity: Quantity, hidden_size: int) -> float:
        """Predict the cost of a model of this hidden size without any layer, in the quantity's unit."""

    @abstractmethod
    def layer(self, quantity: Quantity, hidden_size: int, widths: Widths) -> float:
        """Predict the cost of one kept layer of these widths, in the quantity's unit; a dropped layer costs nothing."""

    @abstractmethod
    def head_pair(self, quantity: Quantity) -> float:
        """Predict the cost of every distinct pair of query and KV heads beyond the first; not negative."""

    def predict(self, quantity: Quantity, plan: PrunePlan) -> float:
        """Predict the cost of a plan, in the quantity's unit: the base, its layers, and their further head pairs.

        Raises:
            BudgetError: the cost model does not know the quantity.
        """
        hidden = len(plan.hidden)
        layers = [Widths.of(layer) for layer in plan.layers]
        total = self.base(quantity, hidden) + sum(self.layer(quantity, hidden, widths) for widths in layers)
        return total + self.head_pair(quantity) * further_head_pairs(layers)


def further_head_pairs(layers: Iterable[Widths]) -> int:
    """Count distinct pairs of query and KV heads beyond the first among layers with attention.

    vLLM plans the attention of each pair separately in every step.
    """
    return max(0, head_pairs(layers) - 1)


def head_pairs(layers: Iterable[Widths]) -> int:
    """Count distinct pairs of query and KV heads among layers that have attention."""
    return len({(layer.query_heads, layer.kv_heads) for layer in layers if layer.query_heads})
