"""The tables of scores.py, their verdicts and their conditions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bench.quality.scores_cases import RECOVERY_PRESET, TEXTS, depends_on_seed, place
from bench.quality.scores_run import KEPT, PROTOCOLS
from pyprune.errors import ConfigError
from pyprune.plan import PrunePlan
from pyprune.runtime.records import Json, RecordFile
from pyprune.runtime.report import Cell, Table, format_cell, markdown_table
from pyprune.serving.stats import median

AXES = {"heads": "heads", "ffn": "FFN channels"}
"""Axis -> what the table calls its units (query heads)."""
Cut = tuple[str, tuple[str, ...], int]
"""Scorer, options given by hand, seed."""
NAMED = ("moreau", "moreau-converged", "taylor:param_first", "smoothgrad")
"""Scorers that the verdicts name after the best one."""


def print_tables(files: Sequence[RecordFile], out: Path) -> int:
    """Print one table for every setting that the records hold; return the exit status.

    Raises:
        ConfigError: there is no record.
    """
    cells = [record for file in files for record in file.of("cell").values()]
    dense = {_group(record): record for file in files for record in file.of("dense").values()}
    if not cells:
        raise ConfigError(f"No cell is recorded in {', '.join(str(file.path) for file in files)}; run some first.")
    for group in dict.fromkeys(map(_group, cells)):
        found = [record for record in cells if _group(record) == group]
        table = make_table(found, dense.get(group))
        print(f"{table.title}\n\n{markdown_table(table)}")
        print("\n" + "\n".join(f"* {line}" for line in [*verdicts(found), *conditions(found, out)]) + "\n")
    return 0


def _group(record: Json) -> str:
    return json.dumps(record["setting"], sort_keys=True)


def make_table(records: Sequence[Json], dense: Json | None) -> Table:
    """One row for the dense model, then one for every scorer without and one with recovery.

    The title names the axes that lost something in any cell.
    """
    measures = [(text, protocol) for text in TEXTS for protocol in PROTOCOLS]
    columns = (
        "scorer",
        "recovery",
        "parameters left",
        "of dense",
        *(f"{name} removed" for name in AXES.values()),
        *(f"{text} {protocol.upper()}" for text, protocol in measures),
        "scoring s",
        "peak MB",
        "model MB",
    )
    rows: list[tuple[Cell, ...]] = []
    if dense is not None:
        figures = [dense["perplexity"][text][protocol] for text, protocol in measures]
        rows.append(("dense", "-", dense["parameters"], "100.00%", 0, 0, *figures, None, None, None))
    removed = _removed(records)
    rows += [_row(name, recovery, some, measures, removed) for (name, recovery), some in _by_row(records).items()]
    return Table(_title(removed.values()), columns, tuple(rows))


def _title(removed: Iterable[Mapping[str, int]]) -> str:
    """What went in any cell, in words."""
    cells = list(removed)
    gone = [name for axis, name in AXES.items() if any(cell[axis] for cell in cells)]
    return f"Scoring methods: {' and '.join(gone) or 'nothing'} removed"


def _removed(records: Iterable[Json]) -> dict[Cut, dict[str, int]]:
    """Cut -> how many units of each axis its plan removes; a recovered cell may hold no plan of its own."""
    from pyprune.robustness.compare import removed_units

    plans = {_cut(record): PrunePlan.from_dict(record["plan"]) for record in records if "plan" in record}
    return {cut: {axis: len(units) for axis, units in removed_units(plan).items()} for cut, plan in plans.items()}


def _cut(record: Json) -> Cut:
    """What the plan of a record depends on, in a table of one setting."""
    return record["scorer"], tuple(record["set"]), record["seed"]


def _by_row(records: Iterable[Json]) -> dict[tuple[str, str], list[Json]]:
    """(scorer, recovery) -> its records by seed, in the order of the table; failed ones are left out."""
    found: dict[tuple[str, str], list[Json]] = {}
    good = (record for record in records if not record["error"])
    for record in sorted(good, key=lambda r: (place(r["scorer"]), r["scorer"], _recovery_label(r), r["seed"])):
        name = ", ".join([record["scorer"], *record["set"]])
        found.setdefault((name, _recovery_label(record)), []).append(record)
    return found


def _recovery_label(record: Json) -> str:
    return ", ".join(["yes", *record["set_recovery"]]) if record["recovery"] else "no"


def _row(
    name: str,
    recovery: str,
    records: Sequence[Json],
    measures: Sequence[tuple[str, str]],
    removed: Mapping[Cut, Mapping[str, int]],
) -> tuple[Cell, ...]:
    parameters = [record["parameters"] for record in records]
    shares = [f"{record['parameters'] / record['dense_parameters']:.2%}" for record in records]
    figures = [_spread(_values(records, text, protocol)) for text, protocol in measures]
    gone = [removed[_cut(record)] for record in records if _cut(record) in removed]
    timed = [record["scoring_seconds"] for record in records if "scoring_seconds" in record]
    memory = [record["memory"] for record in records if record.get("memory")]
    return (
        name,
        recovery,
        _each(parameters),
        " / ".join(dict.fromkeys(shares)),
        *(_each(cell[axis] for cell in gone) for axis in AXES),
        *figures,
        round(median(timed), 1) if timed else None,
        round(max(m["peak_bytes"] for m in memory) / 1e6) if memory else None,
        round(memory[0]["model_bytes"] / 1e6) if memory else None,
    )


def _each(numbers: Iterable[int]) -> str | None:
    """The numbers of the seeds, those that are the same once; None where there is none."""
    return " / ".join(dict.fromkeys(map(format_cell, numbers))) or None


def _values(records: Iterable[Json], text: str, protocol: str) -> list[float]:
    return [record["perplexity"][text][protocol] for record in records]


def _spread(values: Sequence[float]) -> str:
    """The median, and every seed's value when there are several."""
    each = f" ({' / '.join(map(format_cell, values))})" if len(values) > 1 else ""
    return f"{format_cell(median(values))}{each}"


def verdicts(records: Sequence[Json]) -> list[str]:
    """For each text and protocol: which scorer is best, and how MoreauPruner compares with Taylor and SmoothGrad.

    Seeds differ by more than scorers do, so that only scorers with every seed are compared.
    """
    rows = _by_row(records)
    found = []
    for recovery in dict.fromkeys(label for _, label in rows):
        after = f"{'without' if recovery == 'no' else 'with'} recovery{recovery.removeprefix('yes').removeprefix('no')}"
        those = {name: some for (name, label), some in rows.items() if label == recovery}
        seeds = max(map(len, those.values()))
        missing = [n for n, some in those.items() if len(some) < seeds and depends_on_seed(some[0]["prune"]["method"])]
        for text, protocol in ((t, p) for t in TEXTS for p in PROTOCOLS):
            medians = {n: median(_values(some, text, protocol)) for n, some in those.items() if n not in missing}
            best = min(medians, key=medians.__getitem__)
            others = ", ".join(f"{name} {format_cell(medians[name])}" for name in NAMED if name in medians)
            found.append(
                f"{text} {protocol.upper()} {after}: best of {len(medians)} is {best} "
                f"({format_cell(medians[best])}){'; ' + others if others else ''}."
            )
        if missing:
            found.append(f"Not compared {after}, for a seed is missing: {', '.join(missing)}.")
    return found


def conditions(records: Sequence[Json], out: Path) -> list[str]:
    """What was measured on what, which cells failed, and how the kept checkpoints are timed."""
    first = records[0]
    setting, data, score = first["setting"], first["prune"]["data"], first["prune"]["score"]
    texts = ", ".join(f"{name} ({TEXTS[name]}, SHA-256 {digest[:8]})" for name, digest in setting["texts"].items())
    seeds = ", ".join(str(seed) for seed in sorted({record["seed"] for record in records}))
    found = [
        f"Perplexities: medians over the seeds and each seed's value, in the order of the seeds ({seeds}); one value: "
        f"one run (or nothing is drawn). {setting['model']} in {setting['dtype']}, the first {setting['max_tokens']:,} "
        f"tokens of each text: {texts}.",
        f"Cut: {first['prune']['ratio']:.0%} of the parameters as the target, layers {score['first_layer']} to "
        f"{score['last_layer']}, {score['ranking']} ranking; calibration on {data['samples']} x "
        f"{data['sequence_length']} tokens of {data['source']}.",
        *_recovery_lines(records),
        "Scoring seconds are a median; peak MB is the largest resident memory of the process (weights and libraries "
        "included) while gradients were taken, - where no pass is made.",
        f"Commit: {', '.join(sorted({str(r['environment']['commit'])[:18] for r in records}))}; {_machines(records)}.",
    ]
    found += [
        f"{r['scorer']}, seed {r['seed']}: the same cut as {r['same_cut_as']}, byte for byte; its recovery is shared."
        for r in records
        if "same_cut_as" in r
    ]
    found += [f"Failed: {r['scorer']}, seed {r['seed']}: {r['error']}" for r in records if r["error"]]
    kept = {f"moreau{tail}": out / f"{KEPT}-seed{first_seed(records)}{tail}" for tail in ("", "-recovered")}
    folders = " ".join(map(str, kept.values()))
    found.append(f"Speed against dense: `pyprune bench {folders} --against {out / 'dense'} --engine vllm`.")
    return found


def _machines(records: Iterable[Json]) -> str:
    environments = (record["environment"] for record in records)
    return "; ".join(sorted({f"{e['device']}, {e['cpus']} cores" for e in environments}))


def _recovery_lines(records: Iterable[Json]) -> list[str]:
    done = [r for r in records if r["recovery"] and not r["error"]]
    if not done:
        return []
    tokens = " / ".join(dict.fromkeys(f"{r['recover_tokens']:,}" for r in done))
    timed = [r["recover_seconds"] for r in done if r["recover_seconds"] is not None]
    took = f"; {median(timed):.0f} s" if timed else ""
    options = done[0]["recovery"]["recover"]["train"]
    return [
        f"Recovery: {RECOVERY_PRESET} on {done[0]['recovery']['data']['source']}, {tokens} tokens, {options['steps']} "
        f"steps of {options['batch_size']} records, learning rate {options['learning_rate']:g}{took}."
    ]


def first_seed(records: Iterable[Json]) -> int:
    """The seed whose checkpoints of MoreauPruner stay."""
    return min(int(record["seed"]) for record in records)
