"""From a budget to a checkpoint, and from several budgets to the models they allow.

    what the units are worth     methods/score        which of them go at a width
    what each block loses        budget/trials        one block changed and reconstructed, the loss measured
    widths of all layers         budget/solve         a mixed-integer programme within the limits
    the best few for real        budget/attempts      cut, reconstructed, judged on text of their own
    the winner timed             budget/turns         beside the dense model; beyond a limit, back to the search
    the winner written           pipeline             reconstructed, trained, saved with its plan
    as the device runs it        serving              exported where the format is a quantised or GGUF one, and weighed
    what was written, run        serving/speed        as `pyprune bench` does, beside the dense model

Scores, losses of single blocks and judged candidates are kept in a folder beside the output, each under the identity of
what it was measured on, so that another budget for the same model costs seconds of search and the new candidates alone.
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
from pyprune.families import family_for
from pyprune.fit.choices import ChoiceOptions, Space
from pyprune.fit.cost import Costs, ExactCosts, no_profile
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
from pyprune.runtime.report import check_charts, write_report
from pyprune.serving.engines import EngineError, choose_engine
from pyprune.serving.export import export
from pyprune.serving.gguf.write import check_gguf_format, check_gguf_output, export_gguf
from pyprune.serving.quantise import check_quantising_installed
from pyprune.serving.speed.table import speed_facts

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ALWAYS_SHOWN = (Quantity("parameters"), Quantity("memory", DEFAULT_CONTEXT))
"""What a sweep tells of every point, beside what any of its budgets limits and what a profile says of times."""


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
    """Find the best model that keeps a budget, and write it as a checkpoint folder, with a report beside it.

    Args:
        model: folder or hub id of a dense model.
        budget: such as "memory=120MB, prefill@2048<=900ms" (:mod:`pyprune.fit.limits`).
        out: the folder to create.
        options: of the search.
        weights: format that memory is counted in. A dtype is what ``out`` is written in; in a quantised or GGUF format
            the model is exported as well, beside ``out`` (:func:`exported_as`).
        profile: times on this machine (:func:`pyprune.fit.profiling.timing.take_profile`); needed for limits on times.
        allow_mismatch: use a profile of another machine or version in spite of that.
        cache: folder for scores, losses and judged candidates; None = ``out`` with ".fit" behind it.
        recover: train the winner, as the methods' defaults do.
        timed: run the winner where times are limited, and what was written in any case.
        engine: what runs that where there is no profile: auto, vllm, transformers or llamacpp.
        resume: continue the training of the winner where an interrupted call to the same ``out`` left it.
        overwrite: replace an existing ``out``.
        reading: ``gguf_file``, ``revision`` and ``trust_remote_code`` (:class:`ModelSource`).

    Raises:
        BudgetError: the budget cannot be read or kept, or needs a profile.
        OutputError: an interrupted call has left a training there, and neither ``resume`` nor ``overwrite`` is given.
        PypruneError: whatever stops a stage before the checkpoint is written; nothing is left at ``out``.
    """
    wanted = budget if isinstance(budget, Budget) else Budget.parse(budget)
    place = Path(out)
    source = ModelSource.of(model, **reading)
    settings: dict[str, Any] = {"weights": weights, "allow_mismatch": allow_mismatch}
    # What cannot be written or trained is refused before the search, which takes hours.
    check_outputs(place, source.name, options, resume=resume, overwrite=overwrite)
    check_export(place, weights, overwrite=overwrite)
    kept = kept_of_a_run(place)
    if recover:
        _check_training(source, options, weights, place)
    fitting = _opened(source, [wanted], place, options, profile, cache, engine, timed=timed, **settings)
    if enough := fitting.dense_keeps(wanted):
        plain = weight_format(weights).layout == "plain"
        instead = "" if plain else f", or write it in {weights} with `pyprune export`"
        raise BudgetError(f"{enough} Give a tighter budget{instead}.")
    if recover:
        _check_text(fitting)
    fitting.continued = resume and kept is not None
    if resume and kept is None:
        say("There is no training to resume; what is known of the search is used in any case.")
    with arithmetic_of(place, resume=resume):  # in another one another candidate might win
        found = fitting.fit(wanted, timed=timed)
    writing = {"recover": recover, "resume": fitting.continued, "overwrite": overwrite}
    found = write_winner(fitting, found, place, **writing)
    conditions = _conditions(options, fitting, profile)
    if timed:  # which can be interrupted, or take the process with it: what is known by now is kept first
        unfinished = replace(found, not_run="The run ended before it was timed.")
        _write_report(place, unfinished, source.name, conditions, overwrite=overwrite)
        found = fitting.run_winner(found, found.exported or place, engine)
    if found.speed is not None:  # of what was run: a GGUF file has no record of its own
        ran = found.exported if found.exported is not None and found.exported.is_dir() else place
        annotate_checkpoint(ran, speed=speed_facts(found.speed, WINNER))
    _write_report(place, found, source.name, conditions, overwrite=timed or overwrite)
    return found


def _check_training(source: ModelSource, options: FitOptions, weights: str, out: Path) -> None:
    """Refuse a training of the winner that the device cannot hold; its options are those of another command."""
    try:
        within_memory(TrainedModels(source), winner_config(options, "", recover=True, weights=weights))
    except ConfigError as error:
        raise ConfigError(
            f"{error}\nThese are options of pyprune recover: write the winner without training (--no-recover), then "
            f"pyprune recover {out} --teacher {source.name} --set OPTION=VALUE --out DIR, and pyprune export of that."
        ) from None


def _check_text(fitting: Fitting) -> None:
    """Refuse text that is too little for the winner, whose training reads as much as its reconstruction besides."""
    fitting.text  # noqa: B018  (the search's own, whose errors are not of the training)
    try:
        draw_samples(fitting.model, fitting.tokenizer, winner_config(fitting.options, "", recover=True))
    except DataError as error:
        samples = fitting.options.data.samples
        raise DataError(
            f"{error} The winner is reconstructed on {samples} sequences and trained on as many others: give fewer "
            "(--samples) or more text, or write it without training (--no-recover)."
        ) from None


def check_outputs(
    out: Path, model_id: str | Path, options: FitOptions, *, resume: bool = False, overwrite: bool = False
) -> None:
    """Refuse what :func:`fit` could not write, before anything is measured.

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
    check_charts()
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
            budget that nothing keeps when it is timed has no plan, and the report says why.
        options: of the search.
        weights: see :func:`fit`.
        profile: see :func:`fit`; with one, every point is told with its times (:func:`shown_times`).
        allow_mismatch: see :func:`fit`.
        cache: see :func:`fit`.
        timed: run the winners whose times are limited.
        overwrite: replace an existing ``out``.
        reading: ``gguf_file``, ``revision`` and ``trust_remote_code`` (:class:`ModelSource`).

    Raises:
        BudgetError: a budget that cannot be read, or that nothing keeps by what is predicted (before anything is
            measured), or none that anything keeps.
        MissingDependencyError: the report's charts need a package that is not installed.
        PypruneError: whatever stops a stage; nothing is left at ``out``.
    """
    wanted = [b if isinstance(b, Budget) else Budget.parse(b) for b in budgets]
    if not wanted:
        raise BudgetError("A sweep needs at least one budget, such as parameters=100M.")
    place = Path(out)
    source = ModelSource.of(model, **reading)
    settings: dict[str, Any] = {"weights": weights, "allow_mismatch": allow_mismatch}
    check_output(place, overwrite=overwrite, reads=[source.name, *options.data.sources])
    check_charts()
    fitting = _opened(source, wanted, place, options, profile, cache, timed=timed, **settings)
    for enough in filter(None, map(fitting.dense_keeps, wanted)):
        warn(enough)
    limited = [quantity for budget in wanted for quantity in budget.quantities]
    # Times of another format, or of one device where several are to share the layers, are not shown for points.
    alike = profile is not None and profile.dtype == weights and options.tensor_parallel == 1
    shown = [*ALWAYS_SHOWN, *limited, *shown_times(profile if alike else None)]
    points, failed = _points(fitting, wanted, shown, timed=timed)
    conditions = _conditions(options, fitting, profile) | {f"nothing for {b}": why for b, why in failed.items()}
    with atomic_folder(place, overwrite=overwrite) as work:
        plans = {point.budget: point.winner.plan for point in points}
        for number, budget in enumerate(wanted, start=1):
            if budget in plans:
                write_text(work / f"plan-{number}.json", plans[budget].to_json())
        write_report(sweep_report(points, source.name, conditions), work)
        write_report_manifest(work, {"conditions": conditions, "points": [point.to_dict() for point in points]})
    return points


def _points(
    fitting: Fitting, budgets: Sequence[Budget], shown: Sequence[Quantity], *, timed: bool
) -> tuple[tuple[Fitted, ...], dict[str, str]]:
    """The models of the budgets, and why others have none: hours of a sweep do not go with one of its budgets.

    Raises:
        BudgetError, EngineError: none has a model; the error of the last.
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
    """The longest prompt and the largest batch that a profile knows; sweeps tell them where no time is limited too."""
    known = profile.quantities if profile is not None else ()
    kinds = ([q for q in known if q.kind == kind] for kind in ("prefill", "generation"))
    return tuple(max(some, key=lambda q: (q.batch, q.tokens, -q.prompt)) for some in kinds if some)


def check_devices(
    budgets: Sequence[Budget], options: FitOptions, weights: str | None, engine: str, *, allow: bool
) -> None:
    """Refuse what is run and timed on one device, where several are to share the layers.

    Args:
        budgets: limits.
        options: of the search.
        weights: format that the model is for; None = a dtype.
        engine: that will run it.
        allow: warn where times are limited.

    Raises:
        ConfigError: llama.cpp is to run it, which shares no layers.
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
            f"{text} Limit memory and parameters, or give --allow-mismatch to limit what one device takes."
        )
    warn(f"{text} One device keeps these limits.")


def check_cache(cache: str | Path | None, out: str | Path) -> None:
    """Refuse a cache in a folder that is to be created: what is in it would stand in its way.

    Raises:
        OutputError: it is there.
    """
    place = Path(out).resolve()
    if cache is None or place not in (kept := Path(cache).resolve(), *kept.parents):
        return
    raise OutputError(f"--cache {cache} lies in {out}, which is to be created. Name a folder outside of it.")


def _opened(
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
    """Refuse what cannot be done, then load the model."""
    check_cache(cache, out)
    if timed and profile is not None and any(budget.timed for budget in budgets):
        choose_engine(profile.engine)  # which runs the winners, hours later
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
    """What a report says of how it was made."""
    judged, data = fitting.text["judged"].ids, fitting.text["data"].ids
    some = min(options.try_samples, len(data))
    ranks = options.tensor_parallel
    return {
        "weights": fitting.weights,
        **({"devices": f"{ranks} can share every layer; times are of one"} if ranks > 1 else {}),
        "times predicted by": profile.name if profile else "none; no limit is on times",
        "reconstructed on": f"{some} of {len(data)} x {data.shape[1]} tokens to be compared, on all to be written",
        "judged on": f"{judged.shape[0]} x {judged.shape[1]} tokens of {options.data.source}",
    }


def report_of(out: Path) -> Path:
    """The folder of the report on what was written to ``out``: beside it."""
    return out.with_name(f"{out.name}.report")


def _write_report(out: Path, found: Fitted, model: str, conditions: Mapping[str, str], *, overwrite: bool) -> None:
    with atomic_folder(report_of(out), overwrite=overwrite) as work:
        write_report(fit_report(found, model, conditions), work)
        write_report_manifest(work, found.to_dict())


def write_winner(
    fitting: Fitting,
    found: Fitted,
    out: Path,
    *,
    recover: bool,
    resume: bool = False,
    overwrite: bool = False,
) -> Fitted:
    """Cut the winner once more, reconstruct it, train it, write it and export it; the search's model is released.

    Its record says what was asked and found; where memory is limited, by the weights that were written.
    """
    # By its name a call that is resumed knows the plan that it began with, and refuses another.
    plan = fitting.cache / f"winner-{digest(found.winner.plan.to_dict())[:12]}.json"
    write_text(plan, found.winner.plan.to_json())
    config = winner_config(fitting.options, str(plan), recover=recover, weights=fitting.weights)
    fitting.release()  # the run loads a model of its own
    result = prune_checkpoint(fitting.source, config, out=out, resume=resume, overwrite=overwrite)
    warn_of_other_exports(out, fitting.weights)
    exported = _export(out, fitting.weights, overwrite=overwrite)
    found = _weighed(fitting, found, stored_bytes(exported or out))
    amounts = found.winner.amounts
    facts: dict[str, Any] = {"budget": str(found.budget), "weights": fitting.weights}
    facts |= {str(x): x.written(amounts[x.quantity], found.dense[x.quantity]) for x in found.budget.limits}
    if not fitting.options.keep_multiples:  # which keeps to the user's own
        facts[FITTED_RULES] = asdict(fitting.rules)
    for folder in filter(None, (out, exported)):
        if folder.is_dir():
            annotate_checkpoint(folder, fit=facts)
    return replace(found, out=out, exported=exported, result=result)


def exported_as(out: Path, weights: str) -> Path | None:
    """Where the model of ``out`` is exported in a quantised or GGUF format; None = ``out`` itself has the format."""
    layout = weight_format(weights).layout
    if layout == "plain":
        return None
    return out.with_name(f"{out.name}.{weights}.gguf" if layout == "gguf" else f"{out.name}-{weights}")


def warn_of_other_exports(out: Path, weights: str) -> None:
    """Say which exports beside ``out`` may be of a model that was there before: other formats than this call writes."""
    places = [exported_as(out, name) for name in WEIGHT_FORMATS if name != weights]
    found = [str(place) for place in places if place is not None and place.exists()]
    if found:
        warn(f"{', '.join(found)}: there before this call, and may be of another model than {out} has now.")


def check_export(out: Path, weights: str, *, overwrite: bool) -> None:
    """Refuse an export that cannot be written.

    Args:
        out: the checkpoint.
        weights: see :func:`exported_as`.
        overwrite: replace what is there.

    Raises:
        OutputError: it exists, or there is no place for it.
        MissingDependencyError: the package that writes the format is not installed.
    """
    place = exported_as(out, weights)
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
    """Write a checkpoint in the format of the budget; None where it has that already."""
    place = exported_as(out, weights)
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
        warn(f"{out} is complete; its export is not. Write it with: pyprune export {out} --out {place} {form} "
             f"--quantise {weights}{again}")  # fmt: skip
        raise
    for note in notes:
        say(f"Note: {note}", "yellow")
    return path


def stored_bytes(place: Path) -> int:
    """Bytes of the tensors in a checkpoint folder or a GGUF file, without headers and vocabulary."""
    if place.is_dir():
        return sum(tensor.entry.nbytes for file in weight_files(place) for tensor in read_header(file))
    from gguf import GGUFReader

    return place.stat().st_size - int(GGUFReader(place).data_offset)


def _weighed(fitting: Fitting, found: Fitted, stored: int) -> Fitted:
    """The same with the memory that the written weights and the cache of the limit's contexts take."""
    winner, nothing = found.winner, Quantity("memory", 0)
    limited = [quantity for quantity in found.budget.quantities if quantity.kind == "memory"]
    bare = fitting.costs.predicted(nothing, winner.plan)
    memory = {q: stored + fitting.costs.predicted(q, winner.plan) - bare for q in limited}
    weighed = replace(winner, measured={**winner.measured, **memory})
    for limit in found.budget.broken(weighed.amounts, found.dense):
        if limit.quantity in memory:
            taken = limit.written(memory[limit.quantity], found.dense[limit.quantity])
            warn(f"What was written breaks {limit}: it takes {taken}, more than was counted.")
    attempts = tuple(weighed if attempt == winner else attempt for attempt in found.attempts)
    return replace(found, winner=weighed, attempts=attempts)


def check_needs_profile(budget: Budget, profile: Profile | None) -> None:
    """Refuse limits on times where no profile says what takes how long.

    Raises:
        BudgetError: there are some.
    """
    timed = [str(limit) for limit in budget.limits if limit.quantity in budget.timed]
    if timed and profile is None:
        raise no_profile(", ".join(timed))


def check_counted(config: PretrainedConfig, weights: str, *, budgets: Sequence[Budget], options: FitOptions) -> None:
    """Refuse what no plan keeps of parameters and memory, and text of a length that the model does not read.

    That is before the times of a profile are measured, which takes long.

    Multiples of widths are learnt from the profile: what any of them would keep is not refused here.

    Args:
        config: of the dense model.
        weights: format that memory is counted in.
        budgets: whose limits on times are left aside.
        options: of the search.

    Raises:
        BudgetError: it says which limit cannot be kept and what is nearest.
        DataError: sequences longer than the model's positions.
    """
    counted = [Budget(tuple(x for x in budget.limits if not x.quantity.is_timed)) for budget in budgets]
    check_sequence_length(config, options.data.sequence_length)
    usual = SizeRules.of(weights, tensor_parallel=options.tensor_parallel)
    identity = family_for(config).plan(config)

    def check(budget: Budget, choices: ChoiceOptions) -> None:
        costs = Costs(ExactCosts.of_choices(config, weights, choices, ranks=options.tensor_parallel))
        check_feasible(Space.of(identity, choices).without_losses(), budget, costs, options.solve)

    steps = (usual.ffn_multiple, *(step * options.tensor_parallel for step in MULTIPLES))
    learnt = (replace(usual, ffn_multiple=step, hidden_multiple=1) for step in steps)
    possible = tuple(dict.fromkeys(options.choices_for(rules) for rules in learnt))
    for budget in filter(lambda budget: budget.limits, counted):
        refused: list[BudgetError] = []
        for choices in possible:
            try:
                check(budget, choices)
                break
            except BudgetError as error:
                refused.append(error)
        else:
            raise refused[0]


def check_same_format(budget: Budget, profile: Profile | None, weights: str, *, allow: bool) -> None:
    """Refuse limits on times of weights that the profile did not run.

    Args:
        budget: limits.
        profile: what is known of times.
        weights: format that the model is for.
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
            f"{text} {measure if engine else f'What {weights} takes is not measured. Give'} --allow-mismatch to limit "
            f"the times of {profile.dtype} instead."
        )
    warn(f"{text} They are predicted and measured in {profile.dtype}.")


def cache_of(out: Path) -> Path:
    """Where what was measured for an output is kept: beside it."""
    return out.with_name(f"{out.name}.fit")
