"""Options of text: its source, and how it becomes samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from typing_extensions import override

from pyprune.config.base import LARGEST_SEED, LARGEST_WEIGHT, Config, option
from pyprune.errors import shown


@dataclass(frozen=True)
class MixturePart(Config):
    """One text of a mixture.

    Attributes:
        source: as in :class:`DataConfig`.
        kind: label of its samples (prose, web, code, languages, ...); empty = the source. Several parts may be of one
            kind.
        share: how many of the samples it gives, relative to the other parts (the shares need not add up to 1).
        split: split of a hub data set.
        field: the column or jsonl field that holds the text; None = "text".
    """

    source: str = ""
    kind: str = ""
    share: float = option(1.0, above=0, at_most=LARGEST_WEIGHT)
    split: str = "train"
    field: str | None = None

    @property
    def label(self) -> str:
        """Return the kind of its samples."""
        return self.kind or self.source

    @override
    def problems(self) -> Iterator[str]:
        if not self.source:
            yield "source is empty; name a text."
        if self.source in MIXTURES:
            yield f"source is {self.source!r}, a mixture itself; name one text."


MIXTURES: dict[str, tuple[MixturePart, ...]] = {
    "mixture": (
        MixturePart("wikitext2", "prose", 3),
        MixturePart("c4", "web", 3),
        MixturePart("codeparrot", "code", 2),
        MixturePart("wikipedia-de", "languages", 0.25),
        MixturePart("wikipedia-es", "languages", 0.25),
        MixturePart("wikipedia-ru", "languages", 0.25),
        MixturePart("wikipedia-zh", "languages", 0.25),
    ),
    "mixture-offline": (
        MixturePart("package:exllamav3/wiki.utf8", "prose", 3),
        MixturePart("package:exllamav3/c4.utf8", "web", 3),
        MixturePart("package:exllamav3/code.utf8", "code", 2),
        MixturePart("package:exllamav3/multilingual.utf8", "languages", 1),
    ),
}
"""Mixtures by name: texts of the hub, and calibration texts inside the PyPI package exllamav3 (MIT), which need no
network. Kinds and shares are ours."""


@dataclass(frozen=True)
class DataConfig(Config):
    """Source of text, and how it is cut into fixed-length samples.

    Attributes:
        source: a name known to pyprune (wikitext2, ptb, c4, alpaca, lamini, bookcorpus, codeparrot, wikipedia-de, -es,
            -ru or -zh), a datasets id, a local .txt/.jsonl file (optionally .gz), package:NAME/FILE (text that an
            installed package carries), or a mixture of several: mixture (prose, web, code and other languages, from
            the hub) or mixture-offline (the same kinds, from the package exllamav3).
        split: train, validation or test (ignored for a local file).
        samples: number of sequences to draw.
        sequence_length: tokens in a sequence; for instructions the cutoff, to which shorter ones are padded.
        field: the jsonl field that holds the text; None = "text", or the fields of an instruction layout.
        chat_template: wrap each document as one user turn of the tokenizer's chat template (an instruction record
            as a question and its answer).
        layout: stream joins the documents and cuts them into windows, in which every token is predicted; instructions
            makes one sequence of each record (instruction, input, output).
        mask_prompt: with layout instructions, predict the response and the end-of-sequence token only.
        seed: seed of the sampling.
        mixture: with source mixture, the texts to mix instead of the usual ones, for example
            [{source: notes.txt, kind: prose, share: 3}, {source: src.jsonl, kind: code, share: 1, field: content}].
            Each sample comes from one text and carries its kind.
        overlap: largest share of a window that it may have in common with another window of the same samples, in
            [0, 1); 0 = none. The papers draw windows anywhere: 1,000 of 2,048 tokens are more than PTB has (0.5 is
            enough), 8,000 more than WikiText-2 (0.85). Samples of different uses never have a token in common.
        cross_documents: whether a window may continue from one document into the next; null = as in the source's
            literature (bookcorpus: no, so that each window is part of one record; every other source: yes).
        bos: whether every window begins with the tokenizer's bos token, in the place of its first token, which is never
            predicted; null = as the model's family expects it (Gemma: yes; others: no). Instruction records get it in
            front of their first token, also if the tokenizer puts one before a text.
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
    mixture: tuple[MixturePart, ...] = ()
    overlap: float = option(0.0, at_least=0, below=1)
    cross_documents: bool | None = None
    bos: bool | None = None

    @property
    def parts(self) -> tuple[MixturePart, ...]:
        """Return the texts that samples are drawn from: those of the mixture, or the one source."""
        single = MixturePart(self.source, split=self.split, field=self.field)
        return self.mixture or MIXTURES.get(self.source, (single,))

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the source of each part."""
        return tuple(part.source for part in self.parts)

    @property
    def part_samples(self) -> tuple[int, ...]:
        """Return how many of the samples each part gives: by its share, and at least one."""
        return share_out(self.samples, [part.share for part in self.parts])

    @property
    def shared_tokens(self) -> int:
        """Return how many tokens two windows may have in common at most."""
        return int(self.overlap * self.sequence_length)

    @override
    def problems(self) -> Iterator[str]:
        if not self.mask_prompt and self.layout != "instructions":
            yield "mask_prompt is off, but layout 'stream' has no prompts; it predicts every token anyway."
        if self.layout != "stream" and self.overlap:
            yield f"overlap is {shown(self.overlap)}, but layout 'instructions' takes whole records; leave it at 0."
        if self.layout != "stream" and self.cross_documents is not None:
            yield "cross_documents is set, but layout 'instructions' takes whole records; leave it at null."
        yield from self._mixture_problems()

    def _mixture_problems(self) -> Iterator[str]:
        if not self.mixture and self.source not in MIXTURES:
            return
        for i, part in enumerate(self.mixture):
            yield from (f"mixture[{i}].{problem}" for problem in part.all_problems())
        if self.mixture and self.source != "mixture":
            yield f"mixture lists texts, but source is {self.source!r}; set source to 'mixture'."
        if self.layout != "stream":
            yield "layout is 'instructions', which is for one source; a mixture is 'stream'."
        if self.split != "train" or self.field is not None:
            yield "split and field are for one source; set them in the texts that mixture lists."
        read = [(part.source, part.split, part.field) for part in self.parts]
        if len({*read}) != len(read):
            yield "mixture lists one text twice; give it one share."
        if self.samples < len(read):
            yield (
                f"samples is {self.samples}, but the mixture has {len(read)} texts, and each gives at least one; "
                f"raise samples to {len(read)}."
            )


def share_out(count: int, shares: list[float]) -> tuple[int, ...]:
    """Divide ``count`` things in proportion to ``shares``, at least one for each; the sum is exact.

    Args:
        count: at least ``len(shares)``.
        shares: above 0.
    """
    exact = [count * share / sum(shares) for share in shares]
    parts = [max(1, int(part)) for part in exact]
    while sum(parts) < count:
        parts[max(range(len(parts)), key=lambda i: exact[i] - parts[i])] += 1
    while sum(parts) > count:
        parts[max((i for i in range(len(parts)) if parts[i] > 1), key=lambda i: parts[i] - exact[i])] -= 1
    return tuple(parts)
