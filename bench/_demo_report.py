"""The demo's figures: metrics.json, the table, and the report."""

from __future__ import annotations

from typing import Any

from bench._demo import PROMPT, Demo, Results
from bench._demo_data import MODEL_NAME
from pyprune.config.train import TrainConfig
from pyprune.methods.base import own_options
from pyprune.methods.regularise.elder import ElderOptions
from pyprune.report import BarChart, Cell, LineChart, Report, Table

NOTES = (
    "Training and test text are of one kind, so a part of every trained arm's gain is adaptation to it; the dense "
    "model fine-tuned on the same tokens and the texts of other kinds show how much.",
    "One seed, one small model, few steps: the order of arms that lie close together says nothing about other runs.",
    "Nothing is trained after the cut, except in the rows that say so. The cut is reconstructed on as many tokens as "
    "are trained on, of four kinds of text (prose, web, code, other languages).",
)


def metrics(demo: Demo, results: Results) -> dict[str, Any]:
    """The figures of metrics.json: the headline keys first, everything else below "details"."""
    speed, outcomes = results.speed, results.outcomes
    summary = speed.to_dict()
    for name, model in summary["models"].items():
        model["path"] = name  # where the demo wrote it; the temporary folder is gone by then
    return {
        "dense_ppl": results.dense_perplexity.perplexity,
        **{key: outcome.perplexity for key, outcome in outcomes.items()},
        "out_of_domain": {
            kind: {"dense_ppl": perplexity, **{key: outcome.elsewhere[kind] for key, outcome in outcomes.items()}}
            for kind, perplexity in results.dense_elsewhere.items()
        },
        "train_tokens": demo.settings.train_tokens,
        "dense_parameters": results.dense_parameters,
        "pruned_parameters": outcomes["pruned_ppl"].parameters,
        "generation_speedup": speed.throughput_increase("pruned"),
        "prefill_speedup": speed.speedup("pruned"),
        "seconds": round(demo.clock.total, 1),
        "details": {
            "model": demo.model_name,
            "text": demo.source_text,
            "test": {
                "protocol": results.dense_perplexity.protocol,
                "windows": results.dense_perplexity.windows,
                "tokens": results.dense_perplexity.tokens,
                "sha256": results.dense_perplexity.text_sha256,
            },
            "removed_layers": list(results.plan.removed_layers),
            "plan": results.plan.to_dict(),
            "gates": demo.settings.gates.to_dict(),
            "arms": {
                key: {
                    "label": o.label,
                    "config": o.arm.config.to_dict(),
                    "seconds": o.seconds,
                    "losses": o.losses,
                    "sample": o.sample,
                    "warnings": o.warnings,
                }
                for key, o in outcomes.items()
            },
            "prompt": PROMPT,
            "dense_sample": results.dense_sample,
            "phases": demo.clock.phases,
            "speed": summary,
        },
    }


def main_table(results: Results) -> Table:
    """One row a model: quality of each, speed of the two that were served."""
    speed = results.speed
    kept, total = len(results.plan.layers), results.plan.dense.num_layers

    def timed(name: str) -> tuple[Cell, ...]:
        return (
            speed.tokens_per_second(name).median,
            f"{speed.throughput_increase(name):.2f}x",
            speed.latency_ms(name).median,
            f"{speed.speedup(name):.2f}x",
        )

    rows: list[tuple[Cell, ...]] = [
        ("dense", total, results.dense_parameters, results.dense_perplexity.perplexity, *timed("dense"))
    ]
    for key, outcome in results.outcomes.items():
        figures = timed("pruned") if key == "pruned_ppl" else (None,) * 4
        layers = total if outcome.arm.is_dense else kept
        rows.append((outcome.label, layers, outcome.parameters, outcome.perplexity, *figures))
    columns = (
        "model",
        "layers",
        "parameters",
        "PPL",
        "tokens/s",
        "TI",
        "prompt ms",
        "speedup",
    )
    highlight = 1 + list(results.outcomes).index("pruned_ppl")
    note = (
        f"PPL: lower is better. Speed: {speed.engine}; TI = generation throughput against dense, speedup = prompt "
        f"latency of dense against pruned. All rows with {kept} layers have the same shapes, so one of them was timed."
    )
    return Table("Dense and pruned, side by side", columns, tuple(rows), note, highlight)


def tables(results: Results) -> tuple[Table, ...]:
    """Quality and speed; and quality on texts of other kinds, where such texts are at hand."""
    if not results.dense_elsewhere:
        return (main_table(results),)
    kinds = list(results.dense_elsewhere)
    rows: list[tuple[Cell, ...]] = [("dense", *results.dense_elsewhere.values())]
    rows += [(outcome.label, *(outcome.elsewhere[kind] for kind in kinds)) for outcome in results.outcomes.values()]
    highlight = 1 + list(results.outcomes).index("pruned_ppl")
    note = "Perplexity on documents of other kinds, none of which was trained on; lower is better."
    return main_table(results), Table("On text of other kinds", ("model", *kinds), tuple(rows), note, highlight)


def make_report(demo: Demo, results: Results) -> Report:
    """The report of a run."""
    outcomes = results.outcomes
    default = outcomes["pruned_ppl"]
    removed = 1 - default.parameters / results.dense_parameters
    dense = results.dense_perplexity
    trained = [o for o in outcomes.values() if o.losses]
    best = min((o for o in outcomes.values() if not o.arm.is_dense), key=lambda o: o.perplexity)
    s = demo.settings
    train = own_options(default.arm.config, ElderOptions).train
    summary = (
        f"{len(results.plan.removed_layers)} of {results.plan.dense.num_layers} layers of {demo.model_name} were "
        f"removed, {removed:.1%} of its parameters. Perplexity goes from {dense.perplexity:.2f} to "
        f"{default.perplexity:.2f} with the package's default and {s.train_tokens:,} training tokens; removing the "
        f"same layers directly gives {outcomes['direct_ppl'].perplexity:.2f}. The dense model fine-tuned on the same "
        f"tokens has {outcomes['dense_finetuned_ppl'].perplexity:.2f}.",
        f"{results.speed.engine} generates {results.speed.throughput_increase('pruned'):.2f} times as many tokens a "
        f"second and reads a long prompt {results.speed.speedup('pruned'):.2f} times as fast.",
        f"Best of the arms without these layers: {best.label} ({best.perplexity:.2f}).",
    )
    samples = Table(
        f'What each model writes after "{PROMPT}"',
        ("model", "text (greedy)"),
        (("dense", results.dense_sample), *((o.label, o.sample) for o in outcomes.values())),
    )
    bars = {o.label: o.perplexity for o in outcomes.values()}
    spread = max(bars.values()) / min(bars.values())
    charts = (
        BarChart(
            "Perplexity by arm",
            "perplexity" + (" (logarithmic)" if spread > 20 else "") + ", lower is better",
            bars,
            dense.perplexity,
            highlight=default.label,
            logarithmic=spread > 20,
        ),
        LineChart(
            "Training loss, the same tokens in the same order",
            "step",
            "nats per token",
            {o.label: o.losses for o in trained},
        ),
    )
    return Report(
        "Pruning, exporting and serving a language model on this machine",
        summary,
        (*tables(results), samples),
        charts,
        _conditions(demo, results, train),
        NOTES,
    )


def _conditions(demo: Demo, results: Results, train: TrainConfig) -> dict[str, str]:
    from pyprune.serving.table import conditions

    s, dense = demo.settings, results.dense_perplexity
    gate_steps = s.gates.first_round_steps + s.gates.round_steps * (len(results.plan.removed_layers) - 1)
    return {
        "model": f"{demo.model_name}, float32 weights from 4-bit GGUF"
        if demo.model_name == MODEL_NAME
        else demo.model_name,
        "layers removed": ", ".join(map(str, results.plan.removed_layers)),
        "choice of layers": f"residual gates, {gate_steps} steps of {s.gates.batch_size} x {s.gate_sequence_length} "
        f"tokens, learning rate {s.gates.learning_rate:g}, penalty {s.gates.penalty_weight:g}; once for all arms",
        "training": f"{s.steps} steps of {s.batch_size} x {s.sequence_length} tokens ({s.train_tokens:,}), "
        f"{train.optimizer}, peak learning rate {train.learning_rate:g}, {train.warmup_steps} warm-up steps, "
        f"{train.decay} decay, {train.dtype} compute; the same for all trained arms",
        "test": f"{dense.protocol}: {dense.windows} windows, {dense.tokens:,} tokens, {s.dtype} weights, no document "
        "in common with the training text",
        "text": demo.source_text,
        "speed": conditions(results.speed),
        "time": f"{demo.clock.total:.0f} s: "
        + ", ".join(f"{name} {seconds:.0f}" for name, seconds in demo.clock.phases.items()),
    }
