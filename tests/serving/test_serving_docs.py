"""The commands of the page on serving: those of pyprune are run, and vLLM's parser reads what `vllm serve` gets."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from tests._support.cli import run
from tests._support.models import tiny_model
from tests._support.paths import REPO
from tests._support.text import write_model, write_text

DOCUMENT = (REPO / "docs" / "operations" / "serving.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", DOCUMENT, flags=re.DOTALL)
ASSIGNED = re.compile(r"[A-Z_]+=\S+")
BRIEF = shlex.split(
    "--data text.txt --samples 4 --sequence-length 16 --set recover.train.steps=1 --set recover.train.warmup_steps=0 "
    "--set recover.train.batch_size=2 --set recover.train.micro_batch_size=2"
)
PARSE = """
import json, sys
import vllm.envs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

job = json.load(sys.stdin)
for arguments in job["commands"]:
    try:
        validate_parsed_serve_args(make_arg_parser(FlexibleArgumentParser()).parse_args(arguments))
    except SystemExit as end:  # 0: --help
        if end.code:
            sys.exit(f"vllm serve {arguments}: exit status {end.code}")
print("UNKNOWN", [name for name in job["variables"] if name not in vllm.envs.environment_variables])
"""


def commands() -> list[list[str]]:
    """The words of every command, without the variables that stand before it."""
    found = [shlex.split(line) for block in BLOCKS for line in block.splitlines()]
    return [[word for i, word in enumerate(words) if not (i == 0 and ASSIGNED.fullmatch(word))] for words in found]


@pytest.fixture(scope="module")
def to_vllm(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The arguments of `vllm serve`, of every command in order, after running those of pyprune.

    They run in a folder with `dense/`, and `pruned/` cut from it; a recovery is one step on a text that lies there.
    """
    root = tmp_path_factory.mktemp("serving")
    write_model(tiny_model("llama"), root / "dense")
    write_text(root / "text.txt")
    executed: list[list[str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("COLUMNS", "200")
        patch.setattr("pyprune.serving.vllm.command.vllm_installed", lambda: True)
        patch.setattr(os, "execve", lambda _, command, __: executed.append(command[5:]))
        cut = run("prune", "dense", "--method", "last", "--ratio", "0.25", "--out", "pruned")
        assert cut.exit_code == 0, cut.output
        for words in commands():
            executed += follow(words)
    return executed


def follow(words: list[str]) -> list[list[str]]:
    """Run a command of pyprune; give what goes to vLLM from any other."""
    if words[:2] == ["vllm", "serve"]:
        return [words[2:]]
    if words[0] == "docker":
        image = next(i for i, word in enumerate(words) if word.startswith("pyprune:"))
        return [words[image + 1 :]]
    if words[0] == "pyprune":
        result = run(*words[1:], *(BRIEF if words[1] == "recover" else []))
        assert result.exit_code == 0, (words, result.output)
        if words[1] == "inspect":
            assert re.search(r"\bsource\b.*\bdense\b", result.stdout), "it names the dense model"
    else:
        assert words[0] == "make", f"nothing here runs {words}"
    return []


def test_pyprune_runs_its_commands_and_hands_the_rest_on(to_vllm: list[list[str]]) -> None:
    assert len(to_vllm) > 10
    assert ["pruned/", "--port", "9000", "--max-model-len", "2048", "--served-model-name", "chat"] in to_vllm


@pytest.mark.second
@pytest.mark.serving
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_vllm_has_every_option_and_variable(to_vllm: list[list[str]]) -> None:
    variables = sorted(set(re.findall(r"\bVLLM_[A-Z_]+\b", DOCUMENT)))
    done = subprocess.run(
        [sys.executable, "-c", PARSE],
        input=json.dumps({"commands": to_vllm, "variables": variables}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "UNKNOWN []" in done.stdout
