"""The recipes of DReSS's ablation: every stage reads the text that the paper names."""

from __future__ import annotations

from itertools import product

import pytest

from pyprune.data.placement import Windows
from pyprune.run.recipe import build_config
from tests._support.paths import REPO

WIKITEXT_2 = 2_600_000
"""Tokens of WikiText-2's training text by SmolLM2's tokenizer; those of LLaMA are more."""
CASES = [f"{before}{prune}{after}" for before, prune, after in product("nr", "np", "nr")]


@pytest.mark.parametrize("case", CASES)
def test_every_regularisation_of_the_eight_cases_reads_750_samples(case: str) -> None:
    """As section 4.7 of the paper says; recovery has 250, and none of these cases recovers."""
    config = build_config(recipe=REPO / f"recipes/llama/ablation/dress-{case}.yaml")
    regularised = {when for when in ("before", "after") if "regularise" in getattr(config.stages, when)}
    assert regularised == {when for when, letter in (("before", case[0]), ("after", case[2])) if letter == "r"}
    text = {"before": config.data, "after": config.recovery_data or config.data}
    assert all(text[when].samples == 750 and text[when].sequence_length == 2048 for when in regularised)
    drawn = [config.data, *([text["after"]] if "after" in regularised else [])]
    assert {(data.source, data.split) for data in drawn} == {("wikitext2", "train")}
    needed = sum(Windows(data.samples, data.sequence_length, data.shared_tokens).tokens for data in drawn)
    assert needed < 0.9 * WIKITEXT_2, "the text of all stages has to fit next to each other"
