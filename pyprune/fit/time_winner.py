"""Candidates and the written winner run beside the dense model, in the engine and format that the budget is for."""

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
"""Seconds of a turn that is itself the mean of many steps, so that two that agree are enough."""
AGREE = 0.01
"""Share by which they may differ."""


def time_plans(
    profile: Profile,
    config: PretrainedConfig,
    plans: Mapping[str, PrunePlan],
    quantities: Sequence[Quantity],
    repeats: int,
    tokenizer: Any,
) -> dict[str, dict[Quantity, float]]:
    """Seconds of every plan and workload, turn by turn in engines that stay loaded side by side.

    Where the memory holds one engine, they are loaded one after another. Each turn counts by its ratio to the dense
    model's of that moment, so that a machine that slows down does not matter. How long a model takes depends on its
    shapes alone, so that random weights are run. Long turns are not repeated where two of them agree (:func:`agree`).

    Args:
        profile: whose engine and dtype run them.
        config: of the dense model.
        plans: name -> plan; :data:`DENSE` is among them.
        quantities: workloads.
        repeats: most timed turns of each, after a warm-up.
        tokenizer: of the model; a GGUF file needs one.

    Raises:
        EngineError: an engine failed; its last log lines are in the message.
        UnsupportedModelError: the engine cannot hold a plan.
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
            groups = engines.in_groups(dense, list(models), models.get, room=room, repeats=repeats, enough=agree)
            turns = [turn for _, found in groups for turn in found]
    seconds = {quantity: relative_seconds(turns, quantity)[0] for quantity in quantities}
    return {name: {quantity: seconds[quantity][name] for quantity in quantities} for name in plans}


def agree(turns: Sequence[Timing]) -> bool:
    """Whether turns of a workload, the dense model's first, are enough.

    Long ones are, two or more of each model, whose shares of the dense model's time differ by no more than
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
    """Time what was written as `pyprune bench` does: generation of 64 x 128 and a prompt of 2,048 tokens, or the most
    that the model reads, in turns with the dense model.

    Args:
        source: of the dense model. Where engines do not read it themselves, it is run with random weights.
        config: of the dense model.
        winner: checkpoint folder or GGUF file.
        weights: format of the budget: llama.cpp runs GGUF files, vLLM quantised folders.
        profile: whose engine and dtype run both, where there is one.
        engine: what runs them without one, where the weights are of a dtype.
        repeats: timed turns of each.
        tokenizer: of the dense model.

    Raises:
        EngineError, MissingDependencyError, UnsupportedModelError, ConfigError: it cannot be run here.
    """
    known = weight_format(weights)
    usual = {"gguf": "llamacpp", "plain": engine}.get(known.layout, "vllm")
    runner, _ = choose_engine(profile.engine if profile is not None else usual)
    runs_files = runner == "llamacpp"
    file_format = profile.dtype if profile is not None else default_dtype(runner)
    quantise = (weights if known.layout == "gguf" else file_format) if runs_files else None
    dtype = weights if known.layout == "plain" and not runs_files else Workload.dtype
    limit = position_limit(config) or math.inf
    work = Workload(
        prompt_tokens=int(min(Workload.prompt_tokens, limit - 1)),
        new_tokens=int(min(Workload.new_tokens, max(1, limit - SHORT_PROMPT_TOKENS))),
    )
    device = profile.used_device if profile is not None else "auto"
    with tempfile.TemporaryDirectory(prefix="pyprune-fit-") as folder, visible(device):
        dense: str | Path = source.name
        if source != ModelSource(source.name) or not _is_served(source.name):
            say("The dense model is timed with random weights: engines do not read it as it was read here.")
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
    """Whether engines read a model by themselves: they want safetensors or a GGUF file."""
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
    """The stored profile of a model, engine and dtype; measured and stored where there is none that holds here.

    Args:
        source: of the dense model.
        engine: auto, vllm, transformers or llamacpp.
        dtype: of the weights; None = the engine's default.
        quantities: workloads that it must know.
        allow: use a stored one of another machine or version, with a warning.
        before: (dense configuration, dtype) -> nothing; called where one has to be measured, which takes long, to
            refuse what would fail after it.

    Raises:
        ConfigError: a dtype that the engine does not run.
        BudgetError: a workload that is longer than what the model reads.
        PypruneError: what stops a measurement.
    """
    chosen, _ = choose_engine(engine)
    config = dense_config(source)
    _check_read(config, quantities)
    weights = dtype or default_dtype(chosen)
    known = _stored(config, chosen, weights, allow=allow, instead="It is measured again.")
    if known is not None and _knows(known, quantities):
        say(f"Using the profile {known.name}, of {known.machine['device']}.")
        return known
    if before is not None:
        before(config, weights)
    usual = ProfileOptions(engine=chosen, dtype=dtype).within(position_limit(config))
    # A model of the same sizes, by which profiles are named, may read more than this one.
    limit = position_limit(config) or math.inf
    kept = [q for q in known.quantities if longest_sequence(q) <= limit] if known else usual.quantities
    wanted = dict.fromkeys([*kept, *quantities])
    check_stored()
    say("There is no profile for this budget: measuring what models of this family and size take here (once).")
    options = replace(
        usual,
        prefill=tuple(q.tokens for q in wanted if q.kind == "prefill"),
        generation=tuple((q.batch, q.tokens, q.prompt) for q in wanted if q.kind == "generation"),
    )
    found = take_profile(source, options)
    say(f"Kept as {found.save(stored_as(found.name))}.")
    return found


def stored_profile(source: ModelSource, *, engine: str, dtype: str, allow: bool = False) -> Profile | None:
    """The stored profile of a model, engine and dtype; None where there is none that holds here. Nothing is measured.

    Nor is there one for a user without a folder to read.

    Args:
        source: of the dense model.
        engine: see :func:`profile_of`.
        dtype: of the weights.
        allow: see :func:`profile_of`.
    """
    chosen = choose_engine(engine)[0] if engine == "auto" else engine  # which need not be installed
    config = dense_config(source)
    try:
        found = _stored(config, chosen, dtype, allow=allow, instead="No times are told.")
    except (OSError, RuntimeError):  # permissions; no home
        return None
    if found is not None:
        say(f"Using the profile {found.name}, of {found.machine['device']}.")
    return found


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


def _stored(config: PretrainedConfig, engine: str, dtype: str, *, allow: bool, instead: str) -> Profile | None:
    """The profile of the default name, if there is one and it holds on this machine; else ``instead`` is said."""
    plan = family_for(config).plan(config)
    path = stored_as(profile_name(plan.model_type, plan.dense, engine, dtype))
    if not path.is_file():
        return None
    try:
        found = Profile.load(path)
        if not allow:  # else it is said where the profile is used
            found.check(plan)
    except BudgetError as error:
        warn(f"{error} {instead}")
        return None
    return found


def _knows(profile: Profile, quantities: Sequence[Quantity]) -> bool:
    try:
        costs = MeasuredCosts(profile)
        for quantity in quantities:
            costs.fixed(quantity, profile.dense.hidden_size)
    except BudgetError:
        return False
    return True
