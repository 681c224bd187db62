"""Count a LLaMA's work in FLOPs and bytes, and predict how much faster a smaller one could be at best."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context

from pyprune.plan import PrunePlan, Sizes
from pyprune.serving.speed.measure import fills_gpu

LayerWidths = Sequence[int]
"""Query heads, KV heads and FFN channels of a layer."""
ITEM_BYTES = 2
"""Of a weight, a key, a value and an activation in bfloat16."""
LOGIT_BYTES = 12
"""Moved for each logit when a token is chosen: written in bfloat16, read and written in float32, and read again."""
RATE_ROWS, RATE_BYTES, RATE_REPEATS = 2048, 2**29, 5


@dataclass(frozen=True)
class Work:
    """Work of a model. A product of two numbers and their sum are two FLOPs.

    Attributes:
        layer_flops: of the layers' matrix products, attention scores among them.
        fixed_flops: of the head, which no cut here makes smaller.
        layer_bytes: the layers' weights, once for each step, and the keys and values that are read.
        fixed_bytes: the head's weights, once for each step, rows of the embedding, and logits.
    """

    layer_flops: float
    fixed_flops: float
    layer_bytes: float
    fixed_bytes: float

    @property
    def flops(self) -> float:
        """Return all FLOPs."""
        return self.layer_flops + self.fixed_flops

    @property
    def bytes(self) -> float:
        """Return all bytes."""
        return self.layer_bytes + self.fixed_bytes


@dataclass(frozen=True)
class Workload:
    """Sequences that are computed side by side.

    Attributes:
        prompt_tokens: of each; a mean where they differ.
        new_tokens: of each. The last one is not read again.
        batch: sequences.
    """

    prompt_tokens: float
    new_tokens: int = 1
    batch: int = 1


@dataclass(frozen=True)
class Rates:
    """Best rates of a machine, with as many threads as vLLM uses.

    Attributes:
        flops: FLOPs per second of a matrix product in bfloat16.
        bytes: bytes per second read from memory.
    """

    flops: float
    bytes: float


@dataclass(frozen=True)
class Ideal:
    """How much faster than the dense model a smaller one could be.

    Attributes:
        flops: the dense model's FLOPs over its own.
        bytes: the dense model's bytes over its own.
        binds: which of the two takes the dense model longer: "FLOPs" or "bytes".
        left: share of the head, the embedding and the choice of tokens in it, which no cut changes.
    """

    flops: float
    bytes: float
    binds: str
    left: float

    @property
    def ratio(self) -> float:
        """Return the ratio of the one that binds."""
        return self.flops if self.binds == "FLOPs" else self.bytes


def layer_parameters(sizes: Sizes, widths: LayerWidths) -> int:
    """Count the weights of a layer's seven matrices: queries, keys, values and outputs, and the three of the MLP."""
    query_heads, kv_heads, ffn = widths
    return sizes.hidden_size * (sizes.head_dim * 2 * (query_heads + kv_heads) + 3 * ffn)


def parameters(sizes: Sizes, layers: Sequence[LayerWidths]) -> int:
    """Count all weights of a model whose head is its embedding, norms among them."""
    norms = (2 * len(layers) + 1) * sizes.hidden_size
    return sum(layer_parameters(sizes, w) for w in layers) + sizes.hidden_size * sizes.vocab_size + norms


def work(sizes: Sizes, layers: Sequence[LayerWidths], load: Workload) -> Work:
    """Count the work of a model for a workload.

    The prompts are read in one step, which chooses the first new token of each; every further token is a step for all
    sequences. A token attends to itself and to those before it. Activations are not counted as bytes: they stay in the
    caches.

    Args:
        sizes: of the dense model; its hidden size, head_dim and vocabulary count.
        layers: widths of every layer that stays.
        load: the workload.
    """
    weights = sum(layer_parameters(sizes, widths) for widths in layers)
    head = sizes.hidden_size * sizes.vocab_size
    read = load.prompt_tokens + load.new_tokens - 1
    pairs = read * (read + 1) / 2
    scores = sum(4 * sizes.head_dim * query_heads * pairs for query_heads, _, _ in layers)
    # At every step the keys and values so far: prompt_tokens of them at first, ``read`` at last.
    cached = load.new_tokens * (load.prompt_tokens + read) / 2
    cache = sum(2 * ITEM_BYTES * sizes.head_dim * kv_heads * cached for _, kv_heads, _ in layers)
    chosen = load.batch * load.new_tokens
    return Work(
        layer_flops=load.batch * (2 * weights * read + scores),
        fixed_flops=2 * head * chosen,
        layer_bytes=ITEM_BYTES * weights * load.new_tokens + load.batch * cache,
        fixed_bytes=ITEM_BYTES * head * load.new_tokens
        + LOGIT_BYTES * sizes.vocab_size * chosen
        + ITEM_BYTES * sizes.hidden_size * read * load.batch,
    )


def ideal(dense: Work, smaller: Work, rates: Rates) -> Ideal:
    """Return how much faster a smaller model could be than the dense one on a machine.

    Args:
        dense: the dense model's work.
        smaller: the same workload by the smaller model.
        rates: of the machine: they decide whether FLOPs or bytes bind.
    """
    computing = dense.flops / rates.flops >= dense.bytes / rates.bytes
    left = dense.fixed_flops / dense.flops if computing else dense.fixed_bytes / dense.bytes
    return Ideal(dense.flops / smaller.flops, dense.bytes / smaller.bytes, "FLOPs" if computing else "bytes", left)


def machine_rates(plan: PrunePlan) -> dict[str, float]:
    """Call :func:`measure_rates` for vLLM's device; for a GPU in a separate process, which frees its memory."""
    if not fills_gpu("vllm"):
        return measure_rates(plan)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure_rates, plan, "cuda").result()


def measure_rates(plan: PrunePlan, device: str = "cpu") -> dict[str, float]:
    """Measure :class:`Rates`: the up product of an MLP over 2,048 rows, and 512 MiB that are read.

    On a CPU with as many threads as vLLM computes with, which is one fewer than there are cores. The fastest of five
    turns.

    Args:
        plan: the dense model's, for the sizes.
        device: cpu or cuda.

    Returns:
        The rates by name, and "threads": 0 on a GPU.
    """
    import torch

    from bench.kernels.ops_setting import read

    before = torch.get_num_threads()
    threads = max(1, len(os.sched_getaffinity(0)) - 1)
    torch.set_num_threads(threads)
    try:
        hidden, ffn = plan.dense.hidden_size, plan.dense.intermediate_size
        rows = torch.randn(RATE_ROWS, hidden).bfloat16().to(device)
        weight = torch.randn(ffn, hidden).bfloat16().to(device)
        memory = torch.ones(RATE_BYTES // 4, dtype=torch.int32, device=device)
        with torch.inference_mode():
            product = _fastest(lambda: torch.nn.functional.linear(rows, weight), device)
            stream = _fastest(lambda: read(memory), device)
    finally:
        torch.set_num_threads(before)
    rates = Rates(2 * RATE_ROWS * hidden * ffn / product, RATE_BYTES / stream)
    return {**asdict(rates), "threads": threads if device == "cpu" else 0}


def _fastest(call: Callable[[], object], device: str) -> float:
    """Return the seconds of the fastest turn, after one that does not count."""
    import torch

    seconds = []
    for _ in range(RATE_REPEATS + 1):
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
