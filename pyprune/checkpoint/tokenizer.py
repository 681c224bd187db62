"""Read the tokenizer of a checkpoint safely and as tokenizer.json says, and copy it byte for byte."""

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
from pyprune.runtime.descriptors import redirect
from pyprune.runtime.progress import warn

MARKS = ("tokenizer*", "*vocab*", "*.model", "*.model.v*", "*.tiktoken", "tekken*.json")
"""A folder with a file of such a name has a tokenizer."""
COPIED = (*TOKENIZER_FILES, CHAT_TEMPLATES)
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
LOADING_ENTRIES = ("local_files_only", "is_local", "name_or_path", "gguf_file", "_commit_hash")
"""Entries that Transformers writes about the loading of a tokenizer, not about the tokenizer."""
_ORIGIN = "_pyprune_origin"
SAMPLES = (
    "Under the green hill, seven letters.", "two  spaces\tand\n\n    1,234 + 5.6 = it's", "Grüße, 世界! العربية 👩🏽",
    "def f(x):\n        return {'a': x[0]}\r\n",
)  # fmt: skip
"""Texts on which a class and its tokenizer.json are compared, because different steps may do the same."""


def load_tokenizer(source: str, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """Load the tokenizer of a folder or hub id; None when a folder has none.

    It splits text as tokenizer.json says, also where the class in tokenizer_config.json would split differently (a
    byte-level one called LlamaTokenizer), and has no token that neither file has.

    Args:
        source: folder or hub id.
        trust_remote_code: run the repository's own Python code.
        options: ``revision`` and ``gguf_file``, as in :class:`pyprune.checkpoint.load.ModelSource`.

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
        has_code = _has_code(folder)
        tokenizer = _read(AutoTokenizer, source, trust_remote_code=trust_remote_code, **options)
        if (folder / "tokenizer.json").is_file() and not has_code:
            tokenizer = _follow_file(folder, tokenizer)
        setattr(tokenizer, _ORIGIN, (folder, _state(tokenizer)))
        return tokenizer


def _folder(source: str, revision: str | None) -> Path:
    """Return the folder of the tokenizer's files; those of a hub id are fetched."""
    if os.path.isdir(source):
        return Path(source)
    return Path(snapshot_download(source, revision=revision, allow_patterns=[*TOKENIZER_FILES, f"{CHAT_TEMPLATES}/*"]))


def _read(kind: Any, source: str | Path, **options: Any) -> Any:
    with _hide_panic_reports():
        return kind.from_pretrained(source, **options)


def _has_code(folder: Path) -> bool:
    """Check whether the repository contains code for the tokenizer."""
    path = folder / TOKENIZER_CONFIG
    return path.is_file() and "auto_map" in read_mapping(path)


def _follow_file(folder: Path, tokenizer: Any) -> Any:
    """Return the tokenizer, or, where its class differs from tokenizer.json, one that follows the file."""
    if type(tokenizer) is PreTrainedTokenizerFast:  # it follows the file already
        return tokenizer
    plain = _read(PreTrainedTokenizerFast, folder)
    if getattr(tokenizer, "is_fast", False) and _split_settings(tokenizer) == _split_settings(plain):
        return tokenizer
    if not getattr(tokenizer, "is_fast", False) or any(_ids(tokenizer, text) != _ids(plain, text) for text in SAMPLES):
        _warn_once(
            f"Transformers reads the tokenizer of {folder} as {type(tokenizer).__name__}, which splits text in "
            "another way than its tokenizer.json. pyprune uses the file; an engine that uses the class reads other "
            "tokens."
        )
    vocabulary = plain.get_vocab()
    for name in NAMED_TOKENS:  # a class has defaults, which the files of early releases do not name
        token = getattr(tokenizer, name, None)
        if getattr(plain, name) is None and token is not None and str(token) in vocabulary:
            setattr(plain, name, token)
    return plain


def _ids(tokenizer: Any, text: str) -> Any:
    """Return the token ids of a text; None where the class cannot split it."""
    try:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    except Exception:  # Rust raises it as a plain Exception
        return None


@cache
def _warn_once(text: str) -> None:
    warn(text)


def _split_settings(tokenizer: Any) -> tuple[Any, ...]:
    """Return the settings that decide how a fast tokenizer splits text, apart from its vocabulary."""
    core = tokenizer.backend_tokenizer
    steps = (core.normalizer, core.pre_tokenizer, core.decoder)
    options = ("unk_token", "fuse_unk", "byte_fallback", "ignore_merges", "dropout", "continuing_subword_prefix")
    return (
        *(None if step is None else step.__getstate__() for step in steps),
        *(getattr(core.model, name, None) for name in options),
        core.get_vocab_size(with_added_tokens=True),
    )


def _state(tokenizer: Any) -> str:
    """Return the properties that a caller may have changed since a tokenizer was loaded."""
    return repr((len(tokenizer), tokenizer.special_tokens_map, tokenizer.chat_template, tokenizer.padding_side))


def no_tokenizer(source: str | Path) -> CheckpointError:
    """Return the error for a model without a tokenizer where text must be read.

    Args:
        source: folder or hub id of the model.
    """
    if has_record(source):  # the record refuses files that it does not list
        advice = "Add tokenizer.json to the model that it was made from, and make it again."
    elif Path(source).is_dir():
        advice = "Add its tokenizer.json."
    else:
        advice = "Use a folder that has its tokenizer.json."
    return CheckpointError(f"{source} has no tokenizer files, which text needs. {advice}")


def write_tokenizer(tokenizer: Any, out: Path) -> None:
    """Write a tokenizer: the files that it was loaded from, unless it was changed or is new.

    Args:
        tokenizer: from :func:`load_tokenizer` or Transformers; None writes nothing.
        out: an existing folder.
    """
    folder, state = getattr(tokenizer, _ORIGIN, (None, None))
    if folder is not None and state == _state(tokenizer):
        copy_tokenizer(folder, out)
    elif tokenizer is not None:
        tokenizer.save_pretrained(out)
        _remove_loading_entries(out / TOKENIZER_CONFIG)


def copy_tokenizer(folder: Path, out: Path) -> None:
    """Copy the tokenizer's files of a checkpoint, byte for byte, to another folder; none are required."""
    for path in _files(folder, (*COPIED, "*.py") if _has_code(folder) else COPIED):
        if path.is_file():
            shutil.copyfile(path, out / path.name)
        else:
            shutil.copytree(path, out / path.name)


def _files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if any(fnmatch.fnmatch(path.name, p) for p in patterns)]


def _remove_loading_entries(path: Path) -> None:
    """Remove the entries about loading from a tokenizer_config.json, and name a class that all releases have."""
    values = {name: value for name, value in json.loads(path.read_text()).items() if name not in LOADING_ENTRIES}
    if values.get("tokenizer_class") == "TokenizersBackend":  # Transformers 5's name, which 4 does not know
        values["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_token_ids(path: Path) -> None:
    """Refuse huge token ids: the tokenizers library makes a table of that length, or ends the process."""
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
def _hide_panic_reports() -> Iterator[None]:
    """Hold back the stderr of the block, and release it unless Rust panics.

    The tokenizers library prints a panic there (a page with RUST_BACKTRACE) before the exception arrives.
    """
    panicked = False
    with tempfile.TemporaryFile() as held:
        try:
            with redirect(2, held):
                yield
        except BaseException as error:
            panicked = is_panic(error)
            raise
        finally:
            held.seek(0)
            if not panicked and (text := held.read()):
                sys.stderr.write(text.decode(errors="replace"))
