"""LaCo (Yang et al., "LaCo: Large Language Model Pruning via Layer Collapse", section 2, algorithm 1).

Layer l takes over the m layers after it, which are removed (equation 1, "reserving differences while seeking common"):

    theta_l <- theta_l + sum over k = 1..m of (theta_{l+k} - theta_l).

From the end of the model towards its beginning, a merge is kept if the output of the collapsed model is similar to the
dense model's. The similarity is the cosine of their last hidden states, a sample's tokens as one vector; its mean over
the samples must be at least T. The authors choose T for each model to reach their ratio; here it is the largest one
that reaches it. Merges of merged layers add up to whole multiples of dense layers, which a decision stores.

The authors' code merges the linear projections and leaves the norms of layer l, and so does this. It also subtracts
theta_l after it was changed, so that only the last layer's theta_{l+m} is left: that is ``form="code"``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from pyprune.errors import ConfigError, ScoreError, UnsupportedModelError
from pyprune.families import check_table
from pyprune.methods.base import NO_RUN, PlanDecision, PlanRequest, RunOptions, own_options
from pyprune.methods.layers._units import Removal, layer_runner, micro_batches
from pyprune.methods.layers.laco import LacoOptions
from pyprune.plan import PrunePlan
from pyprune.probe.activations import frozen_eval
from pyprune.probe.streams import LayerRunner

Multiples = tuple[tuple[int, int], ...]
"""A layer's parameters as a sum of dense layers': (dense layer, how many times), ascending, without zeros."""
Collapsed = tuple[tuple[int, Multiples], ...]
"""The layers that are left: (dense index, its parameters as multiples), ascending."""


def decide(model: PreTrainedModel, samples: Tensor, request: PlanRequest, run: RunOptions = NO_RUN) -> PlanDecision:
    """Find the merges; the weights do not change before :func:`prepare`.

    Raises:
        ConfigError: the ratio cannot be reached, or the cut would be reconstructed as well.
        ScoreError: an output of the collapsed model is not finite.
        UnsupportedModelError: the model is a mixture of experts, or its layers are of several kinds.
    """
    request.family.refuse_experts("laco", request.identity.dense.layers)
    options = own_options(request, LacoOptions)
    check_table(request.family, "laco, which adds up projections of layers,")
    if len(kinds := dict.fromkeys(request.identity.dense.layers)) > 1:
        raise UnsupportedModelError(
            f"laco adds up projections of neighbouring layers, and those of this {model.config.model_type!r} model are "
            f"of several kinds ({', '.join(kinds)}). Choose the method shortgpt or sleb."
        )
    if request.reconstruct != "none":
        raise ConfigError(
            f"cut.reconstruct is {request.reconstruct!r}, but laco merges layers right before the cut, and that "
            "merged model would be reconstructed instead of the dense one. Set it to none, or choose another method."
        )
    removal = Removal.of(request, keep_first=options.lowest + 1)
    layers = layer_runner(model, run)
    with frozen_eval(layers.model):
        similarity = _Similarity(layers, micro_batches(layers.model, samples, request.method))
        collapsed, threshold = _search(request.identity.dense.num_layers, removal.count, options, similarity)
    kept = {index for index, _ in collapsed}
    merges = {str(index): {str(i): times for i, times in terms} for index, terms in merges_of(collapsed).items()}
    return removal.decision(
        [index for index in removal.open_layers if index not in kept],
        merges=merges,
        threshold=threshold,
        similarity=similarity(collapsed),
        evaluations=len(similarity.known),
    )


def prepare(layers: LayerRunner, plan: PrunePlan, samples: Tensor, details: Mapping[str, Any]) -> tuple[str, ...]:
    """Merge the layers that the decision names; the layers that were taken over do not change before the cut."""
    merges = {int(i): tuple((int(j), n) for j, n in terms.items()) for i, terms in details["layers"]["merges"].items()}
    for index, terms in sorted(merges.items()):  # a merge reads its own layer and later ones, which are still dense
        merge_(layers, index, terms)
    kept = [*plan.kept_layers, plan.dense.num_layers]
    ends = dict(pairwise(kept))
    spans = ", ".join(f"{index} to {ends[index] - 1} into {index}" for index in merges)
    return (f"LaCo merged layers {spans}.",)


@torch.no_grad()
def merge_(layers: LayerRunner, index: int, terms: Multiples) -> None:
    """Set the linear projections of a layer to a sum of multiples of those of dense layers, and keep them."""
    merged = merged_projections(layers, terms)
    with layers.layer(index) as layer:
        for name, parameter in _projections(layer):
            parameter.copy_(merged[name])
        layers.keep(index, merged)


@torch.no_grad()
def merged_projections(layers: LayerRunner, terms: Multiples) -> dict[str, Tensor]:
    """Return the linear projections of a merged layer, by their names in it; one dense layer is held meanwhile.

    Sums are float32 (float64 for such weights) and rounded once.
    """
    totals: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    for index, times in terms:
        with layers.layer(index) as source:
            for name, parameter in _projections(source):
                dtypes[name] = parameter.dtype
                wide = parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))
                totals[name] = totals[name].add_(wide, alpha=times) if name in totals else wide * times
    return {name: totals.pop(name).to(dtype) for name, dtype in dtypes.items()}


def _projections(layer: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield weights and biases of the linear modules of a layer, by their names in it."""
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            yield from module.named_parameters(prefix=name)


def merges_of(collapsed: Collapsed) -> dict[int, Multiples]:
    """Return the merged layers: index -> its parameters as multiples of dense layers."""
    return {index: terms for index, terms in collapsed if terms != ((index, 1),)}


def merge_at(collapsed: Collapsed, position: int, count: int, form: Literal["paper", "code"] = "paper") -> Collapsed:
    """Return the layers that are left when the layer at ``position`` takes over the ``count`` layers after it.

    Args:
        collapsed: the layers that are left so far.
        position: position in ``collapsed``.
        count: at least 1.
        form: paper (equation 1) or code (the parameters of the last of them).
    """
    end = position + 1 + count
    (index, terms), rest = collapsed[position], collapsed[position + 1 : end]
    multiples = _sum_of_differences(terms, rest) if form == "paper" else rest[-1][1]
    return (*collapsed[:position], (index, multiples), *collapsed[end:])


def _sum_of_differences(terms: Multiples, rest: Collapsed) -> Multiples:
    """Return a layer plus the differences between each of the others and it."""
    count = len(rest)
    total = Counter({layer: times * (1 - count) for layer, times in terms})
    for _, other in rest:
        for layer, times in other:
            total[layer] += times
    return tuple(sorted((layer, times) for layer, times in total.items() if times))


def _search(layers: int, count: int, options: LacoOptions, similarity: _Similarity) -> tuple[Collapsed, float]:
    """Return the merges at the largest threshold that removes ``count`` layers, and that threshold.

    Between two measured similarities the threshold changes nothing. After a sweep that removed too few, the next
    threshold to try is therefore the largest similarity that it refused.

    Raises:
        ConfigError: no threshold removes that many.
    """
    threshold = math.inf
    while True:
        collapsed, refused = _sweep(layers, count, options, similarity, threshold)
        if len(collapsed) == layers - count:
            return collapsed, threshold
        if not refused:
            raise ConfigError(
                f"laco removes at most {layers - len(collapsed)} of {layers} layers with merge {options.merge}, "
                f"interval {options.interval} and lowest {options.lowest}, not {count}. Use a smaller "
                "interval, lowest or ratio, or a larger merge."
            )
        threshold = max(refused)


def _sweep(
    layers: int, count: int, options: LacoOptions, similarity: _Similarity, threshold: float
) -> tuple[Collapsed, list[float]]:
    """Run algorithm 1 at one threshold until ``count`` layers are removed; return the rest and refused similarities."""
    collapsed: Collapsed = tuple((index, ((index, 1),)) for index in range(layers))
    refused: list[float] = []
    position = max(options.lowest, layers - 1 - options.merge)
    while position >= options.lowest and (missing := count - (layers - len(collapsed))):
        taken = min(options.merge - 1, len(collapsed) - position - 1, missing)
        merged = merge_at(collapsed, position, taken, options.form)
        measured = similarity(merged)
        if measured < threshold:
            refused.append(measured)
            position -= 1
        else:
            collapsed = merged
            position -= options.interval
    return collapsed, refused


@dataclass
class _Similarity:
    """The similarity of a collapsed model's output to the dense model's; remembers its measurements.

    Attributes:
        layers: layers of the dense model, which comes back unchanged. On disk all batches go through a layer before the
            next one is read, so that the streams of all are held.
        batches: token ids, int64 [B, T] each.
        known: the measured similarities.
        dense: the dense model's last hidden states, [B, T * H] of each batch, held all the time.
    """

    layers: LayerRunner
    batches: Sequence[Tensor]
    known: dict[Collapsed, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        dense = tuple((index, ((index, 1),)) for index in range(len(self.layers.layers)))
        self.dense = list(self._outputs(dense))

    def __call__(self, collapsed: Collapsed) -> float:
        """Return the cosine of the last hidden states, mean over the samples, in [-1, 1]."""
        if collapsed not in self.known:
            self.known[collapsed] = self._measure(collapsed)
        return self.known[collapsed]

    def _measure(self, collapsed: Collapsed) -> float:
        pairs = zip(self._outputs(collapsed), self.dense, strict=True)
        total = sum(float(functional.cosine_similarity(a.double(), b.double(), dim=1).sum()) for a, b in pairs)
        mean = total / sum(map(len, self.batches))
        if not math.isfinite(mean):
            raise ScoreError(
                "The output of the model with merged layers is not finite. The weights or their dtype are broken: "
                "check them for NaN, or work in float32 (dtype)."
            )
        return mean

    @torch.no_grad()
    def _outputs(self, collapsed: Collapsed) -> Iterator[Tensor]:
        """Yield the last hidden states of each batch, [B, T * H]."""
        groups = self.layers.batch_groups(self.batches)
        # Several groups share one computation of the merges.
        merges = merges_of(collapsed) if len(groups) > 1 else {}
        made = {index: merged_projections(self.layers, terms) for index, terms in merges.items()}
        for group in groups:
            streams = [self.layers.embed(batch) for batch in group]
            for index, terms in collapsed:
                with merged_layer(self.layers, index, terms, made.get(index)) as layer:
                    self.layers.run_(layer, self.layers.whole_layer(index), streams)
            for batch, stream in zip(group, streams, strict=True):
                with self.layers.continue_from(stream) as model:
                    output: Tensor = model.base_model(input_ids=batch.to(model.device), use_cache=False)[0]
                yield output.flatten(1)


@contextmanager
def merged_layer(
    layers: LayerRunner, index: int, terms: Multiples, made: Mapping[str, Tensor] | None = None
) -> Iterator[nn.Module]:
    """Yield a layer with the weights of its merge; its own weights come back bit for bit."""
    if made is None:
        made = {} if terms == ((index, 1),) else merged_projections(layers, terms)
    with layers.layer(index) as layer:
        before = {name: parameter.data for name, parameter in _projections(layer)}
        try:
            _set(layer, made)
            yield layer
        finally:
            _set(layer, before)


def _set(layer: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, tensor in values.items():
        layer.get_parameter(name).data = tensor
