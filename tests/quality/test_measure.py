"""evaluate: a checkpoint on disk, on texts it never saw."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pyprune import build_config, evaluate, prune
from pyprune.checkpoint.load import ModelSource
from pyprune.checkpoint.trained_on import marked_passages, refuse_training_text, training_marks
from pyprune.config.data import DataConfig
from pyprune.data.sampling import TokenSamples, sample_sequences
from pyprune.data.stream import TokenStream
from pyprune.errors import CheckpointError, ConfigError, DataError
from pyprune.quality import measure
from pyprune.quality.perplexity import evaluate_perplexity, evaluation_text
from pyprune.quality.tasks import check_tasks
from tests._support.cli import run
from tests._support.models import tiny_model
from tests._support.tasks import choice_task
from tests._support.text import prose, write_model, write_text
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


class _JoinsAtBorders:
    """A tokenizer whose first token of a text is another than in the middle of one, as SentencePiece's is."""

    is_fast = True
    eos_token = "</s>"
    chat_template = None

    def __call__(self, texts: list[str], **_: object) -> dict[str, list[list[int]]]:
        return {"input_ids": [[300 + text.encode()[0], *text.encode()[1:]] if text else [] for text in texts]}


def test_training_text_of_short_paragraphs_is_found_whatever_the_tokenizer_does_at_their_ends(tmp_path: Path) -> None:
    path = tmp_path / "talk.txt"
    path.write_text("\n\n".join(f"{i} {prose(4, i)}" for i in range(300)), encoding="utf-8")
    tokenizer: Any = _JoinsAtBorders()
    data = DataConfig(source=str(path), samples=8, sequence_length=128)
    marks = training_marks([sample_sequences(tokenizer, data)])
    text = evaluation_text(tokenizer, str(path))
    assert marked_passages(marks, text.token_ids) == 0, "joined, it has other tokens"
    assert marked_passages(marks, text.passage_ids()) == 16
    with pytest.raises(DataError, match="16 passages of 64 tokens"):
        refuse_training_text(marks, text.passage_ids(), str(path), "this")


def test_a_passage_that_many_texts_hold_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    licence, rng = list(range(64)), np.random.default_rng(0)
    trained = TokenSamples.cut(TokenStream.of("a", [*licence, *rng.integers(100, 10_000, 64)]), [(0, 128)])
    test = torch.tensor([*licence, *rng.integers(100, 10_000, 5_000)])
    refuse_training_text(training_marks([trained]), test, "code.txt", "this")
    assert "shares text with this: 1 passages" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(DataError, match="1 passages"):
        refuse_training_text(training_marks([trained]), test[:200], "code.txt", "this")


def test_what_every_window_holds_is_no_mark() -> None:
    licence, rng = list(range(64)), np.random.default_rng(0)
    files = [[*licence, *rng.integers(100, 10_000, 64)] for _ in range(6)]
    stream = TokenStream.of("code", [token for file in files for token in file])
    trained = TokenSamples.cut(stream, [(i * 128, i * 128 + 128) for i in range(6)])
    assert marked_passages(training_marks([trained]), torch.tensor(licence * 2)) == 0
    assert marked_passages(training_marks([trained]), torch.from_numpy(stream.tokens)) == 6


def test_windows_that_overlap_are_marked() -> None:
    rng = np.random.default_rng(0)
    stream = TokenStream.of("a", rng.integers(0, 10_000, 640))
    trained = TokenSamples.cut(stream, [(start, start + 128) for start in range(0, 513, 8)])
    marks = training_marks([trained])
    assert marked_passages(marks, torch.from_numpy(stream.tokens)) > 64


@pytest.mark.second
@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"tasks": "piqua"}, "Did you mean 'piqa'"), ({"protocol": "ppl2048"}, "Did you mean 'ppl-2048'")],
)
def test_what_cannot_be_measured_is_refused_before_a_model_is_loaded(
    text: str, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, str], words: str
) -> None:
    monkeypatch.setattr(ModelSource, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(ConfigError, match=words):
        evaluate("nowhere", ppl=text, **wrong)


def test_a_field_is_read(dense: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"content": prose(60, i)}) + "\n" for i in range(20)))
    with pytest.raises(DataError, match="has no field 'text'"):
        evaluate(dense, ppl=str(path), protocol="ppl-128")
    assert evaluate(dense, ppl=str(path), protocol="ppl-128", field="content").perplexity[0].windows > 1


def test_nothing_to_measure_is_refused(dense: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to measure"):
        evaluate(dense)


def test_a_model_without_a_tokenizer_is_refused(text: str, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "bare")
    with pytest.raises(CheckpointError, match=r"no tokenizer files, which text needs. Add its tokenizer.json."):
        evaluate(tmp_path / "bare", ppl=text)
    cut = run("prune", tmp_path / "bare", "--method", "magnitude", "--ratio", "0.2", "--out", tmp_path / "cut")
    assert cut.exit_code == 0, cut.output
    with pytest.raises(CheckpointError, match="the model that it was made from"):
        evaluate(tmp_path / "cut", ppl=text)


@pytest.mark.process
def test_eval_prints_the_mean_accuracy_over_the_tasks(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    folder = choice_task(tmp_path)
    choice_task(tmp_path, "wrong_sums", label=1)
    monkeypatch.setattr(measure, "check_tasks", partial(check_tasks, include_path=folder))
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


@pytest.mark.process
def test_a_tag_counts_as_its_tasks_and_what_has_no_accuracy_is_named(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    choice_task(tmp_path)
    choice_task(tmp_path, "wrong_sums", label=1)
    folder = choice_task(tmp_path, "other_sums")
    for name in ("wrong_sums", "other_sums"):
        with (folder / f"{name}.yaml").open("a") as file:
            file.write("tag: sums\n")
    silent = folder / "other_sums.yaml"
    monkeypatch.setattr(measure, "check_tasks", partial(check_tasks, include_path=folder))
    found = evaluate(dense, tasks=["tiny_sums", "sums"], device="cpu")
    assert set(found.tasks) == {"tiny_sums", "wrong_sums", "other_sums"}
    assert found.mean_accuracy == pytest.approx(2 / 3)
    assert found.without_accuracy == ()
    silent.write_text(silent.read_text().replace("metric: acc\n", "metric: acc_mutual_info\n"))
    printed = run("eval", dense, "--tasks", "tiny_sums,sums", "--device", "cpu")
    assert printed.exit_code == 0, printed.output
    assert re.search(r"mean of the tasks with acc \(without: other_sums\)\W+acc\W+0\.5", printed.stdout)


def test_text_alone_has_no_mean_accuracy(dense: Path, text: str) -> None:
    assert evaluate(dense, ppl=text, protocol="ppl-128", max_tokens=256).to_dict()["mean_accuracy"] is None
