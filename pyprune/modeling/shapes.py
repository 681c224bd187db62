"""Models without weights: uninitialised ones, and shapes of models whose weights another process has."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from pyprune.runtime.shapes import to_shapes_


def uninitialised_model(
    config: PretrainedConfig, dtype: torch.dtype, *, auto: Any = AutoModelForCausalLM, **options: Any
) -> PreTrainedModel:
    """Make the model of a configuration without writing its weights: memory that is not written is not resident.

    Args:
        config: it is not changed.
        dtype: of the parameters.
        auto: the Auto class that has the model.
        options: of ``from_config``.
    """
    config = copy.deepcopy(config)
    config.dtype = dtype
    with no_init_weights():
        return cast(PreTrainedModel, auto.from_config(config, **options))


def model_of_shapes(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Make the model of a configuration on the host, in eval mode; its parameters have no memory and no values.

    Args:
        config: dense or pruned, of an architecture that Transformers or pyprune knows.
        dtype: of the parameters.
    """
    model = uninitialised_model(config, dtype)
    model.tie_weights()
    to_shapes_(model)
    model.eval()
    return model
