"""Options of scoring methods for tests."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from pyprune.config.run import PruneConfig
from pyprune.methods.registry import score_presets
from pyprune.run.recipe import build_config

SCORES = (
    "magnitude",
    "random",
    "wanda",
    "flap",
    "obs",
    "modegpt",
    "loraprune",
    "taylor",
    "moreau",
    "moreau_gs",
    "smoothgrad",
)
"""Every scoring method of the package."""


def scoring_config(method: str, ratio: float | None = None, **changes: Any) -> PruneConfig:
    """The preset of a scoring method with other options: its own by their names, all others are ``score``'s.

    The ranking is global unless it is given, whatever the preset says: most tests are about one order.
    """
    base = build_config(preset=score_presets()[method], options={"ratio": ratio})
    assert base.options is not None
    assert base.score is not None
    names = {f.name for f in fields(base.options)}
    own = {name: value for name, value in changes.items() if name in names}
    score = {name: value for name, value in changes.items() if name not in names}
    return replace(
        base,
        options=replace(base.options, **own),
        score=replace(base.score, **{"ranking": "global", **score}),
    )


def quick(config: PruneConfig, steps: int = 2) -> PruneConfig:
    """Return the configuration with as few steps or draws as the method allows."""
    options: Any = config.options
    if hasattr(options, "train"):
        train = replace(options.train, steps=steps, batch_size=2, micro_batch_size=2)
        return replace(config, options=replace(options, train=train))
    few = {name: steps for name in ("steps",) if hasattr(options, name)}
    return replace(config, options=replace(options, **few)) if few else config
