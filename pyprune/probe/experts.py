"""Statistics of the inputs of experts, whose matrices are in one module and see only the tokens routed to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pyprune.errors import UnsupportedModelError


class ExpertNorms:
    """Sums of the squares of the inputs of all experts of a layer; called as a hook in front of their module.

    Attributes:
        tokens: float64 [experts], tokens routed to each of them.
        hidden: float64 [experts, hidden], sums over these tokens of the squared inputs of gate and up.
        inner: float64 [experts, ffn], the same of the inputs of the down projection.
    """

    def __init__(self) -> None:
        self.tokens = self.hidden = self.inner = torch.zeros(0, dtype=torch.float64)

    def __call__(self, module: Any, args: tuple[Tensor, ...]) -> None:
        """Add the tokens of a call with (hidden states [tokens, hidden], experts of each token [tokens, k], ...).

        Raises:
            UnsupportedModelError: the module is called in another way.
        """
        if len(args) < 2 or not hasattr(module, "_apply_gate"):
            raise UnsupportedModelError(
                f"The experts of {type(module).__name__} show no tokens that each of them reads, so that wanda cannot "
                "score their channels. Use score.axes=[heads], or the method magnitude."
            )
        x, chosen = args[0].flatten(0, -2), args[1]
        if not len(self.tokens):
            width = module.down_proj.shape[1 if module.is_transposed else 2]
            zeros = torch.zeros(len(module.down_proj), 1 + x.shape[1] + width, dtype=torch.float64, device=x.device)
            self.tokens, self.hidden, self.inner = zeros[:, 0], zeros[:, 1 : 1 + x.shape[1]], zeros[:, 1 + x.shape[1] :]
        for expert in chosen.unique().tolist():
            routed = x[(chosen == expert).any(-1)]
            self.tokens[expert] += len(routed)
            self.hidden[expert] += routed.double().square().sum(0)
            self.inner[expert] += _inner(module, expert, routed).double().square().sum(0)

    @property
    def bytes(self) -> int:
        """Return the memory of the sums."""
        return self.tokens.nbytes + self.hidden.nbytes + self.inner.nbytes

    def norms(self, name: str, module: Any) -> Tensor:
        """Return the l2 norms that a parameter's elements are multiplied with, float64, to be broadcast to its shape.

        Args:
            name: of the parameter inside the module.
            module: the experts.
        """
        if name.endswith("bias"):
            return self.tokens.sqrt()[:, None]
        norms = (self.inner if name == "down_proj" else self.hidden).sqrt()
        return norms[:, :, None] if module.is_transposed else norms[:, None]


def _inner(module: Any, expert: int, x: Tensor) -> Tensor:
    """Return the input of one expert's down projection, [tokens, ffn]."""
    weight = (module.gate_up_proj if module.has_gate else module.up_proj)[expert]
    bias = (module.gate_up_proj_bias if module.has_gate else module.up_proj_bias)[expert] if module.has_bias else None
    out = nn.functional.linear(x, weight.T if module.is_transposed else weight, bias)
    return module._apply_gate(out) if module.has_gate else module.act_fn(out)  # type: ignore[no-any-return]
