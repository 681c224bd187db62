"""Property tests: the same examples at every run of the suite, others at random in `make fuzz`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).parents[1]
PROPERTY = """
from hypothesis import given, strategies as st

def test_drawn(request):
    drawn = []

    @given(st.integers(0, 2**64), st.text())
    def draw(number, text):
        drawn.append((number, text))

    draw()
    with open(request.config.rootpath / "drawn", "w", encoding="utf-8") as file:
        file.write(repr(drawn))
"""


def drawn(folder: Path, profile: str) -> str:
    """What a property test draws in a process of its own."""
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (folder / "test_drawn.py").write_text(PROPERTY, encoding="utf-8")
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "--rootdir", str(folder), str(folder)],
        env=os.environ | {"PYPRUNE_HYPOTHESIS": profile, "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "kept")},
        cwd=TESTS.parent,
        check=True,
        capture_output=True,
        timeout=120,
    )
    return (folder / "drawn").read_text(encoding="utf-8")


@pytest.mark.process
@pytest.mark.second
def test_the_suite_draws_the_same_twice_and_the_fuzzer_does_not(tmp_path: Path) -> None:
    first = drawn(tmp_path, "suite")
    assert drawn(tmp_path, "suite") == first
    random = drawn(tmp_path, "fuzz")
    assert random != drawn(tmp_path, "fuzz")
    assert len(random) > 5 * len(first), "the fuzzer tries more"


def test_this_run_follows_its_profile() -> None:
    profile = os.environ.get("PYPRUNE_HYPOTHESIS", "suite")
    assert settings.get_current_profile_name() == profile
    assert settings.default.derandomize == (profile == "suite")
    assert (settings.default.database is None) == (profile == "suite")


def test_no_test_leaves_its_profile() -> None:
    pattern = re.compile(r"derandomize=|load_profile\(|@seed\(|database=")
    found = {path for path in TESTS.rglob("*.py") if pattern.search(path.read_text(encoding="utf-8"))}
    assert found - {Path(__file__)} == {TESTS / "conftest.py"}


def test_make_fuzz_runs_property_tests_at_random() -> None:
    rule = (TESTS.parent / "Makefile").read_text(encoding="utf-8").split("\nfuzz:")[1].split("\n\n")[0]
    assert "PYPRUNE_HYPOTHESIS=fuzz" in rule
    assert '-m "fuzz or hypothesis"' in rule
