"""The suite's own rules hold."""

from __future__ import annotations

import ast

import pytest

from tests.planted_faults import FAULTS, REPO, Fault


@pytest.mark.real_model
def test_heavy_tests_share_a_worker(request: pytest.FixtureRequest) -> None:
    if not hasattr(request.config, "workerinput"):
        pytest.skip("one process runs everything")
    assert request.node.nodeid.endswith("@heavy"), "xdist spreads them over the workers"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_has_its_line_and_its_tests(fault: Fault) -> None:
    """A file that was moved or a renamed variable would otherwise be noticed only by `make faults`."""
    assert (REPO / fault.file).read_text(encoding="utf-8").count(fault.right) == 1
    assert all((REPO / "tests" / place).exists() for place in fault.tests.split())


def test_tests_import_no_private_name() -> None:
    """A function that is worth a test alone has a public name; the others are tested through those."""
    private = [
        f"{path.relative_to(REPO)}:{node.lineno}: {node.module}.{name.name}"
        for path in sorted((REPO / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pyprune"
        for name in node.names
        if name.name.startswith("_")
    ]
    assert private == []
