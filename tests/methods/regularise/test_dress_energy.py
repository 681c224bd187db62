"""DReSS with ``select: energy``: the channels that carry least of the stream go, whatever their weights say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pyprune import prune
from pyprune.config.run import PruneConfig
from pyprune.cut.mask import masked
from pyprune.errors import DataError, ScoreError
from pyprune.families import family_for, named_axes
from pyprune.methods.base import PlanRequest
from pyprune.methods.registry import read_config
from pyprune.methods.regularise.dress import METHOD, DressOptions
from pyprune.methods.regularise.dress import training as dress
from pyprune.methods.regularise.dress.channels import select_channels
from pyprune.probe.energy import stream_energy
from pyprune.run.text import text_configs
from tests._support.models import one_of_each, tiny_batch, tiny_model
from tests._support.text import write_model, write_text

ENERGY = DressOptions(select="energy")
QUIET = (3, 17, 40)


@torch.no_grad()
def scale(model: PreTrainedModel, channels: tuple[int, ...], *, writers: float, readers: float) -> None:
    """Scale what writes to hidden channels, and what reads them."""
    for param in named_axes(model):
        dim = param.axis_dim("hidden")
        if dim is not None:
            factor = writers if param.row.role in ("embedding", "writer") else readers
            param.parameter.movedim(dim, 0)[list(channels)] *= factor


def quiet_model() -> PreTrainedModel:
    """Channels that hardly anything is written to, with weights so large in what reads them that their norms are
    the largest of all; every other channel carries the energy."""
    model = tiny_model("llama")
    scale(model, QUIET, writers=1e-2, readers=30.0)
    return model


def samples() -> Tensor:
    return tiny_batch(1, 8, 12)


def test_the_channels_of_least_energy_go_whatever_their_weights_are() -> None:
    model = quiet_model()
    assert select_channels(model, 3, ENERGY, samples()) == QUIET
    assert not set(QUIET) & set(select_channels(model, 24, DressOptions(select="scored")))
    config = PruneConfig(method="dress", ratio=0.1, hidden_multiple=1, options=ENERGY)
    decision = METHOD.decide(model, samples(), PlanRequest.of(model, config))
    assert set(QUIET) < set(decision.plan.removed_hidden)
    assert len(decision.plan.removed_hidden) == 4
    assert decision.details["select"] == "energy"


@pytest.mark.parametrize("family", one_of_each())
def test_the_energy_is_that_of_the_streams_between_the_layers(family: str) -> None:
    model, ids = tiny_model(family), samples()
    with torch.no_grad():
        streams = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[:-1]
    expected = torch.zeros(48, dtype=torch.float64)
    for stream in streams:
        energy = stream.double().square().sum((0, 1))
        expected += energy / energy.sum()
    found = stream_energy(model, ids)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert float(found.sum()) == pytest.approx(len(streams))


def test_a_masked_channel_has_no_energy() -> None:
    model = tiny_model("opt")
    plan = family_for(model).plan(model.config)
    with masked(model, plan.keep_hidden(set(plan.hidden) - set(QUIET))):
        energy = stream_energy(model, samples())
    assert (energy == 0).nonzero().flatten().tolist() == list(QUIET)


def test_the_order_of_the_text_does_not_count() -> None:
    model, ids = tiny_model("llama"), samples()
    model.train()
    whole = stream_energy(model, ids)
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    assert torch.equal(whole, stream_energy(model, ids)), "two runs are bit-equal"
    backwards = ids.flip(0)
    assert not torch.equal(ids, backwards)
    torch.testing.assert_close(stream_energy(model, backwards), whole, rtol=1e-6, atol=0)
    assert select_channels(model, 12, ENERGY, ids) == select_channels(model, 12, ENERGY, backwards)
    other_text = tiny_batch(77, 8, 12)
    assert not torch.equal(stream_energy(model, other_text), whole), "the text does count"


def test_it_reads_text_and_the_other_choices_do_not() -> None:
    assert METHOD.reads_text_with(ENERGY)
    assert not METHOD.reads_text_with(None)
    for select in ("last", "first", "segments", "explicit", "scored"):
        assert not METHOD.reads_text_with(DressOptions(select=select))
    with pytest.raises(DataError, match="give samples"):
        select_channels(tiny_model(), 3, ENERGY)


def test_a_stream_that_is_not_finite_is_refused() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.down_proj.weight")[5] = torch.nan
    with pytest.raises(ScoreError, match="not finite"):
        select_channels(model, 3, ENERGY, samples())


def test_an_interrupted_run_resumes_with_the_channels_it_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(quiet_model(), tmp_path / "dense")
    train = {"steps": 4, "batch_size": 2, "micro_batch_size": 1, "checkpoint_interval": 2}
    config = read_config(
        {
            "method": "dress",
            "ratio": 0.25,
            "data": {"source": str(write_text(tmp_path / "text.txt")), "samples": 6, "sequence_length": 32},
            "dress": {"select": "energy", "schedule": "anneal", "train": train},
        }
    )
    whole = prune(folder, config, out=tmp_path / "straight")
    assert set(QUIET) < set(whole.plan.removed_hidden)

    real = dress.DressObjective.before_step

    def interrupt(self: Any, model: Any, step: int) -> None:
        if step == 4:
            raise KeyboardInterrupt
        real(self, model, step)

    with monkeypatch.context() as patch:
        patch.setattr(dress.DressObjective, "before_step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prune(folder, config, out=tmp_path / "again")
    kept = json.loads((tmp_path / ".again.work" / "decision.json").read_text())
    assert "energy" in json.dumps(kept)
    assert prune(folder, config, out=tmp_path / "again", resume=True).plan == whole.plan
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("straight", "again")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(("select", "reads"), [("energy", True), ("last", False), ("scored", False)])
def test_text_is_drawn_only_for_a_choice_that_reads_it(select: str, reads: bool) -> None:
    untrained = {"method": "dress", "stages": {"before": []}, "dress": {"select": select}}
    assert bool(text_configs(read_config(untrained))) == reads
