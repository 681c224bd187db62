from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from pyprune.errors import OutputError
from pyprune.runtime.disk import disk_errors


@pytest.mark.parametrize(
    ("number", "said"),
    [(errno.ENOSPC, "no room on the disk"), (errno.EFBIG, "ulimit -f"), (errno.EDQUOT, "disk quota")],
)
def test_limits_of_the_disk_are_told_apart(tmp_path: Path, number: int, said: str) -> None:
    from safetensors import SafetensorError

    for error in (OSError(number, os.strerror(number)), SafetensorError(f"I/O error: X (os error {number})")):
        with pytest.raises(OutputError, match=said), disk_errors(tmp_path / "out"):
            raise error


def test_numpy_s_error_of_a_full_disk_is_one(tmp_path: Path) -> None:
    """ndarray.tofile, which gguf writes with, gives no error number."""
    with pytest.raises(OutputError, match="no room on the disk"), disk_errors(tmp_path / "out"):
        raise OSError("8192 requested and 8184 written")
