"""The cells of ablation.py: the grid, what all cells share, and which options decide the plan."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyprune.config.run import PruneConfig
from pyprune.errors import ConfigError, shown
from pyprune.run.recipe import build_config, parse_setting, read_yaml
from pyprune.runtime.records import Json, digest

AFTER_THE_PLAN = ("stages", "recover", "finetune", "verify", "target", "export_dtype")
"""Options that cannot change which parts are removed."""

AFTER_THE_GATES = ("norm", "penalty_weight", "schedule", "anneal_share", "target_preserved_ratio")
"""Options of ELDeR's second stage, which starts when the layers are chosen."""

USED_BY_THE_GATES = ("dtype", "gradient_checkpointing")
"""Training options of the second stage that the first one uses as well."""


@dataclass(frozen=True)
class Case:
    """One cell of the grid.

    Attributes:
        recipe: name of its recipe; empty without one.
        values: option -> value, as the grid gave them.
        config: its complete options.
    """

    recipe: str
    values: Mapping[str, Any]
    config: PruneConfig

    @property
    def label(self) -> str:
        """What sets it apart, for people."""
        return ", ".join([*([self.recipe] if self.recipe else []), *(f"{k}={v}" for k, v in self.values.items())])


@dataclass(frozen=True)
class Setting:
    """What all cells share, apart from their options.

    Attributes:
        model: folder or hub id.
        gguf_file, revision, trust_remote_code: see :func:`pyprune.checkpoint.load.load_model`.
        texts: test source -> SHA-256 of its text.
        protocol: of the perplexities.
        max_tokens: tokens of each test text; None = all.
        tasks: lm-eval tasks.
        task_limit: examples of each task; None = all.
        task_folder: folder of further task files; None = lm-eval's own tasks.
    """

    model: str
    gguf_file: str | None
    revision: str | None
    trust_remote_code: bool
    texts: Mapping[str, str]
    protocol: str
    max_tokens: int | None
    tasks: tuple[str, ...] = ()
    task_limit: int | None = None
    task_folder: Path | None = None

    def identity(self) -> Json:
        """What must be equal for a record to be of the same measurement; tasks only where there are any."""
        names = ("model", "gguf_file", "revision", "protocol", "max_tokens")
        tasks = {"tasks": list(self.tasks), "task_limit": self.task_limit} if self.tasks else {}
        return {**{name: getattr(self, name) for name in names}, "texts": dict(self.texts), **tasks}

    def key(self, part: Mapping[str, Any]) -> str:
        """A digest of this setting and ``part``, which names a record."""
        return digest([self.identity(), part])[:16]


def make_cases(
    recipes: Sequence[Path], preset: str | None, settings: Sequence[str], grids: Sequence[str]
) -> list[Case]:
    """Every combination of recipes and grid values, in the order given (the last grid varies fastest).

    Raises:
        ConfigError: an unreadable recipe, an unknown option, a value that is not allowed, or cells that need the
            dense model in different types or on different devices.
    """
    axes = [parse_grid(text) for text in grids]
    cases = []
    for recipe in recipes or (None,):
        for chosen in itertools.product(*axes):
            values = {key: value for pairs in chosen for key, value in pairs.items()}
            texts = [f"{key}={json.dumps(value)}" for key, value in values.items()]
            config = build_config(preset=preset, recipe=recipe, settings=[*settings, *texts])
            cases.append(Case(recipe.stem if recipe else "", values, config))
    if len({(case.config.dtype, case.config.device) for case in cases}) > 1:
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


def decides(config: PruneConfig) -> Json:
    """The options that the choice of the removed parts can depend on; equal ones give the same plan."""
    found = {key: value for key, value in config.to_dict().items() if key not in AFTER_THE_PLAN}
    if "elder" in found:
        elder = {key: value for key, value in found["elder"].items() if key not in AFTER_THE_GATES}
        found["elder"] = elder | {"train": {key: elder["train"][key] for key in USED_BY_THE_GATES}}
    # Text for a later stage can move the regularisation text where the source is scarce.
    return {**found, "recovers": bool(config.stages.after)}
