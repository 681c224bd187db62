"""What a bad checkpoint makes Transformers and what it calls raise, as errors that a person can act on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pickle import UnpicklingError

from pyprune.errors import CheckpointError, PypruneError, UnsupportedModelError, shown
from pyprune.runtime.limits import one_line


def named(source: str) -> str:
    """A path or hub id for a message: as it is, unless it is very long or would not stay on one line."""
    return source if source.isprintable() and len(source) <= 300 else shown(source)


@contextmanager
def actionable(source: str) -> Iterator[None]:
    """Turn whatever Transformers and what it calls raise on a bad checkpoint into one CheckpointError.

    A damaged file can make those libraries raise anything: Rust code even panics, which is no Exception. What pyprune
    raises itself passes, and so do Ctrl-C and the end of the process.
    """
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    name = named(source)
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
            f"{name} needs a package that is not installed: {_reason(error)}. Quantised checkpoints are not read "
            "(give the original weights); other attention than the usual one is chosen by an entry in config.json, "
            "which can be removed."
        ) from error
    except MemoryError as error:
        raise CheckpointError(f"{name} needs more memory than there is, or its sizes are damaged.") from error
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        _refuse(source, error)


def _refuse(source: str, error: BaseException) -> None:
    text, name = _reason(error), named(source)
    if "does not recognize this architecture" in text or "Unrecognized model" in text:
        raise UnsupportedModelError(f"{name}: {text}") from error
    if not os.path.isdir(source):
        raise CheckpointError(
            f"{name} is not a local folder, and reading it from the hub failed: {text} "
            "Check the spelling and the network, or give a local folder."
        ) from error
    raise CheckpointError(
        f"{name} could not be read: {text} The files may be truncated or damaged; fetch or write the checkpoint again."
    ) from error


def _reason(error: BaseException) -> str:
    """A library's error in one line of bounded length, with its type where the text alone says too little."""
    text = one_line(str(error))
    speaks = isinstance(error, (OSError, ValueError, RuntimeError)) and text
    return text if speaks else f"{type(error).__name__} ({text})."


def is_panic(error: BaseException) -> bool:
    """Whether it is a panic of Rust code, which pyo3 raises as an exception that is no Exception."""
    return type(error).__name__ == "PanicException"
