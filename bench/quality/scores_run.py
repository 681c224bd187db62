"""Runs the cells of scores.py: prune, recover, measure."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from bench._texts import PACKAGE, packaged_gguf
from bench.quality.scores_cases import TEXTS, Case, Setting
from pyprune.errors import CheckpointError
from pyprune.runtime.progress import say
from pyprune.runtime.records import Json, RecordFile, digest
from pyprune.serving.stats import environment_record

if TYPE_CHECKING:
    from pyprune.quality.perplexity import EvaluationText

PROTOCOLS = ("ppl-128", "ppl-2048")
KEPT = "moreau"
"""The scorer whose checkpoints of the first seed stay, to be served and timed."""

OF_RECOVERY = (
    "recover_seconds", "recover_tokens", "recover_steps", "losses", "warnings", "perplexity", "evaluate_seconds",
)  # fmt: skip
"""What a record holds of its recovery, apart from the sizes of the cut."""


@dataclass
class Bench:
    """Runs cells.

    Attributes:
        setting: what all cells share.
        model: folder of the dense model; None = the packaged one.
        out: where checkpoints are written.
        records: where results are written.
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
        """Prune, recover if the case says so, and measure; an error becomes part of the record."""
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
        from pyprune import prune

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
        from pyprune.run.recover import recover_checkpoint
        from pyprune.run.resume import interrupted_run

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
        return {**facts, "cut_sha256": digest(record.files)}

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
        from pyprune.checkpoint.load import ModelSource, load_model
        from pyprune.checkpoint.tokenizer import no_tokenizer
        from pyprune.checkpoint.trained_on import refuse_training_text
        from pyprune.quality.perplexity import evaluate_perplexity, evaluation_text

        model, tokenizer = load_model(folder, dtype=self.setting.dtype, device="auto")
        if tokenizer is None:
            raise no_tokenizer(folder)
        if not self.loaded:
            self.loaded = {n: evaluation_text(tokenizer, str(self.setting.data / file)) for n, file in TEXTS.items()}
        started = time.monotonic()
        found: Json = {}
        for name, text in self.loaded.items():
            refuse_training_text(ModelSource.of(folder).marks, text.passage_ids(), text.source, str(folder))
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
