"""The demo's figures: metrics.json, the tables, and the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench._settings import shared_training
from bench._texts import MODEL_NAME
from bench.demo.demo import PROMPT, Demo, Outcome, Results
from pyprune.quality.perplexity import PerplexityResult
from pyprune.runtime.charts import BarChart, Chart, LineChart, PointChart, StripChart
from pyprune.runtime.report import Cell, Report, Table

SHORT_NOTES = (
    "No weight was trained: the layers that stay were solved in closed form to follow the dense model. Training after "
    "that takes back more; `make demo-full` shows how much, next to its controls.",
)
FULL_NOTES = (
    "Training and test text are of one kind, so a part of every trained arm's gain is adaptation to it; the dense "
    "model fine-tuned on the same tokens and the texts of other kinds show how much.",
)
NOTES = (
    "One seed, one small model: the order of models that lie close together says nothing about other runs.",
    "Intervals (95 %) are of the text: what other text of the kind might give. Models are compared on the same text.",
    "Cuts are reconstructed on four kinds of text (prose, web, code, other languages), none of it test text.",
)


def metrics(demo: Demo, results: Results) -> dict[str, Any]:
    """The figures of metrics.json: the headline keys first, everything else below "details"."""
    speed, outcomes = results.speed, results.outcomes
    summary = speed.to_dict()
    for name, model in summary["models"].items():
        model["path"] = name  # where the demo wrote it; the temporary folder is gone by then
    # Where nothing is trained, the reconstructed model is the one that is served.
    keyed = {**outcomes, "pruned_ppl": results.served_model}
    return {
        **{key: o.perplexity for key, o in keyed.items()},
        "intervals": {key: o.home.interval for key, o in keyed.items() if o.home.interval},
        "out_of_domain": {
            kind: {key: o.elsewhere[kind].perplexity for key, o in keyed.items() if kind in o.elsewhere}
            for kind in results.dense.elsewhere
        },
        "train_tokens": demo.settings.train_tokens,
        "dense_parameters": results.dense.parameters,
        "pruned_parameters": results.served_model.parameters,
        "generation_speedup": speed.throughput_increase("pruned"),
        "prefill_speedup": speed.speedup("pruned"),
        "seconds": round(demo.clock.total, 1),
        "engine_start_seconds": round(demo.starts, 1),
        "details": {
            "model": demo.model_name,
            "text": demo.source_text,
            "test": {
                "protocol": results.dense.home.protocol,
                "windows": results.dense.home.windows,
                "tokens": results.dense.home.tokens,
                "sha256": results.dense.home.text_sha256,
            },
            "ratio": demo.settings.ratio,
            "removed_layers": list(results.plan.removed_layers),
            "plan": results.plan.to_dict(),
            "gates": demo.settings.gates.to_dict(),
            "arms": {
                key: {
                    "label": o.label,
                    "config": o.config,
                    "seconds": o.seconds,
                    "losses": o.losses,
                    "sample": o.sample,
                    "warnings": o.warnings,
                }
                for key, o in outcomes.items()
                if o is not results.dense
            },
            "prompt": PROMPT,
            "dense_sample": results.dense.sample,
            "phases": demo.clock.phases,
            "speed": summary,
        },
    }


def _with_interval(result: PerplexityResult | None) -> Cell:
    if result is None or result.interval is None:
        return None if result is None else result.perplexity
    low, high = (f"{end:.0f}" if end >= 10 else f"{end:.1f}" for end in result.interval)
    return f"{result.perplexity:.1f} ({low}-{high})"


def tables(results: Results) -> tuple[Table, ...]:
    """Quality of every model, and size and speed of the two that were served."""
    kinds = list(results.dense.elsewhere)
    rows: list[tuple[Cell, ...]] = [
        (o.label, o.layers, _with_interval(o.home), *(_with_interval(o.elsewhere.get(kind)) for kind in kinds))
        for o in results.outcomes.values()
    ]
    home = "the test text" if not kinds else "Wikipedia"
    note = "Lower is better; in brackets the 95 % interval. No model was trained or reconstructed on this text."
    quality = Table("Perplexity", ("model", "layers", home, *kinds), tuple(rows), note, len(rows) - 1)
    return quality, _size_and_speed(results)


def _size_and_speed(results: Results) -> Table:
    speed = results.speed

    def row(name: str, model: Outcome) -> tuple[Cell, ...]:
        return (
            name,
            model.parameters,
            speed.models[name].bytes / 1e6,
            speed.tokens_per_second(name).median,
            f"{speed.throughput_increase(name):.2f}x",
            speed.latency_ms(name).median,
            f"{speed.speedup(name):.2f}x",
        )

    columns = "model", "parameters", "MB", "tokens/s", "TI", "prompt ms", "speedup"
    note = (
        f"{speed.engine}; TI = generation throughput against dense, speedup = prompt latency of dense against pruned."
    )
    rows = row("dense", results.dense), row("pruned", results.served_model)
    return Table("Size and speed", columns, rows, note, 1)


def picture(results: Results) -> tuple[Chart, ...]:
    """Draw what a reader sees first: the removed layers, quality against speed, and tokens per second."""
    speed, plan = results.speed, results.plan
    rates = {name: speed.tokens_per_second(name).median for name in ("dense", "pruned")}
    shown = {
        "dense": (rates["dense"], results.dense.perplexity),
        "pruned": (rates["pruned"], results.served_model.perplexity),
    }
    if "direct_ppl" in results.outcomes:
        shown["the same layers just cut"] = rates["pruned"], results.outcomes["direct_ppl"].perplexity
    total = plan.dense.num_layers
    return (
        StripChart(f"{len(plan.removed_layers)} of {total} layers were removed (dashed)", total, plan.removed_layers),
        PointChart(
            "Quality against speed",
            "tokens per second, right is better",
            "perplexity, down is better",
            shown,
            ("dense", "pruned"),
            "dense",
        ),
        BarChart(
            f"{speed.throughput_increase('pruned'):.2f} times the tokens per second",
            f"tokens per second in {speed.engine}, more is better",
            rates,
            highlight=("pruned",),
        ),
    )


def make_report(demo: Demo, results: Results, out: Path) -> Report:
    """The report of a run whose folder will be ``out``."""
    dense, pruned, speed = results.dense, results.served_model, results.speed
    removed = 1 - pruned.parameters / dense.parameters
    direct = results.outcomes["direct_ppl"].perplexity
    summary = (
        f"{len(results.plan.removed_layers)} of {results.plan.dense.num_layers} layers of {demo.model_name} were "
        f"removed, {removed:.1%} of its parameters. {speed.engine} then generates "
        f"{speed.throughput_increase('pruned'):.2f} times as many tokens a second and reads a long prompt "
        f"{speed.speedup('pruned'):.2f} times as fast.",
        f"Perplexity goes from {dense.perplexity:.2f} to {pruned.perplexity:.2f}; cutting the same layers and doing "
        f"nothing else gives {direct:.2f}.",
    )
    said = Table(
        f'Both go on from "{PROMPT}"',
        (f"dense, {dense.layers} layers", f"pruned, {pruned.layers} layers"),
        ((dense.sample, pruned.sample),),
    )
    losses = {o.label: o.losses for o in results.outcomes.values() if o.losses}
    curves = LineChart("Training loss, the same tokens in the same order", "step", "nats per token", losses)
    short = not demo.settings.steps
    commands = {
        "ask the pruned model, as an OpenAI server": f".venv/bin/pyprune serve {out / 'pruned'}",
        "read what it is and how it was made": f".venv/bin/pyprune inspect {out / 'pruned'}",
        **({"the controls and a short training, README's table": "make demo-full"} if short else {}),
        "your own model": ".venv/bin/pyprune prune MODEL --method elder --ratio 0.25 --out pruned/",
    }
    return Report(
        f"{demo.model_name}: smaller, faster, and what it costs",
        summary,
        (said, *tables(results)),
        (curves,) if losses else (),
        _conditions(demo, results),
        (*(SHORT_NOTES if short else FULL_NOTES), *NOTES),
        picture(results),
        commands,
    )


def _conditions(demo: Demo, results: Results) -> dict[str, str]:
    from pyprune.serving.speed.table import conditions

    s, test, train = demo.settings, results.dense.home, shared_training(demo.settings)
    gate_steps = s.gates.first_round_steps + s.gates.round_steps * (len(results.plan.removed_layers) - 1)
    choice = (
        f"residual gates on {s.gates.weighed_share:.0%} of the layers, {gate_steps} steps of "
        f"{s.gates.batch_size} x {s.gate_sequence_length} tokens, learning rate {s.gates.learning_rate:g}, "
        f"penalty {s.gates.penalty_weight:g}"
    )
    training = (
        f"{s.steps} steps of {s.batch_size} x {s.sequence_length} tokens ({s.train_tokens:,}), "
        f"{train.optimizer}, peak learning rate {train.learning_rate:g}, {train.warmup_steps} warm-up steps, "
        f"{train.decay} decay, {train.dtype} compute; the same for all trained arms"
    )
    return {
        "model": f"{demo.model_name}, float32 weights from 4-bit GGUF"
        if demo.model_name == MODEL_NAME
        else demo.model_name,
        "layers removed": ", ".join(map(str, results.plan.removed_layers)),
        "choice of layers": choice if demo.chosen is None else f"taken from the run in {demo.chosen}",
        "training": training if s.steps else "none",
        "reconstruction": f"{s.calibration} sequences of {s.sequence_length} tokens, {s.compute_dtype} compute",
        "test": f"{test.protocol}: {test.windows} windows, {test.tokens:,} tokens, {s.elsewhere_tokens:,} of each "
        f"other kind, {s.dtype} weights, no document in common with the training text",
        "text": demo.source_text,
        "speed": conditions(results.speed),
        "time": f"{demo.clock.total:.0f} s: "
        + ", ".join(f"{name} {seconds:.0f}" for name, seconds in demo.clock.phases.items())
        + f"; and {demo.starts:.0f} s for two starts of {results.speed.engine}",
    }
