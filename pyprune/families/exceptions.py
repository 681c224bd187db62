"""What inference cannot know of a model type: values of fields of its family, by model type."""

from __future__ import annotations

from typing import Any

REFUSED = {
    "cpmant": "it puts tokens of its own in front of each text",
    "rwkv": "it divides weights and stream by powers of 2 that depend on the index of a layer",
    "xlnet": "each position sees those after it",
    "zaya": "its layers hand states of their routers to the next layer",
}
"""Types without a table that do not keep the contract of whole layers, with the reason."""
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "gemma": {"begins_with_bos": True},
    "gemma2": {"begins_with_bos": True},
    "recurrent_gemma": {"begins_with_bos": True},
    "vaultgemma": {"begins_with_bos": True},
}
