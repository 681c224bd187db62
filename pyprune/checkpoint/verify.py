"""Compare the files of a checkpoint with its record: in every command, and once for all processes of a server."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path

from pyprune.checkpoint.manifest import PruningRecord
from pyprune.errors import CheckpointError, ConfigError, shown
from pyprune.runtime.files import CHECKPOINT_MANIFEST, file_digest, read_bounded, read_json
from pyprune.runtime.progress import warn

VERIFY = "PYPRUNE_VERIFY"
"""Environment variable: 0 = the files of checkpoints are used unchecked; 1 or unset = they are compared."""
SERVER = "PYPRUNE_SERVER"
"""Environment variable by which the processes of one server know each other; set by :func:`begin_server`."""
VERDICT = b"verified"
VERDICT_LIFETIME_S = 24 * 3600
"""Age at which a verdict is removed. It is used only at the start of one server."""
SETTLED_S = 2.0
"""A verdict is written only for files that are older than this: two changes at the same tick of the file system's clock
leave equal times."""

INDEX = "model.safetensors.index.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
EDITABLE = ("generation_config.json", "chat_template.jinja", "additional_chat_templates/*.jinja")
"""Files that operators adapt: if one was edited, that is a warning; for a file of any other name, an error."""
TOKENIZER_FILES = (
    "*token*.json", "*vocab*.json", "*vocab*.txt", "*merges*.txt", "tekken*.json", "normalizer.json", "byte_maps.json",
    "*.model", "*.model.v*", "*.tiktoken", "*.bpe", "*.spm", "dict.txt", "*chat_template*.json", "*.jinja",
    "*processor_config.json",
)  # fmt: skip
"""Names of top-level files of tokenizers, processors and chat templates, in all formats."""
CHAT_TEMPLATES = "additional_chat_templates"
LOADED_FILES = (
    # weights and their indices
    "*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.ggml", "*.msgpack", "*.h5", "*.npz", "*.pkl",
    "*.index.json", "*.index", "consolidated*", "weight_names.json",
    # configurations: of the model, of generation, of quantisation, of adapters, of processors
    "*config*.json", "*config*.yaml", "*processor*.json", "params.json", "modules.json", "adapter_model*",
    *TOKENIZER_FILES,
    # code
    "*.py", "*.pyc", "*.so",
)  # fmt: skip
"""Names of top-level files that Transformers, vLLM or PEFT would read from a checkpoint folder."""
LOADED_FOLDERS = (CHAT_TEMPLATES, "custom_generate")
"""Folders whose files they would all read."""


def verify_files(folder: Path, record: PruningRecord, *, server: str = "") -> None:
    """Compare a checkpoint with its record: it has the listed files, and no other that a loader would read.

    An edited generation configuration or chat template is a warning that names the file. With ``PYPRUNE_VERIFY=0``
    nothing is compared, and a warning is printed.

    Args:
        folder: the checkpoint.
        record: of its ``pruning.json``.
        server: name of the server that this process belongs to (:func:`current_server`). Its processes
            share one verdict, as long as size, times and inode of every file do not change; while another process
            compares, this one waits. Empty = the files are compared in any case.

    Raises:
        CheckpointError: a file is missing, was changed or is not in the record, or the index
            of the weights names other tensors than the files hold.
        ConfigError: PYPRUNE_VERIFY is neither 0 nor 1.
    """
    if not is_verification_on():
        warn(f"The files of {folder} were not verified: {VERIFY} is 0; unset it to verify them.")
        return
    if server:
        _compare_once(folder, record, server)
    else:
        _compare(folder, record)
    _refuse_stray(folder, record)


def is_verification_on() -> bool:
    """Check whether files must be compared.

    Raises:
        ConfigError: PYPRUNE_VERIFY is neither 0 nor 1.
    """
    value = os.environ.get(VERIFY, "1")
    if value not in ("0", "1"):
        raise ConfigError(f"{VERIFY} is {shown(value)}; allowed are 1 (verify checkpoints, the default) and 0.")
    return value == "1"


def current_server() -> str:
    """Return the name of the server that this process belongs to; "" where it belongs to none."""
    return os.environ.get(SERVER, "")


def new_server() -> str:
    """Return a unique name for a server."""
    return secrets.token_hex(16)


def begin_server() -> None:
    """Make this process and those that it starts one server, if they are not one already."""
    os.environ[SERVER] = current_server() or new_server()


# --- comparing -----------------------------------------------------------------------------------


def _compare(folder: Path, record: PruningRecord) -> None:
    for name, digest in record.files.items():
        path = folder / name
        _refuse_missing(folder, name)
        if _digest(path) == digest:
            continue
        if not _is_adapted(path, name, record):
            raise CheckpointError(
                f"{path} differs from what was written (its SHA-256 does not match {CHECKPOINT_MANIFEST}). "
                "The file is truncated or was changed; fetch or write the checkpoint again."
            )
        warn(
            f"{path} was edited after the checkpoint was written, and is used with the edit. Weights and tokenizer are "
            "not affected; write the checkpoint again if the edit is not yours."
        )
    if INDEX in record.files:
        from pyprune.checkpoint.shards import weight_files

        weight_files(folder)


def _refuse_missing(folder: Path, name: str) -> None:
    if not os.path.isfile(folder / name):
        raise CheckpointError(
            f"{folder} lacks the file {shown(name)} that its {CHECKPOINT_MANIFEST} lists; fetch it again."
        )


def _digest(path: Path) -> str:
    try:
        return file_digest(path)
    except OSError as error:
        raise CheckpointError(f"{path} could not be read: {error.strerror}. Check its permissions.") from error


def _is_adapted(path: Path, name: str, record: PruningRecord) -> bool:
    """Check whether a changed file may be edited and is whole: text, or a JSON object."""
    if name == TOKENIZER_CONFIG:
        return record.tokenizer_config is not None and digest_without_template(path) == record.tokenizer_config
    if not any(fnmatchcase(name, pattern) for pattern in EDITABLE):
        return False
    try:
        return isinstance(read_json(path), dict) if path.suffix == ".json" else bool(read_bounded(path))
    except (OSError, ValueError):
        return False


def digest_without_template(path: Path) -> str | None:
    """Return the SHA-256 (hex) of ``tokenizer_config.json`` without the chat template; None where it is no JSON object.

    It separates an edited template from an edited tokenizer.
    """
    try:
        values = read_json(path)
    except (OSError, ValueError):
        return None
    if not isinstance(values, dict):
        return None
    values.pop("chat_template", None)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _refuse_stray(folder: Path, record: PruningRecord) -> None:
    stray = next((name for name in _loaded_names(folder) if name not in record.files), None)
    if stray is not None:
        template = " A server takes a template from elsewhere with --chat-template." * stray.endswith(".jinja")
        raise CheckpointError(
            f"{folder} holds {shown(stray)}, which its {CHECKPOINT_MANIFEST} does not list and a loader would read; "
            f"what is loaded would not be what was verified. Move it away, or write the checkpoint again.{template}"
        )


def _loaded_names(folder: Path) -> Iterator[str]:
    """Yield the names that a loader would read in a folder; links and folders count as well, hidden files do not."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(f"{folder} could not be read: {error.strerror}. Check its permissions.") from error
    for name in names:
        if name.lower() in LOADED_FOLDERS:
            inside = sorted(path for path in (folder / name).rglob("*") if path.is_symlink() or not path.is_dir())
            yield from (path.relative_to(folder).as_posix() for path in inside)
        elif _is_loaded(name):
            yield name


def _is_loaded(name: str) -> bool:
    ignored = name == CHECKPOINT_MANIFEST or name.startswith(".")
    return not ignored and any(fnmatchcase(name.lower(), pattern) for pattern in LOADED_FILES)


# --- once for a server ---------------------------------------------------------------------------


def _compare_once(folder: Path, record: PruningRecord, server: str) -> None:
    """Compare once for all ranks of a server, which call this at the same time: the first compares, the others wait."""
    facts = _facts(folder, record, server)
    with _verdict(facts) as file:
        if file is not None and os.pread(file, len(VERDICT) + 1, 0) == VERDICT:
            return
        _compare(folder, record)
        if file is not None and _facts(folder, record, server) == facts and _are_settled(folder, record):
            with suppress(OSError):  # a full disk; half a verdict does not count, and the next process compares again
                os.pwrite(file, VERDICT, 0)
            _remove_old_verdicts()


def _facts(folder: Path, record: PruningRecord, server: str) -> str:
    """Return the facts that a verdict is for: one server, folder and record, and the present state of its files."""
    states = {}
    for name in record.files:
        _refuse_missing(folder, name)
        state = os.stat(folder / name)
        states[name] = [state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns]
    return json.dumps([server, str(folder.resolve()), record.files, record.tokenizer_config, states])


def _are_settled(folder: Path, record: PruningRecord) -> bool:
    """Check that no file changed a moment ago; st_mtime may be of a machine whose clock is ahead."""
    times = [os.stat(folder / name).st_ctime for name in record.files]
    return time.time() - max(times, default=0.0) > SETTLED_S


@contextmanager
def _verdict(facts: str) -> Iterator[int | None]:
    """Lock the verdict file for these facts, which one process at a time holds; yield None where none can be made."""
    descriptor = _open_verdict(hashlib.sha256(facts.encode()).hexdigest())
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)  # the lock ends with it


def _open_verdict(name: str) -> int | None:
    try:
        path = _verdict_folder() / name
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
            raise PermissionError
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _verdict_folder() -> Path:
    """Return a folder that no other user can write to; on a shared machine another one may have taken its name.

    Raises:
        OSError: there is none.
    """
    folder = Path(tempfile.gettempdir()) / f"pyprune-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    state = os.lstat(folder)
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user alone")
    return folder


def _remove_old_verdicts() -> None:
    with suppress(OSError):
        for path in _verdict_folder().iterdir():
            if time.time() - path.lstat().st_mtime > VERDICT_LIFETIME_S:
                path.unlink()
