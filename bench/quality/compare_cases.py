"""What compare.py cuts, the ways it gets there, and the order of its table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Action = Literal[
    "finetune",
    "finetune-lean",
    "finetune-lean-passes",
    "papers",
    "anneal",
    "cut",
    "reconstruct",
    "reconstruct-prose",
    "reconstruct-bfloat16",
    "lora",
    "distil",
    "both",
    "finetune-mixture",
    "distil-mixture",
    "both-mixture",
]
Arm = tuple[Action, ...]

CUTS: tuple[Action, ...] = ("cut", "reconstruct", "reconstruct-prose", "reconstruct-bfloat16")
TRAININGS: tuple[Action, ...] = (
    "finetune",
    "finetune-lean",
    "finetune-lean-passes",
    "papers",
    "anneal",
    "lora",
    "distil",
    "both",
    "finetune-mixture",
    "distil-mixture",
    "both-mixture",
)

DENSE: Mapping[str, Arm] = {
    "dense": (),
    "dense, fine-tuned": ("finetune",),
    "dense, fine-tuned in lean memory": ("finetune-lean",),
    "dense, fine-tuned in lean memory, a pass for each sequence": ("finetune-lean-passes",),
}
"""What every case is compared with: label -> what is done, in order."""

CONTROLS: Mapping[str, Arm] = {
    "direct": ("cut",),
    "reconstructed": ("reconstruct",),
    "reconstructed on prose alone": ("reconstruct-prose",),
    "reconstructed in bfloat16": ("reconstruct-bfloat16",),
    "fine-tuned, then cut": ("finetune", "cut"),
    "fine-tuned, then reconstructed": ("finetune", "reconstruct"),
    "cut, then fine-tuned": ("cut", "finetune"),
    "reconstructed, then fine-tuned": ("reconstruct", "finetune"),
    "cut, then logit KL": ("cut", "distil"),
    "reconstructed, then logit KL": ("reconstruct", "distil"),
    "reconstructed, then text and logit KL": ("reconstruct", "both"),
    "reconstructed, then fine-tuned on the mixture": ("reconstruct", "finetune-mixture"),
    "reconstructed, then logit KL on the mixture": ("reconstruct", "distil-mixture"),
    "reconstructed, then text and logit KL on the mixture": ("reconstruct", "both-mixture"),
}
"""Arms of every case."""

REGULARISED: Mapping[str, Arm] = {
    "papers' form, then cut": ("papers", "cut"),
    "papers' form, then reconstructed": ("papers", "reconstruct"),
    "annealed, then cut": ("anneal", "cut"),
    "annealed, then reconstructed": ("anneal", "reconstruct"),
}
"""Arms of cases with a method that trains before the cut (ELDeR for layers, DReSS for hidden channels)."""

RECOVERED: Mapping[str, Arm] = {
    "papers' form: cut, then LoRA": ("cut", "lora"),
    "papers' form: reconstructed, then LoRA": ("reconstruct", "lora"),
}
"""Arms of cases whose papers (LLM-Pruner, MoreauPruner) cut first and recover with LoRA."""


@dataclass(frozen=True)
class Case:
    """One cut.

    Attributes:
        name: on the command line and in the records.
        label: in the table.
        method: that regularises before the cut; empty = the papers only recover.
    """

    name: str
    label: str
    method: Literal["elder", "dress", ""]

    @property
    def arms(self) -> dict[str, Arm]:
        """Label -> what is done, in order."""
        return {**CONTROLS, **(REGULARISED if self.method else RECOVERED)}


CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        Case("layers-7", "7 of 30 layers (ELDeR's gates)", "elder"),
        Case("ffn-20", "20 % of the parameters as FFN channels (Taylor, local)", ""),
        Case("ffn-20-obs", "20 % of the parameters as FFN channels (Optimal Brain Surgeon)", ""),
        Case("heads-ffn-20", "20 % of the parameters as heads and FFN channels (Taylor, by layer)", ""),
        Case("heads-ffn-20-obs", "20 % of the parameters as heads and FFN channels (Optimal Brain Surgeon)", ""),
        Case("hidden-25", "144 of 576 hidden channels (smallest energy)", "dress"),
        Case("layers-15", "15 of 30 layers (ELDeR's gates)", "elder"),
        Case("heads-ffn-50", "50 % of the parameters as heads and FFN channels (Taylor, by layer)", ""),
    )
}
