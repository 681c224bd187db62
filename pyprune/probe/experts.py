"""Statistics of experts, whose matrices are in one module and see only the tokens routed to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pyprune.errors import UnsupportedModelError
from pyprune.families import named_axes
from pyprune.probe.activations import gather_moments
from pyprune.probe.streams import LayerRunner


def expert_modules(model: PreTrainedModel) -> dict[int, str]:
    """Return layer -> name of the module that holds the matrices of its experts, of a model that is dense or cut."""
    experts = (
        p for p in named_axes(model) if p.row.role == "writer" and "experts" in p.row.axes and p.layer is not None
    )
    return {p.layer: p.name.rpartition(".")[0] for p in experts if p.layer is not None}


def _routed(module: Any, args: tuple[Tensor, ...], reader: str) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each expert that a call uses, its tokens (bool [tokens]) and their inputs [tokens of it, hidden].

    Args:
        module: of the experts.
        args: of the call: hidden states [tokens, hidden], experts of each token [tokens, k], their weights.
        reader: what reads it, for messages.

    Raises:
        UnsupportedModelError: the module is called in another way.
    """
    if len(args) < 2 or not hasattr(module, "_apply_gate"):
        raise UnsupportedModelError(
            f"The experts of {type(module).__name__} show no tokens that each of them reads, so that {reader}"
        )
    x, chosen = args[0].flatten(0, -2), args[1]
    for expert in chosen.unique().tolist():
        tokens = (chosen == expert).any(-1)
        yield expert, tokens, x[tokens]


def routed_inputs(module: Any, args: tuple[Tensor, ...]) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Yield each expert that a call uses: its tokens, int64 [n], and the inputs of its down projection, [n, ffn].

    The inputs are multiplied by the weights of the router, as the outputs are in the model.

    Args:
        module: of the experts.
        args: of the call, see :func:`_routed`.
    """
    for expert, tokens, x in _routed(module, args, "they cannot be solved."):
        inner = expert_inner(module, expert, x) * _weights(args, expert, tokens)[:, None]
        yield expert, (tokens.nonzero().flatten(), inner)


def expert_biases(module: Any, args: tuple[Tensor, ...]) -> Tensor:
    """Return what the biases of down projections add to each token of a call, [tokens, hidden]."""
    added = torch.zeros_like(args[0].flatten(0, -2))
    for expert, tokens, _ in _routed(module, args, "they cannot be solved.") if module.has_bias else ():
        added[tokens] += module.down_proj_bias[expert] * _weights(args, expert, tokens)[:, None]
    return added


def _weights(args: tuple[Tensor, ...], expert: int, tokens: Tensor) -> Tensor:
    """Return the weights by which a call multiplies the output of one expert, [tokens of it]."""
    return (args[2] * (args[1] == expert))[tokens].sum(-1)


class ExpertSums:
    """Sums over the tokens that are routed to each expert of a layer; called as a hook in front of their module.

    Attributes:
        tokens: float64 [experts], tokens routed to each of them.
        norms: float64 [experts], sums of the l2 norms of its outputs.
        weighted: float64 [experts], the same of these norms times the weights by which the model multiplies them.
        by_kind: float64 [kinds, experts], tokens of each kind of text; [0, 0] without ``kinds``.

    Args:
        kinds: number of the kind of each token that will come, int64 [tokens], in the order of the samples; None =
            tokens are not counted by kind.
    """

    def __init__(self, kinds: Tensor | None = None) -> None:
        self.tokens = self.norms = self.weighted = torch.zeros(0, dtype=torch.float64)
        self.by_kind = torch.zeros(0, 0, dtype=torch.float64)
        self._kinds, self._read = kinds, 0

    @torch.no_grad()
    def __call__(self, module: Any, args: tuple[Tensor, ...]) -> None:
        """Add the tokens of a call with (hidden states [tokens, hidden], experts [tokens, k], weights [tokens, k]).

        Raises:
            UnsupportedModelError: the module is called in another way.
        """
        if not len(self.tokens):
            zeros = torch.zeros(3, len(module.down_proj), dtype=torch.float64, device=args[0].device)
            self.tokens, self.norms, self.weighted = zeros
            if self._kinds is not None:
                self.by_kind = torch.zeros(int(self._kinds.max()) + 1, zeros.shape[1], dtype=torch.float64)
        begin, self._read = self._read, self._read + len(args[0].flatten(0, -2))
        for expert, tokens, x in _routed(module, args, "experts cannot be scored. Use --method expert_random."):
            norms = expert_output(module, expert, x).double().norm(dim=-1)
            weights = _weights(args, expert, tokens).double()
            self.tokens[expert] += len(x)
            self.norms[expert] += norms.sum()
            self.weighted[expert] += (norms * weights).sum()
            if self._kinds is not None:
                kinds = self._kinds[begin : self._read][tokens.cpu()]
                self.by_kind[:, expert] += kinds.bincount(minlength=len(self.by_kind))


def read_experts(runner: LayerRunner, samples: Tensor, sums: Mapping[int, ExpertSums]) -> None:
    """Run a model on samples, and add what the experts of each layer do to their sums.

    Args:
        runner: of the layers.
        samples: token ids, int64 [N, T].
        sums: by layer, of those that have experts.

    Raises:
        DataError: there is no sample.
        UnsupportedModelError: the experts show no tokens that each of them reads.
    """
    modules = expert_modules(runner.model)
    gather_moments(runner, samples, others={modules[layer]: each for layer, each in sums.items()})


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
        cannot = "wanda cannot score their channels. Use score.axes=[heads], or the method magnitude."
        for expert, _, x in _routed(module, args, cannot):
            if not len(self.tokens):
                hidden, width = 1 + x.shape[1], module.down_proj.shape[1 if module.is_transposed else 2]
                zeros = torch.zeros(len(module.down_proj), hidden + width, dtype=torch.float64, device=x.device)
                self.tokens, self.hidden, self.inner = zeros[:, 0], zeros[:, 1:hidden], zeros[:, hidden:]
            self.tokens[expert] += len(x)
            self.hidden[expert] += x.double().square().sum(0)
            self.inner[expert] += expert_inner(module, expert, x).double().square().sum(0)

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


def expert_inner(module: Any, expert: int, x: Tensor) -> Tensor:
    """Return the input of one expert's down projection, [tokens, ffn]."""
    weight = (module.gate_up_proj if module.has_gate else module.up_proj)[expert]
    bias = (module.gate_up_proj_bias if module.has_gate else module.up_proj_bias)[expert] if module.has_bias else None
    out = nn.functional.linear(x, weight.T if module.is_transposed else weight, bias)
    return module._apply_gate(out) if module.has_gate else module.act_fn(out)  # type: ignore[no-any-return]


def expert_output(module: Any, expert: int, x: Tensor) -> Tensor:
    """Return the output of one expert, [tokens, hidden], without the weight of the router."""
    weight, bias = module.down_proj[expert], module.down_proj_bias[expert] if module.has_bias else None
    return nn.functional.linear(expert_inner(module, expert, x), weight.T if module.is_transposed else weight, bias)
