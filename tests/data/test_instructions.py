"""Instruction records: which tokens are fed, which are predicted, token by token."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pyprune.checkpoint.trained_on import marked_passages, training_marks
from pyprune.config.data import DataConfig
from pyprune.data import sampling
from pyprune.data.instructions import encode_examples
from pyprune.data.sampling import TokenSamples, assert_disjoint, sample_sequences, split_disjoint
from pyprune.data.sources import read_corpus
from pyprune.data.stream import ExampleStream
from pyprune.data.tokens import IGNORED, Batch
from pyprune.errors import ConfigError, DataError
from pyprune.methods.registry import read_config
from pyprune.train.loop import TrainConfig, train
from pyprune.train.loss import causal_loss
from pyprune.train.samples import check_samples
from tests._support.models import tiny_batch, tiny_model
from tests._support.paths import SHARED_DATA
from tests._support.text import prose
from tests._support.tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_token_id
RECORDS = [
    {"instruction": "Add.", "input": "1 2", "output": "3é"},
    {"instruction": "Say hi.", "input": "", "output": "hi\nthere"},
    {"instruction": "Say hi to me.", "input": None, "output": "hello"},
]
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nSay hi.\n\n### Response:\n"
)


def written(folder: Path, records: list[dict[str, Any]], name: str = "data.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return str(path)


def config(source: str, **options: Any) -> DataConfig:
    return DataConfig(**{"source": source, "samples": 3, "sequence_length": 256, "layout": "instructions", **options})


def rows(samples: TokenSamples) -> dict[str, tuple[str, Tensor, Tensor]]:
    """Response -> (the whole text that is fed, ids, labels), without padding."""
    found = {}
    for ids, labels in zip(samples.ids, samples.labels, strict=True):
        fed = int((ids >= 0).sum())
        assert (ids[fed:] == IGNORED).all()
        assert (labels[fed:] == IGNORED).all()
        answer = TOKENIZER.decode(labels[labels >= 0])
        found[answer] = (TOKENIZER.decode(ids[:fed]), ids[:fed], labels[:fed])
    return found


def test_prompts_never_count_and_responses_do_to_the_token(tmp_path: Path) -> None:
    samples = sample_sequences(TOKENIZER, config(written(tmp_path, RECORDS)))
    assert samples.ids.shape == (3, 256)
    assert samples.ids.dtype == torch.int64
    found = rows(samples)
    assert set(found) == {"3é</s>", "hi\nthere</s>", "hello</s>"}
    for answer, prompt in (("3é</s>", WITH_INPUT), ("hi\nthere</s>", WITHOUT_INPUT)):
        text, ids, labels = found[answer]
        assert text == prompt + answer
        size = len(prompt.encode())  # the tokenizer has one token a byte
        assert (labels[:size] == IGNORED).all()
        assert torch.equal(labels[size:], ids[size:])
        assert labels[-1] == EOS


def test_whole_text_counts_when_the_prompt_is_not_masked(tmp_path: Path) -> None:
    samples = sample_sequences(TOKENIZER, config(written(tmp_path, RECORDS), mask_prompt=False))
    assert torch.equal(samples.ids, samples.labels)


def test_the_loss_is_that_of_the_response_tokens_alone(tmp_path: Path) -> None:
    tokens = sample_sequences(TOKENIZER, config(written(tmp_path, RECORDS)))
    model = tiny_model()
    losses = []
    for ids, labels in zip(tokens.ids, tokens.labels, strict=True):
        fed = ids[ids >= 0][None]
        log_p = model(input_ids=fed).logits[0].log_softmax(-1)
        start = int((labels >= 0).nonzero()[0])
        losses += [-log_p[t - 1, fed[0, t]] for t in range(start, fed.shape[1])]
    torch.testing.assert_close(causal_loss(model, tokens), torch.stack(losses).mean())
    before = causal_loss(model, Batch(tokens.ids, tokens.ids))
    assert not torch.allclose(before, torch.stack(losses).mean(), rtol=1e-3)


def test_training_on_instructions_learns_the_responses_only(tmp_path: Path) -> None:
    tokens = sample_sequences(TOKENIZER, config(written(tmp_path, RECORDS)))
    model = tiny_model()
    prompts = Batch(tokens.ids, torch.where(tokens.labels >= 0, IGNORED, tokens.ids))
    before = causal_loss(model, tokens).item(), causal_loss(model, prompts).item()
    report = train(model, tokens, TrainConfig(steps=20, batch_size=3, micro_batch_size=3, learning_rate=3e-3))
    after = causal_loss(model, tokens).item(), causal_loss(model, prompts).item()
    assert after[0] < 0.2 * before[0]
    assert after[1] > 0.8 * before[1]
    assert report.tokens == 20 * tokens.token_count()
    assert report.losses[0] == pytest.approx(before[0], rel=1e-4)


def test_what_is_longer_than_the_cutoff_is_cut_on_the_right(tmp_path: Path) -> None:
    size = len(WITHOUT_INPUT.encode())
    records = [{"instruction": "Say hi.", "input": "", "output": "abcdef"}]
    source = written(tmp_path, records)
    for extra, answer in ((3, "abc"), (6, "abcdef"), (7, "abcdef</s>"), (8, "abcdef</s>")):
        samples = sample_sequences(TOKENIZER, config(source, samples=1, sequence_length=size + extra))
        assert list(rows(samples)) == [answer]
    with pytest.raises(DataError, match=r"leaves a response to predict in \d+ tokens.*raise sequence_length"):
        sample_sequences(TOKENIZER, config(source, samples=1, sequence_length=size))


def test_records_without_anything_to_predict_and_repeated_ones_are_left_out(tmp_path: Path) -> None:
    long = {"instruction": "x" * 300, "input": "", "output": "never reached"}
    blank = {"instruction": "Say nothing.", "input": "", "output": " \n"}
    samples = sample_sequences(TOKENIZER, config(written(tmp_path, [long, *RECORDS, blank, RECORDS[0]])))
    assert set(rows(samples)) == {"3é</s>", "hi\nthere</s>", "hello</s>"}
    with pytest.raises(DataError, match="has 3 distinct instruction records; 4 are asked for"):
        sample_sequences(TOKENIZER, config(written(tmp_path, [long, *RECORDS, blank]), samples=4))


def test_a_beginning_token_is_fed_where_the_tokenizer_has_one(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(add_bos=True)
    samples = sample_sequences(tokenizer, config(written(tmp_path, RECORDS)))
    plain = sample_sequences(TOKENIZER, config(written(tmp_path, RECORDS)))
    assert (samples.ids[:, 0] == tokenizer.bos_token_id).all()
    assert (samples.labels[:, 0] == IGNORED).all()
    assert torch.equal(samples.ids[:, 1:], plain.ids[:, :-1])
    assert torch.equal(samples.labels[:, 1:], plain.labels[:, :-1])


def test_the_chat_template_marks_the_answer(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(chat_template=True)
    samples = sample_sequences(tokenizer, config(written(tmp_path, RECORDS), chat_template=True))
    found = rows(samples)
    assert set(found) == {"3é<|end|></s>", "hi\nthere<|end|></s>", "hello<|end|></s>"}
    assert found["3é<|end|></s>"][0] == "<|user|>Add.\n\n1 2<|end|><|assistant|>3é<|end|></s>"


def test_a_template_that_ends_a_turn_itself_gets_no_second_end(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    samples = sample_sequences(tokenizer, config(written(tmp_path, RECORDS), chat_template=True))
    text = rows(samples)["hello</s>"][0]
    assert text == "[user]Say hi to me.</s>\n[assistant]hello</s>"


def test_a_template_that_rewrites_the_question_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(DataError, match="differently from an open one"):
        sample_sequences(tokenizer, config(written(tmp_path, RECORDS), chat_template=True))


def test_a_tokenizer_without_character_positions_counts_the_prompts_tokens(tmp_path: Path) -> None:
    slow = SimpleNamespace(is_fast=False, eos_token_id=EOS, bos_token_id=0)
    calls = lambda text, **options: {  # noqa: E731 - a stand-in for a tokenizer written in Python
        "input_ids": TOKENIZER(text, add_special_tokens=False)["input_ids"]
    }
    corpus = read_corpus(written(tmp_path, RECORDS))
    tokenizer = type("Slow", (), {**vars(slow), "__call__": staticmethod(calls)})()
    for ours, theirs in zip(
        encode_examples(tokenizer, corpus, cutoff=256), encode_examples(TOKENIZER, corpus, cutoff=256), strict=True
    ):
        assert ours.ids.tolist() == theirs.ids.tolist()
        assert ours.response == theirs.response


def test_unusable_sources_and_tokenizers_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "plain.txt"
    text.write_text("just text")
    with pytest.raises(DataError, match="holds no instruction records"):
        sample_sequences(TOKENIZER, config(str(text)))
    with pytest.raises(DataError, match="has no chat template"):
        sample_sequences(TOKENIZER, config(written(tmp_path, RECORDS), chat_template=True))
    endless = tiny_tokenizer()
    endless.eos_token = None
    with pytest.raises(DataError, match="no end-of-sequence token"):
        sample_sequences(endless, config(written(tmp_path, RECORDS)))
    with pytest.raises(ConfigError, match="mask_prompt is off"):
        DataConfig(mask_prompt=False).validate()
    with pytest.raises(ConfigError, match="which is for recovery_data"):
        read_config({"data": {"layout": "instructions"}})


def test_far_too_many_records_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has 3 distinct instruction records; 100000000 are asked for"):
        sample_sequences(TOKENIZER, config(written(tmp_path, RECORDS), samples=10**8, sequence_length=10**6))


def test_padding_that_no_memory_holds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = written(tmp_path, RECORDS)
    monkeypatch.setattr(sampling, "PADDED_TOKENS", 3 * 256)
    assert len(sample_sequences(TOKENIZER, config(source))) == 3
    with pytest.raises(DataError, match="3 records, padded to sequence_length 257, are more than 768 tokens"):
        sample_sequences(TOKENIZER, config(source, sequence_length=257))


def test_sampling_is_seeded_and_a_later_set_takes_other_records(tmp_path: Path) -> None:
    records = [{"instruction": prose(40, i), "input": "", "output": prose(40, 100 + i)} for i in range(20)]
    source = written(tmp_path, records)
    wanted = {name: config(source, samples=10, sequence_length=900) for name in ("first", "second")}
    drawn = split_disjoint(TOKENIZER, wanted)
    both = [set(map(tuple, s.ids.tolist())) for s in drawn.values()]
    assert len(both[0] | both[1]) == 20
    alone = sample_sequences(TOKENIZER, wanted["first"])
    assert torch.equal(alone.ids, drawn["first"].ids)
    other = sample_sequences(TOKENIZER, config(source, samples=10, sequence_length=900, seed=5))
    assert not torch.equal(other.ids, alone.ids)
    with pytest.raises(DataError, match="share text"):
        assert_disjoint(alone, other)
    with pytest.raises(DataError, match="is used already: it is a test text"):
        split_disjoint(TOKENIZER, {**wanted, "third": config(source, samples=1, sequence_length=900)})


def test_records_are_kept_apart_from_windows_of_the_same_file(tmp_path: Path) -> None:
    records = [{"instruction": prose(40, i), "input": "", "output": prose(40, 100 + i)} for i in range(20)]
    source = written(tmp_path, records)
    windows = DataConfig(source=source, samples=4, sequence_length=200)
    drawn = split_disjoint(
        TOKENIZER, {"regularise": windows, "recover": config(source, samples=8, sequence_length=900)}
    )
    texts = [TOKENIZER.decode(row[row >= 0]).split("### Instruction:\n")[1] for row in drawn["recover"].ids]
    windows_text = [TOKENIZER.decode(row) for row in drawn["regularise"].ids]
    pieces = [w[at : at + 70] for w in windows_text for at in range(len(w) - 70)]
    assert not any(piece in text for piece in pieces for text in texts)
    every = [r["instruction"] + "\n\n### Response:\n" + r["output"] for r in records]
    assert any(piece in text for piece in pieces for text in every)


def test_marks_are_of_whole_passages_and_not_of_the_header(tmp_path: Path) -> None:
    records = [{"instruction": prose(40, i), "input": "", "output": prose(200, 100 + i)} for i in range(12)]
    samples = sample_sequences(TOKENIZER, config(written(tmp_path, records), samples=12, sequence_length=1500))
    marks = training_marks([samples])
    stream = samples.spans.stream
    assert isinstance(stream, ExampleStream)
    assert marked_passages(marks, torch.from_numpy(stream.tokens)) > 12
    header = TOKENIZER(WITHOUT_INPUT + prose(200, 999), return_tensors="pt")["input_ids"]
    assert marked_passages(marks, header) == 0
    more = training_marks([], marks)
    assert more == marks


# What the loop makes of labels


def test_micro_batches_are_of_like_length_and_cut() -> None:
    ids = tiny_batch(0, 6, 20)
    for row, length in enumerate((20, 3, 12, 3, 20, 7)):
        ids[row, length:] = IGNORED
    tokens = Batch(ids, ids)
    pieces = tokens.micro_batches(2)
    assert [tuple(p.ids.shape) for p in pieces] == [(2, 3), (2, 12), (2, 20)]
    assert sum(p.token_count() for p in pieces) == tokens.token_count()
    assert torch.equal(torch.cat([functional.pad(p.ids, (0, 20 - p.ids.shape[1]), value=IGNORED) for p in pieces])
                       .sort(0).values, ids.sort(0).values)  # fmt: skip
    full = tiny_batch(0, 4, 8)
    assert torch.equal(torch.cat([p.ids for p in Batch.of(full).micro_batches(3)]), full)


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_masked_labels_are_weighted_exactly_over_micro_batches(micro: int) -> None:
    ids = tiny_batch(0, 4, 16)
    labels = ids.clone()
    for row, start in enumerate((0, 13, 5, 9)):
        labels[row, :start] = IGNORED
    tokens = Batch(ids, labels)
    expected, model = tiny_model(), tiny_model()
    causal_loss(expected, tokens).backward()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    settings = TrainConfig(
        optimizer="sgd", learning_rate=1.0, steps=1, batch_size=4, micro_batch_size=micro, max_grad_norm=None
    )
    train(model, tokens, settings)
    for name, p in expected.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(before[name] - model.get_parameter(name).detach(), p.grad, rtol=1e-4, atol=1e-6)


def test_bad_labels_are_refused() -> None:
    model, ids = tiny_model(), tiny_batch(0, 2, 8)
    with pytest.raises(DataError, match=r"labels of shape \(2, 7\)"):
        check_samples(model, Batch(ids, ids[:, 1:]), "samples")
    with pytest.raises(DataError, match="vocabulary ends at 383"):
        check_samples(model, Batch(ids, torch.full_like(ids, 384)), "samples")
    with pytest.raises(DataError, match="nothing to predict"):
        check_samples(model, Batch(ids, torch.full_like(ids, IGNORED)), "samples")
    hole = ids.clone()
    hole[0, 3] = IGNORED
    with pytest.raises(DataError, match="padding before a token"):
        check_samples(model, Batch.of(hole), "samples")
    padded = ids.clone()
    padded[0, 5:] = IGNORED
    with pytest.raises(DataError, match="a label on padding"):
        check_samples(model, Batch(padded, ids), "samples")


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the shared data sets are not here")
def test_real_alpaca_records() -> None:
    source = str(SHARED_DATA / "alpaca" / "train_5k.jsonl.gz")
    samples = sample_sequences(TOKENIZER, config(source, samples=200, sequence_length=512))
    for text, _, labels in rows(samples).values():
        start = text.index("### Response:\n") + len("### Response:\n")
        assert int((labels >= 0).nonzero()[0]) == len(text[:start].encode())
