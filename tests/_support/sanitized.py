"""Pytest plugin of `make sanitize`: pyprune's C++ kernels come from a build with AddressSanitizer and UBSan.

The build's path is in PYPRUNE_SANITIZED_EXTENSION. It is put in place of the installed module before any test imports
that, whatever kind of installation (editable, wheel, links) would be found.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys

import pytest

VARIABLE = "PYPRUNE_SANITIZED_EXTENSION"


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(ctypes.CDLL(None), "__asan_init"):
        raise pytest.UsageError("AddressSanitizer is not in this process: preload libasan.so, as `make sanitize` does")
    spec = importlib.util.spec_from_file_location("pyprune._C", os.environ[VARIABLE])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["pyprune._C"] = module
