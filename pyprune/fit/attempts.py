"""Candidates for a budget, tried for real: cut, reconstructed, judged on text that nothing was fitted to, and timed."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from pyprune.config.cut import ReconstructConfig
from pyprune.cut.compact import compact_
from pyprune.cut.reconstruct import reconstruct_
from pyprune.data.tokens import Batch
from pyprune.families import count_parameters
from pyprune.fit.quantities import CostModel, Quantity, Widths
from pyprune.fit.solve import Solution
from pyprune.plan import PrunePlan
from pyprune.quality.perplexity import perplexity
from pyprune.runtime.device import working_dtype
from pyprune.runtime.records import RecordFile, digest


@dataclass(frozen=True)
class Attempt:
    """A candidate and what became of it.

    Attributes:
        solution: of the search.
        plan: what stays.
        parameters: of the cut model, counted.
        perplexities: kind of text -> perplexity of the reconstructed model on the judged windows.
        measured: what it took when it was run, seconds; empty = it was not timed.
        dense: the same of the dense model in the same turns.
    """

    solution: Solution
    plan: PrunePlan
    parameters: int
    perplexities: Mapping[str, float]
    measured: dict[Quantity, float] = field(default_factory=dict)
    dense: dict[Quantity, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Mean over the kinds of text of the cross-entropy, nats a token: what candidates are compared by."""
        return mean_loss(self.perplexities)

    @property
    def perplexity(self) -> float:
        """exp(loss): the geometric mean over the kinds."""
        return math.exp(self.loss)

    @property
    def amounts(self) -> dict[Quantity, float]:
        """What it takes of everything that is limited: measured where it was timed, else predicted."""
        return {**self.solution.predicted, **self.measured}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data, without the plan's index sets."""
        return {
            **self.solution.to_dict(),
            "summary": self.plan.summary(),
            "parameters": self.parameters,
            "perplexities": dict(self.perplexities),
            "measured": {str(quantity): seconds for quantity, seconds in self.measured.items()},
            "dense": {str(quantity): seconds for quantity, seconds in self.dense.items()},
        }


def mean_loss(perplexities: Mapping[str, float]) -> float:
    """Mean over the kinds of text of the cross-entropy, nats a token."""
    return sum(map(math.log, perplexities.values())) / len(perplexities)


def reconstructed(dense: PreTrainedModel, plan: PrunePlan, text: Batch, options: ReconstructConfig) -> PreTrainedModel:
    """A copy of a model, cut by a plan and reconstructed.

    Args:
        dense: stays as it is.
        plan: of it.
        text: to reconstruct on.
        options: of the reconstruction.
    """
    model = copy.deepcopy(dense)
    if not plan.is_identity:
        reconstruct_(model, plan, text, options=options)
    compact_(model, plan)
    return model


class Tries:
    """Reconstructs plans and judges them; what was judged once is kept.

    Args:
        dense: the dense model; comes back as it was.
        text: to reconstruct on.
        judged: to judge on, windows [N, T] with their kinds.
        options: of the reconstruction.
        path: a JSONL file for the perplexities; None = in memory.
        identity: what tells this model and text from others, plain JSON data.
    """

    def __init__(
        self,
        dense: PreTrainedModel,
        text: Batch,
        judged: Batch,
        options: ReconstructConfig,
        *,
        path: Path | None = None,
        identity: Mapping[str, Any],
    ) -> None:
        self.dense = dense
        self._text = text
        self._judged = judged
        self._options = replace(options, dtype=working_dtype(options.dtype, dense.device))
        self._records = RecordFile(path, program="pyprune fit", option="--cache")
        self._identity = {
            **identity,
            "text": text.digest(),
            "judged": judged.digest(),
            "reconstruct": self._options.to_dict(),
        }

    def judge(self, plan: PrunePlan) -> tuple[dict[str, float], int]:
        """Perplexity of a plan by kind of text, reconstructed but not trained, and its parameters.

        Args:
            plan: of the dense model.
        """
        key = digest([self._identity, plan.to_dict()])
        known = self._records.of("attempt")
        if key not in known:
            model = self.model(plan)
            found = {"perplexities": self.perplexities(model), "parameters": count_parameters(model)}
            self._records.add({"kind": "attempt", "key": key, "plan": plan.summary(), **found})
        return dict(known[key]["perplexities"]), int(known[key]["parameters"])

    def model(self, plan: PrunePlan) -> PreTrainedModel:
        """The dense model cut by a plan and reconstructed; a new one."""
        return reconstructed(self.dense, plan, self._text, self._options)

    def perplexities(self, model: PreTrainedModel) -> dict[str, float]:
        """Perplexity of a model on the judged windows, by kind of text."""
        batch, length = self._judged, self._judged.ids.shape[1]
        return {
            kind: perplexity(
                model, batch.ids[rows].flatten(), protocol="ppl-128", window=length, source=f"calibration text ({kind})"
            ).perplexity
            for kind, rows in batch.rows_by_kind().items()
        }


class Corrected:
    """A cost model whose predictions are multiplied by what measurements showed: measured over predicted.

    Args:
        costs: what is corrected.
        factors: quantity -> factor; 1 where none is given.
    """

    def __init__(self, costs: CostModel, factors: Mapping[Quantity, float]) -> None:
        self._costs = costs
        self._factors = dict(factors)

    def fixed(self, quantity: Quantity, hidden_size: int) -> float:
        """See :class:`CostModel`."""
        return self._factors.get(quantity, 1.0) * self._costs.fixed(quantity, hidden_size)

    def layer(self, quantity: Quantity, hidden_size: int, widths: Widths) -> float:
        """See :class:`CostModel`."""
        return self._factors.get(quantity, 1.0) * self._costs.layer(quantity, hidden_size, widths)

    def head_pair(self, quantity: Quantity) -> float:
        """See :class:`CostModel`."""
        return self._factors.get(quantity, 1.0) * self._costs.head_pair(quantity)
