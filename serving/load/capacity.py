"""How many sequences the key-value cache holds: computed from config.json, and what a server says in its log."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

CONCURRENCY = re.compile(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x")
BLOCK = re.compile(r"Setting kv cache block size to (\d+)")
"""vLLM's line where the attention does not take the size that it would have chosen."""
BLOCK_LABEL = re.compile(r'^vllm:cache_config_info\{(?:[^\n]*[{,])?block_size="(\d+)"', re.MULTILINE)
COMPILED = re.compile(r"torch\.compile took ([\d.]+) s in total")
MODE = re.compile(r"Initializing a V1 LLM engine .*compilation_config=.*?'mode': <CompilationMode\.(\w+)")
LENGTH = re.compile(r"Initializing a V1 LLM engine .*max_seq_len=(\d+)")
"""vLLM's line with the configuration that it runs, whatever its options, their file and the platform made of it."""
NOT_COMPILED = "NONE"
"""Its word for a model that is not compiled."""


@dataclass(frozen=True)
class Capacity:
    """What a key-value cache holds.

    Attributes:
        token_bytes: keys and values of one token in all layers; 0 = the server alone says what its cache holds.
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

    def held(self, tokens: int) -> float:
        """Sequences of so many tokens, at most the context, that fit.

        Where the server's log is believed instead of what is computed, it counts sequences of the whole context: of
        shorter ones the cache holds as many at least.
        """
        if not self.token_bytes:
            return self.reported or 0.0
        computed, whole = replace(self, context=tokens).sequences, self.sequences
        if self.reported is None or self.confirmed:
            return computed
        return max(computed * min(1.0, self.reported / whole), self.reported) if whole else self.reported

    @property
    def confirmed(self) -> bool | None:
        """Whether the server says the same, to the two digits that it prints; None where only one of both is known."""
        return None if self.reported is None or not self.token_bytes else abs(self.sequences - self.reported) < 0.0051


@dataclass(frozen=True)
class ServerFacts:
    """What a server says about itself once it is up.

    Attributes:
        block_tokens: tokens of a block of its cache; None where it does not say.
        context: tokens of the sequences that ``sequences`` counts; None where it does not say.
        sequences: as many as its cache holds; None where it does not say.
        compile_seconds: that torch.compile took, as vLLM counts it; None where nothing was compiled, and on a CPU, of
            which vLLM does not say it.
        compilation: vLLM's name of how the model is compiled, :data:`NOT_COMPILED` among them; None where it does not
            say.
        max_model_len: tokens of the longest sequence that it takes; None where it does not say.
    """

    block_tokens: int | None
    context: int | None
    sequences: float | None
    compile_seconds: float | None
    compilation: str | None = None
    max_model_len: int | None = None


def server_facts(log: str, metrics: str) -> ServerFacts:
    """Read what a server said.

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
