"""Pictures of measured figures: quality against speed, budgets, memory of trainings, and servers under load."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from pyprune.runtime.charts import BarChart, Chart, LineChart
from pyprune.runtime.records import Json, RecordFile

TEXT = "wikitext-2"
PERPLEXITY = "WikiText-2 perplexity (down is better)"
SEED = 1
SHARES = (90, 80, 70, 60)
ARMS = {"fitted": "pyprune fit", "one width": "one FFN width", "spread layers": "whole layers"}
"""Arm of the bench -> its name in pictures."""
MODELS = {"dense": "dense, 30 layers", "23 layers": "23 layers", "15 layers": "15 layers"}
FORMS = {"DReSS, papers' form": "DReSS", "ELDeR, papers' form": "ELDeR", "recovery by LoRA": "LoRA",
         "recovery of all weights with distillation": "distillation"}  # fmt: skip
TRAININGS = {"plain PyTorch loop": "plain PyTorch", "ours, full memory": "full", "ours, lean memory": "lean"}


def charts(results: Path) -> Mapping[str, tuple[Chart, str]]:
    """Return name of a picture -> its chart and its description.

    Args:
        results: folder of the records.
    """
    return {
        "speed": speed(results / "fit.jsonl"),
        "budgets": budgets(results / "fit.jsonl"),
        "memory": memory(results / "optimizer.jsonl"),
        "load": load(results / "serving_card.jsonl"),
    }


def _listed(figures: Mapping[str, object]) -> str:
    return "; ".join(f"{name}: {value}" for name, value in figures.items())


def _fitted(records: RecordFile, quantity: str, engine: str | None) -> Iterator[tuple[int, str, Json]]:
    """Yield the share of a budget in percent, the name of the arm, and the newest record of each."""
    seed = [row for row in records.of("row").values() if row["seed"] == SEED and row.get("engine") == engine]
    rows = {(row["budget"], row["arm"]): row for row in seed}
    for arm, name in ARMS.items():
        for share in SHARES:
            row = rows.get((f"{quantity}<={share}%", arm))
            if row is not None:
                yield share, name, row


def speed(path: Path) -> tuple[Chart, str]:
    """Draw perplexity against measured tokens a second, of models that keep budgets of their generation time."""
    records = RecordFile(path)
    times = records.of("time")
    points: dict[str, dict[int, tuple[float, float]]] = {}
    for share, name, row in _fitted(records, "generation@64x128", "vllm"):
        time = times.get(row["key"])
        if time is not None:
            place = time["dense_seconds"] / time["seconds"], row["perplexity"][TEXT]
            points.setdefault(name, {})[share] = place
    chart = LineChart(
        "SmolLM2-135M: quality against measured speed",
        "tokens per second in vLLM, times the dense model's (right is better)",
        PERPLEXITY,
        {name: [y for _, y in line.values()] for name, line in points.items()},
        x={name: [x for x, _ in line.values()] for name, line in points.items()},
        logarithmic=True,
    )
    figures = {
        name: ", ".join(f"{y:.1f} at {x:.2f} times the speed" for x, y in line.values())
        for name, line in points.items()
    }
    return chart, f"Perplexity of models without training, at budgets of generation time. {_listed(figures)}."


def budgets(path: Path) -> tuple[Chart, str]:
    """Draw perplexity by budget of memory, of what is searched and of two simpler choices."""
    lines: dict[str, dict[int, float]] = {}
    for share, name, row in _fitted(RecordFile(path), "memory@2048", None):
        lines.setdefault(name, {})[share] = row["perplexity"][TEXT]
    chart = LineChart(
        "SmolLM2-135M: perplexity by budget of memory",
        "weights and cache of 2,048 tokens, share of the dense model's",
        PERPLEXITY,
        {name: [line.get(share) for share in SHARES] for name, line in lines.items()},
        tuple(f"{share} %" for share in SHARES),
        logarithmic=True,
    )
    figures = {
        name: ", ".join(f"{value:.1f} at {share} %" for share, value in line.items()) for name, line in lines.items()
    }
    return chart, f"Perplexity of models without training. {_listed(figures)}."


def memory(path: Path) -> tuple[Chart, str]:
    """Draw the peak memory of four trainings: a plain loop's, and pyprune's two."""
    newest: dict[tuple[str, str], float] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row.get("peak_bytes") is not None:
            newest[row["op"], row["implementation"]] = row["peak_bytes"] / 1e9
    bars = {
        f"{form}, {training}": newest[op, implementation]
        for op, form in FORMS.items()
        for implementation, training in TRAININGS.items()
    }
    chart = BarChart(
        "SmolLM2-135M: peak memory of a training step",
        "GB on a CPU, 8 sequences of 256 tokens (less is better)",
        bars,
        highlight=tuple(label for label in bars if not label.endswith(TRAININGS["plain PyTorch loop"])),
    )
    return chart, f"Full and lean are pyprune's. {_listed({label: f'{gb:.2f} GB' for label, gb in bars.items()})}."


def load(path: Path) -> tuple[Chart, str]:
    """Draw output tokens a second of servers by the number of requests at once."""
    rows = [
        row
        for row in RecordFile(path).of("load").values()
        if row["mode"] == "compiled" and row["options"]["prompt_tokens"] == 512 and set(MODELS) <= set(row["names"])
    ]
    row = rows[-1]
    rates = {
        label: [row["summary"][name][f"{n} at once"]["tokens_per_second"]["median"] for n in row["concurrency"]]
        for name, label in MODELS.items()
    }
    chart = LineChart(
        "SmolLM2-135M in vLLM: servers under load",
        "requests at once (prompts of 512 tokens, 128 new ones)",
        "output tokens per second",
        rates,
        tuple(map(str, row["concurrency"])),
    )
    figures = {label: ", ".join(f"{rate:.0f}" for rate in line) for label, line in rates.items()}
    at = ", ".join(map(str, row["concurrency"]))
    return chart, f"Output tokens per second with {at} requests at once. {_listed(figures)}."
