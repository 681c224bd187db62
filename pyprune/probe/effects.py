"""The effect of regularisation on weights, activations and layers, and a warning when it did nothing.

DReSS figures 5 and 6 are ratios of sums of absolute values, after to before, per matrix and for the activations. They
are taken over the removed channels (R) and over the kept ones. ELDeR figures 7 and 8 are the cosine between a layer's
input and output, for the removed layers and the others. Snapshots hold sums, never copies of weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from pyprune.families import family_for, named_axes
from pyprune.plan import PrunePlan
from pyprune.probe.hooks import LayerHooks
from pyprune.runtime.modes import evaluation_mode

UNCHANGED_SHARE = 0.05
"""A regulariser that closed less of the gap (of 1 - cosine, or of |W|) than this has had no effect."""


@dataclass(frozen=True)
class Sums:
    """Sums of absolute values (float64) over the removed and over the kept part."""

    removed: float
    kept: float


@dataclass(frozen=True)
class EffectSnapshot:
    """One model's state, as sums.

    Attributes:
        removed_layers: dense indices of the layers that are removed.
        weights: parameter name -> sums over its hidden axis (1 + w for unit-offset norms); empty when no channel
            is removed.
        activations: per layer, sums over the layer's output on the probe.
        cosines: per layer, mean over tokens of the cosine between the layer's input and output.
    """

    removed_layers: tuple[int, ...]
    weights: dict[str, Sums]
    activations: tuple[Sums, ...]
    cosines: tuple[float, ...]


@dataclass
class EffectReport:
    """The state before and after. JSON-able through :meth:`to_dict`.

    Attributes:
        preserved_ratio: sum |W after| / sum |W before| over R, all tensors together; None when no channel is removed.
        kept_ratio: sum |W after| / sum |W before| over the kept channels.
        weight_ratios: parameter name -> (ratio over R, ratio over the kept part); DReSS figures 5 and 6.
        matrix_ratios: such ratios summed over the layers: "self_attn.q_proj.weight" and so on.
        activation_ratios: per layer (ratio over R, ratio over the kept part).
        cosines_before: per layer; ELDeR figures 7 and 8.
        cosines_after: per layer.
        removed_layers: the layers to remove; the others are figure 8's.
        warnings: effects that are missing.
    """

    preserved_ratio: float | None
    kept_ratio: float | None
    weight_ratios: dict[str, tuple[float, float]]
    matrix_ratios: dict[str, tuple[float, float]]
    activation_ratios: list[tuple[float, float]]
    cosines_before: list[float]
    cosines_after: list[float]
    removed_layers: list[int]
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data (ratios of an empty sum are null)."""
        plain: dict[str, Any] = _no_nan(asdict(self))
        return plain


@torch.no_grad()
def weight_sums(model: PreTrainedModel, plan: PrunePlan) -> dict[str, Sums]:
    """Return parameter name -> sums of |W| over the hidden channels that the plan removes and keeps.

    Tied parameters appear once; unit-offset norms (Gemma) count |1 + w|. Empty when no channel is removed.
    """
    if not plan.removed_hidden:
        return {}
    family = family_for(model)
    gone = torch.tensor(plan.removed_hidden)
    result = {}
    for param in named_axes(model):
        dim = param.axis_dim("hidden")
        if dim is None:
            continue
        others = tuple(d for d in range(param.parameter.ndim) if d != dim)
        value = family.effective(param.row, param.parameter).abs()
        channels = value.sum(others, dtype=torch.float64) if others else value.double()
        result[param.name] = _divide(channels, gone)
    return result


def _divide(channels: Tensor, gone: Tensor) -> Sums:
    """Return the sums of the channels at the indices ``gone`` and of the others."""
    removed = float(channels[gone.to(channels.device)].sum())
    return Sums(removed, float(channels.sum()) - removed)


@torch.no_grad()
def snapshot(model: PreTrainedModel, plan: PrunePlan, probe: Tensor) -> EffectSnapshot:
    """Measure the parts of a dense model that a plan will remove and keep.

    Args:
        model: a dense model; runs in evaluation mode, and its own mode is restored.
        plan: plan of the cut.
        probe: token ids, int64 [B, T]; the same for every snapshot that is compared.
    """
    layers = family_for(model).layers(model)
    gone = torch.tensor(plan.removed_hidden, dtype=torch.int64)
    sums: dict[int, Sums] = {}
    cosines: dict[int, float] = {}

    def measure(index: int, before: Tensor, after: Tensor) -> None:
        cosine = functional.cosine_similarity(before.float(), after.float(), dim=-1)
        cosines[index] = float(cosine.double().mean())
        sums[index] = _divide(after.abs().sum((0, 1), dtype=torch.float64), gone)

    hooks = LayerHooks(layers, range(len(layers)), measure)
    try:
        with evaluation_mode(model):
            model(input_ids=probe.clamp(min=0).to(model.device), use_cache=False, logits_to_keep=1)
    finally:
        hooks.remove()
    return EffectSnapshot(
        removed_layers=plan.removed_layers,
        weights=weight_sums(model, plan),
        activations=tuple(sums[i] for i in range(len(layers))),
        cosines=tuple(cosines[i] for i in range(len(layers))),
    )


def compare(
    before: EffectSnapshot, after: EffectSnapshot, *, target_preserved_ratio: float | None = None
) -> EffectReport:
    """Compare two snapshots of one model and plan.

    Args:
        before: snapshot before regularisation.
        after: snapshot after it, before the cut.
        target_preserved_ratio: the preserved ratio that DReSS should reach; None = only warn when nothing changed.
    """
    report = EffectReport(
        preserved_ratio=preserved_ratio(before.weights, after.weights),
        kept_ratio=_ratio(_total(before.weights).kept, _total(after.weights).kept) if before.weights else None,
        weight_ratios=_ratios(before.weights, after.weights),
        matrix_ratios=_ratios(_sum_layers(before.weights), _sum_layers(after.weights)),
        activation_ratios=[
            (_ratio(b.removed, a.removed), _ratio(b.kept, a.kept))
            for b, a in zip(before.activations, after.activations, strict=True)
        ],
        cosines_before=list(before.cosines),
        cosines_after=list(after.cosines),
        removed_layers=list(before.removed_layers),
    )
    if report.preserved_ratio is not None:
        report.warnings += preserved_warnings(report.preserved_ratio, target_preserved_ratio)
    if before.removed_layers:
        report.warnings += _cosine_warnings(before, after)
    return report


def preserved_ratio(before: Mapping[str, Sums], after: Mapping[str, Sums]) -> float | None:
    """Return sum |W after| / sum |W before| over the removed channels, all tensors together; None if there are none."""
    return _ratio(_total(before).removed, _total(after).removed) if before else None


def preserved_warnings(ratio: float, target: float | None) -> list[str]:
    """Return the warnings about a preserved ratio (none when the target is reached)."""
    if ratio > 1 - UNCHANGED_SHARE:
        return [
            f"The regulariser had no effect: {ratio:.1%} of |W| in the channels to remove is left. Use more steps, a "
            "larger learning rate or prox_step, or schedule 'anneal'; a larger penalty_weight does not help Adam."
        ]
    if target is not None and ratio > target:
        return [
            f"The regulariser missed its target: {ratio:.1%} of |W| in the channels to remove is still there, above "
            f"{target:.1%}. Use more steps, a larger learning rate or prox_step, or schedule 'anneal'."
        ]
    return []


def _cosine_warnings(before: EffectSnapshot, after: EffectSnapshot) -> list[str]:
    gone = before.removed_layers
    old = sum(before.cosines[i] for i in gone) / len(gone)
    new = sum(after.cosines[i] for i in gone) / len(gone)
    if 1 - new <= (1 - UNCHANGED_SHARE) * (1 - old) or old > 1 - 1e-6:
        return []
    return [
        f"The regulariser had no effect on layers {list(gone)}: the mean cosine of their input and output changed from "
        f"{old:.4f} to {new:.4f}. Use more steps, a larger penalty_weight or learning rate, or schedule 'anneal'."
    ]


def _sum_layers(sums: Mapping[str, Sums]) -> dict[str, Sums]:
    """Sum the layers: "model.layers.3.mlp.up_proj.weight" counts under "mlp.up_proj.weight"."""
    result: dict[str, Sums] = {}
    for name, value in sums.items():
        parts = name.split(".")
        index = next((i for i, part in enumerate(parts) if part.isdecimal()), -1)
        key = ".".join(parts[index + 1 :])
        so_far = result.get(key, Sums(0.0, 0.0))
        result[key] = Sums(so_far.removed + value.removed, so_far.kept + value.kept)
    return result


def _ratios(before: Mapping[str, Sums], after: Mapping[str, Sums]) -> dict[str, tuple[float, float]]:
    return {
        name: (_ratio(b.removed, after[name].removed), _ratio(b.kept, after[name].kept)) for name, b in before.items()
    }


def _total(sums: Mapping[str, Sums]) -> Sums:
    return Sums(sum(s.removed for s in sums.values()), sum(s.kept for s in sums.values()))


def _ratio(before: float, after: float) -> float:
    return after / before if before else math.nan


def _no_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _no_nan(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_no_nan(v) for v in value]
    return None if isinstance(value, float) and math.isnan(value) else value
