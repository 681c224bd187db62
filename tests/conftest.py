"""Suite-wide rules: tiers, heavy tests one at a time, GPU tests only with a GPU."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests._support import sanitized

if sanitized.VARIABLE in os.environ:
    # Before any test module, conftest or plugin asks which instruction sets there are.
    sanitized.install()
if not any(Path("/dev").glob("nvidia[0-9]*")):
    # Triton decides what a kernel is when triton itself is imported, and many packages import it: the switch must
    # be set before the first of them, here.
    os.environ["TRITON_INTERPRET"] = "1"
# torch keeps compiled kernels between runs and does not ask whether they were made for other vector registers: one
# of AVX-512 on a CPU that is told to be AVX2 writes past its buffers. Each setting has a folder of its own.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    str(Path(tempfile.gettempdir(), f"pyprune-inductor-{os.environ.get('ATEN_CPU_CAPABILITY', 'default')}")),
)
# A shell starts background jobs with Ctrl-C ignored, and nohup ignores a closed terminal; the tests of both need them,
# here and in their children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Property tests draw the same examples at every run of `make test`, and others at each of `make fuzz`. An example that
# fails there becomes an explicit case. A kernel's first call may be slow, and choosing a backend once for all examples
# is what the op tests want: neither says anything about a property.
COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
settings.register_profile("suite", COMMON, derandomize=True, database=None)
settings.register_profile("fuzz", COMMON, derandomize=False, print_blob=True, max_examples=2000)
settings.load_profile(os.environ.get("PYPRUNE_HYPOTHESIS", "suite"))

# Each of these fills memory or both cores by itself, so all of them run on the same xdist worker, in turn.
HEAVY = ("serving", "real_model")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=("quick", "first", "all"),
        default="all",
        help="quick: one case of each test of the package itself, none of which starts a process (make quick); first: "
        "marked tests and most cases of large grids are left out (make test); all: everything (make test-all)",
    )


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _choose_tier(config, items)
    for item in items:
        if any(item.get_closest_marker(name) for name in HEAVY):
            item.add_marker(pytest.mark.xdist_group("heavy"))
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _choose_tier(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the tier does not run."""
    from tests._support.tiers import beyond_quick, refuse_processes, second_tier

    tier = config.getoption("tier")
    if tier == "all":
        return
    out = second_tier(items)
    if tier == "quick":
        out |= beyond_quick([item for item in items if item not in out])
        sys.addaudithook(refuse_processes)
    config.hook.pytest_deselected(items=[item for item in items if item in out])
    items[:] = [item for item in items if item not in out]
