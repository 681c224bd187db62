"""TRSP: the first version of the paper that became ELDeR; the same method under its first name."""

from __future__ import annotations

from dataclasses import replace

from pyprune.config.run import PruneConfig
from pyprune.methods.regularise.elder import METHOD as ELDER
from pyprune.methods.training import make_forms


def _trsp() -> PruneConfig:
    """TRSP: 25 % of the layers, as ELDeR's gates choose on a mixture of texts."""
    return replace(ELDER.presets["elder-plain"](), method="trsp")


def _trsp_anneal() -> PruneConfig:
    """TRSP whose chosen layers are faded out during training; the same as elder-anneal."""
    return replace(ELDER.presets["elder-anneal"](), method="trsp")


def _trsp_paper() -> PruneConfig:
    """TRSP with its paper's constants; ELDeR under its first name."""
    return replace(ELDER.presets["elder-paper"](), method="trsp")


METHOD = replace(
    ELDER,
    name="trsp",
    summary="TRSP: ELDeR under its first name.",
    presets={**make_forms(_trsp), "trsp-anneal": _trsp_anneal, "trsp-paper": _trsp_paper},
)
