"""Seeded prose of random words: no two windows of it are alike."""

from __future__ import annotations

import json
import random
from pathlib import Path

from transformers import PreTrainedModel

from pyprune.data.sources import read_corpus
from tests._support.tokenizer import tiny_tokenizer


def prose(words: int, seed: int = 0) -> str:
    """Paragraphs of made-up lower-case words."""
    rng = random.Random(seed)
    made = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(400)]
    lines = [" ".join(rng.choices(made, k=40)) for _ in range(words // 40)]
    return "\n\n".join(lines) + "\n"


def write_text(path: Path, words: int = 4000, seed: int = 0) -> Path:
    """Write prose as .txt, or as one document a line for .jsonl."""
    text = prose(words, seed)
    if path.suffix == ".jsonl":
        text = "".join(json.dumps({"text": p}) + "\n" for p in text.split("\n\n"))
    path.write_text(text, encoding="utf-8")
    return path


def write_model(model: PreTrainedModel, folder: Path) -> Path:
    """Write a dense model with the byte tokenizer, as a user would have it on disk."""
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def read_documents(source: str, split: str = "train", field: str | None = None) -> list[str]:
    """Return the texts of a source in order."""
    return [document.text for document in read_corpus(source, split, field).documents]
