"""`pyprune bench --serving` with real servers and vLLM's own client, on tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pyprune.checkpoint.save import save_checkpoint
from pyprune.serving.load.options import Load
from tests._support.cli import run
from tests._support.models import tiny_model
from tests._support.served import REAL_VLLM, SIZES, Case, everything, write_case
from tests._support.tokenizer import tiny_tokenizer

pytestmark = REAL_VLLM


def test_dense_and_pruned_servers_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other heads, KV heads and widths in every layer, and a first layer without attention.

    Servers take long to start: a number at once and a rate, which the command line keeps apart, are loads of one run.
    """
    loads = (Load(concurrency=2), Load(rate=50.0))
    monkeypatch.setattr("pyprune.serving.load.options.parse_loads", lambda *_: loads)
    save_checkpoint(tiny_model("llama", **SIZES), tiny_tokenizer(), tmp_path / "dense", plan=None, provenance={})
    write_case(Case("llama", everything, "PrunedLlamaForCausalLM"), tmp_path / "pruned")
    out, samples = tmp_path / "a.json", tmp_path / "a.jsonl"
    result = run(
        "bench", tmp_path / "pruned", "--against", tmp_path / "dense", "--serving", "--eager", "--dtype", "float32",
        "--requests", "4", "--prompt-tokens", "24", "--new-tokens", "5", "--kv-gib", "0.05",
        "--slo", "ttft:100s,tpot:100s", "--repeats", "1", "--precision", "0", "--json", out, "--jsonl", samples,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    data = json.loads(out.read_text())
    for name in ("dense", "pruned"):
        for load in ("2 at once", "50 requests/s"):
            found = data["summary"][name][load]
            for metric in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
                assert 0 < found[metric]["p50"] <= found[metric]["p90"] <= found[metric]["p99"], metric
        model = data["models"][name]
        assert model["capacity"]["confirmed"] is True, "the server's log says what config.json says"
        assert model["load_seconds"][0] > 0
        assert model["memory"] > 100 * model["bytes"], "a server is much larger than a tiny model"
        assert model["compile_seconds"] == []
        assert (model["compilation"], model["max_model_len"]) == ("NONE", 24 + 5 + 16), "in the server's log"
    sequences = {name: data["models"][name]["capacity"]["sequences"] for name in ("dense", "pruned")}
    assert sequences["pruned"] > 1.5 * sequences["dense"], "5 KV heads instead of 8"
    turns = [json.loads(line) for line in samples.read_text().splitlines()]
    assert {(turn["model"], turn["load"]) for turn in turns} == {
        (name, str(load)) for name in ("dense", "pruned") for load in loads
    }
    for turn in turns:
        assert turn["output_tokens"] == 4 * 5
        assert [request["tokens"] for request in turn["requests"]] == [5] * 4
        assert 4 * 24 <= turn["prompt_tokens"] <= 4 * (24 + 3), "as long as a text of that many tokens comes back"
        assert turn["goodput"] == pytest.approx(4 / turn["seconds"], rel=1e-3), "every request keeps these limits"
    for part in (
        "eager (--enforce-eager)",
        "45 tokens (--max-model-len)",
        "Sequences in 0.05 GiB",
        "TTFT p50/p90/p99 (ms)",
        "Goodput (requests/s)",
    ):
        assert part in result.stdout
