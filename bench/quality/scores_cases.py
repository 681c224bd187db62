"""The cells of scores.py: which scorers there are, and the options of each cell."""

from __future__ import annotations

import argparse
import json
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from pyprune.config.run import PruneConfig, RecoverCheckpointConfig
from pyprune.config.score import ScoreConfig
from pyprune.errors import ConfigError, DataError, did_you_mean
from pyprune.methods.registry import get_method, is_of_another, preset, score_presets
from pyprune.run.recipe import build_config, build_recovery
from pyprune.run.resume import result_facts
from pyprune.runtime.records import Json, digest

TEXTS = {"WikiText-2": "wikitext2_raw/test.txt", "PTB": "ptb/ptb.valid.txt"}
CALIBRATION = "c4_sample/train.jsonl.gz"
RECOVERY_TEXT = "alpaca/train_5k.jsonl.gz"
DRAWS = ("random",)
"""Methods that read no text and still depend on the seed."""

ORDER = (
    "taylor:param_first", "smoothgrad", "moreau", "moreau_gs", "moreau-converged", "wanda", "flap", "loraprune",
    "magnitude", "random", "taylor",
)  # fmt: skip
"""Which scorers come first, by name or preset: the ones that MoreauPruner is compared with."""

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
    "recover.train.dtype": "bfloat16",  # not what the machine at hand is faster in
}
RECOVERY_PRESET = "alpaca-lora-distill"
Options = TypeVar("Options", PruneConfig, RecoverCheckpointConfig)


@dataclass(frozen=True)
class Case:
    """One cell of the table.

    Attributes:
        scorer: preset, or preset:value.
        seed: of the calibration text and of the method's own noise.
        config: options of the cut; its text is named relative to the data folder.
        recovery: options of the recovery; None = none.
        changed: options of the cut that were given by hand; they are part of its row's name.
        changed_recovery: the same of the recovery.
    """

    scorer: str
    seed: int
    config: PruneConfig
    recovery: RecoverCheckpointConfig | None = None
    changed: tuple[str, ...] = ()
    changed_recovery: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.scorer}, seed {self.seed}{', with recovery' if self.recovery else ''}"

    @property
    def options(self) -> Json:
        """Everything that the result may depend on, apart from the model and the test texts."""
        recovery = self.recovery.to_dict() if self.recovery else None
        return {"scorer": self.scorer, "seed": self.seed, "prune": self.config.to_dict(), "recovery": recovery}

    @property
    def identity(self) -> Json:
        """The same without options at their default, so that a new option of the package makes no cell a new one."""
        recovery = _given(self.recovery.to_dict(), RecoverCheckpointConfig().to_dict()) if self.recovery else None
        config = self.config
        usual = PruneConfig(config.method, score=ScoreConfig(), options=get_method(config.method).options())
        prune = _given(config.to_dict(), usual.to_dict())
        return {
            "scorer": self.scorer,
            "seed": self.seed,
            "prune": result_facts(prune),
            "recovery": result_facts(recovery),
        }

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
        return digest([self.identity(), part])[:16]

    def source(self, label: str) -> str:
        """A text that is named relative to the data folder, or any other source."""
        return str(self.data / label) if (self.data / label).is_file() else label

    def with_paths(self, config: Options) -> Options:
        """The same options with the text where it lies."""
        return replace(config, data=replace(config.data, source=self.source(config.data.source)))


def scorers() -> dict[str, list[str]]:
    """Every scorer -> the settings that make it from its preset, the most telling ones first.

    Cuts are compared as they are, so that presets which reconstruct theirs are left to compare.py.
    """
    found: dict[str, list[str]] = {}
    for name, make in score_presets().items():
        if make().cut.reconstruct == "least_squares":
            continue
        forms = _forms(name) if make().method == name else {}
        found |= {f"{name}:{value}": [setting] for value, setting in forms.items()} or {name: []}
    return {name: found[name] for name in sorted(found, key=place)}


def _forms(method: str) -> dict[str, str]:
    """Every value of a method's choice among forms (param_second of taylor's ``form``) -> the setting for it."""
    hints = typing.get_type_hints(get_method(method).options)
    return {
        value: f"{method}.{name}={value}"
        for name, hint in hints.items()
        if typing.get_origin(hint) is Literal
        for value in typing.get_args(hint)
    }


def place(scorer: str) -> int:
    """Where a scorer stands in the table: as :data:`ORDER` says, then the others."""
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


def find_data(folder: Path, recoveries: Iterable[RecoverCheckpointConfig | None]) -> Path:
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


def text_digest(path: Path) -> str:
    """SHA-256 of a test text, hexadecimal."""
    from pyprune.data.sources import read_corpus, text_sha256

    return text_sha256(read_corpus(str(path)).text())
