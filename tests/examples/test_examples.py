"""The scripts of examples/ run, and do what they say."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pyprune.checkpoint.load import load_model
from pyprune.checkpoint.record import read_pruning_json
from pyprune.plan import PrunePlan
from tests._support.llama_cpp import byte_level_tokenizer
from tests._support.models import tiny_model
from tests._support.paths import REPO
from tests._support.served import SIZES, damp_
from tests._support.text import write_model, write_text


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tiny_model("llama"), tmp_path_factory.mktemp("dense") / "dense")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("text")
    return write_text(folder / "read.txt", words=400), write_text(folder / "test.txt", words=400, seed=1)


def run(name: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, str(REPO / "examples" / name), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_run_here() -> None:
    scripts = {path.name for path in (REPO / "examples").glob("*.py")}
    assert scripts == set(re.findall(r'run\("([\w.]+)"', Path(__file__).read_text(encoding="utf-8")))


def test_prune_and_evaluate(dense: Path, texts: tuple[Path, Path], tmp_path: Path) -> None:
    read, test = texts
    small = ["--set", "data.samples=4", "--set", "data.sequence_length=64"]
    out = run("prune_and_evaluate.py", dense, read, tmp_path / "out", "--test", test, "--ratio", 0.1, *small)
    assert re.search(r"^dense: perplexity [\d.]+ on", out, flags=re.MULTILINE)
    assert re.search(r"^pruned: perplexity [\d.]+ on", out, flags=re.MULTILINE)
    pruned, whole = load_model(tmp_path / "out")[0], load_model(dense)[0]
    assert pruned.num_parameters() < whole.num_parameters()


def test_edit_a_plan(dense: Path, texts: tuple[Path, Path], tmp_path: Path) -> None:
    out = run("edit_a_plan.py", dense, texts[1], tmp_path / "out")
    shares = [float(share) for share in re.findall(r"([\d.]+)% removed, perplexity [\d.]+$", out, flags=re.MULTILINE)]
    assert 0 < shares[0] < shares[1]
    plan = PrunePlan.from_json((tmp_path / "out" / "edited.json").read_text(encoding="utf-8"))
    assert read_pruning_json(tmp_path / "out" / "edited").plan == plan
    assert plan.removed_layers == (2,)
    assert len(plan.layers[-1].ffn) == plan.dense.intermediate_size // 2


def test_recover_with_distillation(dense: Path, texts: tuple[Path, Path], tmp_path: Path) -> None:
    read, test = texts
    small = {
        "data.samples": 8,
        "data.sequence_length": 64,
        "recover.rank": 2,
        "recover.train.steps": 2,
        "recover.train.batch_size": 2,
        "recover.train.micro_batch_size": 2,
    }
    settings = [part for name, value in small.items() for part in ("--set", f"{name}={value}")]
    folder = tmp_path / "out"
    out = run("recover_with_distillation.py", dense, read, folder, "--test", test, "--ratio", 0.1, *settings)
    cut, recovered = (float(found) for found in re.findall(r"perplexity ([\d.]+)", out))
    assert cut != recovered
    (entry,) = read_pruning_json(folder / "recovered").provenance["recoveries"]
    assert entry["teacher"] == str(dense)
    assert entry["config"]["recover"]["distill"]["hidden"] == 0.1


def test_budget_to_phone(texts: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    short = {
        "data.source": texts[0], "data.samples": 16, "data.sequence_length": 32, "window": 32, "score_samples": 4,
        "value_samples": 8, "judge_samples": 4, "solve.solutions": 2, "values.dtype": "float32",
    }  # fmt: skip
    sets = [part for name, value in short.items() for part in ("--set", f"{name}={value}")]
    phone = write_model(tiny_model("llama"), tmp_path / "dense")
    byte_level_tokenizer().save_pretrained(phone)  # llama.cpp wants a vocabulary with merges
    out = run("budget_to_phone.py", phone, "memory@64=75%", tmp_path / "out", "--weights", "f16", *sets)
    taken = re.search(r"^memory@64<=75%: ([\d.]+) %, dense 100", out, flags=re.MULTILINE)
    assert taken is not None
    assert float(taken.group(1)) <= 75
    assert (tmp_path / "out" / "fitted.f16.gguf").read_bytes()[:4] == b"GGUF"
    assert load_model(tmp_path / "out" / "fitted")[0].num_parameters() < load_model(phone)[0].num_parameters()


@pytest.mark.serving
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_draft_model(texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    model = tiny_model("llama", **SIZES)
    damp_(model)  # so that a layer less often leaves the next token as it was
    folder = write_model(model, tmp_path / "dense")
    pruning = ["--method", "last", "--ratio", 0.25, "--new-tokens", 24]
    serving = ["--enforce-eager", "--max-model-len", 256]
    out = run("draft_model.py", folder, texts[0], tmp_path / "out", *pruning, *serving)
    draft = load_model(tmp_path / "out")[0].config
    assert (draft.model_type, draft.num_hidden_layers) == ("llama", 3)
    found = re.search(r"^accepted: (\d+) of (\d+) drafted tokens \(([\d.]+)%\)$", out, flags=re.MULTILINE)
    assert found is not None
    assert 0 < int(found.group(1)) <= int(found.group(2))
    assert re.search(r"^tokens per second: [\d.]+ alone, [\d.]+ with the draft$", out, flags=re.MULTILINE)
    assert "same answers: 4 of 4" in out, "the draft must not change what the dense model says"
