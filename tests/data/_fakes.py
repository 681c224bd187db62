"""Text on disk, a stand-in for the hub, and one for an installed package."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def prose(words: int, seed: int = 0) -> str:
    """Text without long repeats: random words of three to eight letters."""
    rng = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    return " ".join("".join(rng.choices(letters, k=rng.randint(3, 8))) for _ in range(words))


def text_file(folder: Path, text: str, name: str = "text.txt") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def jsonl(folder: Path, records: list[Any], name: str = "data.jsonl") -> str:
    return text_file(folder, "\n".join(json.dumps(r) for r in records) + "\n", name)


def fake_datasets(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[tuple[Any, ...]]:
    """Replace `datasets.load_dataset`; calls that the real one would not accept fail here too."""
    real = inspect.signature(pytest.importorskip("datasets").load_dataset)
    accepted = set(real.parameters)
    calls: list[tuple[Any, ...]] = []

    def load_dataset(repository: str, config: str | None, **options: Any) -> Any:
        assert options.keys() <= accepted
        calls.append((repository, config, options))
        if isinstance(answer, Exception):
            raise answer
        return answer

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


def fake_package(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    data = folder / "fakepack" / "data"
    data.mkdir(parents=True)
    (data / "c4.utf8").write_text("first page\nsecond page\n\nthird page\n", encoding="utf-8")
    (data / "wiki.utf8").write_text(
        '<doc id="1" title="A">\nA\n\nText of A.\n</doc>\n<doc id="2" title="B">\nB\n</doc>\n', encoding="utf-8"
    )
    (data / "tiny.utf8").write_text("One day.\n<|endoftext|>\nOnce.\n<|endoftext|>\n", encoding="utf-8")
    files = [SimpleNamespace(locate=lambda p=p: p) for p in data.iterdir()]

    def distribution(name: str) -> Any:
        if name != "fakepack":
            raise importlib.metadata.PackageNotFoundError(name)
        return SimpleNamespace(files=files)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
