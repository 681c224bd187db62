"""The steps of compare.py: what each does to a model, and what that cost."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench._settings import Settings, shared_training
from bench.quality.compare_cases import CUTS, Action
from pyprune.runtime.records import Json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pyprune.config.train import TrainConfig
    from pyprune.data.tokens import Batch
    from pyprune.plan import PrunePlan


@dataclass(frozen=True)
class Steps:
    """The steps of one case and seed.

    Attributes:
        dense: the teacher of distillation.
        settings: how much is trained.
        samples: kind of text -> what is trained on or reconstructed on: prose, mixture.
        seed: of the order of training.
        method: that regularises before the cut; empty = none.
        plan: what stays; None = nothing is cut.
    """

    dense: PreTrainedModel
    settings: Settings
    samples: Callable[[str], Batch]
    seed: int
    method: str = ""
    plan: PrunePlan | None = None

    def do(self, action: Action, model: PreTrainedModel) -> Json:
        """Take one step in place; return its costs and what it reported."""
        cost: Json = {"name": action}
        with _costs(cost):
            cost |= self._reconstruct(action, model) if action in CUTS else self._train(action, model)
        return cost

    def _reconstruct(self, action: Action, model: PreTrainedModel) -> Json:
        """Cut, and before it solve what stays, where the action says so."""
        from pyprune.config.cut import ReconstructConfig
        from pyprune.cut.compact import compact_
        from pyprune.cut.reconstruct import reconstruct_

        assert self.plan is not None
        found: Json = {}
        if action != "cut":
            text = self.samples("prose" if action == "reconstruct-prose" else "mixture")
            options = ReconstructConfig(dtype="bfloat16" if action.endswith("bfloat16") else "float32")
            report = reconstruct_(model, self.plan, text, options=options)
            found = {"solved": report.solved, "systems": len(report.parts), "notes": report.notes()}
        compact_(model, self.plan)
        return found

    def _train(self, action: Action, model: PreTrainedModel) -> Json:
        from pyprune.train.recover import finetune

        text = self.samples("mixture" if action.endswith("mixture") else "prose")
        if action in ("finetune", "finetune-mixture"):
            report: Any = finetune(model, text, self._training())
        elif action.startswith("finetune-lean"):
            lean = replace(self._training(), memory="lean", dtype="bfloat16")
            report = finetune(model, text, replace(lean, micro_batch_size=1) if action.endswith("passes") else lean)
        elif action in ("papers", "anneal"):
            report = self._regularise(action, model, text)
        else:
            report = self._recover(action, model, text)
        facts = report.to_dict()
        history = facts.get("train", facts).get("history", [])
        return {
            "first_loss": history[0]["lm_loss"] if history else None,
            "last_loss": history[-1]["lm_loss"] if history else None,
            "warnings": report.warnings,
        }

    def _training(self) -> TrainConfig:
        return shared_training(self.settings, self.seed)

    def _regularise(self, action: Action, model: PreTrainedModel, text: Batch) -> Any:
        from pyprune.methods.registry import get_method, preset

        assert self.plan is not None
        name = self.method
        papers, annealed = preset(f"{name}-paper").options, preset(f"{name}-anneal").options
        options: Any = papers if action == "papers" else annealed
        regularise: Callable[..., Any] | None = get_method(name).regularise
        assert regularise is not None
        return regularise(model, text.ids, self.plan, replace(options, train=self._training()))

    def _recover(self, action: Action, model: PreTrainedModel, text: Batch) -> Any:
        from pyprune.config.recoveries import recovery
        from pyprune.config.train import DistillConfig, RecoverConfig
        from pyprune.runtime.device import DTYPES
        from pyprune.train.recover import recover

        if action == "lora":
            papers = recovery("alpaca-lora").recover
            training = replace(self._training(), learning_rate=papers.train.learning_rate)
            return recover(model, text, replace(papers, train=training))
        alpha = 0.5 if action.startswith("both") else 1.0
        config = RecoverConfig(adapters="none", distill=DistillConfig(alpha=alpha), train=self._training())
        teacher = copy.deepcopy(self.dense).to(DTYPES[self.settings.dtype])
        return recover(model, text, config, teacher=teacher)


@contextmanager
def _costs(into: Json) -> Iterator[None]:
    """Add wall and processor seconds and the peak memory of a block to a record."""
    before = _reset_peak()
    began, worked = time.monotonic(), time.process_time()
    yield
    into["seconds"] = round(time.monotonic() - began, 1)
    into["cpu_seconds"] = round(time.process_time() - worked, 1)
    if before is not None:
        into["peak_bytes"] = _status("VmHWM") - before


def _reset_peak() -> int | None:
    """Let Linux count the peak of resident memory from here; bytes held now, or None where it cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _status("VmRSS")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
