"""Shared by the methods that remove experts: how many of each layer may go, what each of them saw, and the plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pyprune.errors import ConfigError, DataError, ScoreError
from pyprune.families.mixtures import expert_groups, fewest_experts
from pyprune.methods.base import PlanDecision, PlanRequest, RunOptions, own_options
from pyprune.methods.experts import ExpertOptions, RankedOptions
from pyprune.methods.layers._units import layer_runner
from pyprune.methods.ratio import floor_count, share_of_parameters, sufficient_ratio
from pyprune.plan import spread
from pyprune.probe.experts import ExpertSums, expert_modules, read_experts

FLOOR = 64
"""Tokens that each expert should have seen; a warning counts those that saw fewer."""


@dataclass(frozen=True)
class Choice:
    """How many experts are removed, and which numbers of them a layer may keep.

    Attributes:
        request: the goal of the plan.
        experts: layer -> experts of the dense model.
        groups: into which the router divides them; a layer keeps equally many of each.
        fewest: experts that a layer keeps at least.
    """

    request: PlanRequest
    experts: Mapping[int, int]
    groups: int
    fewest: int

    @classmethod
    def of(cls, model: PreTrainedModel, request: PlanRequest) -> Choice:
        """Find the experts of a model.

        Raises:
            ConfigError: it has none.
        """
        dense = request.identity.dense
        experts = {index: n for index in range(dense.num_layers) if (n := dense.units("experts", index))}
        if not experts:
            raise ConfigError(
                f"{request.method} removes experts, of which this {request.family.model_type!r} model has none. Choose "
                "a method that removes heads and FFN channels (obs), or layers (elder)."
            )
        return cls(request, experts, expert_groups(model.config), fewest_experts(model.config))

    def decision(self, scores: Mapping[int, Tensor], sums: Mapping[int, ExpertSums] | None = None) -> PlanDecision:
        """Return the plan without the experts of the smallest scores, ties by the smaller index.

        Args:
            scores: layer -> float [experts].
            sums: what the experts of every layer saw, for the report.

        Raises:
            ConfigError: the goal cannot be reached.
            ScoreError: a score is not finite.
        """
        for layer, values in scores.items():
            if not bool(torch.isfinite(values).all()):
                raise ScoreError(
                    f"The scores of the experts of layer {layer} are not finite. The weights or their dtype are "
                    "broken: check them for NaN, or work in float32 (dtype)."
                )
        order = {
            layer: in_turn(range(self.experts[layer]), values.tolist(), self.groups) for layer, values in scores.items()
        }
        counts, notes = self._counts(scores)
        return self.decision_of({layer: order[layer][:count] for layer, count in counts.items()}, notes, scores, sums)

    def decision_of(
        self,
        removed: Mapping[int, list[int]],
        notes: list[str],
        scores: Mapping[int, Tensor],
        sums: Mapping[int, ExpertSums] | None = None,
    ) -> PlanDecision:
        """Return the plan without these experts, with what the report shows.

        Args:
            removed: layer -> experts, in the order in which they were chosen.
            notes: one sentence for each rounding.
            scores: layer -> float [experts].
            sums: what the experts of every layer saw.
        """
        plan = self.request.identity
        for layer, experts in removed.items():
            plan = plan.with_layer(layer, experts=[i for i in range(self.experts[layer]) if i not in experts])
        share = share_of_parameters(self.request.family, self.request.shapes, plan)
        numbers = spread(len(experts) for experts in removed.values())
        notes = [
            *notes,
            f"Removed: {numbers} of {spread(self.experts.values())} experts of each of {len(self.experts)} layers, "
            f"{share:.2%} of the parameters.",
        ]
        details = {
            "removed": {str(layer): list(experts) for layer, experts in removed.items()},
            "scores": {str(layer): values.tolist() for layer, values in scores.items()},
            "share_removed": share,
        }
        warnings = []
        if sums:
            seen = {layer: [int(n) for n in each.tokens.tolist()] for layer, each in sums.items()}
            details["tokens"] = {str(layer): counts for layer, counts in seen.items()}
            every = sorted(n for counts in seen.values() for n in counts)
            middle = every[len(every) // 2]
            notes.append(f"An expert saw {every[0]:,} to {every[-1]:,} tokens, the median one {middle:,}.")
            if rare := sum(n < FLOOR for n in every):
                warnings.append(
                    f"{rare} of {len(every)} experts saw fewer than {FLOOR} tokens of the calibration text, too few to "
                    "judge them by. Read more text, of several kinds (--samples, --calibration)."
                )
        return PlanDecision(plan, tuple(notes), {"experts": details}, tuple(warnings))

    def local_counts(self) -> tuple[dict[int, int], list[str]]:
        """Return how many experts every layer loses if each loses the same share, and sentences about rounding.

        Raises:
            ConfigError: the goal cannot be reached.
        """
        counts = {layer: self._legal(layer, self._wanted(total)) for layer, total in self.experts.items()}
        return counts, list(dict.fromkeys(self._rounding(counts)))

    def _wanted(self, total: int) -> int:
        """Return how many of the experts of a layer go, before rounding.

        Raises:
            ConfigError: none, or the unit of the ratio does not fit.
        """
        keep, request = own_options(self.request, ExpertOptions).keep, self.request
        if keep is not None:
            if keep >= total:
                raise ConfigError(
                    f"{request.method}.keep is {keep}, and a layer has {total} experts; give {self.fewest} to "
                    f"{total - 1}."
                )
            return total - keep
        if request.ratio_of not in (None, "experts"):
            raise ConfigError(
                f"ratio_of is {request.ratio_of!r}, but {request.method} removes experts; use experts, or give the "
                f"number to keep ({request.method}.keep)."
            )
        return floor_count(request.ratio, total, "experts")

    def _legal(self, layer: int, count: int) -> int:
        """Return the largest number of removed experts up to a count that the router of a layer allows.

        Raises:
            ConfigError: there is none.
        """
        total = self.experts[layer]
        if total - count < self.fewest:
            raise ConfigError(
                f"{self.request.method} would keep {total - count} of {total} experts of layer {layer}, and the router "
                f"of this model needs {self.fewest}. Use a ratio of at most {(total - self.fewest) / total:.4g}."
            )
        legal = count // self.groups * self.groups
        if not legal:
            raise ConfigError(
                f"{count} of {total} experts of layer {layer} would be removed, and its router needs as many of each "
                f"of its {self.groups} groups. "
                f"Use a ratio of at least {sufficient_ratio(Fraction(self.groups, total))}."
            )
        return legal

    def _rounding(self, counts: Mapping[int, int]) -> Iterator[str]:
        for layer, count in counts.items():
            if count != (wanted := self._wanted(self.experts[layer])):
                yield (
                    f"{count} experts of a layer are removed instead of {wanted}: equally many of each of "
                    f"{self.groups} groups."
                )

    def _counts(self, scores: Mapping[int, Tensor]) -> tuple[dict[int, int], list[str]]:
        """Return how many experts every layer loses, and sentences about rounding."""
        local, notes = self.local_counts()
        if own_options(self.request, RankedOptions).ranking == "local":
            return local, notes
        # A step takes one expert of each group of a layer; its score is their mean, over the mean of the layer.
        steps: list[tuple[float, int, int]] = []
        for layer, values in scores.items():
            order, mean = in_turn(range(self.experts[layer]), values.tolist(), self.groups), float(values.mean()) or 1.0
            for step in range(self.most()[layer] // self.groups):
                taken = order[step * self.groups : (step + 1) * self.groups]
                steps.append((math.fsum(float(values[expert]) for expert in taken) / mean / self.groups, layer, step))
        return self._over_layers(steps, local), notes

    def shortest(
        self, order: Mapping[int, Sequence[int]], losses: Mapping[int, Tensor], local: Mapping[int, int]
    ) -> dict[int, list[int]]:
        """Return as many experts as a local choice, those first in the order of their layer that leave least losses.

        Args:
            order: layer -> experts in the order in which they can go; of several groups, one of each in turn.
            losses: layer -> float [experts], the loss of the layer when each of them has gone.
            local: layer -> experts that a local choice removes.
        """
        steps: list[tuple[float, int, int]] = []
        for layer, experts in order.items():
            left = list(accumulate((float(losses[layer][expert]) for expert in experts), max))
            steps += [(loss, layer, step) for step, loss in enumerate(left[self.groups - 1 :: self.groups])]
        return {layer: list(order[layer][:count]) for layer, count in self._over_layers(steps, local).items()}

    def most(self) -> dict[int, int]:
        """Return how many experts every layer may lose."""
        return {layer: (total - self.fewest) // self.groups * self.groups for layer, total in self.experts.items()}

    def _over_layers(self, steps: list[tuple[float, int, int]], local: Mapping[int, int]) -> dict[int, int]:
        """Return how many experts every layer loses by the smallest (score, layer, step), as many as a local choice."""
        chosen = sorted(steps)[: sum(local.values()) // self.groups]
        return {layer: self.groups * sum(at == layer for _, at, _ in chosen) for layer in self.experts}


def in_turn(experts: Iterable[int], scores: Sequence[float], groups: int) -> list[int]:
    """Return experts of a layer, smallest score first; of several groups, one of each in turn.

    Args:
        experts: equally many of each group.
        scores: of all experts of the layer.
        groups: into which the router divides them.
    """
    ordered = sorted(experts, key=lambda expert: (scores[expert], expert))
    members = [[e for e in ordered if e * groups // len(scores) == group] for group in range(groups)]
    return [expert for turn in zip(*members, strict=True) for expert in turn]


def decide_by_sums(
    score: Callable[[ExpertSums], Tensor],
    model: PreTrainedModel,
    samples: Tensor,
    request: PlanRequest,
    run: RunOptions,
) -> PlanDecision:
    """Remove the experts of the smallest scores; one pass through the layers, in memory or on disk.

    Args:
        score: (sums of one layer) -> float64 [experts].
        model: dense, which comes back unchanged.
        samples: calibration token ids, int64 [N, T].
        request: the goal of the plan.
        run: where the weights are, and the text that is read while an expert has seen fewer than :data:`FLOOR` tokens.

    Raises:
        ConfigError: the model has no experts, or the goal cannot be reached.
        DataError: there is no sample.
        UnsupportedModelError: the experts show no tokens that each of them reads.
    """
    choice = Choice.of(model, request)
    choice.local_counts()  # refuses a goal that cannot be reached before anything is computed
    if not samples.numel():
        raise DataError(f"{request.method} scores experts on calibration text; give samples.")
    runner = layer_runner(model, run)
    further = run.further.split(len(samples)) if run.further is not None and len(run.further) else ()
    names = tuple(dict.fromkeys(run.kinds))
    kinds = None
    if len(names) > 1 and len(run.kinds) == len(samples) + sum(map(len, further)):
        kinds = torch.tensor([names.index(kind) for kind in run.kinds]).repeat_interleave(samples.shape[1])
    sums = {layer: ExpertSums(kinds) for layer in expert_modules(runner.model)}
    read = 0
    for batch in (samples, *further):
        read_experts(runner, batch, sums)
        read += len(batch)
        if all(bool((each.tokens >= FLOOR).all()) for each in sums.values()):
            break
    decision = choice.decision({layer: score(each) for layer, each in sums.items()}, sums)
    if kinds is not None:
        counts = {str(layer): each.by_kind.long().tolist() for layer, each in sums.items()}
        by_kind = {kind: {layer: each[n] for layer, each in counts.items()} for n, kind in enumerate(names)}
        decision.details["experts"]["tokens_by_kind"] = by_kind
    if read == len(samples):
        return decision
    note = f"{read:,} sequences were read instead of {len(samples):,}, for experts that few tokens are routed to."
    return replace(decision, notes=(*decision.notes, note))
