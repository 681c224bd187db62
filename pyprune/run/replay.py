"""Saved plans: reading one, and warnings about what a replay of it leaves out."""

from __future__ import annotations

from pathlib import Path

from pyprune.checkpoint.load import ModelSource
from pyprune.checkpoint.record import read_pruning_json
from pyprune.config.run import PruneConfig
from pyprune.errors import PlanError
from pyprune.methods.registry import get_method
from pyprune.plan import PrunePlan
from pyprune.runtime.files import read_bounded

ROTATED = "rotated"
"""Entry of a decision's details: the hidden channels that the plan counts are those of a rotated stream."""


def read_plan(path: str | Path) -> PrunePlan:
    """Read a plan from a JSON file, or from the record of a checkpoint folder.

    Raises:
        PlanError: the file is missing or holds no valid plan.
    """
    path = Path(path)
    if path.is_dir():
        plan = read_pruning_json(path).plan
        if plan is None:
            raise PlanError(
                f"The checkpoint {path} was not cut, so it holds no plan; give one that pyprune prune wrote."
            )
        return plan
    try:
        text = read_bounded(path)
    except (OSError, ValueError) as error:
        raise PlanError(f"The plan {path} cannot be read: {error}. Give a plan or a checkpoint.") from error
    return PrunePlan.from_json(text)


def was_rotated(source: ModelSource) -> bool:
    """Check whether the hidden channels were rotated before the cut.

    Raises:
        CheckpointError: the record is damaged.
    """
    record = source.record
    return record is not None and bool(record.provenance.get("report", {}).get("decision", {}).get(ROTATED))


def reconstruction_warnings(config: PruneConfig) -> list[str]:
    """Return a warning where the plan of a reconstructed checkpoint is replayed without the reconstruction."""
    folder = Path(str(config.plan))
    if config.cut.reconstruct != "none" or not folder.is_dir():
        return []
    facts = read_pruning_json(folder).provenance
    report = facts.get("report", {})
    kind = "least_squares" if report.get("reconstruction") or facts.get("reconstructions") else "bias"
    if kind == "bias" and "compensation" not in report.get("decision", {}):
        return []
    return [
        f"The reconstruction of {folder} is not replayed: the plan says which parts are kept, not their weights. Set "
        f"cut.reconstruct to {kind} to compute it again from this run's calibration text."
    ]


def preparation_warnings(config: PruneConfig) -> list[str]:
    """Return a warning where the method changed the weights before the cut, which a replay does not do."""
    folder = Path(str(config.plan))
    says_it = config.method != "none" and get_method(config.method).prepare is not None  # in :meth:`StageRun.cut`
    if says_it or not folder.is_dir():
        return []
    decision = read_pruning_json(folder).provenance.get("report", {}).get("decision", {})
    if decision.get(ROTATED):
        return [
            f"The hidden channels that the plan of {folder} keeps are those of a rotated stream, and the rotation is "
            "not replayed: other channels of the dense model are removed. Run the method without a plan."
        ]
    if decision.get("layers", {}).get("merges"):
        return [
            f"Layers of {folder} were merged before the cut, which is not replayed: kept weights are those of the "
            "dense model. Run the method without a plan."
        ]
    return []
