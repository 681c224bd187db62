"""`pyprune reconstruct` and `cut.reconstruct: least_squares`: the effect on a model, the record, the refusals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from pyprune import prune
from pyprune.checkpoint.layers import StoredLayers
from pyprune.checkpoint.load import ModelSource, load_model
from pyprune.checkpoint.record import read_pruning_json
from pyprune.cli.app import app
from pyprune.cli.base import ERROR_CODE
from pyprune.families import family_for
from pyprune.run.recipe import build_config
from tests._support.models import tiny_batch, tiny_model
from tests._support.plans import axis_plans
from tests._support.text import write_model, write_text
from tests._support.tokenizer import tiny_tokenizer


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt", words=9000)


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return write_model(tiny_model("llama"), tmp_path / "dense")


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    model = tiny_model("llama")
    path = tmp_path / "plan.json"
    path.write_text(family_for(model).plan(model.config).drop_layers([1]).to_json())
    return path


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, list(map(str, arguments)))


def arguments(dense: Path, plan: Path, text: Path, out: Path, *more: str) -> list[str | Path]:
    data = ["--calibration", text, "--samples", "96", "--sequence-length", "32"]
    return ["prune", dense, "--plan", plan, "--out", out, *data, *more]


def distance(folder: Path, dense: Path) -> float:
    """How far the logits of a checkpoint are from the dense model's, relative to their size."""
    batch = tiny_batch(8, 32) % 200 + 3
    with torch.no_grad():
        wanted, found = (load_model(path)[0](batch).logits for path in (dense, folder))
    return float((found - wanted).norm() / wanted.norm())


def test_a_cut_that_is_reconstructed_follows_the_dense_model(
    dense: Path, plan: Path, text: Path, tmp_path: Path
) -> None:
    plain = run(*arguments(dense, plan, text, tmp_path / "plain"))
    assert plain.exit_code == 0, plain.output
    solved = run(*arguments(dense, plan, text, tmp_path / "solved", "--set", "cut.reconstruct=least_squares"))
    assert solved.exit_code == 0, solved.output
    assert "Reconstruction:" in " ".join(solved.stdout.split())
    assert distance(tmp_path / "solved", dense) < 0.9 * distance(tmp_path / "plain", dense)
    record = read_pruning_json(tmp_path / "solved").provenance
    parts = record["report"]["reconstruction"]["parts"]
    assert parts
    assert any(part["ridge"] is not None for part in parts)
    assert record["config"]["cut"]["reconstruct"] == "least_squares"
    assert read_pruning_json(tmp_path / "plain").provenance["report"]["reconstruction"] is None


def test_both_sides_of_a_reconstructed_cut_agree(dense: Path, plan: Path, text: Path, tmp_path: Path) -> None:
    config = build_config(
        options={"plan": str(plan), "cut.reconstruct": "least_squares", "verify": True, "data.source": str(text),
                 "data.samples": 96, "data.sequence_length": 32}
    )  # fmt: skip
    result = prune(dense, config, out=tmp_path / "out")
    assert result.verified is not None
    assert result.verified["compacted_perplexity"] == pytest.approx(result.verified["masked_perplexity"], rel=1e-5)


def test_a_checkpoint_that_is_cut_already_is_reconstructed(dense: Path, plan: Path, text: Path, tmp_path: Path) -> None:
    assert run(*arguments(dense, plan, text, tmp_path / "plain")).exit_code == 0
    data = ["--calibration", text, "--samples", "96", "--sequence-length", "32"]
    done = run("reconstruct", tmp_path / "plain", "--dense", dense, "--out", tmp_path / "solved", *data)
    assert done.exit_code == 0, done.output
    assert "relative error on text held back" in done.stdout
    assert distance(tmp_path / "solved", dense) < 0.9 * distance(tmp_path / "plain", dense)
    before, after = (read_pruning_json(tmp_path / name) for name in ("plain", "solved"))
    assert before.plan == after.plan
    (entry,) = after.provenance["reconstructions"]
    assert entry["teacher"] == str(dense)
    assert entry["report"]["parts"]
    model, _ = load_model(tmp_path / "solved")
    assert model.config.architectures == ["LlamaForCausalLM"]


@pytest.mark.parametrize("name", ["mistral", "qwen2"])
def test_biases_that_the_cut_added_are_no_part_of_the_dense_model(name: str, text: Path, tmp_path: Path) -> None:
    """They are zero where nothing was removed, and what is behind them is exact still."""
    model = tiny_model(name)
    dense, plan = write_model(model, tmp_path / "dense"), family_for(model).plan(model.config)
    for layer in plan.layers:
        plan = plan.with_layer(layer.index, ffn=layer.ffn[: len(layer.ffn) // 2])
    (tmp_path / "plan.json").write_text(plan.to_json())
    pruned = tmp_path / "pruned"
    given = arguments(dense, tmp_path / "plan.json", text, pruned, "--set", "cut.reconstruct=bias")
    assert run(*given).exit_code == 0
    added = load_file(pruned / "model.safetensors").keys() - load_file(dense / "model.safetensors").keys()
    assert any(weight.endswith("layers.0.mlp.up_proj.bias") for weight in added)
    data = ["--calibration", text, "--samples", "96", "--sequence-length", "32"]
    done = run("reconstruct", pruned, "--dense", dense, "--out", tmp_path / "solved", *data)
    assert done.exit_code == 0, done.output
    assert distance(tmp_path / "solved", dense) < distance(pruned, dense)


def test_tokens_that_the_model_has_no_embedding_for_are_refused(
    dense: Path, plan: Path, text: Path, tmp_path: Path
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<|{i}|>" for i in range(200)])
    tokenizer.save_pretrained(dense)
    assert run(*arguments(dense, plan, text, tmp_path / "plain")).exit_code == 0
    text.write_text(text.read_text().replace(" ", " <|199|> "))
    data = ["--calibration", text, "--samples", "96", "--sequence-length", "32"]
    done = run("reconstruct", tmp_path / "plain", "--dense", dense, "--out", tmp_path / "solved", *data)
    assert done.exit_code == ERROR_CODE
    assert "but the model's vocabulary has" in " ".join(done.stderr.split())


def test_text_that_the_checkpoint_has_read_before_is_warned_of(
    dense: Path, plan: Path, text: Path, tmp_path: Path
) -> None:
    other = write_text(tmp_path / "other.txt", words=9000, seed=3)
    assert run(*arguments(dense, plan, text, tmp_path / "plain")).exit_code == 0
    once = reconstruct(tmp_path / "plain", dense, text, tmp_path / "once", 64)
    assert "were training text" not in once
    assert "were training text of this checkpoint already" in reconstruct(
        tmp_path / "once", dense, text, tmp_path / "twice", 64
    )
    assert "were training text" not in reconstruct(tmp_path / "once", dense, other, tmp_path / "others", 64)
    assert "Sequences of 32 tokens are shorter" in reconstruct(tmp_path / "once", dense, other, tmp_path / "short", 32)


def reconstruct(pruned: Path, dense: Path, text: Path, out: Path, length: int) -> str:
    """What `pyprune reconstruct` warns of, in one line."""
    data = ["--calibration", text, "--samples", "48", "--sequence-length", str(length)]
    done = run("reconstruct", pruned, "--dense", dense, "--out", out, *data)
    assert done.exit_code == 0, done.output
    return " ".join(done.stderr.split())


def test_both_ways_to_reconstruct_give_the_same_model(dense: Path, plan: Path, text: Path, tmp_path: Path) -> None:
    """At the cut, or afterwards from the checkpoint."""
    assert run(*arguments(dense, plan, text, tmp_path / "plain")).exit_code == 0
    at_once = arguments(dense, plan, text, tmp_path / "once", "--set", "cut.reconstruct=least_squares")
    assert run(*at_once).exit_code == 0
    data = ["--calibration", text, "--samples", "96", "--sequence-length", "32"]
    assert run("reconstruct", tmp_path / "plain", "--dense", dense, "--out", tmp_path / "later", *data).exit_code == 0
    once, later = (load_model(tmp_path / name)[0] for name in ("once", "later"))
    for (name, a), (_, b) in zip(once.named_parameters(), later.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)


def test_of_a_dense_model_on_disk_one_layer_is_read_at_a_time(
    dense: Path, plan: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(*arguments(dense, plan, text, tmp_path / "plain")).exit_code == 0
    data = ["--calibration", text, "--samples", "96", "--sequence-length", "32"]
    loaded: list[str] = []
    held: list[int] = []
    whole, layer = ModelSource.load, StoredLayers.layer

    def load(source: ModelSource, **options: Any) -> Any:
        loaded.append(Path(source.name).name)
        return whole(source, **options)

    @contextmanager
    def read(self: StoredLayers, index: int) -> Iterator[Any]:
        with layer(self, index) as module:
            held.append(sum(not p.is_meta for some in self.layers for p in some.parameters()))
            yield module

    monkeypatch.setattr(ModelSource, "load", load)
    monkeypatch.setattr(StoredLayers, "layer", read)
    done = run("reconstruct", tmp_path / "plain", "--dense", dense, "--out", tmp_path / "streamed", *data)
    assert done.exit_code == 0, done.output
    assert loaded == ["plain"], "the dense model is never loaded whole"
    assert set(held) == {9}, "the weights of one layer"
    monkeypatch.setattr(ModelSource, "layers_obstacle", lambda _: "planted")
    assert run("reconstruct", tmp_path / "plain", "--dense", dense, "--out", tmp_path / "whole", *data).exit_code == 0
    assert loaded[1:] == ["plain", "dense"]
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("streamed", "whole")]
    assert all(torch.equal(tensor, files[1][name]) for name, tensor in files[0].items())


@pytest.mark.parametrize("family", ["llama", "llama-head-dim", "opt", "phi-tied", "qwen2", "gemma3"])
def test_a_cut_to_pyprunes_own_architecture_is_reconstructed_too(family: str, text: Path, tmp_path: Path) -> None:
    """Sizes that differ between layers and channels that go: the cut model has no family of its own."""
    model = tiny_model(family)
    dense, plan = write_model(model, tmp_path / "dense"), tmp_path / "plan.json"
    plan.write_text(axis_plans(family_for(model).plan(model.config))["everything"].to_json())
    assert run(*arguments(dense, plan, text, tmp_path / "cut")).exit_code == 0
    data = ["--calibration", text, "--samples", "96", "--sequence-length", "32"]
    done = run("reconstruct", tmp_path / "cut", "--dense", dense, "--out", tmp_path / "out", *data)
    assert done.exit_code == 0, done.output
    assert read_pruning_json(tmp_path / "out").provenance["architecture"].startswith("Pruned")
    (entry,) = read_pruning_json(tmp_path / "out").provenance["reconstructions"]
    assert any(part["ridge"] is not None and part["after"] < part["before"] for part in entry["report"]["parts"])
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("cut", "out"))
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_what_cannot_be_reconstructed_is_refused(dense: Path, text: Path, plan: Path, tmp_path: Path) -> None:
    data = ["--calibration", text, "--samples", "96", "--sequence-length", "32"]
    out = tmp_path / "out"
    other = write_model(tiny_model("llama", seed=5), tmp_path / "other")
    no_plan = run("reconstruct", other, "--dense", dense, "--out", out, *data)
    assert no_plan.exit_code != 0
    assert "holds no plan" in no_plan.stderr
    assert run(*arguments(dense, plan, text, tmp_path / "plain")).exit_code == 0
    qwen = write_model(tiny_model("qwen2"), tmp_path / "qwen")
    wrong = run("reconstruct", tmp_path / "plain", "--dense", qwen, "--out", out, *data)
    assert wrong.exit_code != 0
    assert "model type" in wrong.stderr
    assert not out.exists()
    nothing = run(*arguments(dense, plan, text, out, "--set", "cut.reconstruct=least_squares",
                             "--set", "stages.prune=false"))  # fmt: skip
    assert "nothing is cut" in nothing.stderr


def test_the_cut_may_have_text_of_its_own(dense: Path, plan: Path, text: Path, tmp_path: Path) -> None:
    other = write_text(tmp_path / "other.txt", words=9000, seed=3)
    own = ["--set", f"cut.data={{source: {other}, samples: 48, sequence_length: 32}}"]
    solve = ["--set", "cut.reconstruct=least_squares"]
    for name, more in (("same", solve), ("own", [*solve, *own])):
        done = run(*arguments(dense, plan, text, tmp_path / name, *more))
        assert done.exit_code == 0, done.output
    reports = [read_pruning_json(tmp_path / name).provenance["report"] for name in ("same", "own")]
    assert [report["reconstruction"]["tokens"] for report in reports] == [96 * 32, 48 * 32]
    unread = run(*arguments(dense, plan, text, tmp_path / "unread", *own))
    assert "cut: data is given, but reconstruct is 'none'" in unread.stderr


def test_a_replayed_plan_says_that_the_reconstruction_is_not(
    dense: Path, plan: Path, text: Path, tmp_path: Path
) -> None:
    solved = arguments(dense, plan, text, tmp_path / "solved", "--set", "cut.reconstruct=least_squares")
    assert run(*solved).exit_code == 0
    config = build_config(options={"plan": str(tmp_path / "solved")})
    warnings = prune(dense, config, out=tmp_path / "again").warnings
    assert any("is not replayed" in text and "least_squares" in text for text in warnings)
    assert run(*arguments(dense, plan, text, tmp_path / "plain")).exit_code == 0
    data = ["--calibration", text, "--samples", "96", "--sequence-length", "32"]
    assert run("reconstruct", tmp_path / "plain", "--dense", dense, "--out", tmp_path / "later", *data).exit_code == 0
    config = build_config(options={"plan": str(tmp_path / "later")})
    assert any("is not replayed" in text for text in prune(dense, config, out=tmp_path / "third").warnings)
