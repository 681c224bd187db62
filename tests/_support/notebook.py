"""Run the code of a notebook without Jupyter: its cells in turn, in one namespace.

python -m tests._support.notebook docs/start/quick-start.ipynb    # runs it, and stores what its cells print
"""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any


def read_notebook(path: Path) -> dict[str, Any]:
    """Read a notebook as JSON data."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells with code, in their order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def stored_output(cell: dict[str, Any]) -> str:
    """Return what a cell printed when the notebook was stored."""
    return "".join(line for output in cell["outputs"] for line in output["text"])


def run_cells(notebook: dict[str, Any]) -> list[str]:
    """Run all cells with code, and return what each of them prints."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for cell in code_cells(notebook):
        with redirect_stdout(io.StringIO()) as out:
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
        printed.append(out.getvalue())
    return printed


def main() -> None:
    """Run a notebook and store what it prints."""
    path = Path(sys.argv[1])
    notebook = read_notebook(path)
    for number, (cell, text) in enumerate(zip(code_cells(notebook), run_cells(notebook), strict=True), 1):
        lines = text.splitlines(keepends=True)
        cell["execution_count"] = number
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
