"""Measuring with the Transformers engine on tiny checkpoints, and how engines fail."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pyprune.checkpoint.save import save_checkpoint
from pyprune.errors import CheckpointError, ConfigError, MissingDependencyError
from pyprune.families import count_parameters
from pyprune.serving import engines
from pyprune.serving.checkpoints import read_checkpoint
from pyprune.serving.comparison import ratio_interval
from pyprune.serving.engines import (
    Engine,
    EngineError,
    choose_engine,
    group_cpu_seconds,
)
from pyprune.serving.speed.measure import fits_in_memory, measure, workload_of
from pyprune.serving.speed.results import SpeedReport, Workload
from pyprune.serving.speed.table import conditions, speed_table
from pyprune.serving.speed.worker import VllmRunner
from tests._support.models import tiny_model
from tests._support.process_groups import MEMORY_KINDS, group_memory, group_processes, group_resident_bytes

SIZES = {"batch_size": 3, "new_tokens": 4, "prompt_tokens": 20, "repeats": 2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    tiny_model("llama-head-dim").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def measured(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[SpeedReport, Path]:
    jsonl = tmp_path_factory.mktemp("samples") / "samples.jsonl"
    models = {"dense": checkpoint, "pruned": checkpoint}
    report = measure(models, engine="transformers", dtype="float32", jsonl=jsonl, **SIZES)  # type: ignore[arg-type]
    return report, jsonl


def test_every_sample_is_kept_and_turns_alternate(measured: tuple[SpeedReport, Path]) -> None:
    report, _ = measured
    turns = [(s.column, s.repeat, s.model) for s in report.samples]
    assert turns == [(c, r, m) for c in ("generation", "prompt") for r in (0, 1) for m in ("dense", "pruned")]
    assert [s.order for s in report.samples] == list(range(8))
    assert all(s.seconds > 0 for s in report.samples)
    assert {s.tokens for s in report.samples if s.column == "generation"} == {3 * 4}
    assert {s.tokens for s in report.samples if s.column == "prompt"} == {20}
    assert report.engine == "transformers"


def test_the_usual_prompt_is_as_long_as_the_models_read(checkpoint: Path) -> None:
    assert workload_of({"dense": checkpoint}, engine="transformers").prompt_tokens == 511, "one token is generated"
    assert workload_of({"dense": checkpoint}, engine="transformers", prompt_tokens=20).prompt_tokens == 20
    with pytest.raises(ConfigError, match="dense reads at most 512 tokens, the workload needs 513"):
        workload_of({"dense": checkpoint}, engine="transformers", prompt_tokens=512)


@pytest.mark.second
def test_samples_are_appended_with_their_conditions(measured: tuple[SpeedReport, Path]) -> None:
    report, jsonl = measured
    records = [json.loads(line) for line in jsonl.read_text().splitlines()]
    assert [r["seconds"] for r in records] == [s.seconds for s in report.samples]
    assert {r["engine"] for r in records} == {"transformers"}
    assert len({r["run"] for r in records}) == 1
    for record in records:
        assert record["environment"]["versions"]["torch"]
        assert record["environment"]["cpu"]
        assert record["workload"]["batch_size"] == 3
        assert record["checkpoint"]["architecture"] == "LlamaForCausalLM"


class PacedEngine:
    """Stands in for an engine: the second that is started takes half the time, and its prompts now more, now less."""

    started = 0
    device: str | None = None
    build: str | None = None
    load_seconds = 1.0

    def __init__(self, *_: object) -> None:
        self.pruned = PacedEngine.started % 2 == 1
        PacedEngine.started += 1
        self.prompts = 0

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[float, int]:
        self.prompts += new_tokens == 1
        noise = 1.2 if new_tokens == 1 and self.prompts % 2 else 1.0
        return (0.5 * noise if self.pruned else 1.0), len(prompts) * new_tokens

    def cpu_seconds(self) -> float:
        return 0.0

    def peak_memory_bytes(self) -> int:
        return 1

    def ask_to_end(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PacedEngine, "started", 0)
    monkeypatch.setattr("pyprune.serving.speed.measure.Engine", PacedEngine)
    monkeypatch.setattr("pyprune.serving.speed.measure.available_memory", lambda: 2**60)


@pytest.mark.usefixtures("paced")
def test_turns_go_on_until_the_interval_is_narrow_or_the_most_is_reached(checkpoint: Path) -> None:
    models = {"dense": checkpoint, "pruned": checkpoint}
    options: dict[str, Any] = {**SIZES, "engine": "transformers", "precision": 0.02}
    report = measure(models, **options, max_repeats=5)
    assert [report.tokens_per_second(name).count for name in models] == [2, 2], "no spread: the least is enough"
    assert [report.latency_ms(name).count for name in models] == [5, 5]
    assert [s.repeat for s in report.samples if s.model == "dense"] == [0, 1, 0, 1, 2, 3, 4]
    text = conditions(report)
    assert "median ± MAD of 2 and 5 interleaved repeats" in text
    assert "TI of pruned 2.000 to 2.000 (0.0% wide)" in text
    assert "Wider than the 2 % that were asked for, with at most 5 turns each: Speedup of pruned. Allow more" in text
    assert not {"precision", "max_repeats"} & set(speed_table(report).columns)
    found = report.to_dict()["summary"]["pruned"]["intervals"]
    assert found["generation"] == pytest.approx({"low": 2.0, "high": 2.0, "count": 2})
    assert found["prompt"]["low"] < 1 / 0.6 < 2 < found["prompt"]["high"]
    assert len(measure(models, **options).samples) == 2 * (2 + 10), "ten turns unless another most is given"


@pytest.mark.usefixtures("paced")
def test_enough_precision_is_said_and_none_is_needed_for_one_model(checkpoint: Path) -> None:
    options: dict[str, Any] = {**SIZES, "engine": "transformers"}
    report = measure({"dense": checkpoint, "pruned": checkpoint}, **options, precision=0.9)
    assert len(report.samples) == 2 * (2 + 3), "three turns of the prompt are within 90 %"
    assert "None is wider than 90 % of its ratio, as was asked." in conditions(report)
    alone = measure({"dense": checkpoint}, **options, precision=0.02)
    assert len(alone.samples) == 2 * 2
    assert "interval" not in conditions(alone)
    assert "interval" not in conditions(measure({"a": checkpoint, "b": checkpoint}, **options))


def test_the_interval_of_known_ratios() -> None:
    found = ratio_interval([1.0, 1.1, 1.21])
    assert found is not None
    assert (found.low, found.high, found.count) == pytest.approx((0.868095, 1.393857, 3), rel=1e-5)
    assert found.width == pytest.approx((1.393857 - 0.868095) / 1.1, rel=1e-5)
    assert ratio_interval([1.0]) is None


def test_sizes_come_from_the_file(checkpoint: Path) -> None:
    found = read_checkpoint(checkpoint)
    assert found.parameters == count_parameters(tiny_model("llama-head-dim"))
    assert found.bytes == (checkpoint / "model.safetensors").stat().st_size
    assert found.vocab_size == 384


def test_weights_are_counted_once(checkpoint: Path, tmp_path: Path) -> None:
    """Hub repositories of Mistral carry a second copy in another layout; some files repeat a tied head."""
    model = tiny_model("llama-head-dim")
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    shutil.copy(checkpoint / "model.safetensors", tmp_path / "consolidated.safetensors")
    assert read_checkpoint(tmp_path).parameters == count_parameters(model)
    save_file({k: v.clone() for k, v in model.state_dict().items()}, tmp_path / "model.safetensors")
    assert read_checkpoint(tmp_path).parameters == count_parameters(model)


def test_every_shard_must_be_there(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert read_checkpoint(tmp_path).parameters == count_parameters(model)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=f"lacks {shards[1].name}"):
        read_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="is damaged"):
        read_checkpoint(tmp_path)


def test_truncated_weights_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        measure({"broken": broken}, engine="transformers")


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x04\0\0\0\0\0\0\0oops"])
def test_damaged_weights_are_refused(checkpoint: Path, tmp_path: Path, content: bytes) -> None:
    shutil.copy(checkpoint / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="safetensors"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("rotary", "tokens"),
    [
        ({}, 64),
        ({"rope_type": "linear", "factor": 4.0}, 256),
        ({"type": "dynamic", "factor": 1.5}, 96),
        ({"rope_type": "yarn", "factor": 4.0}, 64),
        ({"rope_type": "linear", "factor": float("inf")}, 64),
        ({"rope_type": "linear", "factor": -2}, 64),
        ("linear", 64),
    ],
)
def test_scaled_positions_can_be_measured(checkpoint: Path, tmp_path: Path, rotary: Any, tokens: int) -> None:
    """As long a prompt as vLLM reads; it says itself what is wrong with others."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"max_position_embeddings": 64, "rope_parameters": None, "rope_scaling": rotary}
    (folder / "config.json").write_text(json.dumps(config))
    assert read_checkpoint(folder, verify=False).max_length == tokens
    usual = {"engine": "transformers", "batch_size": 1, "new_tokens": 1}
    assert workload_of({"a": folder}, prompt_tokens=tokens - 1, **usual).prompt_tokens == tokens - 1
    with pytest.raises(ConfigError, match=f"reads at most {tokens} tokens"):
        workload_of({"a": folder}, prompt_tokens=tokens, **usual)


def test_other_weights_beside_a_record_are_not_timed(tmp_path: Path) -> None:
    model = tiny_model()
    folder = save_checkpoint(model, None, tmp_path / "c", plan=None, provenance={})
    save_file({k: v * 2 for k, v in model.state_dict().items()}, folder / "zz.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"zz\.safetensors"):
        measure({"stray": folder}, engine="transformers", dtype="float32", **SIZES)


def test_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="There is no folder"):
        read_checkpoint(tmp_path / "absent")
    (tmp_path / "config.json").write_text('{"vocab_size": 3}')
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        read_checkpoint(tmp_path)


def test_workload_longer_than_the_model(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="at most 512 tokens"):
        measure({"tiny": checkpoint}, engine="transformers", prompt_tokens=2048)


@pytest.mark.second
def test_engine_failure_shows_the_end_of_its_log(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "nosuch"}))
    with pytest.raises(EngineError, match="nosuch") as caught:
        Engine("transformers", {"model": str(tmp_path), "dtype": "float32"})
    assert "Its last log lines" in str(caught.value)
    assert "Traceback" in str(caught.value) or "raise" in str(caught.value)


def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    real = engines.importlib.util.find_spec
    monkeypatch.setattr(
        engines.importlib.util, "find_spec", lambda name, *a: None if name == "vllm" else real(name, *a)
    )


def test_vllm_on_a_cpu_runs_in_the_process_that_was_started_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def llm(**options: Any) -> None:
        seen.update(options, processes=os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING"))

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=llm))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = dict.fromkeys(("model", "dtype", "seed", "kv_cache_bytes")) | {"max_length": 99, "max_sequences": 4}
    for before, expected in (("1", "1"), (None, "0")):  # what somebody set stays
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", before or "")
        if before is None:
            monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
        VllmRunner(options)
        assert seen["processes"] == expected
        assert seen["enforce_eager"]
        assert seen["max_num_batched_tokens"] == 99


def test_vllm_by_name_needs_vllm(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    _without_vllm(monkeypatch)
    with pytest.raises(MissingDependencyError, match=r"pip install 'pyprune\[vllm\]'"):
        measure({"tiny": checkpoint}, engine="vllm")


def test_auto_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_vllm(monkeypatch)
    name, note = choose_engine("auto")
    assert name == "transformers"
    assert note is not None
    assert "vLLM is not installed" in note
    assert choose_engine("transformers") == ("transformers", None)


def test_unknown_engine() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'vllm'"):
        choose_engine("vlm")


def test_on_a_gpu_engines_do_not_share_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two vLLM engines would find no memory; llama.cpp runs on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not fits_in_memory("vllm", [], Workload())
    assert fits_in_memory("llamacpp", [], Workload())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_of_any_name_stops_no_measurement(tmp_path: Path) -> None:
    """The kernel cuts names at 15 bytes, here inside a character."""
    program = tmp_path / "aaaaaaaaaaaaaaé"
    program.write_text(f"#!{sys.executable}\nimport time\nprint(flush=True)\ntime.sleep(60)\n")
    program.chmod(0o755)
    with subprocess.Popen([program], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            assert Path(f"/proc/{process.pid}/comm").read_bytes() == b"aaaaaaaaaaaaaa\xc3\n"
            assert group_resident_bytes(process.pid) > 0
            [(_, kinds)] = group_memory(process.pid).items()
            assert set(kinds) == set(MEMORY_KINDS.values())
            assert sum(kinds.values()) == group_resident_bytes(process.pid)
            assert list(group_processes(process.pid)) == [process.pid]
            assert group_cpu_seconds(os.getpgid(0)) > 0
        finally:
            process.kill()


@pytest.mark.second
def test_a_model_that_no_engine_would_build_is_not_timed(checkpoint: Path, tmp_path: Path) -> None:
    """Engines pass over sizes per layer of a stock architecture, and make up weights that are not in the files."""
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"per_layer_config": {"1": {"skip": ["mlp"]}}}))
    with pytest.raises(CheckpointError, match="sizes per layer that no stock architecture reads"):
        workload_of({"other": other}, engine="transformers", **SIZES)  # type: ignore[arg-type]
    part = Path(shutil.copytree(checkpoint, tmp_path / "part"))
    tensors = load_file(part / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, part / "model.safetensors", {"format": "pt"})
    with pytest.raises(EngineError, match=r"missing keys: model\.layers\.1\.mlp\.up_proj\.weight"):
        measure({"part": part}, engine="transformers", dtype="float32", **SIZES)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [["mlp"], {"1": None}])
def test_sizes_per_layer_of_another_shape_are_damage(checkpoint: Path, tmp_path: Path, value: Any) -> None:
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"per_layer_config": value}))
    with pytest.raises(CheckpointError, match="its per_layer_config is no mapping from layers"):
        read_checkpoint(other)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"num_attention_heads": None}, "num_attention_heads of layer '0' is None"),
        ({"intermediate_size": "12"}, "intermediate_size of layer '0' is '12'"),
        ({"skip": None}, "skip of layer '0' is None"),
        ({"skip": "mlp"}, "skip of layer '0' is 'mlp'"),
    ],
)
def test_a_wrong_size_of_a_layer_is_damage(checkpoint: Path, tmp_path: Path, own: Any, said: str) -> None:
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"per_layer_config": {"0": own}}))
    with pytest.raises(CheckpointError, match=f"in its per_layer_config, {said}"):
        read_checkpoint(other)
