"""A model of which a process knows the shapes alone, because another one has the weights."""

from __future__ import annotations

import copy
from typing import cast

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from pyprune.runtime.shapes import to_shapes_


def model_of_shapes(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a configuration on the host, in eval mode; its parameters take no memory and have no values.

    Args:
        config: dense or pruned, of an architecture that Transformers or pyprune knows.
        dtype: of the parameters.
    """
    config = copy.deepcopy(config)
    config.dtype = dtype
    with no_init_weights():  # memory that is never written to is not resident
        model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config))
    model.tie_weights()
    to_shapes_(model)
    model.eval()
    return model
