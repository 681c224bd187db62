"""Low-rank adapters through PEFT."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from pyprune.config.train import RecoverConfig
from pyprune.errors import ConfigError, MissingDependencyError, UnsupportedModelError
from pyprune.families.prefix import dense_type
from pyprune.ops.rounding import changed_to_bfloat16
from pyprune.runtime.files import CARD_NAME, atomic_folder


def projection_names(model: PreTrainedModel) -> list[str]:
    """Full names of the linear modules except the head.

    Raises:
        UnsupportedModelError: there is none.
    """
    head = model.get_output_embeddings()
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head]
    if not names:
        raise UnsupportedModelError(f"{type(model).__name__} has no linear projection for LoRA to adapt.")
    return names


def target_names(model: PreTrainedModel, config: RecoverConfig) -> list[str]:
    """Full names of the linear modules that get an adapter, by ``config.targets``.

    Args:
        model: a causal LM, dense or cut.
        config: options of recovery.

    Raises:
        ConfigError: PEFT has no default modules for the architecture.
        MissingDependencyError: PEFT is not installed, and its default is asked for.
        UnsupportedModelError: the model has no such module.
    """
    names = projection_names(model)
    if config.targets == "all-linear":
        return names
    defaults = _default_modules(model)
    targets = [name for name in names if name.rpartition(".")[2] in defaults]
    if not targets:
        raise UnsupportedModelError(
            f"recover.targets is 'default', but {type(model).__name__} has none of PEFT's modules for it "
            f"({', '.join(defaults)}) left; set recover.targets to all-linear."
        )
    return targets


def _default_modules(model: PreTrainedModel) -> list[str]:
    """Return the last names of the modules that PEFT adapts by default; a cut model has those of the dense one."""
    try:
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS
    except ImportError as error:
        raise MissingDependencyError("peft", "recover", "LoRA") from error
    model_type = dense_type(model.config.model_type)
    if model_type not in DEFAULTS:
        raise ConfigError(
            f"recover.targets is 'default', but PEFT names no default modules for model type {model_type!r}; set "
            "recover.targets to all-linear."
        )
    return list(DEFAULTS[model_type])


def check_rank(model: PreTrainedModel, targets: Sequence[str], rank: int) -> None:
    """Refuse, before anything is allocated, adapters that are larger than the matrices that they adapt.

    Args:
        model: a causal LM.
        targets: full names of the linear modules that get an adapter.
        rank: of every adapter, [rank, in] and [out, rank].

    Raises:
        ConfigError: no projection is as large, in or out.
    """
    weights = [cast(nn.Linear, model.get_submodule(name)).weight for name in targets]
    largest = max(max(weight.shape) for weight in weights)
    if rank > largest:
        raise ConfigError(
            f"rank is {rank}, but the largest linear projection of {type(model).__name__} has {largest} channels; use "
            f"a rank of at most {largest}."
        )


def recovery_model(model: PreTrainedModel, config: RecoverConfig) -> AbstractContextManager[nn.Module]:
    """Give the model that a recovery trains: with adapters on it for the block, or as it is for all weights."""
    if config.adapters == "none":
        return nullcontext(model)
    return adapters(model, target_names(model, config), config)


@contextmanager
def adapters(model: PreTrainedModel, targets: list[str], config: RecoverConfig) -> Iterator[Any]:
    """Give the model wrapped by PEFT; restore its mode, and which parameters require a gradient, afterwards.

    The caller merges or unloads the adapters before the block ends.

    Args:
        model: a causal LM.
        targets: full names of the linear modules that get an adapter.
        config: rank, alpha, dropout, and the seed of the adapters (``train.seed``).

    Raises:
        ConfigError: the rank is larger than every projection.
        MissingDependencyError: PEFT is not installed.
    """
    check_rank(model, targets, config.rank)
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingDependencyError("peft", "recover", "LoRA") from error
    required = {n: p.requires_grad for n, p in model.named_parameters()}
    training = model.training
    lora = LoraConfig(r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout, target_modules=targets)
    # PEFT draws the adapters from the global stream; it must give the same adapters again when resuming.
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(config.train.seed)
        adapted = get_peft_model(model, lora)
    try:
        with warnings.catch_warnings():
            # merging announces tied heads, which are never adapted here
            warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
            yield adapted
    finally:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(required.get(name, True))
        # The wrapper starts in training mode, which training would return to.
        model.train(training)
        if hasattr(model, "peft_config"):
            del model.peft_config


def merge(adapted: Any) -> None:
    """Add trained adapters to the weights below them, in float32 at least; the caller then unloads them.

    bfloat16 weights are rounded so that small updates are kept (:func:`pyprune.ops.rounding.changed_to_bfloat16`).

    Args:
        adapted: a model wrapped by :func:`adapters`.
    """
    from peft.tuners.lora import LoraLayer

    for name, layer in adapted.named_modules():
        if isinstance(layer, LoraLayer):
            weight = layer.get_base_layer().weight
            for adapter in layer.active_adapters:
                wide = torch.promote_types(weight.dtype, torch.float32)
                merged = weight.data.to(wide) + layer.get_delta_weight(adapter).to(wide)
                weight.data.copy_(changed_to_bfloat16(merged, name) if weight.dtype == torch.bfloat16 else merged)


def save_adapters(adapted: Any, out: Path) -> None:
    """Write trained adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

    Args:
        adapted: a model wrapped by :func:`adapters`, before they are merged or unloaded.
        out: the folder to create; it appears whole or not at all.

    Raises:
        OutputError: the folder exists or cannot be written.
    """
    with atomic_folder(out) as folder:
        adapted.save_pretrained(str(folder), save_embedding_layers=False)  # never adapted here
        (folder / CARD_NAME).unlink(missing_ok=True)  # a template of a model card, left blank
