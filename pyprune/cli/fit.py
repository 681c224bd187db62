"""Fit a model to a budget."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyprune.cli.base import guard, output, refuse_beside, refuse_idle, say_what_is_loaded, text_options
from pyprune.errors import ConfigError, did_you_mean
from pyprune.runtime.progress import say

if TYPE_CHECKING:
    from pyprune.checkpoint.load import ModelSource
    from pyprune.fit.limits import Budget
    from pyprune.fit.options import FitOptions
    from pyprune.fit.profile import Profile

DEFAULT_WEIGHTS = "bfloat16"
"""Format of the weights if neither an option nor a profile names one."""
OF_TIMING = ("rounds", "slack", "spare")
"""Options that only a search with timed candidates reads."""


@guard
def fit(
    model: str,
    *,
    budget: list[str],
    out: Path,
    profile: str | None = None,
    engine: str = "auto",
    weights: str | None = None,
    tensor_parallel: int | None = None,
    calibration: str | None = None,
    samples: int | None = None,
    sequence_length: int | None = None,
    set_: list[str] | None = None,
    sweep: bool = False,
    no_recover: bool = False,
    no_timing: bool = False,
    cache: Path | None = None,
    allow_mismatch: bool = False,
    gguf_file: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    json_file: str | None = None,
    debug: bool = False,
) -> None:
    """Find the best model that keeps a budget, and write it: layers, heads and FFN widths are chosen together.

    Example: pyprune fit HuggingFaceTB/SmolLM2-135M --budget 'memory=200MB,speedup>=1.3' --out fitted/

    Args:
        model (MODEL): Checkpoint folder or hub id (owner/name).
        budget (LIMIT[,LIMIT]): Limits of the model: parameters=100M, memory@4096=120MB, prefill@2048<=900ms,
            tokens_per_second@64x128>=800, time_to_first_token@512<=200ms, speedup>=1.3, throughput_increase>=1.2, or a
            share of the dense model (memory=60%). All limits are kept; with --sweep each --budget is one point.
        out (DIR): Folder to create: the checkpoint, or the sweep's report.
        profile (NAME|FILE): Profile of this machine (pyprune profile). Default: the one of this model and --weights; it
            is measured first if none exists and a time is limited.
        engine: Engine that will run the model: auto (llamacpp for a GGUF format, else vLLM if installed), vllm,
            transformers or llamacpp.
        weights (FORMAT): Format of the exported weights, which decides memory and widths: bfloat16, float16, float32,
            w8a8-int8, w8a16, fp8, w4a16, or a GGUF format (q8_0, q4_0, ...). Default: the profile's, else q8_0 for
            llamacpp and bfloat16 for other engines.
        tensor_parallel (N): Devices that share every layer; its widths are multiples of N. Default: 1.
        calibration (SOURCE): Text, as in pyprune prune. Default: mixture.
        samples: Sequences to draw from it. Default: 160.
        sequence_length: Tokens in a sequence. Default: 256.
        sweep: Write the best plan for each --budget, and a table and charts of them.
        no_recover: Write the winner reconstructed, without training it.
        no_timing: Trust the predicted times, and do not time the written model.
        cache (DIR): Folder for scores, losses and candidates. Default: DIR.fit next to --out.
    """
    say_what_is_loaded(model)
    from pyprune.checkpoint.load import ModelSource
    from pyprune.data.sources import check_sources
    from pyprune.fit.fit import cache_of, check_cache, check_devices, check_export, check_outputs
    from pyprune.fit.limits import Budget
    from pyprune.runtime.device import resolve_device
    from pyprune.runtime.files import check_output

    budgets = [Budget.parse(text) for text in budget] if sweep else [Budget.parse(budget)]
    named = text_options(calibration, samples, sequence_length) | {"tensor_parallel": tensor_parallel}
    options = _options(named, set_ or ())
    _refuse_untimed(set_ or (), budgets, timed=not no_timing, sweep=sweep)
    if not (profile or sweep or budgets[0].timed):
        refuse_idle({"--allow-mismatch": allow_mismatch}, "here: no profile is read. Leave it out.")
    source = ModelSource(model, gguf_file, revision, trust_remote_code)
    engine, weights = choose_engine_and_format(engine, weights, named=profile is not None)
    # Refuse unreadable texts and outputs that cannot be written before a profile is measured, which takes long.
    check_sources(options.data.sources)
    resolve_device(options.device)
    check_cache(cache, out)
    if not allow_mismatch:  # else opening the model warns
        check_devices(budgets, options, weights, engine, allow=False)
    if sweep:
        if resume or no_recover:
            raise ConfigError("--sweep trains and writes no model: leave out --resume and --no-recover.")
        check_output(out, overwrite=overwrite, reads=[model, *options.data.sources])
    else:
        check_outputs(out, model, options, resume=resume, overwrite=overwrite)
        if weights is not None:
            check_export(out, weights, overwrite=overwrite)
    measured = _profile(source, budgets, profile, engine, weights, options, sweep=sweep, allow=allow_mismatch)
    shared: dict[str, Any] = {
        "options": options,
        "weights": weights or (measured.dtype if measured else DEFAULT_WEIGHTS),
        "profile": measured,
        "allow_mismatch": allow_mismatch,
        "cache": cache,
        "timed": not no_timing,
        "overwrite": overwrite,
    }
    # The profile decides which widths run well, but the same command with counted limits alone would take no profile.
    again = f"--cache {shared['cache'] or cache_of(out)}"
    if measured is not None and profile is None:
        again += f" --profile {measured.name}"
    if sweep:
        _sweep(source, budgets, out, shared, json_file, again)
    else:
        shared |= {"engine": engine, "resume": resume, "recover": not no_recover}
        _fit(source, budgets[0], out, shared, json_file, again)


def _options(named: dict[str, Any], settings: Sequence[str]) -> FitOptions:
    """Change the defaults by the options of the command line."""
    from pyprune.fit.options import FitOptions
    from pyprune.run.recipe import merge, nest, parse_setting

    changes = [nest(name, value) for name, value in named.items() if value is not None]
    options = FitOptions.from_dict(reduce(merge, [*changes, *map(parse_setting, settings)], FitOptions().to_dict()))
    options.validate()
    return options


def _refuse_untimed(settings: Sequence[str], budgets: list[Budget], *, timed: bool, sweep: bool) -> None:
    """Refuse options of a search with timed candidates if none is timed, and ``repeats`` if no model is."""
    from pyprune.run.recipe import dotted_names, parse_setting

    limits = any(budget.timed for budget in budgets)
    names = {name for text in settings for name in dotted_names(parse_setting(text))}
    why = "with --no-timing predicted times are trusted" if limits else "no budget limits a time"
    if not (timed and limits):
        refuse_idle({name: name in names for name in OF_TIMING}, f"here: {why}. Leave it out.")
    repeats = {"repeats": "repeats" in names}
    if sweep and not limits:
        refuse_idle(repeats, "here: a sweep writes no model, and no budget limits a time. Leave it out.")
    if not timed:
        refuse_beside("--no-timing", repeats)


def choose_engine_and_format(engine: str, weights: str | None, *, named: bool) -> tuple[str, str | None]:
    """Choose engine and format of the weights by each other; a named profile decides both."""
    from pyprune.fit.formats import weight_format
    from pyprune.fit.profiling.timing import default_dtype
    from pyprune.serving.engines import ENGINES

    if engine not in ENGINES:
        raise ConfigError(did_you_mean(engine, ENGINES, "inference engine"))
    if weights is None:
        return engine, None if named or engine == "auto" else default_dtype(engine)
    runs = _engines_of(weights)
    if engine not in ("auto", *runs):
        raise ConfigError(
            f"--weights is {weights!r}, which --engine {engine} does not run; use --engine {' or '.join(runs)}, or "
            "another format."
        )
    return runs[0] if weight_format(weights).layout == "gguf" else engine, weights


def _engines_of(weights: str) -> tuple[str, ...]:
    """Return the engines that run a format."""
    from pyprune.fit.formats import weight_format

    by_layout = {"gguf": ("llamacpp",), "plain": ("vllm", "transformers")}
    return by_layout.get(weight_format(weights).layout, ("vllm",))


def _profile(
    source: ModelSource,
    budgets: list[Budget],
    named: str | None,
    engine: str,
    weights: str | None,
    options: FitOptions,
    *,
    sweep: bool,
    allow: bool,
) -> Profile | None:
    """Load the named profile; else this model's own if times are limited, or for the times in a sweep's report.

    A sweep without limits on times does not measure one. A single model without such limits uses none: its search, and
    a run that resumes it, must not depend on a profile that is stored later.
    """
    from pyprune.fit.profile import Profile

    if named is not None:
        profile = Profile.load(named)
        if engine not in ("auto", profile.engine):
            raise ConfigError(
                f"--engine or the format of --weights asks for {engine}, and the profile {profile.name} is of "
                f"{profile.engine}. Leave out one of them."
            )
        if weights is not None and profile.engine not in _engines_of(weights):
            raise ConfigError(
                f"--weights is {weights!r}, which {profile.engine} does not run, and the profile {profile.name} is of "
                f"{profile.engine}. Leave out one of them."
            )
        if not allow:
            profile.check()  # before the model is loaded, which warns of a mismatch that is allowed
        return profile
    from pyprune.fit.fit import check_counted
    from pyprune.fit.time_winner import profile_of, stored_profile

    quantities = tuple(dict.fromkeys(quantity for budget in budgets for quantity in budget.timed))
    if not quantities and not sweep:
        return None
    if not quantities:
        return stored_profile(source, engine=engine, dtype=weights or DEFAULT_WEIGHTS, allow=allow)
    before = partial(check_counted, budgets=budgets, options=options)
    return profile_of(source, engine=engine, dtype=weights, quantities=quantities, allow=allow, before=before)


def _fit(
    source: ModelSource, budget: Budget, out: Path, shared: dict[str, Any], json_file: str | None, again: str
) -> None:
    from pyprune.fit.fit import fit as find
    from pyprune.fit.fit import report_of
    from pyprune.fit.report import attempts_table, limits_table
    from pyprune.serving.speed.table import conditions, speed_table

    fitted = find(source, budget, out=out, **shared)
    tables: list[Any] = [attempts_table(fitted), limits_table(fitted)]
    if fitted.speed is not None:
        tables += [speed_table(fitted.speed), conditions(fitted.speed)]
    written = f"{out} and {fitted.exported}" if fitted.exported else str(out)
    steps = (
        f"Wrote {written}, and the measurements to {report_of(out)}/report.html. "
        f"Next: pyprune eval {out} --ppl wikitext2",
        "Another budget for the same model takes only the time of its candidates: the same command with another "
        f"--budget and --out, and {again}",
    )
    output(fitted.to_dict(), json_file, *tables, *steps)


def _sweep(
    source: ModelSource, budgets: list[Budget], out: Path, shared: dict[str, Any], json_file: str | None, again: str
) -> None:
    from pyprune.fit.fit import sweep as find
    from pyprune.fit.report import sweep_table

    points = find(source, budgets, out=out, **shared)
    kept = {point.budget for point in points}
    data = {"points": [point.to_dict() for point in points], "nothing": [str(b) for b in budgets if b not in kept]}
    each = "that some model keeps" if data["nothing"] else "of the sweep"
    written = f"Wrote {out}: report.html, report.md and a plan for each budget {each}."
    output(data, json_file, sweep_table(points), written)
    say(
        "To write one of them, give the same command without --sweep, with its budget alone, another --out, and "
        f"{again}, which has its candidates.",
        "dim",
    )
