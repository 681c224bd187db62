"""The optimizer of regularised training: AdamW that handles a group penalty in its own pass.

In addition to ``torch.optim.AdamW`` it has penalties (:class:`pyprune.ops.regularised_adamw.Penalty`), bfloat16
weights with stochastic rounding, and 8-bit moments. In one mode it steps each weight as soon as its gradient is
complete, and frees that gradient. With the last three, regularising all weights of a 7B model takes 4.06 bytes a
weight, the largest single gradient, and the activations.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor, nn
from typing_extensions import override

from pyprune.config.train import TrainConfig
from pyprune.errors import ConfigError
from pyprune.ops import available_isas, triton_obstacle
from pyprune.ops.regularised_adamw import Hyper, Moments, Penalty, regularised_adamw
from pyprune.train.objective import ParameterGroup

Clipping = Literal["none", "per_tensor", "global"]

_STATE_KEYS = {
    False: ("exp_avg", "exp_avg_sq"),
    True: ("exp_avg_codes", "exp_avg_sq_codes", "exp_avg_scale", "exp_avg_sq_scale"),
}


class RegularisedAdamW(torch.optim.Optimizer):
    """Decoupled AdamW with a group penalty in the same pass.

    State and parameter groups have the names of ``torch.optim.AdamW`` (8-bit moments: their codes and scales). A
    resumed run equals an uninterrupted one bit for bit, random rounding included: the random bits of a step depend on
    the seed, the step and the parameter's position only. For that, :meth:`state_dict` also records ``moment_bits``,
    ``stochastic`` and ``seed``, and :meth:`load_state_dict` refuses others. A pickled or copied optimizer is whole, but
    is never stepping in backward.

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
        max_tensor_norm: :meth:`step` clips each gradient by its own norm, before its penalty joins it; None = not. Not
            used while stepping in backward, which has its own limit.

    Attributes:
        gradient_scale: a factor on the gradients of the next :meth:`step` (clipping without a pass of its own), which
            sets it back to 1, whether it succeeds or raises. Penalties are not scaled. Not used while stepping in
            backward.
        squared_norm: the squared l2 norm of all gradients that a step in backward has used so far, before clipping;
            :meth:`zero_grad` sets it back to 0.

    Raises:
        ConfigError: ``moment_bits`` is neither 32 nor 8, or a penalty belongs to no parameter of the optimizer.
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
        max_tensor_norm: float | None = None,
    ) -> None:
        if moment_bits not in (8, 32):
            raise ConfigError(f"moment_bits is {moment_bits}; use 32 (float32) or 8 (block-quantised).")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.quantised = moment_bits == 8
        self.stochastic = stochastic
        self.seed = seed
        self.gradient_scale = 1.0
        self.max_tensor_norm = max_tensor_norm
        self.squared_norm = 0.0
        self._in_backward = False
        self._stepped: set[Tensor] = set()
        self.penalties: dict[Tensor, Penalty] = dict((penalties or {}).items())
        if not self.penalties.keys() <= {p for group in self.param_groups for p in group["params"]}:
            raise ConfigError("A penalty names a tensor that is not among the optimizer's parameters.")

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and copy, without the mode of stepping in backward, whose hooks they drop."""
        names = ("quantised", "stochastic", "seed", "gradient_scale", "max_tensor_norm", "squared_norm", "penalties")
        own = {name: getattr(self, name) for name in names}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a whole state, or from torch's ``load_state_dict`` a part, which must not end a mode that is on."""
        super().__setstate__(state)
        self.__dict__.setdefault("_in_backward", False)
        self.__dict__.setdefault("_stepped", set())

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step every parameter that has a gradient; in :meth:`stepping_in_backward` only end the step.

        Raises:
            ConfigError: while stepping in backward, a closure, which would step before the closure's loss is known; or
                a parameter that has a gradient, which no hook has used.
        """
        try:
            if self._in_backward:
                self._end_step(closure)
                return None
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            calls = list(self._calls())
            scales = self._scales([p for _, members in calls for p, _ in members])
            for group, members in calls:
                self._run(group, members, [scales[p] for p, _ in members])
            return loss
        finally:
            self.gradient_scale = 1.0

    def _scales(self, parameters: list[Tensor]) -> dict[Tensor, float]:
        """The factor on each gradient of an ordinary step."""
        limit = self.max_tensor_norm
        if limit is None:
            return dict.fromkeys(parameters, self.gradient_scale)
        gradients = [p.grad for p in parameters if p.grad is not None]
        norms = norms_of(gradients).tolist() if gradients else []  # one read, which waits for the device
        return {p: self.gradient_scale * clip_factor(norm, limit) for p, norm in zip(parameters, norms, strict=True)}

    def _end_step(self, closure: Callable[[], float] | None) -> None:
        if closure is not None:
            raise ConfigError("step takes no closure while gradients are consumed in backward.")
        unused = [(i, p) for p, i in self._positions().items() if p.grad is not None]
        if unused:
            first, parameter = unused[0]
            raise ConfigError(
                f"{len(unused)} parameter(s) have a gradient that stepping in backward has not used; the first is "
                f"number {first}, of shape {tuple(parameter.shape)}. Call zero_grad(), or enter the block again after "
                "parameters were added or thawed."
            )
        self._stepped.clear()

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients; while stepping in backward also start the step again, after a ``backward()`` that failed.

        Weights that a failed ``backward()`` has already stepped keep that step.

        Args:
            set_to_none: free the gradients instead of filling them with 0, which stepping in backward would refuse.
        """
        super().zero_grad(set_to_none)
        self._stepped.clear()
        self.squared_norm = 0.0

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
            moments = vars(Moments.zeros(parameter, quantised=self.quantised)).values()
            state["step"] = torch.tensor(0.0)
            state |= dict(zip(_STATE_KEYS[self.quantised], (m for m in moments if m is not None), strict=True))
        return state

    def initialise_state(self) -> None:
        """Make the moments of every parameter now instead of at its first step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._state_of(parameter)

    @property
    def _options(self) -> dict[str, int | bool]:
        """Return the options that a resumed run must share with the saving one, in addition to the parameter groups."""
        return {"moment_bits": 8 if self.quantised else 32, "stochastic": self.stochastic, "seed": self.seed}

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state and parameter groups as torch has them, and ``moment_bits``, ``stochastic`` and ``seed``."""
        return {**super().state_dict(), **self._options}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`, every tensor in the dtype that it was saved in.

        Args:
            state_dict: of this class, or of ``torch.optim.AdamW`` with float32 moments. Options that it does not record
                are not checked.

        Raises:
            ConfigError: it was saved with other ``moment_bits``, ``stochastic`` or ``seed``, or its moments do not fit
                the parameters. Nothing has been loaded.
        """
        self._check_loaded(state_dict)
        super().load_state_dict(state_dict)
        # torch casts state to the parameter's dtype, which would round the moments of bfloat16 weights, and shares the
        # number of steps with the state that was loaded, which would then not be there to be loaded again.
        for parameter, saved in self._saved_states(state_dict):
            for key, value in saved.items():
                if isinstance(value, Tensor):
                    device = value.device if key == "step" else parameter.device
                    self.state[parameter][key] = value.to(device, copy=True)
        self._stepped.clear()

    def _saved_states(self, state_dict: dict[str, Any]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Yield parameters with their saved state; torch's ``load_state_dict`` reports differing numbers."""
        numbers = (i for group in state_dict["param_groups"] for i in group["params"])
        for parameter, number in zip(self._positions(), numbers, strict=False):
            yield parameter, state_dict["state"].get(number, {})

    def _check_loaded(self, state_dict: dict[str, Any]) -> None:
        for name, own in self._options.items():
            saved = state_dict.get(name, own)
            if saved != own:
                raise ConfigError(
                    f"The saved optimizer has {name}={saved}, this one {name}={own}: the run would not continue as it "
                    f"was. Make the optimizer with {name}={saved}."
                )
        for position, (parameter, state) in enumerate(self._saved_states(state_dict)):
            layout = Moments.layout(parameter, quantised=self.quantised).values()
            expected = dict(zip(_STATE_KEYS[self.quantised], layout, strict=True))
            saved = {key: t for key, t in state.items() if isinstance(t, Tensor) and key != "step"}
            found = {key: (tuple(t.shape), t.dtype) for key, t in saved.items()}
            if state and found != expected:
                raise ConfigError(
                    f"The saved state of parameter number {position} is {_describe(found)}; with "
                    f"moment_bits={self._options['moment_bits']} it is {_describe(expected)}. Load a state of the same "
                    "parameters and moment_bits."
                )

    @contextmanager
    def stepping_in_backward(
        self, *, clipping: Clipping = "none", max_grad_norm: float | None = None
    ) -> Iterator[None]:
        """Step each parameter inside ``backward()``, as soon as its gradient is complete, and free that gradient.

        At most one gradient is alive at a time. Call :meth:`step` after every ``backward()``: it ends the step. After
        a ``backward()`` that raised, call :meth:`zero_grad` before the next. :meth:`load_state_dict` may be called
        between steps. The loss must be known to be finite before ``backward()``. A gradient that is not finite ends it,
        and does not reach its weight; weights whose gradients came before keep their step.

        Args:
            clipping: "none" or "per_tensor" (each gradient's own norm, before the penalty joins it). "global" is
                refused: the global norm is known only when all gradients are.
            max_grad_norm: limit of the norm of each gradient; given exactly when clipping.

        Raises:
            ConfigError: another combination; or, during the block, a second gradient for a parameter in one step, or in
                :meth:`step` a gradient that was not used: of a parameter that was added or thawed inside the block, or
                written after ``backward()``.
            FloatingPointError: out of ``backward()``, a gradient that is not finite.
        """
        _check_hook_mode(clipping, max_grad_norm)
        if self._in_backward:
            raise ConfigError("The optimizer already steps in backward; leave the first block before another.")
        # Numbers, because load_state_dict replaces the groups themselves.
        groups = {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
        positions = self._positions()

        def consume(parameter: Tensor) -> None:
            if parameter in self._stepped:
                raise ConfigError(
                    "A parameter got a second gradient in one step, after the first was used and freed. Call step() "
                    "after each backward(), add penalties to the loss, or accumulate without stepping in backward."
                )
            norm = float(norms_of([cast(Tensor, parameter.grad)]))
            if not math.isfinite(norm):
                raise FloatingPointError(f"The gradient of a parameter of shape {tuple(parameter.shape)} is {norm}.")
            self.squared_norm += norm * norm
            scale = 1.0 if max_grad_norm is None else clip_factor(norm, max_grad_norm)
            with torch.no_grad():
                self._run(self.param_groups[groups[parameter]], [(parameter, positions[parameter])], [scale])
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


def _describe(layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{key} {dtype} {shape}" for key, (shape, dtype) in layout.items()) or "empty"


def _check_hook_mode(clipping: str, max_grad_norm: float | None) -> None:
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
    """Return the factor of torch's ``clip_grad_norm_`` for gradients of this norm."""
    return min(1.0, max_grad_norm / (norm + 1e-6))


@torch.no_grad()
def clip_each_(gradients: Sequence[Tensor], norms: Tensor, max_norm: float) -> None:
    """Clip each gradient by its own norm, in place; norms float32 [n]."""
    for gradient, norm in zip(gradients, norms.tolist(), strict=True):
        gradient.mul_(clip_factor(norm, max_norm))


def norms_of(gradients: Sequence[Tensor]) -> Tensor:
    """Return the l2 norm of each gradient, float32 [n], on the first one's device."""
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return torch.stack([norm.to(norms[0].device) for norm in norms])


def uses_own_optimizer(config: TrainConfig, device: torch.device) -> bool:
    """Check whether the step is this module's: always in lean memory, else with "fused_adamw" where it has kernels.

    Without kernels torch's fused AdamW takes its place: the same to float32 rounding, and faster than plain torch.
    """
    kernels = bool(available_isas()) if device.type == "cpu" else triton_obstacle() is None
    return config.memory == "lean" or (config.optimizer == "fused_adamw" and kernels)


def make_optimizer(
    groups: list[ParameterGroup], config: TrainConfig, penalties: Mapping[nn.Parameter, Penalty] | None = None
) -> torch.optim.Optimizer:
    """Build the optimizer (fused kernels, which exist for the CPU and CUDA).

    Args:
        groups: what is trained.
        config: the loop's options, ``memory`` decided.
        penalties: those that :class:`RegularisedAdamW` handles in its pass.
    """
    parameters = [
        {"params": list(g.parameters.values()), "lr": g.learning_rate, "weight_decay": g.weight_decay} for g in groups
    ]
    device = next(iter(groups[0].parameters.values())).device
    if uses_own_optimizer(config, device):
        lean = config.memory == "lean"
        return RegularisedAdamW(
            parameters,
            lr=config.learning_rate,
            penalties=penalties,
            seed=config.seed,
            moment_bits=8 if lean else 32,
            max_tensor_norm=config.max_grad_norm if lean else None,
        )
    kinds = {p.device.type for g in groups for p in g.parameters.values()}
    fused = kinds <= {"cpu", "cuda"}
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=config.learning_rate, fused=fused)
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, lr=config.learning_rate, fused=fused)


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{key}": value
        for index, entries in state.items()
        for key, value in entries.items()
        if isinstance(value, Tensor)
    }


def _load_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
