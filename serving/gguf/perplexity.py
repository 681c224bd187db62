"""Perplexity of a GGUF file, as llama.cpp computes it.

llama.cpp's server gives log probabilities of tokens that it generates and none of a prompt. So the text is generated.
For every position the server gets the window up to it, of which its cache holds all but the last token. A bias makes
the next token the most likely one; the reported log probability leaves the bias out. So the path of generation is
measured, one token at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from pyprune.data.sources import evaluation_split, read_corpus, text_sha256
from pyprune.errors import DataError
from pyprune.families import all_families
from pyprune.families.exceptions import EXCEPTIONS
from pyprune.families.gemma4 import GIVEN
from pyprune.families.gguf_types import FORMS
from pyprune.quality.perplexity import (
    EvaluationError,
    EvaluationText,
    PerplexityResult,
    build_result,
    cut_windows,
    window_size,
)
from pyprune.runtime.progress import track
from pyprune.serving.checkpoints import Checkpoint, read_gguf
from pyprune.serving.gguf.server import LlamaServer

SLOTS = 4
"""Windows that are computed at once."""
BIAS = 1e4
"""Added to the logit of the token that has to come; logits of real models stay far below it."""
NO_LOSS = 1e38
"""llama.cpp reports a probability of 0 as the lowest float32."""


def gguf_perplexity(
    path: str | Path,
    source: str | EvaluationText,
    protocol: str = "ppl-2048",
    *,
    split: str | None = None,
    field: str | None = None,
    window: int | None = None,
    max_tokens: int | None = None,
    slots: int = SLOTS,
    float32: bool = False,
    threads: int | None = None,
) -> PerplexityResult:
    """Measure the perplexity of a GGUF file with llama.cpp, by the protocols of :mod:`pyprune.quality.perplexity`.

    Args:
        path: the file.
        source: a source, which llama.cpp tokenises, or a tokenised text.
        protocol: "ppl-2048" or "ppl-128".
        split, field: see :func:`pyprune.quality.perplexity.evaluation_text`.
        window, max_tokens: see :func:`pyprune.quality.perplexity.perplexity`.
        slots: windows that are computed at once.
        float32: compute with a float32 cache and without flash attention, to compare with Transformers; by default with
            llama.cpp's choices.
        threads: see :class:`pyprune.serving.gguf.server.LlamaServer`.

    Raises:
        ConfigError, DataError, EvaluationError: see :func:`pyprune.quality.perplexity.perplexity`.
        CheckpointError: the file is damaged, or llama.cpp does not load it.
        MissingDependencyError: gguf or xllamacpp is not installed.
    """
    size = window_size(protocol, window)
    facts = read_gguf(Path(path))
    if facts.max_length is not None and facts.max_length < size:
        raise DataError(
            f"A window has {size} tokens, but {path} reads at most {facts.max_length} (context_length). Choose a "
            "protocol with a shorter window."
        )
    with LlamaServer(path, slots=slots, context=size, float32=float32, threads=threads) as server:
        text = source if isinstance(source, EvaluationText) else _read(server, source, split, field)
        bos = _bos(facts)
        windows = cut_windows(text.token_ids, size, max_tokens, text.max_windows, text.source, bos)
        if int(windows.min()) < 0 or int(windows.max()) >= facts.vocab_size:
            raise DataError(
                f"The text has token ids outside of the {facts.vocab_size} of {path}; tokenise it with its own."
            )
        losses = torch.tensor(WindowLosses(server, facts.vocab_size).of(windows.tolist()), dtype=torch.float64)
    if not (losses.isfinite() & (losses < NO_LOSS)).all():
        raise EvaluationError(
            f"llama.cpp gave a loss that is not finite for {path}, or a probability of 0: its weights are broken."
        )
    return build_result(losses, windows, protocol, text.source, text.text_sha256)


def _bos(file: Checkpoint) -> int | None:
    """Return the first token of every window, if the family of this architecture expects one."""
    families = (all_families() | GIVEN).values()
    expecting = [f.gguf for f in families if f.begins_with_bos and not isinstance(f.gguf, str)]
    expecting += [(FORMS[name],) for name in FORMS if EXCEPTIONS.get(name, {}).get("begins_with_bos")]
    names = {f"llama.cpp {form.architecture}" for forms in expecting for form in forms}
    return file.config["bos_token_id"] if file.architecture in names else None


def _read(server: LlamaServer, source: str, split: str | None, field: str | None) -> EvaluationText:
    corpus = read_corpus(source, split or evaluation_split(source), field)
    text = corpus.text()
    return EvaluationText(source, torch.tensor(server.tokenize(text)), text_sha256(text), corpus.max_windows)


class WindowLosses:
    """Compute negative log-likelihoods with a server that generates."""

    def __init__(self, server: LlamaServer, vocab_size: int) -> None:
        self._server = server
        self._vocab_size = vocab_size
        # llama.cpp's answer lacks a token whose bytes are a part of a character. Then a whole one is generated, and the
        # token is looked up among all.
        self._whole = server.tokenize("a", add_special=False)[-1]
        self._parts: set[int] = set()

    def of(self, windows: Sequence[list[int]]) -> list[list[float]]:
        """Return a loss for every token of every window but the first; as many windows at once as there are slots."""
        slots = self._server.slots
        groups = [windows[first : first + slots] for first in range(0, len(windows), slots)]
        steps = [(group, position) for group in groups for position in range(1, len(group[0]))]
        found: dict[int, list[list[float]]] = {id(group): [[] for _ in group] for group in groups}
        with ThreadPoolExecutor(slots) as pool:
            for group, position in track(steps, "Perplexity (llama.cpp)"):
                losses = pool.map(partial(self._loss, position), enumerate(group))
                for row, loss in zip(found[id(group)], losses, strict=True):
                    row.append(loss)
        return [row for group in groups for row in found[id(group)]]

    def _loss(self, position: int, window_of_slot: tuple[int, list[int]]) -> float:
        slot, window = window_of_slot
        token = window[position]
        if token not in self._parts:
            likely = self.log_probabilities(slot, window[:position], token, 1)
            if token in likely:
                return -likely[token]
            self._parts.add(token)
        return -self.log_probabilities(slot, window[:position], self._whole, self._vocab_size)[token]

    def log_probabilities(self, slot: int, prompt: list[int], forced: int, count: int) -> dict[int, float]:
        """Return log probabilities after a prompt: of the generated token, and of the ``count`` most likely ones."""
        answer = self._server.post(
            "/completion", prompt=prompt, n_predict=1, temperature=0, n_probs=count, logit_bias=[[forced, BIAS]],
            cache_prompt=True, id_slot=slot, return_tokens=True,
        )  # fmt: skip
        return {
            entry["id"]: float(entry["logprob"])
            for step in answer.get("completion_probabilities", ())
            for entry in (step, *step["top_logprobs"])
        }
