"""What a plan takes that must be measured: seconds of prefill and generation, fitted to a profile.

For every measured workload the time of a model is a sum with non-negative coefficients over quantities that a machine
spends time on: matrix products by their multiplications, attention by its scores and by the keys and values it reads,
and a constant for each sub-block that is launched. The coefficients are the non-negative least squares solution of the
relative errors over the probes, in which the dense model counts most: every limit that is a share is a share of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import nnls

from pyprune.errors import BudgetError
from pyprune.fit.profile import DENSE, Probe, Profile, Timing
from pyprune.fit.quantities import Quantity, Widths, further_head_pairs, predicted
from pyprune.plan import PrunePlan, Sizes

FIXED = ("model", "head", "hidden")
LAYER = ("attention", "mlp", "projections", "scores", "cache", "ffn", "norms")
PAIRS = "head pairs"
FEATURES = (*FIXED, *LAYER, PAIRS)
"""What a model's time is a sum of; the last one is not of a single layer (see :meth:`MeasuredCosts.head_pair`)."""
DENSE_WEIGHT = 10.0
"""What the dense model's relative error counts beside another probe's: its turns are the most, and its error would be
in every share of its time."""


def fixed_features(dense: Sizes, hidden: int) -> dict[str, float]:
    """What is there without any layer: a constant, the head's product, vectors of the residual stream."""
    return {"model": 1.0, "head": hidden * dense.vocab_size, "hidden": hidden}


def layer_features(dense: Sizes, hidden: int, widths: Widths) -> dict[str, float]:
    """What one layer adds: a constant for each sub-block, products of its projections, scores, cache, FFN, norms."""
    q, kv = (heads * dense.head_dim for heads in (widths.query_heads, widths.kv_heads))
    return {
        "attention": float(q > 0),
        "mlp": float(widths.ffn > 0),
        "projections": hidden * (q + kv),
        "scores": q,
        "cache": kv,
        "ffn": hidden * widths.ffn,
        "norms": hidden,
    }


def features(dense: Sizes, probe: Probe) -> dict[str, float]:
    """All features of a model."""
    total: dict[str, float] = defaultdict(float, fixed_features(dense, probe.hidden))
    for layer in probe.layers:
        for name, value in layer_features(dense, probe.hidden, layer).items():
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
        left_out: probe -> the same of a fit without it; not of the dense model, which every use has.
    """

    quantity: Quantity
    coefficients: dict[str, float]
    seconds: dict[str, float]
    spread: dict[str, float]
    fitted: dict[str, float]
    left_out: dict[str, float]

    @property
    def residual(self) -> float:
        """Median relative error over the probes that were fitted."""
        return median(abs(error) for error in self.fitted.values())

    @property
    def left_out_median(self) -> float:
        """Median relative error over the probes, each left out of the fit that predicts it."""
        return median(abs(error) for error in self.left_out.values())

    @property
    def left_out_worst(self) -> tuple[str, float]:
        """The probe that is predicted worst when it is left out, and its relative error."""
        return max(self.left_out.items(), key=lambda item: abs(item[1]))

    def of(self, found: Mapping[str, float]) -> float:
        """Seconds of these features."""
        return sum(self.coefficients[name] * value for name, value in found.items())


class MeasuredCosts:
    """Predicts prefill and generation from a profile; a :class:`CostModel` for those two kinds.

    Workloads between two measured ones are interpolated in tokens, in sequences or in the prompts' length; what lies
    outside is refused.

    Args:
        profile: what was measured; :meth:`Profile.check` says whether it may be used.

    Raises:
        BudgetError: it holds too few probes to fit anything, or lacks the dense model.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.dense = profile.dense
        self.fits: dict[Quantity, Fit] = {q: fit(profile, q) for q in profile.quantities}

    def fixed(self, quantity: Quantity, hidden_size: int) -> float:
        """Seconds that a model of this hidden size takes without any layer.

        Raises:
            BudgetError: a quantity that is counted, or outside of what was measured.
        """
        found = fixed_features(self.dense, hidden_size)
        return sum(share * part.of(found) for part, share in self._between(quantity))

    def layer(self, quantity: Quantity, hidden_size: int, widths: Widths) -> float:
        """Seconds that one kept layer of these widths adds.

        Raises:
            BudgetError: see :meth:`fixed`.
        """
        found = layer_features(self.dense, hidden_size, widths)
        return sum(share * part.of(found) for part, share in self._between(quantity))

    def head_pair(self, quantity: Quantity) -> float:
        """Seconds that every distinct pair of query and KV heads beyond the first adds to a model.

        Raises:
            BudgetError: see :meth:`fixed`.
        """
        return sum(share * part.coefficients[PAIRS] for part, share in self._between(quantity))

    def predicted(self, quantity: Quantity, plan: PrunePlan) -> float:
        """Seconds that a plan takes.

        Raises:
            BudgetError: see :meth:`fixed`.
        """
        return predicted(self, quantity, plan)

    def _between(self, quantity: Quantity) -> list[tuple[Fit, float]]:
        """The measured workloads that a workload is, or lies between, and the share of each."""
        if not quantity.is_timed:
            raise BudgetError(f"{quantity} is counted, not measured.")
        if quantity in self.fits:
            return [(self.fits[quantity], 1.0)]
        for axis in ("tokens", "batch", "prompt"):
            alike = [q for q in self.fits if replace(q, **{axis: getattr(quantity, axis)}) == quantity]
            found = _neighbours([(getattr(q, axis), q) for q in alike], getattr(quantity, axis))
            if found:
                return [(self.fits[q], share) for q, share in found]
        measured = ", ".join(str(q) for q in self.fits if q.kind == quantity.kind) or "none"
        raise BudgetError(
            f"{quantity} lies outside of what the profile {self.profile.name} measured ({measured}). Ask for one of "
            f"these or between two of them, or measure it: {self.profile.again(quantity)}"
        )


def _neighbours(known: Sequence[tuple[int, Quantity]], wanted: int) -> list[tuple[Quantity, float]]:
    below = max((pair for pair in known if pair[0] < wanted), key=lambda pair: pair[0], default=None)
    above = min((pair for pair in known if pair[0] > wanted), key=lambda pair: pair[0], default=None)
    if below is None or above is None:
        return []
    share = (wanted - below[0]) / (above[0] - below[0])
    return [(below[1], 1 - share), (above[1], share)]


def fit(profile: Profile, quantity: Quantity) -> Fit:
    """Fit one workload of a profile, and once without each of its probes.

    Raises:
        BudgetError: fewer than three probes have it, or the dense model has not.
    """
    seconds, spread = relative_seconds(profile.timings, quantity)
    names = list(seconds)
    if DENSE not in names or len(names) < 3:
        raise BudgetError(
            f"The profile {profile.name} has {quantity} of {len(names)} models ({', '.join(names) or 'none'}); the "
            "dense model and two others are the least. Measure again with `pyprune profile MODEL`."
        )
    rows = np.array([[features(profile.dense, profile.probe(name))[f] for f in FEATURES] for name in names])
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
    """Coefficients that minimise the sum of squared relative errors, each times its weight, none of them negative."""
    scale = np.maximum(rows.max(axis=0), 1e-30)
    solution, _ = nnls(rows / scale * (weights / times)[:, None], weights)
    return solution / scale


def relative_seconds(timings: Iterable[Timing], quantity: Quantity) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of every probe for one workload, freed of the machine's drift, and the spread of what they come from.

    Every turn is divided by what the dense model would have taken at that moment, interpolated between its turns in
    the same group of engines; where these all came before, because one engine fits at a time, by their median. The
    median of these ratios times the median of all dense turns is the probe's time.

    Returns:
        (probe -> seconds, probe -> median absolute deviation of the ratios over their median).
    """
    own = [t for t in timings if t.quantity == quantity]
    dense = [t for t in own if t.probe == DENSE]
    if not dense:
        return {}, {}
    ratios = ratios_to_dense(own)
    usual = median(t.seconds for t in dense)
    middle = {name: median(found) for name, found in ratios.items()}
    spread = {name: median(abs(r - middle[name]) for r in found) / middle[name] for name, found in ratios.items()}
    seconds = {name: usual * value for name, value in middle.items()}
    # Interpolated at its own turns, the dense model is 1 by construction; its spread is that of its seconds.
    spread[DENSE] = median(abs(t.seconds - usual) for t in dense) / usual
    return seconds, spread


def ratios_to_dense(timings: Iterable[Timing]) -> dict[str, list[float]]:
    """Probe -> its turns over what the dense model would have taken at that moment, see :func:`relative_seconds`.

    Args:
        timings: of one workload; groups of engines without a turn of the dense model say nothing.
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
    """What the dense model takes at a moment of a model's turns: between its own; if it was timed before, usually."""
    if dense[-1].start < min(turn.start for turn in turns):
        return median(turn.seconds for turn in dense)
    return float(np.interp(moment, [t.start for t in dense], [t.seconds for t in dense]))
