"""Warn about sizes of a pruned model that run slowly."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pyprune.runtime.progress import warn

if TYPE_CHECKING:
    from pyprune.config.run import PruneConfig
    from pyprune.fit.sizes import SizeRules
    from pyprune.plan import PrunePlan

SHOWN_SIZES = 4


def warn_of_slow_checkpoint(folder: Path, quantise: str | None = None, config: PruneConfig | None = None) -> None:
    """Warn about every layer whose widths run slowly in a format, unless they are the dense model's.

    A folder without a plan and a format without rules are skipped. For a model that was fitted in that format the rules
    are those of its search.

    Args:
        folder: that was written, or the source of a GGUF file.
        quantise: format of the matrices; None = the dtype of config.json.
        config: of the run that made the plan, to advise on its options; None = the run ended earlier.
    """
    from pyprune.checkpoint.record import has_record, read_pruning_json
    from pyprune.fit.sizes import SizeRules, slow_sizes
    from pyprune.runtime.files import read_json

    record = read_pruning_json(folder) if has_record(folder) else None
    if record is None or (plan := record.plan) is None:
        return
    weights = quantise or str(read_json(folder / "config.json").get("dtype"))
    rules = SizeRules.read(record.provenance.get("fit", {}), weights)
    slow = slow_sizes(plan, rules) if rules is not None else []
    if slow and rules is not None:
        more = f" And {len(slow) - SHOWN_SIZES} more." if len(slow) > SHOWN_SIZES else ""
        options = _options_for(rules, config, plan) if config is not None else []
        advice = f" For steps that run well: {' '.join(options)}." if options else ""
        warn(f"Sizes that are slower than they could be in {weights}: {' '.join(slow[:SHOWN_SIZES])}{more}{advice}")


def _options_for(rules: SizeRules, config: PruneConfig, plan: PrunePlan) -> list[str]:
    """Return the options with which the run would have kept to the rules that it broke."""
    if config.plan is not None:
        return []
    dense, score = plan.dense, config.score
    by_steps = (
        score is not None and "ffn" in score.axes and not score.counts and score.ffn_multiple % rules.ffn_multiple
    )
    off_ffn = any(len(p.ffn) % rules.ffn_multiple for p in plan.layers if len(p.ffn) != dense.units("ffn", p.index))
    off_hidden = plan.removed_hidden and len(plan.hidden) % rules.hidden_multiple
    options = [f"--set score.ffn_multiple={rules.ffn_multiple}"] if by_steps and off_ffn else []
    return options + ([f"--set hidden_multiple={rules.hidden_multiple}"] if off_hidden else [])
