r"""A grid over any options of recipes on one model: what each option changes.

    python -m bench.quality ablation MODEL --config recipes/llama/smollm2-elder-published.yaml --ppl wikitext2 \
        --grid elder.gates.penalty_weight=1e-4,1e-3,1e-2 --grid elder.penalty_weight=1e-4,1e-3,1e-2

Every --grid multiplies the cases, and every --config runs them all. Options joined by + vary together:
``--grid data.samples+recovery_data.samples=800+200,750+250`` is two cases, not four. The dense model is loaded once;
each case prunes a copy in memory, and only its record is written. Cases whose options differ only after the choice of
layers share that choice. An option of the grid that made no difference anywhere is named below the table. "Parameters
removed" counts tied ones once; "preserved ratio" is |W| after / before regularisation in the removed channels (DReSS);
seconds are those of deciding, training and cutting. With --tasks, lm-eval measures every case, and the dense model
once: "acc" is a task's accuracy, "mean acc" the mean of all tasks that report one.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.quality.grid import (
    Case,
    Column,
    Grid,
    Layout,
    figure,
    find_plan,
    first,
    keep_plan,
    perplexity_columns,
    text_identity,
)
from pyprune.config.run import PruneConfig
from pyprune.errors import ConfigError, shown
from pyprune.run.recipe import build_config, parse_setting, read_yaml
from pyprune.runtime.records import Json, RecordFile, digest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pyprune.data.sampling import TokenSamples
    from pyprune.quality.perplexity import EvaluationText
    from pyprune.run.stages import PruneResult

AFTER_THE_PLAN = ("stages", "recover", "finetune", "verify", "target", "export_dtype")
"""Options that cannot change which parts are removed."""
AFTER_THE_GATES = ("norm", "penalty_weight", "schedule", "anneal_share", "target_preserved_ratio")
"""Options of ELDeR's second stage, which starts when the layers are chosen."""
USED_BY_THE_GATES = ("dtype", "gradient_checkpointing")
"""Training options of the second stage that the first one uses as well."""


def make_cases(
    recipes: Sequence[Path], preset: str | None, settings: Sequence[str], grids: Sequence[str]
) -> list[Case]:
    """Return every combination of recipes and grid values, in the order given (the last grid varies fastest).

    Raises:
        ConfigError: an unreadable recipe, an unknown option, a value that is not allowed, or cases that need the
            dense model in different types or on different devices.
    """
    axes = [parse_grid(text) for text in grids]
    cases = []
    for recipe in recipes or (None,):
        for chosen in itertools.product(*axes):
            values = {key: value for pairs in chosen for key, value in pairs.items()}
            texts = [f"{key}={json.dumps(value)}" for key, value in values.items()]
            config = build_config(preset=preset, recipe=recipe, settings=[*settings, *texts])
            fields = {"recipe": recipe.stem if recipe else "", **values}
            cases.append(Case(fields, config.to_dict(), config))
    if len({(case.task.dtype, case.task.device) for case in cases}) > 1:
        raise ConfigError("dtype and device cannot vary inside a grid: the dense model is loaded once.")
    return cases


def parse_grid(text: str) -> list[dict[str, Any]]:
    """Read "a.b=1,2" as [{"a.b": 1}, {"a.b": 2}], and "a+b=1+2,3+4" as [{"a": 1, "b": 2}, {"a": 3, "b": 4}].

    Values are YAML; a value that holds a comma is quoted or in brackets.

    Raises:
        ConfigError: no "=", no value, or joined options with another number of values.
    """
    name, equals, listed = text.partition("=")
    keys = [key.strip() for key in name.split("+")]
    values: list[Any] = parse_setting(f"grid=[{listed}]")["grid"]
    if not equals or not all(keys) or not values:
        raise ConfigError(
            f"--grid got {shown(text)}; expected key.path=value,value, for example elder.penalty_weight=1e-4,1e-3."
        )
    if len(keys) == 1:
        return [{keys[0]: value} for value in values]
    points = []
    for value in values:
        parts = str(value).split("+")
        if len(parts) != len(keys):
            raise ConfigError(
                f"--grid {name}: {shown(value)} has {len(parts)} values joined by +; it needs {len(keys)}."
            )
        points.append({key: read_yaml(part, f"--grid {name}") for key, part in zip(keys, parts, strict=True)})
    return points


def deciding_options(config: PruneConfig) -> Json:
    """Return the options that the choice of the removed parts can depend on; equal ones give the same plan."""
    options = {key: value for key, value in config.to_dict().items() if key not in AFTER_THE_PLAN}
    if "elder" in options:
        elder = {key: value for key, value in options["elder"].items() if key not in AFTER_THE_GATES}
        options["elder"] = elder | {"train": {key: elder["train"][key] for key in USED_BY_THE_GATES}}
    # Text for a later stage can move the regularisation text where the source is scarce.
    return {**options, "recovers": bool(config.stages.after)}


class AblationBench:
    """The dense model, loaded for the first case that runs; each case runs on a copy of it.

    Raises:
        ConfigError: see :func:`make_cases`; or options of tasks without tasks.
    """

    def __init__(self, options: argparse.Namespace, records: RecordFile) -> None:
        from pyprune.data.sources import evaluation_split, read_corpus, text_sha256
        from pyprune.quality.tasks import check_tasks, reporting_tasks

        if (options.task_limit or options.task_folder) and not options.tasks:
            raise ConfigError(
                "--task-limit and --task-folder are read with --tasks alone; name tasks, or leave them out."
            )
        self.options, self.records = options, records
        self._cases = make_cases(options.config, options.preset, options.set, options.grid)
        self.config: PruneConfig = self._cases[0].task
        self.examples: Json = {"limit": options.task_limit, "include_path": options.task_folder}
        checked = check_tasks(options.tasks, **self.examples) if options.tasks else {}
        self.tasks = reporting_tasks(options.tasks, checked) if options.tasks else []
        texts = {source: read_corpus(source, evaluation_split(source)).text() for source in options.ppl}
        self.setting: Json = {
            "model": options.model,
            "gguf_file": options.gguf_file,
            "revision": options.revision,
            "protocol": options.protocol,
            "texts": {name: text_identity(options.tokens, text_sha256(text)) for name, text in texts.items()},
            **({"tasks": self.tasks, "task_limit": options.task_limit} if self.tasks else {}),
        }
        self._drawn: tuple[str, dict[str, TokenSamples]] = ("", {})

    def cases(self) -> Sequence[Case]:
        """Return the dense model, then the grid."""
        return [Case({"recipe": "dense"}, {"dtype": self.config.dtype}), *self._cases]

    @cached_property
    def dense(self) -> tuple[PreTrainedModel, Any]:
        """The dense model on the host, and its tokenizer."""
        from pyprune.checkpoint.load import load_model
        from pyprune.checkpoint.tokenizer import no_tokenizer

        options = self.options
        model, tokenizer = load_model(
            options.model,
            dtype=self.config.dtype,
            gguf_file=options.gguf_file,
            revision=options.revision,
            trust_remote_code=options.trust_remote_code,
        )
        if tokenizer is None:
            raise no_tokenizer(options.model)
        return model, tokenizer

    @property
    def accelerator(self) -> str | None:
        """Name of the GPU that computes; None on a CPU."""
        import torch

        from pyprune.runtime.device import resolve_device

        device = resolve_device(self.config.device)
        return torch.cuda.get_device_name(device) if device.type == "cuda" else None

    @cached_property
    def texts(self) -> dict[str, EvaluationText]:
        """The test texts by name."""
        from pyprune.quality.perplexity import evaluation_text

        return {source: evaluation_text(self.dense[1], source) for source in self.options.ppl}

    def _copy(self, dtype: str | None = None) -> PreTrainedModel:
        """Copy the dense model to the device that does the work."""
        from pyprune.runtime.device import DTYPES, resolve_device, working_dtype

        device = resolve_device(self.config.device)
        model: Any = copy.deepcopy(self.dense[0]).to(device)
        return model.to(DTYPES[working_dtype(dtype, device)]) if dtype else model

    def measure(self, case: Case) -> Json:
        """Prune a copy and measure it."""
        from pyprune.families import count_parameters

        if case.task is None:
            return self._quality(self._copy())
        samples, model = self._samples(case.task), self._copy()
        parameters = count_parameters(model)
        started = time.monotonic()
        result, reused = self._prune(model, samples, case.task)
        seconds = time.monotonic() - started
        return {
            **self._quality(model),
            "dense_parameters": parameters,
            "parameters": count_parameters(model),
            "preserved_ratio": result.effects.preserved_ratio if result.effects is not None else None,
            "plan_reused": reused,
            "warnings": result.warnings,
            "seconds": seconds,
        }

    def finish(self, case: Case, later: Sequence[Case]) -> None:
        """Free the device's memory."""
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _quality(self, model: PreTrainedModel) -> Json:
        from pyprune.quality.perplexity import evaluate_perplexity
        from pyprune.quality.tasks import accuracies, evaluate_tasks, mean_accuracy

        tokenizer, protocol = self.dense[1], self.options.protocol
        results = {
            source: evaluate_perplexity(model, tokenizer, text, protocol, max_tokens=self.options.tokens)
            for source, text in self.texts.items()
        }
        quality: Json = {"perplexity": {protocol: {source: result.perplexity for source, result in results.items()}}}
        if self.tasks:
            metrics = evaluate_tasks(model, tokenizer, self.tasks, **self.examples)
            accuracy, mean = accuracies(metrics, self.tasks), mean_accuracy(metrics, self.tasks)
            quality |= {"task_metrics": metrics, "accuracy": accuracy, "mean_accuracy": mean}
        return quality

    def _samples(self, config: PruneConfig) -> dict[str, TokenSamples]:
        """Draw the training text, or take the last case's where the options are equal.

        Raises:
            DataError: a test text holds training text.
        """
        from pyprune.checkpoint.trained_on import refuse_training_text, training_marks
        from pyprune.run.text import draw_samples, shapes_the_result, text_configs

        key = json.dumps({name: data.to_dict() for name, data in text_configs(config).items()}, sort_keys=True)
        if self._drawn[0] != key:
            self._drawn = key, draw_samples(*self.dense, config)
        data = self._drawn[1]
        marks = training_marks(data.values()) if shapes_the_result(config) else ""
        for source, text in self.texts.items() if marks else ():  # or each would be tokenised once more
            refuse_training_text(marks, text.passage_ids(), source, "these options")
        return data

    def _prune(
        self, model: PreTrainedModel, data: Mapping[str, TokenSamples], config: PruneConfig
    ) -> tuple[PruneResult, bool]:
        """Prune with the plan of an earlier case that decided with the same options, or decide."""
        from pyprune import prune_

        teacher = (lambda: self._copy(config.recover.teacher_dtype)) if config.recover.distill else None
        key = digest([self.setting, deciding_options(config)])[:16]
        plan = find_plan(self.records, key)
        if plan is None:
            result = prune_(model, data, config, teacher=teacher)
            keep_plan(self.records, key, result.plan)
            return result, False
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.json"
            path.write_text(json.dumps(plan.to_dict()), encoding="utf-8")
            return prune_(model, data, replace(config, plan=str(path)), teacher=teacher), True


def unused_options(rows: Sequence[Json]) -> list[str]:
    """Return options whose values gave equal perplexities, bit for bit, wherever everything else was equal."""
    unused = []
    for name in dict.fromkeys(name for row in rows for name in row["case"] if name != "recipe"):
        groups: dict[str, list[Any]] = {}
        for row in (row for row in rows if name in row["case"]):
            others = {key: value for key, value in row["case"].items() if key != name}
            groups.setdefault(json.dumps(others, sort_keys=True), []).append(row["figures"]["perplexity"])
        compared = [group for group in groups.values() if len(group) > 1]
        if compared and all(value == group[0] for group in compared for value in group):
            unused.append(name)
    return unused


def _count_removed_parameters(row: Json) -> int | None:
    figures = row["figures"]
    return figures["dense_parameters"] - figures["parameters"] if "parameters" in figures else None


def _share(row: Json) -> str | None:
    return (
        None
        if (removed := _count_removed_parameters(row)) is None
        else f"{removed / row['figures']['dense_parameters']:.2%}"
    )


def _columns(rows: Sequence[Json]) -> list[Column]:
    tasks = dict.fromkeys(task for row in rows for task in row["figures"].get("accuracy", {}))
    mean = [Column("mean acc", figure("mean_accuracy"), first)] if tasks else []
    return [
        *perplexity_columns(rows, first),
        *(Column(f"acc {task}", figure("accuracy", task), first) for task in tasks),
        *mean,
        Column("parameters removed", _count_removed_parameters, first),
        Column("of all", _share, first),
        Column("preserved ratio", figure("preserved_ratio"), lambda values: f"{values[0]:.2%}"),
        Column("seconds", figure("seconds"), lambda values: round(values[0], 1)),
    ]


def _remarks(rows: Sequence[Json]) -> list[str]:
    reason = "made no difference to any case; the other options may not use it."
    return [f"{name} {reason}" for name in unused_options(rows)]


def _open(options: argparse.Namespace, records: RecordFile, work: Path) -> AblationBench:
    return AblationBench(options, records)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} must name at least one task, and none twice")
    return names


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="checkpoint folder or hub id")
    parser.add_argument(
        "--config", action="append", type=Path, default=[], metavar="FILE", help="recipe; several make a table of cases"
    )
    parser.add_argument("--preset", metavar="NAME", help="named options to start from; it wins over a recipe's own")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of every case")
    parser.add_argument(
        "--grid", action="append", default=[], metavar="KEY=A,B", help="values of one option (or of several: K+L=A+B)"
    )
    parser.add_argument("--ppl", action="append", required=True, metavar="SOURCE", help="test text; repeatable")
    parser.add_argument("--protocol", default="ppl-2048", choices=("ppl-2048", "ppl-128"))
    parser.add_argument("--tasks", type=_names, default=[], metavar="A,B", help="lm-eval tasks, e.g. piqa,arc_easy")
    parser.add_argument("--task-limit", type=int, metavar="N", help="examples of each task, for a quick look")
    parser.add_argument("--task-folder", type=Path, metavar="DIR", help="folder of further task files (YAML)")
    parser.add_argument("--gguf-file", metavar="NAME", help="a .gguf file inside MODEL")
    parser.add_argument("--revision", help="branch, tag or commit of a model from the hub")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that MODEL brings along")


GRID = Grid("ablation", __doc__, _open, Layout(("recipe", "*"), _columns, remarks=_remarks), options=_options)
