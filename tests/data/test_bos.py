"""The bos token in front of every window: for families that expect it, by option elsewhere, in every use of text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pyprune import build_config, build_recovery, evaluate, prune, recover
from pyprune.checkpoint.trained_on import training_marks
from pyprune.config.data import DataConfig
from pyprune.data.sampling import assert_disjoint, sample_sequences, split_disjoint
from pyprune.errors import DataError
from pyprune.families import all_families, begins_with_bos
from pyprune.fit.options import FitOptions
from pyprune.fit.search import Fitting
from pyprune.quality.perplexity import evaluation_text, perplexity
from tests._support.cli import run
from tests._support.models import tiny_model
from tests._support.text import write_model, write_text
from tests._support.tokenizer import tiny_tokenizer

BOS = 0


@pytest.fixture
def text(tmp_path: Path) -> str:
    return str(write_text(tmp_path / "text.txt", words=1500))


@pytest.fixture
def firsts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first tokens of everything that an embedding looks up."""
    found: list[int] = []
    real = torch.nn.functional.embedding

    def looked_up(ids: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        if ids.dim() == 2 and ids.shape[1] > 8:
            found.extend(ids[:, 0].tolist())
        return real(ids, *rest, **named)

    monkeypatch.setattr(torch.nn.functional, "embedding", looked_up)
    return found


def test_gemma_alone_expects_it() -> None:
    assert {name for name, family in all_families().items() if family.begins_with_bos} == {"gemma3_text"}
    assert begins_with_bos(tiny_model("gemma3").config)
    assert not begins_with_bos(tiny_model("llama").config)
    assert not begins_with_bos(None)


SHORT = {"data.samples": 4, "data.sequence_length": 64}
STEPS = ["recover.train.steps=1", "recover.train.batch_size=2", "recover.distill=null"]


@pytest.mark.parametrize(("name", "asked", "expected"), [
    ("gemma3", None, True), ("gemma3", False, False), ("llama", None, False), ("llama", True, True),
])  # fmt: skip
def test_scores_training_and_perplexity_read_it(
    name: str, asked: bool | None, expected: bool, text: str, tmp_path: Path, firsts: list[int]
) -> None:
    dense = write_model(tiny_model(name), tmp_path / "dense")
    of_data = {} if asked is None else {"data.bos": asked}
    config = {"method": "shortgpt", "ratio": 0.3, "data.source": text, **SHORT, **of_data}
    prune(dense, build_config(options=config), out=tmp_path / "pruned")
    assert len(firsts) >= 4
    assert {first == BOS for first in firsts} == {expected}
    firsts.clear()
    other = str(write_text(tmp_path / "other.txt", seed=3))
    again = build_recovery(options={"data.source": other, **SHORT, **of_data}, settings=STEPS)
    recover(tmp_path / "pruned", again, out=tmp_path / "recovered")
    assert firsts
    assert {first == BOS for first in firsts} == {expected}
    firsts.clear()
    test = str(write_text(tmp_path / "test.txt", seed=5))
    evaluate(tmp_path / "recovered", ppl=test, protocol="ppl-128", max_tokens=1024, bos=asked)
    assert len(firsts) == 8
    assert {first == BOS for first in firsts} == {expected}


def test_eval_has_the_option_and_says_it(text: str, tmp_path: Path) -> None:
    dense = write_model(tiny_model("llama"), tmp_path / "dense")
    common = ("eval", dense, "--ppl", text, "--protocol", "ppl-128", "--max-tokens", "1024")
    plain, with_bos = (run(*common, *more, "--json", "-").stdout for more in ((), ("--bos",)))
    figures = [json.loads(out)["perplexity"][0]["perplexity"] for out in (plain, with_bos)]
    assert figures[0] != figures[1]
    assert json.loads(with_bos)["conditions"]["bos"] is True


def test_the_predicted_tokens_are_the_same(text: str) -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    drawn, plain = (
        sample_sequences(tokenizer, DataConfig(source=text, samples=6, sequence_length=40, bos=bos))
        for bos in (True, None)
    )
    assert (drawn.ids[:, 0] == BOS).all()
    assert torch.equal(drawn.ids[:, 1:], plain.ids[:, 1:])
    assert drawn.counts_every_token
    assert (drawn.as_read == plain.ids.numpy()).all()
    ids = evaluation_text(tokenizer, text).token_ids
    first = perplexity(model, ids[:1280], protocol="ppl-128", bos=BOS)
    by_hand = ids[:1280].view(10, 128).clone()
    by_hand[:, 0] = BOS
    assert first.perplexity == perplexity(model, by_hand.flatten(), protocol="ppl-128").perplexity
    assert first.tokens == 1280


def test_what_was_read_is_recognised_all_the_same(text: str) -> None:
    """The token that bos took the place of is not compared, neither by training marks nor between samples."""
    tokenizer = tiny_tokenizer()
    config = DataConfig(source=text, samples=6, sequence_length=64, bos=True)
    drawn, plain = sample_sequences(tokenizer, config), sample_sequences(tokenizer, replace(config, bos=None))
    assert training_marks([drawn]) == training_marks([plain])
    with pytest.raises(DataError, match="share text"):
        assert_disjoint(drawn, plain)
    parts = split_disjoint(tokenizer, {"a": config, "b": replace(config, sequence_length=32)}, bos=False)
    assert all((samples.ids[:, 0] == BOS).all() for samples in parts.values())
    assert_disjoint(parts["a"], parts["b"])


@pytest.mark.parametrize("template", [False, True])
def test_records_begin_with_it_once(template: bool, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps({"instruction": f"say {i}", "output": "yes"}) + "\n" for i in range(6)))
    for tokenizer in (tiny_tokenizer(chat_template=True), tiny_tokenizer(chat_template=True, add_bos=True)):
        if template:
            tokenizer.chat_template = "<s>" + str(tokenizer.chat_template)
        config = DataConfig(
            source=str(path), samples=4, sequence_length=400, layout="instructions", chat_template=template, bos=True
        )
        samples = sample_sequences(tokenizer, config)
        assert (samples.ids[:, 0] == BOS).all()
        assert not (samples.ids[:, 1:] == BOS).any()


@pytest.mark.parametrize(("name", "expected"), [("gemma3", True), ("llama", False)])
def test_a_fit_draws_it(name: str, expected: bool, text: str) -> None:
    options = FitOptions(data=DataConfig(source=text, samples=4, sequence_length=32), window=32, judge_samples=4)
    search: Any = SimpleNamespace(model=tiny_model(name), tokenizer=tiny_tokenizer(), options=options)
    drawn = Fitting.text.func(search)
    assert set(drawn) == {"judged", "data", "valued"}
    assert {bool((samples.ids[:, 0] == BOS).all()) for samples in drawn.values()} == {expected}


def test_a_tokenizer_without_one(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = None
    config = DataConfig(source=text, samples=2, sequence_length=32)
    assert not (sample_sequences(tokenizer, config, bos=True).ids == BOS).any()
    assert "expects a bos token before every text, but the tokenizer has none" in capsys.readouterr().err
    with pytest.raises(DataError, match="bos is on, but the tokenizer has no bos token"):
        sample_sequences(tokenizer, replace(config, bos=True))
