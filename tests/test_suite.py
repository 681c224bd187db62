"""The suite's own rules hold."""

from __future__ import annotations

import pytest


@pytest.mark.real_model
def test_heavy_tests_share_a_worker(request: pytest.FixtureRequest) -> None:
    if not hasattr(request.config, "workerinput"):
        pytest.skip("one process runs everything")
    assert request.node.nodeid.endswith("@heavy"), "xdist spreads them over the workers"
