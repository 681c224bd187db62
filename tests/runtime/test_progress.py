"""Messages next to the bars of other libraries."""

from __future__ import annotations

import pytest
from tqdm.auto import tqdm

from pyprune.runtime.progress import end_bars, say


def test_what_is_said_after_open_bars_has_a_line_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    bars = [tqdm(total=3, desc="Loading weights"), tqdm(total=3, desc="Loading more")]
    end_bars()
    say("Interrupted. Nothing was changed.")
    assert all(bar.disable for bar in bars)
    assert capfd.readouterr().err.splitlines()[-1] == "Interrupted. Nothing was changed."
