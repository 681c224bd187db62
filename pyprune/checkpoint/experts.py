"""What the record of a pruning says about experts, as a chart of a report."""

from __future__ import annotations

from collections.abc import Mapping

from pyprune.checkpoint.record import has_record, read_pruning_json
from pyprune.runtime.charts import HeatChart

MOST_LAYERS = 12
"""Layers that a chart shows; of more, evenly spread ones."""


def expert_charts(models: Mapping[str, str]) -> list[HeatChart]:
    """Chart the experts that each kind of calibration text used, layer by layer.

    Args:
        models: name -> folder or hub id; one without a record, whose experts were not removed, or whose text was of one
            kind, has no chart.
    """
    charts = []
    for name, folder in models.items():
        report = read_pruning_json(folder).provenance.get("report", {}) if has_record(folder) else {}
        experts = report.get("decision", {}).get("experts", {})
        kinds: Mapping[str, Mapping[str, list[int]]] = experts.get("tokens_by_kind", {})
        if kinds:
            layers = list(next(iter(kinds.values())))
            step = max(len(layers) / MOST_LAYERS, 1.0)
            shown = [layers[int(n * step)] for n in range(min(len(layers), MOST_LAYERS))]
            some = f", {len(shown)} of {len(layers)} layers" if len(shown) < len(layers) else ""
            groups = {f"layer {layer}": {kind: counts[layer] for kind, counts in kinds.items()} for layer in shown}
            removed = {f"layer {layer}": experts["removed"].get(layer, []) for layer in shown}
            title = f"Experts that each kind of text used: {name}{some}"
            charts.append(HeatChart(title, "expert", groups, removed, "removed"))
    return charts
