"""Tables and lists of the documentation are what the code has."""

from __future__ import annotations

import re
import tomllib

import pytest
from transformers import PreTrainedModel

import pyprune
from pyprune.cut.target import choose_target
from pyprune.families import all_families, family_for
from pyprune.methods.registry import method_modules
from pyprune.methods.table import methods_table
from pyprune.plan import PrunePlan
from pyprune.runtime.report import markdown_table
from pyprune.serving.vllm.plugin import architectures
from tests._support.models import tiny_model
from tests._support.paths import REPO

FAMILIES = (REPO / "docs" / "reference" / "families.md").read_text(encoding="utf-8")
METHODS = REPO / "docs" / "reference" / "methods"
SMALL = {
    "LLaMA 1/2/3, SmolLM2": "llama",
    "Phi-2": "phi",
    "GPT-NeoX, Pythia (with parallel residuals)": "gpt_neox",
    "StarCoder2 (tied head; an untied one as Phi-2)": "starcoder2-tied",
}
"""Rows of the matrix whose tiny model is not called like them."""


def cuts(plan: PrunePlan) -> dict[str, PrunePlan]:
    """One plan a column of the matrix."""
    dense = plan.dense
    half = dense.num_key_value_heads // 2
    heads, ffn = plan, plan
    for layer in plan.layers:
        heads = heads.with_layer(layer.index, kv_heads=range(half), query_heads=range(half * dense.group_size))
        ffn = ffn.with_layer(layer.index, ffn=range(24))
    return {
        "layers": plan.drop_layers([1]),
        "hidden": plan.keep_hidden(range(6 * dense.num_attention_heads)),
        "hidden, not a multiple of the heads": plan.keep_hidden(range(40)),
        "heads": heads,
        "FFN": ffn,
    }


def matrix() -> dict[str, dict[str, str]]:
    lines = FAMILIES[FAMILIES.index("| family |") :].split("\n\n")[0].splitlines()
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def small(row: str) -> PreTrainedModel:
    """The tiny model of a row: "Gemma 3 (text)" -> gemma3."""
    return tiny_model(SMALL.get(row) or re.sub(r"[^a-z0-9]", "", row.partition(" (")[0].lower()))


def test_the_matrix_has_every_family() -> None:
    assert {small(row).config.model_type for row in matrix()} == set(all_families())


@pytest.mark.parametrize("family", matrix())
def test_the_support_matrix_is_true(family: str) -> None:
    model = small(family)
    claimed = matrix()[family]
    for column, plan in cuts(family_for(model).plan(model.config)).items():
        stock = choose_target(family_for(model), model.config, plan).stock
        assert claimed[column] == (stock.model_type if stock else "pruned"), column
    served = type(model).__name__.replace("TextForCausalLM", "ForCausalLM")
    assert claimed["sizes per layer in vLLM"] == ("yes" if f"Pruned{served}" in architectures() else "no")


def test_the_table_of_methods_is_made_from_them() -> None:
    """`pyprune methods --markdown` prints it."""
    assert markdown_table(methods_table(installed=False)) in (METHODS / "index.md").read_text(encoding="utf-8")


def test_every_method_has_a_page() -> None:
    assert {path.stem for path in METHODS.glob("*.md")} - {"index"} == set(method_modules())


def test_the_tree_in_the_architecture_is_the_tree() -> None:
    text = (REPO / "docs" / "reference" / "architecture.md").read_text(encoding="utf-8")
    tree = text[text.index("## The tree") : text.index("## The floors")]
    lines = re.sub(r"\n {20,}", " ", tree).splitlines()  # an entry may run on in the next line
    of_folder = {name: line for line in lines for name in re.findall(r"([\w/]+)/(?= )", line)}
    package = REPO / "pyprune"
    here = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    assert [name for name in sorted(here) if not any(name in line for line in lines)] == []
    for path in package.glob("*/__init__.py"):
        folder = path.parent
        if folder.name not in ("ops", "families", "modeling"):
            modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
            assert [name for name in sorted(modules) if name not in re.findall(r"\w+", of_folder[folder.name])] == []


def test_the_floors_in_the_architecture_are_the_linters() -> None:
    text = (REPO / "docs" / "reference" / "architecture.md").read_text(encoding="utf-8")
    floors = text[text.index("## The floors") :]
    rows = re.findall(r"^\| [\w ]+ \| (`.*`) \|$", floors, flags=re.MULTILINE)
    shown = [{f"pyprune.{name}" for name in re.findall(r"`(\w+)`", row)} for row in rows]
    options = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (layers,) = [contract["layers"] for contract in options["contracts"] if contract["type"] == "layers"]
    assert shown == [set(re.split(r" : | \| ", layer)) for layer in layers]


def test_every_public_function_is_in_the_page_on_python() -> None:
    text = (REPO / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    functions = [name for name in pyprune._PUBLIC if name.islower() and not name.startswith("evaluate_")]
    assert [name for name in functions if f"`{name}`" not in text] == []
