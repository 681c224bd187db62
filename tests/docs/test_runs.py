"""Blocks that a comment ``<!-- run -->`` marks run as they stand, in order, in a folder with a tiny model.

The model of the hub that pages name is the tiny one, and texts of the hub are a file. Options that make a run short are
added. What goes to `vllm serve` is read by vLLM's parser.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pyprune.run.recipe import build_config
from tests._support.cli import run
from tests._support.llama_cpp import byte_level_tokenizer
from tests._support.models import tiny_model
from tests._support.pages import PAGES, blocks, name_of, read
from tests._support.text import write_model, write_text

HUB = "HuggingFaceTB/SmolLM2-135M"
ASSIGNED = re.compile(r"[A-Z_]+=\S+")
TEXT = "--samples 4 --sequence-length 16"
TRAIN = "steps=1 warmup_steps=0 batch_size=2 micro_batch_size=2 dtype=float32"
BRIEF = {
    "prune": f"--calibration text.txt {TEXT}",
    "recover": f"--data text.txt {TEXT}",
    "reconstruct": f"--calibration text.txt {TEXT}",
    "eval": "--protocol ppl-128 --max-tokens 1024",
    "bench": "--engine transformers --batch-size 2 --new-tokens 2 --prompt-tokens 16 --repeats 1 --precision 0",
}
"""Options that make a command short; of one that is given twice the last counts."""
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


def marked(page: Path) -> set[str]:
    return {block.run for block in blocks(page) if block.run}


def runnable(*, slow: bool) -> list[Path]:
    return [page for page in PAGES if marked(page) and ("run slow" in marked(page)) == slow]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with dense/, a tiny model with a tokenizer that llama.cpp reads, and the texts text.txt and test.txt."""
    write_model(tiny_model("llama"), tmp_path / "dense")
    byte_level_tokenizer().save_pretrained(tmp_path / "dense")
    write_text(tmp_path / "text.txt", words=5000)
    write_text(tmp_path / "test.txt", words=400, seed=1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_installed", lambda: True)
    return tmp_path


def follow(page: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Run the marked blocks of a page; return the arguments of every `vllm serve`."""
    served: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda _, command, __: served.append(command[5:]))
    names: dict[str, object] = {}
    for block in (block for block in blocks(page) if block.run):
        if block.language == "python":
            code = block.text.replace(HUB, "dense").replace('"wikitext2"', '"text.txt"').replace('"ptb"', '"test.txt"')
            exec(compile(code, name_of(page), "exec"), names)
            continue
        for line in block.lines:
            words = [word.replace(HUB, "dense") for word in shlex.split(line)]
            while ASSIGNED.fullmatch(words[0]):
                words = words[1:]
            served += follow_command(words)
    return served


def follow_command(words: list[str]) -> list[list[str]]:
    """Run a command of pyprune; return what goes to `vllm serve` from any other."""
    if words[:2] == ["vllm", "serve"]:
        return [words[2:]]
    if words[0] == "docker":
        image = next(i for i, word in enumerate(words) if word.startswith("pyprune:"))
        return [words[image + 1 :]]
    if words[0] == "pyprune":
        result = run(*brief(["test.txt" if word == "wikitext2" else word for word in words[1:]]))
        assert result.exit_code == 0, (words, result.output)
    else:
        assert words[0] in ("make", "cp"), f"nothing here runs {words}"
    return []


def brief(words: list[str]) -> list[str]:
    """Add what makes a command short."""
    more = shlex.split(BRIEF.get(words[0], ""))
    if words[0] == "bench" and "llamacpp" in words:
        more = more[2:]
    if words[0] == "bench" and "--ppl" in words:
        more += ["--protocol", "ppl-128"]
    stages: set[str] = {"recover"} if words[0] == "recover" else set()
    if words[0] == "prune" and "--method" in words:
        method = words[words.index("--method") + 1]
        config = build_config(options={"method": method})
        stages = {*config.stages.before, *config.stages.after}
        if config.method in ("elder", "trsp"):
            gates = ("first_round_steps=2", "round_steps=1", "batch_size=2")
            more += [word for gate in gates for word in ("--set", f"{config.method}.gates.{gate}")]
        if method in ("magnitude", "last", "random"):
            more = []
    if words[0] == "prune" and "--method" not in words:
        more = []
    if "recover" in stages:
        more += [word for option in TRAIN.split() for word in ("--set", f"recover.train.{option}")]
    return [*words, *more]


@pytest.mark.parametrize("page", runnable(slow=False), ids=name_of)
def test_blocks_run(page: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follow(page, monkeypatch)


@pytest.mark.second
@pytest.mark.parametrize("page", runnable(slow=True), ids=name_of)
def test_slow_blocks_run(page: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follow(page, monkeypatch)


@pytest.mark.second
@pytest.mark.serving
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_vllm_has_every_option_and_variable(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every line that starts with ``pyprune serve`` or ``vllm serve``, marked or not."""
    lines = [line for page in PAGES for block in blocks(page) if block.language == "sh" for line in block.lines]
    split = [shlex.split(line) for line in lines if " serve " in line]
    commands = [[word for word in words if not ASSIGNED.fullmatch(word)] for words in split]
    served = [words[2:] for words in commands if words[:2] in (["vllm", "serve"], ["pyprune", "serve"])]
    served = [[word for word in words if word not in ("--", "--no-verify")] for words in served]
    variables = sorted({name for page in PAGES for name in re.findall(r"\bVLLM_[A-Z0-9_]+\b", read(page))})
    done = subprocess.run(
        [sys.executable, "-c", PARSE],
        input=json.dumps({"commands": served, "variables": variables}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert len(served) > 10
    assert done.returncode == 0, done.stderr[-3000:]
    assert "UNKNOWN []" in done.stdout
