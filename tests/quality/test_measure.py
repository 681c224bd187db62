"""evaluate: a checkpoint on disk, on texts it never saw."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest

from pyprune import build_config, evaluate, prune
from pyprune.errors import CheckpointError, ConfigError, DataError
from pyprune.quality import measure
from pyprune.quality.perplexity import evaluate_perplexity
from pyprune.quality.tasks import evaluate_tasks
from tests._support.cli import run
from tests._support.models import tiny_model
from tests._support.tasks import choice_task
from tests._support.text import write_model, write_text
from tests._support.tokenizer import tiny_tokenizer


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tiny_model("llama"), tmp_path_factory.mktemp("dense") / "dense")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_text(tmp_path_factory.mktemp("text") / "text.txt", words=400))


def test_it_gives_the_perplexity_of_the_model_in_memory(dense: Path, text: str) -> None:
    found = evaluate(dense, ppl=text, protocol="ppl-128", max_tokens=512, device="cpu")
    expected = evaluate_perplexity(tiny_model("llama"), tiny_tokenizer(), text, "ppl-128", max_tokens=512)
    (measured,) = found.perplexity
    assert measured.perplexity == pytest.approx(expected.perplexity, rel=1e-6)
    assert (measured.tokens, measured.source) == (512, text)
    assert json.loads(json.dumps(found.to_dict()))["perplexity"][0]["window"] == 128


def test_text_that_shaped_the_checkpoint_is_refused(dense: Path, text: str, tmp_path: Path) -> None:
    options = {"method": "taylor", "ratio": 0.1, "data.source": text, "data.samples": 4, "data.sequence_length": 128}
    prune(dense, build_config(options=options), out=tmp_path / "pruned")
    with pytest.raises(DataError, match="is not a test text"):
        evaluate(tmp_path / "pruned", ppl=text, protocol="ppl-128")


def test_nothing_to_measure_is_refused(dense: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to measure"):
        evaluate(dense)


def test_a_model_without_a_tokenizer_is_refused(text: str, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "bare")
    with pytest.raises(CheckpointError, match="no tokenizer files"):
        evaluate(tmp_path / "bare", ppl=text)


def test_eval_prints_the_mean_accuracy_over_the_tasks(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    folder = choice_task(tmp_path)
    choice_task(tmp_path, "wrong_sums", label=1)
    monkeypatch.setattr(measure, "evaluate_tasks", partial(evaluate_tasks, include_path=folder))
    found = evaluate(dense, tasks=["tiny_sums", "wrong_sums"], device="cpu")
    each = [found.tasks[task]["acc"] for task in ("tiny_sums", "wrong_sums")]
    assert sum(each) == 1.0
    assert found.mean_accuracy == 0.5
    printed = run(
        "eval", dense, "--tasks", "tiny_sums,wrong_sums", "--json", tmp_path / "found.json", "--device", "cpu"
    )
    assert printed.exit_code == 0, printed.output
    assert re.search(r"mean of all tasks\W+acc\W+0\.5", printed.stdout)
    assert json.loads((tmp_path / "found.json").read_text())["mean_accuracy"] == 0.5


def test_text_alone_has_no_mean_accuracy(dense: Path, text: str) -> None:
    assert evaluate(dense, ppl=text, protocol="ppl-128", max_tokens=256).to_dict()["mean_accuracy"] is None
