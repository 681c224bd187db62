r"""Run a grid over any options of a recipe on one model: a Markdown table, and every cell kept as JSONL.

    python -m bench.quality.ablation MODEL --config recipes/llama/smollm2-elder-published.yaml --ppl wikitext2 \
        --grid elder.gates.penalty_weight=1e-4,1e-3,1e-2 --grid elder.penalty_weight=1e-4,1e-3,1e-2

Every --grid multiplies the cells, and every --config runs them all. Options joined by + vary together:
``--grid data.samples+recovery_data.samples=800+200,750+250`` is two cells, not four. The dense model is loaded once;
each cell prunes a copy in memory and nothing but its record is written. Records are appended to --jsonl as soon as a
cell ends, failed ones with their error; a cell whose record is there already (same model, options and test text) is
not run again, so an interrupted grid continues where it was (after a change of the code, give another --jsonl). Cells
whose options differ only after the choice of layers share that choice. The table goes to stdout, progress to stderr,
and an option of the grid that made no difference anywhere is named there. "Parameters removed" counts tied ones once;
"preserved ratio" is |W| after / before regularisation in the removed channels (DReSS); seconds are those
of deciding, training and cutting. With --tasks, lm-eval measures every cell, and the dense model once: "acc" is a
task's accuracy, "mean acc" the mean of all tasks that report one.

Exit codes: 0 all cells ran, 1 a cell failed, 2 a wrong option or input, 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.quality.ablation_cases import Case, Setting, decides, make_cases
from bench.quality.ablation_table import make_table, without_effect
from pyprune.config.run import PruneConfig
from pyprune.errors import ConfigError, PypruneError
from pyprune.runtime.progress import say, warn
from pyprune.runtime.records import Json, RecordFile
from pyprune.runtime.report import markdown_table
from pyprune.serving.stats import environment_record

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pyprune.data.sampling import TokenSamples
    from pyprune.quality.perplexity import EvaluationText
    from pyprune.run.prune import PruneResult

RECORDS = Path(__file__).resolve().parents[1] / "results" / "ablation.jsonl"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the grid; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return run(options)
    except PypruneError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"Interrupted. Finished cells are in {options.jsonl}; the same command continues.", file=sys.stderr)
        return 130


def run(options: argparse.Namespace) -> int:
    """Run what is missing of the grid and print the table."""
    if (options.task_limit or options.task_folder) and not options.tasks:
        raise ConfigError("--task-limit and --task-folder are read with --tasks alone; name tasks, or leave them out.")
    cases = make_cases(options.config, options.preset, options.set, options.grid)
    setting = Setting(
        model=options.model,
        gguf_file=options.gguf_file,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
        texts={source: _text_digest(source) for source in options.ppl},
        protocol=options.protocol,
        max_tokens=options.max_tokens,
        tasks=_tasks(options),
        task_limit=options.task_limit,
        task_folder=options.task_folder,
    )
    records = Records(options.jsonl, retry_failed=options.retry_failed)
    keys = [setting.key(case.config.to_dict()) for case in cases]
    say(f"{len(cases)} cells, {sum(key in records.cells for key in keys)} of them in {options.jsonl} already")
    bench = Bench(setting, cases[0].config, records)
    for number, (case, key) in enumerate(zip(cases, keys, strict=True), start=1):
        if key not in records.cells:
            say(f"[{number}/{len(cases)}] {case.label}")
            records.add(bench.cell(case, key))
            say(f"    {_outcome(records.cells[key])}")
    found = [records.cells[key] for key in keys]
    print(markdown_table(make_table(cases, found, setting)))
    for name in without_effect(cases, found):
        warn(f"{name} made no difference to any cell; the other options may leave it unused.")
    return int(any(record["error"] for record in found))


def _tasks(options: argparse.Namespace) -> tuple[str, ...]:
    """The lm-eval tasks, those behind a tag in its place."""
    from pyprune.quality.tasks import check_tasks, reporting_tasks

    if not options.tasks:
        return ()
    given = {"limit": options.task_limit, "include_path": options.task_folder}
    return tuple(reporting_tasks(options.tasks, check_tasks(options.tasks, **given)))


def _text_digest(source: str) -> str:
    from pyprune.data.sources import evaluation_split, read_corpus, text_sha256

    return text_sha256(read_corpus(source, evaluation_split(source)).text())


class Records(RecordFile):
    """One record a cell, and one for each dense measurement."""

    @property
    def cells(self) -> dict[str, Json]:
        """Key -> record of a cell."""
        return self.of("cell")

    @property
    def dense(self) -> dict[str, Json]:
        """Key -> record of a dense measurement."""
        return self.of("dense")

    @property
    def plans(self) -> dict[str, Json]:
        """Key -> plan (as JSON data) that a cell reached."""
        return {record["plan_key"]: record["plan"] for record in self.cells.values() if record.get("plan")}


@dataclass
class Bench:
    """The dense model, loaded when the first cell needs it, and the cells that run on copies of it.

    Attributes:
        setting: what all cells share.
        config: any cell's options (dtype and device are common).
        records: where results are written.
    """

    setting: Setting
    config: PruneConfig
    records: Records
    loaded: tuple[PreTrainedModel, Any] | None = None
    texts: dict[str, EvaluationText] = field(default_factory=dict)
    drawn: tuple[str, dict[str, TokenSamples]] = ("", {})
    environment: Json = field(default_factory=dict)

    def _load(self) -> tuple[PreTrainedModel, Any]:
        if self.loaded is None:
            import torch

            from pyprune.checkpoint.load import load_model
            from pyprune.checkpoint.tokenizer import no_tokenizer
            from pyprune.quality.perplexity import evaluation_text
            from pyprune.runtime.device import resolve_device

            setting = self.setting
            model, tokenizer = load_model(
                setting.model,
                dtype=self.config.dtype,
                gguf_file=setting.gguf_file,
                revision=setting.revision,
                trust_remote_code=setting.trust_remote_code,
            )
            if tokenizer is None:
                raise no_tokenizer(setting.model)
            self.texts = {source: evaluation_text(tokenizer, source) for source in setting.texts}
            place = resolve_device(self.config.device)
            gpu = torch.cuda.get_device_name(place) if place.type == "cuda" else None
            self.environment = environment_record(gpu)
            self.loaded = model, tokenizer
        return self.loaded

    def _copy(self) -> PreTrainedModel:
        """A copy of the dense model (which stays on the CPU) on the device that does the work."""
        from pyprune.runtime.device import resolve_device

        copied: Any = copy.deepcopy(self._load()[0])
        model: PreTrainedModel = copied.to(resolve_device(self.config.device))
        return model

    def _teacher(self, config: PruneConfig) -> PreTrainedModel:
        """The dense model once more, for a cell that distils."""
        from pyprune.runtime.device import DTYPES, working_dtype

        teacher: Any = self._copy()
        dense: PreTrainedModel = teacher.to(DTYPES[working_dtype(config.recover.teacher_dtype, teacher.device)])
        return dense

    def _quality(self, model: PreTrainedModel) -> Json:
        """Perplexity on every text; with tasks, their metrics, accuracies and mean accuracy."""
        from pyprune.quality.perplexity import evaluate_perplexity

        tokenizer = self._load()[1]
        setting = self.setting
        perplexity = {
            source: evaluate_perplexity(
                model, tokenizer, text, setting.protocol, max_tokens=setting.max_tokens
            ).perplexity
            for source, text in self.texts.items()
        }
        return {"perplexity": perplexity, **(self._accuracy(model, tokenizer) if setting.tasks else {})}

    def _accuracy(self, model: PreTrainedModel, tokenizer: Any) -> Json:
        from pyprune.quality.tasks import accuracies, evaluate_tasks, mean_accuracy

        setting = self.setting
        found = evaluate_tasks(
            model, tokenizer, setting.tasks, limit=setting.task_limit, include_path=setting.task_folder
        )
        mean = mean_accuracy(found, setting.tasks)
        return {"task_metrics": found, "accuracy": accuracies(found, setting.tasks), "mean_accuracy": mean}

    def dense(self) -> Json:
        """Quality of the dense model, measured once.

        Raises:
            PypruneError: the model, a test text or a task cannot be used, which would stop every cell.
        """
        key = self.setting.key({"dense": self.config.dtype})
        if key not in self.records.dense:
            self._load()
            say("dense model")
            record = {"kind": "dense", "key": key, **self.setting.identity(), "dtype": self.config.dtype}
            record |= {**self._quality(self._copy()), "environment": self.environment}
            self.records.add(record)
        return self.records.dense[key]

    def cell(self, case: Case, key: str) -> Json:
        """Prune a copy and measure it; an error becomes part of the record."""
        dense, _ = self.dense(), self._load()
        plan_key = self.setting.key(decides(case.config))
        record: Json = {
            "kind": "cell",
            "key": key,
            "plan_key": plan_key,
            **self.setting.identity(),
            "recipe": case.recipe,
            "grid": dict(case.values),
            "options": case.config.to_dict(),
            "dense_perplexity": dense["perplexity"],
            **({"dense_mean_accuracy": dense["mean_accuracy"]} if self.setting.tasks else {}),
            "environment": self.environment,
            "error": "",
        }
        started = time.monotonic()
        try:
            record |= self._run(case.config, self.records.plans.get(plan_key))
        except Exception as error:  # one cell's failure (a diverged run, no memory) must not end the grid
            record["error"] = f"{type(error).__name__}: {error}"
        record.setdefault("seconds", time.monotonic() - started)
        _free_memory()
        return record

    def _run(self, config: PruneConfig, plan: Json | None) -> Json:
        """What a cell measured; ``plan`` is the choice of an earlier cell that decided with the same options."""
        from pyprune.families import count_parameters

        data = self._samples(config)
        model = self._copy()
        parameters = count_parameters(model)
        started = time.monotonic()
        result = _prune(model, data, config, plan, lambda: self._teacher(config))
        seconds = time.monotonic() - started
        effects = result.effects
        return {
            **self._quality(model),
            "dense_parameters": parameters,
            "parameters": count_parameters(model),
            "preserved_ratio": effects.preserved_ratio if effects is not None else None,
            "plan": result.plan.to_dict(),
            "plan_reused": plan is not None,
            "removed_layers": list(result.plan.removed_layers),
            "removed_hidden": len(result.plan.removed_hidden),
            "notes": result.notes,
            "warnings": result.warnings,
            "seconds": seconds,
        }

    def _samples(self, config: PruneConfig) -> dict[str, TokenSamples]:
        """Draw the training text, or take the last cell's where the options are equal.

        Raises:
            DataError: a test text holds training text.
        """
        from pyprune.checkpoint.trained_on import refuse_training_text, training_marks
        from pyprune.run.text import draw_samples, shapes_the_result, text_configs

        model, tokenizer = self._load()
        key = json.dumps({name: data.to_dict() for name, data in text_configs(config).items()}, sort_keys=True)
        if self.drawn[0] != key:
            self.drawn = key, draw_samples(model, tokenizer, config)
        data = self.drawn[1]
        marks = training_marks(data.values()) if shapes_the_result(config) else ""
        for source, text in self.texts.items() if marks else ():  # or each would be tokenised once more
            refuse_training_text(marks, text.passage_ids(), source, "these options")
        return data


def _prune(
    model: PreTrainedModel,
    data: Mapping[str, TokenSamples],
    config: PruneConfig,
    plan: Json | None,
    dense: Callable[[], PreTrainedModel],
) -> PruneResult:
    from pyprune import prune_

    teacher = dense if config.recover.distill else None
    if plan is None:
        return prune_(model, data, config, teacher=teacher)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_text(json.dumps(plan), encoding="utf-8")
        result = prune_(model, data, replace(config, plan=str(path)), teacher=teacher)
    result.notes = [note for note in result.notes if str(path) not in note]
    return result


def _free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _outcome(record: Json) -> str:
    if record["error"]:
        return f"failed: {record['error']}"
    found = ", ".join(f"{value:.4g} on {source}" for source, value in record["perplexity"].items())
    mean = record.get("mean_accuracy")
    tasks = "" if mean is None else f", mean accuracy {mean:.4f}"
    return f"PPL {found}{tasks}; {record['seconds']:.0f} s"


def _names(text: str) -> list[str]:
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} must name at least one task, and none twice")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="checkpoint folder or hub id")
    parser.add_argument(
        "--config", action="append", type=Path, default=[], metavar="FILE", help="recipe; several make a table of cases"
    )
    parser.add_argument("--preset", metavar="NAME", help="named options to start from; it wins over a recipe's own")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of every cell")
    parser.add_argument(
        "--grid", action="append", default=[], metavar="KEY=A,B", help="values of one option (or of several: K+L=A+B)"
    )
    parser.add_argument("--ppl", action="append", required=True, metavar="SOURCE", help="test text; repeatable")
    parser.add_argument("--protocol", default="ppl-2048", help="ppl-2048 or ppl-128")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="use only N tokens of each test text")
    parser.add_argument("--tasks", type=_names, default=[], metavar="A,B", help="lm-eval tasks, e.g. piqa,arc_easy")
    parser.add_argument("--task-limit", type=int, metavar="N", help="examples of each task, for a quick look")
    parser.add_argument("--task-folder", type=Path, metavar="DIR", help="folder of further task files (YAML)")
    parser.add_argument("--gguf-file", metavar="NAME", help="a .gguf file inside MODEL")
    parser.add_argument("--revision", help="branch, tag or commit of a model from the hub")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that MODEL brings along")
    parser.add_argument("--retry-failed", action="store_true", help="run cells again whose record is a failure")
    parser.add_argument("--jsonl", type=Path, default=RECORDS, metavar="FILE", help="file to append to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
