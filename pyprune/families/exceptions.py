"""What inference cannot know of a model type: values of fields of its family, by model type."""

from __future__ import annotations

from typing import Any

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "gemma": {"begins_with_bos": True},
    "gemma2": {"begins_with_bos": True},
    "vaultgemma": {"begins_with_bos": True},
}
