"""Time candidates and the written winner in turns with the dense model, in the engine and format of the budget."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyprune.checkpoint.load import ModelSource
from pyprune.data.stream import position_limit
from pyprune.errors import BudgetError, CheckpointError
from pyprune.families import family_for
from pyprune.fit.formats import weight_format
from pyprune.fit.limits import MEASURES
from pyprune.fit.measured import MeasuredCosts, ratios_to_dense, relative_seconds
from pyprune.fit.profile import DENSE, Profile, Timing, check_stored, profile_name, stored_as
from pyprune.fit.profiling.probes import dense_config, write_served
from pyprune.fit.profiling.timing import ProfileOptions, default_dtype, take_profile
from pyprune.fit.profiling.turns import EngineGroup, cache_bytes, longest_sequence, room_for, visible, written_bytes
from pyprune.fit.quantities import Quantity
from pyprune.plan import PrunePlan
from pyprune.runtime.progress import say, warn
from pyprune.serving.checkpoints import read_checkpoint
from pyprune.serving.engines import choose_engine
from pyprune.serving.speed.measure import measure
from pyprune.serving.speed.results import SHORT_PROMPT_TOKENS, SpeedReport, Workload

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WINNER = "fitted"
"""The written model's name in tables of speed."""
LONG_S = 10.0
"""Seconds of a long turn, which averages many steps, so that two turns that agree are enough."""
AGREE = 0.01
"""Share by which turns that agree may differ."""


def time_plans(
    profile: Profile,
    config: PretrainedConfig,
    plans: Mapping[str, PrunePlan],
    quantities: Sequence[Quantity],
    repeats: int,
    tokenizer: Any,
) -> dict[str, dict[Quantity, float]]:
    """Measure the seconds of every plan and workload, turn by turn in engines that are loaded side by side.

    If the memory holds only one engine, they are loaded one after another. Each turn is divided by the dense model's
    time at that moment, so that a machine that slows down does not matter. A model's time depends only on its shapes,
    so that random weights are run. Long turns are not repeated if two of them agree (:func:`agree`).

    Args:
        profile: names the engine and dtype.
        config: of the dense model.
        plans: name -> plan; :data:`DENSE` is among them.
        quantities: workloads.
        repeats: most timed turns of each, after a warm-up.
        tokenizer: of the model; a GGUF file needs one.

    Raises:
        EngineError: an engine failed; its last log lines are in the message.
        UnsupportedModelError: the engine cannot run a plan.
    """
    engine, _ = choose_engine(profile.engine)
    with tempfile.TemporaryDirectory(prefix="pyprune-fit-") as folder, visible(profile.used_device):
        work = Path(folder)
        models = {
            name: write_served(config, plan, work / name, engine, profile.dtype, tokenizer)
            for name, plan in plans.items()
        }
        dense = models.pop(DENSE)
        room = room_for(engine, written_bytes(work / DENSE), cache_bytes(dense[1], quantities, profile.dtype))
        with EngineGroup(engine, profile.dtype, quantities, plans[DENSE].dense.vocab_size) as engines:
            groups = engines.time_groups(dense, list(models), models.get, room=room, repeats=repeats, enough=agree)
            turns = [turn for _, found in groups for turn in found]
    seconds = {quantity: relative_seconds(turns, quantity)[0] for quantity in quantities}
    return {name: {quantity: seconds[quantity][name] for quantity in quantities} for name in plans}


def agree(turns: Sequence[Timing]) -> bool:
    """Check whether turns of a workload, the dense model's first, are enough.

    Two or more long turns of each model are enough if their shares of the dense model's time differ by at most
    :data:`AGREE`.
    """
    if turns[0].seconds < LONG_S or sum(turn.probe == DENSE for turn in turns) < 3:
        return False
    return all(max(shares) <= (1 + AGREE) * min(shares) for shares in ratios_to_dense(turns).values())


def time_winner(
    source: ModelSource,
    config: PretrainedConfig,
    winner: Path,
    weights: str,
    profile: Profile | None,
    *,
    engine: str = "auto",
    repeats: int,
    tokenizer: Any,
) -> SpeedReport:
    """Time the written model in turns with the dense model, as `pyprune bench` does.

    The workloads are generation of 64 x 128 and a prompt of 2,048 tokens, or the longest that the model reads.

    Args:
        source: of the dense model. If engines cannot read it, it is run with random weights.
        config: of the dense model.
        winner: checkpoint folder or GGUF file.
        weights: format of the budget: llama.cpp runs GGUF files, vLLM quantised folders.
        profile: names the engine and dtype of both models; None = choose them by ``weights`` and ``engine``.
        engine: of weights in a dtype, if there is no profile.
        repeats: timed turns of each.
        tokenizer: of the dense model.

    Raises:
        EngineError, MissingDependencyError, UnsupportedModelError, ConfigError: it cannot be run here.
    """
    layout = weight_format(weights).layout
    usual = {"gguf": "llamacpp", "plain": engine}.get(layout, "vllm")
    runner, _ = choose_engine(profile.engine if profile is not None else usual)
    runs_files = runner == "llamacpp"
    file_format = profile.dtype if profile is not None else default_dtype(runner)
    quantise = (weights if layout == "gguf" else file_format) if runs_files else None
    dtype = weights if layout == "plain" and not runs_files else Workload.dtype
    limit = position_limit(config) or math.inf
    work = Workload(
        prompt_tokens=int(min(Workload.prompt_tokens, limit - 1)),
        new_tokens=int(min(Workload.new_tokens, max(1, limit - SHORT_PROMPT_TOKENS))),
    )
    device = profile.used_device if profile is not None else "auto"
    with tempfile.TemporaryDirectory(prefix="pyprune-fit-") as folder, visible(device):
        dense: str | Path = source.name
        if source != ModelSource(source.name) or not _is_served(source.name):
            say("The dense model is timed with random weights: engines cannot read it as it was read here.")
            plan = family_for(config).plan(config)
            dense, _ = write_served(config, plan, Path(folder) / DENSE, runner, quantise or dtype, tokenizer)
        return measure(
            {DENSE: dense, WINNER: winner},
            engine=runner,
            dtype=dtype,
            quantise=quantise,
            repeats=repeats,
            prompt_tokens=work.prompt_tokens,
            new_tokens=work.new_tokens,
        )


def _is_served(source: str) -> bool:
    """Check whether engines can read a model: it must have safetensors or be a GGUF file."""
    try:
        read_checkpoint(source)
    except CheckpointError:
        return False
    return True


def profile_of(
    source: ModelSource,
    *,
    engine: str,
    dtype: str | None,
    quantities: Sequence[Quantity],
    allow: bool = False,
    before: Callable[[PretrainedConfig, str], None] | None = None,
) -> Profile:
    """Load the stored profile of a model, engine and dtype; measure and store it if none is valid here.

    Args:
        source: of the dense model.
        engine: auto, vllm, transformers or llamacpp.
        dtype: of the weights; None = the engine's default.
        quantities: workloads that it must have.
        allow: use a stored one of another machine or version, with a warning.
        before: (dense configuration, dtype) -> None; called before a profile is measured, which takes long, to raise
            errors that would come after it.

    Raises:
        ConfigError: a dtype that the engine does not run.
        BudgetError: a workload with longer sequences than the model reads.
        PypruneError: the measurement failed.
    """
    chosen, _ = choose_engine(engine)
    config = dense_config(source)
    _check_read(config, quantities)
    weights = dtype or default_dtype(chosen)
    stored = load_stored(config, chosen, weights, allow=allow, instead="It is measured again.")
    if stored is not None and predicts(stored, quantities):
        say(f"Using the profile {stored.name}, of {stored.machine['device']}.")
        return stored
    if before is not None:
        before(config, weights)
    usual = ProfileOptions(engine=chosen, dtype=dtype).within(position_limit(config))
    # Profiles are named by sizes alone, and the stored one may be of a model that reads more than this one.
    limit = position_limit(config) or math.inf
    kept = [q for q in stored.quantities if longest_sequence(q) <= limit] if stored else usual.quantities
    workloads = dict.fromkeys([*kept, *quantities])
    check_stored()
    say("There is no profile for this budget: measuring the times of models of this family and size (once).")
    options = replace(
        usual,
        prefill=tuple(q.tokens for q in workloads if q.kind == "prefill"),
        generation=tuple((q.batch, q.tokens, q.prompt) for q in workloads if q.kind == "generation"),
    )
    taken = take_profile(source, options)
    say(f"Kept as {taken.save(stored_as(taken.name))}.")
    return taken


def stored_profile(source: ModelSource, *, engine: str, dtype: str, allow: bool = False) -> Profile | None:
    """Load the stored profile of a model, engine and dtype, without measuring; None if none is valid here.

    None also for a user whose profiles cannot be read.

    Args:
        source: of the dense model.
        engine: see :func:`profile_of`.
        dtype: of the weights.
        allow: see :func:`profile_of`.
    """
    chosen = choose_engine(engine)[0] if engine == "auto" else engine  # a named engine need not be installed
    config = dense_config(source)
    try:
        stored = load_stored(config, chosen, dtype, allow=allow, instead="No times are reported.")
    except (OSError, RuntimeError):  # permissions; no home
        return None
    if stored is not None:
        say(f"Using the profile {stored.name}, of {stored.machine['device']}.")
    return stored


def _check_read(config: PretrainedConfig, quantities: Sequence[Quantity]) -> None:
    limit = position_limit(config) or math.inf
    for quantity in quantities:
        needed = longest_sequence(quantity)
        if needed <= limit:
            continue
        most = quantity.tokens - (needed - int(limit))
        shorter = replace(quantity, tokens=most)
        gain = next(name for name, m in MEASURES.items() if (m.kind, m.is_a) == (quantity.kind, "gain"))
        nearest = f" Limit {shorter} instead, or {gain}@{shorter.place}." if most > 0 else ""
        raise BudgetError(f"{quantity} makes sequences of {needed} tokens, and the model reads {limit:g}.{nearest}")


def load_stored(config: PretrainedConfig, engine: str, dtype: str, *, allow: bool, instead: str) -> Profile | None:
    """Load the profile of the default name if it exists and is valid on this machine; else warn with ``instead``."""
    plan = family_for(config).plan(config)
    path = stored_as(profile_name(plan.model_type, plan.dense, engine, dtype))
    if not path.is_file():
        return None
    try:
        stored = Profile.load(path)
        if not allow:  # else the use of the profile warns
            stored.check(plan)
    except BudgetError as error:
        warn(f"{error} {instead}")
        return None
    return stored


def predicts(profile: Profile, quantities: Sequence[Quantity]) -> bool:
    """Check whether a profile predicts all of these quantities."""
    try:
        costs = MeasuredCosts(profile)
        for quantity in quantities:
            costs.base(quantity, profile.dense.hidden_size)
    except BudgetError:
        return False
    return True
