"""fit: from a budget to a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyprune.cli.base import (
    Debug,
    GgufFile,
    JsonFile,
    Overwrite,
    RemoteCode,
    Resume,
    Revision,
    guarded,
    output,
    refuse_beside,
    refuse_idle,
    say_what_is_loaded,
)
from pyprune.cli.profile import Mismatch
from pyprune.errors import ConfigError, did_you_mean
from pyprune.runtime.progress import say

if TYPE_CHECKING:
    from pyprune.checkpoint.load import ModelSource
    from pyprune.fit.limits import Budget
    from pyprune.fit.options import FitOptions
    from pyprune.fit.profile import Profile

DEFAULT_WEIGHTS = "bfloat16"
"""Format of the weights where neither an option nor a profile says one."""
OF_TIMING = ("rounds", "slack", "spare")
"""Options that only a search reads which times its candidates."""


@guarded
def fit(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint folder or hub id (owner/name).")],
    budget: Annotated[
        list[str],
        typer.Option(
            metavar="LIMIT[,LIMIT]",
            help="What the model may take: parameters=100M, memory@4096=120MB, prefill@2048<=900ms, "
            "tokens_per_second@64x128>=800, time_to_first_token@512<=200ms, speedup>=1.3, throughput_increase>=1.2, or "
            "a share of the dense model (memory=60%). Several limits hold together; with --sweep each --budget is one "
            "point.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to create: the checkpoint, or the sweep's report.")],
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="What this machine takes (pyprune profile). Default: the one of this model and --weights; it is "
            "measured first where there is none and a time is limited.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            help="That is to run the model: auto (llamacpp for a GGUF format, else vLLM if installed), vllm, "
            "transformers or llamacpp."
        ),
    ] = "auto",
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="How the model will be exported, which memory and widths depend on: bfloat16, float16, float32, "
            "w8a8-int8, w8a16, fp8, w4a16, or a GGUF format (q8_0, q4_0, ...). Default: the profile's, "
            "else q8_0 for llamacpp and bfloat16 for other engines.",
            show_default=False,
        ),
    ] = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Devices that are to share every layer, whose widths N then divides. Default: 1."
        ),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="Text, as in pyprune prune. Default: mixture."),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Sequences to draw from it. Default: 160.")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens in a sequence. Default: 256.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any option by its dotted name, e.g. solve.solutions=3."),
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Write a table and charts of what each --budget allows, and its plans.")
    ] = False,
    no_recover: Annotated[
        bool, typer.Option("--no-recover", help="Write the winner reconstructed, without training it.")
    ] = False,
    no_timing: Annotated[
        bool,
        typer.Option(
            "--no-timing",
            help="Trust the predicted times, and do not run beside the dense model what was written.",
        ),
    ] = False,
    cache: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for scores, losses and candidates. Default: DIR.fit beside --out."),
    ] = None,
    allow_mismatch: Mismatch = False,
    gguf_file: GgufFile = None,
    revision: Revision = None,
    trust_remote_code: RemoteCode = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    json_file: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Find the best model that keeps a budget, and write it: layers, heads and FFN widths are chosen together.

    Example: pyprune fit HuggingFaceTB/SmolLM2-135M --budget 'memory=200MB,speedup>=1.3' --out fitted/
    """
    say_what_is_loaded(model)
    from pyprune.checkpoint.load import ModelSource
    from pyprune.data.sources import check_sources
    from pyprune.fit.fit import cache_of, check_cache, check_devices, check_export, check_outputs
    from pyprune.fit.limits import Budget
    from pyprune.runtime.device import resolve_device
    from pyprune.runtime.files import check_output
    from pyprune.runtime.report import check_charts

    budgets = [Budget.parse(text) for text in budget] if sweep else [Budget.parse(budget)]
    given = {"data.source": calibration, "data.samples": samples, "data.sequence_length": sequence_length,
             "tensor_parallel": tensor_parallel}  # fmt: skip
    options = _options(given, set_ or ())
    _refuse_untimed(set_ or (), budgets, timed=not no_timing, sweep=sweep)
    if not (profile or sweep or budgets[0].timed):
        refuse_idle({"--allow-mismatch": allow_mismatch}, "here: no profile is read. Leave it out.")
    source = ModelSource(model, gguf_file, revision, trust_remote_code)
    engine, weights = _target(engine, weights, named=profile is not None)
    # What cannot be written or read is refused before a profile is measured, which takes long.
    check_sources(options.data.sources)
    resolve_device(options.device)
    check_cache(cache, out)
    if not allow_mismatch:  # else it is said where the model is opened
        check_devices(budgets, options, weights, engine, allow=False)
    if sweep:
        if resume or no_recover:
            raise ConfigError("--sweep trains and writes no model: leave out --resume and --no-recover.")
        check_output(out, overwrite=overwrite, reads=[model, *options.data.sources])
        check_charts()
    else:
        check_outputs(out, model, options, resume=resume, overwrite=overwrite)
        if weights is not None:
            check_export(out, weights, overwrite=overwrite)
    wanted = _profile(source, budgets, profile, engine, weights, options, sweep=sweep, allow=allow_mismatch)
    shared: dict[str, Any] = {
        "options": options,
        "weights": weights or (wanted.dtype if wanted else DEFAULT_WEIGHTS),
        "profile": wanted,
        "allow_mismatch": allow_mismatch,
        "cache": cache,
        "timed": not no_timing,
        "overwrite": overwrite,
    }
    # What widths run well is learnt from a profile: the same command with counted limits alone would take no profile.
    again = f"--cache {shared['cache'] or cache_of(out)}"
    if wanted is not None and profile is None:
        again += f" --profile {wanted.name}"
    if sweep:
        _sweep(source, budgets, out, shared, json_file, again)
    else:
        shared |= {"engine": engine, "resume": resume, "recover": not no_recover}
        _fit(source, budgets[0], out, shared, json_file, again)


def _options(given: dict[str, Any], settings: Any) -> FitOptions:
    """The defaults, changed by what was given on the command line."""
    from pyprune.fit.options import FitOptions
    from pyprune.run.recipe import merge, nest, parse_setting

    data: dict[str, Any] = {}
    for name, value in given.items():
        if value is not None:
            data = merge(data, nest(name, value))
    for setting in settings:
        data = merge(data, parse_setting(setting))
    options = FitOptions.from_dict(merge(FitOptions().to_dict(), data))
    options.validate()
    return options


def _refuse_untimed(settings: Sequence[str], budgets: list[Budget], *, timed: bool, sweep: bool) -> None:
    """Refuse options of the search by measured times where no candidate is timed, and turns where nothing is."""
    from pyprune.run.recipe import dotted_names, parse_setting

    limits = any(budget.timed for budget in budgets)
    given = {name for text in settings for name in dotted_names(parse_setting(text))}
    why = "with --no-timing predicted times are trusted" if limits else "no budget limits a time"
    if not (timed and limits):
        refuse_idle({name: name in given for name in OF_TIMING}, f"here: {why}. Leave it out.")
    if sweep and not limits:  # nor is what was written timed
        why = "here: a sweep writes no model, and no budget limits a time. Leave it out."
        refuse_idle({"repeats": "repeats" in given}, why)
    if not timed:
        refuse_beside("--no-timing", {"repeats": "repeats" in given})


def _target(engine: str, weights: str | None, *, named: bool) -> tuple[str, str | None]:
    """Engine and format of the weights, where one of them says what the other is; a named profile says both."""
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
    """Engines that run a format."""
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
    """The profile that was named; else this model's own, where times are limited, or a sweep can tell them.

    For a sweep alone none is measured. A single model that no time limits is fitted without one: its search, and so
    the run that resumes it, does not depend on what was stored in between.
    """
    from pyprune.fit.profile import Profile

    if named is not None:
        found = Profile.load(named)
        if engine not in ("auto", found.engine):
            raise ConfigError(
                f"{engine} is to run the model, by --engine or the format of --weights, and the profile {found.name} "
                f"is of {found.engine}. Leave out one of them."
            )
        if weights is not None and found.engine not in _engines_of(weights):
            raise ConfigError(
                f"--weights is {weights!r}, which {found.engine} does not run, and the profile {found.name} is of "
                f"{found.engine}. Leave out one of them."
            )
        if not allow:
            found.check()  # before the model is loaded; a mismatch that is allowed is said when it was
        return found
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

    found = find(source, budget, out=out, **shared)
    tables: list[Any] = [attempts_table(found), limits_table(found)]
    if found.speed is not None:
        tables += [speed_table(found.speed), conditions(found.speed)]
    written = f"{out} and {found.exported}" if found.exported else str(out)
    steps = (
        f"Wrote {written}, and what was measured to {report_of(out)}/report.html. "
        f"Next: pyprune eval {out} --ppl wikitext2",
        "Another budget for the same model costs its own candidates alone: the same command with another --budget and "
        f"--out, and {again}",
    )
    output(found.to_dict(), json_file, *tables, *steps)


def _sweep(
    source: ModelSource, budgets: list[Budget], out: Path, shared: dict[str, Any], json_file: str | None, again: str
) -> None:
    from pyprune.fit.fit import sweep as find
    from pyprune.fit.report import sweep_table

    points = find(source, budgets, out=out, **shared)
    found = {point.budget for point in points}
    data = {"points": [point.to_dict() for point in points], "nothing": [str(b) for b in budgets if b not in found]}
    each = "that something keeps" if data["nothing"] else "of the sweep"
    written = f"Wrote {out}: report.html, report.md and a plan for each budget {each}."
    output(data, json_file, sweep_table(points), written)
    say(
        "To write one of them: the same command without --sweep, with its budget alone, another --out, and "
        f"{again}, where its candidates are known.",
        "dim",
    )
