r"""Training that torchrun divides among processes: what each of them holds, measured here and on paper.

    python -m bench.training.processes [--processes 1,2] [--steps 4]     # fine-tunes SmolLM2-135M on this machine
    python -m bench.training.processes --paper                          # LLaMA-2-70B on GPUs of 80 GB; measures nothing

Measured: one training of all weights (float32 moments, bfloat16 autocast, 8 x 256 tokens a step, clipping at 1, a copy
of the last good weights), through :func:`pyprune.train.loop.train`. Peaks are of torch's allocator in the first
process, from the whole model in memory to the whole model in memory again. The table also has the prediction of
:mod:`pyprune.train.memory` for the training itself. On one machine processes share cores and memory, so that
seconds say what dividing costs, not what it gains.

On paper: what :mod:`pyprune.train.memory` finds, for steps of 64 x 2048 tokens, one sequence in a forward pass, with
checkpointing. Records of measurements are appended to --jsonl.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench._command import count, counts, exit_status
from bench._timing import conditions, extra_peak
from bench.training.shapes import SEVENTY
from bench.training.train_step import the_model, tokens
from pyprune.config.train import DistillConfig, RecoverConfig, TrainConfig
from pyprune.data.tokens import Batch
from pyprune.errors import PypruneError
from pyprune.methods.regularise.dress import DressOptions
from pyprune.methods.regularise.dress.training import DressObjective
from pyprune.methods.regularise.elder import ElderOptions, GateConfig
from pyprune.methods.regularise.elder.gates import GateObjective
from pyprune.methods.regularise.elder.penalty import ElderObjective
from pyprune.runtime import processes
from pyprune.runtime.modes import frozen
from pyprune.runtime.records import append_jsonl
from pyprune.runtime.report import Cell, Table, markdown_table
from pyprune.serving.stats import median
from pyprune.train.loop import train
from pyprune.train.lora import recovery_model
from pyprune.train.memory import PARTS, TrainingMemory, training_memory
from pyprune.train.objective import Objective
from pyprune.train.recover import recovery_objective

RESULTS = Path(__file__).resolve().parents[1] / "results" / "processes.jsonl"
BATCH, LENGTH = 8, 256
CONFIG = TrainConfig(
    optimizer="fused_adamw", learning_rate=1e-9, batch_size=BATCH, micro_batch_size=BATCH, max_grad_norm=1.0,
    dtype="bfloat16", memory="full", checkpoint_interval=1_000_000,
)  # fmt: skip


class _Timed(Objective):
    """Plain fine-tuning that notes when steps end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def after_optimizer_step(self, model: Any, optimizer: Any, step: int, learning_rate: float) -> None:
        self.ends.append(time.perf_counter())


def measure(steps: int) -> dict[str, Any]:
    """Run one process's part of the training; return its peak and seconds."""
    _, model, _ = the_model(None)
    model = model.train()
    config = replace(CONFIG, steps=steps)
    whole = sum(p.nbytes for p in model.parameters())
    samples = Batch.of(tokens(model.config, BATCH, LENGTH))
    objective = _Timed()

    def work() -> None:
        with processes.divide_training():
            train(model, samples, config, objective)

    # The profiler does not see the whole weights go, which were there before it; at the peak of parts they are gone.
    peak = extra_peak(work, torch.device("cpu")) + (whole if processes.count() == 1 else 0)
    seconds = [after - before for before, after in zip(objective.ends, objective.ends[1:], strict=False)]
    return {"processes": processes.count(), "whole_bytes": whole, "peak_bytes": peak, "seconds": seconds}


def launch(number: int, steps: int) -> dict[str, Any]:
    """Start processes; return the record of the first.

    Raises:
        PypruneError: they failed.
    """
    child = ["-m", "bench.training.processes", "--child", "--steps", str(steps)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
    found = subprocess.run(
        [sys.executable, *(torchrun if number > 1 else []), *child], capture_output=True, text=True, check=False
    )
    if found.returncode:
        raise PypruneError(f"{number} processes failed: {found.stderr[-2000:]}")
    return cast(dict[str, Any], json.loads(found.stdout.strip().splitlines()[-1]))


def predict(number: int) -> TrainingMemory:
    """Predict the memory of each process of the training."""
    config = the_model(None)[1].config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return training_memory(model, CONFIG, Objective(), LENGTH, device=torch.device("cpu"), shares=number)


def measured_table(records: Sequence[dict[str, Any]]) -> str:
    """Peaks and seconds by the number of processes, as Markdown."""
    one = next((r["peak_bytes"] for r in records if r["processes"] == 1), None)
    rows: list[tuple[Cell, ...]] = [
        (
            str(r["processes"]),
            f"{median(r['seconds']):.2f}",
            f"{r['peak_bytes'] / 1e6:.0f}",
            f"{r['peak_bytes'] / one:.2f}" if one else None,
            f"{r['predicted_bytes'] / 1e6:.0f}",
        )
        for r in records
    ]
    columns = ("processes", "s a step", "peak of each, MB", "share of one's", "predicted, MB")
    return markdown_table(Table("Processes", columns, tuple(rows)))


def paper_trainings() -> Iterator[tuple[str, int, TrainingMemory]]:
    """Predict trainings of LLaMA-2-70B: (name, processes, memory of each)."""
    lean = TrainConfig(batch_size=64, micro_batch_size=1, dtype="bfloat16", memory="lean", gradient_checkpointing=True)
    quarter = SEVENTY.num_hidden_layers // 4
    for number in (8, 16, 32):
        model = _seventy(torch.bfloat16)
        with frozen(model):
            gates = GateObjective(quarter, GateConfig())
            memory = training_memory(model, replace(lean, memory="full"), gates, 2048, **_shared(number))
        yield "gates of ELDeR", number, memory
        elder, dress = ElderOptions(train=lean), DressOptions(train=lean)
        regularised: dict[str, Objective] = {
            "ELDeR's penalty, lean": ElderObjective(range(quarter), elder),
            "DReSS, lean": DressObjective(range(SEVENTY.hidden_size // 4), dress),
        }
        for name, objective in regularised.items():
            yield name, number, _predict_seventy(lean, number, objective)
        for name, config in (("all weights, lean", lean), ("all weights, full", replace(lean, memory="full"))):
            yield name, number, _predict_seventy(config, number)
        for name, place in (("from the dense model", "shares"), ("from the dense model in its files", "files")):
            whole = RecoverConfig(adapters="none", distill=DistillConfig(alpha=0.5), train=lean)
            yield f"all weights, lean, {name}", number, _recovery_of_seventy(whole, number, place)
        lora = RecoverConfig(rank=32, alpha=10.0, train=replace(lean, memory="full"))
        yield "LoRA on bfloat16 weights", number, _recovery_of_seventy(lora, number)
        taught = replace(lora, distill=DistillConfig(alpha=0.5))
        yield "the same, from the dense model", number, _recovery_of_seventy(taught, number)


def _predict_seventy(config: TrainConfig, number: int, objective: Objective | None = None) -> TrainingMemory:
    model = _seventy(torch.float32 if config.memory == "full" else torch.bfloat16)
    return training_memory(model, config, objective or Objective(), 2048, **_shared(number))


def _recovery_of_seventy(recover: RecoverConfig, number: int, place: str = "shares") -> TrainingMemory:
    model, teacher = _seventy(torch.bfloat16), _seventy(torch.bfloat16) if recover.distill else None
    objective = recovery_objective(model, recover, teacher=teacher)
    with torch.device("meta"), recovery_model(model, recover) as trained:
        shared = {**_shared(number), "teacher_in": place}
        return training_memory(trained, recover.train, objective, 2048, teacher=teacher, **shared)


def _shared(number: int) -> dict[str, Any]:
    return {"device": torch.device("cuda"), "shares": number, "teacher_in": "shares"}


def _seventy(dtype: torch.dtype) -> PreTrainedModel:
    """LLaMA-2-70B without weights."""
    with torch.device("meta"):
        return cast(PreTrainedModel, AutoModelForCausalLM.from_config(SEVENTY, dtype=dtype))


def paper_table() -> str:
    """Return the table of LLaMA-2-70B, GiB."""
    rows: list[tuple[Cell, ...]] = [
        (name, str(number), *(f"{getattr(m, part) / 2**30:.1f}" for part in PARTS), f"{m.total / 2**30:.1f}")
        for name, number, m in paper_trainings()
    ]
    return markdown_table(Table("LLaMA-2-70B", ("training", "processes", *PARTS, "peak of each, GiB"), tuple(rows)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or print the table on paper; return the exit status."""
    options = _parser().parse_args(arguments)

    def run() -> None:
        if options.paper:
            print(paper_table())
        elif options.child:
            with processes.join_processes("recover", may_divide=True):
                print(json.dumps(measure(options.steps)))
        else:
            about = conditions(torch.device("cpu"))
            records = []
            for number in options.processes:
                found = launch(number, options.steps) | {"predicted_bytes": predict(number).total}
                append_jsonl(options.jsonl, [{**about, **found}])
                records.append(found)
            print(measured_table(records))

    return exit_status(run)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=counts, default=[1, 2], metavar="A,B")
    parser.add_argument("--steps", type=count, default=4, help="of the training; the first is not timed")
    parser.add_argument("--paper", action="store_true", help="only LLaMA-2-70B on paper")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--jsonl", type=Path, default=RESULTS, metavar="FILE", help="file to append to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
