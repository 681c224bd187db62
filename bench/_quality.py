"""The texts and perplexities that several benches share."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pyprune.quality.perplexity import EvaluationText, PerplexityResult

DATA = Path("data")
ELSEWHERE = {
    "ptb": "ptb/ptb.valid.txt",
    "wikitext-2": "wikitext2_raw/test.txt",
    "novel": "books/pride_and_prejudice.txt",
}
"""Text that no package carries: its name -> file of the data folder."""


def evaluation_texts(tokenizer: Any, packaged: Mapping[str, Path], data: Path | None) -> dict[str, EvaluationText]:
    """Test texts by name: files that a package's text was split into, and what there is of :data:`ELSEWHERE`.

    Args:
        tokenizer: of the model.
        packaged: name -> file.
        data: folder of the data sets; None = those are left out.
    """
    from pyprune.quality.perplexity import evaluation_text

    sources = {name: str(path) for name, path in packaged.items()}
    if data is not None:
        sources |= {name: str(data / path) for name, path in ELSEWHERE.items() if (data / path).is_file()}
    return {name: evaluation_text(tokenizer, source) for name, source in sources.items()}


def served_perplexities(
    model: PreTrainedModel,
    tokenizer: Any,
    texts: Mapping[str, EvaluationText],
    limits: Mapping[str, int],
    dtype: str,
    protocol: str = "ppl-2048",
    computed_in: str | None = None,
) -> dict[str, PerplexityResult]:
    """Perplexity on every text of the weights as they are served.

    Args:
        model: is copied.
        tokenizer: of the model.
        texts: by name.
        limits: name -> tokens.
        dtype: of the weights that are measured.
        protocol: ppl-2048 or ppl-128.
        computed_in: dtype that the weights are computed in after they were rounded to ``dtype``; None = that one.
    """
    from pyprune.quality.perplexity import evaluate_perplexity
    from pyprune.runtime.device import DTYPES

    served = copy.deepcopy(model).to(DTYPES[dtype]).to(DTYPES[computed_in or dtype])
    return {
        name: evaluate_perplexity(served, tokenizer, text, protocol=protocol, max_tokens=limits[name])
        for name, text in texts.items()
    }
