"""The table of ablation.py, and the options that made no difference."""

from __future__ import annotations

import json
from collections.abc import Sequence

from bench.quality.ablation_cases import Case, Setting
from pyprune.runtime.records import Json
from pyprune.runtime.report import Cell, Table


def make_table(cases: Sequence[Case], records: Sequence[Json], setting: Setting) -> Table:
    """One row a cell: what varies, perplexity on each text and accuracies with the dense ones, sizes, effect, time."""
    recipes = ["recipe"] if any(case.recipe for case in cases) else []
    keys = list(dict.fromkeys(key for case in cases for key in case.values))
    failed = ["error"] if any(record["error"] for record in records) else []
    several = len(setting.texts) > 1
    quality = [f"{name}{f' {source}' if several else ''}" for source in setting.texts for name in ("dense PPL", "PPL")]
    tasks = [*(f"acc {task}" for task in setting.tasks), "dense mean acc", "mean acc"] if setting.tasks else []
    columns = (*recipes, *keys, *quality, *tasks, "parameters removed", "of all", "preserved ratio", "seconds", *failed)
    rows = []
    for case, record in zip(cases, records, strict=True):
        row: list[Cell] = [case.recipe] if recipes else []
        row += [str(case.values.get(key, "-")) for key in keys]
        for source in setting.texts:
            row += [record["dense_perplexity"][source], record.get("perplexity", {}).get(source)]
        if tasks:
            row += _accuracies(record, setting)
        rows.append((*row, *_sizes(record), round(record["seconds"], 1), *([record["error"]] if failed else [])))
    return Table("Ablation", columns, tuple(rows))


def without_effect(cases: Sequence[Case], records: Sequence[Json]) -> list[str]:
    """Grid options whose values gave equal perplexities, bit for bit, wherever everything else was equal."""
    found = []
    for name in dict.fromkeys(key for case in cases for key in case.values):
        groups: dict[str, list[Json | None]] = {}
        for case, record in zip(cases, records, strict=True):
            others = {key: value for key, value in case.values.items() if key != name}
            groups.setdefault(json.dumps([case.recipe, others]), []).append(record.get("perplexity"))
        compared = [group for group in groups.values() if len(group) > 1 and None not in group]
        if compared and all(value == group[0] for group in compared for value in group):
            found.append(name)
    return found


def _accuracies(record: Json, setting: Setting) -> list[Cell]:
    """The accuracy of every task, then the dense model's mean and the cell's."""
    found = record.get("accuracy", {})
    return [*map(found.get, setting.tasks), record["dense_mean_accuracy"], record.get("mean_accuracy")]


def _sizes(record: Json) -> tuple[Cell, Cell, Cell]:
    if record["error"]:
        return None, None, None
    removed = record["dense_parameters"] - record["parameters"]
    preserved = record["preserved_ratio"]
    return (
        removed,
        f"{removed / record['dense_parameters']:.2%}",
        None if preserved is None else f"{preserved:.2%}",
    )
