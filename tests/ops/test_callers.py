"""Every op that pyprune.ops exports is called by the product: a kernel without a caller helps nobody."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from pathlib import Path

from pyprune import ops

ROOT = Path(__file__).resolve().parents[2]


def calls_of_ops(source: str) -> set[str]:
    """Names that a module imports from pyprune.ops and calls, as a function or as an attribute of the package."""
    tree = ast.parse(source)
    names: dict[str, str] = {}
    packages: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[:2] == ["pyprune", "ops"]:
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "pyprune":
            packages |= {alias.asname or alias.name for alias in node.names if alias.name == "ops"}
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    attributes = {name.partition(".") for name in called}
    return {names[name] for name in called if name in names} | {
        name for package, _, name in attributes if package in packages
    }


def product() -> Iterable[Path]:
    """The modules of the package outside of the ops themselves."""
    for folder in (ROOT / "pyprune", ROOT / "serving"):
        yield from (path for path in folder.rglob("*.py") if not path.is_relative_to(ROOT / "pyprune" / "ops"))


def test_every_op_has_a_caller() -> None:
    exported = {name for name in ops.__all__ if inspect.isfunction(getattr(ops, name))}
    assert "group_soft_threshold" in exported
    called = set().union(*(calls_of_ops(path.read_text(encoding="utf-8")) for path in product()))
    assert sorted(exported - called) == [], "exported by pyprune.ops, and called nowhere in pyprune/ or serving/"


def test_an_import_alone_is_no_call() -> None:
    imported = "from pyprune.ops import moreau_step, group_penalty as penalty\nfrom pyprune import ops\n"
    assert calls_of_ops(imported) == set()
    assert calls_of_ops(imported + "penalty(w)\nops.perturb(w)\nother.moreau_step(w)\n") == {"group_penalty", "perturb"}
