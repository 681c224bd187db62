"""For `make sanitize`: pyprune's C++ kernels come from a build with AddressSanitizer and UBSan.

The build's path is in PYPRUNE_SANITIZED_EXTENSION. It is put in place of the installed module before anything imports
that, whatever kind of installation (editable, wheel, links) would be found.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys

VARIABLE = "PYPRUNE_SANITIZED_EXTENSION"


def install() -> None:
    """Load the build as ``pyprune._C``.

    Raises:
        RuntimeError: the process lacks the sanitizer's runtime.
    """
    if not hasattr(ctypes.CDLL(None), "__asan_init"):
        raise RuntimeError("AddressSanitizer is not in this process: preload libasan.so, as `make sanitize` does")
    spec = importlib.util.spec_from_file_location("pyprune._C", os.environ[VARIABLE])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["pyprune._C"] = module
