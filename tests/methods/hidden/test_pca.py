"""PCA: its directions are the principal ones, its cut loses less than one of plain channels, and runs repeat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from pyprune import make_plan, prune, prune_
from pyprune.checkpoint.load import load_model
from pyprune.checkpoint.record import read_pruning_json
from pyprune.config.run import PruneConfig, ReconstructCheckpointConfig, RecoverCheckpointConfig
from pyprune.errors import ConfigError, DataError, ScoreError, UnsupportedModelError
from pyprune.families import family_for, named_axes
from pyprune.methods.hidden.pca import PcaOptions
from pyprune.methods.hidden.pca.directions import principal_directions, stream_moment
from pyprune.methods.registry import preset, read_config
from pyprune.probe.energy import stream_energy
from pyprune.run.reconstruct import reconstruct_checkpoint
from pyprune.run.recover import recover_checkpoint
from pyprune.runtime import processes
from tests._support.cli import run
from tests._support.compare import assert_same_logits
from tests._support.models import tiny_batch, tiny_model
from tests._support.text import write_model, write_text

SAMPLES = tiny_batch(1, 24, 32)
FRESH = tiny_batch(9, 6, 32)
KEPT = 36


def config(**changes: Any) -> PruneConfig:
    """The cut alone, of a quarter of 48 channels."""
    return read_config({"method": "pca", "ratio": 0.25, "hidden_multiple": 4, "stages": {"before": []}, **changes})


def samples(ids: Tensor = SAMPLES) -> dict[str, Tensor]:
    return {"data": ids}


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor = FRESH) -> Tensor:
    return model(ids, use_cache=False).logits


def off(model: PreTrainedModel, expected: Tensor) -> float:
    """How far the logits on fresh text are from those expected, relative to their size."""
    return float((logits(model) - expected).norm() / expected.norm())


@torch.no_grad()
def narrowed(strengths: Tensor, name: str = "llama-mha-bias") -> PreTrainedModel:
    """A model whose stream has directions, none of them a channel, of these strengths: its writers are projected."""
    model = tiny_model(name)
    basis = torch.linalg.qr(torch.randn(48, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(4))).Q
    spread = (basis * strengths) @ basis.T
    for param in named_axes(model):
        if param.row.role in ("embedding", "writer"):
            dim = param.axis_dim("hidden")
            assert dim is not None
            along = param.parameter.data.movedim(dim, -1)
            along.copy_(along.double() @ spread)
    return model


def low_rank() -> PreTrainedModel:
    return narrowed((torch.arange(48) < KEPT).double())


def correlated() -> PreTrainedModel:
    return narrowed(0.9 ** torch.arange(48).double())


def by_energy(reconstruct: str = "none") -> PruneConfig:
    """The same cut of the strongest channels as they are."""
    own = {"method": "dress", "dress": {"select": "energy"}, "cut": {"reconstruct": reconstruct}}
    return read_config({"ratio": 0.25, "hidden_multiple": 4, "stages": {"before": []}, **own})


# directions


@pytest.mark.parametrize("name", ["llama", "granite", "phi3"])
@pytest.mark.parametrize("alike", [False, True])
def test_the_moment_is_that_of_the_streams_between_the_layers(name: str, alike: bool) -> None:
    model = tiny_model(name)
    with torch.no_grad():
        streams = model(SAMPLES, output_hidden_states=True, use_cache=False).hidden_states[:-1]
    expected = torch.zeros(48, 48, dtype=torch.float64)
    for stream in streams:
        x = stream.flatten(0, 1).double()
        x = x / x.norm(dim=1, keepdim=True) if alike else x
        expected += x.T @ x / x.square().sum()
    found = stream_moment(model, SAMPLES, alike=alike)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert float(found.trace()) == pytest.approx(len(streams))
    if not alike:
        torch.testing.assert_close(found.diagonal(), stream_energy(model, SAMPLES), rtol=1e-6, atol=0)


def test_processes_that_cut_together_take_the_first_one_s_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[Tensor] = []

    def from_first(value: Any) -> Any:
        if isinstance(value, Tensor):
            shared.append(value)
        return value

    monkeypatch.setattr(processes, "from_first", from_first)
    prune_(tiny_model("llama"), samples(), config())
    assert shared == [], "one process has its own"
    monkeypatch.setattr(processes, "count", lambda: 2)
    prune_(tiny_model("llama"), samples(), config())
    assert [rotation.shape for rotation in shared] == [(48, 48)]


@pytest.mark.parametrize("alike", [False, True])
def test_the_first_directions_hold_more_energy_than_any_channels(alike: bool) -> None:
    model = tiny_model("llama")
    moment = stream_moment(model, SAMPLES, alike=alike)
    rotation = principal_directions(moment)
    torch.testing.assert_close(rotation.T @ rotation, torch.eye(48, dtype=torch.float64))
    along = (rotation.T @ moment @ rotation).diagonal()
    assert torch.equal(along.argsort(descending=True, stable=True), torch.arange(48))
    for count in (1, 12, 36, 47):
        assert along[:count].sum() > moment.diagonal().topk(count).values.sum()


def test_each_direction_has_the_sign_that_makes_its_largest_component_positive() -> None:
    moment = stream_moment(tiny_model("llama"), SAMPLES, alike=True)
    rotation = principal_directions(moment)
    assert (rotation.gather(0, rotation.abs().argmax(0, keepdim=True)) > 0).all()
    signs = torch.where(torch.arange(48) % 2 == 0, 1.0, -1.0).double()
    mirrored = principal_directions(signs[:, None] * moment * signs)
    torch.testing.assert_close(mirrored.abs(), rotation.abs(), rtol=1e-5, atol=1e-7)
    assert (mirrored.gather(0, mirrored.abs().argmax(0, keepdim=True)) > 0).all()


# the cut


def test_a_stream_of_low_rank_is_cut_without_a_loss() -> None:
    dense = low_rank()
    expected = logits(dense)
    result = prune_(dense, samples(), config())
    assert dense.config.hidden_size == KEPT
    assert result.plan.hidden == tuple(range(KEPT))
    assert_same_logits(logits(dense), expected, tolerance=1e-4)
    (note,) = [note for note in result.notes if "The stream was rotated" in note]
    assert f"the first {KEPT} directions hold 100.000% of its energy" in note
    plain = low_rank()
    prune_(plain, samples(), by_energy())
    assert off(plain, expected) > 0.1


@pytest.mark.parametrize("reconstruct", ["none", "least_squares"])
def test_a_correlated_stream_loses_less_than_by_its_strongest_channels(reconstruct: str) -> None:
    text = samples(tiny_batch(1, 96, 32))
    rotated, plain = correlated(), correlated()
    expected = logits(rotated)
    result = prune_(rotated, text, config(cut={"reconstruct": reconstruct}))
    prune_(plain, text, by_energy(reconstruct))
    assert off(rotated, expected) < 0.7 * off(plain, expected)
    if reconstruct == "least_squares":
        assert result.reconstruction is not None
        assert {part["role"] for part in result.reconstruction["parts"]} == {"writers", "readers"}
        assert any(part["ridge"] is not None for part in result.reconstruction["parts"])


def test_a_reconstruction_follows_the_rotated_stream() -> None:
    text = samples(tiny_batch(1, 96, 32))
    plain, solved = tiny_model("llama"), tiny_model("llama")
    expected = logits(plain)
    prune_(plain, text, config())
    prune_(solved, text, config(cut={"reconstruct": "least_squares"}, verify=True))
    assert off(solved, expected) < 0.95 * off(plain, expected)


def test_both_sides_of_the_cut_agree() -> None:
    verified = prune_(tiny_model("qwen3"), samples(), config(verify=True)).verified
    assert verified is not None
    assert verified["compacted_perplexity"] == pytest.approx(verified["masked_perplexity"], rel=1e-4)


def test_two_runs_are_equal_bit_for_bit() -> None:
    models = [tiny_model("llama3-rope") for _ in range(2)]
    for model in models:
        prune_(model, samples(), config(cut={"reconstruct": "least_squares"}))
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


def test_tokens_can_count_alike() -> None:
    cut = {}
    for tokens in ("energy", "alike"):
        model = tiny_model("llama")
        result = prune_(model, samples(), config(pca={"tokens": tokens}))
        assert result.decision["pca"]["tokens"] == tokens
        cut[tokens] = logits(model)
    assert not torch.allclose(cut["energy"], cut["alike"], atol=1e-3)


def test_deciding_leaves_the_weights_and_a_cut_without_pruning_too() -> None:
    model = tiny_model("llama")
    before = [p.detach().clone() for p in model.parameters()]
    assert make_plan(model, SAMPLES, config()).hidden == tuple(range(KEPT))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


# what is refused, and what is said


@pytest.mark.parametrize("name", ["opt", "gemma3", "llama-head-dim"])
def test_models_that_cannot_be_rotated_are_refused_before_anything_is_trained(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"cannot be rotated: .*choose another method"):
        prune_(tiny_model(name), samples(), config(stages={"before": ["finetune"]}))


def test_a_model_that_does_more_than_its_table_says_is_found_out() -> None:
    model = tiny_model("llama")
    scale = torch.linspace(0.1, 2.0, 48)
    model.model.layers[1].register_forward_hook(lambda module, args, output: output * scale)
    with pytest.raises(UnsupportedModelError, match="changed the logits by"):
        prune_(model, samples(), config())


def test_refusals_and_warnings() -> None:
    with pytest.raises(DataError, match="are found on calibration text"):
        prune_(tiny_model("llama"), {}, config())
    few = prune_(tiny_model("llama"), samples(tiny_batch(1, 2, 16)), config())
    assert any("has 32 tokens for 48 directions" in warning for warning in few.warnings)
    distill = {"alpha": 0.5, "hidden": 0.1}
    with pytest.raises(ConfigError, match=r"recover\.distill\.hidden is 0\.1.*'pca' rotates them"):
        config(stages={"before": [], "after": ["recover"]}, recover={"distill": distill})
    config(stages={"before": [], "after": ["recover"]}, recover={"distill": {**distill, "hidden": 0.0}})
    broken = tiny_model("llama")
    with torch.no_grad():
        broken.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(ScoreError, match="not finite"):
        prune_(broken, samples(), config())


def test_the_preset_reads_a_mixture_whose_tokens_count_alike() -> None:
    found = preset("pca")
    assert found.data.source == "mixture"
    assert found.options == PcaOptions(tokens="alike")


# runs with a folder


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(correlated(), tmp_path_factory.mktemp("dense") / "dense")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt", words=9000)


def arguments(dense: Path, text: Path, out: Path, *more: str) -> list[str | Path]:
    training = {"steps": 2, "batch_size": 2, "micro_batch_size": 2, "warmup_steps": 0, "dtype": "float32"}
    small = {"hidden_multiple": 12, **{f"recover.train.{name}": value for name, value in training.items()}}
    sets = [part for key, value in small.items() for part in ("--set", f"{key}={value}")]
    data = ["--calibration", text, "--samples", "64", "--sequence-length", "32"]
    return ["prune", dense, "--method", "pca-trained", "--out", out, *data, *sets, *more]


@pytest.fixture(scope="module")
def pruned(dense: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command writes with the method's own options, on less text and with two steps of training.

    The size is a multiple of the 6 heads, which LLaMA wants.
    """
    out = tmp_path_factory.mktemp("pruned") / "out"
    done = run(*arguments(dense, text, out))
    assert done.exit_code == 0, done.output
    assert "The stream was rotated" in " ".join(done.stdout.split())
    return out


def test_the_command_writes_a_stock_checkpoint(pruned: Path, dense: Path) -> None:
    record = read_pruning_json(pruned, verify_files=True)
    assert record.plan is not None
    assert record.plan.hidden == tuple(range(KEPT))
    report = record.provenance["report"]
    assert report["decision"]["rotated"] is True
    assert any(part["ridge"] is not None for part in report["reconstruction"]["parts"])
    assert [stage["name"] for stage in report["stages"]] == ["after-0-recover"]
    model, _ = load_model(pruned)
    assert model.config.hidden_size == KEPT
    assert report["compact"]["stock"]
    expected = logits(load_model(dense)[0], FRESH % 200 + 3)
    assert float((logits(model, FRESH % 200 + 3) - expected).norm() / expected.norm()) < 0.5


@pytest.mark.parametrize(("loaded", "last"), [
    (True, "pyprune.run.stages.Stages.train_after_the_cut"), (False, "pyprune.run.cut_on_disk.write_shards"),
])  # fmt: skip
def test_an_interrupted_run_resumes_to_the_same_weights(
    loaded: bool, last: str, dense: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the cut in memory, and behind the one from file to file."""
    if loaded:
        monkeypatch.setattr("pyprune.run.prune.loading_reason", lambda *_, **__: "In memory.")
    settings = read_config(
        {
            **config(cut={"reconstruct": "least_squares"}, verify=True).to_dict(),
            "data": {"source": str(text), "samples": 32, "sequence_length": 32},
        }
    )
    prune(dense, settings, out=tmp_path / "straight")

    def interrupt(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(last, interrupt)
        with pytest.raises(KeyboardInterrupt):
            prune(dense, settings, out=tmp_path / "again")
    assert (tmp_path / ".again.work" / "decision.json").exists()
    prune(dense, settings, out=tmp_path / "again", resume=True)
    straight, again = (load_file(tmp_path / name / "model.safetensors") for name in ("straight", "again"))
    assert straight.keys() == again.keys()
    assert all(torch.equal(values, again[name]) for name, values in straight.items())


def test_a_replayed_plan_is_cut_without_the_rotation_and_says_so(pruned: Path) -> None:
    plan = read_pruning_json(pruned).plan
    assert plan is not None
    model = correlated()
    result = prune_(model, samples(), config(plan=str(pruned)))
    assert any("replayed without what pca does to the weights" in warning for warning in result.warnings)
    other = prune_(
        correlated(), samples(), read_config({"method": "none", "plan": str(pruned), "stages": {"before": []}})
    )
    assert any("those of a rotated stream" in warning for warning in other.warnings)
    assert "rotated" not in other.decision
    embedding = correlated().get_input_embeddings().weight[:, :KEPT]
    scaled = model.get_input_embeddings().weight / (KEPT / 48) ** 0.5
    torch.testing.assert_close(scaled, embedding)


def test_what_compares_channels_with_the_dense_model_is_refused(
    pruned: Path, dense: Path, text: Path, tmp_path: Path
) -> None:
    data = {"source": str(text), "samples": 8, "sequence_length": 32}
    with pytest.raises(ConfigError, match=r"A reconstruction compares the hidden channels .* were rotated"):
        reconstruct_checkpoint(
            pruned, ReconstructCheckpointConfig.from_dict({"data": data}), dense=dense, out=tmp_path / "a"
        )
    train = {"steps": 1, "batch_size": 2, "micro_batch_size": 2, "warmup_steps": 0, "dtype": "float32"}
    recovery = {"data": data, "recover": {"rank": 2, "distill": {"alpha": 0.5, "hidden": 0.1}, "train": train}}
    with pytest.raises(ConfigError, match=r"recover\.distill\.hidden compares the hidden channels .* were rotated"):
        recover_checkpoint(pruned, RecoverCheckpointConfig.from_dict(recovery), teacher=dense, out=tmp_path / "b")
    recovery["recover"]["distill"]["hidden"] = 0.0
    report = recover_checkpoint(pruned, RecoverCheckpointConfig.from_dict(recovery), teacher=dense, out=tmp_path / "b")
    assert report.steps == 1
    assert family_for(load_model(tmp_path / "b")[0]).model_type == "llama"
