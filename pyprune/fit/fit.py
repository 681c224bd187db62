"""Fit a model to a budget and write it as a checkpoint, or find the best models for several budgets.

1. methods/score: rank the units of every layer.
2. fit/trials: change and reconstruct one block at a time, and measure the loss.
3. fit/solve: choose the widths of all layers within the limits, by a mixed-integer programme.
4. fit/attempts: cut and reconstruct the best few solutions, and judge them on other text.
5. fit/profiling/turns: time the winner in turns with the dense model; if it breaks a limit, search again.
6. run: reconstruct and train the winner, and save it with its plan.
7. serving: export it if the format is a quantised or GGUF one, and count its bytes.
8. serving/speed: time the written model and the dense model, as `pyprune bench` does.

Scores, losses of single blocks and judged candidates are kept in a folder next to the output, each under the identity
of its model, text and options. Another budget for the same model takes seconds of search and its new candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from pyprune.checkpoint.load import ModelSource, Reading
from pyprune.checkpoint.record import annotate_checkpoint
from pyprune.checkpoint.shards import read_header, weight_files
from pyprune.data.stream import check_sequence_length
from pyprune.errors import BudgetError, ConfigError, DataError, OutputError, PypruneError
from pyprune.families import check_table, family_for
from pyprune.fit.choices import ChoiceOptions, Routers, Space
from pyprune.fit.cost import Costs, ExactCosts, profile_missing
from pyprune.fit.formats import WEIGHT_FORMATS, weight_format
from pyprune.fit.limits import DEFAULT_CONTEXT, Budget
from pyprune.fit.options import FitOptions, winner_config
from pyprune.fit.profile import Profile
from pyprune.fit.quantities import Quantity
from pyprune.fit.report import fit_report, sweep_report
from pyprune.fit.search import Fitted, Fitting
from pyprune.fit.sizes import FITTED_RULES, MULTIPLES, SizeRules
from pyprune.fit.solve import check_feasible
from pyprune.fit.time_winner import WINNER
from pyprune.run.memory import TrainedModels, within_memory
from pyprune.run.prune import prune_checkpoint
from pyprune.run.resume import arithmetic_of, kept_of_a_run, refuse_kept
from pyprune.run.text import draw_samples
from pyprune.runtime.files import atomic_folder, check_output, work_folder, write_report_manifest, write_text
from pyprune.runtime.progress import say, warn
from pyprune.runtime.records import digest
from pyprune.runtime.report import write_report
from pyprune.serving.engines import EngineError, choose_engine
from pyprune.serving.export import export
from pyprune.serving.gguf.write import check_gguf_format, check_gguf_output, export_gguf
from pyprune.serving.quantise import EXPERTS_STAY, check_quantising_installed
from pyprune.serving.speed.table import speed_facts

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ALWAYS_SHOWN = (Quantity("parameters"), Quantity("memory", DEFAULT_CONTEXT))
"""Quantities that a sweep reports of every point, in addition to all that its budgets limit and the profile's times."""


def fit(
    model: str | Path | ModelSource,
    budget: Budget | str | Sequence[str],
    *,
    out: str | Path,
    options: FitOptions = FitOptions(),  # noqa: B008 - frozen
    weights: str = "bfloat16",
    profile: Profile | None = None,
    allow_mismatch: bool = False,
    cache: str | Path | None = None,
    recover: bool = True,
    timed: bool = True,
    engine: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    **reading: Unpack[Reading],
) -> Fitted:
    """Find the best model that keeps a budget, and write it as a checkpoint folder, with a report next to it.

    Args:
        model: folder or hub id of a dense model.
        budget: such as "memory=120MB, prefill@2048<=900ms" (:mod:`pyprune.fit.limits`).
        out: the folder to create.
        options: of the search.
        weights: format that memory is counted in. ``out`` is written in a dtype; for a quantised or GGUF format the
            model is exported as well, next to ``out`` (:func:`export_path`).
        profile: times on this machine (:func:`pyprune.fit.profiling.timing.take_profile`); needed for limits on times.
        allow_mismatch: use a profile of another machine or version, with a warning.
        cache: folder for scores, losses and judged candidates; None = ``out`` with the suffix ".fit".
        recover: train the winner, as the methods do by default.
        timed: run the winner if times are limited, and run the written model in any case.
        engine: runs the written model if there is no profile: auto, vllm, transformers or llamacpp.
        resume: continue the training of the winner from an interrupted call to the same ``out``.
        overwrite: replace an existing ``out``.
        reading: ``gguf_file``, ``revision`` and ``trust_remote_code`` (:class:`ModelSource`).

    Raises:
        BudgetError: the budget cannot be read or kept, or needs a profile.
        OutputError: an interrupted call has left a training there, and neither ``resume`` nor ``overwrite`` is given.
        PypruneError: a stage failed before the checkpoint was written; nothing is left at ``out``.
    """
    budget = budget if isinstance(budget, Budget) else Budget.parse(budget)
    place = Path(out)
    source = ModelSource.of(model, **reading)
    settings: dict[str, Any] = {"weights": weights, "allow_mismatch": allow_mismatch}
    # Refuse outputs that cannot be written or trained before the search, which takes hours.
    check_outputs(place, source.name, options, resume=resume, overwrite=overwrite)
    check_export(place, weights, overwrite=overwrite)
    kept = kept_of_a_run(place)
    if recover:
        _check_training(source, options, weights, place)
    fitting = _open(source, [budget], place, options, profile, cache, engine, timed=timed, **settings)
    if reason := fitting.budget_obstacle(budget):
        plain = weight_format(weights).layout == "plain"
        instead = "" if plain else f", or write it in {weights} with `pyprune export`"
        raise BudgetError(f"{reason} Give a tighter budget{instead}.")
    if recover:
        _check_text(fitting)
    fitting.continued = resume and kept is not None
    if resume and kept is None:
        say("There is no training to resume; results of the search are reused in any case.")
    with arithmetic_of(place, resume=resume):  # in another arithmetic another candidate might win
        fitted = fitting.fit(budget, timed=timed)
    writing = {"recover": recover, "resume": fitting.continued, "overwrite": overwrite}
    fitted = write_winner(fitting, fitted, place, **writing)
    conditions = _conditions(options, fitting, profile)
    if timed:  # timing can be interrupted or end the process, so write the report first
        unfinished = replace(fitted, not_run="The run ended before it was timed.")
        _write_report(place, unfinished, source.name, conditions, overwrite=overwrite)
        fitted = fitting.run_winner(fitted, fitted.exported or place, engine)
    if fitted.speed is not None:  # a GGUF file has no record
        folder = fitted.exported if fitted.exported is not None and fitted.exported.is_dir() else place
        annotate_checkpoint(folder, speed=speed_facts(fitted.speed, WINNER))
    _write_report(place, fitted, source.name, conditions, overwrite=timed or overwrite)
    return fitted


def _check_training(source: ModelSource, options: FitOptions, weights: str, out: Path) -> None:
    """Refuse a training of the winner that the device cannot hold; its options belong to another command."""
    try:
        within_memory(TrainedModels(source), winner_config(options, "", recover=True, weights=weights))
    except ConfigError as error:
        raise ConfigError(
            f"{error}\nThese are options of pyprune recover: write the winner without training (--no-recover), then "
            f"pyprune recover {out} --teacher {source.name} --set OPTION=VALUE --out DIR, and pyprune export of that."
        ) from None


def _check_text(fitting: Fitting) -> None:
    """Refuse too little text for the winner: its training reads as much other text as its reconstruction."""
    fitting.text  # noqa: B018  (draw the search's text first, whose errors are not of the training)
    try:
        draw_samples(fitting.model, fitting.tokenizer, winner_config(fitting.options, "", recover=True))
    except DataError as error:
        samples = fitting.options.data.samples
        raise DataError(
            f"{error} The winner is reconstructed on {samples} sequences and trained on {samples} others: give fewer "
            "(--samples) or more text, or write it without training (--no-recover)."
        ) from None


def check_outputs(
    out: Path, model_id: str | Path, options: FitOptions, *, resume: bool = False, overwrite: bool = False
) -> None:
    """Refuse outputs that :func:`fit` could not write, before anything is measured.

    Args:
        out: the folder to create.
        model_id: the dense model.
        options: of the search.
        resume: see :func:`fit`.
        overwrite: see :func:`fit`.

    Raises:
        OutputError: the folder or that of its report exists or cannot be written, or an interrupted call left a
            training there.
        MissingDependencyError: the report's charts need a package that is not installed.
    """
    check_output(out, overwrite=overwrite, reads=[model_id, *options.data.sources])
    check_output(report_of(out), overwrite=overwrite, reads=[model_id])
    if not (resume or overwrite):
        refuse_kept(work_folder(out))


def sweep(
    model: str | Path | ModelSource,
    budgets: Sequence[Budget | str],
    *,
    out: str | Path,
    options: FitOptions = FitOptions(),  # noqa: B008 - frozen
    weights: str = "bfloat16",
    profile: Profile | None = None,
    allow_mismatch: bool = False,
    cache: str | Path | None = None,
    timed: bool = True,
    overwrite: bool = False,
    **reading: Unpack[Reading],
) -> tuple[Fitted, ...]:
    """Find the best model for each of several budgets with one scoring, and write the plans and a report.

    Args:
        model: folder or hub id of a dense model.
        budgets: each with one limit or more.
        out: the folder to create: plan-1.json and so on in the order of the budgets, report.md and report.html. A
            budget that no timed candidate keeps has no plan, and the report gives the reason.
        options: of the search.
        weights: see :func:`fit`.
        profile: see :func:`fit`; with one, the report has the times of every point (:func:`shown_times`).
        allow_mismatch: see :func:`fit`.
        cache: see :func:`fit`.
        timed: run the winners whose times are limited.
        overwrite: replace an existing ``out``.
        reading: ``gguf_file``, ``revision`` and ``trust_remote_code`` (:class:`ModelSource`).

    Raises:
        BudgetError: a budget that cannot be read, or that no plan keeps by the predictions (before anything is
            measured), or no budget that any plan keeps.
        MissingDependencyError: the report's charts need a package that is not installed.
        PypruneError: a stage failed; nothing is left at ``out``.
    """
    parsed = [b if isinstance(b, Budget) else Budget.parse(b) for b in budgets]
    if not parsed:
        raise BudgetError("A sweep needs at least one budget, such as parameters=100M.")
    place = Path(out)
    source = ModelSource.of(model, **reading)
    settings: dict[str, Any] = {"weights": weights, "allow_mismatch": allow_mismatch}
    check_output(place, overwrite=overwrite, reads=[source.name, *options.data.sources])
    fitting = _open(source, parsed, place, options, profile, cache, timed=timed, **settings)
    for reason in filter(None, map(fitting.budget_obstacle, parsed)):
        warn(reason)
    limited = [quantity for budget in parsed for quantity in budget.quantities]
    # Do not show times of another format, or of one device if several are to share the layers.
    alike = profile is not None and profile.dtype == weights and options.tensor_parallel == 1
    always = [quantity for quantity in ALWAYS_SHOWN if not (quantity.tokens and fitting.costs.exact.states)]
    shown = [*always, *limited, *shown_times(profile if alike else None)]
    points, failed = _points(fitting, parsed, shown, timed=timed)
    conditions = _conditions(options, fitting, profile) | {f"nothing for {b}": why for b, why in failed.items()}
    with atomic_folder(place, overwrite=overwrite) as work:
        plans = {point.budget: point.winner.plan for point in points}
        for number, budget in enumerate(parsed, start=1):
            if budget in plans:
                write_text(work / f"plan-{number}.json", plans[budget].to_json())
        write_report(sweep_report(points, source.name, conditions), work)
        write_report_manifest(work, {"conditions": conditions, "points": [point.to_dict() for point in points]})
    return points


def _points(
    fitting: Fitting, budgets: Sequence[Budget], shown: Sequence[Quantity], *, timed: bool
) -> tuple[tuple[Fitted, ...], dict[str, str]]:
    """Fit the budgets; return their models, and the reasons for those without one, which do not end the sweep.

    Raises:
        BudgetError, EngineError: no budget has a model; the error of the last.
    """
    points: list[Fitted] = []
    failed: dict[str, PypruneError] = {}
    for budget in budgets:
        try:
            points.append(fitting.fit(budget, timed=timed, also=shown))
        except (BudgetError, EngineError) as error:
            failed[str(budget)] = error
            warn(f"{budget}: {error}")
    if not points:
        raise list(failed.values())[-1]
    return tuple(points), {budget: str(error) for budget, error in failed.items()}


def shown_times(profile: Profile | None) -> tuple[Quantity, ...]:
    """Return the longest prompt and the largest batch of a profile, whose times sweeps report for every budget."""
    measured = profile.quantities if profile is not None else ()
    kinds = ([q for q in measured if q.kind == kind] for kind in ("prefill", "generation"))
    return tuple(max(alike, key=lambda q: (q.batch, q.tokens, -q.prompt)) for alike in kinds if alike)


def check_devices(
    budgets: Sequence[Budget], options: FitOptions, weights: str | None, engine: str, *, allow: bool
) -> None:
    """Refuse limits on times, which are measured on one device, if several devices are to share the layers.

    Args:
        budgets: limits.
        options: of the search.
        weights: format of the exported weights; None = a dtype.
        engine: that will run the model.
        allow: warn if times are limited.

    Raises:
        ConfigError: llama.cpp will run the model, which does not share layers.
        BudgetError: times are limited.
    """
    ranks = options.tensor_parallel
    if ranks == 1:
        return
    if engine == "llamacpp" or (weights is not None and weight_format(weights).layout == "gguf"):
        raise ConfigError(
            f"tensor_parallel is {ranks}, and llama.cpp does not share layers among devices; leave it out."
        )
    if not any(budget.timed for budget in budgets):
        return
    text = f"Times are measured on one device, and {ranks} are to share the layers (tensor_parallel)."
    if not allow:
        raise BudgetError(
            f"{text} Limit memory and parameters, or give --allow-mismatch to limit the times on one device."
        )
    warn(f"{text} The limits are kept on one device.")


def check_cache(cache: str | Path | None, out: str | Path) -> None:
    """Refuse a cache inside the folder to create.

    Raises:
        OutputError: it is inside.
    """
    place = Path(out).resolve()
    if cache is None or place not in (kept := Path(cache).resolve(), *kept.parents):
        return
    raise OutputError(f"--cache {cache} is inside {out}, which is to be created. Name a folder outside of it.")


def _open(
    source: ModelSource,
    budgets: Sequence[Budget],
    out: Path,
    options: FitOptions,
    profile: Profile | None,
    cache: str | Path | None,
    engine: str = "auto",
    *,
    timed: bool,
    **settings: Any,
) -> Fitting:
    """Refuse budgets that cannot be kept or measured, then load the model."""
    check_cache(cache, out)
    if timed and profile is not None and any(budget.timed for budget in budgets):
        choose_engine(profile.engine)  # it runs the winners, hours later
    runner = profile.engine if profile is not None else engine
    check_devices(budgets, options, settings["weights"], runner, allow=settings["allow_mismatch"])
    for budget in budgets:
        check_needs_profile(budget, profile)
        check_same_format(budget, profile, settings["weights"], allow=settings["allow_mismatch"])
    kept = Path(cache) if cache is not None else cache_of(out)
    fitting = Fitting.of(source, cache=kept, options=options, profile=profile, **settings)
    for budget in budgets:
        fitting.check(budget)
    return fitting


def _conditions(options: FitOptions, fitting: Fitting, profile: Profile | None) -> dict[str, str]:
    """Return the conditions of the search for a report."""
    judged, data = fitting.text["judged"].ids, fitting.text["data"].ids
    tried = min(options.try_samples, len(data))
    ranks = options.tensor_parallel
    return {
        "weights": fitting.weights,
        **({"devices": f"{ranks} can share every layer; times are of one"} if ranks > 1 else {}),
        "times predicted by": profile.name if profile else "none; no limit is on times",
        "reconstructed on": f"{tried} of {len(data)} x {data.shape[1]} tokens to be compared, on all to be written",
        "judged on": f"{judged.shape[0]} x {judged.shape[1]} tokens of {options.data.source}",
    }


def report_of(out: Path) -> Path:
    """Return the folder of the report on ``out``, next to it."""
    return out.with_name(f"{out.name}.report")


def _write_report(out: Path, fitted: Fitted, model: str, conditions: Mapping[str, str], *, overwrite: bool) -> None:
    with atomic_folder(report_of(out), overwrite=overwrite) as work:
        write_report(fit_report(fitted, model, conditions), work)
        write_report_manifest(work, fitted.to_dict())


def write_winner(
    fitting: Fitting,
    fitted: Fitted,
    out: Path,
    *,
    recover: bool,
    resume: bool = False,
    overwrite: bool = False,
) -> Fitted:
    """Cut the winner again, reconstruct it, train it, write it and export it; release the search's model.

    Its record has the budget and the measured amounts; memory is counted from the written weights.
    """
    # The file's name identifies the plan of a call that is resumed, which refuses another one.
    plan = fitting.cache / f"winner-{digest(fitted.winner.plan.to_dict())[:12]}.json"
    write_text(plan, fitted.winner.plan.to_json())
    config = winner_config(fitting.options, str(plan), recover=recover, weights=fitting.weights)
    fitting.release()  # the run loads the model again
    result = prune_checkpoint(fitting.source, config, out=out, resume=resume, overwrite=overwrite)
    warn_of_other_exports(out, fitting.weights)
    exported = _export(out, fitting.weights, overwrite=overwrite)
    fitted = _weigh(fitting, fitted, stored_bytes(exported or out))
    amounts = fitted.winner.amounts
    facts: dict[str, Any] = {"budget": str(fitted.budget), "weights": fitting.weights}
    facts |= {str(x): x.write(amounts[x.quantity], fitted.dense[x.quantity]) for x in fitted.budget.limits}
    if not fitting.options.keep_multiples:
        facts[FITTED_RULES] = asdict(fitting.rules)
    for folder in filter(None, (out, exported)):
        if folder.is_dir():
            annotate_checkpoint(folder, fit=facts)
    return replace(fitted, out=out, exported=exported, result=result)


def export_path(out: Path, weights: str) -> Path | None:
    """Return the path of the export of ``out`` in a quantised or GGUF format; None = ``out`` has the format."""
    layout = weight_format(weights).layout
    if layout == "plain":
        return None
    return out.with_name(f"{out.name}.{weights}.gguf" if layout == "gguf" else f"{out.name}-{weights}")


def warn_of_other_exports(out: Path, weights: str) -> None:
    """Warn about exports in other formats next to ``out``, which may be of an earlier model."""
    places = [export_path(out, name) for name in WEIGHT_FORMATS if name != weights]
    if others := [str(place) for place in places if place is not None and place.exists()]:
        warn(f"{', '.join(others)}: older than this call, and may be of another model than {out} has now.")


def check_export(out: Path, weights: str, *, overwrite: bool) -> None:
    """Refuse an export that cannot be written.

    Args:
        out: the checkpoint.
        weights: see :func:`export_path`.
        overwrite: replace an existing export.

    Raises:
        OutputError: it exists, or its folder cannot be written.
        MissingDependencyError: the package that writes the format is not installed.
    """
    place = export_path(out, weights)
    if place is None:
        return
    if weight_format(weights).layout != "gguf":
        check_quantising_installed()
        check_output(place, overwrite=overwrite, reads=[out])
        return
    check_gguf_format(weights)
    if out.parent.is_dir():  # else the checkpoint makes it
        check_gguf_output(place, out, overwrite=overwrite)


def _export(out: Path, weights: str, *, overwrite: bool) -> Path | None:
    """Write a checkpoint in the format of the budget; None if it already has that format."""
    place = export_path(out, weights)
    if place is None:
        return None
    runs_files = weight_format(weights).layout == "gguf"
    try:
        if runs_files:
            file = export_gguf(out, place, quantise=weights, overwrite=overwrite)
            path, notes = file.path, file.notes
        else:
            written = export(out, place, dtype="bfloat16", quantise=weights, overwrite=overwrite)
            path, notes = written.path, written.warnings
    except BaseException:
        form = "--format gguf" if runs_files else "--dtype bfloat16"
        again = " --overwrite" if place.exists() else ""
        warn(f"{out} is complete, but its export failed. Write it with: pyprune export {out} --out {place} {form} "
             f"--quantise {weights}{again}")  # fmt: skip
        raise
    for note in notes:
        say(f"Note: {note}", "yellow")
    return path


def stored_bytes(place: Path) -> int:
    """Count the bytes of the tensors in a checkpoint folder or a GGUF file, without headers and vocabulary."""
    if place.is_dir():
        return sum(tensor.entry.nbytes for file in weight_files(place) for tensor in read_header(file))
    from gguf import GGUFReader

    return place.stat().st_size - int(GGUFReader(place).data_offset)


def _weigh(fitting: Fitting, fitted: Fitted, stored: int) -> Fitted:
    """Count the memory of the written weights and of the cache of the limit's contexts; warn of broken limits."""
    winner = fitted.winner
    limited = [quantity for quantity in fitted.budget.quantities if quantity.kind == "memory"]
    bare = fitting.costs.predict(Quantity("memory", 0), winner.plan)
    memory = {q: stored + fitting.costs.predict(q, winner.plan) - bare for q in limited}
    weighed = replace(winner, measured={**winner.measured, **memory})
    for limit in fitted.budget.broken(weighed.amounts, fitted.dense):
        if limit.quantity in memory:
            taken = limit.write(memory[limit.quantity], fitted.dense[limit.quantity])
            warn(f"The written model breaks {limit}: it takes {taken}, more than was counted.")
    attempts = tuple(weighed if attempt == winner else attempt for attempt in fitted.attempts)
    return replace(fitted, winner=weighed, attempts=attempts)


def check_needs_profile(budget: Budget, profile: Profile | None) -> None:
    """Refuse limits on times without a profile.

    Raises:
        BudgetError: times are limited, and there is no profile.
    """
    timed = [str(limit) for limit in budget.limits if limit.quantity in budget.timed]
    if timed and profile is None:
        raise profile_missing(", ".join(timed))


def check_counted(config: PretrainedConfig, weights: str, *, budgets: Sequence[Budget], options: FitOptions) -> None:
    """Refuse limits on parameters and memory that no plan keeps, and text that is too long for the model.

    This is checked before a profile is measured, which takes long. The profile decides the multiples of widths, so that
    a limit is refused only if no multiple can keep it.

    Args:
        config: of the dense model.
        weights: format that memory is counted in.
        budgets: whose limits on times are ignored.
        options: of the search.

    Raises:
        BudgetError: names the limit that cannot be kept and the nearest one that can.
        ConfigError: a format of compressed-tensors for a mixture of experts.
        DataError: sequences longer than the model's positions.
    """
    counted = [Budget(tuple(x for x in budget.limits if not x.quantity.is_timed)) for budget in budgets]
    check_sequence_length(config, options.data.sequence_length)
    usual = SizeRules.of(weights, tensor_parallel=options.tensor_parallel)
    check_table(family_for(config), "A search of sizes")
    identity = family_for(config).plan(config)
    routers = Routers.of(config, identity.dense)
    if "experts" in identity.dense.axes and weight_format(weights).layout in ("channel", "packed"):
        raise ConfigError(f"--weights is {weights}: {EXPERTS_STAY}")

    def refusal(budget: Budget, choices: ChoiceOptions) -> BudgetError | None:
        costs = Costs(ExactCosts.of(config, weights, choices=choices, ranks=options.tensor_parallel))
        try:
            check_feasible(Space.of(identity, choices, routers).zero_losses(), budget, costs, options.solve)
        except BudgetError as error:
            return error
        return None

    steps = (usual.ffn_multiple, *(step * options.tensor_parallel for step in MULTIPLES))
    every = (replace(usual, ffn_multiple=step, hidden_multiple=1) for step in steps)
    possible = tuple(dict.fromkeys(options.choices_for(rules) for rules in every))
    for budget in filter(lambda budget: budget.limits, counted):
        first = refusal(budget, possible[0])
        if first is not None and all(refusal(budget, choices) for choices in possible[1:]):
            raise first


def check_same_format(budget: Budget, profile: Profile | None, weights: str, *, allow: bool) -> None:
    """Refuse limits on times of weights that the profile did not run.

    Args:
        budget: limits.
        profile: predicts times.
        weights: format of the exported weights.
        allow: warn instead.

    Raises:
        BudgetError: the profile ran another format.
    """
    if profile is None or not budget.timed or profile.dtype == weights:
        return
    text = f"Times are limited for {weights} weights, and the profile {profile.name} is of {profile.dtype}."
    if not allow:
        engine = {"gguf": "llamacpp", "plain": profile.engine}.get(weight_format(weights).layout)
        measure = f"Measure one of {weights} with `pyprune profile MODEL --engine {engine} --dtype {weights}`, or give"
        raise BudgetError(
            f"{text} {measure if engine else f'Times of {weights} are not measured. Give'} --allow-mismatch to limit "
            f"the times of {profile.dtype} instead."
        )
    warn(f"{text} They are predicted and measured in {profile.dtype}.")


def cache_of(out: Path) -> Path:
    """Return the folder of the measurements for an output, next to it."""
    return out.with_name(f"{out.name}.fit")
