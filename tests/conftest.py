"""Suite-wide rules: heavy tests one at a time, GPU tests only with a GPU."""

from __future__ import annotations

import pytest

# Each of these fills memory or both cores by itself, so all of them run on the same xdist worker, in turn.
HEAVY = ("serving", "real_model")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.get_closest_marker(name) for name in HEAVY):
            item.add_marker(pytest.mark.xdist_group("heavy"))
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
