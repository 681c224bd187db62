"""The optimiser of regularised training: AdamW that handles a group penalty in its own pass.

Beside ``torch.optim.AdamW`` it knows penalties (:class:`pyprune.ops.regularised_adamw.Penalty`), bfloat16 weights
with stochastic rounding, 8-bit moments, and a mode that steps each weight as soon as its gradient is there and frees
that gradient. With the last three, regularising all weights of a 7B model takes 4.06 bytes a weight, the largest
single gradient, and the activations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from typing_extensions import override

from pyprune.errors import ConfigError
from pyprune.ops.regularised_adamw import Hyper, Moments, Penalty, regularised_adamw

Clipping = Literal["none", "per_tensor", "global"]

_STATE_KEYS = {
    False: ("exp_avg", "exp_avg_sq"),
    True: ("exp_avg_codes", "exp_avg_sq_codes", "exp_avg_scale", "exp_avg_sq_scale"),
}


class RegularisedAdamW(torch.optim.Optimizer):
    """Decoupled AdamW with a group penalty in the same pass.

    State and parameter groups have the names of ``torch.optim.AdamW`` (8-bit moments: their codes and scales). A
    resumed run equals an uninterrupted one bit for bit, random rounding included: the random bits of a step depend on
    the seed, the step and the parameter's position only.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: decay of the first and the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay per unit learning rate.
        penalties: parameter -> its penalty.
        moment_bits: 32, or 8 for block-quantised moments (2.06 bytes a weight for both instead of 8).
        stochastic: round bfloat16 weights stochastically; to nearest, small updates vanish.
        seed: of the random rounding.

    Attributes:
        gradient_scale: a factor on the gradients of the next :meth:`step` (clipping without a pass of its own), which
            sets it back to 1. Penalties are not scaled. Not used while stepping in backward.

    Raises:
        ConfigError: ``moment_bits`` is neither 32 nor 8, or a penalty belongs to no parameter of the optimiser.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        penalties: Mapping[nn.Parameter, Penalty] | None = None,
        moment_bits: int = 32,
        stochastic: bool = True,
        seed: int = 0,
    ) -> None:
        if moment_bits not in (8, 32):
            raise ConfigError(f"moment_bits is {moment_bits}; use 32 (float32) or 8 (block-quantised).")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.quantised = moment_bits == 8
        self.stochastic = stochastic
        self.seed = seed
        self.gradient_scale = 1.0
        self._in_backward = False
        self._stepped: set[Tensor] = set()
        self.penalties: dict[Tensor, Penalty] = {}
        for parameter, penalty in (penalties or {}).items():
            self.penalties[parameter] = penalty
        known = {p for group in self.param_groups for p in group["params"]}
        if not self.penalties.keys() <= known:
            raise ConfigError("A penalty names a tensor that is not among the optimiser's parameters.")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickled optimisers have no hooks."""
        super().__setstate__(state)
        self._in_backward = False

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step every parameter that has a gradient; in :meth:`stepping_in_backward` only end the step.

        Raises:
            ConfigError: a closure while stepping in backward, which would step before the closure's loss is known.
        """
        if self._in_backward:
            if closure is not None:
                raise ConfigError("step takes no closure while gradients are consumed in backward.")
            self._stepped.clear()
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, members in self._calls():
            self._run(group, members, [self.gradient_scale] * len(members))
        self.gradient_scale = 1.0
        return loss

    def _positions(self) -> dict[Tensor, int]:
        return {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}

    def _calls(self) -> Iterator[tuple[dict[str, Any], list[tuple[Tensor, int]]]]:
        """Parameters with a gradient, with their positions, by group and then by dtype and device."""
        positions = self._positions()
        for group in self.param_groups:
            alike: dict[Any, list[tuple[Tensor, int]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[parameter.dtype, parameter.device].append((parameter, positions[parameter]))
            for members in alike.values():
                yield group, members

    def _run(self, group: dict[str, Any], members: list[tuple[Tensor, int]], scales: list[float]) -> None:
        hyper = Hyper(float(group["lr"]), tuple(group["betas"]), group["eps"], group["weight_decay"])
        states = [self._state_of(p) for p, _ in members]
        for state in states:
            state["step"] += 1
        regularised_adamw(
            [p for p, _ in members],
            [p.grad for p, _ in members if p.grad is not None],
            [Moments(*(state[key] for key in _STATE_KEYS[self.quantised])) for state in states],
            hyper,
            steps=[int(state["step"]) for state in states],
            penalties=[self.penalties.get(p) for p, _ in members],
            gradient_scales=scales,
            stochastic=self.stochastic,
            seed=self.seed,
            streams=[position for _, position in members],
        )

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            moments = Moments.zeros(parameter, quantised=self.quantised)
            values = (moments.first, moments.second, moments.first_scale, moments.second_scale)
            state["step"] = torch.tensor(0.0)
            state |= dict(zip(_STATE_KEYS[self.quantised], (v for v in values if v is not None), strict=True))
        return state

    def initialise_state(self) -> None:
        """Make the moments of every parameter now instead of at its first step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._state_of(parameter)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`, every tensor in the dtype that it was saved in."""
        super().load_state_dict(state_dict)
        # torch casts state to the parameter's dtype, which would round the moments of bfloat16 weights.
        parameters = [p for group in self.param_groups for p in group["params"]]
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        for number, parameter in zip(saved, parameters, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor) and key != "step":
                    self.state[parameter][key] = value.to(parameter.device, copy=True)

    @contextmanager
    def stepping_in_backward(
        self, *, accumulation: int = 1, clipping: Clipping = "none", max_grad_norm: float | None = None
    ) -> Iterator[None]:
        """Step each parameter inside ``backward()``, as soon as its gradient is complete, and free that gradient.

        At most one gradient is alive at a time. Call :meth:`step` after every ``backward()``: it ends the step. The
        loss must be known to be finite before ``backward()``; a gradient that is not finite reaches its weight.

        Args:
            accumulation: backward passes a step; only 1, because a gradient is gone after the first.
            clipping: "none" or "per_tensor" (each gradient's own norm, before the penalty joins it). "global" is
                refused: the global norm is known only when all gradients are.
            max_grad_norm: limit of the norm of each gradient; given exactly when clipping.

        Raises:
            ConfigError: another combination; or, during the block, a second gradient for a parameter in one step.
        """
        _check_hook_mode(accumulation, clipping, max_grad_norm)
        if self._in_backward:
            raise ConfigError("The optimiser already steps in backward; leave the first block before another.")
        groups = {p: group for group in self.param_groups for p in group["params"]}
        positions = self._positions()

        def consume(parameter: Tensor) -> None:
            if parameter in self._stepped:
                raise ConfigError(
                    "A parameter got a second gradient in one step, after the first was used and freed: stepping in "
                    "backward is defined for one backward() a step. Call step() after each, add penalties to the loss "
                    "before backward(), or accumulate without stepping in backward."
                )
            scale = _clip_scale(parameter.grad, max_grad_norm)
            with torch.no_grad():
                self._run(groups[parameter], [(parameter, positions[parameter])], [scale])
            parameter.grad = None
            self._stepped.add(parameter)

        self.zero_grad(set_to_none=True)
        handles = [p.register_post_accumulate_grad_hook(consume) for p in groups if p.requires_grad]
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False
            self._stepped.clear()
            for handle in handles:
                handle.remove()


def _check_hook_mode(accumulation: int, clipping: str, max_grad_norm: float | None) -> None:
    if accumulation != 1:
        raise ConfigError(
            f"Stepping in backward is defined for accumulation 1, not {accumulation}: a gradient is freed before the "
            "next micro batch could add to it. Use larger micro batches, or step after backward."
        )
    if clipping not in ("none", "per_tensor"):
        raise ConfigError(
            f"clipping is {clipping!r}; stepping in backward allows 'none' and 'per_tensor', because the norm of all "
            "gradients is known only after the first has been used. Clip per tensor, or step after backward."
        )
    if (clipping == "per_tensor") != (max_grad_norm is not None):
        raise ConfigError(
            f"max_grad_norm is {max_grad_norm} with clipping {clipping!r}; give it exactly when clipping."
        )
    if max_grad_norm is not None and not 0 < max_grad_norm < float("inf"):
        raise ConfigError(f"max_grad_norm is {max_grad_norm}; it must be finite and > 0.")


def clip_factor(norm: float, max_grad_norm: float) -> float:
    """What torch's ``clip_grad_norm_`` multiplies gradients of this norm with."""
    return min(1.0, max_grad_norm / (norm + 1e-6))


def _clip_scale(gradient: Tensor | None, max_grad_norm: float | None) -> float:
    """The factor on one gradient that is clipped by its own norm."""
    if gradient is None or max_grad_norm is None:
        return 1.0
    return clip_factor(float(torch.linalg.vector_norm(gradient, dtype=torch.float32)), max_grad_norm)
