"""Text that a run will need is looked up before anything is done for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyprune import build_config, build_reconstruction, build_recovery, evaluate, prune, reconstruct, recover
from pyprune.config.data import DataConfig
from pyprune.errors import DataError
from pyprune.fit.options import FitOptions
from pyprune.fit.search import Fitting
from pyprune.run.prune import plan_checkpoint
from tests._support.models import tiny_model
from tests._support.text import write_model
from tests.data._fakes import fake_datasets


@pytest.mark.parametrize("what", ["prune", "plan", "recover", "reconstruct", "evaluate", "fit"])
def test_text_is_looked_up_before_a_model_is_loaded(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes of loading and scoring come before the text is read, and a machine without network has none."""
    calls = fake_datasets(monkeypatch, OSError("no network"))
    folder = write_model(tiny_model("llama"), tmp_path / "dense")

    def too_late(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read before the text was looked up")

    monkeypatch.setattr("pyprune.checkpoint.load.AutoModelForCausalLM.from_pretrained", too_late)
    monkeypatch.setattr("pyprune.checkpoint.shards.TensorFiles.read", too_late)
    data = {"data.source": "wikitext2", "data.samples": 2, "data.sequence_length": 16}
    config = build_config(options={"method": "taylor", **data})
    steps: dict[str, Callable[[], Any]] = {
        "prune": lambda: prune(folder, config, out=tmp_path / "out"),
        "plan": lambda: plan_checkpoint(folder, config),
        "recover": lambda: recover(folder, build_recovery(options=data), out=tmp_path / "out"),
        "reconstruct": lambda: reconstruct(
            folder, build_reconstruction(options=data), dense=folder, out=tmp_path / "out"
        ),
        "evaluate": lambda: evaluate(folder, ppl="wikitext2"),
        "fit": lambda: Fitting.of(folder, options=FitOptions(data=DataConfig(source="wikitext2")), cache=tmp_path),
    }
    with pytest.raises(DataError, match=r"'wikitext2' .* could not be loaded: .*no network"):
        steps[what]()
    assert calls[0][0] == "Salesforce/wikitext"
    assert not (tmp_path / "out").exists()
