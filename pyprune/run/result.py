"""The result of a run, for its record and its caller."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyprune.cut.compact import CompactReport
from pyprune.plan import PrunePlan
from pyprune.probe.effects import EffectReport


@dataclass
class PruneResult:
    """The result of a run. JSON-able through :meth:`to_dict`.

    Attributes:
        plan: which parts of the dense model were kept.
        compact: sizes before and after, and the architecture; None when the plan was not applied.
        notes: roundings and choices a reader must know.
        warnings: what the user should worry about.
        decision: how the plan came about; "seconds" is the wall time of a new one.
        stages: one report for each action before and after the cut, in order.
        reconstruction: what the reconstruction by least squares did, layer by layer; None without it.
        effects: what regularisation did to the weights, activations and layers; None without it.
        verified: perplexity of the masked model before the cut and of the compacted one after it, on the same
            calibration text; None unless ``verify`` was on.
        out: the written folder; None for a run in memory.
    """

    plan: PrunePlan
    compact: CompactReport | None = None
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    decision: dict[str, Any] = field(default_factory=dict)
    stages: list[dict[str, Any]] = field(default_factory=list)
    reconstruction: dict[str, Any] | None = None
    effects: EffectReport | None = None
    verified: dict[str, float] | None = None
    out: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data, without the plan (a checkpoint's record holds that separately)."""
        return {
            "compact": vars(self.compact) if self.compact is not None else None,
            "notes": self.notes,
            "warnings": self.warnings,
            "decision": self.decision,
            "stages": self.stages,
            "reconstruction": self.reconstruction,
            "effects": self.effects.to_dict() if self.effects is not None else None,
            "verified": self.verified,
        }
