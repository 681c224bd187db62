r"""Time a whole training step, ours and a plain PyTorch loop's, at equal work: seconds, tokens a second, peak memory.

    python -m bench.training.train_step [--model DIR] [--forms dress elder lora distil] [--repeats 7] [--batch 8]
    python -m bench.training.train_step --shapes 7B --batch 1 --length 2048 # on a GPU: LLaMA-2's shapes, random weights
    python -m bench.training.train_step --only-table # of the records, and run nothing
    python -m bench.training.train_step --recipes # predict what the shipped recipes hold at 7B and 13B on 76 GiB
    python -m bench.training.train_step --padding FILE # share of padding in a step on instruction records (.jsonl)
    python -m bench.training.train_step --passes FILE  # seconds of such a step, split by records or by tokens

The model is SmolLM2-135M where its package is installed, otherwise its configuration with random weights. Forms:

* dress: DReSS as published, the l2 penalty on the last quarter of the hidden channels.
* elder: ELDeR as published, the l2 norm of what seven layers add to the stream.
* lora: recovery by LoRA of rank 32 on every projection.
* distil: recovery of all weights, half on the text and half on the dense model's logits.

Each is one step of the product's own loop (:func:`pyprune.train.loop.train`), in full and in lean memory, with the
options that presets have (bfloat16 autocast over float32 weights, clipping at 1, a copy of the last good weights), and
of a plain loop: torch's fused AdamW, autocast, the penalty by autograd, torch's clipping, Transformers' own loss. Steps
take turns; the learning rate is so small that the weights stay. Peaks are of torch's allocator, with everything that
lives between steps; :mod:`pyprune.train.memory` predicts them. Medians are appended to --jsonl. A second table shows
the parts of a few more steps; ours copy the good weights in each of them, otherwise in one of ten.

--compiled adds ours with every decoder layer under torch.compile; the warm-up includes the compilation. With --shapes
the models do not fit next to each other, so they follow each other, each with random weights. A plain loop on bfloat16
weights is added, and an implementation that does not fit alone is recorded as out of memory.
"""

from __future__ import annotations

import argparse
import copy
import gc
import gzip
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from typing_extensions import override

from bench._texts import load_dense
from bench._timing import Case, conditions, extra_peak, interleave
from bench.training.shapes import LLAMA_2, SHAPES, SMOLLM2
from bench.training.step_parts import (
    BACKWARD,
    COPY,
    FORWARD,
    NORM,
    OPTIMIZER,
    PENALTY,
    TEACHER,
    Watched,
    parts_table,
    time_parts,
)
from pyprune.checkpoint.load import ModelSource
from pyprune.config.recoveries import recovery
from pyprune.config.train import DistillConfig, RecoverConfig, TrainConfig
from pyprune.data.sampling import split_disjoint
from pyprune.data.tokens import Batch
from pyprune.errors import CheckpointError
from pyprune.families import family_for
from pyprune.methods.regularise.dress import DressOptions
from pyprune.methods.regularise.dress.training import DressObjective, hidden_slices
from pyprune.methods.regularise.elder import ElderOptions
from pyprune.methods.regularise.elder.penalty import ElderObjective
from pyprune.run.memory import TrainedModels, memory_of, memory_table
from pyprune.run.recipe import build_config
from pyprune.runtime.device import DTYPES
from pyprune.runtime.records import append_jsonl
from pyprune.runtime.report import Cell, Table, markdown_table
from pyprune.train.compiled import compiled_layers
from pyprune.train.lean import to_bfloat16
from pyprune.train.loop import _Run
from pyprune.train.lora import recovery_model
from pyprune.train.memory import training_memory
from pyprune.train.objective import Objective
from pyprune.train.recover import recovery_objective
from pyprune.train.samples import batch_indices
from pyprune.train.sharded import Whole

RESULTS = Path(__file__).resolve().parents[1] / "results" / "optimizer.jsonl"
RATE = 1e-9
"""So small a learning rate that the weights stay while implementations take turns."""
Form = Literal["dress", "elder", "lora", "distil"]
FORMS: tuple[Form, ...] = ("dress", "elder", "lora", "distil")
LABELS: dict[Form, str] = {
    "dress": "DReSS, papers' form",
    "elder": "ELDeR, papers' form",
    "lora": "recovery by LoRA",
    "distil": "recovery of all weights with distillation",
}
PLAIN, FULL, LEAN = "plain PyTorch loop", "ours, full memory", "ours, lean memory"
PLAIN_NARROW = "plain PyTorch loop, bfloat16 weights"
COMPILED = "ours, full memory, layers compiled"
LAYERS = range(13, 20)
CLIP = 1.0
PASSES = (1, 2, 4, 8, 16, 32, 64)
RECORDS_IN_A_PASS, TOKENS_IN_A_PASS = (4, 8, 16), (1024, 2048, 4096)
OUT_OF_MEMORY = "out of memory"
PROFILED = 3
"""Number of steps whose parts are timed."""
RECIPES = ("llama2-7b-dress", "llama2-7b-elder", "llama2-7b-trsp", "llama-7b-moreau")
GPU = 76 * 2**30
"""Bytes of a GPU of 80 GB that a process can use."""


def the_model(folder: str | None) -> tuple[str, PreTrainedModel, Any]:
    """Load the name, the float32 model and its tokenizer (None with random weights)."""
    try:
        return load_dense(folder)
    except CheckpointError:
        if folder is not None:
            raise
        torch.manual_seed(0)
        return "SmolLM2-135M's shapes, random weights", AutoModelForCausalLM.from_config(SMOLLM2), None


def tokens(config: PretrainedConfig, batch: int, length: int) -> Tensor:
    """Draw random token ids, int64 [batch, length]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (batch, length), generator=generator)


@dataclass
class Dense:
    """The model of which every contender has a copy.

    Attributes:
        name: of the model.
        config: its shapes.
        device: where steps run.
        model: has the weights to copy; None = every copy gets random ones.
    """

    name: str
    config: PretrainedConfig
    device: torch.device
    model: PreTrainedModel | None = None

    def copy(self, dtype: torch.dtype) -> PreTrainedModel:
        """Return a model on the device, in training mode."""
        if self.model is None:
            with self.device:
                model = AutoModelForCausalLM.from_config(copy.deepcopy(self.config), dtype=dtype)
            return cast(PreTrainedModel, model.train())
        model = copy.deepcopy(self.model)
        if dtype == torch.bfloat16:
            to_bfloat16(model)
        return model


@dataclass
class Step:
    """One implementation of a step.

    Attributes:
        do: takes one step.
        held: returns the tensors that live between steps.
        parts: the calls to time.
        with_copy: takes a step that also copies the good weights; None if no step does.
    """

    do: Callable[[], object]
    held: Callable[[], list[Tensor]]
    parts: Sequence[Watched]
    with_copy: Callable[[], object] | None = None


@contextmanager
def contender(name: str, form: Form, options: argparse.Namespace) -> Iterator[Step]:
    """Provide an implementation of a form, with its own model."""
    model = options.dense.copy(torch.bfloat16 if name in (LEAN, PLAIN_NARROW) else torch.float32)
    teacher = options.dense.copy(torch.bfloat16).eval() if form == "distil" else None
    recover = _recover(name, form, options.batch)
    with recovery_model(model, recover) as trained:
        make = _plain if name in (PLAIN, PLAIN_NARROW) else _ours
        with (
            compiled_layers(trained, recover.train),
            make(form, trained, teacher, recover, options) as step,
        ):
            yield step


def _recover(name: str, form: Form, size: int) -> RecoverConfig:
    """Return the options of a recovery; the other forms have the same training."""
    config = TrainConfig(
        optimizer="fused_adamw", learning_rate=RATE, batch_size=size, micro_batch_size=size, max_grad_norm=CLIP,
        dtype="bfloat16", memory="lean" if name == LEAN else "full", compile=name == COMPILED, steps=100_000,
    )  # fmt: skip
    return RecoverConfig(adapters="lora" if form == "lora" else "none", rank=32, alpha=10.0, train=config)


@contextmanager
def _ours(
    form: Form, model: Any, teacher: PreTrainedModel | None, recover: RecoverConfig, options: argparse.Namespace
) -> Iterator[Step]:
    """Provide a step of the product's loop."""
    config = recover.train
    objective = _objective(form, model, teacher, recover)
    batch = Batch.of(tokens(options.dense.config, options.batch, options.length))
    run = _Run(Whole(model), batch, None, config, objective, None, True)
    objective.setup(model, config)
    run._make_optimizer()
    numbers = count(1)

    def held() -> list[Tensor]:
        states = [t for state in run.optimizer.state.values() for t in state.values()]
        return [*_weights(model, teacher), *states, *run.last_good.values()]

    parts: list[Watched] = [
        (run, "_terms", FORWARD),
        (Tensor, "backward", BACKWARD),
        (run, "_weight_penalty", PENALTY),
        (run, "_clip", NORM),
        (run, "_remember_last_good", COPY),
        (run.optimizer, "_run", OPTIMIZER),
        *_teacher_part(teacher),
    ]
    with run._backward_context():
        copies = config.last_good_interval
        yield Step(lambda: run._step(next(numbers)), held, parts, lambda: run._step(1 + copies * next(numbers)))
    objective.teardown(model)


def _teacher_part(teacher: PreTrainedModel | None) -> list[Watched]:
    return [] if teacher is None else [(teacher.base_model, "forward", TEACHER)]


def predicted_peak(name: str, form: Form, options: argparse.Namespace) -> int | None:
    """Predict the peak from shapes alone, bytes; None for a plain loop."""
    if name not in (FULL, LEAN):
        return None
    dense, recover = options.dense, _recover(name, form, options.batch)
    dtypes = (torch.bfloat16 if name == LEAN else torch.float32, torch.bfloat16)
    with torch.device("meta"):
        model, other = (AutoModelForCausalLM.from_config(copy.deepcopy(dense.config), dtype=dtype) for dtype in dtypes)
    teacher = other if form == "distil" else None
    with recovery_model(model, recover) as trained:
        objective = _objective(form, model, teacher, recover)
        config, length = recover.train, options.length
        return training_memory(trained, config, objective, length, device=dense.device, teacher=teacher).total


def _objective(form: Form, model: Any, teacher: PreTrainedModel | None, recover: RecoverConfig) -> Objective:
    if form == "dress":
        return DressObjective(_last_quarter(model), DressOptions(norm="l2", solver="subgradient"))
    if form == "elder":
        return ElderObjective(LAYERS, ElderOptions(norm="l2"))
    distill = DistillConfig(alpha=0.5) if form == "distil" else None
    return recovery_objective(model, replace(recover, distill=distill), teacher=teacher)


@contextmanager
def _plain(
    form: Form, model: Any, teacher: PreTrainedModel | None, recover: RecoverConfig, options: argparse.Namespace
) -> Iterator[Step]:
    """Provide a step as a user would write it."""
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0, fused=True)
    ids = tokens(options.dense.config, options.batch, options.length).to(options.dense.device)
    stream: list[Tensor] = []
    handles = [_watch(layer, stream) for layer in _watched_layers(form, model)]

    def step() -> None:
        stream.clear()
        with torch.autocast(ids.device.type, dtype=torch.bfloat16):
            out = model(input_ids=ids, labels=ids, use_cache=False)
            loss = out.loss if teacher is None else _distillation_loss(out, teacher, ids)
        if form == "dress":
            loss = loss + 1e-3 * _group_norms(model)
        loss = loss + 1e-3 * sum(stream)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def held() -> list[Tensor]:
        states = [t for state in optimizer.state.values() for t in state.values()]
        return [*_weights(model, teacher), *states]

    parts: list[Watched] = [
        (model, "forward", FORWARD),
        (sys.modules[__name__], "_distillation_loss", FORWARD),
        (sys.modules[__name__], "_group_norms", PENALTY),
        (Tensor, "backward", BACKWARD),
        (nn.utils, "clip_grad_norm_", NORM),
        (optimizer, "step", OPTIMIZER),
        *_teacher_part(teacher),
    ]
    yield Step(step, held, parts)
    for handle in handles:
        handle.remove()


def _watched_layers(form: Form, model: Any) -> list[nn.Module]:
    layers = family_for(model).layers(model) if form == "elder" else []
    return [layers[i] for i in LAYERS] if layers else []


def _watch(layer: nn.Module, stream: list[Tensor]) -> Any:
    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        after = output[0] if isinstance(output, tuple) else output
        stream.append((after.float() - inputs[0].float()).norm(dim=-1).mean())

    return layer.register_forward_hook(hook)


def _distillation_loss(out: Any, teacher: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.no_grad():
        taught = teacher(input_ids=ids, use_cache=False).logits
    own, taught = (x[:, :-1].flatten(0, 1).float().log_softmax(-1) for x in (out.logits, taught))
    return 0.5 * out.loss + 0.5 * functional.kl_div(own, taught, log_target=True, reduction="batchmean")


def _group_norms(model: PreTrainedModel) -> Tensor:
    norms = []
    for slices in hidden_slices(model, _last_quarter(model)):
        part = slices.param.parameter.index_select(slices.dim, slices.index)
        norms.append(part.abs().sum() if part.ndim == 1 else part.norm(dim=1 - slices.dim).sum())
    return torch.stack(norms).sum()


def _last_quarter(model: PreTrainedModel) -> range:
    hidden = int(model.config.hidden_size)
    return range(hidden * 3 // 4, hidden)


def _weights(*models: nn.Module | None) -> list[Tensor]:
    return [p for model in models if model is not None for p in model.parameters()]


def measure(form: Form, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Return records of all implementations: in turns if weights are copied, else one after another."""
    if options.dense.model is not None:
        compiled = (COMPILED,) if options.compiled else ()
        yield from _measure_in_turns(form, (PLAIN, FULL, LEAN, *compiled), options)
        return
    for name in (PLAIN, PLAIN_NARROW, FULL, LEAN):
        yield _measure_alone(form, name, options)


def _measure_in_turns(form: Form, names: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time implementations in turns, and then find the peak of each."""
    device = options.dense.device
    with ExitStack() as stack:
        found = {name: stack.enter_context(contender(name, form, options)) for name in names}
        cases = [_case(form, name, options, step.do) for name, step in found.items()]
        interleave(cases, options.repeats, device)
        records = [case.record() for case in cases]
        for record, (name, step) in zip(records, found.items(), strict=True):
            between = sum({id(t): t.nbytes for t in step.held() if t.device.type == device.type}.values())
            record["peak_bytes"] = between + extra_peak(step.do, device)
            record["predicted_bytes"] = predicted_peak(name, form, options)
            record["parts_ms"] = time_parts(step.with_copy or step.do, step.parts, PROFILED, device)
    return records


def _measure_alone(form: Form, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Time one implementation, which may not fit, and free its memory."""
    try:
        return _measure_in_turns(form, [name], options)[0]
    except torch.OutOfMemoryError as error:
        print(f"\n{LABELS[form]}, {name}: {str(error).splitlines()[0]}", file=sys.stderr)
    finally:
        gc.collect()
        if options.dense.device.type == "cuda":
            torch.cuda.empty_cache()
    case, predicted = _case(form, name, options, int), predicted_peak(name, form, options)
    return {**case.record(), "failed": OUT_OF_MEMORY, "peak_bytes": None, "predicted_bytes": predicted}


def _case(form: Form, name: str, options: argparse.Namespace, step: Callable[[], object]) -> Case:
    return Case(LABELS[form], "bfloat16", f"{options.batch} x {options.length} tokens", name, step)


def table(records: Sequence[dict[str, Any]], work: int) -> str:
    """Return one line a form and implementation; ratios are to the first plain loop of the form that fits.

    Args:
        records: of :func:`measure`.
        work: tokens in a step.
    """
    columns = (
        "step",
        "implementation",
        "s (median)",
        "MAD",
        "tokens/s",
        "times faster",
        "peak MB",
        "of plain's",
        "predicted",
        "peak over predicted",
    )
    rows = [_row(record, _baseline(records, record["op"]), work) for record in records]
    return markdown_table(Table("Whole training steps", columns, tuple(rows)))


def recorded_tables(file: Path) -> str:
    """Return both tables of each device, from the newest record of every form and implementation.

    Args:
        file: JSON lines of :func:`main`.
    """
    newest: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["op"] in LABELS.values():
            device = f"{record['model']} on {record['device']}, {record['variant']}"
            newest.setdefault(device, {})[record["op"], record["implementation"]] = record
    shown = []
    for device, found in newest.items():
        records = [record for op in LABELS.values() for (its, _), record in found.items() if its == op]
        shown += [f"{device}:", table(records, records[0]["batch"] * records[0]["length"])]
        if any("parts_ms" in record for record in records):
            shown += ["Parts of a step, in seconds:", parts_table(records)]
    return "\n\n".join(shown)


def _row(record: dict[str, Any], plain: dict[str, Any] | None, work: int) -> tuple[Cell, ...]:
    predicted, ratio = record["predicted_bytes"], _peak_over_predicted(record)
    memory = (f"{predicted / 1e6:.0f}" if predicted else None, f"{ratio:.3f}" if ratio else None)
    if "failed" in record:
        return (record["op"], record["implementation"], record["failed"], *[None] * 5, *memory)
    seconds, spread = _median_seconds(record)
    return (
        record["op"],
        record["implementation"],
        f"{seconds:.2f}",
        f"{spread:.2f}",
        f"{work / seconds:.0f}",
        f"{_median_seconds(plain)[0] / seconds:.2f}" if plain else None,
        f"{record['peak_bytes'] / 1e6:.0f}",
        f"{record['peak_bytes'] / plain['peak_bytes']:.2f}" if plain else None,
        *memory,
    )


def _baseline(records: Sequence[dict[str, Any]], form: str) -> dict[str, Any] | None:
    plain = (r for r in records if r["op"] == form and r["implementation"] in (PLAIN, PLAIN_NARROW))
    return next((r for r in plain if "failed" not in r), None)


def _median_seconds(record: dict[str, Any]) -> tuple[float, float]:
    """Return median and median absolute deviation."""
    return record["median_ms"] / 1e3, record["mad_ms"] / 1e3


def _peak_over_predicted(record: dict[str, Any]) -> float | None:
    peak, predicted = record["peak_bytes"], record["predicted_bytes"]
    return peak / predicted if peak and predicted else None


class _Llama(ModelSource):
    """LLaMA-2, named by its size, without weights to read."""

    def shapes(self, dtype: str) -> PreTrainedModel:
        """Return the model without weights."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(LLAMA_2[self.name]), dtype=DTYPES[dtype])
        return cast(PreTrainedModel, model)


def print_recipes() -> None:
    """Predict the memory of the trainings of the shipped recipes on a GPU."""
    device = torch.device("cuda")
    for size, name in product(LLAMA_2, RECIPES):
        path = Path(__file__).resolve().parents[2] / "recipes" / "llama" / f"{name}.yaml"
        config = build_config(preset=None, recovery=None, recipe=path, options={}, settings=())
        found = memory_of(TrainedModels(_Llama(size)), config, device, GPU)[1]
        print(f"\n{name}, LLaMA-2-{size}\n\n{memory_table(found, device, GPU)}")


def padding_table(samples: Batch, batch_size: int) -> str:
    """Return the share of padding in a step by the sequences in a pass: packing could save that much.

    Args:
        samples: padded on the right.
        batch_size: sequences in a step.
    """
    steps = [batch_indices(len(samples), batch_size, step + 1, 0) for step in range(len(samples) // batch_size)]
    rows: list[tuple[Cell, ...]] = []
    for size in (size for size in PASSES if size <= batch_size):
        passes = [micro for rows_of in steps for micro in samples[rows_of].micro_batches(size)]
        drawn = [samples[some] for rows_of in steps for some in rows_of.split(size)]
        sorted_, unsorted = (
            1 - sum(b.token_count() for b in found) / sum(len(b) * int(b.real.sum(1).max()) for b in found)
            for found in (passes, drawn)
        )
        rows.append((str(size), f"{sorted_:.1%}", f"{unsorted:.1%}"))
    whole = 1 - samples.token_count() / samples.ids.numel()
    columns = ("sequences in a pass", "padding", "in the order of drawing")
    title = f"{len(samples)} records, steps of {batch_size}; {whole:.1%} where all are as long as the cutoff"
    return f"{title}\n\n{markdown_table(Table(title, columns, tuple(rows)))}"


def _records(file: Path, tokenizer: Any) -> Batch:
    """Tokenise nine tenths of the records of a .jsonl file as the recovery alpaca-lora does."""
    content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    distinct = len(set(content.splitlines()))
    data = replace(recovery("alpaca-lora").data, source=str(file), samples=distinct * 9 // 10)
    return split_disjoint(tokenizer, {"records": data})["records"]


def split_by_tokens(batch: Batch, tokens: int) -> list[Batch]:
    """Split a batch into passes of at most that many tokens with padding: rows of like length together."""
    ordered = torch.argsort(batch.real.sum(1), stable=True)
    lengths = batch.real.sum(1)[ordered].tolist()
    passes: list[list[int]] = []
    for row, length in zip(ordered.tolist(), lengths, strict=True):
        if not passes or (len(passes[-1]) + 1) * length > tokens:
            passes.append([])
        passes[-1].append(row)
    return [batch[torch.tensor(rows)].micro_batches(len(rows))[0] for rows in passes]


class _SplitByTokens(Whole):
    """A model whose steps are split into passes by their tokens."""

    def __init__(self, model: nn.Module, tokens: int) -> None:
        super().__init__(model)
        self.tokens = tokens

    @override
    def shares(self, batch: Batch, config: TrainConfig) -> Iterator[tuple[Batch, bool]]:
        for micro in split_by_tokens(batch, self.tokens):
            yield micro, True


def time_passes(file: Path, tokenizer: Any, options: argparse.Namespace) -> str:
    """Time the first step of the recovery alpaca-lora, split in several ways that take turns; return a table."""
    dense, preset = options.dense, recovery("alpaca-lora").recover
    train = replace(preset.train, learning_rate=RATE, dtype="bfloat16", memory="full", steps=100_000)
    batch = _records(file, tokenizer)[: train.batch_size]
    cases, counts = [], []
    with recovery_model(dense.copy(torch.float32), preset) as model:
        ways: list[tuple[str, Whole, int]] = [(f"{n} records", Whole(model), n) for n in RECORDS_IN_A_PASS]
        ways += [(f"{n} tokens", _SplitByTokens(model, n), 1) for n in TOKENS_IN_A_PASS]
        for name, whole, size in ways:
            config = replace(train, micro_batch_size=size)
            run = _Run(whole, batch, None, config, Objective(), None, False)
            run._make_optimizer()
            cases.append(Case("a step in passes", "bfloat16", f"{len(batch)} records", name, partial(run._step, 1)))
            passes = [micro for micro, _ in whole.shares(batch, config)]
            counts.append((len(passes), sum(micro.ids.numel() for micro in passes)))
        interleave(cases, options.repeats, dense.device)
    records = [case.record() for case in cases]
    append_jsonl(options.jsonl, [{**conditions(dense.device), "model": dense.name, **record} for record in records])
    first = _median_seconds(records[0])[0]
    rows: list[tuple[Cell, ...]] = []
    for record, (number, fed) in zip(records, counts, strict=True):
        seconds, spread = _median_seconds(record)
        times = (f"{seconds:.2f}", f"{spread:.2f}", f"{first / seconds:.2f}")
        rows.append((record["implementation"], str(number), str(fed), *times))
    columns = ("in a pass, at most", "passes", "tokens with padding", "s (median)", "MAD", "times as fast as the first")
    return markdown_table(Table(f"Steps of {len(batch)} records", columns, tuple(rows)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options, measure the forms, report."""
    parser = argparse.ArgumentParser(description="Time whole training steps against a plain PyTorch loop.")
    parser.add_argument("--model", help="folder of a checkpoint (default: SmolLM2-135M, or its shapes)")
    parser.add_argument("--shapes", choices=SHAPES, help="random weights of these shapes in place of --model")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="only these")
    parser.add_argument("--repeats", type=int, default=7, help="samples per implementation")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step")
    parser.add_argument("--length", type=int, default=256, help="tokens in a sequence")
    parser.add_argument("--compiled", action="store_true", help="also with every layer under torch.compile")
    parser.add_argument("--jsonl", type=Path, default=RESULTS, help="file to append to")
    parser.add_argument("--only-table", action="store_true", help="print the tables of the records and run nothing")
    parser.add_argument("--recipes", action="store_true", help="only predict the memory of the shipped recipes")
    parser.add_argument("--padding", type=Path, metavar="FILE", help="only the padding in these records' steps")
    parser.add_argument("--passes", type=Path, metavar="FILE", help="only steps on these records, split in other ways")
    options = parser.parse_args(arguments)
    if options.only_table:
        return print(recorded_tables(options.jsonl))
    if options.padding is not None:
        records_read = _records(options.padding, the_model(options.model)[2])
        return print(padding_table(records_read, recovery("alpaca-lora").recover.train.batch_size))
    if options.recipes:
        return print_recipes()
    options.dense = _dense(options)
    if options.passes is not None:
        return print(time_passes(options.passes, the_model(options.model)[2], options))
    name, device = options.dense.name, options.dense.device
    about = {**conditions(device), "model": name, "length": options.length}
    print(f"{name}, {about['threads']} threads, {about['device']}")
    records: list[dict[str, Any]] = []
    for form in options.forms:
        for record in measure(form, options):
            append_jsonl(options.jsonl, [{**about, "batch": options.batch, **record}])
            records.append(record)
        gc.collect()
    print("\n" + table(records, options.batch * options.length))
    print("\n" + parts_table(records))


def _dense(options: argparse.Namespace) -> Dense:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.shapes is not None:
        return Dense(f"LLaMA's shapes ({options.shapes}), random weights", SHAPES[options.shapes], device)
    name, model, _ = the_model(options.model)
    return Dense(name, model.config, device, model.to(device).train())


if __name__ == "__main__":
    main()
