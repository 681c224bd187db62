"""Try candidates for a budget: cut, reconstruct, and judge them on text that nothing was fitted to."""

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
from pyprune.fit.quantities import Quantity
from pyprune.fit.solve import Solution
from pyprune.plan import PrunePlan
from pyprune.quality.perplexity import perplexity
from pyprune.runtime.device import working_dtype
from pyprune.runtime.records import RecordFile, digest


@dataclass(frozen=True)
class Attempt:
    """A candidate and its measurements.

    Attributes:
        solution: of the search.
        plan: of its kept units.
        parameters: of the cut model, counted.
        perplexities: kind of text -> perplexity of the reconstructed model on the judged windows.
        measured: its measured seconds; empty = it was not timed.
        dense: the dense model's seconds in the same turns.
    """

    solution: Solution
    plan: PrunePlan
    parameters: int
    perplexities: Mapping[str, float]
    measured: dict[Quantity, float] = field(default_factory=dict)
    dense: dict[Quantity, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Mean over the kinds of text of the cross-entropy, nats a token, by which candidates are compared."""
        return mean_loss(self.perplexities)

    @property
    def perplexity(self) -> float:
        """exp(loss): the geometric mean over the kinds."""
        return math.exp(self.loss)

    @property
    def amounts(self) -> dict[Quantity, float]:
        """Its amounts of all limited quantities: measured if it was timed, else predicted."""
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


def reconstruct_copy(
    dense: PreTrainedModel, plan: PrunePlan, text: Batch, options: ReconstructConfig
) -> PreTrainedModel:
    """Copy a model, cut the copy by a plan and reconstruct it.

    Args:
        dense: is not changed.
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
    """Reconstructs plans and judges them, each plan once.

    Args:
        dense: the dense model; is not changed.
        text: to reconstruct on.
        judged: to judge on, windows [N, T] with their kinds.
        options: of the reconstruction.
        path: a JSONL file for the perplexities; None = in memory.
        identity: of this model and text, plain JSON data.
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
        """Measure the perplexity of a plan by kind of text, reconstructed but not trained; count its parameters.

        Args:
            plan: of the dense model.
        """
        key = digest([self._identity, plan.to_dict()])
        record = self._records.of("attempt").get(key)
        if record is None:
            model = self.model(plan)
            facts = {"perplexities": self.perplexities(model), "parameters": count_parameters(model)}
            record = self._records.add({"kind": "attempt", "key": key, "plan": plan.summary(), **facts})
        return dict(record["perplexities"]), int(record["parameters"])

    def model(self, plan: PrunePlan) -> PreTrainedModel:
        """Make a copy of the dense model, cut by a plan and reconstructed."""
        return reconstruct_copy(self.dense, plan, self._text, self._options)

    def perplexities(self, model: PreTrainedModel) -> dict[str, float]:
        """Measure the perplexity of a model on the judged windows, by kind of text."""
        batch, length = self._judged, self._judged.ids.shape[1]
        return {
            kind: perplexity(
                model, batch.ids[rows].flatten(), protocol="ppl-128", window=length, source=f"calibration text ({kind})"
            ).perplexity
            for kind, rows in batch.rows_by_kind().items()
        }
