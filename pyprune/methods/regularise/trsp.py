"""TRSP: the first version of the paper that became ELDeR; the same method under its first name."""

from __future__ import annotations

from dataclasses import replace

from pyprune.methods.regularise.elder import METHOD as ELDER

METHOD = replace(
    ELDER,
    name="trsp",
    summary="Learn which layers matter least, make them the identity during training, drop them (TRSP = ELDeR).",
)
