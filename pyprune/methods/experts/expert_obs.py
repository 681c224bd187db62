"""Optimal Brain Surgeon for experts: remove those that the others can best replace, by the router of the cut model."""

from __future__ import annotations

from pyprune.methods.base import Deferred
from pyprune.methods.experts import expert_method

METHOD = expert_method(
    "expert_obs",
    "OBS: remove the experts without which the others, solved anew, follow the layer best.",
    Deferred("pyprune.methods.experts._replace:decide"),
    choice="25 % of the experts of every layer, those that the others can best replace.",
)
