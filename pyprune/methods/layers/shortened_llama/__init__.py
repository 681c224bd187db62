"""Shortened LLaMA: remove the layers of the smallest perplexity or Taylor score at once (Kim et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pyprune.config.base import LARGEST_INDEX, option
from pyprune.config.run import PruneConfig
from pyprune.methods.layers import BlockOptions, removal_config, removal_method
from pyprune.methods.training import LESS_TEXT, make_forms

Form = Literal["ppl", "taylor_plus"]
PAPER_KEEPS: dict[Form, tuple[int, int]] = {"ppl": (0, 0), "taylor_plus": (4, 2)}
"""Form -> how many layers the paper keeps at the beginning and at the end of the model."""


@dataclass(frozen=True)
class ShortenedLlamaOptions(BlockOptions):
    """Options of Shortened LLaMA.

    Attributes:
        form: ppl (the perplexity without the layer) or taylor_plus (the sum of |w g| over the layer's matrices).
        keep_first: layers at the beginning of the model that are kept whole; null = the paper's, 4 for taylor_plus
            (its "+"), 0 for ppl.
        keep_last: layers at its end that are kept whole; null = the paper's, 2 for taylor_plus, 0 for ppl.
    """

    form: Form = "ppl"
    keep_first: int | None = option(None, at_least=0, at_most=LARGEST_INDEX)
    keep_last: int | None = option(None, at_least=0, at_most=LARGEST_INDEX)

    @property
    def kept(self) -> tuple[int, int]:
        """Return how many layers are kept whole at the beginning and at the end."""
        first, last = PAPER_KEEPS[self.form]
        return first if self.keep_first is None else self.keep_first, last if self.keep_last is None else self.keep_last


def _shortened_llama_paper() -> PruneConfig:
    """Shortened LLaMA: 25 % of the layers, by perplexity; the paper's 10 samples of 128 tokens.

    The paper draws them from BookCorpus.
    """
    return removal_config("shortened_llama", ShortenedLlamaOptions(), samples=10, sequence_length=128)


def _shortened_llama() -> PruneConfig:
    """Shortened LLaMA: 25 % of the layers, by perplexity on a mixture of texts (ours)."""
    return replace(_shortened_llama_paper(), data=LESS_TEXT)


METHOD = removal_method(
    "shortened_llama",
    "Shortened LLaMA: remove the layers of the smallest score at once, by perplexity or Taylor expansion.",
    f"{__name__}.score:decide",
    ShortenedLlamaOptions,
    presets=make_forms(_shortened_llama, _shortened_llama_paper),
)
