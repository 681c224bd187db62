"""The tokenizer of a checkpoint: read safely and as tokenizer.json says, copied byte for byte."""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pyprune.checkpoint.damage import actionable, is_panic, read_mapping
from pyprune.checkpoint.record import has_record
from pyprune.checkpoint.verify import CHAT_TEMPLATES, TOKENIZER_CONFIG, TOKENIZER_FILES
from pyprune.errors import CheckpointError, shown
from pyprune.plan import MAX_INDEX
from pyprune.runtime.progress import warn

MARKS = ("tokenizer*", "*vocab*", "*.model", "*.model.v*", "*.tiktoken", "tekken*.json")
"""A folder with a file of such a name has a tokenizer."""
COPIED = (*TOKENIZER_FILES, CHAT_TEMPLATES)
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
OF_THE_RUN = ("local_files_only", "is_local", "name_or_path", "gguf_file", "_commit_hash")
"""What Transformers writes of how a tokenizer was loaded, which is nothing of the tokenizer."""
_ORIGIN = "_pyprune_origin"
SAMPLES = (
    "Under the green hill, seven letters.", "two  spaces\tand\n\n    1,234 + 5.6 = it's", "Grüße, 世界! العربية 👩🏽",
    "def f(x):\n        return {'a': x[0]}\r\n",
)  # fmt: skip
"""Texts on which a class and its tokenizer.json are compared; steps may be written in several ways and do the same."""


def load_tokenizer(source: str, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """The tokenizer of a folder or hub id, or None when a folder has none.

    It splits text as tokenizer.json says, also where the class named beside it would do otherwise (a byte-level one
    called LlamaTokenizer), and has no token that neither the file nor tokenizer_config.json has.

    Args:
        source: folder or hub id.
        trust_remote_code: run the repository's own Python code.
        options: ``revision`` and ``gguf_file``, as :func:`pyprune.checkpoint.load.load_model` has them.

    Raises:
        CheckpointError: its files are damaged, or need code that is not run.
    """
    with actionable(source):
        if options.get("gguf_file") is not None:
            return _read(AutoTokenizer, source, trust_remote_code=trust_remote_code, **options)
        folder = _folder(source, options.get("revision"))
        if not any(_files(folder, MARKS)):
            return None
        _check_token_ids(folder / "tokenizer.json")
        own_code = _own_code(folder)
        tokenizer = _read(AutoTokenizer, source, trust_remote_code=trust_remote_code, **options)
        if (folder / "tokenizer.json").is_file() and not own_code:
            tokenizer = _as_the_file_says(folder, tokenizer)
        setattr(tokenizer, _ORIGIN, (folder, _state(tokenizer)))
        return tokenizer


def _folder(source: str, revision: str | None) -> Path:
    """The folder of the tokenizer's files; those of a hub id are fetched."""
    if os.path.isdir(source):
        return Path(source)
    return Path(snapshot_download(source, revision=revision, allow_patterns=[*TOKENIZER_FILES, f"{CHAT_TEMPLATES}/*"]))


def _read(kind: Any, source: str | Path, **options: Any) -> Any:
    with _without_panic_reports():
        return kind.from_pretrained(source, **options)


def _own_code(folder: Path) -> bool:
    """Whether the tokenizer brings its own class."""
    path = folder / TOKENIZER_CONFIG
    return path.is_file() and "auto_map" in read_mapping(path)


def _as_the_file_says(folder: Path, tokenizer: Any) -> Any:
    """The tokenizer itself, or where its class does otherwise than tokenizer.json, the file's without a class."""
    if type(tokenizer) is PreTrainedTokenizerFast:  # without a class of its own already
        return tokenizer
    plain = _read(PreTrainedTokenizerFast, folder)
    if getattr(tokenizer, "is_fast", False) and _splitting(tokenizer) == _splitting(plain):
        return tokenizer
    if not getattr(tokenizer, "is_fast", False) or any(_ids(tokenizer, text) != _ids(plain, text) for text in SAMPLES):
        _say_once(
            f"Transformers reads the tokenizer of {folder} as {type(tokenizer).__name__}, which splits text otherwise "
            "than its tokenizer.json. The file is followed here; an engine that follows the class reads other tokens."
        )
    known = plain.get_vocab()
    for name in NAMED_TOKENS:  # a class knows its usual ones, which the files of early releases do not name
        token = getattr(tokenizer, name, None)
        if getattr(plain, name) is None and token is not None and str(token) in known:
            setattr(plain, name, token)
    return plain


def _ids(tokenizer: Any, text: str) -> Any:
    """Token ids of a text; None where a class has put together what cannot split it."""
    try:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    except Exception:  # of Rust, without a type of its own
        return None


@cache
def _say_once(text: str) -> None:
    warn(text)


def _splitting(tokenizer: Any) -> tuple[Any, ...]:
    """What decides how a fast tokenizer splits text; where two are equal, they do it alike (vocabularies aside)."""
    core = tokenizer.backend_tokenizer
    steps = (core.normalizer, core.pre_tokenizer, core.decoder)
    options = ("unk_token", "fuse_unk", "byte_fallback", "ignore_merges", "dropout", "continuing_subword_prefix")
    return (
        *(None if step is None else step.__getstate__() for step in steps),
        *(getattr(core.model, name, None) for name in options),
        core.get_vocab_size(with_added_tokens=True),
    )


def _state(tokenizer: Any) -> str:
    """What a caller may have changed since a tokenizer was loaded."""
    return repr((len(tokenizer), tokenizer.special_tokens_map, tokenizer.chat_template, tokenizer.padding_side))


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


def write_tokenizer(tokenizer: Any, out: Path) -> None:
    """Write a tokenizer: the files that it was loaded from, unless it was changed or made since.

    Args:
        tokenizer: of :func:`load_tokenizer` or Transformers; None writes nothing.
        out: an existing folder.
    """
    folder, state = getattr(tokenizer, _ORIGIN, (None, None))
    if folder is not None and state == _state(tokenizer):
        copy_tokenizer(folder, out)
    elif tokenizer is not None:
        tokenizer.save_pretrained(out)
        _forget_the_run(out / TOKENIZER_CONFIG)


def copy_tokenizer(folder: Path, out: Path) -> None:
    """Copy the tokenizer's files of a checkpoint, byte for byte, to another folder; nothing where there are none."""
    for path in _files(folder, (*COPIED, "*.py") if _own_code(folder) else COPIED):
        if path.is_file():
            shutil.copyfile(path, out / path.name)
        else:
            shutil.copytree(path, out / path.name)


def _files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if any(fnmatch.fnmatch(path.name, p) for p in patterns)]


def _forget_the_run(path: Path) -> None:
    """Leave how it was loaded out of a written tokenizer_config.json, and name a class that all releases have."""
    values = {name: value for name, value in json.loads(path.read_text()).items() if name not in OF_THE_RUN}
    if values.get("tokenizer_class") == "TokenizersBackend":  # Transformers 5's name, which 4 does not know
        values["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_token_ids(path: Path) -> None:
    """The tokenizers library makes a table as long as the largest id, and ends the process where that does not fit."""
    if not path.is_file():
        return
    data = read_mapping(path)
    model = data.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    added = data.get("added_tokens")
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
