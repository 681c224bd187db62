"""From a budget to a checkpoint, and from several budgets to the models they allow.

    what the units are worth     methods/score        which of them go at a width
    what each block loses        budget/trials        one block changed and reconstructed, the loss measured
    widths of all layers         budget/solve         a mixed-integer programme within the limits
    the best few for real        budget/attempts      cut, reconstructed, judged on text of their own
    the winner timed             budget/turns         beside the dense model; beyond a limit, back to the search
    the winner written           pipeline             reconstructed, trained, saved with its plan

Scores, losses of single blocks and judged candidates are kept in a folder beside the output, each under the identity of
what it was measured on, so that another budget for the same model costs seconds of search and the new candidates alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyprune.budget.cost import no_profile
from pyprune.budget.limits import Budget
from pyprune.budget.options import FitOptions, winner_config
from pyprune.budget.profile import Profile
from pyprune.budget.quantities import Quantity
from pyprune.checkpoint.record import annotate_checkpoint
from pyprune.errors import BudgetError
from pyprune.fitting.report import sweep_report
from pyprune.fitting.search import Fitted, Fitting
from pyprune.pipeline import prune
from pyprune.report import write_report
from pyprune.run_memory import Source, within_memory
from pyprune.runtime.files import atomic_folder, check_output, write_report_manifest, write_text


def fit(
    model_id: str | Path,
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
    overwrite: bool = False,
    **reading: Any,
) -> Fitted:
    """Find the best model that keeps a budget, and write it as a checkpoint folder.

    Args:
        model_id: folder or hub id of a dense model.
        budget: such as "memory=120MB, prefill@2048<=900ms" (:mod:`pyprune.budget.limits`).
        out: the folder to create.
        options: of the search.
        weights: format that memory is counted in: a dtype, or a quantised or GGUF format.
        profile: what this machine takes (:func:`pyprune.budget.timing.take_profile`); needed for limits on times.
        allow_mismatch: use a profile of another machine or version in spite of that.
        cache: folder for scores, losses and judged candidates; None = ``out`` with ".fit" behind it.
        recover: train the winner, as the methods' defaults do.
        timed: run the winner where times are limited.
        overwrite: replace an existing ``out``.
        reading: gguf_file, revision, trust_remote_code.

    Raises:
        BudgetError: the budget cannot be read or kept, or needs a profile.
        PypruneError: whatever stops a stage; nothing is left at ``out``.
    """
    wanted = budget if isinstance(budget, Budget) else Budget.parse(budget)
    place = Path(out)
    settings: dict[str, Any] = {"weights": weights, "allow_mismatch": allow_mismatch, **reading}
    if recover:  # what cannot be trained is refused before the search, which takes hours
        within_memory(Source(model_id, reading), winner_config(options, "", recover=True))
    fitting = _opened(model_id, [wanted], place, options, profile, cache, overwrite=overwrite, **settings)
    found = fitting.fit(wanted, timed=timed)
    return write_winner(fitting, found, place, recover=recover, overwrite=overwrite, **reading)


def sweep(
    model_id: str | Path,
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
    **reading: Any,
) -> tuple[Fitted, ...]:
    """Find the best model for each of several budgets with one scoring, and write the plans and a report.

    Args:
        model_id: folder or hub id of a dense model.
        budgets: each with one limit or more.
        out: the folder to create: plan-1.json and so on in the order of the budgets, report.md and report.html.
        options: of the search.
        weights: see :func:`fit`.
        profile: see :func:`fit`.
        allow_mismatch: see :func:`fit`.
        cache: see :func:`fit`.
        timed: run the winners whose times are limited.
        overwrite: replace an existing ``out``.
        reading: gguf_file, revision, trust_remote_code.

    Raises:
        BudgetError: a budget that cannot be read or kept (before anything is written).
        PypruneError: whatever stops a stage; nothing is left at ``out``.
    """
    wanted = [b if isinstance(b, Budget) else Budget.parse(b) for b in budgets]
    if not wanted:
        raise BudgetError("A sweep needs at least one budget, such as parameters=100M.")
    place = Path(out)
    settings: dict[str, Any] = {"weights": weights, "allow_mismatch": allow_mismatch, **reading}
    fitting = _opened(model_id, wanted, place, options, profile, cache, overwrite=overwrite, **settings)
    every = [quantity for budget in wanted for quantity in budget.quantities]
    points = tuple(fitting.fit(budget, timed=timed, also=[Quantity("parameters"), *every]) for budget in wanted)
    conditions = {
        "weights": weights,
        "engine": f"{profile.engine}, {profile.dtype}" if profile else "none; nothing was timed",
        "judged on": f"{options.judge_samples} x {fitting.text['judged'].ids.shape[1]} tokens of {options.data.source}",
    }
    with atomic_folder(place, overwrite=overwrite) as work:
        for number, point in enumerate(points, start=1):
            write_text(work / f"plan-{number}.json", point.winner.plan.to_json())
        write_report(sweep_report(points, str(model_id), conditions), work)
        write_report_manifest(work, {"conditions": conditions, "points": [point.to_dict() for point in points]})
    return points


def _opened(
    model_id: str | Path,
    budgets: Sequence[Budget],
    out: Path,
    options: FitOptions,
    profile: Profile | None,
    cache: str | Path | None,
    *,
    overwrite: bool,
    **settings: Any,
) -> Fitting:
    """Refuse what cannot be done or written, then load the model."""
    for budget in budgets:
        check_needs_profile(budget, profile)
    check_output(out, overwrite=overwrite, reads=[model_id, *options.data.sources])
    kept = Path(cache) if cache is not None else cache_of(out)
    return Fitting.of(model_id, cache=kept, options=options, profile=profile, **settings)


def write_winner(
    fitting: Fitting, found: Fitted, out: Path, *, recover: bool, overwrite: bool = False, **reading: Any
) -> Fitted:
    """Cut the winner once more, reconstruct it, train it and write it; its record says what was asked and found."""
    plan = fitting.cache / "winner.json"
    write_text(plan, found.winner.plan.to_json())
    config = winner_config(fitting.options, str(plan), recover=recover)
    result = prune(fitting.model_id, config, out=out, overwrite=overwrite, **reading)
    amounts = found.winner.amounts
    facts = {str(x): x.written(amounts[x.quantity], found.dense[x.quantity]) for x in found.budget.limits}
    annotate_checkpoint(out, fit={"budget": str(found.budget), **facts})
    return replace(found, out=out, result=result)


def check_needs_profile(budget: Budget, profile: Profile | None) -> None:
    """Refuse limits on times where no profile says what takes how long.

    Raises:
        BudgetError: there are some.
    """
    timed = [str(limit) for limit in budget.limits if limit.quantity in budget.timed]
    if timed and profile is None:
        raise no_profile(", ".join(timed))


def cache_of(out: Path) -> Path:
    """Where what was measured for an output is kept: beside it."""
    return out.with_name(f"{out.name}.fit")
