"""Perplexity through a real llama.cpp: that of Transformers, within the rounding of the file's format."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pyprune.checkpoint.load import load_model
from pyprune.errors import CheckpointError, ConfigError, DataError
from pyprune.quality.perplexity import EvaluationError, EvaluationText, evaluate_perplexity, perplexity
from pyprune.serving.gguf import perplexity as gguf_measure
from pyprune.serving.gguf.blocks import FORMATS, NARROW
from pyprune.serving.gguf.perplexity import gguf_perplexity
from pyprune.serving.gguf.server import LlamaServer
from pyprune.serving.gguf.write import export_gguf
from tests._support.llama_cpp import Case, byte_level_tokenizer, identity
from tests.serving.gguf.test_gguf import BLOCKS, CASES, TABLE, continuation, no_attention, no_mlp, unequal

pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")

WINDOW = 24
EXACT: dict[str, Any] = {"float32": True, "threads": 1}


def text(tokens: int = 3 * WINDOW, last: int = 100, first: int = 0) -> EvaluationText:
    """Random token ids, with those of special tokens and of the tokens that no text has."""
    ids = torch.randint(first, last, (tokens,), generator=torch.Generator().manual_seed(5))
    return EvaluationText("random ids", ids, "")


def in_blocks(plan):  # type: ignore[no-untyped-def]
    """Other FFN widths in other layers, all in 32s."""
    return plan.with_layer(1, ffn=range(32)).with_layer(2, ffn=range(64))


@pytest.mark.parametrize(
    "name",
    ["equal", "cut alike", "unequal", "no attention", "no mlp", "biases", "biases, unequal", "qwen2, unequal",
     "qwen3, unequal", "granite", "phi", "gemma3"],
)  # fmt: skip
def test_in_float32_it_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    model, report = CASES[name].write(tmp_path)
    for protocol in ("ppl-2048", "ppl-128"):
        bos = 0 if name == "gemma3" else None  # which its family expects in every window
        wanted = perplexity(model, text().token_ids, protocol=protocol, window=WINDOW, bos=bos)
        found = gguf_perplexity(report.path, text(), protocol, window=WINDOW, **EXACT)
        assert (found.windows, found.tokens) == (wanted.windows, wanted.tokens) == (3, 3 * WINDOW)
        # The mean loss is off by less than the largest error of one log probability.
        assert abs(math.log(found.perplexity / wanted.perplexity)) < (TABLE if name in ("phi", "gemma3") else 1e-4)


def test_a_probability_of_nothing_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp tells it as the lowest number that float32 has."""
    _, report = CASES["equal"].write(tmp_path)
    lowest = torch.finfo(torch.float32).min
    monkeypatch.setattr(gguf_measure.WindowLosses, "log_probabilities", lambda *_: dict.fromkeys(range(100), lowest))
    with pytest.raises(EvaluationError, match="or a probability of 0"):
        gguf_perplexity(report.path, text(), "ppl-128", window=WINDOW, **EXACT)


CUTS = {"equal": identity, "unequal": unequal, "no attention": no_attention, "no mlp": no_mlp}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("quantise", "tolerance"), [("f16", 5e-3), ("bf16", 5e-2)])
def test_in_half_precision_it_is_off_by_the_rounding(quantise: str, tolerance: float, cut: str, tmp_path: Path) -> None:
    model, report = Case("llama", CUTS[cut], "").write(tmp_path, quantise)
    wanted = perplexity(model, text().token_ids, window=WINDOW).perplexity
    found = gguf_perplexity(report.path, text(), window=WINDOW, **EXACT).perplexity
    # A quarter of the largest error of one log probability (test_gguf.py): errors of many tokens cancel in part.
    assert 0 < abs(math.log(found / wanted)) < tolerance


@pytest.mark.parametrize("cut", [identity, in_blocks], ids=["equal", "unequal"])
def test_the_fewer_bits_the_further_off(cut, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model, _ = Case("llama", cut, "", values=BLOCKS).write(tmp_path)
    wanted = perplexity(model, text().token_ids, window=WINDOW).perplexity
    error = {}
    for kind in (kind for kind in FORMATS if kind not in NARROW):
        path = export_gguf(tmp_path / "model", tmp_path / f"{kind}.gguf", quantise=kind).path
        found = gguf_perplexity(path, text(), window=WINDOW, **EXACT).perplexity
        error[kind] = abs(math.log(found / wanted))
    assert error["f32"] < 1e-5
    assert error["f16"] < 1e-3
    assert max(error["bf16"], error["q8_0"]) < 1e-2
    assert max(error.values()) < 0.15
    assert min(error["q4_0"], error["q4_1"]) > error["q8_0"]


def test_a_text_is_tokenised_by_the_file(tmp_path: Path) -> None:
    """Of characters whose bytes are tokens each, which llama.cpp leaves out of its answers, too."""
    from tests._support.llama_cpp import sentencepiece_tokenizer

    case = Case("llama", identity, "llama", values={"vocab_size": 300})
    tokenizer = sentencepiece_tokenizer()
    _, report = case.write(tmp_path, tokenizer=tokenizer)
    (tmp_path / "test.txt").write_text("the caf\u00e9 and \u732b ran on \U0001f980 " * 8, encoding="utf-8")
    source = str(tmp_path / "test.txt")
    reloaded, own = load_model(tmp_path / "model")
    wanted = evaluate_perplexity(reloaded, own, source, "ppl-128", window=WINDOW)
    found = gguf_perplexity(report.path, source, "ppl-128", window=WINDOW, **EXACT)
    assert (found.windows, found.source, found.text_sha256) == (wanted.windows, wanted.source, wanted.text_sha256)
    assert found.perplexity == pytest.approx(wanted.perplexity, rel=1e-5)


def test_windows_are_the_same_whether_computed_at_once_or_not(tmp_path: Path) -> None:
    _, report = CASES["equal"].write(tmp_path)
    one, four = (gguf_perplexity(report.path, text(7 * WINDOW), window=WINDOW, slots=n, **EXACT) for n in (1, 4))
    assert one.windows == four.windows == 7
    assert one.perplexity == pytest.approx(four.perplexity, rel=1e-6)


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    _, report = CASES["equal"].write(tmp_path)
    with pytest.raises(DataError, match="reads at most 512"):
        gguf_perplexity(report.path, text())
    with pytest.raises(DataError, match="less than one window"):
        gguf_perplexity(report.path, text(10), window=WINDOW)
    with pytest.raises(DataError, match="outside of the 160"):
        gguf_perplexity(report.path, text(last=400), window=WINDOW)
    with pytest.raises(ConfigError, match="Unknown perplexity protocol"):
        gguf_perplexity(report.path, text(), "ppl-64")
    report.path.write_bytes(report.path.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match="could not be read as GGUF"):
        gguf_perplexity(report.path, text(), window=WINDOW)


SERVER = """
import sys
from pyprune.serving.gguf.server import LlamaServer
server = LlamaServer(sys.argv[1], slots=2, context=64, float32=True, threads=1)
for line in sys.stdin:
    print(server.generate([[5, 6, 7], [9]], 12), flush=True)
"""


def test_a_killed_server_leaves_a_file_that_loads_again(tmp_path: Path) -> None:
    model, report = CASES["unequal"].write(tmp_path)
    before = report.path.read_bytes()
    answers = []
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", SERVER, str(report.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write("go\n")
            server.stdin.flush()
            answers.append(server.stdout.readline())
            server.stdin.write("go\n")  # the second request is killed at work
            server.stdin.flush()
            os.kill(server.pid, signal.SIGKILL)
            assert server.wait() == -signal.SIGKILL
    assert report.path.read_bytes() == before
    assert answers[0] == answers[1]
    with LlamaServer(report.path, slots=2, context=64, **EXACT) as again:
        tokens = again.generate([[5, 6, 7], [9]], 12)
    assert str(tokens) == answers[0].strip()
    ends = byte_level_tokenizer().convert_tokens_to_ids(["</s>"])
    assert tokens[0] == continuation(model, [5, 6, 7], 12, ends)
