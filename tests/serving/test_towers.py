"""Pruned multimodal models in a real vLLM: Transformers' log probabilities, of a text and about an image."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForMultimodalLM, AutoProcessor

from pyprune.checkpoint.load import load_model
from tests._support.answers import NEW_TOKENS, TOLERANCE, TOP, served_and_expected
from tests._support.served import REAL_VLLM, run_program
from tests._support.served_towers import PROMPTS, picture, write_served
from tests.families.test_towers import plan_of, prune_by

pytestmark = REAL_VLLM

WITHOUT_TORCHVISION = ("idefics3",)
"""Types whose class vLLM imports without torchvision."""
TYPES = tuple(name for name in PROMPTS if name in WITHOUT_TORCHVISION or importlib.util.find_spec("torchvision"))
TEXT = "hello, what is this?"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("towers")


@pytest.fixture(scope="module")
def served(root: Path) -> dict[str, Any]:
    """The answers of a model of each type that lost a layer, heads, FFN channels and hidden channels."""
    folders = {}
    for name in TYPES:
        dense = write_served(name, root / name / "dense")
        folders[name] = prune_by(plan_of(load_model(dense)[0], hidden=48), dense)
    models = {str(folder): PROMPTS[name] for name, folder in folders.items()}
    answers = run_program("images_child.py", {"models": models, "text": TEXT, "new_tokens": NEW_TOKENS, "top": TOP})
    return {name: answers[str(folder)] for name, folder in folders.items()}


@torch.no_grad()
def expected(folder: Path, answer: dict[str, Any], text: str | None) -> Tensor:
    """Compute the log probabilities [tokens, vocabulary] of an answer, about the image if there is a text for it."""
    model, processor = AutoModelForMultimodalLM.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    ids = torch.tensor([[*answer["ids"], *answer["tokens"]]])
    pixels: dict[str, Any] = {}
    if text is not None:
        inputs = processor(text=text, images=[picture()], return_tensors="pt")
        assert inputs["input_ids"][0].tolist() == answer["ids"]
        pixels = {name: value for name, value in inputs.items() if name.startswith("pixel")}
        if "token_type_ids" in inputs:  # vLLM's attention on a CPU is causal inside an image too
            pixels["token_type_ids"] = torch.zeros_like(ids)
    return model(input_ids=ids, **pixels).logits[0].log_softmax(-1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("about_an_image", [False, True], ids=["text", "image"])
@pytest.mark.parametrize("name", TYPES)
def test_served_log_probabilities_are_transformers(
    name: str, about_an_image: bool, root: Path, served: dict[str, Any]
) -> None:
    answer = served[name][about_an_image]
    rows = expected(root / name / "out", answer, PROMPTS[name] if about_an_image else None)
    torch.testing.assert_close(*served_and_expected(rows, answer["ids"], answer), rtol=0, atol=TOLERANCE)
