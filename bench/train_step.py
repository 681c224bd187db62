r"""A whole training step, ours and a plain PyTorch loop's, at equal work: seconds, tokens a second, peak memory.

    python -m bench.train_step [--model DIR] [--forms dress elder lora distil] [--repeats 7] [--batch 8] [--length 256]
    python -m bench.train_step --recipes      # what the shipped recipes hold at 7B and 13B on 76 GiB; measures nothing

The model is SmolLM2-135M where its package is installed, otherwise its configuration with random weights. Forms:

* dress: DReSS as published, the l2 penalty on the last quarter of the hidden channels.
* elder: ELDeR as published, the l2 norm of what seven layers add to the stream.
* lora: recovery by LoRA of rank 32 on every projection.
* distil: recovery of all weights, half on the text and half on the dense model's logits.

Each is one step of the product's own loop (:func:`pyprune.train.loop.train`), in full and in lean memory, with the
options that presets have (bfloat16 autocast over float32 weights, clipping at 1, a copy of the last good weights), and
of a plain loop: torch's fused AdamW, autocast, the penalty by autograd, torch's clipping, Transformers' own loss. Steps
take turns; the learning rate is so small that the weights stay. Peaks are of torch's allocator, with everything that
lives between steps; beside them stands what :mod:`pyprune.train.memory` predicts. Every sample is appended to --jsonl.
"""

from __future__ import annotations

import argparse
import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from bench._timing import Case, conditions, interleave
from bench.optimizer import RATE, RESULTS, extra_peak, the_model, tokens
from pyprune.config.train import DistillConfig, RecoverConfig, TrainConfig
from pyprune.data.tokens import Batch
from pyprune.families import family_for
from pyprune.methods.regularise.dress import DressOptions
from pyprune.methods.regularise.dress.training import DressObjective, hidden_slices
from pyprune.methods.regularise.elder import ElderOptions
from pyprune.methods.regularise.elder.penalty import ElderObjective
from pyprune.recipe import build_config
from pyprune.report import Table, markdown_table
from pyprune.run_memory import Source, memory_of, memory_table
from pyprune.runtime.device import DTYPES
from pyprune.runtime.records import append_jsonl
from pyprune.train.lean import to_bfloat16
from pyprune.train.loop import _Run
from pyprune.train.lora import adapted
from pyprune.train.memory import training_memory
from pyprune.train.objective import Objective
from pyprune.train.recover import recovery_objective

Form = Literal["dress", "elder", "lora", "distil"]
FORMS: tuple[Form, ...] = ("dress", "elder", "lora", "distil")
LABELS: dict[Form, str] = {
    "dress": "DReSS, papers' form",
    "elder": "ELDeR, papers' form",
    "lora": "recovery by LoRA",
    "distil": "recovery of all weights with distillation",
}
PLAIN, FULL, LEAN = "plain PyTorch loop", "ours, full memory", "ours, lean memory"
LAYERS = range(13, 20)
CLIP = 1.0


LLAMA_2 = {
    "7B": LlamaConfig(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32),
    "13B": LlamaConfig(
        vocab_size=32000, hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40,
        num_key_value_heads=40,
    ),
}  # fmt: skip
RECIPES = ("llama2-7b-dress", "llama2-7b-elder", "llama2-7b-trsp", "llama-7b-moreau")
GPU = 76 * 2**30
"""Bytes that a GPU of 80 GB leaves to a process."""


@dataclass
class Contender:
    """One implementation of a step.

    Attributes:
        name: of it.
        step: does one.
        held: what lives between steps, tensors.
        predicted: peak, bytes; None for the plain loop.
    """

    name: str
    step: Callable[[], object]
    held: Callable[[], list[Tensor]]
    predicted: int | None = None


@contextmanager
def contender(name: str, form: Form, dense: PreTrainedModel, options: argparse.Namespace) -> Iterator[Contender]:
    """An implementation of a form, with a model of its own."""
    model, teacher = copy.deepcopy(dense), None
    if form == "distil":
        teacher = copy.deepcopy(dense).to(torch.bfloat16).eval()
    if name == LEAN:
        to_bfloat16(model)
    recover = RecoverConfig(adapters="lora" if form == "lora" else "none", rank=32, alpha=10.0)
    with adapted(model, recover) as trained:
        make = _plain if name == PLAIN else partial(_ours, memory="lean" if name == LEAN else "full")
        with make(form, trained, teacher, recover, options) as found:
            found.name = name
            yield found


@contextmanager
def _ours(
    form: Form,
    model: Any,
    teacher: PreTrainedModel | None,
    recover: RecoverConfig,
    options: argparse.Namespace,
    memory: Literal["full", "lean"],
) -> Iterator[Contender]:
    """A step of the product's loop."""
    size = options.batch
    config = TrainConfig(
        optimizer="fused_adamw", learning_rate=RATE, batch_size=size, micro_batch_size=size, max_grad_norm=CLIP,
        dtype="bfloat16", memory=memory, steps=100_000,
    )  # fmt: skip
    objective = _objective(form, model, teacher, replace(recover, train=config))
    batch = Batch.of(tokens(options.dense, size, options.length))
    run = _Run(model, batch, None, config, objective, None, True)
    objective.setup(model, config)
    run._make_optimizer()
    numbers = count(1)

    def held() -> list[Tensor]:
        states = [t for state in run.optimizer.state.values() for t in state.values()]
        return [*_weights(model, teacher), *states, *run.last_good.values()]

    with run._stepping():
        predicted = _predicted(form, options.dense, replace(recover, train=config), options.length)
        yield Contender("", lambda: run._step(next(numbers)), held, predicted)
    objective.teardown(model)


def _predicted(form: Form, dense: PreTrainedModel, recover: RecoverConfig, length: int) -> int:
    """The peak that shapes alone tell."""
    dtypes = (torch.bfloat16 if recover.train.memory == "lean" else torch.float32, torch.bfloat16)
    with torch.device("meta"):
        model, other = (AutoModelForCausalLM.from_config(copy.deepcopy(dense.config), dtype=dtype) for dtype in dtypes)
    teacher = other if form == "distil" else None
    with adapted(model, recover) as trained:
        objective = _objective(form, model, teacher, recover)
        found = training_memory(trained, recover.train, objective, length, device=dense.device, teacher=teacher)
    return found.total


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
) -> Iterator[Contender]:
    """A step as a user would write it."""
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0, fused=True)
    ids = tokens(options.dense, options.batch, options.length)
    stream: list[Tensor] = []
    handles = [_watched(layer, stream) for layer in _watched_layers(form, model)]

    def step() -> None:
        stream.clear()
        with torch.autocast(ids.device.type, dtype=torch.bfloat16):
            out = model(input_ids=ids, labels=ids, use_cache=False)
            loss = out.loss if teacher is None else _distilled(out, teacher, ids)
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

    yield Contender("", step, held)
    for handle in handles:
        handle.remove()


def _watched_layers(form: Form, model: Any) -> list[nn.Module]:
    layers = family_for(model).layers(model) if form == "elder" else []
    return [layers[i] for i in LAYERS] if layers else []


def _watched(layer: nn.Module, stream: list[Tensor]) -> Any:
    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        after = output[0] if isinstance(output, tuple) else output
        stream.append((after.float() - inputs[0].float()).norm(dim=-1).mean())

    return layer.register_forward_hook(hook)


def _distilled(out: Any, teacher: PreTrainedModel, ids: Tensor) -> Tensor:
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


def measure(form: Form, dense: PreTrainedModel, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time the three in turns, and then find the peak of each."""
    names = (PLAIN, FULL, LEAN)
    managers = [contender(name, form, dense, options) for name in names]
    found = [manager.__enter__() for manager in managers]
    variant = f"{options.batch} x {options.length} tokens"
    cases = [Case(LABELS[form], "bfloat16", variant, c.name, c.step) for c in found]
    interleave(cases, options.repeats, dense.device)
    peaks = []
    for c in found:
        between = sum({id(t): t.nbytes for t in c.held()}.values())
        peaks.append(between + extra_peak(c.step, dense.device))
    for manager in managers:
        manager.__exit__(None, None, None)
    return [
        {**case.record(), "peak_bytes": peak, "predicted_bytes": c.predicted}
        for case, peak, c in zip(cases, peaks, found, strict=True)
    ]


def table(records: Sequence[dict[str, Any]], work: int) -> str:
    """One line a form and implementation; ratios are to the plain loop of the same form."""
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
    )
    rows = []
    plain: dict[str, Any] = {}
    for record in records:
        seconds, spread = _median([ms / 1e3 for ms in record["samples_ms"]])
        if record["implementation"] == PLAIN:
            plain = {"seconds": seconds, "peak": record["peak_bytes"]}
        rows.append(
            (
                record["op"], record["implementation"], f"{seconds:.2f}", f"{spread:.2f}", f"{work / seconds:.0f}",
                f"{plain['seconds'] / seconds:.2f}", f"{record['peak_bytes'] / 1e6:.0f}",
                f"{record['peak_bytes'] / plain['peak']:.2f}",
                f"{record['predicted_bytes'] / 1e6:.0f}" if record.get("predicted_bytes") else None,
            )
        )  # fmt: skip
    return markdown_table(Table("Whole training steps", columns, tuple(rows)))


class _Llama(Source):
    """LLaMA-2 by its size; there are no weights to read."""

    def shapes(self, dtype: str) -> PreTrainedModel:
        """The model without weights."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(LLAMA_2[str(self.model)]), dtype=DTYPES[dtype])
        return cast(PreTrainedModel, model)


def print_recipes() -> None:
    """What the trainings of the shipped recipes hold, memory decided for a GPU."""
    device = torch.device("cuda")
    for size, name in product(LLAMA_2, RECIPES):
        path = Path(__file__).resolve().parents[1] / "recipes" / "llama" / f"{name}.yaml"
        config = build_config(preset=None, recovery=None, recipe=path, options={}, settings=())
        found = memory_of(_Llama(size, {}), config, device, GPU)[1]
        print(f"\n{name}, LLaMA-2-{size}\n\n{memory_table(found, device, GPU)}")


def _median(values: Sequence[float]) -> tuple[float, float]:
    from pyprune.serving.stats import mad, median

    return median(values), mad(values)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options, measure the forms, report."""
    parser = argparse.ArgumentParser(description="Time whole training steps against a plain PyTorch loop.")
    parser.add_argument("--model", help="folder of a checkpoint (default: SmolLM2-135M, or its shapes)")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="only these")
    parser.add_argument("--repeats", type=int, default=7, help="samples per implementation")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step")
    parser.add_argument("--length", type=int, default=256, help="tokens in a sequence")
    parser.add_argument("--jsonl", type=Path, default=RESULTS, help="file to append to")
    parser.add_argument("--recipes", action="store_true", help="only what the shipped recipes hold")
    options = parser.parse_args(arguments)
    if options.recipes:
        return print_recipes()
    name, model, _ = the_model(options.model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.dense = model.to(device).train()
    about = {**conditions(device), "model": name, "length": options.length}
    print(f"{name}, {about['threads']} threads, {about['device']}")
    records: list[dict[str, Any]] = []
    for form in options.forms:
        found = measure(form, options.dense, options)
        append_jsonl(options.jsonl, ({**about, "batch": options.batch, **record} for record in found))
        records += found
        gc.collect()
    print("\n" + table(records, options.batch * options.length))


if __name__ == "__main__":
    main()
