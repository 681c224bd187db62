from __future__ import annotations

import hashlib
import math
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from pyprune import build_config, prune
from pyprune.config.data import DataConfig
from pyprune.cut.compact import compact_
from pyprune.data.sampling import sample_sequences
from pyprune.errors import ConfigError, DataError, MissingDependencyError
from pyprune.families import family_for
from pyprune.plan import PrunePlan
from pyprune.quality.perplexity import EvaluationError, evaluate_perplexity, evaluation_text, interval, perplexity
from pyprune.quality.tasks import accuracies, evaluate_tasks, mean_accuracy
from tests._support.models import tiny_model
from tests._support.paths import SHARED_DATA
from tests._support.tasks import choice_task
from tests._support.text import write_model
from tests._support.tokenizer import VOCAB_SIZE, tiny_tokenizer

shared = pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the shared data sets are not here")
TOKENIZER = tiny_tokenizer()


class WarmsUp(nn.Module):
    """Four tokens; token 0 has probability 1/4 for the first 64 predictions of a window, then 1/2."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=dtype))
        self.seen: list[tuple[int, ...]] = []

    def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        assert not self.training
        assert not use_cache
        self.seen.append(tuple(input_ids.shape))
        logits = torch.zeros(*input_ids.shape, 4, dtype=self.weight.dtype)
        logits[:, 64:, 0] = math.log(3)  # 3 / (3 + 1 + 1 + 1) = 1/2
        return SimpleNamespace(logits=logits)


def tiny_llama(**options: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB_SIZE, **(sizes | options)))


def test_both_protocols_against_arithmetic() -> None:
    ids = torch.zeros(2 * 2048 + 100, dtype=torch.int64)
    # 2047 predictions: 64 of ln 4 = 2 ln 2, and 1983 of ln 2. The mean is (128 + 1983) / 2047 ln 2.
    long = perplexity(WarmsUp(), ids, protocol="ppl-2048")
    assert long.perplexity == pytest.approx(2 ** (2111 / 2047), rel=1e-6)
    assert (long.windows, long.tokens, long.window) == (2, 4096, 2048)
    # 127 predictions: 64 of 2 ln 2 and 63 of ln 2. The mean is (128 + 63) / 127 ln 2.
    short = perplexity(WarmsUp(), ids, protocol="ppl-128")
    assert short.perplexity == pytest.approx(2 ** (191 / 127), rel=1e-6)
    assert (short.windows, short.tokens, short.window) == (32, 4096, 128)


def test_the_interval_is_that_of_the_means_of_pieces() -> None:
    losses = torch.tensor([[1.0] * 128 + [3.0] * 127, [3.0] + [2.0] * 128 + [9.0] * 126], dtype=torch.float64)
    # Three whole pieces (1, 3 and 2 nats) over both windows; the rest counts in the mean alone. t of 2 degrees: 4.303.
    middle, half = float(losses.mean()), 4.302653 * 1.0 / math.sqrt(3)
    assert interval(losses) == pytest.approx((math.exp(middle - half), math.exp(middle + half)), rel=1e-5)
    assert interval(losses[:, :100]) is None
    assert interval(losses[:1, :200]) is None


def test_a_mixed_text_against_arithmetic() -> None:
    # Windows of 4 (so only the uniform part of the model): every prediction costs ln 4, whatever the tokens.
    result = perplexity(WarmsUp(), [0, 1, 2, 3, 3, 2, 1, 0, 1], protocol="ppl-128", window=4)
    assert result.perplexity == pytest.approx(4.0)
    assert result.windows == 2
    # One window of 67: 64 predictions of ln 4; then token 0 (ln 2) and token 1 (p = 1/6).
    ids = [0] * 65 + [0, 1]
    expected = math.exp((64 * math.log(4) + math.log(2) + math.log(6)) / 66)
    assert perplexity(WarmsUp(), ids, window=67).perplexity == pytest.approx(expected)


def test_the_tail_is_dropped_and_batches_do_not_matter() -> None:
    model = tiny_llama()
    ids = torch.randint(3, VOCAB_SIZE, (16 * 5 + 7,), generator=torch.Generator().manual_seed(1))
    whole = perplexity(model, ids, protocol="ppl-128", window=16, batch_size=1)
    cut = perplexity(model, ids[:80], protocol="ppl-128", window=16, batch_size=3)
    assert whole.windows == cut.windows == 5
    assert whole.perplexity == pytest.approx(cut.perplexity, rel=1e-5)


def test_ppl_2048_is_the_mean_of_the_losses_that_transformers_reports() -> None:
    model = tiny_llama().eval()
    ids = torch.randint(3, VOCAB_SIZE, (3, 300), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        losses = [model(input_ids=row[None], labels=row[None]).loss.item() for row in ids]
    result = perplexity(model, ids.flatten(), protocol="ppl-2048", window=300)
    assert result.perplexity == pytest.approx(math.exp(sum(losses) / 3), rel=1e-5)


def test_limits_on_tokens_and_windows() -> None:
    ids = torch.zeros(1000, dtype=torch.int64)
    assert perplexity(WarmsUp(), ids, protocol="ppl-128", max_tokens=300).windows == 2
    assert perplexity(WarmsUp(), ids, protocol="ppl-128", max_windows=3).windows == 3
    with pytest.raises(DataError, match=r"1000 tokens \(100 after max_tokens=100\), less than one window of 128"):
        perplexity(WarmsUp(), ids, protocol="ppl-128", max_tokens=100)


def test_default_batches_hold_about_2048_tokens() -> None:
    model = WarmsUp()
    perplexity(model, torch.zeros(128 * 20, dtype=torch.int64), protocol="ppl-128")
    assert model.seen == [(16, 128), (4, 128)]


def test_low_precision_weights_stay_and_the_loss_is_float32() -> None:
    model = WarmsUp(torch.bfloat16)
    result = perplexity(model, torch.zeros(256, dtype=torch.int64), protocol="ppl-128")
    assert model.weight.dtype is torch.bfloat16
    rounded = torch.tensor(math.log(3)).bfloat16().float().item()
    later = math.log(1 + 3 * math.exp(-rounded))
    assert math.log(result.perplexity) == pytest.approx((64 * math.log(4) + 63 * later) / 127, rel=1e-6)


def test_training_mode_is_put_back_module_by_module() -> None:
    model = tiny_llama().train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    perplexity(model, torch.zeros(64, dtype=torch.int64), window=16)
    assert [module.training for module in model.modules()] == before
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_names_the_window(bad: float) -> None:
    class Broken(WarmsUp):
        def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
            output = super().forward(input_ids, use_cache)
            output.logits[input_ids == 3] = bad
            return output

    ids = torch.zeros(60, dtype=torch.int64)
    ids[45] = 3
    with pytest.raises(EvaluationError, match=r"not finite in window 4 .*\(tokens 40 to 50\)"):
        perplexity(Broken(), ids, window=10, batch_size=2)


def test_text_window_and_vocabulary_errors() -> None:
    model = tiny_llama(max_position_embeddings=64)
    with pytest.raises(DataError, match="100 tokens, less than one window of 128"):
        perplexity(model, torch.zeros(100, dtype=torch.int64), protocol="ppl-128")
    with pytest.raises(DataError, match=r"128 tokens, but the model allows at most 64. No protocol has windows that"):
        perplexity(model, torch.zeros(200, dtype=torch.int64), protocol="ppl-128")
    with pytest.raises(DataError, match=r"2048 tokens, but the model allows at most 256. Use the protocol ppl-128."):
        perplexity(tiny_llama(max_position_embeddings=256), torch.zeros(3000, dtype=torch.int64))
    with pytest.raises(DataError, match="token id 400, but the model's vocabulary has 259"):
        perplexity(model, torch.full((32,), 400), window=16)
    with pytest.raises(ConfigError, match="Did you mean 'ppl-128'"):
        perplexity(model, torch.zeros(200, dtype=torch.int64), protocol="ppl-129")
    with pytest.raises(ConfigError, match="window is 1"):
        perplexity(model, torch.zeros(200, dtype=torch.int64), window=1)
    with pytest.raises(ConfigError, match="batch_size is 0"):
        perplexity(model, torch.zeros(200, dtype=torch.int64), window=10, batch_size=0)


def test_a_source_is_tokenised_once_with_one_bos(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "ab"}\n{"text": "cd"}\n')
    text = evaluation_text(tiny_tokenizer(add_bos=True), str(path))
    assert text.token_ids.tolist() == [0, *TOKENIZER("ab\n\ncd")["input_ids"]]
    result = evaluate_perplexity(tiny_llama(), tiny_tokenizer(add_bos=True), text, "ppl-128", window=7)
    assert (result.windows, result.tokens, result.source) == (1, 7, str(path))
    assert result.text_sha256 == hashlib.sha256(b"ab\n\ncd").hexdigest()


def test_test_text_can_be_reserved(tmp_path: Path) -> None:
    rng = random.Random(0)
    path = tmp_path / "t.txt"
    path.write_text("".join(rng.choices("abcdefgh ", k=400)))
    text = evaluation_text(TOKENIZER, str(path))
    with pytest.raises(DataError, match="is used already: it is a test text"):
        sample_sequences(TOKENIZER, DataConfig(source=str(path), samples=1, sequence_length=16), exclude=text.spans)


@pytest.mark.second
@shared
def test_real_texts_have_the_token_counts_of_their_protocols() -> None:
    raw = (SHARED_DATA / "wikitext2_raw" / "test.txt").read_bytes()
    lines = raw.split(b"\n")[:-1]
    blank = sum(1 for line in lines if not line.strip())
    # Rows keep their line end, blank rows (" \n") become empty, and 4357 blank lines join 4358 rows.
    expected = len(raw) - 2 * blank + 2 * (len(lines) - 1)
    wikitext = evaluation_text(TOKENIZER, str(SHARED_DATA / "wikitext2_raw" / "test.txt"))
    assert len(lines) == 4358
    assert len(wikitext.token_ids) == expected
    ptb = evaluation_text(TOKENIZER, str(SHARED_DATA / "ptb" / "ptb.valid.txt"))
    # 3370 sentences, each with two spaces and one line end around it, joined by 3369 blank lines.
    assert len(ptb.token_ids) == 399_782 - 3 * 3370 + 2 * 3369
    c4 = evaluation_text(TOKENIZER, str(SHARED_DATA / "c4_sample" / "valid.jsonl"))
    assert c4.max_windows == 256


@pytest.mark.process
def test_tasks_run_on_a_model_in_memory(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    model = tiny_llama().train()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    results = evaluate_tasks(model, TOKENIZER, ["tiny_sums"], batch_size=4, include_path=choice_task(tmp_path), limit=6)
    # An untrained model gives every token about 1/259, so the answer of one or two tokens always wins.
    assert results["tiny_sums"]["acc"] == 1.0
    assert set(results["tiny_sums"]) >= {"acc", "acc_norm", "acc_stderr"}
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.second
def test_lm_eval_itself_runs_on_a_pruned_folder(tmp_path: Path) -> None:
    """By itself it calls Transformers out of date, which knows nothing of the pruned architectures."""
    dense = write_model(tiny_model("llama"), tmp_path / "dense")
    plan = family_for(tiny_model("llama")).plan(tiny_model("llama").config).with_layer(1, ffn=range(8))
    (tmp_path / "plan.json").write_text(plan.to_json())
    prune(dense, build_config(options={"method": "none", "plan": str(tmp_path / "plan.json")}), out=tmp_path / "pruned")
    args = ["lm_eval", "--model", "hf", "--model_args", f"pretrained={tmp_path / 'pruned'},dtype=float32"]
    args += ["--tasks", "tiny_sums", "--include_path", str(choice_task(tmp_path)), "--device", "cpu"]
    alone = subprocess.run([sys.executable, "-m", *args], capture_output=True, text=True, check=False)
    assert "does not recognize this architecture" in alone.stderr
    done = subprocess.run(
        [sys.executable, "-m", "pyprune.modeling", *args], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "|tiny_sums|" in done.stdout


def test_the_mean_accuracy_is_that_of_the_tasks_asked_for() -> None:
    results = {
        "a": {"acc": 0.5, "acc_norm": 0.9},
        "group": {"acc": 0.2},
        "group_part": {"acc": 0.0},
        "text": {"ppl": 7.0},
    }
    assert accuracies(results, ["a", "group", "text"]) == {"a": 0.5, "group": 0.2}
    assert mean_accuracy(results, ["a", "group", "text"]) == pytest.approx(0.35)
    assert mean_accuracy(results, ["text"]) is None


@pytest.mark.process
def test_pruned_architectures_are_evaluated_alike(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    model = tiny_llama(num_hidden_layers=3)
    plan = PrunePlan.identity("llama", family_for(model).sizes(model.config))
    compact_(model, plan.with_layer(0, query_heads=[1], kv_heads=[1], ffn=range(20)))
    assert type(model).__name__.startswith("Pruned")
    ids = torch.randint(3, VOCAB_SIZE, (64,), generator=torch.Generator().manual_seed(1))
    assert math.isfinite(perplexity(model, ids, protocol="ppl-128", window=16).perplexity)
    results = evaluate_tasks(model, TOKENIZER, ["tiny_sums"], include_path=choice_task(tmp_path))
    assert results["tiny_sums"]["acc"] == 1.0


@pytest.mark.second
def test_unknown_tasks_and_a_missing_lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    tasks = choice_task(tmp_path)
    many = ["tiny_sum", *(f"tiny_sum{i}" for i in range(1000))]
    with pytest.raises(ConfigError, match=r"Unknown task 'tiny_sum'. Did you mean 'tiny_sums'") as caught:
        evaluate_tasks(tiny_llama(), TOKENIZER, many, include_path=tasks)
    assert len(caught.value.problems) == 5, "comparing each with thousands of names takes its time"
    with pytest.raises(ConfigError, match="not a folder"):
        evaluate_tasks(tiny_llama(), TOKENIZER, ["tiny_sums"], include_path=tmp_path / "none")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MissingDependencyError, match=r"pyprune\[eval\]"):
        evaluate_tasks(tiny_llama(), TOKENIZER, ["tiny_sums"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tasks": []}, "tasks is empty"),
        ({"tasks": ["tiny_sums", ""]}, "where a name is blank"),
        ({"tasks": ["", "", " "]}, "where a name is blank"),
        ({"tasks": [None]}, "where a name is blank"),
        ({"limit": 0}, "limit is 0"),
        ({"limit": float("nan")}, "limit is nan"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_options_of_tasks_are_checked_before_anything_is_imported(
    options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=words):
        evaluate_tasks(tiny_llama(), TOKENIZER, **{"tasks": ["tiny_sums"], **options})


def broken_task(folder: Path, old: str, new: str) -> Path:
    """The task of :func:`choice_task` with something else in its file."""
    tasks = choice_task(folder)
    path = tasks / "tiny_sums.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return tasks


@pytest.mark.second
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("doc_to_text: '{{q}}'", "doc_to_text: '{{ 1 / 0 }}'"),
        ("doc_to_text: '{{q}}'", "doc_to_text: '{% for %}'"),
        ("test_split: test", "test_split: none"),
        ("dataset_path: json", "dataset_path: 7"),
        ("sums.jsonl", "none.jsonl"),
        ("output_type: multiple_choice", "output_type: nonsense"),
        ("metadata:", "include: none.yaml\nmetadata:"),
        ("metadata:", "{\nmetadata:"),
    ],
)
def test_broken_tasks_end_in_one_line(old: str, new: str, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    tasks = broken_task(tmp_path, old, new)
    with pytest.raises((DataError, ConfigError)) as caught:
        evaluate_tasks(tiny_llama(), TOKENIZER, ["tiny_sums"], include_path=tasks)
    assert "tiny_sums" in str(caught.value) or str(tasks) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_what_the_model_and_pyprune_raise_in_a_task_stays_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    tasks = choice_task(tmp_path)
    for error in (RuntimeError("shapes"), EvaluationError("ours"), KeyboardInterrupt()):
        model = tiny_llama()

        def fail(*arguments: Any, error: BaseException = error, **options: Any) -> None:
            raise error

        model.model.register_forward_pre_hook(fail)
        with pytest.raises(type(error)) as caught:
            evaluate_tasks(model, TOKENIZER, ["tiny_sums"], include_path=tasks)
        assert caught.value is error


def test_numbers_far_out_of_range() -> None:
    ids = torch.zeros(400, dtype=torch.int64)
    expected = perplexity(WarmsUp(), ids, protocol="ppl-128").perplexity
    assert perplexity(WarmsUp(), ids, protocol="ppl-128", batch_size=10**30).perplexity == expected
    assert perplexity(WarmsUp(), ids, protocol="ppl-128", max_tokens=10**30).perplexity == expected
    with pytest.raises(DataError, match="less than one window of 1000000000000000000000000000000"):
        perplexity(WarmsUp(), ids, protocol="ppl-128", window=10**30)
    with pytest.raises(DataError, match="token id -1; ids start at 0"):
        perplexity(tiny_llama(), ids - 1, protocol="ppl-128")
