"""Translate errors that Transformers raises on bad checkpoints into actionable ones."""

from __future__ import annotations

import json
import os
import re
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from pyprune.errors import CheckpointError, PypruneError, UnsupportedModelError, shown
from pyprune.runtime.files import JSON_BYTES, read_json
from pyprune.runtime.limits import one_line


def label(source: str) -> str:
    """Return a path or hub id for a message: unchanged, unless it is very long or would not stay on one line."""
    return source if source.isprintable() and len(source) <= 300 else shown(source)


def read_mapping(path: Path, limit: int = JSON_BYTES) -> dict[str, Any]:
    """Read a JSON file that holds one object, such as tokenizer.json.

    Raises:
        CheckpointError: it is no JSON object, is truncated, or cannot be read; the message names the file.
    """
    try:
        data = read_json(path, limit)
    except OSError as error:
        raise CheckpointError(f"{path} could not be read: {error.strerror}. Check its permissions.") from error
    except ValueError as error:
        raise CheckpointError(
            f"{path} is not valid JSON ({one_line(str(error))}): it is truncated or damaged, or no JSON in UTF-8 "
            "(without a byte order mark, comments and commas at the end). Correct it, or fetch or write it again."
        ) from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds {shown(data)}, where an object in braces belongs; fetch it again.")
    return data


@contextmanager
def actionable(source: str) -> Iterator[None]:
    """Turn any error of Transformers and its libraries on a bad checkpoint into one CheckpointError.

    A damaged file can make those libraries raise anything: Rust code even panics, which is no Exception.
    Errors of pyprune pass unchanged, and so do Ctrl-C and the end of the process.
    """
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    name = label(source)
    try:
        yield
    except PypruneError:
        raise
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise CheckpointError(
            f"{name} is not a local folder and could not be fetched from the hub: {_reason(error)}. "
            "Check the id and the network, or give a local folder."
        ) from error
    except UnpicklingError as error:
        raise CheckpointError(
            f"{name} holds a .bin file with more than plain tensors in it; it was not read, because "
            "reading it would run its code. Get the weights as safetensors."
        ) from error
    except ImportError as error:
        raise CheckpointError(
            f"{name} needs a package that is not installed: {_reason(error)}. Give the original weights of a quantised "
            "checkpoint, or remove the entry in config.json that asks for another attention."
        ) from error
    except MemoryError as error:
        raise CheckpointError(f"{name} needs more memory than there is, or its sizes are damaged.") from error
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        _refuse(source, error)


def _refuse(source: str, error: BaseException) -> None:
    text, name = _reason(error), label(source)
    if "does not recognize this architecture" in text or "Unrecognized model" in text:
        raise UnsupportedModelError(f"{name}: {text}") from error
    if not os.path.isdir(source):
        raise CheckpointError(
            f"{name} is not a local folder, and reading it from the hub failed: {text} "
            "Check the spelling and the network, or give a local folder."
        ) from error
    if _lacks_bytes(error):
        advice = "The files are truncated or damaged; fetch or write the checkpoint again."
    else:
        text = _validation_problem(text)
        advice = "Correct that value, or take the files that the model's authors published."
    raise CheckpointError(f"{name} could not be read: {text} {advice}") from error


VALIDATED = re.compile(r"Strict\w+ \((?:Class v|V)alidation error for (?:validator '\w+'|field '(\w+)'): (.*)\)\.")
"""How Transformers' configuration classes report a value: the field, and what was wrong."""
MISMATCHED = "You set `ignore_mismatched_sizes` to `False`"


def _validation_problem(text: str) -> str:
    """Return the problem of a value, without the names of the classes that report it."""
    if text.startswith(MISMATCHED):
        return "Its weights have other shapes than the sizes in config.json."
    match = VALIDATED.fullmatch(text)
    if match is None:
        return text
    reason = re.sub(r"^\w+Error: ", "", match[2]).removesuffix(".")
    return f"config.json: {reason}."


def _lacks_bytes(error: BaseException) -> bool:
    """Return whether a file ends too early or holds other bytes than its format has; other errors are of a value."""
    from safetensors import SafetensorError

    cut = (json.JSONDecodeError, UnicodeDecodeError, EOFError, struct.error, zipfile.BadZipFile, SafetensorError)
    if isinstance(error, cut) or is_panic(error):
        return True
    return isinstance(error, RuntimeError) and "PytorchStreamReader" in str(error)


def _reason(error: BaseException) -> str:
    """Return a library's error in one line of bounded length, with its type where the text alone is unclear."""
    sentence = isinstance(error, KeyError) and " " in str(error)  # of Transformers, not a missing name
    text = one_line(str(error.args[0]) + "." if sentence else str(error))
    clear = sentence or (isinstance(error, (OSError, ValueError, RuntimeError)) and text)
    return text if clear else f"{type(error).__name__} ({text})."


def is_panic(error: BaseException) -> bool:
    """Check whether an error is a panic of Rust code, which pyo3 raises as an exception that is no Exception."""
    return type(error).__name__ == "PanicException"
