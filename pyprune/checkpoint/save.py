"""Write checkpoints: safetensors, configuration, tokenizer, model card and record, as one folder or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from pyprune.checkpoint.manifest import PruningRecord
from pyprune.checkpoint.notation import write_older_notation
from pyprune.checkpoint.places import Places, places_of
from pyprune.checkpoint.record import write_record
from pyprune.checkpoint.tokenizer import write_tokenizer
from pyprune.checkpoint.tower import whole_model
from pyprune.errors import OutputError
from pyprune.families import count_parameters, stored_buffers
from pyprune.ops.rounding import changed_to_bfloat16
from pyprune.plan import PrunePlan
from pyprune.runtime.device import DTYPES
from pyprune.runtime.files import atomic_folder


def save_checkpoint(
    model: PreTrainedModel,
    tokenizer: Any,
    out: str | Path,
    *,
    plan: PrunePlan | None,
    provenance: Mapping[str, Any],
    overwrite: bool = False,
    dtype: str | None = None,
    convert: Callable[[Path], None] | None = None,
    trained: bool = False,
) -> Path:
    """Write a checkpoint folder: safetensors, config, tokenizer, generation config, model card, pruning.json.

    The folder appears complete or not at all: everything is written to a temporary sibling, flushed to the
    disk and renamed.

    Args:
        model: a compacted (or dense) model; the multimodal model is written around a text tower.
        tokenizer: its tokenizer, or None; the files it was loaded from are copied (:func:`write_tokenizer`).
        out: the folder to create.
        plan: the kept parts of the dense model, or None.
        provenance: plain JSON data: method, options, source, measured figures.
        overwrite: replace an existing folder.
        dtype: float32, bfloat16 or float16 to convert the written weights to; None keeps the model's.
        convert: called with the folder of weights and configuration, which it may change, before the record is written.
        trained: the weights were trained in a wider dtype than the written one: weights that changed also differ in
            bfloat16 (:func:`pyprune.ops.rounding.changed_to_bfloat16`).

    Returns:
        The folder.

    Raises:
        OutputError: the folder exists (without ``overwrite``), the disk is full, or writing failed.
    """
    model, facts = whole_model(model), dict(provenance)
    facts["parameters"] = count_parameters(model)
    facts["architecture"] = type(model).__name__
    facts["dtype"] = dtype or str(model.dtype).removeprefix("torch.")
    with atomic_folder(out, overwrite=overwrite) as temporary:
        _save_weights(model, temporary, dtype, trained=trained)
        write_older_notation(temporary, dtype)
        write_tokenizer(tokenizer, temporary)
        if convert is not None:
            convert(temporary)
        write_record(temporary, PruningRecord(plan, facts))
    return Path(out)


def _save_weights(model: PreTrainedModel, folder: Path, dtype: str | None, *, trained: bool) -> None:
    kept, places = model.config.dtype, places_of(model)
    wanted = model.dtype if dtype is None else DTYPES[dtype]
    if wanted == model.dtype and places is None:
        with _generation_config_as_it_is(model, folder):
            model.save_pretrained(folder)
        return
    # Each parameter once: the sharing of a tied head survives conversion.
    names, buffers = _names(model, places), stored_buffers(model)
    state = {name: convert_weight(name, model.get_parameter(name).detach(), wanted, trained=trained) for name in names}
    state |= buffers
    if places is not None:
        placed = [name for name in buffers if name in places.tensors]
        state = places.split(state | {name: buffers[name].to(places.tensors[name].dtype) for name in placed})
    try:
        model.config.dtype = wanted
        with _generation_config_as_it_is(model, folder):
            model.save_pretrained(folder, state_dict=state, save_original_format=places is None)
    finally:
        model.config.dtype = kept


def _names(model: PreTrainedModel, places: Places | None) -> list[str]:
    """Return a name of every parameter; of those that a parameter has, the one in the files that it was read from."""
    shared: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), []).append(name)
    stored = places.tensors if places is not None else {}
    return [next((name for name in names if name in stored), names[0]) for names in shared.values()]


def convert_weight(name: str, weight: torch.Tensor, dtype: torch.dtype, *, trained: bool = False) -> torch.Tensor:
    """Convert a weight to the dtype that it is written in; ``trained`` as in :func:`save_checkpoint`.

    Raises:
        OutputError: a finite value is beyond the range of that dtype.
    """
    if weight.dtype == dtype:
        return weight
    keeping = trained and weight.dtype == torch.float32 and dtype == torch.bfloat16
    result = changed_to_bfloat16(weight, name) if keeping else weight.to(dtype)
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
