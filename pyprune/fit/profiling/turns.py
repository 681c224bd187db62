"""Load engines of several models side by side, and time them in turns with the dense model."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyprune.fit.profile import DENSE, Timing
from pyprune.fit.profiling.probes import Model
from pyprune.fit.quantities import Quantity
from pyprune.runtime.host import available_memory
from pyprune.runtime.progress import say, time_left, track
from pyprune.serving.engines import Engine, EngineName, engine_bytes, let_settle
from pyprune.serving.speed.measure import fills_gpu, sequence_bytes
from pyprune.serving.speed.results import SHORT_PROMPT_TOKENS, Workload

Enough = Callable[[Sequence[Timing]], bool]
WARM_TOKENS = 8
"""New tokens of a warm-up generation, in which every kernel runs once with these shapes."""
QUICK_S = 2.0
"""If turns of the first model are shorter than this many seconds, all are repeated more often."""
QUICK_TURNS = 3
MEMORY_SHARE = 0.8
"""Share of the free memory that engines may take."""


class EngineGroup:
    """Engines of several models that are loaded together, warmed up, and timed in turns with the first one.

    Args:
        engine: vllm, transformers or llamacpp.
        dtype: of weights and activations, or GGUF format.
        quantities: the workloads.
        vocab_size: token ids of prompts are below it.
        seed: of the prompts, which are the same for all models and differ between repeats.
        eager: run vLLM without compiling; None = on a CPU.
    """

    def __init__(
        self,
        engine: EngineName,
        dtype: str,
        quantities: Sequence[Quantity],
        vocab_size: int,
        seed: int = 0,
        *,
        eager: bool | None = None,
    ) -> None:
        self.engine, self.dtype, self.quantities = engine, dtype, list(quantities)
        self.vocab_size, self.seed, self.eager = vocab_size, seed, eager
        self.engines: dict[str, Engine] = {}
        self.device: str | None = None
        self.began = time.perf_counter()

    def load(self, models: Mapping[str, Model]) -> None:
        """Start the engines of (folder or file, config.json as plain data), two at a time, and warm them up."""
        with ThreadPoolExecutor(max_workers=2) as pool:
            loads = {name: pool.submit(self._start, *model) for name, model in models.items()}
            failure = None
            for name, load in loads.items():
                try:
                    self.engines[name] = load.result()
                except Exception as error:  # the caller closes the others that have started
                    failure = failure or error
        if failure is not None:
            raise failure
        for name in models:
            self._warm(self.engines[name])
            self.device = self.engines[name].device or self.device

    def turn(self, name: str, quantity: Quantity, repeat: int, group: int) -> Timing:
        """Time one request of a model."""
        let_settle(len(self.engines) - 1, self.engine)
        start = time.perf_counter() - self.began
        seconds, _ = self.engines[name].generate(self.prompts(quantity, repeat), _new_tokens(quantity))
        return Timing(name, quantity, group, start, seconds)

    def round(
        self,
        names: Sequence[str],
        repeats: int,
        group: int,
        *,
        enough: Enough = lambda _: False,
    ) -> Iterator[Timing]:
        """Time every workload and repeat of the models, the first of ``names`` also at the end of each workload.

        Workloads that take the first model less than :data:`QUICK_S` have :data:`QUICK_TURNS` times as many repeats,
        because other processes disturb a short turn more.

        Args:
            names: of loaded engines.
            repeats: turns of each.
            group: number of the group in the timings.
            enough: (turns of a workload so far, the same number of each model and a last one of the first) -> True
                ends the workload.
        """
        for quantity in self.quantities:
            seen = [self.turn(names[0], quantity, 0, group)]
            yield seen[0]
            total = repeats * (QUICK_TURNS if seen[0].seconds < QUICK_S else 1)
            for repeat in range(total):
                order = [(name, repeat) for name in names[1:]]
                if order or repeat + 1 < total:
                    order.append((names[0], repeat + 1))
                for name, number in order:
                    seen.append(self.turn(name, quantity, number, group))
                    yield seen[-1]
                if enough(seen):
                    break

    def time_groups(
        self,
        dense: Model,
        names: Sequence[str],
        write: Callable[[str], Model | None],
        *,
        room: int,
        repeats: int,
        enough: Enough = lambda _: False,
    ) -> Iterator[tuple[list[str], list[Timing]]]:
        """Time models in turns with the dense one, as many at once as there is room for.

        The dense model remains loaded if there is room for two engines; else they are loaded one after another.

        Args:
            dense: the dense model, written.
            names: of the others.
            write: writes one of these when its turn comes; returns None to leave it out.
            room: most engines that are loaded at once.
            repeats: see :meth:`round`.
            enough: see :meth:`round`; only for models that are loaded side by side.

        Yields:
            (names of the models of a group, all turns of the group, the dense model's among them).
        """
        starts = range(0, len(names), step := max(1, room - 1))
        began = time.perf_counter()
        for number, start in enumerate(starts):
            written = {name: write(name) for name in names[start : start + step]}
            models = {name: model for name, model in written.items() if model is not None}
            if models:
                left = time_left(began, number, len(starts))
                where = f"in turns with the dense model in {self.engine} ({number + 1} of {len(starts)}{left})"
                say(f"Timing {', '.join(models)} {where}.")
                turns = self.time_group(dense, models, repeats, group=number, enough=enough, resident=room > 1)
                yield list(models), list(turns)

    def time_group(
        self,
        dense: Model,
        models: Mapping[str, Model],
        repeats: int,
        *,
        resident: bool,
        group: int = 0,
        enough: Enough = lambda _: False,
    ) -> Iterator[Timing]:
        """Time models in turns with the dense one: all loaded at once, or one after another.

        Args:
            dense: the dense model, written.
            models: the others.
            repeats: see :meth:`round`.
            resident: load all at once.
            group: number of the group in the timings.
            enough: see :meth:`round`; only with ``resident``.
        """
        if resident:
            self.load(models if DENSE in self.engines else {DENSE: dense, **models})
            turns = self.round([DENSE, *models], repeats, group, enough=enough)
            yield from track(turns, f"timing with {self.engine}")
            self.close(list(models))
            return
        for name, model in ((DENSE, dense), *models.items()):
            self.load({name: model})
            yield from self.round([name], repeats, group)
            self.close([name])

    def close(self, names: Sequence[str] | None = None) -> None:
        """End engines; None = all."""
        for name in list(self.engines) if names is None else names:
            if name in self.engines:
                self.engines.pop(name).close()

    def __enter__(self) -> EngineGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, model: Path, config: Mapping[str, Any]) -> Engine:
        options = {
            "model": str(model),
            "dtype": self.dtype,
            "seed": self.seed,
            "eager": self.eager,
            "max_length": max(longest_sequence(q) for q in self.quantities),
            "max_sequences": max(q.batch for q in self.quantities),
            "kv_cache_bytes": cache_bytes(config, self.quantities, self.dtype),
        }
        return Engine(self.engine, options)

    def _warm(self, engine: Engine) -> None:
        for quantity in self.quantities:
            engine.generate(self.prompts(quantity, -1), min(WARM_TOKENS, _new_tokens(quantity)))

    def prompts(self, quantity: Quantity, repeat: int) -> list[list[int]]:
        """Return the token ids of the prompts with which a quantity is measured."""
        if quantity.kind == "prefill" or quantity.prompt:
            work = Workload(quantity.batch, prompt_tokens=quantity.prompt or quantity.tokens, seed=self.seed)
            return work.prompts("prompt", repeat, self.vocab_size, count=quantity.batch)
        return Workload(quantity.batch, seed=self.seed).prompts("generation", repeat, self.vocab_size)


def _new_tokens(quantity: Quantity) -> int:
    return quantity.tokens if quantity.kind == "generation" else 1


def cache_bytes(config: Mapping[str, Any], quantities: Sequence[Quantity], dtype: str) -> int:
    """Return the bytes of key/value cache for the largest of the workloads."""
    width = "float32" if dtype == "float32" else "bfloat16"
    return max(sequence_bytes(config, q.batch, longest_sequence(q), width) for q in quantities)


def written_bytes(folder: Path) -> int:
    """Sum the bytes of the weights in a folder and its subfolders."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.suffix in (".safetensors", ".gguf"))


def room_for(engine: EngineName, weight_bytes: int, cache: int) -> int:
    """Return the number of engines of a model's size that fit into the free memory at once, at least 1.

    Args:
        engine: vllm, transformers or llamacpp.
        weight_bytes: of the weights.
        cache: bytes of key/value cache.
    """
    if fills_gpu(engine):
        return 1
    return max(1, int(MEMORY_SHARE * available_memory() // engine_bytes(engine, weight_bytes, cache)))


def longest_sequence(quantity: Quantity) -> int:
    """Return the tokens of the longest sequence of a workload."""
    return quantity.tokens + (1 if quantity.kind == "prefill" else quantity.prompt or SHORT_PROMPT_TOKENS)


@contextmanager
def visible(device: str) -> Iterator[None]:
    """Make only this device visible to engines that start in the block: the CPU, or one of the accelerators.

    Args:
        device: cpu, or cuda:N; auto and cuda change nothing.
    """
    name, (kind, _, index) = "CUDA_VISIBLE_DEVICES", device.partition(":")
    before = os.environ.get(name)
    if kind == "cpu":
        os.environ[name] = ""
    elif index:
        os.environ[name] = before.split(",")[int(index)] if before else index
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
