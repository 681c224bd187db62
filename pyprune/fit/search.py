"""Search the best model for any number of budgets; scores, block losses and judged candidates are measured once.

A search solves for the widths of all layers and tries the best few solutions: cut, reconstructed, judged on text that
nothing was fitted to. If times are limited, it runs the best one in turns with the dense model, and the measured times
correct the predictions of the next search.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from pyprune.checkpoint.load import ModelSource
from pyprune.checkpoint.tokenizer import no_tokenizer
from pyprune.checkpoint.tower import tower_of
from pyprune.data.sampling import TokenSamples, split_disjoint
from pyprune.data.sources import look_up_samples
from pyprune.data.stream import check_sequence_length, position_limit
from pyprune.data.tokens import Batch
from pyprune.errors import BudgetError, ConfigError, PypruneError, UnsupportedModelError
from pyprune.families import begins_with_bos, family_for
from pyprune.families.base import closed_obstacle
from pyprune.fit.attempts import Attempt, Tries
from pyprune.fit.choices import ChoiceOptions, Obstacle, Routers, Search, Space, UnitScores
from pyprune.fit.cost import Costs, ExactCosts, common_multiple
from pyprune.fit.formats import weight_format
from pyprune.fit.limits import Budget, Limit
from pyprune.fit.measured import MeasuredCosts
from pyprune.fit.options import FitOptions
from pyprune.fit.profile import DENSE, Profile
from pyprune.fit.profiling.probes import engine_obstacle
from pyprune.fit.quantities import Quantity
from pyprune.fit.sizes import SizeRules
from pyprune.fit.solve import Solution, SolveOptions, check_feasible, plan_of, solve
from pyprune.fit.time_winner import time_plans, time_winner
from pyprune.fit.trials import measure_losses, score_units
from pyprune.fit.values import search_of
from pyprune.plan import PrunePlan
from pyprune.run.result import PruneResult
from pyprune.runtime.device import empty_cache, park
from pyprune.runtime.progress import say, warn
from pyprune.runtime.records import RecordFile, digest
from pyprune.serving.engines import EngineError
from pyprune.serving.gguf.tokenizer import read_tokenizer
from pyprune.serving.quantise import quantising_obstacle
from pyprune.serving.speed.results import SpeedReport
from pyprune.serving.widths import group_obstacle, split_obstacle

CANDIDATE = "candidate"
_ROUNDING = 1e-9
"""Share by which a sum of predictions may exceed the bound that it was solved for."""


@dataclass(frozen=True)
class Fitted:
    """The result for one budget.

    Attributes:
        budget: the limits.
        winner: the best candidate that keeps it.
        attempts: every candidate that was tried, the best first; those that broke a limit when timed are among them.
        dense: the dense model's amounts of all limited or requested quantities: counted, predicted, or measured.
        dense_perplexities: of the dense model on the judged text, by kind.
        searches: number of times that the programme was solved.
        out: the written checkpoint; None = none.
        exported: the export in the format of the budget, if that is a quantised or GGUF one.
        result: of the run that wrote it.
        speed: of the written model and the dense model; None = not measured.
        not_run: why the speed is missing; "" = it was not to be measured.
        predicted_dense: predictions of ``dense``.
    """

    budget: Budget
    winner: Attempt
    attempts: tuple[Attempt, ...]
    dense: Mapping[Quantity, float]
    dense_perplexities: Mapping[str, float]
    searches: int
    out: Path | None = None
    exported: Path | None = None
    result: PruneResult | None = None
    speed: SpeedReport | None = None
    not_run: str = ""
    predicted_dense: Mapping[Quantity, float] = field(default_factory=dict)

    def amounts_of(self, attempt: Attempt) -> dict[Quantity, float]:
        """Return a candidate's amounts, comparable with other candidates and with ``dense``.

        Measured amounts if it was timed. Else predictions, times the ratio of the dense model's measured seconds to its
        predicted ones: the machine may be slower now than when its profile was made.
        """
        rates = {quantity: self.dense[quantity] / amount for quantity, amount in self.predicted_dense.items()}
        predicted = attempt.solution.predicted.items()
        return {**{q: amount * rates.get(q, 1) for q, amount in predicted}, **attempt.measured}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "budget": str(self.budget),
            "winner": self.winner.to_dict(),
            "attempts": [attempt.to_dict() for attempt in self.attempts],
            "dense": {str(quantity): amount for quantity, amount in self.dense.items()},
            "predicted_dense": {str(quantity): amount for quantity, amount in self.predicted_dense.items()},
            "dense_perplexities": dict(self.dense_perplexities),
            "searches": self.searches,
            "out": str(self.out) if self.out else None,
            "exported": str(self.exported) if self.exported else None,
            "speed": self.speed.to_dict() if self.speed else None,
            "not_run": self.not_run,
        }


@dataclass
class Fitting:
    """A dense model and the measurements that all budgets share.

    Attributes:
        source: of the dense model.
        model: dense, loaded; is not changed, until :meth:`release`.
        tokenizer: of the model.
        options: of the search.
        weights: format that memory is counted in, and that engines run: a dtype, or a quantised or GGUF format.
        profile: of this machine; None = times cannot be limited.
        cache: folder for the measurements.
        continued: continue an interrupted search: reuse its times, or another candidate might win.
    """

    source: ModelSource
    model: PreTrainedModel
    tokenizer: Any
    options: FitOptions
    weights: str
    profile: Profile | None
    cache: Path
    continued: bool = False

    @classmethod
    def of(
        cls,
        model: str | Path | ModelSource,
        *,
        cache: Path,
        options: FitOptions = FitOptions(),  # noqa: B008 - frozen
        weights: str = "bfloat16",
        profile: Profile | None = None,
        allow_mismatch: bool = False,
    ) -> Fitting:
        """Load the model.

        Args:
            model: folder or hub id of a dense model.
            cache: folder for the measurements; made when needed.
            options: of the search.
            weights: a name in :data:`pyprune.fit.formats.WEIGHT_FORMATS`.
            profile: see :class:`Fitting`; it must be of this model's sizes.
            allow_mismatch: use a profile of other conditions, with a warning.

        Raises:
            ConfigError: invalid options.
            BudgetError: the profile is of other sizes.
            CheckpointError: the model cannot be loaded.
            UnsupportedModelError: an unknown family, or a model that the target engine cannot run.
            ConfigError: devices that cannot share its layers, see :meth:`check_shared`.
        """
        options.validate()
        look_up_samples([options.data])
        source = ModelSource.of(model)
        _ = source.version  # of the files that are about to be loaded
        loaded, tokenizer = source.load(dtype=options.dtype, device=options.device)
        if tower_of(loaded):
            raise UnsupportedModelError(
                f"{source} is a multimodal model, and sizes that fit a budget are searched for text models alone. "
                "Prune it with a ratio: pyprune prune MODEL --method wanda --uniform --ratio 0.25."
            )
        if tokenizer is None:
            raise no_tokenizer(source.name)
        fitting = cls(source, loaded, tokenizer, options, weights, profile, cache)
        if profile is not None:
            profile.check(fitting.identity, allow=allow_mismatch)
        fitting.check_shared()
        if reason := fitting.obstacle(fitting.identity):
            raise UnsupportedModelError(f"{reason} Choose another format of the weights, or another engine.")
        if weight_format(weights).layout == "gguf":
            read_tokenizer(tokenizer, fitting.identity.dense.vocab_size)
        return fitting

    def release(self) -> None:
        """Release the model's weights. Results remain available; no further search is possible."""
        model: torch.nn.Module = self.model  # whose `to` Transformers types otherwise
        model.to("meta")
        empty_cache()

    def check_shared(self) -> None:
        """Refuse devices that cannot share the dense layers: any layer may remain unchanged.

        Raises:
            ConfigError: the dense widths are no multiples of ``tensor_parallel``, or leave a device parts of groups.
        """
        ranks = self.options.tensor_parallel
        reason = split_obstacle([layer.widths for layer in self.identity.layers], ranks)
        if reason := reason or self._shared_obstacle(self.identity):
            raise ConfigError(f"tensor_parallel is {ranks}, and layers may remain unchanged: {reason}")

    @cached_property
    def identity(self) -> PrunePlan:
        """The plan that removes nothing."""
        return family_for(self.model).plan(self.model.config)

    @cached_property
    def costs(self) -> Costs:
        """Counts parameters and bytes, and predicts times with a profile."""
        measured = MeasuredCosts(self.profile) if self.profile is not None else None
        ranks = self.options.tensor_parallel
        return Costs(ExactCosts.of(self.model.config, self.weights, choices=self.choices, ranks=ranks), measured)

    @cached_property
    def dense_costs(self) -> Costs:
        """Costs of the dense model, whose groups of scales in w4a16 may be larger than most plans allow."""
        exact = ExactCosts.of(self.model.config, self.weights, ranks=self.options.tensor_parallel)
        return replace(self.costs, exact=exact)

    @cached_property
    def choices(self) -> ChoiceOptions:
        """The choices of layers, in the multiples that run well unless the options keep their own."""
        return self.options.choices_for(self.rules)

    @cached_property
    def obstacle(self) -> Obstacle:
        """(plan) -> why the model, the profile's engine, llama.cpp or a format cannot hold it; None = all can."""
        engines = [self.profile.engine] if self.profile is not None else []
        layout = weight_format(self.weights).layout
        if layout == "gguf":
            engines.append("llamacpp")
        config, family = self.model.config, family_for(self.model)

        def closed(plan: PrunePlan) -> str | None:
            reason = closed_obstacle(plan, family, config)
            return f"They cut {reason}." if reason else None

        rules: list[Obstacle] = [closed]
        rules += [engine_obstacle(config, engine) for engine in dict.fromkeys(engines)]
        if layout in ("channel", "packed"):
            rules += [lambda plan: quantising_obstacle(plan, self.weights), self._shared_obstacle]
        if "experts" in self.identity.dense.axes:
            rules.append(lambda plan: family.plan_obstacle(config, plan))
            # Of mixtures vLLM builds whole layers, whatever engine is measured.
            rules += [engine_obstacle(config, "vllm")] if family.served_by and not engines else []
        return lambda plan: next(filter(None, (rule(plan) for rule in rules)), None)

    def _shared_obstacle(self, plan: PrunePlan) -> str | None:
        """Return why devices cannot share a plan with the groups of scales of its export; None = they can."""
        if self.options.tensor_parallel < 2:
            return None
        group = weight_format(self.weights).choose_group((common_multiple(plan),)).group
        widths = [layer.widths for layer in plan.layers]
        return group_obstacle(widths, plan.dense.head_dim, group, self.options.tensor_parallel)

    @cached_property
    def rules(self) -> SizeRules:
        """Rules for widths that run well: of the profile if it ran these weights, else the format's defaults."""
        ranks = self.options.tensor_parallel
        if self.profile is not None and self.profile.dtype == self.weights:
            return SizeRules.learn(self.profile, tensor_parallel=ranks)
        return SizeRules.of(self.weights, tensor_parallel=ranks)

    @cached_property
    def text(self) -> dict[str, TokenSamples]:
        """The texts by their use; see :meth:`FitOptions.texts`."""
        config = self.model.config
        check_sequence_length(config, self.options.data.sequence_length)
        texts = self.options.texts(position_limit(config))
        return split_disjoint(self.tokenizer, texts, bos=begins_with_bos(config))

    @cached_property
    def scores(self) -> UnitScores:
        """The scores of all units, from the cache if they are there."""
        o = self.options
        samples = _pick_evenly(self.text["valued"], o.score_samples)
        experts = "experts" in self.identity.dense.axes
        key = digest(
            [self.source.version, o.dtype, samples.digest(), bool(o.choices.hidden), "scores", *["experts"] * experts]
        )
        records = self._records("scores")
        record = records.of("scores").get(key)
        if record is None:
            say(f"Scoring heads{',' if experts else ' and'} FFN channels{' and experts' if experts else ''}.")
            scores = score_units(self.model, samples.ids, hidden=bool(o.choices.hidden))
            record = records.add({"kind": "scores", "key": key, "scores": scores.to_dict()})
        return UnitScores.from_dict(record["scores"], self.identity.dense)

    def _records(self, kind: str) -> RecordFile:
        """Open the records of a kind in the cache."""
        return RecordFile(self.cache / f"{kind}.jsonl", program="pyprune fit", option="--cache")

    @cached_property
    def space(self) -> Space:
        """The choices of every layer that the target engine can run."""
        routers = Routers.of(self.model.config, self.identity.dense)
        every, reasons = Space.of(self.identity, self.choices, routers), list[str]()

        def obstacle(plan: PrunePlan) -> str | None:
            reason = self.obstacle(plan)
            reasons.extend([reason] if reason else [])
            return reason

        space = every.drop_impossible(obstacle)
        if space != every and reasons:  # a model's only layer is kept without a reason
            say(f"Some choices are left out. {reasons[0]}")
        return space

    def dense_amounts(self, quantities: Iterable[Quantity]) -> dict[Quantity, float]:
        """Count or predict the dense model's amounts, in its own export.

        Raises:
            BudgetError: a time, without a profile or outside of what the profile measured.
        """
        return {quantity: self.dense_costs.predict(quantity, self.identity) for quantity in quantities}

    def search_budget(self, budget: Budget) -> Budget:
        """Turn shares of the dense model into bytes if the search counts that model differently from its export."""
        limits = []
        for limit in budget.limits:
            exported, counted = (c.predict(limit.quantity, self.identity) for c in (self.dense_costs, self.costs))
            limits.append(limit if exported == counted else limit.absolute(exported))
        return Budget(tuple(limits))

    def check(self, budget: Budget) -> None:
        """Refuse a budget that no plan keeps, before anything is measured.

        Args:
            budget: limits.

        Raises:
            BudgetError: names the limit that cannot be kept and the nearest one that can, or a missing profile.
        """
        check_feasible(self.space.zero_losses(), self.search_budget(budget), self.costs, self._solve_options)

    def budget_obstacle(self, budget: Budget) -> str | None:
        """Return why a budget needs no pruning (the dense model keeps it); None = it does."""
        dense = self.dense_amounts(budget.quantities)
        if budget.broken(dense, dense):
            return None
        taken = ", ".join(limit.write(dense[limit.quantity], dense[limit.quantity]) for limit in budget.limits)
        return f"The dense model already keeps {budget} (it takes {taken}): nothing needs to be removed."

    @cached_property
    def search(self) -> Search:
        """The choices of every layer with their losses, measured or read from the cache."""
        o = self.options
        losses = measure_losses(
            self.model,
            self.space,
            self.scores,
            _pick_evenly(self.text["valued"], o.value_samples),
            o.values,
            path=self.cache / "block-losses.jsonl",
            model_id=self.source.version,
        )
        if losses.reused:
            say(f"{losses.reused} of {len(losses.entries)} losses of single blocks were measured before.")
        return search_of(losses, self.scores, self.space)

    @property
    def _solve_options(self) -> SolveOptions:
        return replace(self.options.solve, head_pairs=self.options.solve.head_pairs or self.rules.max_head_pairs)

    @cached_property
    def tries(self) -> Tries:
        """Reconstructs candidates on a part of the text, and judges them."""
        return Tries(
            self.model,
            _pick_evenly(self.text["data"], self.options.try_samples),
            self.text["judged"],
            self.options.reconstruct,
            path=self.cache / "attempts.jsonl",
            identity={"model": self.source.version, "dtype": self.options.dtype},
        )

    @cached_property
    def dense_perplexities(self) -> dict[str, float]:
        """Perplexities of the dense model on the judged text, by kind."""
        return self.tries.judge(self.identity)[0]

    def solutions(self, budget: Budget, factors: Mapping[Quantity, float] | None = None) -> tuple[Solution, ...]:
        """Find the best solutions of a budget, the smallest predicted loss first.

        Args:
            budget: limits.
            factors: measured over predicted times of earlier candidates, by which predictions are multiplied.

        Raises:
            BudgetError: no plan keeps it, it limits times without a profile, or the target engine can run none of the
                solutions.
        """
        solutions = solve(self.search, budget, replace(self.costs, factors=factors or {}), self._solve_options)
        reasons = [self.obstacle(plan_of(solution, self.search, self.scores)) for solution in solutions]
        possible = tuple(solution for solution, reason in zip(solutions, reasons, strict=True) if not reason)
        if not possible:
            raise BudgetError(
                f"None of the {len(solutions)} best solutions of {budget} can be run: {reasons[0]} Ask for more of "
                "them (--set solve.solutions=20), or for fewer kinds of cuts (--set choices.skips=[])."
            )
        return possible

    def try_solution(self, solution: Solution, quantities: Iterable[Quantity]) -> Attempt:
        """Cut and reconstruct a solution and judge it, and predict these quantities."""
        plan = plan_of(solution, self.search, self.scores)
        perplexities, parameters = self.tries.judge(plan)
        amounts = {quantity: self.costs.predict(quantity, plan) for quantity in quantities}
        return Attempt(replace(solution, predicted=amounts), plan, parameters, perplexities)

    def fit(self, budget: Budget, *, timed: bool = True, also: Iterable[Quantity] = ()) -> Fitted:
        """Find the best model that keeps a budget.

        Args:
            budget: limits.
            timed: run the winner if times are limited, and search again if it breaks a limit or leaves much of it
                unused; False trusts the predictions.
            also: quantities that are not limited but reported of every candidate.

        Raises:
            BudgetError: no plan keeps the budget, or no timed candidate did.
        """
        dense = self.dense_amounts(dict.fromkeys([*budget.quantities, *also]))
        state = SearchState(budget, dense, self.search_budget(budget), predicted=dense)
        profile = self.profile if timed and budget.timed else None
        for _ in range(self.options.rounds):
            try:
                best = self._round(state)
                if profile is None:
                    return self._result(state, best)
                if best.measured:  # no larger candidate is better than one that was timed
                    break
                best = state.keep(self._time(best, budget.timed, profile))
            except (BudgetError, EngineError) as error:
                if not self._within(state):
                    raise
                warn(f"The search for a larger candidate ended: {error}")
                break
            if self._uses_up(state, best):
                break
            state.learn(best)
        if kept := self._within(state):
            return self._result(state, min(kept, key=lambda attempt: attempt.loss))
        raise BudgetError(
            f"None of the best candidates of {state.searches} searches kept {budget} when it was timed; the last one "
            f"took {state.taken(best)}. The machine may be busy, or the profile old: measure it again, or raise rounds "
            "or slack."
        )

    def _within(self, state: SearchState) -> list[Attempt]:
        """Return the timed candidates that keep the budget."""
        return [x for x in state.attempts.values() if x.measured and not self._broken(state, x)]

    def _broken(self, state: SearchState, attempt: Attempt) -> tuple[Limit, ...]:
        """Return the limits that a candidate breaks by more than the machine's noise."""
        return state.budget.broken(attempt.amounts, state.dense | attempt.dense, self.options.slack)

    def _uses_up(self, state: SearchState, attempt: Attempt) -> bool:
        """Check whether a timed candidate keeps the budget and leaves little of it; else report the reason."""
        broken = self._broken(state, attempt)
        room = state.budget.room(attempt.amounts, state.dense)
        if not broken and room <= self.options.spare:
            return True
        what = f"breaks {', '.join(map(str, broken))}" if broken else f"leaves {room:.1%} of the tightest limit unused"
        again = "Searching again with that." if state.searches < self.options.rounds else ""
        say(f"Measured, the best candidate {what}: it takes {state.taken(attempt)}. {again}".rstrip())
        return False

    def run_winner(self, fitted: Fitted, written: Path, engine: str = "auto") -> Fitted:
        """Measure the speed of the written model, or note why it cannot be run here.

        Args:
            fitted: result for a budget.
            written: checkpoint folder or GGUF file; the search's model was released before it was written.
            engine: runs it if there is no profile.
        """
        say("Timing the written model and the dense model.")
        empty_cache()  # of the training: vLLM needs its share of a GPU
        try:
            speed = time_winner(
                self.source, self.model.config, written, self.weights, self.profile,
                engine=engine, repeats=self.options.repeats, tokenizer=self.tokenizer,
            )  # fmt: skip
        except (PypruneError, OSError) as error:
            warn(f"{written} was not timed. {error}")  # it is complete and keeps its budget
            return replace(fitted, not_run=str(error))
        return replace(fitted, speed=speed)

    def _round(self, state: SearchState) -> Attempt:
        """Search once, try the solutions, and return the best candidate so far.

        After a candidate was timed, only its kind of solution is tried again. Its size changes little, so that the
        other kinds would lose again, and each costs a reconstruction.
        """
        state.searches += 1
        solutions = self.solutions(state.asked, state.factors)
        alike = [solution for solution in solutions if solution.variant == state.variant][:1]
        for solution in alike or solutions:
            attempt = state.keep(self.try_solution(solution, state.dense))
            say(f"{attempt.plan.summary()}: perplexity {attempt.perplexity:.2f} before training.")
        return self.best_attempt(state)

    def _time(self, attempt: Attempt, quantities: Sequence[Quantity], profile: Profile) -> Attempt:
        """Run a candidate in turns with the dense model, or read the times of an interrupted search."""
        what = [self.source.version, profile.to_json(), attempt.plan.to_dict(), list(map(str, quantities))]
        key = digest([*what, self.options.repeats])
        records = self._records("times")
        record = records.of("times").get(key) if self.continued else None
        if record is None:
            plans = {DENSE: self.identity, CANDIDATE: attempt.plan}
            with park(self.model, self.model.device):
                times = time_plans(profile, self.model.config, plans, quantities, self.options.repeats, self.tokenizer)
            seconds = {name: {str(q): each[q] for q in quantities} for name, each in times.items()}
            record = records.add({"kind": "times", "key": key, "seconds": seconds})
        candidate, dense = (
            {q: float(record["seconds"][name][str(q)]) for q in quantities} for name in (CANDIDATE, DENSE)
        )
        return replace(attempt, measured=candidate, dense=dense)

    def best_attempt(self, state: SearchState) -> Attempt:
        """Return the candidate of the smallest loss among those that keep the budget by the current predictions."""
        costs = replace(self.costs, factors=state.factors)
        dense = state.asked.dense(costs, self.identity)

        def keeps(attempt: Attempt) -> bool:
            amounts = {q: costs.predict(q, attempt.plan) for q in state.asked.quantities}
            return not state.asked.broken(amounts, dense, _ROUNDING)

        return min(filter(keeps, state.attempts.values()), key=lambda attempt: attempt.loss)

    def _result(self, state: SearchState, winner: Attempt) -> Fitted:
        order = tuple(sorted(state.attempts.values(), key=lambda attempt: attempt.loss))
        dense = state.dense | winner.dense  # of the winner's own turns, if it was timed
        return Fitted(
            state.budget, winner, order, dense, self.dense_perplexities, state.searches, predicted_dense=state.predicted
        )


@dataclass
class SearchState:
    """The state of the searches for one budget.

    Attributes:
        budget: as written.
        dense: the dense model's amounts: predicted, then measured.
        asked: the budget of the next search; without relative limits once the dense model was timed.
        predicted: the dense model's predicted amounts.
        factors: measured over predicted times of the timed candidates, by which predictions are multiplied.
        attempts: by the digest of the plan.
        searches: number of times that the programme was solved.
        variant: of the solution that was timed last; "" = none was.
    """

    budget: Budget
    dense: dict[Quantity, float]
    asked: Budget
    predicted: Mapping[Quantity, float]
    factors: dict[Quantity, float] = field(default_factory=dict)
    attempts: dict[str, Attempt] = field(default_factory=dict)
    searches: int = 0
    variant: str = ""

    def keep(self, attempt: Attempt) -> Attempt:
        """Remember a candidate; measured times replace its entry without them."""
        key = digest(attempt.plan.to_dict())
        if attempt.measured or key not in self.attempts:
            self.attempts[key] = attempt
        self.dense = self.dense | attempt.dense
        return self.attempts[key]

    def taken(self, attempt: Attempt) -> str:
        """Write a candidate's amounts of all limited quantities, in the units of the limits."""
        limits = self.budget.limits
        return ", ".join(x.write(attempt.amounts[x.quantity], self.dense[x.quantity]) for x in limits)

    def learn(self, attempt: Attempt) -> None:
        """Correct the predictions by all timed candidates, of which this is the last one."""
        self.variant = attempt.solution.variant
        self.asked = self.budget.absolute(self.dense)
        self.factors |= {quantity: self._factor(quantity) for quantity in attempt.measured}

    def _factor(self, quantity: Quantity) -> float:
        """Return the factor of predictions.

        Between a candidate that exceeds the limit and one that keeps it, measured times are taken to grow linearly with
        predictions. If all candidates are on one side, the factor is the largest ratio of the two.
        """
        bound, dense = self.asked.bounds(self.dense)[quantity], self.dense[quantity]
        timed = [attempt for attempt in self.attempts.values() if quantity in attempt.measured]
        # Relative to the dense model in the same turns: the machine may have become slower or faster since.
        taken = [(a.solution.predicted[quantity], a.measured[quantity] * dense / a.dense[quantity]) for a in timed]
        kept = max((pair for pair in taken if pair[1] <= bound), default=(0.0, 0.0))
        beyond = min((pair for pair in taken if pair[1] > bound), default=kept)
        if 0 < kept[0] < beyond[0]:
            share = (bound - kept[1]) / (beyond[1] - kept[1])
            return bound / (kept[0] + share * (beyond[0] - kept[0]))
        return max(measured / predicted for predicted, measured in taken)


def _pick_evenly(samples: TokenSamples, count: int) -> Batch:
    """Pick ``count`` sequences, evenly spread over all of them and over their kinds."""
    by_kind = torch.cat(list(samples.rows_by_kind().values()))
    rows = torch.linspace(0, len(samples) - 1, min(count, len(samples))).round().long()
    return samples[by_kind[rows]]
