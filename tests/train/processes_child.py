"""What several processes train together, and what one does: run by torchrun, or called.

    torchrun --standalone --nproc-per-node 2 tests/train/processes_child.py OUT CASE...

Every process writes the weights that it has in the end to OUT/CASE-PROCESS.pt, the first one also its report.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench._timing import extra_peak
from pyprune.config.train import DistillConfig, RecoverConfig, TrainConfig
from pyprune.cut.reconstruct import reconstruct_
from pyprune.families import family_for
from pyprune.methods.regularise.dress import DressOptions
from pyprune.methods.regularise.dress.training import DressObjective
from pyprune.methods.regularise.elder import ElderOptions, GateConfig
from pyprune.methods.regularise.elder.gates import GateReport, learn_layer_gates
from pyprune.methods.regularise.elder.penalty import ElderObjective
from pyprune.runtime import processes
from pyprune.runtime.processes import Division
from pyprune.runtime.shapes import to_shapes_
from pyprune.train.loop import train
from pyprune.train.objective import Objective, TrainReport
from pyprune.train.recover import recover
from tests._support.compiled import graphs, only_traced
from tests._support.models import tiny_batch, tiny_model
from tests._support.plans import axis_plans
from tests.train.test_memory import LENGTH, SHAPES

REMOVED = [1, 5, 30, 40]
"""Hidden channels: some of each half, none of the middle third."""
CONFIG = TrainConfig(
    steps=6, batch_size=12, micro_batch_size=6, learning_rate=1e-2, optimizer="sgd", max_grad_norm=None, memory="full"
)
ADAM = replace(CONFIG, optimizer="fused_adamw", learning_rate=1e-3, max_grad_norm=1.0, micro_batch_size=4)
LEAN = replace(ADAM, memory="lean", dtype="bfloat16")
MEASURED = TrainConfig(
    steps=2, batch_size=8, micro_batch_size=4, dtype="bfloat16", memory="full", optimizer="fused_adamw"
)
STORED, SENT = "stored-", "sent-"
"""Cases of weights that all processes have from files, and of those that the first one sends."""
SAMPLES = tiny_batch(batch=37, length=16)
DRESS = DressOptions(penalty_weight=0.1, norm="l2", train=ADAM)


class _Stop(Objective):
    """Ends after a step, as a process that is lost does."""

    def after_optimizer_step(self, model: Any, optimizer: Any, step: int, learning_rate: float) -> None:
        if step == 5:
            raise KeyboardInterrupt


def _model() -> Any:
    model = tiny_model("llama")
    how = processes.division()
    if how is not None and how.weights == "first" and not processes.first():
        to_shapes_(model)
    return model


def _trained(config: TrainConfig, objective: Objective | None = None, **options: Any) -> Any:
    model = _model()
    return model, train(model, SAMPLES, config, objective, **options)


def _lean(resumed_from: Path | None = None) -> Any:
    go_on = {} if resumed_from is None else {"checkpoint_dir": resumed_from, "resume": True}
    return _trained(replace(LEAN, checkpoint_interval=2), **go_on)


def _compiled() -> Any:
    before = graphs()
    with only_traced(), warnings.catch_warnings(action="ignore"):  # torch's own, while it traces
        found = _trained(replace(ADAM, compile=True))
    assert graphs() > before + 1, "nothing was compiled but what tries the compiler"
    return found


def _recovered(adapters: Any, distill: DistillConfig | None = None, dropout: float = 0.0) -> Any:
    model = _model()
    config = RecoverConfig(adapters=adapters, rank=2, distill=distill, dropout=dropout, train=ADAM)
    return model, recover(model, SAMPLES, config, teacher=tiny_model("llama") if distill else None)


def _gates() -> Any:
    gates = GateConfig(batch_size=12, first_round_steps=4, round_steps=2, learning_rate=3e-2, penalty_weight=0.05)
    model = _model()
    return model, learn_layer_gates(model, SAMPLES, 2, ElderOptions(gates=gates))


def _interrupted(config: TrainConfig, folder: Path) -> Any:
    model = tiny_model("llama")
    try:
        train(model, SAMPLES, replace(config, checkpoint_interval=2), _Stop(), checkpoint_dir=folder)
    except KeyboardInterrupt:
        return tiny_model("llama"), None  # weights that are lost


def _resumed(folder: Path) -> Any:
    return _trained(replace(ADAM, checkpoint_interval=2), checkpoint_dir=folder, resume=True)


def peak_bytes() -> int:
    """Most bytes that torch's allocator holds for a step's training of every weight, weights included."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPES.to_dict()))
    whole = sum(p.nbytes for p in model.parameters())
    ids = torch.randint(0, SHAPES.vocab_size, (MEASURED.batch_size, LENGTH))
    # The profiler does not see the whole weights go, which were there before it; at the peak of parts they are gone.
    extra = extra_peak(lambda: train(model, ids, MEASURED), torch.device("cpu"))
    return extra if processes.is_divided() else whole + extra


def _reconstructed(kinds: list[str] | None, batch_size: int) -> Any:
    model = tiny_model("llama")
    plan = axis_plans(family_for(model).plan(model.config))["everything"]
    return model, reconstruct_(model, plan, tiny_batch(batch=16, length=32), kinds=kinds, batch_size=batch_size)


CASES: dict[str, Callable[[Path], Any]] = {
    "sgd": lambda _: _trained(CONFIG),
    "checkpointing": lambda _: _trained(replace(CONFIG, gradient_checkpointing=True)),
    "early-stop": lambda _: _trained(replace(ADAM, early_stop_patience=2, validation_interval=2)),
    "compiled": lambda _: _compiled(),
    "lean": lambda _: _lean(),
    "dress": lambda _: _trained(ADAM, DressObjective(REMOVED, DRESS)),
    "dress-torch": lambda _: _trained(replace(ADAM, optimizer="adamw"), DressObjective(REMOVED, DRESS)),
    "dress-one-half": lambda _: _trained(ADAM, DressObjective([1, 5], DRESS)),
    "dress-prox": lambda _: _trained(ADAM, DressObjective(REMOVED, replace(DRESS, solver="prox", prox_step=1.0))),
    "dress-anneal": lambda _: _trained(ADAM, DressObjective(REMOVED, replace(DRESS, schedule="anneal"))),
    "elder": lambda _: _trained(ADAM, ElderObjective([1, 2], ElderOptions(penalty_weight=0.1, train=ADAM))),
    "elder-anneal": lambda _: _trained(ADAM, ElderObjective([1], ElderOptions(schedule="anneal", train=ADAM))),
    "lora": lambda _: _recovered("lora"),
    "distill": lambda _: _recovered("none", DistillConfig(alpha=0.5, hidden=0.5)),
    "reconstruct": lambda _: _reconstructed(["a", "b"] * 8, 2),
    "reconstruct-one-judge": lambda _: _reconstructed(None, 4),
    "stored-lora": lambda _: _recovered("lora"),
    "stored-distill": lambda _: _recovered("none", DistillConfig(alpha=0.5, hidden=0.5)),
    "sent-gates": lambda _: _gates(),
    "sent-sgd": lambda _: _trained(CONFIG),
    "sent-dress": lambda _: _trained(ADAM, DressObjective(REMOVED, DRESS)),
    "sent-lora": lambda _: _recovered("lora"),
    "sent-distill": lambda _: _recovered("none", DistillConfig(alpha=0.5, hidden=0.5)),
    "dropout": lambda _: _recovered("lora", dropout=0.5),
    "anneal-early-stop": lambda _: _trained(
        replace(ADAM, early_stop_patience=1, validation_interval=1),
        DressObjective([1, 5], replace(DRESS, schedule="anneal", anneal_share=0.8)),
        validation=SAMPLES[:1],
    ),
    "memory": lambda _: (tiny_model("llama"), peak_bytes()),
    "interrupted": lambda out: _interrupted(ADAM, out / "states"),
    "resumed": lambda out: _resumed(out / "states"),
    "lean-interrupted": lambda out: _interrupted(LEAN, out / "lean-states"),
    "lean-resumed": lambda out: _lean(out / "lean-states"),
}


def _where(name: str) -> Any:
    if name.startswith(STORED):
        return "files"
    return "first" if name.startswith(SENT) else "everybody"


def results(out: Path, names: list[str]) -> None:
    """Run cases, and write what came out."""
    for name in names:
        with processes.divide_training(Division(weights=_where(name))):
            model, report = CASES[name](out)
        weights = {n: p.detach() for n, p in model.named_parameters()}
        if isinstance(report, TrainReport | GateReport):
            report = report.to_dict()
        facts = report if isinstance(report, dict) else {"peak": report}
        torch.save({"weights": weights, "report": facts}, out / f"{name}-{processes.number()}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with processes.join_processes("prune", may_divide=True):
        results(Path(sys.argv[1]), sys.argv[2:])
