"""Places of optional inputs of the tests. Every test that needs one skips when it is absent."""

from __future__ import annotations

from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
SHARED_DATA = REPO.parent / "shared" / "data"
