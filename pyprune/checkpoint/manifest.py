"""The contents of a checkpoint's record, ``pruning.json``, as a type; ``record.py`` reads and writes it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from pyprune.plan import PrunePlan
from pyprune.runtime.files import CHECKPOINT_MANIFEST, seal
from pyprune.runtime.version import VERSION

RECORD_NAME = CHECKPOINT_MANIFEST
RECORD_VERSION = 1


@dataclass(frozen=True)
class PruningRecord:
    """The contents of ``pruning.json``.

    Attributes:
        plan: the parts of the dense model that were kept; None for a checkpoint that was only trained or converted.
        provenance: method, options, source, sizes and measured figures; plain JSON data.
        files: path inside the checkpoint, with "/" -> SHA-256 (hex), of every other file of it.
        tokenizer_config: SHA-256 (hex) of tokenizer_config.json without its chat template; None without such a file.
        cards: SHA-256 (hex) of the last two model cards that pyprune wrote; a card that is neither was edited by
            somebody.
    """

    plan: PrunePlan | None
    provenance: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    tokenizer_config: str | None = None
    cards: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return indented JSON with a checksum over its content."""
        body = {
            "version": RECORD_VERSION,
            "pyprune": VERSION,
            "plan": self.plan.to_dict() if self.plan is not None else None,
            "provenance": self.provenance,
            "files": self.files,
            **({"tokenizer_config": self.tokenizer_config} if self.tokenizer_config is not None else {}),
            **({"cards": list(self.cards)} if self.cards else {}),
        }
        return json.dumps(seal(body), indent=2) + "\n"
