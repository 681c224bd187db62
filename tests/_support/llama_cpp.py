"""A real llama.cpp on loopback, and tiny models and tokenizers that it reads."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from pyprune.checkpoint.save import save_checkpoint
from pyprune.cut.compact import compact_
from pyprune.families import family_for
from pyprune.plan import PrunePlan
from pyprune.serving.gguf.write import GgufReport, export_gguf
from tests._support.models import tiny_model

VOCAB = 160
"""Rows of the tiny embeddings."""
SPACE = "\u2581"
Edit = Callable[[PrunePlan], PrunePlan]


class LlamaCpp:
    """A server of one GGUF file, everything in float32 that can be.

    Args:
        path: the file.
        context: tokens of its cache.
    """

    def __init__(self, path: Path, context: int = 256) -> None:
        llama = pytest.importorskip("xllamacpp")

        asked: Any = llama.CommonParams()
        asked.model.path = str(path)
        asked.n_ctx, asked.n_parallel, asked.cpuparams.n_threads, asked.n_threads_http = context, 1, 1, 1
        asked.hostnames, asked.port, asked.warmup, asked.fit_params, asked.verbosity = (
            ["127.0.0.1"],
            0,
            False,
            False,
            -1,
        )
        asked.cache_type_k = asked.cache_type_v = llama.ggml_type.GGML_TYPE_F32
        asked.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.server: Any = llama.Server(asked)
        # It hangs when it is stopped before its loop runs, which tokenizing does not wait for.
        urllib.request.urlopen(f"{self.server.listening_address}/slots", timeout=60).close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.server = None  # stops it

    def post(self, path: str, **body: Any) -> Any:
        """The answer to a request."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(
            self.server.listening_address + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def greedy(self, prompt: list[int], length: int) -> tuple[list[int], list[int]]:
        """The most likely continuation of a prompt; (token ids, those that end a text, which are never taken)."""
        asked = {"prompt": prompt, "n_predict": length, "temperature": 0, "return_tokens": True, "ignore_eos": True}
        answer = self.post("/completion", **asked, cache_prompt=False)
        return list(answer["tokens"]), [bias["token"] for bias in answer["generation_settings"]["logit_bias"]]

    def log_probabilities(self, prompt: list[int]) -> dict[int, float]:
        """Natural logarithms of the probability of every next token."""
        asked = {"prompt": prompt, "n_predict": 1, "temperature": 0, "n_probs": VOCAB, "cache_prompt": False}
        (step,) = self.post("/completion", **asked)["completion_probabilities"]
        return {entry["id"]: entry["logprob"] for entry in step["top_logprobs"]}

    def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        """Token ids of a text."""
        return list(self.post("/tokenize", content=text, add_special=add_special, parse_special=True)["tokens"])


def identity(plan: PrunePlan) -> PrunePlan:
    return plan


@dataclass(frozen=True)
class Case:
    """A model to write.

    Attributes:
        name: of the tiny model.
        edit: makes the plan.
        architecture: that llama.cpp is to run.
        tolerance: largest difference of a log probability in float32.
        values: changes of its configuration.
    """

    name: str
    edit: Edit
    architecture: str
    tolerance: float = 1e-4
    values: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path, quantise: str = "f32", tokenizer: Any = None) -> tuple[PreTrainedModel, GgufReport]:
        """The pruned model, and the file made of it."""
        model = tiny_model(self.name, **{"vocab_size": VOCAB, **self.values})
        plan = self.edit(family_for(model).plan(model.config))
        compact_(model, plan)
        tokenizer = byte_level_tokenizer() if tokenizer is None else tokenizer
        save_checkpoint(model, tokenizer, folder / "model", plan=plan, provenance={})
        return model, export_gguf(folder / "model", folder / "model.gguf", quantise=quantise)


def values_of(report: GgufReport) -> dict[str, Any]:
    """The metadata of a file."""
    import gguf

    return {name: entry.contents() for name, entry in gguf.GGUFReader(report.path).fields.items()}


def byte_level_tokenizer(*, add_bos: bool = False, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """GPT-2's kind, of ASCII only: a token of half a character would be left out of llama.cpp's answers."""
    alphabet = [character for character in sorted(pre_tokenizers.ByteLevel.alphabet()) if ord(character) < 128]
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("\u0120", "the")]
    # Split in other ways by other kinds, or found whole without merging.
    merges += [("1", "2"), ("12", "3"), ("123", "4"), ("!", "\u010a"), ("'", "t"), ("the", "T"), ("in", "'t")]
    merges += [("\u010a", "/"), ("a", "n"), ("n", "d"), ("a", "nd")]
    texts = ["<s>", "</s>", "<pad>", *alphabet, "\u0120", "\u010a", *(a + b for a, b in merges)]
    core = Tokenizer(BPE(vocab={text: i for i, text in enumerate(texts)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_tokens([AddedToken("[tool]", normalized=False, special=False)])
    if add_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
    return _wrapped(core, chat_template)


def sentencepiece_tokenizer(*, lacking: tuple[str, str] | None = None) -> PreTrainedTokenizerFast:
    """LLaMA 2's kind: scores as the order of merges, spaces as a character, unknown characters as bytes.

    Args:
        lacking: a merge that is left out, so that no SentencePiece model has these merges.
    """
    letters = [SPACE, *"abcdefghijklmnopqrstuvwxyz"]
    pieces = [f"{SPACE}t", "in", "er", "he", f"{SPACE}the", "ing", f"{SPACE}a", "the", "on", "an", "and", f"{SPACE}and"]
    known = {*letters, *pieces}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if {piece[:cut], piece[cut:]} <= known
    ]
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *pieces]
    core = Tokenizer(
        BPE(
            vocab={text: i for i, text in enumerate(texts)},
            merges=[merge for merge in merges if merge != lacking],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    core.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    core.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    return _wrapped(core, None)


def _wrapped(core: Tokenizer, chat_template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )
    if chat_template:
        tokenizer.chat_template = chat_template
    return tokenizer
