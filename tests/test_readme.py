"""What the documentation claims is run: README's example and commands, and the support matrix."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any, cast

import pytest
import typer
from transformers import PreTrainedModel
from typer.testing import CliRunner

from pyprune.checkpoint.load import load_model
from pyprune.checkpoint.save import save_checkpoint
from pyprune.cli.app import app
from pyprune.cut.target import choose_target
from pyprune.families import all_families, family_for
from pyprune.methods.registry import method_modules
from pyprune.methods.table import methods_table
from pyprune.plan import PrunePlan
from pyprune.runtime.report import markdown_table
from pyprune.serving.vllm.plugin import architectures
from tests._support.models import tiny_model
from tests._support.paths import REPO
from tests._support.tokenizer import tiny_tokenizer

README = (REPO / "README.md").read_text(encoding="utf-8")
FAMILIES = (REPO / "docs" / "reference" / "families.md").read_text(encoding="utf-8")
METHODS = REPO / "docs" / "reference" / "methods"
CONTRIBUTING = (REPO / "CONTRIBUTING.md").read_text(encoding="utf-8")
SMALL = {
    "LLaMA 1/2/3, SmolLM2": "llama",
    "Phi-2": "phi",
    "GPT-NeoX, Pythia (with parallel residuals)": "gpt_neox",
    "StarCoder2 (tied head; an untied one as Phi-2)": "starcoder2-tied",
}
"""Rows of the matrix whose tiny model is not called like them."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.second
def test_the_python_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = blocks("python")
    code = [line for line in example.splitlines() if line.strip()]
    assert len(code) == 5
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tiny_model("llama"), tiny_tokenizer(), "tiny", plan=None, provenance={})
    Path("text.txt").write_text("\n\n".join(f"Paragraph {i} of a text about the number {i * i}." for i in range(400)))
    small = (
        '"data.source": "text.txt", "data.samples": 4, "data.sequence_length": 16, "elder.gates.first_round_steps": 2, '
    )
    replaced = {
        '"HuggingFaceTB/SmolLM2-135M"': '"tiny"',
        "options={": "options={" + small,
    }
    for before, after in replaced.items():
        assert before in example
        example = example.replace(before, after)
    exec(compile(example, "README.md", "exec"), {})
    assert "3 of 4 layers" in capsys.readouterr().out
    model, _ = load_model("pruned")
    assert model.config.num_hidden_layers == 3


def test_the_commands_exist_with_these_options() -> None:
    commands = [
        shlex.split(line) for block in blocks("sh") for line in block.splitlines() if line.startswith("pyprune")
    ]
    assert len(commands) >= 4
    for _, name, *arguments in commands:
        output = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).output
        for option in (a for a in arguments if a.startswith("--")):
            assert f"{option} " in output, f"{name} {option}"


def test_the_make_targets_exist() -> None:
    makefile = (REPO / "Makefile").read_text()
    for target in re.findall(r"\bmake ([\w-]+)", README + CONTRIBUTING):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE) or target in ("this", "Make"), target


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


DOCUMENTS = sorted([*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPO)))
def test_links_and_named_files_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or (document.parent / target).exists(), target
    for name in re.findall(r"`((?:pyprune|serving|tests|bench|csrc|examples)/[\w/.-]+\.(?:py|cpp|h))`", text):
        assert (REPO / name).exists(), name


def test_options_that_documents_name_exist() -> None:
    commands = cast(Any, typer.main.get_command(app)).commands
    seen, unknown = 0, []
    for path in [*DOCUMENTS, *sorted((REPO / "recipes").glob("**/*.yaml"))]:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        for name, rest in re.findall(r"pyprune (\w[\w-]*)((?: [^\n`|;#]*)?)", text):
            command = _command(commands.get(name), rest.split())
            if command is None or name == "serve":  # which passes every option of vLLM on
                continue
            known = {option for parameter in command.params for option in parameter.opts}
            used = set(re.findall(r"(?<=\s)--[a-z][\w-]*", rest))
            seen += len(used)
            unknown += [(path.name, name, option) for option in used - known - {"--help"}]
    assert seen > 100
    assert unknown == []


def _command(found: Any, words: list[str]) -> Any:
    """The command itself where a group comes first (pyprune GROUP COMMAND)."""
    return found.commands.get(words[0] if words else "") if hasattr(found, "commands") else found


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
