"""The text of a run: which uses need some, drawing it, and warnings about it.

A run has three uses of text, named as its options are: ``data`` (what the method reads, what is trained on before the
cut), ``cut.data`` (what the cut is reconstructed on) and ``recovery_data`` (what is trained on after the cut).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pyprune.checkpoint.tokenizer import no_tokenizer
from pyprune.checkpoint.trained_on import marked_passages
from pyprune.config.data import DataConfig
from pyprune.config.run import PruneConfig, ReconstructCheckpointConfig, RecoverCheckpointConfig
from pyprune.data.sampling import TokenSamples, split_disjoint
from pyprune.data.stream import check_sequence_length, check_token_ids
from pyprune.data.tokens import IGNORED, Batch
from pyprune.errors import ConfigError, DataError
from pyprune.families import begins_with_bos
from pyprune.methods.registry import get_method
from pyprune.runtime.progress import warn

DATA, CUT_DATA, RECOVERY_DATA = USES = ("data", "cut.data", "recovery_data")
"""The uses of text, by the names of their options."""
FORMER_NAMES = {"regularise": DATA, "cut": CUT_DATA, "recover": RECOVERY_DATA}
"""Names of the uses until 0.1; they are read for one more release."""
PROBE_SAMPLES = 2
"""Calibration samples on which activations and cosines are compared before and after regularisation."""
FURTHER = "further"
"""The name of the text that a method may read besides ``data``."""
NO_SAMPLES = torch.empty(0, 0, dtype=torch.int64)


@dataclass(frozen=True)
class RunText:
    """The text of a run, by its use.

    Attributes:
        data: what the method reads, what is trained on before the cut, and what the cut is measured on.
        cut_data: what the cut is reconstructed on.
        recovery_data: what is trained on after the cut.
        further: what the method may read besides ``data``; empty for most methods.
        drawn: the samples that were drawn from a source, for the marks of training text.
    """

    data: Batch
    cut_data: Batch
    recovery_data: Batch
    further: Batch
    drawn: tuple[TokenSamples, ...] = ()

    @classmethod
    def of(cls, samples: Mapping[str, Batch | Tensor]) -> RunText:
        """Take token ids, int64 [N, T], by their use; a use that is missing reads ``data``.

        Raises:
            ConfigError: a name that is no use of text.
        """
        if unknown := sorted(set(samples) - {*USES, FURTHER, *FORMER_NAMES}):
            raise ConfigError(f"data has {unknown[0]!r}, which is no use of text; the names are {', '.join(USES)}.")
        if former := sorted(set(samples) & set(FORMER_NAMES)):
            names = ", ".join(f"{name!r} is called {FORMER_NAMES[name]!r}" for name in former)
            warnings.warn(f"In data, {names} now.", FutureWarning, stacklevel=4)
        by_use = {FORMER_NAMES.get(name, name): tokens for name, tokens in samples.items()}
        data = by_use.get(DATA, NO_SAMPLES)
        cut_data, recovery_data = by_use.get(CUT_DATA, data), by_use.get(RECOVERY_DATA, data)
        drawn = tuple(tokens for tokens in samples.values() if isinstance(tokens, TokenSamples))
        further = by_use.get(FURTHER, NO_SAMPLES)
        return cls(Batch.of(data), Batch.of(cut_data), Batch.of(recovery_data), Batch.of(further), drawn)

    @property
    def probe(self) -> Tensor:
        """Return the few samples that single measurements are taken on, int64 [N, T]."""
        return self.data.ids[:PROBE_SAMPLES]

    def digests(self) -> dict[str, str]:
        """Return a digest of the tokens of each use."""
        return {
            use: batch.digest() for use, batch in zip(USES, (self.data, self.cut_data, self.recovery_data), strict=True)
        }


def draw_samples(model: PreTrainedModel, tokenizer: Any, config: PruneConfig) -> dict[str, TokenSamples]:
    """Draw the text of every use; texts of different uses are disjoint.

    Nothing is read when a saved plan is only applied and not verified. What a method may read besides is left out where
    the source has no more text.

    Raises:
        CheckpointError: the model has no tokenizer.
        DataError: the text cannot be used, or the sequences are longer than the model allows.
    """
    configs = text_configs(config)
    if configs and tokenizer is None:
        raise no_tokenizer(model.name_or_path or "The model")
    for data in configs.values():
        check_sequence_length(model.config, data.sequence_length)
    draw = partial(split_disjoint, tokenizer, bos=begins_with_bos(model.config))
    further = _further_text(config) if configs else {}
    try:
        drawn = draw(configs | further) if configs else {}
    except DataError:
        if not further:
            raise
        drawn = draw(configs)
    for samples in drawn.values():
        check_token_ids(model.config, samples.ids[samples.ids != IGNORED])
    return drawn


def text_configs(config: PruneConfig) -> dict[str, DataConfig]:
    """Return the options of every text that a run reads, by its use."""
    if not (shapes_the_result(config) or config.verify):
        return {}
    configs = {DATA: config.data} if _reads_data(config) else {}
    if config.reads_text_at_the_cut and config.cut.data is not None:
        configs[CUT_DATA] = config.cut.data
    if config.stages.after:
        configs[RECOVERY_DATA] = config.recovery_data or config.data
    return configs


def _further_text(config: PruneConfig) -> dict[str, DataConfig]:
    """Return the options of the text that the method may read besides ``data``, if there is such a method."""
    times = get_method(config.method).further_text if _decides_by_text(config) and config.method != "none" else 0
    return {FURTHER: replace(config.data, samples=times * config.data.samples)} if times else {}


def text_sources(config: PruneConfig) -> list[str]:
    """Return the sources of every text that a run reads."""
    return [source for data in text_configs(config).values() for source in data.sources]


def shapes_the_result(config: PruneConfig) -> bool:
    """Check whether text changes the result: by a training, a decision or a reconstruction."""
    trains = bool(config.stages.before or config.stages.after)
    return trains or config.reads_text_at_the_cut or _decides_by_text(config)


def _decides_by_text(config: PruneConfig) -> bool:
    if config.plan is not None:
        return False
    return config.method == "none" or get_method(config.method).reads_text_with(config.options)


def _reads_data(config: PruneConfig) -> bool:
    """Check whether ``data`` is read; the cut and recovery may have text of their own."""
    at_the_cut = config.reads_text_at_the_cut and config.cut.data is None
    after = bool(config.stages.after) and config.recovery_data is None
    return bool(config.stages.before) or config.verify or _decides_by_text(config) or at_the_cut or after


def one_kind_warnings(samples: Batch, option: str = "cut.data.source") -> list[str]:
    """Return a warning for a reconstruction that read one kind of text; ``option`` names its source."""
    if len(set(samples.kinds)) > 1:
        return []
    return [
        "The reconstruction read one kind of text, which it fits at the cost of others (on Wikipedia alone code came "
        f"out worse than without it). Set {option} to mixture (from the hub) or mixture-offline (from a package)."
    ]


def overlap_warnings(config: PruneConfig | RecoverCheckpointConfig | ReconstructCheckpointConfig) -> list[str]:
    """Return a warning for each use whose held-back sequences share text with the others (``data.overlap``)."""
    if isinstance(config, ReconstructCheckpointConfig):
        judged = {"least_squares.held_back": config.data.overlap}
    else:
        stopped = [t for t in config.trainings() if t.train.early_stop_patience is not None]
        judged = {f"{t.name}.early_stop_patience": t.data.overlap for t in stopped}
        if isinstance(config, PruneConfig) and config.stages.prune and config.cut.reconstruct == "least_squares":
            judged["cut.least_squares.held_back"] = (config.cut.data or config.data).overlap
    return [
        f"The sequences that {name} holds back may share up to {overlap:.0%} of their tokens with each of the others "
        "(overlap): what is measured on them is better than on new text."
        for name, overlap in judged.items()
        if overlap
    ]


def repeated_text_warnings(marks: str, samples: TokenSamples) -> list[str]:
    """Return a warning where text of a run was training text of the checkpoint already."""
    ids = samples.ids
    again = marked_passages(marks, ids[ids >= 0])
    if not again:
        return []
    return [f"{again} passages of this run's text were training text of this checkpoint already; use other text."]


def say_warnings(warnings: Iterable[str]) -> None:
    """Print warnings for the user."""
    for warning in warnings:
        warn(warning)
