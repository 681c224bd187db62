"""What commands say of a cut model's sizes that run slowly."""

from __future__ import annotations

from pathlib import Path

from pyprune.plan import PrunePlan
from pyprune.runtime.progress import warn

SHOWN_SIZES = 4


def warn_of_slow_sizes(plan: PrunePlan, weights: str, advice: str = "") -> None:
    """Name every layer whose widths run slowly in a format; what the dense model had is as it was.

    Args:
        plan: what was cut.
        weights: format or dtype of the matrices; nothing is said of one without rules.
        advice: a sentence to end with.
    """
    from pyprune.budget.sizes import FFN_MULTIPLES, SizeRules, slow_sizes

    if weights not in FFN_MULTIPLES:
        return
    slow = slow_sizes(plan, SizeRules.of(weights))
    if slow:
        more = f" And {len(slow) - SHOWN_SIZES} more." if len(slow) > SHOWN_SIZES else ""
        last = f" {advice}" if advice else ""
        warn(f"Sizes that are slower than they could be in {weights}: {' '.join(slow[:SHOWN_SIZES])}{more}{last}")


def warn_of_slow_checkpoint(folder: Path, quantise: str | None = None, advice: str = "") -> None:
    """The same of a checkpoint folder with a plan; nothing is said of others.

    Args:
        folder: that was written, or the source of a GGUF file.
        quantise: format of the matrices; None = the dtype of config.json.
        advice: a sentence to end with.
    """
    from pyprune.checkpoint.record import has_record, read_pruning_json
    from pyprune.runtime.files import read_json

    plan = read_pruning_json(folder).plan if has_record(folder) else None
    if plan is not None:
        warn_of_slow_sizes(plan, quantise or str(read_json(folder / "config.json").get("dtype")), advice)
