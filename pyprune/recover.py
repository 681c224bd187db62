"""Recovery of a pruned model: LoRA on every linear projection, merged again; and plain fine-tuning as the control."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pyprune.config import RecoverConfig, TrainConfig
from pyprune.errors import MissingDependencyError, TrainingError, UnsupportedModelError
from pyprune.train import Objective, TrainReport, train


class _LoraObjective(Objective):
    """The language-model loss; what is trained are the adapters, the only parameters that require a gradient."""

    name = "lora"

    def __init__(self, config: RecoverConfig) -> None:
        self.config = config

    def identity(self) -> dict[str, Any]:
        """Rank, scale and dropout."""
        return {"rank": self.config.rank, "alpha": self.config.alpha, "dropout": self.config.dropout}


def recover(
    model: PreTrainedModel,
    samples: Tensor,
    config: RecoverConfig,
    *,
    validation: Tensor | None = None,
    checkpoint_dir: Path | None = None,
    resume: bool = False,
) -> TrainReport:
    """Train LoRA adapters on ``model`` and merge them: class, configuration and names stay as they were.

    The adapters sit on every linear projection of the decoder layers, whatever their widths (the head is left
    alone). At a loss that is not finite the last good adapters are merged before the error is raised; on Ctrl-C
    they are dropped and a resumable checkpoint is left in ``checkpoint_dir``.

    Args:
        model: a causal LM, dense or pruned; changed in place. Base weights may be half precision.
        samples: token ids, int64 [N, T].
        config: rank, alpha, dropout and the training options.
        validation: token ids for early stopping, int64 [M, T].
        checkpoint_dir: where resumable checkpoints go.
        resume: continue from the newest of them.

    Raises:
        MissingDependencyError: PEFT is not installed.
        UnsupportedModelError: the model has no linear projection.
        TrainingError, DataError, ConfigError: as in :func:`pyprune.train.train`.
    """
    targets = projection_names(model)
    keep = False
    with _adapters(model, targets, config) as adapted:
        try:
            report = train(
                adapted,
                samples,
                config.train,
                _LoraObjective(config),
                validation=validation,
                checkpoint_dir=checkpoint_dir,
                resume=resume,
                description="LoRA recovery",
            )
            keep = True
        except TrainingError:
            keep = True
            raise
        finally:
            if keep:
                adapted.merge_and_unload()
            else:
                adapted.unload()
    return report


def finetune(
    model: PreTrainedModel,
    samples: Tensor,
    config: TrainConfig,
    *,
    validation: Tensor | None = None,
    checkpoint_dir: Path | None = None,
    resume: bool = False,
) -> TrainReport:
    """Fine-tune all weights of ``model`` in place: the control beside every method. Arguments as in :func:`train`."""
    return train(
        model,
        samples,
        config,
        validation=validation,
        checkpoint_dir=checkpoint_dir,
        resume=resume,
        description="fine-tuning",
    )


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


@contextmanager
def _adapters(model: PreTrainedModel, targets: list[str], config: RecoverConfig) -> Iterator[Any]:
    """The model wrapped by PEFT; which parameters require a gradient is put back afterwards."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingDependencyError("peft", "recover", "LoRA recovery") from error
    required = {n: p.requires_grad for n, p in model.named_parameters()}
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
        if hasattr(model, "peft_config"):
            del model.peft_config
