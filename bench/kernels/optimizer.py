"""Optimizer, penalty, memory and streamed compaction on the shapes of a real model.

    python -m bench.kernels.optimizer [--model DIR] [--parts PART ...] [--repeats 5] [--batches 2 8]

The model is SmolLM2-135M where its package is installed, otherwise its configuration with random weights. Parts:

* penalty: the l2 penalty of a quarter of the hidden channels and the optimizer's step, without a forward pass; compared
  with the penalty by autograd and torch's AdamW, and with torch's fused AdamW.
* step: a whole training step (bfloat16 autocast, as the presets train) with each of them.
* memory: peak of a step that frees each gradient as soon as it is used. Peaks come from the allocation events of
  torch's own allocator (torch.profiler; on CUDA its peak counter), so they hold every tensor and no interpreter. What
  activations take is the peak of forward and backward with hooks that drop each gradient and do nothing else, less
  the largest gradient.
* size: bytes of a LLaMA-2-7B with bfloat16 weights and 8-bit moments, from a model without memory behind it.
* compaction: ``compact_checkpoint`` to 75 % of the hidden size, compared with ``cp -r`` of the checkpoint; page cache
  warm, one filesystem, the output removed in between. It reads as much as ``cp`` and writes less, so the target is of
  bytes a second (read and written); its note has the share by time.

Everything timed is interleaved; every sample is appended to bench/results/optimizer.jsonl.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from bench._texts import load_dense
from bench._timing import (
    Case,
    Target,
    conditions,
    find,
    interleave,
    keep,
    print_targets,
    quotient,
    release,
)
from pyprune.checkpoint.manifest import RECORD_NAME
from pyprune.checkpoint.save import save_checkpoint
from pyprune.errors import CheckpointError
from pyprune.families import family_for
from pyprune.methods.regularise.dress.training import hidden_slices
from pyprune.ops.regularised_adamw import Penalty
from pyprune.run.cut_on_disk import compact_checkpoint
from pyprune.runtime.products import products_in_float32
from pyprune.runtime.records import append_jsonl
from pyprune.runtime.report import Cell, Table, markdown_table
from pyprune.train.loss import causal_loss
from pyprune.train.optimizer import RegularisedAdamW, clip_factor

RESULTS = Path(__file__).resolve().parents[1] / "results" / "optimizer.jsonl"
SMOLLM2 = LlamaConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, tie_word_embeddings=True,
)  # fmt: skip
LLAMA_7B = LlamaConfig(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32)
EAGER, EAGER_FUSED, OURS = "eager penalty + torch AdamW", "eager penalty + torch fused AdamW", "RegularisedAdamW"
IN_BACKWARD = "RegularisedAdamW in backward"
STRENGTH = 1e-3
# So small that the weights stay where they are while implementations take turns on them.
RATE = 1e-9
STEP_CEILINGS = {2: 1.19, 8: 1.08}
"""Batch of 256 tokens -> what a step could gain at most on two cores, by the bytes that it moves."""


def the_model(folder: str | None) -> tuple[str, PreTrainedModel, Any]:
    """Name, float32 model and tokenizer (None with random weights)."""
    try:
        return load_dense(folder)
    except CheckpointError:
        if folder is not None:
            raise
        torch.manual_seed(0)
        return "SmolLM2-135M's shapes, random weights", AutoModelForCausalLM.from_config(SMOLLM2), None


class Contest:
    """The same l2 penalty on the same weights, handled in three ways.

    Args:
        model: whose last quarter of hidden channels is penalised.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        hidden = int(model.config.hidden_size)
        self.slices = hidden_slices(model, range(hidden * 3 // 4, hidden))
        parameters = list(model.parameters())
        self.eager = torch.optim.AdamW(parameters, lr=RATE)
        self.fused = torch.optim.AdamW(parameters, lr=RATE, fused=True)
        self.ours = RegularisedAdamW(parameters, lr=RATE, weight_decay=0.01, penalties=penalties_of(self.slices))

    def penalised(self, optimizer: torch.optim.Optimizer) -> None:
        """The penalty by autograd, then the optimizer."""
        norms = []
        for slices in self.slices:
            weight = slices.param.parameter
            part = weight.index_select(slices.dim, slices.index)
            norms.append(part.abs().sum() if part.ndim == 1 else part.norm(dim=1 - slices.dim).sum())
        (STRENGTH * torch.stack(norms).sum()).backward()
        optimizer.step()

    def ways(self) -> dict[str, Callable[[], object]]:
        """What happens after backward, by name."""
        return {
            EAGER: partial(self.penalised, self.eager),
            EAGER_FUSED: partial(self.penalised, self.fused),
            OURS: self.ours.step,
        }

    def train(self, batch: Tensor, after: Callable[[], object]) -> None:
        """One whole step."""
        backward(self.model, batch)
        after()
        self.model.zero_grad(set_to_none=True)

    def train_in_backward(self, batch: Tensor) -> None:
        """One whole step whose gradients are used and freed one by one."""
        with self.ours.stepping_in_backward():
            backward(self.model, batch)
            self.ours.step()


def penalties_of(slices: Sequence[Any]) -> dict[nn.Parameter, Penalty]:
    """The penalty on the slices of every tensor, for the optimizer's pass."""
    return {s.param.parameter: Penalty(s.index, s.dim, "l2", STRENGTH) for s in slices}


def backward(model: PreTrainedModel, batch: Tensor) -> None:
    """Forward and backward; weights in float32 compute in bfloat16, products as in :func:`pyprune.train.loop.train`."""
    autocast = model.dtype == torch.float32
    with products_in_float32(model):
        with torch.autocast(batch.device.type, dtype=torch.bfloat16, enabled=autocast):
            loss = causal_loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]


def tokens(model: PreTrainedModel, batch: int, length: int) -> Tensor:
    """Random token ids, int64 [batch, length]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (batch, length), generator=generator).to(model.device)


# --- parts ------------------------------------------------------------------------------------------------------------


def penalty_part(model: PreTrainedModel, options: argparse.Namespace) -> tuple[list[Case], list[Target]]:
    """Optimizer and penalty alone."""
    op, contest = "penalty and optimizer", Contest(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    cases = [Case(op, "float32", "", name, call) for name, call in contest.ways().items()]
    plain = RegularisedAdamW(model.parameters(), lr=RATE)
    limit = 1e9  # nothing is scaled, but every gradient goes through the clipping

    def clipped() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        contest.fused.step()

    def clipped_in_the_pass() -> None:
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        plain.gradient_scale = clip_factor(float(norm), limit)
        plain.step()

    cases += [
        Case(op, "float32", "no penalty, clipped", "torch fused AdamW", clipped),
        Case(op, "float32", "no penalty, clipped", OURS, clipped_in_the_pass),
    ]
    interleave(cases, options.repeats, model.device)
    model.zero_grad(set_to_none=True)
    slow, fast, ours = cases[:3]
    return cases, [
        Target(f"{op}: times faster than {EAGER}", 4, quotient(slow, ours)),
        Target(f"{op}: times faster than {EAGER_FUSED}", 1.5, quotient(fast, ours)),
    ]


def step_part(model: PreTrainedModel, options: argparse.Namespace) -> tuple[list[Case], list[Target]]:
    """Whole steps."""
    contest, result, targets = Contest(model), [], []
    for size in options.batches:
        op, batch = "training step", tokens(model, size, options.length)
        variant = f"{size} x {options.length} tokens"
        ways = {name: partial(contest.train, batch, after) for name, after in contest.ways().items()}
        cases = [Case(op, "float32", variant, name, call) for name, call in ways.items()]
        cases.append(Case(op, "float32", variant, IN_BACKWARD, partial(contest.train_in_backward, batch)))
        interleave(cases, options.repeats, model.device)
        result += cases
        ours = find(cases, op, "float32", variant, OURS)
        ceiling = STEP_CEILINGS.get(size) if options.length == 256 else None
        for other in cases[:2] if ours is not None else ():
            ratio = quotient(other, ours)
            note = "" if ceiling is None else f"reported only; at most about {ceiling} is possible"
            targets.append(Target(f"{op}, {variant}: times faster than {other.implementation}", 1, ratio, note=note))
    return result, targets


@dataclass(frozen=True)
class Peak:
    """Memory of one step, bytes.

    Attributes:
        weights: of all parameters.
        moments: of the optimizer.
        activations: most that forward and backward held in addition to weights and gradients (see the module's
            docstring).
        gradient: the largest single gradient.
        measured: the peak of a step in backward, weights and moments included.
        all_gradients: the peak of an ordinary step, which holds every gradient.
    """

    weights: int
    moments: int
    activations: int
    gradient: int
    measured: int
    all_gradients: int

    @property
    def expected(self) -> int:
        """Weights + moments + activations + the largest gradient."""
        return self.weights + self.moments + self.activations + self.gradient


@contextmanager
def dropping_gradients(model: nn.Module) -> Iterator[None]:
    """Free every gradient as soon as it is complete."""

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(drop) for p in model.parameters()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def extra_peak(work: Callable[[], object], device: torch.device) -> int:
    """Most bytes that torch's allocator held during ``work``, beyond those at its start."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - start
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    records = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    events = sorted((e.start_ns(), e.nbytes()) for e in records if e.name() == "[memory]")
    alive = peak = 0
    for _, size in events:
        alive += size
        peak = max(peak, alive)
    return peak


def measure_peak(model: PreTrainedModel, batch: Tensor, bits: int) -> Peak:
    """Peak memory of one step in backward, and what it is made of."""
    hidden = int(model.config.hidden_size)
    penalties = penalties_of(hidden_slices(model, range(hidden * 3 // 4, hidden)))
    optimizer = RegularisedAdamW(model.parameters(), lr=RATE, penalties=penalties, moment_bits=bits)
    optimizer.initialise_state()
    weights = sum(p.nbytes for p in model.parameters())
    gradient = max(p.nbytes for p in model.parameters())
    moments = sum(t.nbytes for state in optimizer.state.values() for key, t in state.items() if key != "step")
    with dropping_gradients(model):
        forward_backward = extra_peak(partial(backward, model, batch), batch.device)
    with optimizer.stepping_in_backward():
        own = extra_peak(partial(_step, model, batch, optimizer), batch.device)
    everything = extra_peak(partial(_step, model, batch, optimizer), batch.device)
    model.zero_grad(set_to_none=True)
    fixed = weights + moments
    return Peak(weights, moments, forward_backward - gradient, gradient, fixed + own, fixed + everything)


def _step(model: PreTrainedModel, batch: Tensor, optimizer: RegularisedAdamW) -> None:
    backward(model, batch)
    optimizer.step()


MEMORY_COLUMNS = (
    "tokens", "weights", "moments, bits", "weights, MB", "moments", "activations", "largest gradient", "sum",
    "peak in backward", "peak, all gradients",
)  # fmt: skip


def memory_part(model: PreTrainedModel, options: argparse.Namespace) -> tuple[list[Peak], list[Target]]:
    """Peaks in float32 with float32 moments, and in bfloat16 with 8-bit moments.

    Of few tokens, whose activations leave the peak to the gradients, and of the smallest batch of the steps.
    """
    peaks, targets = [], []
    lines: list[tuple[Cell, ...]] = []
    sizes = ((1, min(32, options.length)), (options.batches[0], options.length))
    for (dtype, bits), (rows, length) in product(((torch.float32, 32), (torch.bfloat16, 8)), sizes):
        peak = measure_peak(model.to(dtype), tokens(model, rows, length), bits)
        name = str(dtype).removeprefix("torch.")
        parts = (peak.weights, peak.moments, peak.activations, peak.gradient, peak.expected, peak.measured)
        megabytes = (f"{size / 1e6:.1f}" for size in (*parts, peak.all_gradients))
        lines.append((f"{rows} x {length}", name, bits, *megabytes))
        peaks.append(peak)
        ratio = peak.measured / peak.expected
        what = f"peak in backward over the sum, {name}, {bits}-bit moments, {rows} x {length} tokens"
        targets.append(Target(what, 1.05, ratio, at_least=False))
    model.to(torch.float32)
    print("\n" + markdown_table(Table("Memory of a step", MEMORY_COLUMNS, tuple(lines))))
    return peaks, targets


def size_part(overhead: float) -> Target:
    """Bytes of regularising all weights of a 7B model."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LLAMA_7B, dtype=torch.bfloat16)
    optimizer = RegularisedAdamW(model.parameters(), moment_bits=8)
    optimizer.initialise_state()
    weights = sum(p.nbytes for p in model.parameters())
    moments = sum(t.nbytes for state in optimizer.state.values() for key, t in state.items() if key != "step")
    gradient = max(p.nbytes for p in model.parameters())
    total = overhead * (weights + moments + gradient)
    print(
        f"\nLLaMA-2-7B, bfloat16 weights {weights / 1e9:.2f} GB + 8-bit moments {moments / 1e9:.2f} GB + largest "
        f"gradient {gradient / 1e9:.2f} GB, times the overhead {overhead:.3f}: {total / 1e9:.2f} GB; of 80 GB "
        f"{80 - total / 1e9:.2f} GB are left for activations."
    )
    return Target("LLaMA-2-7B without activations, GB", 80, total / 1e9, at_least=False)


def compaction_part(
    model: PreTrainedModel, tokenizer: Any, options: argparse.Namespace
) -> tuple[list[Case], list[Target]]:
    """Streamed compaction, compared with a copy."""
    plan = family_for(model).plan(model.config)
    plan = plan.keep_hidden(range(len(plan.hidden) * 3 // 4))
    with tempfile.TemporaryDirectory(dir=options.work) as name:
        dense, copied, compacted = (Path(name) / part for part in ("dense", "copied", "compacted"))
        save_checkpoint(model, tokenizer, dense, plan=None, provenance={})
        # As a folder of Transformers has it: the record brings digests, and verifying them is no part of the cut.
        (dense / RECORD_NAME).unlink()
        size = folder_bytes(dense)
        clean = partial(_remove, copied)

        def copy(command: str) -> Callable[[], object]:
            return partial(subprocess.run, ["sh", "-c", command, "sh", str(dense), str(copied)], check=True)

        cut = partial(compact_checkpoint, dense, plan, compacted)
        op = "compaction of a checkpoint"
        cases = [
            Case(op, "float32", "", "cp -r", copy('cp -r "$1" "$2"'), 2 * size, prepare=clean),
            Case(
                op, "float32", "", "cp -r, then sync", copy('cp -r "$1" "$2" && sync "$2"/*'), 2 * size, prepare=clean
            ),
            Case(op, "float32", "", "compact_checkpoint", cut, prepare=partial(_remove, compacted)),
        ]
        interleave(cases, options.repeats, torch.device("cpu"))
        cases[2].traffic = size + folder_bytes(compacted)
    note = "compaction flushes to the disk and writes SHA-256 digests; cp does neither"
    return cases, [rate_target("cp", cases[0], cases[2]), rate_target("cp and sync", cases[1], cases[2], note)]


def folder_bytes(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def rate_target(name: str, copy: Case, cut: Case, note: str = "") -> Target:
    """Compaction's bytes a second over those of a copy; the note has the share by time."""
    by_time = quotient(copy, cut)
    what = f"streamed compaction, bytes a second over {name}'s"
    if by_time is None:
        return Target(what, 0.7, None)
    moved = f"by time {by_time:.2f}: {cut.traffic / 1e6:.1f} MB read and written, by {name} {copy.traffic / 1e6:.1f}"
    share = by_time * cut.traffic / copy.traffic
    return Target(what, 0.7, share, note="; ".join(filter(None, (moved, note))))


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


PARTS = ("penalty", "step", "memory", "size", "compaction")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options, measure the parts, report."""
    parser = argparse.ArgumentParser(description="Time pyprune's optimizer and streamed compaction.")
    parser.add_argument("--model", help="folder of a checkpoint (default: SmolLM2-135M, or its shapes)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="only these")
    parser.add_argument("--repeats", type=int, default=5, help="samples per implementation")
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 8], help="sequences in a step; memory: the first")
    parser.add_argument("--length", type=int, default=256, help="tokens in a sequence")
    parser.add_argument("--work", help="folder for checkpoints (default: the system's temporary folder)")
    parser.add_argument("--jsonl", type=Path, default=RESULTS, help="file to append to")
    options = parser.parse_args(arguments)
    name, model, tokenizer = the_model(options.model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model.to(device).train()
    about = {**conditions(device), "model": name, "length": options.length}
    print(f"{name}, {about['threads']} threads, {about['device']}")
    measured: list[Case] = []
    targets: list[Target] = []
    overhead = 1.0
    for part in (p for p in PARTS if p in options.parts):
        if part in ("penalty", "step", "compaction"):
            own, found = (
                compaction_part(model, tokenizer, options)
                if part == "compaction"
                else {"penalty": penalty_part, "step": step_part}[part](model, options)
            )
            keep(options.jsonl, own, about)
            release(own)
            measured += own
        elif part == "memory":
            peaks, found = memory_part(model, options)
            append_jsonl(options.jsonl, ({**about, "op": "peak memory", **asdict(peak)} for peak in peaks))
            overhead = max(1.0, *(peak.measured / peak.expected for peak in peaks))
        else:
            found = [size_part(overhead)]
        targets += found
        gc.collect()
    if measured:
        print_table(measured)
    print_targets(targets)


def print_table(cases: Sequence[Case]) -> None:
    """One line a case."""
    columns = ("what", "variant", "implementation", "ms", "MAD", "MB moved", "MB/s")
    rows = tuple(
        (
            *(c.op, c.variant, c.implementation, f"{c.median:.1f}", f"{c.deviation:.1f}"),
            *((f"{c.traffic / 1e6:.1f}", f"{1e3 * c.speed:.0f}") if c.traffic else (None, None)),
        )
        for c in cases
    )
    print("\n" + markdown_table(Table("Optimizer", columns, rows)))


if __name__ == "__main__":
    main()
