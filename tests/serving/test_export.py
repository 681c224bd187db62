"""Export: targets, dtype, provenance, warnings, and the command that serves."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pyprune.checkpoint.load import load_model
from pyprune.checkpoint.record import read_pruning_json
from pyprune.checkpoint.save import save_checkpoint
from pyprune.cut.compact import compact_
from pyprune.errors import CheckpointError, ConfigError, MissingDependencyError, OutputError
from pyprune.families import count_parameters, family_for
from pyprune.plan import PrunePlan
from pyprune.serving import engines
from pyprune.serving.checkpoints import read_checkpoint
from pyprune.serving.export import export
from pyprune.serving.vllm.command import serve, serve_command
from pyprune.serving.vllm.launch import VariantFinder
from pyprune.serving.vllm.limits import adapter_obstacle, serving_warnings
from pyprune.serving.vllm.options import given_options, hub_of
from pyprune.serving.vllm.plugin import look_for_platform
from tests._support.models import tiny_batch, tiny_model
from tests._support.products import without_instructions
from tests._support.quantised import in_32s, write_pair
from tests._support.served import edit_the_config
from tests._support.tokenizer import tiny_tokenizer


def _compacted(name: str, *, uniform: bool) -> tuple[Any, PrunePlan]:
    model = tiny_model(name)
    plan = family_for(model).plan(model.config)
    plan = plan.drop_layers([1]) if uniform else plan.with_layer(2, ffn=range(24))
    compact_(model, plan)
    return model, plan


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_folder_to_folder(tmp_path: Path, dtype: str | None) -> None:
    model, plan = _compacted("llama-head-dim", uniform=True)
    save_checkpoint(model, tiny_tokenizer(), tmp_path / "a", plan=plan, provenance={"method": "by hand"})
    report = export(tmp_path / "a", tmp_path / "b", dtype=dtype, provenance={"note": "exported"})
    assert (report.stock, report.architecture, report.reasons) == (True, "LlamaForCausalLM", ())
    assert report.parameters == count_parameters(model)
    record = read_pruning_json(tmp_path / "b", verify_files=True)
    assert record.plan == plan
    assert record.provenance["method"] == "by hand"
    assert record.provenance["note"] == "exported"
    again, tokenizer = load_model(tmp_path / "b")
    assert tokenizer is not None
    exact = dtype is None
    expected = [p if exact else p.to(torch.bfloat16).float() for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), expected, strict=True))


def test_bfloat16_source_stays_bfloat16(tmp_path: Path) -> None:
    model, plan = _compacted("llama-head-dim", uniform=True)
    export(model, tmp_path / "a", dtype="bfloat16", plan=plan)
    report = export(tmp_path / "a", tmp_path / "b")
    assert read_pruning_json(tmp_path / "b").provenance["dtype"] == "bfloat16"
    assert report.bytes == (tmp_path / "a" / "model.safetensors").stat().st_size


def test_figures_of_other_weights_are_not_carried_over(tmp_path: Path) -> None:
    model, plan = _compacted("llama-head-dim", uniform=True)
    measured = {"quality": {"ppl": 7.0}, "speed": {"TI": 1.5}}
    export(model, tmp_path / "a", plan=plan, provenance=measured)
    export(tmp_path / "a", tmp_path / "same", dtype="float32")
    assert read_pruning_json(tmp_path / "same").provenance["quality"] == {"ppl": 7.0}
    export(tmp_path / "a", tmp_path / "rounded", dtype="bfloat16")
    known = read_pruning_json(tmp_path / "rounded").provenance
    assert known["measured_before"] == measured
    assert not known.keys() & measured.keys()
    assert "7.0" not in (tmp_path / "rounded" / "README.md").read_text()


def test_stock_is_refused_with_the_reason(tmp_path: Path) -> None:
    model, plan = _compacted("llama-head-dim", uniform=False)
    with pytest.raises(ConfigError, match="widths differ between layers"):
        export(model, tmp_path / "out", target="stock", plan=plan)
    assert not (tmp_path / "out").exists()
    report = export(model, tmp_path / "out", plan=plan)
    assert report.architecture == "PrunedLlamaForCausalLM"
    assert not report.stock
    assert any("widths differ" in reason for reason in report.reasons)


@pytest.mark.parametrize("name", ["llama-head-dim", "qwen2", "qwen3", "mistral", "opt", "phi"])
def test_stock_model_as_the_pruned_architecture(tmp_path: Path, name: str) -> None:
    model, _ = _compacted(name, uniform=True)
    report = export(model, tmp_path / "out", target="pruned")
    assert report.architecture.startswith("Pruned")
    assert report.reasons == (), "one stock architecture would hold it"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = tiny_batch()
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match="a stock one holds its sizes: it was exported with target 'pruned'"):
        export(tmp_path / "out", tmp_path / "back", target="stock")


def test_existing_output_is_kept(tmp_path: Path) -> None:
    model, plan = _compacted("llama-head-dim", uniform=True)
    export(model, tmp_path / "out", plan=plan)
    with pytest.raises(OutputError, match="exists"):
        export(model, tmp_path / "out", plan=plan)
    export(model, tmp_path / "out", plan=plan, overwrite=True)


@pytest.mark.parametrize(("option", "value"), [("target", "stok"), ("dtype", "bfloat61")])
def test_unknown_options(tmp_path: Path, option: str, value: str) -> None:
    with pytest.raises(ConfigError, match="Did you mean"):
        export(tmp_path, tmp_path / "out", **{option: value})  # type: ignore[arg-type]


def test_warnings_name_what_a_server_refuses() -> None:
    good = {"architectures": ["LlamaForCausalLM"], "head_dim": 64, "hidden_size": 64, "num_attention_heads": 1}
    assert serving_warnings(good) == ()
    assert "head_dim is 8" in serving_warnings({**good, "head_dim": 8})[0]
    assert "head_dim is 16" in serving_warnings({**good, "head_dim": None, "num_attention_heads": 4})[0]
    for silent in ({"num_attention_heads": None}, {"num_attention_heads": 3, "kv_lora_rank": 8}):
        unsaid = serving_warnings({**good, "head_dim": None, **silent})
        assert not any("head_dim" in warning for warning in unsaid), "another architecture's heads"
    assert "PrunedNewForCausalLM" in serving_warnings({**good, "architectures": ["PrunedNewForCausalLM"]})[0]
    assert serving_warnings({**good, "architectures": ["PrunedOlmo2ForCausalLM"]}) == ()
    assert "hidden_size is 70" in serving_warnings({**good, "hidden_size": 70})[0]


@pytest.mark.parametrize(
    ("name", "stock"),
    [("phi", "PhiForCausalLM"), ("starcoder2-tied", "Starcoder2ForCausalLM"), ("olmo2", "Olmo2ForCausalLM")],
)
def test_int8_on_layers_of_transformers_is_warned_of_and_refused(
    name: str, stock: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM on a CPU would end at the first request; test_quantise_vllm.py serves the pruned architecture in int8."""
    pytest.importorskip("compressed_tensors")
    model, plan = _compacted(name, uniform=True)
    warnings = export(model, tmp_path / "stock", plan=plan, quantise="w8a8-int8").warnings
    assert [w for w in warnings if stock in w and w.endswith("Export with --target pruned.")] != []
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_installed", lambda: True)
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_version", lambda: "0.32.0+cpu")
    with pytest.raises(CheckpointError, match=f"cannot be served: vLLM runs {stock} through Transformers"):
        serve_command(tmp_path / "stock")
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_version", lambda: "0.32.0")
    assert serve_command(tmp_path / "stock"), "a GPU has another int8 product"
    plain = export(model, tmp_path / "plain", plan=plan).warnings
    own = export(model, tmp_path / "own", plan=plan, quantise="w8a8-int8", target="pruned").warnings
    assert not any("Transformers" in w for w in (*plain, *own))


def test_eight_bit_weights_alone_are_warned_of_and_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has no kernel for them on a CPU, and one for four bits."""
    pytest.importorskip("compressed_tensors")
    model, plan = _compacted("llama-head-dim", uniform=True)
    said = {name: export(model, tmp_path / name, plan=plan, quantise=name).warnings for name in ("w8a16", "w8a8-int8")}
    assert [w for w in said["w8a16"] if "no kernel for 8-bit weights" in w and "w8a8-int8 or w4a16" in w] != []
    assert not any("kernel" in w for w in said["w8a8-int8"])
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_installed", lambda: True)
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_version", lambda: "0.32.0+cpu")
    with pytest.raises(CheckpointError, match="cannot be served: vLLM's CPU backend has no kernel for 8-bit weights"):
        serve_command(tmp_path / "w8a16")
    assert serve_command(tmp_path / "w8a8-int8")
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_version", lambda: "0.32.0")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    assert serve_command(tmp_path / "w8a16"), "GPUs have one"


def test_adapters_on_int8_weights_are_refused_where_vllm_ends_at_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("compressed_tensors")
    model, plan = _compacted("llama-head-dim", uniform=True)
    export(model, tmp_path / "out", plan=plan, quantise="w8a8-int8")
    adapted = ["--enable-lora", "--lora-modules", "a=folder"]
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_installed", lambda: True)
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_version", lambda: "0.32.0+cpu")
    monkeypatch.setattr("pyprune.serving.vllm.limits.cpu_flags", lambda: frozenset({"avx512f"}))
    with pytest.raises(CheckpointError, match="int8 product on this CPU takes no adapters"):
        serve_command(tmp_path / "out", adapted)
    assert serve_command(tmp_path / "out")
    monkeypatch.setattr("pyprune.serving.vllm.limits.cpu_flags", lambda: frozenset({"avx512f", "amx_tile"}))
    with pytest.raises(CheckpointError, match="takes no adapters"):  # inputs in blocks of 32, or the same product
        serve_command(tmp_path / "out", adapted)
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96}
    config = {**sizes, "quantization_config": {"format": "int-quantized"}}
    assert [bool(adapter_obstacle(config, ranks)) for ranks in (1, 2)] == [False, True]
    assert not adapter_obstacle(config, 0), "no number of ranks, which vLLM refuses itself"
    assert adapter_obstacle({**config, "per_layer_config": {"1": {"intermediate_size": 90}}}, 1)
    export(model, tmp_path / "plain", plan=plan)
    assert serve_command(tmp_path / "plain", adapted)


def test_a_vocabulary_that_config_json_leaves_to_its_default_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of Gemma 3 with images, whose text_config names few sizes; prompts cannot be drawn then."""
    export(tiny_model("llama"), tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    del config["vocab_size"]
    path.write_text(json.dumps({**config, "text_config": {"hidden_size": config["hidden_size"]}}))
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_installed", lambda: True)
    assert serve_command(tmp_path / "out", verify=False)
    checkpoint = read_checkpoint(tmp_path / "out", verify=False)
    with pytest.raises(CheckpointError, match=r"config\.json does not say vocab_size\. Write it in"):
        assert checkpoint.vocab_size
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="it has no vocab_size"):
        serve_command(tmp_path / "out", verify=False)


@pytest.fixture
def with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that vLLM is installed."""
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_installed", lambda: True)


@pytest.mark.usefixtures("with_vllm")
def test_serve_hands_over_to_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, plan = _compacted("llama-head-dim", uniform=True)
    export(model, tmp_path / "out", plan=plan)
    seen: list[Any] = []
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(os, "execve", lambda *given: seen.append(given))
    serve(tmp_path / "out", ["--port", "9000"])
    [(program, command, environment)] = seen
    assert program == sys.executable
    assert command[1:] == ["-P", "-m", "pyprune.serving.vllm.launch", "serve", str(tmp_path / "out"), "--port", "9000"]
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert environment["VLLM_NO_USAGE_STATS"] == "1"
    for given, size in (("7", "7"), ("", "2")):
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", given)
        serve(tmp_path / "out")
        assert seen[-1][2]["VLLM_CPU_KVCACHE_SPACE"] == size


@pytest.mark.usefixtures("with_vllm")
@pytest.mark.parametrize(
    ("given", "version", "named"),
    [
        ([], "0.32.0+cpu", "bfloat16"),
        (["--dtype=half"], "0.32.0+cpu", "float16"),
        (["--dtype", "float32"], "0.32.0+cpu", None),
        ([], "0.32.0", None),
    ],
)
def test_a_dtype_that_this_cpu_has_no_arithmetic_for_is_warned_of(
    given: list[str], version: str, named: str | None,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    model, plan = _compacted("llama-head-dim", uniform=True)
    export(model, tmp_path / "out", plan=plan)
    without_instructions(monkeypatch)
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_version", lambda: version)
    monkeypatch.setattr(sys, "platform", "linux")
    serve_command(tmp_path / "out", given)
    printed = capsys.readouterr().err
    assert ("arithmetic" in printed) is (named is not None), printed
    assert named is None or f"vLLM will run in {named}, and this CPU has no {named} arithmetic" in printed


SOME, ALL, NONE = {"max_window_layers": 2}, {"max_window_layers": 0}, {"max_window_layers": 4}


@pytest.mark.usefixtures("with_vllm")
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("windows", "removed", "refused"), [(SOME, [1], True), (SOME, [2, 3], False), (ALL, [1], False), (NONE, [1], False)]
)
def test_windows_in_some_layers_are_known_to_end_vllms_stock_class(
    name: str,
    windows: dict[str, int],
    removed: list[int],
    refused: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """It would end minutes later in an assertion; the same layers are served as the pruned architecture."""
    model = tiny_model(name, use_sliding_window=True, sliding_window=6, **windows)
    plan = family_for(model).plan(model.config).drop_layers(removed)
    compact_(model, plan)
    reports = {target: export(model, tmp_path / target, plan=plan, target=target) for target in ("stock", "pruned")}
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_version", lambda: "0.32.0")
    for target, report in reports.items():
        ends = refused and target == "stock"
        assert any("--target pruned" in warning for warning in report.warnings) is ends
        card = (tmp_path / target / "README.md").read_text()
        assert ("and vLLM load it without pyprune" in card) is (target == "stock" and not ends)
        told = pytest.raises(CheckpointError, match=r"every layer or in none.*--target pruned")
        with told if ends else nullcontext():
            serve_command(tmp_path / target)


@pytest.mark.usefixtures("with_vllm")
@pytest.mark.parametrize(
    ("quantise", "saturate", "version", "warned"),
    [
        ("w8a8-int8", True, "0.32.0+cpu", True),
        ("w8a8-int8", False, "0.32.0+cpu", False),
        ("w8a8-int8", True, "0.32.0", False),
        ("w4a16", True, "0.32.0+cpu", False),
    ],
)
def test_int8_is_warned_of_where_its_products_saturate(
    quantise: str, saturate: bool, version: str, warned: bool,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    write_pair(tmp_path, "llama-head-dim", in_32s, quantise)
    monkeypatch.setattr("pyprune.runtime.device.int8_products_saturate", lambda: saturate)
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_version", lambda: version)
    monkeypatch.setattr(sys, "platform", "linux")
    serve_command(tmp_path / "quantised", [])
    assert ("this CPU has no VNNI" in capsys.readouterr().err) is warned


def test_what_lies_in_the_current_folder_is_not_imported(tmp_path: Path) -> None:
    """It may be that of a downloaded model."""
    (tmp_path / "ctypes.py").write_text("raise SystemExit('the code of a model ran')")
    done = subprocess.run([*engines.PYTHON, "-c", "import ctypes"], cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.usefixtures("with_vllm")
def test_the_cache_has_the_size_that_was_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a CPU vLLM takes the variable in place of either option."""
    model, plan = _compacted("llama-head-dim", uniform=True)
    export(model, tmp_path / "out", plan=plan)
    (tmp_path / "file.yaml").write_text("gpu-memory-utilization: 0.5\n")
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    seen: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *given: seen.append(given[2]))
    for words in (
        ["--kv-cache-memory-bytes", "1G"],
        ["--device-memory-util=0.5"],
        ["--config", str(tmp_path / "file.yaml")],
    ):
        serve(tmp_path / "out", words)
        assert "VLLM_CPU_KVCACHE_SPACE" not in seen[-1]


@pytest.mark.usefixtures("with_vllm")
@pytest.mark.parametrize(
    ("words", "gib"),
    [
        ([], 5),  # 2 KiB for a token in bfloat16, (1 + 1) x 2 KV heads x 64 channels x 4 layers x 2 bytes; and a block
        (["--dtype", "float32"], 9),
        (["--max-model-len", "1M"], 3),
        (["--max-model-len", "1048448"], 2),
        (["--max-model-len=1.5m"], 3),
        (["--max-model-len", "auto"], 2),
        (["-tp", "2"], 3),
        (["-tp", "4"], 3),  # each of two KV heads is on two ranks
        (["-pp", "2"], 3),
        (["-pp", "3"], 3),  # one, two, one
        (["--kv-cache-dtype", "fp8"], 2),
        (["--max-model-len", "4096"], 2),
    ],
)
def test_the_cache_holds_the_longest_sequence(
    words: list[str], gib: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With less vLLM refuses to start."""
    model = tiny_model("llama", head_dim=64, num_attention_heads=8, num_hidden_layers=4, max_position_embeddings=2**21)
    export(model, tmp_path / "out")
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_version", lambda: "0.32.0+cpu")
    seen: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *given: seen.append(given[2]))
    serve(tmp_path / "out", words)
    assert seen[0]["VLLM_CPU_KVCACHE_SPACE"] == str(gib)
    assert (f"Key-value cache: {gib} GiB, for one sequence of" in capsys.readouterr().err) == (gib > 2)


@pytest.mark.usefixtures("with_vllm")
@pytest.mark.parametrize(
    ("partition", "gib"),
    [
        ("", 4),  # layers of 2, 2 and of no, 1 KV heads: the first rank has 4 of the 5
        ("3,1", 4),
        ("1,3", 3),
        ("1,1", 4),  # vLLM refuses it
        ("a,b", 4),
    ],
)
def test_the_cache_holds_the_part_of_the_rank_that_has_most(
    partition: str, gib: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = tiny_model("llama", head_dim=64, num_attention_heads=8, num_hidden_layers=4, max_position_embeddings=2**21)
    plan = family_for(model).plan(model.config)
    plan = plan.with_layer(2, query_heads=[], kv_heads=[]).with_layer(3, query_heads=range(4), kv_heads=[0])
    compact_(model, plan)
    export(model, tmp_path / "out", plan=plan)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
    seen: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *given: seen.append(given[2]))
    serve(tmp_path / "out", ["-pp", "2", "--max-model-len", "4190000"])
    assert seen[0]["VLLM_CPU_KVCACHE_SPACE"] == str(gib)


@pytest.mark.usefixtures("with_vllm")
@pytest.mark.parametrize(
    ("name", "rotary", "gib"),
    [
        ("llama", {"rope_type": "linear", "factor": 4.0}, 5),
        ("llama", {"rope_type": "dynamic", "factor": 2.0}, 3),
        ("llama", {"rope_type": "yarn", "factor": 4.0}, 2),  # whose positions are those after the scaling
        ("phi3", {"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [1.0] * 32}, 2),
        ("llama", {"rope_type": "linear", "factor": "four"}, 2),  # vLLM refuses it
    ],
)
def test_the_cache_holds_scaled_positions(
    name: str, rotary: dict[str, Any], gib: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = {"head_dim": 64, "num_attention_heads": 8, "num_hidden_layers": 4}
    positions = {"max_position_embeddings": 2**19}
    if name == "phi3":  # as many as would need more than the usual cache
        positions = {"max_position_embeddings": 2**22, "original_max_position_embeddings": 2**16}
    export(tiny_model(name, **sizes, **positions), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["rope_parameters"] = {"rope_theta": 1e4, **rotary}
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    seen: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *given: seen.append(given[2]))
    serve(tmp_path / "out", verify=False)
    assert seen[0]["VLLM_CPU_KVCACHE_SPACE"] == str(gib)


@pytest.mark.usefixtures("with_vllm")
def test_the_cache_holds_the_sequence_of_the_draft_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = {"head_dim": 64, "num_attention_heads": 8, "max_position_embeddings": 2**21}
    for name, layers in (("out", 4), ("draft", 2)):
        export(tiny_model("llama", num_hidden_layers=layers, **sizes), tmp_path / name)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    seen: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *given: seen.append(given[2]))
    draft = str(tmp_path / "draft")
    whole = json.dumps({"model": draft, "num_speculative_tokens": 2})
    (tmp_path / "file.yaml").write_text(f"speculative-config: {whole}\n")
    counted = [["--speculative-config", whole], ["-sc", whole], [f"--speculative-config.model={draft}"]]
    counted += [[f"-sc.model={draft}"]]
    counted += [["--spec-model", draft], ["--config", str(tmp_path / "file.yaml")]]
    for words in counted:
        serve(tmp_path / "out", words)
    with pytest.raises(CheckpointError, match="vLLM cannot build a draft model in a pipeline"):
        serve(tmp_path / "out", ["-pp", "2", *counted[0]])
    with pytest.raises(CheckpointError, match="vLLM cannot build a draft model in a pipeline"):
        serve(tmp_path / "out", ["-pp", "2", "--spec-model", draft, "--spec-method", "draft_model"])
    uncounted = ('{"method": "ngram"}', '{"model": "owner/on-a-hub"}', '{"model": 3}', "[]", "{")
    for text in uncounted:
        serve(tmp_path / "out", ["-sc", text])
    assert [each["VLLM_CPU_KVCACHE_SPACE"] for each in seen] == [*["7"] * 6, *["5"] * 5]


@pytest.mark.usefixtures("with_vllm")
@pytest.mark.parametrize(
    "damage", [{"per_layer_config": [1]}, {"per_layer_config": {"0": None}}, {"layer_types": 5}, {"head_dim": "many"}]
)
def test_a_damaged_draft_is_vllm_s_to_refuse(
    damage: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("out", "draft"):
        save_checkpoint(tiny_model("llama"), tiny_tokenizer(), tmp_path / name, plan=None, provenance={})
    path = tmp_path / "draft" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **damage}))
    found: list[list[str]] = []
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_version", lambda: "0.32.0+cpu")
    monkeypatch.setattr(os, "execve", lambda _, command, __: found.append(command))
    serve(tmp_path / "out", ["--spec-model", str(tmp_path / "draft"), "--spec-method", "draft_model"])
    assert found


@pytest.mark.usefixtures("with_vllm")
def test_a_draft_that_vllm_would_end_at_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stock one as well, which no plugin sees."""
    for name in ("llama", "gemma3"):
        export(tiny_model(name), tmp_path / name)
    started: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *given: started.append(given))
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_version", lambda: "0.32.0+cpu")
    windows = ["-sc", json.dumps({"model": str(tmp_path / "gemma3"), "num_speculative_tokens": 2})]
    with pytest.raises(CheckpointError, match=r"of its draft \S+gemma3: .*--disable-hybrid-kv-cache-manager"):
        serve(tmp_path / "llama", windows)
    serve(tmp_path / "llama", [*windows, "--disable-hybrid-kv-cache-manager"])
    serve(tmp_path / "llama", ["--spec-model", str(tmp_path / "llama")])
    assert len(started) == 2

    model = tiny_model("llama")
    plan = family_for(model).plan(model.config).with_layer(1, query_heads=[0, 1], kv_heads=[0])
    compact_(model, plan)
    export(model, tmp_path / "unequal", plan=plan)
    unequal = ["--spec-model", str(tmp_path / "unequal")]
    with pytest.raises(CheckpointError, match=r"of its draft \S+unequal: a draft model needs the same heads"):
        serve(tmp_path / "llama", unequal)
    with monkeypatch.context() as other:
        other.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        serve(tmp_path / "llama", windows)  # another runner, which keeps several kinds of attention
    heads = tmp_path / "gemma3" / "config.json"
    heads.write_text(heads.read_text().replace("Gemma3ForCausalLM", "Gemma3DSparkModel"))
    serve(tmp_path / "llama", windows)  # by its architecture no model
    assert len(started) == 4
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(CheckpointError, match=r"its draft \S+unequal is a PrunedLlama.* VLLM_PLUGINS=other,pyprune"):
        serve(tmp_path / "llama", unequal)


@pytest.mark.usefixtures("with_vllm")
def test_the_ranks_must_be_able_to_share_the_draft_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It has the ranks of its target unless one is asked for; a GPU's as well."""
    pytest.importorskip("compressed_tensors")
    export(tiny_model("llama"), tmp_path / "dense")
    model = tiny_model("llama")
    odd = family_for(model).plan(model.config)
    for layer in range(model.config.num_hidden_layers):
        odd = odd.with_layer(layer, ffn=range(39))
    compact_(model, odd)
    export(model, tmp_path / "odd", plan=odd)
    model, plan = _compacted("llama-head-dim", uniform=True)
    export(model, tmp_path / "w8a16", plan=plan, quantise="w8a16")
    started: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *given: started.append(given))
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_version", lambda: "0.32.0")
    two = ["-tp", "2", "--speculative-config"]
    drafts = {"model": str(tmp_path / "odd"), "num_speculative_tokens": 2}
    with pytest.raises(CheckpointError, match=r"of its draft \S+odd: layers 0-\d have 39 FFN channels"):
        serve(tmp_path / "dense", [*two, json.dumps(drafts)])
    serve(tmp_path / "dense", [*two, json.dumps({**drafts, "draft_tensor_parallel_size": 1})])
    serve(tmp_path / "dense", ["--spec-model", str(tmp_path / "odd")])
    assert len(started) == 2
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_version", lambda: "0.32.0+cpu")
    with pytest.raises(CheckpointError, match=r"of its draft \S+w8a16: vLLM's CPU backend has no kernel for 8-bit"):
        serve(tmp_path / "dense", ["--spec-model", str(tmp_path / "w8a16")])


@pytest.mark.usefixtures("with_vllm")
def test_heads_that_draft_are_no_models_in_a_pipeline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their config.json is of the model whose heads they are."""
    for name in ("out", "draft", "EAGLE3-draft"):
        export(tiny_model("llama"), tmp_path / name)
    started: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *given: started.append(given))
    plain, named = (str(tmp_path / name) for name in ("draft", "EAGLE3-draft"))
    told = [["--spec-model", named], ["--spec-model", plain, "--spec-method", "eagle"]]
    told += [["-sc", json.dumps({"model": plain, "method": "eagle3"})], ["-sc.model", plain, "-sc.method=eagle"]]
    for words in told:
        serve(tmp_path / "out", ["-pp", "2", *words])
    assert len(started) == len(told)
    with pytest.raises(CheckpointError, match="vLLM cannot build a draft model in a pipeline"):
        serve(tmp_path / "out", ["-pp", "2", "-sc", json.dumps({"model": named, "method": "draft_model"})])


@pytest.mark.usefixtures("with_vllm")
@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_the_cache_of_a_model_with_windows_is_as_usual(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They need no room beyond the window; vLLM knows how much."""
    model = tiny_model(name, head_dim=64, max_position_embeddings=2**22, sliding_window=16)
    export(model, tmp_path / "out")
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    seen: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *given: seen.append(given[2]))
    serve(tmp_path / "out")
    assert seen[0]["VLLM_CPU_KVCACHE_SPACE"] == "2"


def test_names_that_are_cut_short_are_read_as_vllm_reads_them() -> None:
    given = given_options(
        ["--served-model", "chat", "--rev=v2", "--tensor_parallel", "3", "-pp", "2", "--max-model-len", "9"]
    )
    assert (given.served_model_name, given.revision) == ("chat", "v2")
    assert (given.tensor_parallel_size, given.pipeline_parallel_size, given.data_parallel_size) == (3, 2, 1)
    assert hub_of(["--rev", "v2"]).revision == "v2"
    assert given_options(["--d", "1", "--rev", "v2"]).revision is None, "vLLM says that --d could be several"


def test_a_file_of_options_is_read_where_vllm_reads_it(tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text("tensor-parallel-size: 3\n")
    path = str(tmp_path / "file.yaml")
    assert given_options(["--config", path]).tensor_parallel_size == 3
    assert given_options(["--config", path, "-tp", "2"]).tensor_parallel_size == 2
    assert given_options([f"--config={path}"]).tensor_parallel_size == 1, "vLLM passes it over"
    assert given_options(["--config"]).tensor_parallel_size == 1
    (tmp_path / "file.yaml").write_text("revision: 2024-06-01\nmax-model-len: []\nserved-model-name: null\n")
    given = given_options(["--config", path])
    assert (given.revision, given.max_model_len, given.served_model_name) == ("2024-06-01", None, None), "a date"


@pytest.mark.usefixtures("with_vllm")
def test_serve_refuses_a_changed_checkpoint(tmp_path: Path) -> None:
    model, plan = _compacted("llama-head-dim", uniform=True)
    export(model, tmp_path / "out", plan=plan)
    edit_the_config(tmp_path / "out")
    with pytest.raises(CheckpointError, match="SHA-256"):
        serve_command(tmp_path / "out")


@pytest.mark.usefixtures("with_vllm")
@pytest.mark.parametrize("name", ["zz.safetensors", "model.safetensors.index.json", "params.json"])
def test_serve_refuses_what_the_record_does_not_list(tmp_path: Path, name: str) -> None:
    model, plan = _compacted("llama-head-dim", uniform=True)
    export(model, tmp_path / "out", plan=plan)
    serve_command(tmp_path / "out")
    (tmp_path / "out" / name).write_text("{}")
    with pytest.raises(CheckpointError, match=f"holds '{name}', which its pruning.json does not list"):
        serve_command(tmp_path / "out")


def test_serve_needs_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name, *a: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'pyprune\[vllm\]'"):
        serve_command(tmp_path)


@pytest.fixture
def finders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own finders; what is added is gone after the test."""
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, VariantFinder)])


def _install(folder: Path, monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Metadata of distributions on a path that holds nothing else."""
    for name, version in versions.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [str(folder)])
    importlib.invalidate_caches()


@pytest.mark.usefixtures("finders")
def test_vllm_finds_its_version_under_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, monkeypatch, vllm_cpu="0.0.1")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm")
    before = importlib.metadata.version
    look_for_platform()
    look_for_platform()
    assert importlib.metadata.version("vllm") == "0.0.1+cpu"
    assert sum(isinstance(finder, VariantFinder) for finder in sys.meta_path) == 1
    assert importlib.metadata.version is before, "nothing of another package is replaced"
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("nosuch")
    assert [found.metadata["Name"] for found in importlib.metadata.distributions()] == ["vllm_cpu"]


@pytest.mark.usefixtures("finders")
@pytest.mark.parametrize("versions", [{"vllm": "1.0"}, {"vllm": "1.0", "vllm_cpu": "0.0.1"}])
def test_a_version_that_vllm_finds_itself_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]
) -> None:
    _install(tmp_path, monkeypatch, **versions)
    look_for_platform()
    assert importlib.metadata.version("vllm") == "1.0"


@pytest.mark.usefixtures("finders")
def test_no_vllm_at_all_stays_no_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, monkeypatch)
    look_for_platform()
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm")
