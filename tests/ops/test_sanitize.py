"""What `make sanitize` is worth: an error of the kernels ends the process that makes it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pyprune.ops import available_isas, dispatch
from tests._support import sanitized
from tests._support.paths import REPO

BEYOND_THE_END = """
import sys, torch
sys.path.insert(0, ".")
from tests._support import sanitized
sanitized.install()
from pyprune.ops import dispatch
module, w = dispatch.extension(), torch.zeros(3, 5)
index = torch.tensor([0, 3])
lie = module.Tensor(w.data_ptr(), [4, 5], [5, 1], "float32")
module.group_soft_threshold(lie, dispatch.tensor_view(index), 0, 0.5, 0.0, 1)
"""


pytestmark = pytest.mark.skipif(sanitized.VARIABLE not in os.environ, reason="runs in make sanitize")


def test_cpp_is_the_sanitized_build() -> None:
    module = dispatch.extension()
    assert module is not None
    assert module.__file__ == os.environ[sanitized.VARIABLE]
    assert available_isas()


@pytest.mark.process
def test_cpp_access_beyond_a_tensor_is_caught() -> None:
    command = [sys.executable, "-c", BEYOND_THE_END]
    child = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=200, check=False)
    assert child.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in child.stderr
    assert "csrc/kernels/group_soft_threshold-inl.h" in child.stderr, "the stack has no names"
