"""How many examples a property of an op is tried on."""

from __future__ import annotations

from hypothesis import settings

LONGER = 10


def examples(count: int) -> settings:
    """``count`` examples for each backend in `make test`, ten times as many in `make fuzz`."""
    return settings(max_examples=count if settings.default.derandomize else LONGER * count)
