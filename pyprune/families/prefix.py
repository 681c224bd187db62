"""The model types of pyprune's own architectures: a dense one's with a prefix."""

from __future__ import annotations

PREFIX = "pruned_"
"""Start of the types of pruned architectures."""


def is_pruned_type(model_type: object) -> bool:
    """Return whether a model type, as config.json names it, is one of pyprune's own."""
    return str(model_type).startswith(PREFIX)


def dense_type(model_type: object) -> str:
    """Return the model type of the dense model, for one of pyprune's own or a dense one."""
    return str(model_type).removeprefix(PREFIX)
