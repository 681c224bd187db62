"""One dense model, any number of budgets: scores, block losses and judged candidates are measured once and kept.

A search solves for the widths of all layers, tries the best few solutions for real (cut, reconstructed, judged on text
that nothing was fitted to) and, where times are limited, runs the best one beside the dense model; what it took
corrects the predictions of the next search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from pyprune.checkpoint.load import ModelSource
from pyprune.checkpoint.tokenizer import no_tokenizer
from pyprune.data.sampling import TokenSamples, split_disjoint
from pyprune.data.sources import look_up_samples
from pyprune.data.stream import check_sequence_length, position_limit
from pyprune.data.tokens import Batch
from pyprune.errors import BudgetError, ConfigError, PypruneError, UnsupportedModelError
from pyprune.families import begins_with_bos, family_for
from pyprune.fit.attempts import Attempt, Corrected, Tries
from pyprune.fit.choices import ChoiceOptions, Search, Space, UnitScores
from pyprune.fit.cost import Costs, ExactCosts, common_multiple
from pyprune.fit.formats import weight_format
from pyprune.fit.limits import Budget, Limit
from pyprune.fit.measured import MeasuredCosts
from pyprune.fit.options import FitOptions
from pyprune.fit.profile import DENSE, Profile
from pyprune.fit.profiling.probes import refusals
from pyprune.fit.quantities import Quantity, predicted
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
"""Share by which a sum of predictions may miss the bound that it was solved for."""


@dataclass(frozen=True)
class Fitted:
    """What came out for one budget.

    Attributes:
        budget: what was asked.
        winner: the best candidate that keeps it.
        attempts: every candidate that was tried, the best first; those that broke a limit when timed are among them.
        dense: what the dense model takes of everything that is limited or was asked for: counted, predicted, or
            measured where it was timed.
        dense_perplexities: of the dense model on the judged text, by kind.
        searches: how often the programme was solved.
        out: the written checkpoint; None = nothing was written.
        exported: the same in the format of the budget, where that is a quantised or GGUF one.
        result: of the run that wrote it.
        speed: of what was written, beside the dense model; None = it was not run.
        not_run: why it was not, where it should have been.
        predicted_dense: what the dense model was predicted to take of ``dense``; the same where it was not timed.
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
        """What a candidate takes, to be compared with other candidates and with ``dense``.

        Measured where it was timed. Else predicted, times the ratio of the dense model's seconds to what was predicted
        of it: the machine may be slower today than when its profile was made.
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
    """A dense model and everything that is measured of it once, whatever the budgets are.

    Attributes:
        source: of the dense model.
        model: dense, loaded; comes back as it was, until :meth:`release`.
        tokenizer: of the model.
        options: of the search.
        weights: format that memory is counted in, and that engines run: a dtype, or a quantised or GGUF format.
        profile: of this machine; None = no limit on times can be kept.
        cache: folder for what is measured.
        continued: an interrupted search goes on: what it timed is not timed again, or another candidate might win.
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
            cache: folder for what is measured; made when needed.
            options: of the search.
            weights: a name in :data:`pyprune.fit.formats.WEIGHT_FORMATS`.
            profile: see :class:`Fitting`; it must be of this model's sizes.
            allow_mismatch: use it in spite of other conditions, with a warning.

        Raises:
            ConfigError: invalid options.
            BudgetError: the profile is of other sizes.
            CheckpointError: the model cannot be loaded.
            UnsupportedModelError: pyprune does not know its family, or what is to run it has no place for it.
            ConfigError: devices that cannot share its layers, see :meth:`check_shared`.
        """
        options.validate()
        look_up_samples([options.data])
        source = ModelSource.of(model)
        _ = source.version  # of the files that are about to be loaded
        loaded, tokenizer = source.load(dtype=options.dtype, device=options.device)
        if tokenizer is None:
            raise no_tokenizer(source.name)
        found = cls(source, loaded, tokenizer, options, weights, profile, cache)
        if profile is not None:
            profile.check(found.identity, allow=allow_mismatch)
        found.check_shared()
        reason = found.why_not(found.identity)
        if reason:
            raise UnsupportedModelError(f"{reason} Choose another format of the weights, or another engine.")
        if weight_format(weights).layout == "gguf":
            read_tokenizer(tokenizer, found.identity.dense.vocab_size)
        return found

    def release(self) -> None:
        """Give the memory of the weights back: what the search found can be told and written, nothing more searched."""
        model: torch.nn.Module = self.model  # whose `to` Transformers types otherwise
        model.to("meta")
        empty_cache()

    def check_shared(self) -> None:
        """Refuse devices that cannot share a layer that stays as it is: every layer may.

        Raises:
            ConfigError: the dense widths are no multiples of ``tensor_parallel``, or leave a device parts of groups.
        """
        ranks = self.options.tensor_parallel
        reason = split_obstacle([layer.widths for layer in self.identity.layers], ranks)
        reason = reason or self._why_not_shared(self.identity)
        if reason:
            raise ConfigError(f"tensor_parallel is {ranks}, and layers may stay as they are: {reason}")

    @cached_property
    def identity(self) -> PrunePlan:
        """The plan that removes nothing."""
        return family_for(self.model).plan(self.model.config)

    @cached_property
    def costs(self) -> Costs:
        """Counts parameters and bytes, and predicts times where there is a profile."""
        measured = MeasuredCosts(self.profile) if self.profile is not None else None
        ranks = self.options.tensor_parallel
        return Costs(ExactCosts.of_choices(self.model.config, self.weights, self.choices, ranks=ranks), measured)

    @cached_property
    def dense_costs(self) -> Costs:
        """The same for the dense model alone: in w4a16 its scales are of larger groups than most plans allow."""
        ranks = self.options.tensor_parallel
        return Costs(ExactCosts.of(self.model.config, self.weights, ranks=ranks), self.costs.measured)

    @cached_property
    def choices(self) -> ChoiceOptions:
        """What layers may become, in the multiples that run well unless the options keep their own."""
        return self.options.choices_for(self.rules)

    @cached_property
    def why_not(self) -> Callable[[PrunePlan], str]:
        """(plan) -> why it cannot run: in the profile's engine, in llama.cpp for GGUF formats, or quantised."""
        engines = [self.profile.engine] if self.profile is not None else []
        layout = weight_format(self.weights).layout
        if layout == "gguf":
            engines.append("llamacpp")
        rules = [refusals(self.model.config, engine) for engine in dict.fromkeys(engines)]
        if layout in ("channel", "packed"):
            rules.append(lambda plan: quantising_obstacle(plan, self.weights) or "")
            rules.append(self._why_not_shared)
        return lambda plan: next(filter(None, (rule(plan) for rule in rules)), "")

    def _why_not_shared(self, plan: PrunePlan) -> str:
        """Why devices cannot share a plan in groups of scales as its export has them."""
        group = weight_format(self.weights).grouped((common_multiple(plan),)).group
        widths = [layer.widths for layer in plan.layers]
        return group_obstacle(widths, plan.dense.head_dim, group, self.options.tensor_parallel) or ""

    @cached_property
    def rules(self) -> SizeRules:
        """Widths that run well: learnt from the profile where it ran these weights, else the format's defaults."""
        ranks = self.options.tensor_parallel
        if self.profile is not None and self.profile.dtype == self.weights:
            return SizeRules.learnt(self.profile, tensor_parallel=ranks)
        return SizeRules.of(self.weights, tensor_parallel=ranks)

    @cached_property
    def text(self) -> dict[str, TokenSamples]:
        """The text, by what it is for; see :meth:`FitOptions.texts`."""
        config = self.model.config
        check_sequence_length(config, self.options.data.sequence_length)
        texts = self.options.texts(position_limit(config))
        return split_disjoint(self.tokenizer, texts, bos=begins_with_bos(config))

    @cached_property
    def scores(self) -> UnitScores:
        """What every unit is worth, from the cache where it was scored before."""
        o = self.options
        samples = _some(self.text["valued"], o.score_samples)
        key = digest([self.source.version, o.dtype, samples.digest(), bool(o.choices.hidden), "scores"])
        records = self._records("scores")
        known = records.of("scores").get(key)
        if known is None:
            say("Scoring heads and FFN channels.")
            found = score_units(self.model, samples.ids, hidden=bool(o.choices.hidden))
            known = records.add({"kind": "scores", "key": key, "scores": found.to_dict()})
        return UnitScores.from_dict(known["scores"], self.identity.dense)

    def _records(self, kind: str) -> RecordFile:
        """What the cache has of a kind."""
        return RecordFile(self.cache / f"{kind}.jsonl", program="pyprune fit", option="--cache")

    @cached_property
    def space(self) -> Space:
        """The choices of every layer."""
        return self._held(Space.of(self.identity, self.choices))

    def dense_amounts(self, quantities: Iterable[Quantity]) -> dict[Quantity, float]:
        """What the dense model takes of these: counted as it is exported, or predicted.

        Raises:
            BudgetError: a time, without a profile or outside of what the profile measured.
        """
        return {quantity: self.dense_costs.predicted(quantity, self.identity) for quantity in quantities}

    def _asked(self, budget: Budget) -> Budget:
        """The same, where the search counts the dense model otherwise than it is exported: shares of it as bytes."""
        limits = []
        for limit in budget.limits:
            own, counted = (c.predicted(limit.quantity, self.identity) for c in (self.dense_costs, self.costs))
            limits.append(limit if own == counted else limit.absolute(own))
        return Budget(tuple(limits))

    def check(self, budget: Budget) -> None:
        """Refuse a budget that nothing keeps, before anything is measured.

        Args:
            budget: limits.

        Raises:
            BudgetError: it says which limit cannot be kept and what is nearest, or that a profile is needed.
        """
        check_feasible(self.space.without_losses(), self._asked(budget), self.costs, self._solving)

    def dense_keeps(self, budget: Budget) -> str:
        """That the dense model keeps a budget as it is, in a sentence; empty where it does not."""
        dense = self.dense_amounts(budget.quantities)
        if budget.broken(dense, dense):
            return ""
        taken = ", ".join(limit.written(dense[limit.quantity], dense[limit.quantity]) for limit in budget.limits)
        return f"The dense model keeps {budget} as it is (it takes {taken}): nothing has to go."

    @cached_property
    def search(self) -> Search:
        """The choices of every layer with their losses, measured or taken from the cache."""
        o = self.options
        losses = measure_losses(
            self.model,
            self.space,
            self.scores,
            _some(self.text["valued"], o.value_samples),
            o.values,
            path=self.cache / "block-losses.jsonl",
            model_id=self.source.version,
        )
        if losses.reused:
            say(f"{losses.reused} of {len(losses.entries)} losses of single blocks were measured before.")
        return search_of(losses, self.scores, self.space, o.value)

    def _held(self, space: Space) -> Space:
        """The choices without those that what is to run the model has no place for, which is said."""
        reasons: list[str] = []

        def why_not(plan: PrunePlan) -> str:
            reasons.append(self.why_not(plan))
            return reasons[-1]

        held = space.without(why_not)
        # The only layer must stay, for no reason of an engine's.
        if held != space and (reason := next(filter(None, reasons), "")):
            say(f"Some choices are left out. {reason}")
        return held

    @property
    def _solving(self) -> SolveOptions:
        return replace(self.options.solve, head_pairs=self.options.solve.head_pairs or self.rules.max_head_pairs)

    @cached_property
    def tries(self) -> Tries:
        """What reconstructs candidates on some of the text, and judges them."""
        return Tries(
            self.model,
            _some(self.text["data"], self.options.try_samples),
            self.text["judged"],
            self.options.reconstruct,
            path=self.cache / "attempts.jsonl",
            identity={"model": self.source.version, "dtype": self.options.dtype},
        )

    @cached_property
    def dense_perplexities(self) -> dict[str, float]:
        """Of the dense model on the judged text, by kind."""
        return self.tries.judge(self.identity)[0]

    def solutions(self, budget: Budget, factors: Mapping[Quantity, float] | None = None) -> tuple[Solution, ...]:
        """The best solutions of a budget, the smallest predicted loss first.

        Args:
            budget: limits.
            factors: by what the predictions of times were wrong before: measured over predicted.

        Raises:
            BudgetError: nothing keeps it, it limits times and there is no profile, or what is to run the model has a
                place for none of the solutions.
        """
        found = solve(self.search, budget, Corrected(self.costs, factors or {}), self._solving)
        reasons = [self.why_not(plan_of(solution, self.search, self.scores)) for solution in found]
        held = tuple(solution for solution, reason in zip(found, reasons, strict=True) if not reason)
        if not held:
            raise BudgetError(
                f"None of the {len(found)} best solutions of {budget} can be run: {reasons[0]} Ask for more of them "
                "(--set solve.solutions=20), or for fewer kinds of cuts (--set choices.skips=[])."
            )
        return held

    def tried(self, solution: Solution, quantities: Iterable[Quantity]) -> Attempt:
        """Cut and reconstruct a solution and judge it, and predict these quantities."""
        plan = plan_of(solution, self.search, self.scores)
        perplexities, parameters = self.tries.judge(plan)
        amounts = {quantity: self.costs.predicted(quantity, plan) for quantity in quantities}
        return Attempt(replace(solution, predicted=amounts), plan, parameters, perplexities)

    def fit(self, budget: Budget, *, timed: bool = True, also: Iterable[Quantity] = ()) -> Fitted:
        """Find the best model that keeps a budget.

        Args:
            budget: limits.
            timed: run the winner where times are limited, and search again where it breaks a limit or leaves much of
                it unused; False trusts the predictions.
            also: quantities that are not limited but told of every candidate.

        Raises:
            BudgetError: nothing keeps the budget, or nothing that was timed did.
        """
        dense = self.dense_amounts(dict.fromkeys([*budget.quantities, *also]))
        state = _State(budget, dense, self._asked(budget), predicted=dense)
        profile = self.profile if timed and budget.timed else None
        for _ in range(self.options.rounds):
            try:
                best = self._round(state)
                if profile is None:
                    return self._fitted(state, best)
                if best.measured:  # no larger candidate is better than one that was timed
                    break
                best = state.keep(self._timed(best, budget.timed, profile))
            except (BudgetError, EngineError) as error:
                if not self._kept(state):
                    raise
                warn(f"The search for a larger candidate ended: {error}")
                break
            if self._uses_up(state, best):
                break
            state.learn(best)
        kept = self._kept(state)
        if kept:
            return self._fitted(state, min(kept, key=lambda attempt: attempt.loss))
        raise BudgetError(
            f"None of the best candidates of {state.searches} searches kept {budget} when it was timed; the last one "
            f"took {state.taken(best)}. The machine may be busy, or the profile old: measure it again, or raise rounds "
            "or slack."
        )

    def _kept(self, state: _State) -> list[Attempt]:
        """The candidates that kept the budget when they were timed."""
        return [x for x in state.attempts.values() if x.measured and not self._broken(state, x)]

    def _broken(self, state: _State, attempt: Attempt) -> tuple[Limit, ...]:
        """The limits that a candidate breaks by more than the machine's noise."""
        return state.budget.broken(attempt.amounts, state.dense | attempt.dense, self.options.slack)

    def _uses_up(self, state: _State, attempt: Attempt) -> bool:
        """Whether a timed candidate keeps the budget and leaves little of it; why to search again is said."""
        broken = self._broken(state, attempt)
        room = state.budget.room(attempt.amounts, state.dense)
        if not broken and room <= self.options.spare:
            return True
        what = f"breaks {', '.join(map(str, broken))}" if broken else f"leaves {room:.1%} of the tightest limit unused"
        again = "Searching again with that." if state.searches < self.options.rounds else ""
        say(f"Measured, the best candidate {what}: it takes {state.taken(attempt)}. {again}".rstrip())
        return False

    def run_winner(self, found: Fitted, written: Path, engine: str = "auto") -> Fitted:
        """The same with the speed of what was written, or with the reason why it cannot be run here.

        Args:
            found: for a budget.
            written: checkpoint folder or GGUF file; the search's own model was released before it was.
            engine: what runs it where there is no profile.
        """
        say("Timing what was written beside the dense model.")
        empty_cache()  # of what was trained here: vLLM wants its share of a GPU
        try:
            speed = time_winner(
                self.source, self.model.config, written, self.weights, self.profile,
                engine=engine, repeats=self.options.repeats, tokenizer=self.tokenizer,
            )  # fmt: skip
        except (PypruneError, OSError) as error:
            warn(f"{written} was not timed. {error}")  # it is written and keeps its budget all the same
            return replace(found, not_run=str(error))
        return replace(found, speed=speed)

    def _round(self, state: _State) -> Attempt:
        """Search once, try what was found, and give the best candidate so far.

        After a candidate was timed, only its own kind of solution is tried again: its size changes a little, so that
        the kinds that lost to it would lose again, and each costs a reconstruction.
        """
        state.searches += 1
        found = self.solutions(state.asked, state.factors)
        alike = [solution for solution in found if solution.variant == state.variant][:1]
        for solution in alike or found:
            attempt = state.keep(self.tried(solution, state.dense))
            say(f"{attempt.plan.summary()}: perplexity {attempt.perplexity:.2f} before training.")
        return self._best(state)

    def _timed(self, attempt: Attempt, quantities: Sequence[Quantity], profile: Profile) -> Attempt:
        """Run a candidate beside the dense model, or take what an interrupted search found."""
        what = [self.source.version, profile.to_json(), attempt.plan.to_dict(), list(map(str, quantities))]
        key = digest([*what, self.options.repeats])
        records = self._records("times")
        known = records.of("times").get(key) if self.continued else None
        if known is None:
            plans = {DENSE: self.identity, CANDIDATE: attempt.plan}
            with park(self.model, self.model.device):
                found = time_plans(profile, self.model.config, plans, quantities, self.options.repeats, self.tokenizer)
            seconds = {name: {str(q): own[q] for q in quantities} for name, own in found.items()}
            known = records.add({"kind": "times", "key": key, "seconds": seconds})
        candidate, dense = (
            {q: float(known["seconds"][name][str(q)]) for q in quantities} for name in (CANDIDATE, DENSE)
        )
        return replace(attempt, measured=candidate, dense=dense)

    def _best(self, state: _State) -> Attempt:
        """The candidate of the smallest loss among those that keep the budget by what is known now."""
        costs = Corrected(self.costs, state.factors)
        dense = state.asked.dense(costs, self.identity)

        def keeps(attempt: Attempt) -> bool:
            amounts = {q: predicted(costs, q, attempt.plan) for q in state.asked.quantities}
            return not state.asked.broken(amounts, dense, _ROUNDING)

        return min(filter(keeps, state.attempts.values()), key=lambda attempt: attempt.loss)

    def _fitted(self, state: _State, winner: Attempt) -> Fitted:
        order = tuple(sorted(state.attempts.values(), key=lambda attempt: attempt.loss))
        dense = state.dense | winner.dense  # of the winner's own turns, if it was timed
        return Fitted(
            state.budget, winner, order, dense, self.dense_perplexities, state.searches, predicted_dense=state.predicted
        )


@dataclass
class _State:
    """What the searches for one budget have found.

    Attributes:
        budget: as it was asked.
        dense: what the dense model takes of what is limited: predicted, then measured.
        asked: the budget of the next search; without relative limits once the dense model was timed.
        predicted: what the dense model takes, before anything was measured.
        factors: by what predicted times are multiplied, learnt from the timed candidates.
        attempts: by the digest of the plan.
        searches: how often was solved.
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
        """Remember a candidate; one with measured times takes the place of the same one without."""
        key = digest(attempt.plan.to_dict())
        if attempt.measured or key not in self.attempts:
            self.attempts[key] = attempt
        self.dense = self.dense | attempt.dense
        return self.attempts[key]

    def taken(self, attempt: Attempt) -> str:
        """What a candidate takes of everything that is limited, in the units of the limits."""
        limits = self.budget.limits
        return ", ".join(x.written(attempt.amounts[x.quantity], self.dense[x.quantity]) for x in limits)

    def learn(self, attempt: Attempt) -> None:
        """Correct the predictions by all candidates that were timed, of which this is the last one."""
        self.variant = attempt.solution.variant
        self.asked = self.budget.absolute(self.dense)
        self.factors |= {quantity: self._factor(quantity) for quantity in attempt.measured}

    def _factor(self, quantity: Quantity) -> float:
        """What predictions are multiplied by.

        Between a candidate that exceeds the limit and one that keeps it, what is measured is taken to grow evenly with
        what is predicted. Where all are on one side, the largest ratio of the two holds.
        """
        bound, dense = self.asked.bounds(self.dense)[quantity], self.dense[quantity]
        timed = [attempt for attempt in self.attempts.values() if quantity in attempt.measured]
        # Each beside the dense model of its own turns: the machine may have become slower or faster since.
        taken = [(a.solution.predicted[quantity], a.measured[quantity] * dense / a.dense[quantity]) for a in timed]
        kept = max((pair for pair in taken if pair[1] <= bound), default=(0.0, 0.0))
        beyond = min((pair for pair in taken if pair[1] > bound), default=kept)
        if 0 < kept[0] < beyond[0]:
            share = (bound - kept[1]) / (beyond[1] - kept[1])
            return bound / (kept[0] + share * (beyond[0] - kept[0]))
        return max(measured / predicted for predicted, measured in taken)


def _some(samples: TokenSamples, count: int) -> Batch:
    """So many of the sequences, evenly spread over them, and so over their kinds."""
    by_kind = torch.cat(list(samples.rows_by_kind().values()))
    rows = torch.linspace(0, len(samples) - 1, min(count, len(samples))).round().long()
    return samples[by_kind[rows]]
