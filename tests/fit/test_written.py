"""What `pyprune fit` writes: sizes that only one kind of cut reaches, every format of the weights, charts."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import pyprune.modeling  # noqa: F401  (registers the pruned architectures)
from pyprune.checkpoint.record import read_pruning_json
from pyprune.families import count_parameters
from pyprune.fit import fit as flow
from pyprune.fit.fit import export_path
from pyprune.plan import PrunePlan, kv_head_of
from pyprune.runtime.charts import PointChart
from pyprune.runtime.report import Report, write_report
from pyprune.serving.vllm.limits import serving_warnings
from pyprune.serving.widths import layer_widths
from tests._support.cli import refused, run
from tests._support.models import tiny_batch
from tests.fit.test_engines import place_of
from tests.fit.test_fit import arguments

NARROWER = ("choices.skips=[]", "choices.query_heads=false", "choices.hidden=[]")
"""KV groups and FFN channels alone may go."""


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three query heads for each KV head, and an FFN that no multiple of 64 makes narrower."""
    folder = tmp_path_factory.mktemp("grouped")
    return place_of(folder, "llama", hidden_size=48, num_attention_heads=6, intermediate_size=40)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes of which the blocks of K-quants and the tiles of fp8 leave some to choose."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
    return place_of(tmp_path_factory.mktemp("wide"), "llama", **sizes)


def sets(*settings: str) -> list[str]:
    """The options of these settings."""
    return [part for setting in settings for part in ("--set", setting)]


def written_plan(folder: Path) -> PrunePlan:
    """The plan in the record of a checkpoint, whose files are as they were written."""
    plan = read_pruning_json(folder, verify_files=True).plan
    assert plan is not None
    return plan


def loaded(folder: Path) -> PreTrainedModel:
    """The model of a folder, which computes."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(input_ids=tiny_batch() % model.config.vocab_size).logits
    assert bool(logits.isfinite().all())
    return model


def test_a_budget_that_only_fewer_query_heads_in_the_groups_keep(grouped: Path, tmp_path: Path) -> None:
    """All KV heads and FFN channels must stay."""
    out = tmp_path / "out"
    rest = sets("choices.skips=[]", "choices.head_counts=1", "choices.hidden=[]")
    given = [*arguments(grouped, out, "parameters=90%"), *rest, "--no-recover"]
    assert "cannot be kept" in refused(*given, *sets("choices.query_heads=false"))
    result = run(*given, *sets("choices.query_heads=true"))
    assert result.exit_code == 0, result.output

    plan, model = written_plan(out), loaded(out)
    dense = plan.dense
    assert any(len(layer.query_heads) < dense.group_size * len(layer.kv_heads) for layer in plan.layers)
    for layer in plan.layers:
        assert (len(layer.kv_heads), len(layer.ffn)) == (dense.num_key_value_heads, dense.intermediate_size)
        of_each = Counter(kv_head_of(head, dense) for head in layer.query_heads)
        assert len(of_each) == dense.num_key_value_heads
        assert len(set(of_each.values())) == 1, "as many of each group"
    kept = [layer.self_attn.q_proj.out_features // dense.head_dim for layer in model.model.layers]
    assert kept == [len(layer.query_heads) for layer in plan.layers]
    assert count_parameters(model) <= 0.9 * count_parameters(AutoModelForCausalLM.from_pretrained(grouped / "dense"))


def test_a_budget_that_only_a_smaller_hidden_size_keeps(wide: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    rest = sets("choices.skips=[]", "choices.head_counts=1", "choices.query_heads=false", "choices.ffn_shares=[0.9]")
    given = [*arguments(wide, out, "parameters=60%"), *rest, "--no-recover"]
    assert "cannot be kept" in refused(*given, *sets("choices.hidden=[]"))
    result = run(*given, *sets("choices.hidden=[192,128]"))
    assert result.exit_code == 0, result.output

    plan, model = written_plan(out), loaded(out)
    assert len(plan.hidden) == 128, "192 of 256 channels are three quarters of every matrix"
    assert json.loads((out / "config.json").read_text())["hidden_size"] == 128
    assert model.get_input_embeddings().weight.shape == (plan.dense.vocab_size, 128)
    assert count_parameters(model) <= 0.6 * count_parameters(AutoModelForCausalLM.from_pretrained(wide / "dense"))


def tensor_bytes(place: Path) -> int:
    """Bytes of the tensors of a folder, or of a GGUF file, in which each begins at a multiple of 32."""
    if place.is_dir():
        return sum(tensor.nbytes for file in place.glob("*.safetensors") for tensor in load_file(file).values())
    from gguf import GGUFReader

    return sum(-(-int(tensor.n_bytes) // 32) * 32 for tensor in GGUFReader(place).tensors)


def cache_bytes(widths: list[tuple[int, int, int]], head_dim: int, tokens: int) -> int:
    """Of keys and values of two bytes."""
    return sum(2 * kv_heads * head_dim * 2 * tokens for _, kv_heads, _ in widths)


def stored_sizes(place: Path) -> tuple[int, list[tuple[int, int, int]]]:
    """Hidden size, and (query heads, KV heads, FFN width) of every layer, as an engine reads them."""
    if place.is_dir():
        config = json.loads((place / "config.json").read_text())
        return config["hidden_size"], layer_widths(config)
    from gguf import GGUFReader

    fields = GGUFReader(place).fields
    names = ("embedding_length", "attention.head_count", "attention.head_count_kv", "feed_forward_length")
    own = fields["general.architecture"].contents()
    count, hidden, *sizes = (fields[f"{own}.{name}"].contents() for name in ("block_count", *names))
    every = [size if isinstance(size, list) else [size] * count for size in sizes]  # one number where all are alike
    return hidden, list(zip(*every, strict=True))


@pytest.mark.second
@pytest.mark.parametrize("weights", ["w8a16", "fp8", "w4a16", "q6_k", "q4_k"])
def test_what_is_exported_keeps_the_memory_and_has_the_sizes_of_the_plan(
    wide: Path, tmp_path: Path, weights: str
) -> None:
    """The limit is a share of what the dense model takes when it is exported in the same format."""
    files = weights in ("q6_k", "q4_k")
    for package in ("gguf", "xllamacpp") if files else ("compressed_tensors",):
        pytest.importorskip(package)
    whole = tmp_path / ("dense.gguf" if files else "dense")
    how = ["--format", "gguf"] if files else ["--dtype", "bfloat16"]
    made = run("export", wide / "dense", "--out", whole, *how, "--quantise", weights)
    assert made.exit_code == 0, made.output
    out = tmp_path / "out"
    given = [*arguments(wide, out, "memory@64=75%"), "--weights", weights, *sets(*NARROWER), "--no-recover"]
    result = run(*given, "--json", tmp_path / "figures.json")
    assert result.exit_code == 0, result.output

    exported, plan = export_path(out, weights), written_plan(out)
    assert exported is not None
    assert exported.name == (f"out.{weights}.gguf" if files else f"out-{weights}")
    hidden, widths = stored_sizes(exported)
    assert hidden == len(plan.hidden)
    assert widths == [layer.widths for layer in plan.layers]
    _, all_of_it = stored_sizes(whole)
    assert widths != all_of_it
    taken, dense = (
        tensor_bytes(place) + cache_bytes(sizes, plan.dense.head_dim, 64)
        for place, sizes in ((exported, widths), (whole, all_of_it))
    )
    winner = json.loads((tmp_path / "figures.json").read_text())["winner"]
    counted = winner["predicted"]["memory@64"]
    assert winner["measured"]["memory@64"] == taken <= counted <= 0.75 * dense
    assert taken == counted or weights == "w4a16", "where a plan may have larger groups of scales than all choices have"
    if files:
        from gguf import GGUFReader

        matrices = [
            tensor for tensor in GGUFReader(exported).tensors if ".ffn_" in tensor.name and len(tensor.shape) == 2
        ]
        assert {tensor.tensor_type.name for tensor in matrices} == {weights.upper()}, "blocks of 256 divide the widths"
    else:  # what a server will not like
        config = json.loads((exported / "config.json").read_text())
        assert config["quantization_config"]["quant_method"] == "compressed-tensors"
        said = " ".join(result.stderr.split())
        assert all(f"Note: {warning}" in said for warning in serving_warnings(config))


def test_what_the_file_has_otherwise_than_the_checkpoint_is_said(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    place, out = place_of(tmp_path, "mistral-window"), tmp_path / "out"
    zeros = sets("choices.skips=[mlp]", "choices.head_counts=1", "choices.query_heads=false", "choices.hidden=[]")
    result = run(*arguments(place, out, "parameters=60%"), "--weights", "q8_0", *zeros, "--no-recover")
    assert result.exit_code == 0, result.output
    said = " ".join(result.stderr.split())
    skipped = sum(not layer.ffn for layer in written_plan(out).layers)
    assert skipped
    assert f"Note: {skipped} skipped MLPs are written as FFNs of 32 zero channels" in said
    window = "has no sliding window, so the context length in the file is the model's window, 6 tokens instead of 512"
    assert re.search(rf"Note: llama\.cpp's \w+ {window}", said)


def test_the_line_of_a_chart_joins_what_is_not_beaten_in_that_chart(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two models with less of one thing each, neither beats the other; the better one beats it where it has less."""
    charts: list[PointChart] = []

    def seen(report: Report, folder: Path) -> None:
        charts.extend(chart for chart in report.charts if isinstance(chart, PointChart))
        write_report(report, folder)

    monkeypatch.setattr(flow, "write_report", seen)
    out, budgets = tmp_path / "sweep", ("parameters=70%", "memory@64x4096=55%")  # nearly all of it keys and values
    given = [*arguments(wide, out, *budgets), "--sweep", *sets(*NARROWER, "solve.solutions=1")]
    result = run(*given)
    assert result.exit_code == 0, result.output

    first, second = (point["winner"] for point in json.loads((out / "metrics.json").read_text())["points"])
    many = "memory@64x4096"
    assert first["parameters"] < second["parameters"]
    assert first["predicted"][many] > second["predicted"][many]
    table = (out / "report.md").read_text()
    assert len(re.findall(r"\| yes \|", table)) == 2, "on the front of all that is limited"
    for chart in charts:
        others = {name: place for name, place in chart.points.items() if name != "dense"}
        front = {
            name for name, (amount, perplexity) in others.items()
            if not any(other[0] < amount and other[1] < perplexity for other in others.values())
        }  # fmt: skip
        assert set(chart.front) == front, chart.title
    assert {len(chart.front) for chart in charts} == {1, 2}
