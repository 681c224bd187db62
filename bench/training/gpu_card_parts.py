"""Run by gpu_card.py, in processes of their own: tests of kernels, and dense beside pruned models in an engine.

python -m bench.training.gpu_card_parts kernels tests/gpu --jsonl FILE
python -m bench.training.gpu_card_parts serving --shapes 7B --engine vllm --jsonl FILE
"""

from __future__ import annotations

import argparse
import copy
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench._card_plans import UNEQUAL, card_plans
from bench._command import exit_status
from bench._machine import compare_with_dense
from pyprune.errors import MissingDependencyError, PypruneError
from pyprune.families import family_for
from pyprune.fit.profile import DENSE, Timing
from pyprune.fit.profiling.probes import Model, write_served
from pyprune.fit.profiling.turns import EngineGroup, cache_bytes, longest_sequence, room_for, written_bytes
from pyprune.fit.quantities import Quantity
from pyprune.runtime.records import append_jsonl
from pyprune.runtime.report import Table, markdown_table

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[2]
DTYPE = "bfloat16"
WORKLOADS = (Quantity("prefill", 2048), Quantity("generation", 128, 64))
SMALL_WORKLOADS = (Quantity("prefill", 16), Quantity("generation", 4, 2))


# --- tests of the kernels ------------------------------------------------------------------------


class Counted:
    """A plugin of pytest that keeps the names of tests by what became of them."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test once: as it was called, or as its setup or teardown went wrong."""
        if report.when == "call" or report.outcome != "passed":
            self.names[report.outcome].append(report.nodeid)


def check_kernels(options: argparse.Namespace) -> None:
    """Run tests, and record how many passed.

    Raises:
        MissingDependencyError: pytest is not installed, or what the tests and pyproject.toml need of it.
        PypruneError: one failed, or none ran.
    """
    for package in ("pytest", "pytest_timeout", "hypothesis"):
        if find_spec(package) is None:
            raise MissingDependencyError(package, "dev", "Testing the kernels")
    import pytest

    counted = Counted()
    # A newer or older torch than the one of the lock may warn, which says nothing of the kernels.
    only = ["-k", options.k] if options.k else []
    words = [options.tests, *only, "-q", "-W", "default", "-p", "no:cacheprovider"]
    status = pytest.main(["--rootdir", str(ROOT), *words], plugins=[counted])
    passed, failed, skipped = counted.names.values()
    found = {"passed": len(passed), "failures": failed, "skipped": len(skipped)}
    append_jsonl(options.jsonl, [{"kind": "kernels", "tests": options.tests, **found, **_about()}])
    print(f"\n{len(passed)} tests passed, {len(failed)} failed, {len(skipped)} were skipped.")
    if failed:
        raise PypruneError(f"{len(failed)} of {len(failed) + len(passed)} tests failed, the first: {failed[0]}.")
    if status or not passed:
        raise PypruneError(f"pytest ended with status {int(status)} and {len(passed)} tests passed.")


def _about() -> dict[str, object]:
    import torch

    from bench._timing import conditions

    return conditions(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


# --- dense and pruned models in an engine --------------------------------------------------------


def serve(options: argparse.Namespace) -> None:
    """Time models with random weights beside the dense one; a row is recorded as soon as it is measured."""
    from bench.training.train_step import SHAPES

    config = copy.deepcopy(SHAPES[options.shapes])
    config.architectures = ["LlamaForCausalLM"]
    tiny = options.shapes == "tiny"
    workloads = SMALL_WORKLOADS if tiny else WORKLOADS
    longest = max(map(longest_sequence, workloads))
    config.max_position_embeddings = max(config.max_position_embeddings, longest)
    whole = family_for(config).plan(config)
    plans = {DENSE: whole, **card_plans(whole)}
    shorter = next(name for name in plans if name != DENSE)
    names = [UNEQUAL] if tiny else [shorter, UNEQUAL]
    lines: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory(prefix="pyprune-gpu-card-") as work:

        def write(name: str) -> Model:
            return write_served(config, plans[name], Path(work) / name.replace(" ", "-"), options.engine, DTYPE)

        dense = write(DENSE)
        cache = cache_bytes(dense[1], workloads, DTYPE)
        room = options.resident or room_for(options.engine, written_bytes(Path(work)), cache)
        with EngineGroup(options.engine, DTYPE, workloads, config.vocab_size) as engines:
            for group, turns in engines.time_groups(dense, names, write, room=room, repeats=options.repeats):
                for name in group:
                    measured = {q: compare_with_dense(turns, name, q) for q in workloads}
                    lines += _lines(name, measured)
                    _record(options, name, plans[name].to_dict(), measured, turns)
                    shutil.rmtree(Path(work) / name.replace(" ", "-"))
    columns = ("model", "workload", "s", "dense, s", "times faster", "MAD of the ratio")
    print("\n" + markdown_table(Table(f"{options.engine}, {options.shapes}", columns, tuple(lines))))


def _lines(name: str, measured: dict[Quantity, dict[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            *(name, str(quantity), f"{m['seconds']:.3f}", f"{m['dense_seconds']:.3f}"),
            *(f"{1 / m['share_of_dense']:.2f}", f"{m['spread']:.1%}"),
        )
        for quantity, m in measured.items()
    ]


def _record(
    options: argparse.Namespace,
    name: str,
    plan: dict[str, Any],
    measured: dict[Quantity, dict[str, Any]],
    turns: Sequence[Timing],
) -> None:
    about = {"engine": options.engine, "dtype": DTYPE, "shapes": options.shapes, "turns": len(turns), **_about()}
    rows = {str(quantity): found for quantity, found in measured.items()}
    append_jsonl(options.jsonl, [{"kind": "serving", "name": name, "plan": plan, "measured": rows, **about}])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one part; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    kernels = parts.add_parser("kernels")
    kernels.add_argument("tests")
    kernels.add_argument("-k", help="as pytest's")
    kernels.set_defaults(work=check_kernels)
    serving = parts.add_parser("serving")
    serving.add_argument("--shapes", required=True, help="as train_step.py's")
    serving.add_argument("--engine", default="vllm", choices=("vllm", "transformers"))
    serving.add_argument("--repeats", type=int, default=3)
    serving.add_argument("--resident", type=int, metavar="N", help="engines loaded at once (default: by free memory)")
    serving.set_defaults(work=serve)
    for part in (kernels, serving):
        part.add_argument("--jsonl", type=Path, required=True, help="file to append to")
    options = parser.parse_args(arguments)
    return exit_status(lambda: options.work(options))


if __name__ == "__main__":
    sys.exit(main())
