"""Run tests of the kernels in a process of their own, for gpu_card.py, and record how many passed.

python -m bench.training.gpu_card_kernels tests/gpu --jsonl FILE
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from bench._command import exit_status
from pyprune.errors import MissingDependencyError, PypruneError
from pyprune.runtime.records import append_jsonl

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[2]


class OutcomeCounts:
    """A plugin of pytest that keeps the names of tests by what became of them."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test once: as it was called, or as its setup or teardown went wrong."""
        if report.when == "call" or report.outcome != "passed":
            self.names[report.outcome].append(report.nodeid)


def check_kernels(options: argparse.Namespace) -> None:
    """Run tests, and record how many passed.

    Raises:
        MissingDependencyError: pytest is not installed, or what the tests and pyproject.toml need of it.
        PypruneError: one failed, or none ran.
    """
    for package in ("pytest", "pytest_timeout", "hypothesis"):
        if find_spec(package) is None:
            raise MissingDependencyError(package, "dev", "Testing the kernels")
    import pytest
    import torch

    from bench._timing import conditions

    counts = OutcomeCounts()
    # A newer or older torch than the one of the lock may warn, which says nothing of the kernels.
    only = ["-k", options.k] if options.k else []
    words = [options.tests, *only, "-q", "-W", "default", "-p", "no:cacheprovider"]
    status = pytest.main(["--rootdir", str(ROOT), *words], plugins=[counts])
    passed, failed, skipped = counts.names.values()
    about = conditions(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    figures = {"passed": len(passed), "failures": failed, "skipped": len(skipped)}
    append_jsonl(options.jsonl, [{"kind": "kernels", "tests": options.tests, **figures, **about}])
    print(f"\n{len(passed)} tests passed, {len(failed)} failed, {len(skipped)} were skipped.")
    if failed:
        raise PypruneError(f"{len(failed)} of {len(failed) + len(passed)} tests failed, the first: {failed[0]}.")
    if status or not passed:
        raise PypruneError(f"pytest ended with status {int(status)} and {len(passed)} tests passed.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests")
    parser.add_argument("-k", help="as pytest's")
    parser.add_argument("--jsonl", type=Path, required=True, help="file to append to")
    options = parser.parse_args(arguments)
    return exit_status(lambda: check_kernels(options))


if __name__ == "__main__":
    sys.exit(main())
