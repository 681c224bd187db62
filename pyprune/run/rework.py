"""The frame of a second run on a pruned checkpoint: load it and its text, have it changed, write another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from pyprune.checkpoint.load import ModelSource
from pyprune.checkpoint.record import take_measured
from pyprune.checkpoint.save import save_checkpoint
from pyprune.checkpoint.tokenizer import no_tokenizer
from pyprune.checkpoint.trained_on import training_marks, unmarked_text_warnings
from pyprune.config.run import ReconstructCheckpointConfig, RecoverCheckpointConfig
from pyprune.data.sampling import TokenSamples, sample_sequences
from pyprune.data.sources import look_up_samples
from pyprune.data.stream import check_sequence_length, check_token_ids
from pyprune.data.tokens import IGNORED
from pyprune.errors import ConfigError
from pyprune.families import begins_with_bos
from pyprune.plan import PrunePlan
from pyprune.run.replay import was_rotated
from pyprune.run.resume import RunFolder, run_folder
from pyprune.run.source import check_alike
from pyprune.run.text import overlap_warnings, repeated_text_warnings
from pyprune.runtime import processes
from pyprune.runtime.files import check_output

ADAPTER = "adapter"
"""Name of the folder inside a recovered checkpoint that holds the adapters alone."""


@dataclass
class Rework:
    """A pruned checkpoint while it is changed.

    Attributes:
        model: changed in place.
        samples: text for it.
        plan: by which it was cut; None where the record has none.
        folder: where an interrupted run is kept.
        report: of the change, as plain data; to be filled in.
        warnings: about the text.
        adapter: the trained adapters in PEFT's format, to be written into the checkpoint; None = none.
    """

    model: PreTrainedModel
    samples: TokenSamples
    plan: PrunePlan | None
    folder: RunFolder
    report: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    adapter: Path | None = None

    def add_adapter(self, checkpoint: Path) -> None:
        """Move the adapters into the checkpoint's folder."""
        if self.adapter is not None:
            self.adapter.rename(checkpoint / ADAPTER)


def check_inputs(
    pruned: ModelSource,
    config: RecoverCheckpointConfig | ReconstructCheckpointConfig,
    dense: ModelSource | None,
    out: str | Path,
    *,
    overwrite: bool,
) -> None:
    """Refuse an output that cannot be written, or text that is missing, before anything is loaded."""
    check_output(out, overwrite=overwrite, reads=[pruned.name, dense.name if dense else None, *config.data.sources])
    look_up_samples([config.data])


def refuse_rotated(pruned: ModelSource, what: str, instead: str) -> None:
    """Refuse to compare hidden channels with the dense model's where they were rotated before the cut."""
    if was_rotated(pruned):
        raise ConfigError(
            f"{what} compares the hidden channels with the dense model's, but those of {pruned} were rotated before "
            f"they were cut. {instead}"
        )


@contextmanager
def rework(
    pruned: ModelSource,
    config: RecoverCheckpointConfig | ReconstructCheckpointConfig,
    dense: ModelSource | None,
    out: str | Path,
    entries: str,
    device: str,
    *,
    resume: bool = False,
    overwrite: bool = False,
) -> Iterator[Rework]:
    """Load a checkpoint onto a device, and its text; after the block, write it with another entry in its record.

    Args:
        pruned: source of the checkpoint.
        config: every option.
        dense: source of the dense model, where the run reads one.
        out: the folder to create.
        entries: key of the record under which the run is added.
        device: to load the model to.
        resume: continue an interrupted run of the same options.
        overwrite: replace an existing ``out``.
    """
    source = {"model": pruned.name, "weights": pruned.version, "teacher": str(dense)}
    source["teacher_weights"] = dense.version if dense is not None else ""
    check_alike(source["model"], source["weights"], source["teacher_weights"])
    record = pruned.record
    plan, facts = (record.plan, dict(record.provenance)) if record else (None, {"source": pruned.name})
    with run_folder(Path(out), source, config, resume=resume, overwrite=overwrite) as folder:
        model, tokenizer = pruned.load(dtype=config.dtype, device=device)
        if tokenizer is None:
            raise no_tokenizer(pruned.name)
        check_sequence_length(model.config, config.data.sequence_length)
        samples = sample_sequences(tokenizer, config.data, bos=begins_with_bos(model.config))
        check_token_ids(model.config, samples.ids[samples.ids != IGNORED])
        warnings = [
            *_other_dense_warnings(facts, dense, pruned),
            *repeated_text_warnings(pruned.marks, samples),
            *unmarked_text_warnings([samples]),
            *overlap_warnings(config),
        ]
        work = Rework(model, samples, plan, folder, warnings=warnings)
        yield work
        if not processes.first():
            return
        measured = take_measured(facts)
        entry = {"from": pruned.name, "teacher": dense.name if dense else None, "config": config.to_dict()}
        entry |= {"report": work.report, "measured_before": measured}
        marks = training_marks([samples], pruned.marks)
        save_checkpoint(
            model,
            tokenizer,
            out,
            plan=plan,
            provenance={**facts, entries: [*facts.get(entries, []), entry], "training_marks": marks},
            overwrite=overwrite,
            dtype=config.export_dtype or pruned.dtype,
            convert=work.add_adapter,
            trained=True,
        )


def _other_dense_warnings(facts: Mapping[str, Any], dense: ModelSource | None, pruned: ModelSource) -> list[str]:
    """Return a warning where the dense model is another one than the checkpoint was made from."""
    made_from = facts.get("source_weights")
    if dense is None or made_from in (None, dense.version):
        return []
    if len(made_from) != len(dense.version):  # a commit of the hub and the digest of a folder do not compare
        return []
    parts = [f"{name} {facts[key]}" for name in ("revision", "gguf_file") if (key := f"source_{name}") in facts]
    source = f"{facts.get('source')}{''.join(f', {part}' for part in parts)}"
    return [
        f"The files of {dense} differ from those of the model that {pruned} was made from ({source}). Where "
        "its weights are others too, the result is pulled towards another model."
    ]
