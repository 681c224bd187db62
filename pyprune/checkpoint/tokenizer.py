"""The tokenizer of a checkpoint: read safely, copied byte for byte."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from pyprune.checkpoint.damage import actionable, is_panic
from pyprune.checkpoint.record import has_record
from pyprune.errors import CheckpointError, shown
from pyprune.plan import MAX_INDEX
from pyprune.runtime.files import read_json

TOKENIZER_MARKS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
"""A folder with one of these files has a tokenizer."""
TOKENIZER_FILES = (
    *TOKENIZER_MARKS, "merges.txt", "vocab.txt", "sentencepiece.bpe.model", "spiece.model",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates",
)  # fmt: skip
"""Everything that Transformers writes or reads for the tokenizers of decoder-only models."""


def load_tokenizer(source: str, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """The tokenizer of a folder or hub id, or None when a folder has none.

    Args:
        source: folder or hub id.
        trust_remote_code: run the repository's own Python code.
        options: ``revision`` and ``gguf_file``, as :func:`pyprune.checkpoint.load.load_model` has them.

    Raises:
        CheckpointError: its files are damaged, or need code that is not run.
    """
    folder = Path(source)
    local = folder.is_dir() and "gguf_file" not in options
    if local and not any((folder / name).exists() for name in TOKENIZER_MARKS):
        return None
    with actionable(source):
        if local:
            _check_token_ids(folder / "tokenizer.json")
        with _without_panic_reports():
            return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, **options)


def no_tokenizer(source: str | Path) -> CheckpointError:
    """The error where text is to be read and a model has no tokenizer.

    Args:
        source: folder or hub id of the model.
    """
    if has_record(source):  # which refuses files that it does not list
        advice = "Add tokenizer.json to the model that it was made from, and make it again."
    elif Path(source).is_dir():
        advice = "Add its tokenizer.json."
    else:
        advice = "Use a folder that has its tokenizer.json."
    return CheckpointError(f"{source} has no tokenizer files, which text needs. {advice}")


def copy_tokenizer(folder: Path, out: Path) -> None:
    """Copy the tokenizer's files of a checkpoint, byte for byte, to another folder; nothing where there are none."""
    for path in (folder / name for name in TOKENIZER_FILES):
        if path.is_file():
            shutil.copyfile(path, out / path.name)
        elif path.is_dir():
            shutil.copytree(path, out / path.name)


def _check_token_ids(path: Path) -> None:
    """The tokenizers library makes a table as long as the largest id, and ends the process where that does not fit."""
    if not path.is_file():
        return
    data = read_json(path)
    model = data.get("model") if isinstance(data, dict) else None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    added = data.get("added_tokens") if isinstance(data, dict) else None
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    wrong = next((i for i in ids if type(i) is not int or not 0 <= i <= MAX_INDEX), None)
    if wrong is not None:
        raise CheckpointError(
            f"{path} names the token id {shown(wrong)}; allowed are 0 to {MAX_INDEX}. The file is damaged; fetch it "
            "again."
        )


@contextmanager
def _without_panic_reports() -> Iterator[None]:
    """Keep what the block writes to stderr, and let it through unless Rust panics.

    The tokenizers library reports a panic there by itself, a page with RUST_BACKTRACE, before the exception arrives.
    """
    try:
        sys.stderr.flush()
        real = os.dup(2)
    except (OSError, AttributeError):  # there is no stderr
        yield
        return
    panicked = False
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException as error:
            panicked = is_panic(error)
            raise
        finally:
            sys.stderr.flush()
            os.dup2(real, 2)
            os.close(real)
            kept.seek(0)
            if not panicked:
                sys.stderr.write(kept.read().decode(errors="replace"))
