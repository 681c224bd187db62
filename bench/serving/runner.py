"""Measure checkpoints turn by turn and append every sample to bench/results/serving.jsonl (never overwritten).

    python -m bench.serving.runner dense=path/to/dense pruned=path/to/pruned [--engine vllm] [--repeats 5]

The table goes to stdout as Markdown, progress to stderr. The first model is the baseline.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pyprune.errors import PypruneError
from pyprune.runtime.report import noted_table
from pyprune.serving.speed.measure import measure
from pyprune.serving.speed.results import Workload
from pyprune.serving.speed.table import conditions, speed_table

RECORDS = Path(__file__).resolve().parents[1] / "results" / "serving.jsonl"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; return the exit status."""
    options = _parser().parse_args(arguments)
    named = [text.split("=", 1) for text in options.models]
    models = dict(named)
    if len(models) < len(named):
        print(f"{', '.join(name for name, _ in named)}: every model needs a name of its own.", file=sys.stderr)
        return 2
    try:
        report = measure(
            models,
            engine=options.engine,
            batch_size=options.batch_size,
            new_tokens=options.new_tokens,
            prompt_tokens=options.prompt_tokens,
            repeats=options.repeats,
            dtype=options.dtype,
            seed=options.seed,
            jsonl=options.jsonl,
        )
    except PypruneError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{noted_table(speed_table(report))}\n\n{conditions(report)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    default = Workload()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="NAME=FOLDER", type=_named, help="the first is the baseline")
    parser.add_argument("--engine", default="auto", help="auto, vllm or transformers")
    parser.add_argument("--batch-size", type=int, default=default.batch_size, help="prompts in a request")
    parser.add_argument("--new-tokens", type=int, default=default.new_tokens, help="generated for each prompt")
    parser.add_argument("--prompt-tokens", type=int, help="of the long prompt; default: 2048, or as many as all read")
    parser.add_argument("--repeats", type=int, default=default.repeats, help="timed turns of each model")
    parser.add_argument("--dtype", default=default.dtype, help="bfloat16, float16 or float32")
    parser.add_argument("--seed", type=int, default=default.seed, help="of the random prompts")
    parser.add_argument("--jsonl", type=Path, default=RECORDS, help="file to append to")
    return parser


def _named(text: str) -> str:
    name, found, folder = text.partition("=")
    if not (name and found and folder):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FOLDER")
    return text


if __name__ == "__main__":
    sys.exit(main())
