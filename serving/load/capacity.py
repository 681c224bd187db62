"""Sequences that the key-value cache holds: computed from config.json, and reported in the server's log."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

CONCURRENCY = re.compile(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x")
BLOCK = re.compile(r"Setting kv cache block size to (\d+)")
"""vLLM's line where the attention does not take the default size."""
BLOCK_LABEL = re.compile(r'^vllm:cache_config_info\{(?:[^\n]*[{,])?block_size="(\d+)"', re.MULTILINE)
COMPILED = re.compile(r"torch\.compile took ([\d.]+) s in total")
MODE = re.compile(r"Initializing a V1 LLM engine .*compilation_config=.*?'mode': <CompilationMode\.(\w+)")
LENGTH = re.compile(r"Initializing a V1 LLM engine .*max_seq_len=(\d+)")
"""vLLM's line with the final configuration, after options, their file and the platform."""
NOT_COMPILED = "NONE"
"""vLLM's word for a model that is not compiled."""


@dataclass(frozen=True)
class Capacity:
    """The content of a key-value cache.

    Attributes:
        token_bytes: keys and values of one token in all layers; 0 = only the server knows.
        block_tokens: tokens of a block; a sequence occupies whole blocks.
        memory: bytes of the cache.
        context: tokens of a sequence.
        reported: sequences of ``context`` tokens by the server's log; None without that line.
    """

    token_bytes: int
    block_tokens: int
    memory: int
    context: int
    reported: float | None = None

    @property
    def sequences(self) -> float:
        """Return the sequences of ``context`` tokens that fit, as vLLM computes it: whole blocks over those of one."""
        if not self.token_bytes:
            return 0.0
        blocks = self.memory // (self.block_tokens * self.token_bytes)
        return blocks / -(-self.context // self.block_tokens)

    def held(self, tokens: int) -> float:
        """Return the sequences of this number of tokens, at most the context, that fit.

        Where log and computation differ, the log is used. It counts sequences of the whole context: the cache holds at
        least as many shorter ones.
        """
        if not self.token_bytes:
            return self.reported or 0.0
        computed, whole = replace(self, context=tokens).sequences, self.sequences
        if self.reported is None or self.is_confirmed:
            return computed
        return max(computed * min(1.0, self.reported / whole), self.reported) if whole else self.reported

    @property
    def is_confirmed(self) -> bool | None:
        """Check that the log agrees, to the two digits that it prints; None where one of both is unknown."""
        return None if self.reported is None or not self.token_bytes else abs(self.sequences - self.reported) < 0.0051


@dataclass(frozen=True)
class ServerFacts:
    """The facts that a server reports after its start; None for each that it does not report.

    Attributes:
        block_tokens: tokens of a block of its cache.
        context: tokens of the sequences that ``sequences`` counts.
        sequences: that its cache holds.
        compile_seconds: of torch.compile, as vLLM counts it; None also where nothing was compiled, and on a CPU.
        compilation: vLLM's name of the mode of compilation, such as :data:`NOT_COMPILED`.
        max_model_len: tokens of the longest sequence that it takes.
    """

    block_tokens: int | None
    context: int | None
    sequences: float | None
    compile_seconds: float | None
    compilation: str | None = None
    max_model_len: int | None = None


def server_facts(log: str, metrics: str) -> ServerFacts:
    """Read the facts of a server.

    Args:
        log: everything that it printed.
        metrics: the answer of its /metrics.
    """
    cache, compiled = CONCURRENCY.search(log), COMPILED.search(log)
    block = BLOCK.search(log) or BLOCK_LABEL.search(metrics)
    mode, length = MODE.search(log), LENGTH.search(log)
    return ServerFacts(
        block_tokens=int(block[1]) if block else None,
        context=int(cache[1].replace(",", "")) if cache else None,
        sequences=float(cache[2]) if cache else None,
        compile_seconds=float(compiled[1]) if compiled else None,
        compilation=mode[1] if mode else None,
        max_model_len=int(length[1]) if length else None,
    )
