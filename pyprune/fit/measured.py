"""Predict the times of a plan, prefill and generation in seconds, from a fit to a profile.

For every measured workload the time of a model is a sum of features with non-negative coefficients. The features are
multiplications of matrix products, scores of attention, keys and values that are read, and a constant for each
sub-block that is launched. Of a mixture, each token multiplies by the matrices of its experts, and a step reads those
of the experts that it touches: the expected number of different ones, if its tokens choose independently of each other
and all experts alike. A dense layer among mixtures counts as one expert that every token reads. The coefficients
minimise the relative squared errors over the probes (non-negative least squares). The dense model counts most, because
relative limits are shares of its time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import nnls
from typing_extensions import override

from pyprune.errors import BudgetError
from pyprune.fit.profile import DENSE, Probe, Profile, Timing
from pyprune.fit.quantities import CostModel, Quantity, Widths, further_head_pairs
from pyprune.plan import Sizes

BASE = ("model", "head", "hidden")
LAYER = ("attention", "mlp", "projections", "scores", "cache", "ffn", "experts", "norms")
PAIRS = "head pairs"
FEATURES = (*BASE, *LAYER, PAIRS)
"""The features of a model's time; the last one is not of a single layer (see :meth:`MeasuredCosts.head_pair`)."""
DENSE_WEIGHT = 10.0
"""Weight of the dense model's relative error, 1 for other probes: it has the most turns, and its error would be in
every share of its time."""


def base_features(dense: Sizes, hidden: int) -> dict[str, float]:
    """Return the features without any layer: a constant, the head's product, vectors of the residual stream."""
    return {"model": 1.0, "head": hidden * dense.vocab_size, "hidden": hidden}


def distinct_experts(experts: int, chosen: int, tokens: int) -> float:
    """Return how many different experts a step is expected to touch.

    Args:
        experts: of the layer.
        chosen: that each token reads.
        tokens: of the step.
    """
    return experts * (1 - (1 - min(1.0, chosen / experts)) ** tokens) if experts else 0.0


def step_tokens(quantity: Quantity) -> int:
    """Return the tokens that a model reads at once: those of the prompt, or one of each sequence."""
    return quantity.tokens if quantity.kind == "prefill" else quantity.batch


def layer_features(dense: Sizes, hidden: int, widths: Widths, chosen: int = 0, tokens: int = 1) -> dict[str, float]:
    """Return the features of one layer: a constant a sub-block, products of projections, scores, cache, FFN, norms.

    Args:
        dense: sizes of the dense model.
        hidden: channels of the stream.
        widths: of the layer.
        chosen: experts that each token reads; 0 = the model has no mixtures.
        tokens: that it reads at once.
    """
    read, touched = (chosen, distinct_experts(widths.experts, chosen, tokens)) if widths.experts else (1, chosen > 0)
    q, kv = (heads * dense.head_dim for heads in (widths.query_heads, widths.kv_heads))
    return {
        "attention": float(q > 0),
        "mlp": float(widths.ffn > 0),
        "projections": hidden * (q + kv),
        "scores": q,
        "cache": kv,
        "ffn": hidden * widths.ffn * read,
        "experts": hidden * widths.ffn * touched,
        "norms": hidden,
    }


def features(dense: Sizes, probe: Probe, chosen: int = 0, tokens: int = 1) -> dict[str, float]:
    """Return all features of a model.

    Args:
        dense: sizes of the dense model.
        probe: the model.
        chosen: experts that each token reads; 0 = it has no mixtures.
        tokens: that it reads at once.
    """
    total: dict[str, float] = defaultdict(float, base_features(dense, probe.hidden))
    for layer in probe.layers:
        for name, value in layer_features(dense, probe.hidden, layer, chosen, tokens).items():
            total[name] += value
    total[PAIRS] = further_head_pairs(probe.layers)
    return dict(total)


@dataclass(frozen=True)
class Fit:
    """The time of one workload as a function of a model's sizes.

    Attributes:
        quantity: the workload.
        coefficients: seconds a unit of each feature, not negative.
        seconds: probe -> measured seconds: the median ratio to the dense turns next to it times the dense median.
        spread: probe -> median absolute deviation of those ratios, as a share of their median.
        fitted: probe -> relative error of the fit that saw it, fitted / measured - 1.
        left_out: probe -> relative error of a fit without it; not of the dense model, which is always fitted.
    """

    quantity: Quantity
    coefficients: dict[str, float]
    seconds: dict[str, float]
    spread: dict[str, float]
    fitted: dict[str, float]
    left_out: dict[str, float]

    @property
    def residual(self) -> float:
        """Median relative error over the fitted probes."""
        return median(abs(error) for error in self.fitted.values())

    @property
    def left_out_median(self) -> float:
        """Median relative error over the probes, each predicted by a fit without it."""
        return median(abs(error) for error in self.left_out.values())

    @property
    def left_out_worst(self) -> tuple[str, float]:
        """The probe with the largest error when it is left out, and its relative error."""
        return max(self.left_out.items(), key=lambda item: abs(item[1]))

    def predict(self, values: Mapping[str, float]) -> float:
        """Predict the seconds of these features."""
        return sum(self.coefficients[name] * value for name, value in values.items())


class MeasuredCosts(CostModel):
    """Predicts prefill and generation from a profile.

    Workloads between two measured ones are interpolated in tokens, in sequences or in the prompts' length; others are
    refused by a :class:`BudgetError`, and so are quantities that are counted.

    Args:
        profile: the measurements; :meth:`Profile.check` decides whether it may be used.

    Raises:
        BudgetError: it holds too few probes to fit anything, or lacks the dense model.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.dense = profile.dense
        self.chosen = profile.chosen_experts
        self.fits: dict[Quantity, Fit] = {q: fit(profile, q) for q in profile.quantities}

    @override
    def base(self, quantity: Quantity, hidden_size: int) -> float:
        return self._interpolate(quantity, base_features(self.dense, hidden_size))

    @override
    def layer(self, quantity: Quantity, hidden_size: int, widths: Widths) -> float:
        total = 0.0
        for part, share in self._parts(quantity):
            steps = (self.chosen, step_tokens(part.quantity))
            total += share * part.predict(layer_features(self.dense, hidden_size, widths, *steps))
        return total

    @override
    def head_pair(self, quantity: Quantity) -> float:
        return self._interpolate(quantity, {PAIRS: 1.0})

    def _interpolate(self, quantity: Quantity, values: Mapping[str, float]) -> float:
        """Predict the seconds of these features in one workload."""
        return sum(share * part.predict(values) for part, share in self._parts(quantity))

    def _parts(self, quantity: Quantity) -> list[tuple[Fit, float]]:
        """Return the measured workload, or the two that a workload is between, and the share of each."""
        if not quantity.is_timed:
            raise BudgetError(f"{quantity} is counted, not measured.")
        if quantity in self.fits:
            return [(self.fits[quantity], 1.0)]
        for axis in ("tokens", "batch", "prompt"):
            alike = [q for q in self.fits if replace(q, **{axis: getattr(quantity, axis)}) == quantity]
            near = _neighbours([(getattr(q, axis), q) for q in alike], getattr(quantity, axis))
            if near:
                return [(self.fits[q], share) for q, share in near]
        measured = ", ".join(str(q) for q in self.fits if q.kind == quantity.kind) or "none"
        raise BudgetError(
            f"{quantity} is outside of the workloads of the profile {self.profile.name} ({measured}). Ask for one of "
            f"these or between two of them, or measure it: {self.profile.remeasure_command(quantity)}"
        )


def _neighbours(measured: Sequence[tuple[int, Quantity]], place: int) -> list[tuple[Quantity, float]]:
    below = max((pair for pair in measured if pair[0] < place), key=lambda pair: pair[0], default=None)
    above = min((pair for pair in measured if pair[0] > place), key=lambda pair: pair[0], default=None)
    if below is None or above is None:
        return []
    share = (place - below[0]) / (above[0] - below[0])
    return [(below[1], 1 - share), (above[1], share)]


def fit(profile: Profile, quantity: Quantity) -> Fit:
    """Fit one workload of a profile, and fit it again without each of its probes.

    Raises:
        BudgetError: fewer than three models, or no dense model, were measured in it.
    """
    seconds, spread = relative_seconds(profile.timings, quantity)
    names = list(seconds)
    if DENSE not in names or len(names) < 3:
        raise BudgetError(
            f"The profile {profile.name} has {quantity} of {len(names)} models ({', '.join(names) or 'none'}); the "
            "dense model and two others are the least. Measure again with `pyprune profile MODEL`."
        )
    steps = (profile.chosen_experts, step_tokens(quantity))
    sizes = [features(profile.dense, profile.probe(name), *steps) for name in names]
    rows = np.array([[values[f] for f in FEATURES] for values in sizes])
    times = np.array([seconds[name] for name in names])
    weights = np.array([DENSE_WEIGHT if name == DENSE else 1.0 for name in names])
    solution = _solve(rows, times, weights)
    errors = rows @ solution / times - 1
    left_out = {}
    for i, name in enumerate(names):
        if name != DENSE:
            rest = np.arange(len(names)) != i
            left_out[name] = float(rows[i] @ _solve(rows[rest], times[rest], weights[rest]) / times[i] - 1)
    return Fit(
        quantity,
        dict(zip(FEATURES, map(float, solution), strict=True)),
        seconds,
        spread,
        dict(zip(names, map(float, errors), strict=True)),
        left_out,
    )


def _solve(rows: Any, times: Any, weights: Any) -> Any:
    """Return the non-negative coefficients that minimise the weighted sum of squared relative errors."""
    scale = np.maximum(rows.max(axis=0), 1e-30)
    solution, _ = nnls(rows / scale * (weights / times)[:, None], weights)
    return solution / scale


def relative_seconds(timings: Iterable[Timing], quantity: Quantity) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of every probe for one workload, without the machine's drift, and their spread.

    Every turn is divided by the dense model's time at that moment, interpolated between its turns in the same group of
    engines. If these were all earlier, because one engine fits at a time, it is divided by their median. A probe's time
    is the median of these ratios times the median of all dense turns.

    Returns:
        (probe -> seconds, probe -> median absolute deviation of the ratios over their median).
    """
    turns = [t for t in timings if t.quantity == quantity]
    dense = [t for t in turns if t.probe == DENSE]
    if not dense:
        return {}, {}
    ratios = ratios_to_dense(turns)
    usual = median(t.seconds for t in dense)
    middle = {name: median(shares) for name, shares in ratios.items()}
    spread = {name: median(abs(r - middle[name]) for r in shares) / middle[name] for name, shares in ratios.items()}
    seconds = {name: usual * value for name, value in middle.items()}
    # The dense model's ratios are 1 by construction; its spread is that of its seconds.
    spread[DENSE] = median(abs(t.seconds - usual) for t in dense) / usual
    return seconds, spread


def ratios_to_dense(timings: Iterable[Timing]) -> dict[str, list[float]]:
    """Probe -> its turns over the dense model's time at that moment, see :func:`relative_seconds`.

    Args:
        timings: of one workload; groups of engines without a turn of the dense model are ignored.
    """
    together: dict[tuple[int, str], list[Timing]] = defaultdict(list)
    for timing in timings:
        together[timing.group, timing.probe].append(timing)
    ratios: dict[str, list[float]] = defaultdict(list)
    for (group, probe), turns in together.items():
        dense = sorted(together.get((group, DENSE), ()), key=lambda turn: turn.start)
        if dense:
            ratios[probe] += [turn.seconds / _dense_at(dense, turns, turn.start) for turn in turns]
    return dict(ratios)


def _dense_at(dense: Sequence[Timing], turns: Sequence[Timing], moment: float) -> float:
    """Interpolate the dense model's time at a moment of a model's turns; its median if it was timed before them."""
    if dense[-1].start < min(turn.start for turn in turns):
        return median(turn.seconds for turn in dense)
    return float(np.interp(moment, [t.start for t in dense], [t.seconds for t in dense]))
