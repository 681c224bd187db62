"""serving_card.py: its models, ideals computed by hand, tables, and what is not measured twice."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench._card_plans import UNEQUAL, UNIFORM, card_plans
from bench._plans import SMOLLM2
from bench.serving import serving_card, serving_card_table
from bench.serving.serving_card import engine_figures
from bench.serving.serving_card_ideal import Ideal, Rates, Work, Workload, ideal, measure_rates, parameters, work
from bench.serving.serving_card_table import STARTED_NAMES, card
from pyprune.checkpoint.save import save_checkpoint
from pyprune.errors import ConfigError
from pyprune.families import family_for
from pyprune.fit.profiling import turns
from pyprune.fit.profiling.probes import dense_config, write_probe
from pyprune.fit.quantities import Quantity
from pyprune.plan import PrunePlan, Sizes
from pyprune.runtime.records import Json, RecordFile
from pyprune.serving.engines import EngineError
from tests._support.models import tiny_model
from tests._support.served import REAL_VLLM
from tests._support.tokenizer import tiny_tokenizer

TINY = Sizes.decoder(2, 4, 2, 1, 2, 6, 10)
WHOLE = [(2, 1, 6), (2, 1, 6)]
MACHINE = {"device": "a CPU", "cpus": 2, "isa": []}
RATES = {"flops": 100.0, "bytes": 100.0, "threads": 1}


def widths(plan: PrunePlan) -> list[tuple[int, int, int]]:
    return [layer.widths for layer in plan.layers]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaMA with three KV groups."""
    model = tiny_model(
        "llama", num_hidden_layers=5, hidden_size=96, num_attention_heads=6, num_key_value_heads=3, head_dim=32,
        intermediate_size=48, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("card") / "dense"
    return save_checkpoint(model, tiny_tokenizer(), folder, plan=None, provenance={"source": "tiny"})


def test_the_models_are_those_of_the_card() -> None:
    plans = card_plans(SMOLLM2)
    assert list(plans) == ["23 layers", "15 layers", UNIFORM, UNEQUAL]
    for plan in plans.values():
        plan.validate()
    assert set(widths(plans[UNIFORM])) == {(6, 2, 1216)}
    unequal = widths(plans[UNEQUAL])
    assert len(set(unequal)) > 5
    assert {(q, kv) for q, kv, _ in unequal} == {(9, 3), (6, 2), (3, 1)}
    assert all(ffn % 64 == 0 for _, _, ffn in unequal)
    whole, uniform, other = (parameters(SMOLLM2.dense, widths(p)) for p in (SMOLLM2, plans[UNIFORM], plans[UNEQUAL]))
    assert whole == 134_515_008, "SmolLM2-135M"
    assert 0.18 < 1 - uniform / whole < 0.2
    assert other == pytest.approx(uniform, rel=0.005)


def test_equal_parameters_of_models_as_they_are_written(dense: Path, tmp_path: Path) -> None:
    """Five layers: the last one has no neighbour."""
    from safetensors.torch import load_file

    config = dense_config(dense)
    plan = family_for(config).plan(config)
    plans, stored = card_plans(plan), {}
    for name, cut in plans.items():
        folder = write_probe(config, cut, tmp_path / name, "bfloat16")
        stored[name] = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert stored[UNEQUAL] == pytest.approx(stored[UNIFORM], rel=0.005)
    assert len(set(widths(plans[UNEQUAL]))) > 2
    assert stored == {name: parameters(plan.dense, widths(cut)) for name, cut in plans.items()}


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (Workload(3), Work(layer_flops=1632, fixed_flops=80, layer_bytes=528, fixed_bytes=224)),
        (Workload(2, 3, 2), Work(layer_flops=4480, fixed_flops=480, layer_bytes=1728, fixed_bytes=1024)),
    ],
)
def test_work_as_computed_by_hand(load: Workload, expected: Work) -> None:
    """120 weights a layer, 40 in the head; 3 tokens make 6 pairs to attend to, 4 make 10."""
    assert work(TINY, WHOLE, load) == expected


def test_what_binds_depends_on_the_machine() -> None:
    whole, half = (work(TINY, layers, Workload(3)) for layers in (WHOLE, WHOLE[:1]))
    by_flops = ideal(whole, half, Rates(flops=1, bytes=1000))
    assert by_flops == Ideal(1712 / 896, 752 / 488, "FLOPs", pytest.approx(80 / 1712))
    assert by_flops.ratio == 1712 / 896
    by_bytes = ideal(whole, half, Rates(flops=1000, bytes=1))
    assert (by_bytes.binds, by_bytes.ratio, by_bytes.left) == ("bytes", 752 / 488, pytest.approx(224 / 752))


def test_small_models_and_other_families_are_refused() -> None:
    with pytest.raises(ConfigError, match="has 2 layers and 6 FFN channels"):
        card_plans(PrunePlan.identity("llama", TINY))
    with pytest.raises(ConfigError, match="is a opt; ideals are computed for llama"):
        card_plans(PrunePlan.identity("opt", SMOLLM2.dense))


def test_rates_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr("bench.serving.serving_card_ideal.RATE_BYTES", 2**16)
    before = torch.get_num_threads()
    found = measure_rates(PrunePlan.identity("llama", TINY))
    assert found["flops"] > 0
    assert found["bytes"] > 0
    assert found["threads"] >= 1
    assert torch.get_num_threads() == before


SECONDS = {"dense": [2.0, 2.0, 2.0], "1 layers": [1.1, 1.1], UNIFORM: [1.0, 1.0], UNEQUAL: [1.02, 1.02]}


@pytest.fixture(autouse=True)
def one_of_two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny records have a model of two layers, and smaller ones of one."""
    whole = serving_card_table.layers_of

    def layers_of(row: Json, name: str) -> Any:
        tiny = row["model"] == "tiny"
        return (WHOLE if name == "dense" else WHOLE[:1]) if tiny else whole(row, name)

    monkeypatch.setattr(serving_card_table, "layers_of", layers_of)


def record(seconds: dict[str, list[float]] | None = None, **values: Any) -> Json:
    """One of the tiny sizes: dense, one layer of two, uniform and unequal."""
    names = ("dense", "1 layers", UNIFORM, UNEQUAL)
    return {
        "kind": "engine", "key": "a", "model": "tiny", "mode": "eager", "quantity": "prefill@3",
        "kind_of_work": "prefill", "tokens": 3, "batch": 1, "names": names,
        "sizes": TINY.to_dict(), "environment": MACHINE, **engine_figures(seconds or SECONDS, resident=True), **values,
    }  # fmt: skip


def records_of(*found: Json) -> RecordFile:
    file = RecordFile(None)
    file.add({"kind": "machine", "key": "m", **RATES, "environment": MACHINE})
    for one in found:
        file.add(one)
    return file


def test_a_turn_is_compared_with_the_dense_turns_around_it() -> None:
    """A machine that slows down from turn to turn favours neither."""
    drifting = engine_figures({"dense": [1.0, 4.0, 16.0], "1 layers": [2.0, 8.0]}, resident=True)
    assert drifting["figures"]["1 layers"] == {"seconds": 5.0, "turns": 2, "ratio": 1.0, "interval": {
        "low": 1.0, "high": 1.0, "count": 2
    }}  # fmt: skip


def test_the_table_of_engines() -> None:
    printed = card(records_of(record()))
    (row,) = [line for line in printed.splitlines() if line.startswith("| prefill@3 | 1 layers |")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2:6] == ["1.100", "1.818x (1.818 to 1.818)", "1.911x", "1.541x"]
    assert cells[6:] == ["FLOPs", "95.2%", "4.7%"]
    assert f"prefill@3, {UNEQUAL}: 1.020 times (1.020 to 1.020) the seconds of {UNIFORM}" in printed
    capacity = next(line for line in printed.splitlines() if line.startswith("| dense |"))
    assert "| 16 | 32768.00 |" in capacity, "two layers with one KV head of two channels: 16 bytes a token"


def test_one_turn_has_no_interval() -> None:
    slow = record({"dense": [2.0, 2.0], "1 layers": [1.9], UNIFORM: [1.0], UNEQUAL: [1.04]})
    assert "1.053x |" in card(records_of(slow))


def test_machines_are_told_apart_and_judged_by_their_own_rates() -> None:
    file = records_of(record())
    other = {"device": "another CPU", "cpus": 8, "isa": []}
    fast = {"flops": 1000.0, "bytes": 1.0, "threads": 8}
    file.add({"kind": "machine", "key": "n", **fast, "environment": other})
    file.add(record(key="b", environment=other))
    first, second = card(file).split("another CPU (8 CPUs)")
    assert "a CPU (2 CPUs)" in first
    assert "| FLOPs | 95.2% |" in first
    assert "| bytes |" in second
    assert "| FLOPs |" not in second


def test_nothing_recorded() -> None:
    assert card(RecordFile(None)).startswith("Nothing is recorded yet")


class _Engine:
    """Takes longer for prompts of more tokens; counts how often it was started."""

    device = None
    options: list[dict[str, Any]]

    def __init__(self, engine: str, options: dict[str, Any]) -> None:
        _Engine.options.append(options)
        self.seconds = 0.4 if Path(options["model"]).name == "dense" else 0.2

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, int]:
        return self.seconds * len(prompts), len(prompts) * new_tokens

    def close(self) -> None:
        pass


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins of engines, none of which has been started, on a machine whose rates are soon measured."""
    _Engine.options = []
    monkeypatch.setattr(turns, "Engine", _Engine)
    monkeypatch.setattr("pyprune.serving.engines.SETTLE_S", 0.0)
    monkeypatch.setattr("bench.serving.serving_card_ideal.RATE_BYTES", 2**16)
    monkeypatch.setattr(serving_card, "GENERATION", Quantity("generation", 5, 2))


@pytest.mark.usefixtures("engines")
def test_engines_are_timed_once_for_each_mode(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(turns, "QUICK_S", 0.0)
    rows = tmp_path / "rows.jsonl"
    given = ["--model", str(dense), "--part", "engine", "--prompts", "24,100", "--repeats", "2"]
    given += ["--load-prompt", "8", "--load-new-tokens", "8", "--jsonl", str(rows)]
    assert serving_card.main([*given, "--mode", "eager"]) == 0
    assert [o["eager"] for o in _Engine.options] == [True] * 5
    assert {o["max_length"] for o in _Engine.options} == {101}
    found = RecordFile(rows).of("engine")
    assert [row["quantity"] for row in found.values()] == ["prefill@24", "prefill@100", "generation@2x5"]
    for row in found.values():
        assert [row["figures"][name]["turns"] for name in row["names"]] == [3, 2, 2, 2, 2]
        assert row["environment"]["cpus"] >= 1
    assert "| 2.000x (2.000 to 2.000) |" in capsys.readouterr().out
    assert serving_card.main([*given, "--mode", "compiled,eager"]) == 0
    assert [o["eager"] for o in _Engine.options] == [True] * 5 + [False] * 5, "eager was recorded"
    assert serving_card.main([*given, "--mode", "compiled,eager"]) == 0
    assert len(_Engine.options) == 10
    now = serving_card.serving_environment()
    later = {**now, "versions": {"vllm": "99.0"}}
    monkeypatch.setattr(serving_card, "serving_environment", lambda: later)
    capsys.readouterr()
    assert serving_card.main([*given, "--mode", "eager"]) == 0
    assert len(_Engine.options) == 15, "what an earlier release did is measured again"
    printed = capsys.readouterr().out
    assert printed.count(", engine, eager") == 2, "in a table of its own"
    assert "vLLM 99.0, bfloat16" in printed


@pytest.mark.usefixtures("engines")
def test_fewer_engines_at_once(dense: Path, tmp_path: Path) -> None:
    given = ["--model", str(dense), "--part", "engine", "--mode", "eager", "--prompts", "24"]
    given += ["--repeats", "1", "--resident", "3", "--jsonl", str(tmp_path / "rows.jsonl")]
    assert serving_card.main(given) == 0
    found = list(RecordFile(tmp_path / "rows.jsonl").of("engine").values())
    assert len(_Engine.options) == 2 * 3, "the dense model beside each pair"
    assert [row["names"] for row in found[::2]] == [
        ["dense", "4 layers", "3 layers"],
        ["dense", UNIFORM, UNEQUAL],
    ]


@pytest.mark.usefixtures("engines")
def test_some_of_the_models_and_generation_alone(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", str(dense), "--part", "engine", "--mode", "eager", "--prompts", "none"]
    given += ["--repeats", "1", "--jsonl", str(tmp_path / "rows.jsonl")]
    assert serving_card.main([*given, "--models", f"{UNEQUAL},{UNIFORM}"]) == 0
    (row,) = RecordFile(tmp_path / "rows.jsonl").of("engine").values()
    assert (row["quantity"], row["names"]) == ("generation@2x5", ["dense", UNIFORM, UNEQUAL])
    assert len(_Engine.options) == 3
    assert f"the seconds of {UNIFORM} of as many parameters" in capsys.readouterr().out
    assert serving_card.main([*given, "--models", "uniform"]) == 2
    error = capsys.readouterr().err
    assert "--models" in error
    assert UNIFORM in error


def test_one_engine_after_another_on_a_gpu(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    up: list[_Engine] = []

    class _Counted(_Engine):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            up.append(self)
            assert len(up) == 1, "another engine has the memory"

        def close(self) -> None:
            up.remove(self)

    _Engine.options = []
    monkeypatch.setattr(turns, "Engine", _Counted)
    monkeypatch.setattr(serving_card, "fills_gpu", lambda engine: engine == "vllm")
    monkeypatch.setattr(serving_card, "GENERATION", Quantity("generation", 5, 1))
    monkeypatch.setattr(turns, "QUICK_S", 0.3)  # the dense model is slower, and so has fewer turns
    monkeypatch.setattr("bench.serving.serving_card_ideal.RATE_BYTES", 2**16)
    given = ["--model", str(dense), "--part", "engine", "--mode", "eager", "--prompts", "24,40"]
    assert serving_card.main([*given, "--repeats", "2", "--jsonl", str(tmp_path / "rows.jsonl")]) == 0
    assert len(_Engine.options) == 5
    found = list(RecordFile(tmp_path / "rows.jsonl").of("engine").values())
    assert [row["quantity"] for row in found] == ["prefill@24", "prefill@40", "generation@1x5"]
    for row in found:
        assert [row["figures"][name]["turns"] for name in row["names"]] == [2, 6, 6, 6, 6]
    printed = capsys.readouterr().out
    assert "| 2.000x |" in printed
    assert f"{UNEQUAL}: 1.000 times the seconds of" in printed


def summaries(rate: float, ratio: float) -> dict[str, Any]:
    times = {"p50": 20.0, "p90": 30.0, "p99": 40.0}
    interval = {"low": ratio - 0.01, "high": ratio + 0.01, "count": 3}
    own = {
        "tokens_per_second": {"median": rate},
        "ratio": ratio,
        "interval": interval,
        "ttft_ms": times,
        "tpot_ms": None,
        "itl_ms": None,
        "e2e_ms": {name: 100 * value for name, value in times.items()},
    }
    return {"2 at once": own}


def load_record(**values: Any) -> Json:
    found = {"dense": summaries(100.0, 1.0), "1 layers": summaries(150.0, 1.5)}
    capacity = {"sequences": 12.5, "context": 5}
    server = {"load_seconds": [9.0, 7.5, 8.0], "memory": 2_000_000_000, "capacity": capacity}
    own = {
        "concurrency": [2],
        "options": {"prompt_tokens": 2, "new_tokens": 3, "kv_gib": 1.5},
        "summary": found,
        "notes": [],
        "models": {"dense": server, "1 layers": {**server, "memory": None, "capacity": None}},
        "turns": [3, 3],
    }
    return record(kind="load", key="l", names=list(found), **own) | values


def test_the_table_of_servers() -> None:
    """The same work as of generation: 4,480 and 480 FLOPs, of which half of the layers' is left."""
    printed = card(records_of(load_record(notes=["Wider than asked.", "Distrust these figures."])))
    assert "turns of each model and load: 3. Wider than asked. Distrust these figures." in printed
    printed = card(records_of(load_record(notes=["Distrust these figures."])))
    assert "Prompts of 2 tokens, 3 new ones; turns of each model and load: 3. Distrust these figures." in printed
    row, times = [line for line in printed.splitlines() if line.startswith("| 2 at once | 1 layers |")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2:5] == ["150.0", "1.500x (1.490 to 1.510)", f"{4960 / 2720:.3f}x"]
    assert cells[6:] == ["FLOPs", f"{1.5 / (4960 / 2720):.1%}", f"{480 / 4960:.1%}"]
    assert times.endswith("| 20.0 / 30.0 / 40.0 | - | - | 2,000 / 3,000 / 4,000 |")


def test_the_table_of_starts() -> None:
    seconds = {"stock": [6.0, 5.0, 7.0], "pruned": [7.5, 6.0, 8.0]}
    kept = {"kind": "startup", "key": "s", "model": "tiny", "mode": "eager", "seconds": seconds,
            "more": {"pruned": [1.0, 1.0, 1.5], "unequal": [3.0, 3.0, 3.0]}, "environment": MACHINE}  # fmt: skip
    printed = card(records_of(kept))
    assert "| pruned architecture: 7.50 (6.00 to 8.00) | stock: 6.00 (5.00 to 7.00) |" in printed
    assert "| +1.00 (+1.00 to +1.50) |" in printed
    assert "pruned architecture" not in card(records_of(kept), ["engine"])
    both = seconds | {"uniform": [6.0, 5.0, 7.0], "unequal": [9.0, 8.0, 10.0]}
    printed = card(records_of({**kept, "seconds": both, "plugin": [0.5, 0.25, 0.75]}))
    assert f"| {UNEQUAL}: 9.00 (8.00 to 10.00) | {UNIFORM}: 6.00 (5.00 to 7.00) | +3.00 (+3.00 to +3.00) |" in printed
    assert "Transformers, tiny: 0.50 (0.25 to 0.75) s." in printed


def test_servers_are_started_in_turn(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    started: list[tuple[str, int, bool]] = []

    def healthy_at_once(command: list[str], model: str) -> Any:
        config = json.loads((Path(model) / "config.json").read_text())
        started.append((config["architectures"][0], config["num_hidden_layers"], "--enforce-eager" in command))
        return nullcontext(SimpleNamespace(load_seconds=1.0))

    monkeypatch.setattr("pyprune.serving.load.server.Server", healthy_at_once)
    monkeypatch.setattr(serving_card, "plugin_seconds", lambda: 0.5)
    monkeypatch.setattr("bench.serving.serving_card_ideal.RATE_BYTES", 2**16)
    given = ["--model", str(dense), "--part", "startup", "--starts", "2", "--jsonl", str(tmp_path / "rows.jsonl")]
    assert serving_card.main([*given, "--mode", "eager"]) == 0
    pairs = [("LlamaForCausalLM", 5, True), ("PrunedLlamaForCausalLM", 5, True)] * 2
    assert started == pairs * 3, "one does not count"
    (row,) = RecordFile(tmp_path / "rows.jsonl").of("startup").values()
    assert row["seconds"] == {name: [1.0, 1.0, 1.0] for name in STARTED_NAMES}
    assert (row["plugin"], row["starts"]) == ([0.5, 0.5, 0.5], 2)
    assert serving_card.main([*given, "--mode", "eager"]) == 0
    assert len(started) == 12, "it was recorded"


class TestPlugin:
    pytestmark = REAL_VLLM

    def test_its_seconds_are_read_from_a_process(self) -> None:
        assert serving_card.plugin_seconds() > 0

    def test_one_that_registers_nothing_has_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(serving_card, "PLUGIN", serving_card.PLUGIN.replace("\nregister()", ""))
        with pytest.raises(EngineError, match=r"not registered: .*PrunedLlamaForCausalLM"):
            serving_card.plugin_seconds()


def test_servers_under_load_are_measured_once(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def measure(models: dict[str, Path], options: Any) -> Any:
        asked.append((list(models), options))
        assert all((folder / "tokenizer_config.json").is_file() for folder in models.values())
        found = {name: summaries(100.0, 1.0) for name in models}
        paths = {name: {"path": str(folder)} for name, folder in models.items()}
        rest = {"options": {"prompt_tokens": 8, "new_tokens": 4, "kv_gib": 1}, "turns": [], "note": None}
        paths = {name: {"load_seconds": [], "memory": None, "capacity": None, **of} for name, of in paths.items()}
        rest["resident"] = True
        return SimpleNamespace(to_dict=lambda: {"summary": found, "models": paths, **rest})

    monkeypatch.setattr("pyprune.serving.load.run.measure_serving", measure)
    monkeypatch.setattr("pyprune.serving.load.table.load_notes", lambda report: ["The others wait."])
    monkeypatch.setattr("bench.serving.serving_card_ideal.RATE_BYTES", 2**16)
    given = ["--model", str(dense), "--part", "load", "--mode", "compiled", "--concurrency", "2", "--load-prompt", "8"]
    given += ["--load-new-tokens", "4", "--load-precision", "0.02", "--load-requests", "5"]
    given += ["--jsonl", str(tmp_path / "rows.jsonl")]
    assert serving_card.main(given) == 0
    assert serving_card.main(given) == 0
    ((names, options),) = asked
    assert names == ["dense", "4 layers", "3 layers", UNIFORM, UNEQUAL]
    assert (options.prompt_tokens, options.new_tokens, options.eager, options.dtype) == (8, 4, False, "bfloat16")
    assert (options.precision, options.requests) == (0.02, 5)
    assert [str(load) for load in options.loads] == ["2 at once"]
    (row,) = RecordFile(tmp_path / "rows.jsonl").of("load").values()
    assert str(tmp_path) not in json.dumps(row["models"])
    assert row["notes"] == ["The others wait."]
    assert (options.kv_gib, options.vllm_args) == (serving_card.LOAD_KV_GIB, ())
    assert serving_card.main([*given, "--models", UNIFORM]) == 0, "another run than that of all"
    assert asked[1][0] == ["dense", UNIFORM]


def test_the_cache_holds_every_sequence_under_load(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []

    def measure(models: dict[str, Path], options: Any) -> Any:
        found.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr("pyprune.serving.load.run.measure_serving", measure)
    monkeypatch.setattr("bench.serving.serving_card_ideal.RATE_BYTES", 2**16)
    given = ["--model", str(dense), "--part", "load", "--mode", "eager", "--concurrency", "10,1000"]
    given += ["--load-prompt", "2000", "--jsonl", str(tmp_path / "rows.jsonl")]
    assert serving_card.main(given) == 130
    (options,) = found
    token = 5 * 3 * 32 * 2 * 2  # layers, KV heads, channels of each, keys and values, bytes
    needed = 1000 * (2000 + 128) * token / 2**30
    assert needed < options.kv_gib < 1.2 * needed + 0.5
    assert options.kv_gib > serving_card.LOAD_KV_GIB
    assert options.vllm_args == ("--max-num-seqs", "1000"), "vLLM's own default is fewer"


def test_a_wrong_option_of_the_load_is_said_before_the_engines(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(turns, "Engine", lambda *_, **__: pytest.fail("an engine was started"))
    given = ["--model", str(dense), "--load-precision", "2", "--jsonl", str(tmp_path / "rows.jsonl")]
    assert serving_card.main(given) == 2
    assert "precision is 2; it must be at least 0 and below 1" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--resident", "1"], ["--repeats", "0"], ["--part", "all"]])
def test_wrong_options_are_refused(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        serving_card.main(given)
    assert stop.value.code == 2
    assert given[0] in capsys.readouterr().err
