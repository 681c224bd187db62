"""Models of types without a table, without some of their layers: the tensors of the others are shared, not copied."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from pyprune.cut.mask import masked
from pyprune.errors import PlanError
from pyprune.families import family_for
from pyprune.families.alone import is_remote
from pyprune.plan import PrunePlan
from pyprune.runtime.modes import evaluation_mode

TOKENS = 48
"""Length of the text on which the shorter model is compared with the masked one."""
LONGEST_WINDOW = 8192
"""Tokens; text is longer than the windows of a model whose code comes with a repository, but not than this."""
ERROR = {torch.float32: 1e-4, torch.float64: 1e-6}
"""Largest relative difference of logits that rounding explains, by the dtype of the weights; 0.02 for narrower ones."""


def shorter_model(model: PreTrainedModel, kept: Sequence[int], path: str, config: PretrainedConfig) -> PreTrainedModel:
    """Return a model of the same class with some of the layers; it shares their tensors.

    Args:
        model: the dense model.
        kept: indices of the kept layers, ascending.
        path: dotted path of its layers.
        config: of the shorter model.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = model.config._attn_implementation
    tensors = model.state_dict()
    state = {new: tensors[name] for name, new in kept_names(tensors, path, kept)}
    with no_init_weights(), torch.device(model.device):
        smaller: PreTrainedModel = cast(Any, type(model))._from_config(config, dtype=model.dtype)
    smaller.load_state_dict(state, assign=True)
    smaller.tie_weights()
    smaller.train(model.training)
    smaller.generation_config = copy.deepcopy(model.generation_config)
    return smaller


def kept_names(names: Iterable[str], path: str, kept: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Yield the names of tensors of kept layers and outside of them, each with its name in the shorter model.

    Args:
        names: of tensors of the dense model.
        path: dotted path of its layers.
        kept: indices of the kept layers, ascending.
    """
    place = {old: new for new, old in enumerate(kept)}
    layer = re.compile(re.escape(path) + r"\.(\d+)\.(.*)", re.DOTALL)
    for name in names:
        inside = layer.fullmatch(name)
        if inside is None:
            yield name, name
        elif int(inside[1]) in place:
            yield name, f"{path}.{place[int(inside[1])]}.{inside[2]}"


@torch.no_grad()
def check_shorter(model: PreTrainedModel, plan: PrunePlan, config: PretrainedConfig) -> None:
    """Compare the logits of the shorter model with those of the masked one, on a few tokens.

    Both compute the same, unless code of the class depends on the number of layers or on a layer's index.

    Args:
        model: the dense model, unchanged; on the meta device nothing is compared.
        plan: the layers to keep.
        config: of the shorter model.

    Raises:
        PlanError: they differ.
    """
    if model.device.type == "meta" or not plan.removed_layers:
        return
    smaller = shorter_model(model, plan.kept_layers, family_for(model).layers_path, config)
    window = (getattr(config, "sliding_window", None) or 0) if is_remote(config) else 0  # tests prove the other types
    length = TOKENS + min(window, LONGEST_WINDOW)
    ids = torch.arange(7, 7 + length, device=model.device)[None] * 31 % min(plan.dense.vocab_size, 1 << 15)
    with evaluation_mode(model), evaluation_mode(smaller), masked(model, plan):
        expected, logits = (each(ids, use_cache=False).logits.float() for each in (model, smaller))
    error = float((logits - expected).norm() / expected.norm().clamp(min=1e-30))
    if not error < ERROR.get(model.dtype, 0.02):
        raise PlanError(
            f"The layers of this {plan.model_type!r} model depend on their index or number: without "
            f"{len(plan.removed_layers)} layers its logits differ by {error:.1%} from the masked model's.\n"
            "Choose other layers, or add a table of its parameters (pyprune/families)."
        )
