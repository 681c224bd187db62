"""Where text comes from and how it becomes samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from typing_extensions import override

from pyprune.config.base import LARGEST_SEED, Config, _require, option


@dataclass(frozen=True)
class DataConfig(Config):
    """Where text comes from and how it is cut into fixed-length samples.

    Attributes:
        source: a name known to pyprune (wikitext2, ptb, c4, alpaca, bookcorpus), a datasets id, or a local
            .txt/.jsonl file (optionally .gz).
        split: train, validation or test (ignored for a local file).
        samples: number of sequences to draw.
        sequence_length: tokens in a sequence; for instructions the cutoff, to which shorter ones are padded.
        field: the jsonl field that holds the text; None picks "text" or an instruction layout by itself.
        chat_template: wrap each document as one user turn of the tokenizer's chat template (an instruction record
            as a question and its answer).
        layout: stream cuts the documents, laid end to end, into windows of which every token is predicted;
            instructions makes each record (instruction, input, output) a sequence of its own.
        mask_prompt: with layout instructions, predict the response and the end-of-sequence token only.
        seed: of the sampling.
    """

    source: str = "wikitext2"
    split: str = "train"
    samples: int = option(128, at_least=1, at_most=100_000_000)
    sequence_length: int = option(2048, at_least=2, at_most=1_000_000, unit="tokens")
    field: str | None = None
    chat_template: bool = False
    layout: Literal["stream", "instructions"] = "stream"
    mask_prompt: bool = True
    seed: int = option(0, at_least=0, at_most=LARGEST_SEED)

    @override
    def problems(self) -> list[str]:
        found: list[str] = []
        _require(
            self.mask_prompt or self.layout == "instructions",
            "mask_prompt is off, but layout 'stream' has no prompts; it predicts every token anyway.",
            found,
        )
        return found
