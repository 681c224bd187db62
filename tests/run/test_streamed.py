"""Runs that only decide and cut go from file to file, and write what the run in memory writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pyprune.checkpoint.layers import ReadLayers
from pyprune.checkpoint.record import read_pruning_json
from pyprune.config.run import PruneConfig
from pyprune.families import decoder_layers, family_for
from pyprune.methods.registry import get_method
from pyprune.run import prune as pipeline
from pyprune.run.recipe import build_config
from pyprune.run.streamed import NOTE
from tests._support.cli import run
from tests._support.models import tiny_model
from tests._support.plans import axis_plans
from tests._support.text import write_model, write_text

SEPARATE = ("notes", "seconds", "memory")
"""Facts in which the two ways differ: what they say of themselves, and what it cost."""


UNTRAINED = {"stages.before": [], "stages.after": [], "cut.reconstruct": "none"}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")


def dense_folder(folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
    return write_model(tiny_model(name).to(dtype), folder)


def plan_file(folder: Path, name: str, which: str = "everything") -> Path:
    model = tiny_model(name)
    path = folder / f"{which}.json"
    path.write_text(axis_plans(family_for(model).plan(model.config))[which].to_json())
    return path


def both_ways(dense: Path, config: PruneConfig, out: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The folders that the streamed run and the run in memory write."""
    streamed = pipeline.prune_checkpoint(dense, config, out=out / "streamed")
    assert NOTE in streamed.notes
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "loading_reason", lambda *_, **__: "In memory.")
        loaded = pipeline.prune_checkpoint(dense, config, out=out / "loaded")
    assert NOTE not in loaded.notes
    assert "In memory." in loaded.notes
    assert [note for note in streamed.notes if note != NOTE] != []
    return out / "streamed", out / "loaded"


def assert_same_folder(streamed: Path, loaded: Path) -> None:
    names = [sorted(p.name for p in folder.iterdir()) for folder in (streamed, loaded)]
    assert names[0] == names[1]
    for name in names[0]:
        if name == "model.safetensors":
            assert_same_tensors(streamed / name, loaded / name)
        elif name not in ("pruning.json",):
            assert (streamed / name).read_bytes() == (loaded / name).read_bytes(), name
    records = [read_pruning_json(folder, verify_files=True) for folder in (streamed, loaded)]
    assert records[0].plan == records[1].plan
    assert list(records[0].provenance) == list(records[1].provenance)
    assert without_separate(records[0].provenance) == without_separate(records[1].provenance)


def assert_same_tensors(left: Path, right: Path) -> None:
    a, b = load_file(left), load_file(right)
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype
        assert torch.equal(tensor.flatten().view(torch.uint8), b[name].flatten().view(torch.uint8)), name


def without_separate(facts: Any) -> Any:
    if isinstance(facts, dict):
        return {name: without_separate(value) for name, value in facts.items() if name not in SEPARATE}
    return facts


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Parameters of stored layers that are in memory when another one is read."""
    found: list[int] = []
    parameter = ReadLayers.read_parameter

    def read(self: ReadLayers, name: str) -> torch.nn.Parameter:
        found.append(sum(not p.is_meta for layer in self.layers for p in layer.parameters()))
        return parameter(self, name)

    monkeypatch.setattr(ReadLayers, "read_parameter", read)
    return found


def matrices_at_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Matrices of all layers that are in memory when a layer of a model that is called as a whole is run."""
    found: list[int] = []
    whole = ReadLayers.whole

    def listened(self: ReadLayers) -> Any:
        model = whole(self)
        for layer in self.layers:
            layer.register_forward_pre_hook(
                lambda *_: found.append(sum(p.ndim > 1 and not p.is_meta for p in self.layers.parameters()))
            )
        return model

    monkeypatch.setattr(ReadLayers, "whole", listened)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "phi", "gemma3", "opt", "olmo2-tied-bias", "phi3"])
def test_a_plan_gives_the_same_folder_as_in_memory(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms of LLaMA, a gauge, norms of 1 + w, a virtual LayerNorm, widths that are normalised, fused projections."""
    dense = dense_folder(tmp_path / "dense", name, dtype)
    config = build_config(options={"plan": str(plan_file(tmp_path, name))})
    assert_same_folder(*both_ways(dense, config, tmp_path, monkeypatch))


@pytest.mark.parametrize(("stored", "work", "export"), [
    (torch.float32, "float32", "bfloat16"),
    (torch.bfloat16, "float32", "float32"),
    (torch.float32, "bfloat16", "float16"),
    (torch.float16, "float16", None),
])  # fmt: skip
def test_dtypes_mean_the_same(
    stored: torch.dtype, work: str, export: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = dense_folder(tmp_path / "dense", "phi", stored)
    options = {"plan": str(plan_file(tmp_path, "phi")), "dtype": work, "export_dtype": export}
    folders = both_ways(dense, build_config(options=options), tmp_path, monkeypatch)
    assert_same_folder(*folders)
    dtypes = {t.dtype for t in load_file(folders[0] / "model.safetensors").values()}
    assert dtypes == {getattr(torch, export) if export else stored}


@pytest.mark.second
@pytest.mark.parametrize("name", ["llama", "gemma3", "opt", "phi3"])
@pytest.mark.parametrize(
    "more",
    [
        {"method": "magnitude"},
        {"method": "magnitude", "magnitude.norm": "l2"},
        {"method": "magnitude", "score.iterations": 3},
        {"method": "last"},
        {"method": "dress", **UNTRAINED, "dress.select": "scored"},
        {"method": "dress", **UNTRAINED, "dress.select": "last"},
    ],
)
def test_methods_that_read_no_text_decide_from_disk(
    name: str, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = dense_folder(tmp_path / "dense", name, torch.bfloat16)
    config = build_config(options={"ratio": 0.3, **more})
    if more["method"] == "magnitude":
        config = replace(config, score=replace(config.score_options, axes=("heads", "ffn", "hidden")))
    assert_same_folder(*both_ways(dense, config, tmp_path, monkeypatch))


@pytest.mark.parametrize("name", ["llama", "phi", "gemma3", "opt", "phi3"])
@pytest.mark.parametrize(
    "more",
    [
        {"method": "shortgpt"},
        {"method": "shortgpt", "shortgpt.unit": "mlp"},
        {"method": "sleb"},
        {"method": "shortened_llama", "shortened_llama.unit": "attention"},
        {
            "method": "shortened_llama",
            "shortened_llama.form": "taylor_plus",
            "shortened_llama.keep_first": 0,
            "shortened_llama.keep_last": 0,
        },
        {"method": "wanda"},
        {"method": "wanda", "score.axes": ["heads", "ffn", "hidden"]},
        {"method": "flap", "cut.reconstruct": "none"},
        {"method": "flap"},
        {"method": "taylor"},
        {"method": "taylor", "taylor.form": "param_mix", "score.batch_size": 2},
        {"method": "taylor", "score.axes": ["hidden"], "score.iterations": 2},
        {"method": "taylor", "score.iterations": 3},
        {"method": "moreau", "score.axes": ["hidden"], "score.iterations": 2, "moreau.steps": 2},
        {"method": "wanda", "score.axes": ["heads", "ffn", "hidden"], "score.iterations": 2},
        {"method": "flap", "score.iterations": 2},
        {"method": "smoothgrad", "smoothgrad.draws": 2},
        {"method": "obs", "ratio": 0.1, "score.iterations": 2},
        {"method": "modegpt", "score.axes": ["ffn"], "ratio": 0.1},
        {"method": "moreau", "moreau.steps": 3},
        {"method": "moreau", "moreau.draws": 2, "moreau.steps": 2, "score.batch_size": 2},
        {"method": "moreau_gs", "moreau_gs.steps": 3, "moreau_gs.eta": 1e-3},
        {"method": "laco", "ratio": 0.5},
        {"method": "dress", **UNTRAINED},
        {"method": "laco", "ratio": 0.5, "laco.form": "paper", "laco.merge": 2},
    ],
)
def test_methods_that_read_activations_or_gradients_decide_with_a_layer_in_memory(
    name: str, more: dict[str, Any], tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several batches of unlike size: what is summed over them is summed in the same order."""
    dense = dense_folder(tmp_path / "dense", name, torch.bfloat16)
    sizes = {"data.source": str(text), "data.samples": 5, "data.sequence_length": 512}
    config = build_config(options={"ratio": 0.3, **sizes, **more})
    most = counted(monkeypatch)
    assert_same_folder(*both_ways(dense, config, tmp_path, monkeypatch))
    of_a_layer = len(list(decoder_layers(tiny_model(name))[0].parameters()))
    assert 0 < max(most) < of_a_layer + 2, "FLAP gives a layer two biases"


@pytest.mark.parametrize("reconstruct", ["none", "least_squares"])
@pytest.mark.parametrize("name", ["llama-mha-bias", "granite", "phi3"])
def test_a_stream_is_rotated_from_file_to_file(
    name: str, reconstruct: str, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(name)
    dense = write_model(model.to(torch.bfloat16), tmp_path / "dense")
    sizes = {"data.source": str(text), "data.samples": 6, "data.sequence_length": 64, "stages.after": []}
    options = {"method": "pca", "ratio": 0.25, "hidden_multiple": 4, "cut.reconstruct": reconstruct, **sizes}
    most = counted(monkeypatch)
    assert_same_folder(*both_ways(dense, build_config(options=options), tmp_path, monkeypatch))
    assert 0 < max(most) < len(list(decoder_layers(tiny_model(name))[0].parameters()))


@pytest.mark.parametrize(("name", "axes"), [
    ("llama", ["heads", "ffn"]), ("phi", ["ffn", "hidden"]), ("gemma3", ["hidden"]), ("opt", ["heads", "ffn"]),
])  # fmt: skip
def test_a_reconstruction_holds_one_layer(
    name: str, axes: list[str], tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = dense_folder(tmp_path / "dense", name, torch.bfloat16)
    sizes = {"data.source": str(text), "data.samples": 6, "data.sequence_length": 64, "score.axes": axes}
    options = {"method": "magnitude", "ratio": 0.2, "cut.reconstruct": "least_squares", **sizes}
    most = counted(monkeypatch)
    folders = both_ways(dense, build_config(options=options), tmp_path, monkeypatch)
    assert_same_folder(*folders)
    assert 0 < max(most) < len(list(decoder_layers(tiny_model(name))[0].parameters()))
    solved = read_pruning_json(folders[0]).provenance["report"]["reconstruction"]["parts"]
    assert any(part["ridge"] is not None for part in solved)
    assert not list(tmp_path.glob(".*")), "what was kept for the cut is gone"


VERIFIED: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"a plan for {name}": (name, {"plan": ""}) for name in ("llama", "phi", "gemma3", "opt", "phi3")},
    "biases of FLAP": ("llama", {"method": "flap", "ratio": 0.2}),
    "rotated and solved": ("phi3", {"method": "pca", "ratio": 0.25, "hidden_multiple": 4, "stages.after": []}),
    "merged": ("llama", {"method": "laco", "ratio": 0.5}),
}  # fmt: skip


@pytest.mark.parametrize("case", VERIFIED)
def test_both_sides_of_the_cut_are_measured_from_the_files(
    case: str, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures are those of the run in memory, to the bit, whatever was changed before the cut."""
    name, more = VERIFIED[case]
    dense = dense_folder(tmp_path / "dense", name, torch.bfloat16)
    if "plan" in more:
        more = {"plan": str(plan_file(tmp_path, name))}
    sizes = {"data.source": str(text), "data.samples": 4, "data.sequence_length": 64, "verify": True}
    most = matrices_at_calls(monkeypatch)
    folders = both_ways(dense, build_config(options={**sizes, **more}), tmp_path, monkeypatch)
    assert_same_folder(*folders)
    plan, facts = read_pruning_json(folders[0]).plan, read_pruning_json(folders[0]).provenance
    assert plan is not None
    verified = facts["report"]["verified"]
    assert verified["compacted_perplexity"] == pytest.approx(verified["masked_perplexity"], rel=2e-2)
    assert verified["masked_perplexity"] > 1
    assert len(most) == 2 * (plan.dense.num_layers + len(plan.layers)), "two samples through both models"
    assert 0 < max(most) <= sum(p.ndim > 1 for p in decoder_layers(tiny_model(name))[0].parameters())


def test_shards_are_split_as_the_source_is(tmp_path: Path) -> None:
    dense = dense_folder(tmp_path / "dense")
    (dense / "model.safetensors").unlink()
    tiny_model("llama").save_pretrained(dense, max_shard_size="40KB")
    largest = max(path.stat().st_size for path in dense.glob("*.safetensors"))
    pipeline.prune_checkpoint(
        dense, build_config(options={"plan": str(plan_file(tmp_path, "llama", "ffn"))}), out=tmp_path / "out"
    )
    written = sorted(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(written) > 2
    assert written[-1] < largest + 2000, "a header may be longer"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len(written)


@pytest.mark.parametrize(("more", "why"), [
    (["--trust-remote-code"], "code of its own"),
    (["--method", "taylor", "--set", "score.layerwise=false"], "score.layerwise is false"),
    (["--method", "loraprune"], "loraprune holds the LoRA factors"),
])  # fmt: skip
def test_what_cannot_stream_says_why(more: list[str], why: str, tmp_path: Path, text: Path) -> None:
    dense = dense_folder(tmp_path / "dense")
    method = [] if "--method" in more else ["--method", "magnitude"]
    sizes = ["--calibration", text, "--samples", "4", "--sequence-length", "32", "--ratio", "0.3"]
    result = run("prune", dense, *method, *sizes, *more, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    notes = read_pruning_json(tmp_path / "out").provenance["report"]["notes"]
    assert [note for note in notes if why in note and note.startswith("The whole model was in memory")]
    assert NOTE not in notes


def test_axes_that_a_method_does_not_score_from_disk_are_named() -> None:
    config = build_config(options={"method": "flap", "score.axes": ["hidden"], "cut.reconstruct": "none"})
    assert get_method("flap").streaming_obstacle(config) == "flap scores hidden of the model as a whole"


@pytest.mark.parametrize("method", ["magnitude", "taylor", "obs"])
def test_the_command_says_that_it_streamed_and_a_dry_run_gives_its_plan(
    method: str, tmp_path: Path, text: Path
) -> None:
    dense = dense_folder(tmp_path / "dense")
    sizes = [] if method == "magnitude" else ["--calibration", text, "--samples", "4", "--sequence-length", "32"]
    arguments = ["prune", dense, "--method", method, "--ratio", "0.1", *sizes]
    result = run(*arguments, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "Streamed from file to file" in " ".join(result.stdout.split())
    dry = run(*arguments, "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert json.loads(dry.stdout) == read_pruning_json(tmp_path / "out").plan.to_dict()  # type: ignore[union-attr]


def test_a_hub_id_is_streamed_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, repository = "0123456789" * 4, tmp_path / "hub" / "models--somebody--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    dense = dense_folder(repository / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = build_config(options={"plan": str(plan_file(tmp_path, "llama"))})
    result = pipeline.prune_checkpoint("somebody/tiny", config, out=tmp_path / "out")
    assert NOTE in result.notes
    assert read_pruning_json(tmp_path / "out", verify_files=True).provenance["source"] == "somebody/tiny"
    pipeline.prune_checkpoint(dense, config, out=tmp_path / "of-folder")
    assert_same_tensors(tmp_path / "out" / "model.safetensors", tmp_path / "of-folder" / "model.safetensors")
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_an_interrupted_run_goes_on_from_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = dense_folder(tmp_path / "dense")
    config = build_config(options={"method": "magnitude", "ratio": 0.3})
    with monkeypatch.context() as patch:

        def stops(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr("pyprune.run.cut_on_disk.write_shards", stops)
        with pytest.raises(KeyboardInterrupt):
            pipeline.prune_checkpoint(dense, config, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with monkeypatch.context() as patch:
        patch.setattr("pyprune.methods.score.base.decide_by_scores", stops)
        resumed = pipeline.prune_checkpoint(dense, config, out=tmp_path / "out", resume=True)
    whole = pipeline.prune_checkpoint(dense, config, out=tmp_path / "whole")
    assert resumed.plan == whole.plan
    assert_same_tensors(tmp_path / "out" / "model.safetensors", tmp_path / "whole" / "model.safetensors")
