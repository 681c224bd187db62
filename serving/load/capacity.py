"""How many sequences the key-value cache holds: computed from config.json, and what a server says in its log."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pyprune.serving.widths import LayerSizes, head_channels, layer_widths

CONCURRENCY = re.compile(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x")
BLOCK = re.compile(r"Setting kv cache block size to (\d+)")
"""vLLM's line where the attention does not take the size that it would have chosen."""
BLOCK_LABEL = re.compile(r'^vllm:cache_config_info\{(?:[^\n]*[{,])?block_size="(\d+)"', re.MULTILINE)
COMPILED = re.compile(r"torch\.compile took ([\d.]+) s in total")


@dataclass(frozen=True)
class Capacity:
    """What a key-value cache holds.

    Attributes:
        token_bytes: keys and values of one token in all layers.
        block_tokens: tokens of a block; a sequence occupies whole blocks.
        memory: bytes of the cache.
        context: tokens of a sequence.
        reported: sequences of ``context`` tokens that the server says it holds; None where it does not say so.
    """

    token_bytes: int
    block_tokens: int
    memory: int
    context: int
    reported: float | None = None

    @property
    def sequences(self) -> float:
        """Sequences of ``context`` tokens that fit, computed as vLLM does: whole blocks over the blocks of one."""
        if not self.token_bytes:
            return 0.0
        blocks = self.memory // (self.block_tokens * self.token_bytes)
        return blocks / -(-self.context // self.block_tokens)

    @property
    def confirmed(self) -> bool | None:
        """Whether the server says the same, to the two digits that it prints; None where it does not say."""
        return None if self.reported is None else abs(self.sequences - self.reported) < 0.0051


@dataclass(frozen=True)
class ServerFacts:
    """What a server says about itself once it is up.

    Attributes:
        block_tokens: tokens of a block of its cache; None where it does not say.
        context: tokens of the sequences that ``sequences`` counts; None where it does not say.
        sequences: as many as its cache holds; None where it does not say.
        compile_seconds: that torch.compile took, as vLLM counts it; None where nothing was compiled, and on a CPU, of
            which vLLM does not say it.
    """

    block_tokens: int | None
    context: int | None
    sequences: float | None
    compile_seconds: float | None


def server_facts(log: str, metrics: str) -> ServerFacts:
    """Read what a server said.

    Args:
        log: everything that it printed.
        metrics: the answer of its /metrics.
    """
    cache, compiled = CONCURRENCY.search(log), COMPILED.search(log)
    block = BLOCK.search(log) or BLOCK_LABEL.search(metrics)
    return ServerFacts(
        block_tokens=int(block[1]) if block else None,
        context=int(cache[1].replace(",", "")) if cache else None,
        sequences=float(cache[2]) if cache else None,
        compile_seconds=float(compiled[1]) if compiled else None,
    )


def token_bytes(config: Mapping[str, Any], dtype: str) -> int:
    """Return the bytes of keys and values that one token takes in all layers; skipped attention takes none.

    Args:
        config: config.json as plain data, of a dense or a pruned architecture.
        dtype: of the cache: bfloat16, float16 or float32.
    """
    return token_bytes_of(layer_widths(config), head_channels(config), dtype)


def token_bytes_of(layers: Iterable[LayerSizes], head_dim: int, dtype: str) -> int:
    """The same, where the widths are known.

    Args:
        layers: their widths.
        head_dim: channels of a head.
        dtype: of the cache.
    """
    item = 4 if dtype == "float32" else 2
    return 2 * head_dim * item * sum(kv_heads for _, kv_heads, _ in layers)
