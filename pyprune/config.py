"""Versioned, validated options of every stage. Nothing here imports torch.

Each dataclass is one stage of the flow (load -> calibrate -> regularise | score -> decide -> compact ->
recover -> evaluate -> export -> measure); :class:`PruneConfig` composes them. ``from_dict`` refuses unknown
keys with a suggestion, and ``validate`` collects every problem before it raises once. What a number may be stands
beside its default, in :func:`option`; only what several options have to agree on is checked by hand.
"""

from __future__ import annotations

import math
import types
import typing
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar

from typing_extensions import override

from pyprune.errors import ConfigError, did_you_mean, shown
from pyprune.registry import is_scoring, method_modules

CONFIG_VERSION = 1

Norm = Literal["l1", "l2"]
Solver = Literal["subgradient", "prox"]
Schedule = Literal["published", "anneal"]
RatioOf = Literal["layers", "hidden", "parameters"]
StageAction = Literal["regularise", "recover", "finetune"]
ScoreAxis = Literal["heads", "ffn", "hidden"]

HALF_DTYPES = ("bfloat16", "float16")
MOST_PROBLEMS = 10
"""Sentences of one error; what is longer says how many more there are."""
LONGEST_TEXT = 4096
"""Characters of a name or path."""
LARGEST_SEED = 2**32 - 1
"""The seeds of steps and epochs are multiples of the option's, and have to stay below 2**64."""
LARGEST_BATCH = 65_536
LARGEST_RANK = 65_536
LARGEST_INDEX = 10_000_000
"""Of a layer or channel, and the number of them; far beyond every model."""
LONGEST_RUN = 100_000_000
"""Steps."""
LARGEST_WEIGHT = 1_000_000
"""Of a rate or a strength: float32 cannot overflow by it alone."""

T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """The numbers that an option, or every entry of a list, may have; None = no limit on that side.

    Attributes:
        at_least: the smallest.
        at_most: the largest.
        above: smaller than the smallest.
        below: larger than the largest.
        unit: plural, of the limits (tokens).
        otherwise: what else is allowed, in words.
    """

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    unit: str = ""
    otherwise: str = ""

    def problem(self, name: str, value: Any) -> str | None:
        """One sentence if ``value`` is outside, else None."""
        if not isinstance(value, Real):
            return f"{name} is {shown(value)}; expected a number."
        broken = self._broken(_as_float(value))
        return f"{name} is {shown(value)}; it must be {broken}{self.otherwise}." if broken else None

    def _broken(self, value: float) -> str | None:
        """The limit that the value breaks, in words."""
        if self.above is not None and self.below is not None:
            return None if self.above < value < self.below else f"strictly between {self.above:g} and {self.below:g}"
        if self.at_least is not None and value < self.at_least:
            return f"at least {self._limit(self.at_least)}"
        if self.above is not None and value <= self.above:
            return f"> {self._limit(self.above)}"
        if self.at_most is not None and value > self.at_most:
            return f"at most {self._limit(self.at_most)}"
        if self.below is not None and value >= self.below:
            return f"below {self._limit(self.below)}"
        return None if math.isfinite(value) else "a finite number"

    def _limit(self, value: float) -> str:
        unit = self.unit.removesuffix("s") if value == 1 else self.unit
        return f"{value:,} {unit}".rstrip()


def _as_float(value: Any) -> float:
    """The nearest float; infinite for a whole number of hundreds of digits."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def option(
    default: T,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    unit: str = "",
    otherwise: str = "",
) -> T:
    """A dataclass field with a default and the range of its numbers, which :class:`Config` checks.

    Args:
        default: also says what the option is: a number, None for an optional one, or a list of indices, which must be
            distinct.
        at_least: see :class:`Range`, as for the others.
        at_most: the largest.
        above: smaller than the smallest.
        below: larger than the largest.
        unit: plural.
        otherwise: what else is allowed.
    """
    allowed = Range(at_least, at_most, above, below, unit, otherwise)
    return field(default=default, metadata={"range": allowed})


class Config:
    """Base of all option dataclasses: strict parsing, round trip, and collected validation."""

    version: ClassVar[int] = CONFIG_VERSION

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build from plain JSON/YAML data.

        Raises:
            ConfigError: unknown keys (with a suggestion) or values of the wrong type, all together.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(f"The options are {shown(data)}; expected a mapping.")
        problems: list[str] = []
        result = cls._parse(data, "", problems)
        if problems:
            raise ConfigError(_first(problems))
        result.validate()
        return result

    @classmethod
    def _parse(cls, data: Mapping[str, Any], path: str, problems: list[str]) -> Self:
        hints = typing.get_type_hints(cls)
        names = {f.name for f in fields(cls)}  # type: ignore[arg-type]
        values: dict[str, Any] = {}
        for key, value in data.items():
            if key == "version" and path == "":
                if value != CONFIG_VERSION:
                    problems.append(f"version is {shown(value)}; this pyprune reads version {CONFIG_VERSION}.")
                continue
            if key not in names:
                # Of thousands, none is read any more, and looking for a name like each of them takes a while.
                many = len(problems) >= MOST_PROBLEMS
                problems.append("" if many else did_you_mean(_text(key), names, f"option in {path or cls.__name__}"))
                continue
            values[key] = _coerce(value, hints[key], f"{path}{key}", problems)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data that :meth:`from_dict` reads back to an equal object."""
        return {"version": CONFIG_VERSION, **_plain(asdict(self))}  # type: ignore[call-overload]

    def problems(self) -> list[str]:
        """Return one sentence for each invalid option (empty when all are valid)."""
        return []

    def validate(self) -> None:
        """Raise :class:`ConfigError` with every problem of this object and of the ones inside it."""
        found = self._all_problems()
        if found:
            raise ConfigError(_first(found))

    def _all_problems(self) -> list[str]:
        found = [*self._range_problems(), *self.problems()]
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if isinstance(value, Config):
                found += [f"{f.name}: {p}" for p in value._all_problems()]
        return found

    def _range_problems(self) -> Iterator[str]:
        """One sentence for each number outside its range or not finite, and for each text that can be no name."""
        for f in fields(self):  # type: ignore[arg-type]
            value, allowed = getattr(self, f.name), f.metadata.get("range")
            if allowed is None and isinstance(value, float):
                allowed = Range()
            if isinstance(value, str) and allowed is None:
                problem = _text_problem(f.name, value)
            elif isinstance(value, (tuple, list)) and allowed is not None:
                problem = _list_problem(f.name, value, allowed)
            else:
                problem = None if value is None or allowed is None else allowed.problem(f.name, value)
            if problem:
                yield problem


def _first(problems: Sequence[str]) -> list[str]:
    """As many sentences as a person reads, and how many there are more."""
    more = len(problems) - MOST_PROBLEMS
    return [*problems[:MOST_PROBLEMS], f"There are {more:,} problems more."] if more > 0 else list(problems)


def _text_problem(name: str, value: str) -> str | None:
    if len(value) > LONGEST_TEXT:
        return f"{name} has {len(value):,} characters; at most {LONGEST_TEXT:,} are allowed."
    if any(ord(c) < 32 or 127 <= ord(c) < 160 or 0xD800 <= ord(c) < 0xE000 for c in value):
        return f"{name} is {shown(value)}, which holds a control character or half a character; leave it out."
    return None


def _list_problem(name: str, values: Sequence[Any], allowed: Range) -> str | None:
    for i, value in enumerate(values):
        if problem := allowed.problem(f"{name}[{i}]", value):
            return problem
    twice = next((value for value, count in Counter(values).items() if count > 1), None)
    return None if twice is None else f"{name} names {shown(twice)} twice; name each one once."


def _text(value: Any) -> str:
    return value if isinstance(value, str) else shown(value)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value


def _coerce(value: Any, hint: Any, path: str, problems: list[str]) -> Any:
    """Check ``value`` against a type hint, converting lists to tuples and ints to floats where meant."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _coerce_union(value, hint, path, problems)
    if origin is Literal:
        if value not in typing.get_args(hint):
            allowed = [str(a) for a in typing.get_args(hint)]
            problems.append(did_you_mean(_text(value), allowed, f"value of {path}"))
        return value
    if is_dataclass(hint) and isinstance(hint, type) and issubclass(hint, Config):
        if isinstance(value, Mapping):
            return hint._parse(value, f"{path}.", problems)
        problems.append(f"{path} is {shown(value)}; expected a mapping of options.")
        return hint()
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            problems.append(f"{path} is {shown(value)}; expected a list.")
            return ()
        return _coerce_list(value, typing.get_args(hint)[0], path, problems)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return _as_float(value)
    if hint is float and isinstance(value, str):
        return _float_from_text(value, path, problems)
    if hint is Any:
        return value
    expected = origin or hint
    if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        problems.append(f"{path} is {shown(value)}; expected {getattr(expected, '__name__', expected)}.")
    return value


def _coerce_list(values: Sequence[Any], hint: Any, path: str, problems: list[str]) -> tuple[Any, ...]:
    """Check the entries up to the first wrong one: of a million, one is enough to say."""
    found: list[Any] = []
    before = len(problems)
    for i, value in enumerate(values):
        found.append(_coerce(value, hint, f"{path}[{i}]", problems))
        if len(problems) > before:
            break
    return tuple(found)


def _coerce_union(value: Any, hint: Any, path: str, problems: list[str]) -> Any:
    options = typing.get_args(hint)
    if value is None and type(None) in options:
        return None
    attempts: list[list[str]] = []
    for option in (o for o in options if o is not type(None)):
        trial: list[str] = []
        result = _coerce(value, option, path, trial)
        if not trial:
            return result
        attempts.append(trial)
    problems.extend(attempts[0])
    return value


def _float_from_text(value: str, path: str, problems: list[str]) -> Any:
    """YAML reads ``1e-3`` (no dot) as text; accept it as the number that was meant."""
    try:
        return float(value)
    except ValueError:
        problems.append(f"{path} is {shown(value)}; expected a number.")
        return value


def _require(ok: bool, message: str, into: list[str]) -> None:
    if not ok:
        into.append(message)


def largest_divisor(number: int, at_most: int) -> int:
    """The largest divisor of ``number`` (at least 1) that is not above ``at_most`` (at least 1)."""
    return next(d for d in range(min(number, at_most), 0, -1) if number % d == 0)


@dataclass(frozen=True)
class DataConfig(Config):
    """Where text comes from and how it is cut into fixed-length samples.

    Attributes:
        source: a name known to pyprune (wikitext2, ptb, c4, alpaca, bookcorpus), a datasets id, or a local
            .txt/.jsonl file (optionally .gz).
        split: train, validation or test (ignored for a local file).
        samples: number of sequences to draw.
        sequence_length: tokens in a sequence; for instructions the cutoff, to which shorter ones are padded.
        field: the jsonl field that holds the text; None picks "text" or an instruction layout by itself.
        chat_template: wrap each document as one user turn of the tokenizer's chat template (an instruction record
            as a question and its answer).
        layout: stream cuts the documents, laid end to end, into windows of which every token is predicted;
            instructions makes each record (instruction, input, output) a sequence of its own.
        mask_prompt: with layout instructions, predict the response and the end-of-sequence token only.
        seed: of the sampling.
    """

    source: str = "wikitext2"
    split: str = "train"
    samples: int = option(128, at_least=1, at_most=100_000_000)
    sequence_length: int = option(2048, at_least=2, at_most=1_000_000, unit="tokens")
    field: str | None = None
    chat_template: bool = False
    layout: Literal["stream", "instructions"] = "stream"
    mask_prompt: bool = True
    seed: int = option(0, at_least=0, at_most=LARGEST_SEED)

    @override
    def problems(self) -> list[str]:
        found: list[str] = []
        _require(
            self.mask_prompt or self.layout == "instructions",
            "mask_prompt is off, but layout 'stream' has no prompts; it predicts every token anyway.",
            found,
        )
        return found


@dataclass(frozen=True)
class TrainConfig(Config):
    """The one training loop's options; every method's preset sets each of them explicitly.

    Attributes:
        optimiser: adamw (decoupled weight decay), fused_adamw (the same in pyprune's own kernel, where there is one,
            with DReSS's penalty and the clipping in its pass), adam (no decay), or sgd (with momentum 0).
        learning_rate: peak learning rate.
        weight_decay: decoupled decay per unit learning rate.
        steps: optimiser steps, at most.
        batch_size: sequences per optimiser step.
        micro_batch_size: sequences per forward pass, at most: the largest divisor of batch_size that is not above it is
            used, and batch_size is reached by gradient accumulation.
        warmup_steps: linear warm-up, steps.
        decay: learning-rate schedule after the warm-up.
        max_grad_norm: global gradient-norm clip; None = no clipping.
        dtype: compute dtype (float32, or bfloat16 autocast over float32 weights).
        gradient_checkpointing: recompute activations in the backward pass.
        early_stop_patience: evaluations without improvement before stopping; None = off.
        early_stop_min_delta: smallest improvement of the validation loss that counts.
        validation_interval: steps between two validations (used when early stopping is on).
        checkpoint_interval: steps between two resumable checkpoints; None = only at the end.
        seed: of the order of samples and of dropout.
    """

    optimiser: Literal["adamw", "fused_adamw", "adam", "sgd"] = "adamw"
    learning_rate: float = option(2e-5, above=0, at_most=LARGEST_WEIGHT)
    weight_decay: float = option(0.0, at_least=0, at_most=LARGEST_WEIGHT)
    steps: int = option(100, at_least=1, at_most=LONGEST_RUN)
    batch_size: int = option(64, at_least=1, at_most=LARGEST_BATCH)
    micro_batch_size: int = option(1, at_least=1, at_most=LARGEST_BATCH)
    warmup_steps: int = option(0, at_least=0, at_most=LONGEST_RUN)
    decay: Literal["constant", "linear", "cosine"] = "constant"
    max_grad_norm: float | None = option(1.0, above=0, otherwise=", or null for no clipping")
    dtype: Literal["float32", "bfloat16"] = "float32"
    gradient_checkpointing: bool = False
    early_stop_patience: int | None = option(None, at_least=1, at_most=LONGEST_RUN)
    early_stop_min_delta: float = option(1e-4, at_least=0)
    validation_interval: int = option(10, at_least=1, at_most=LONGEST_RUN)
    checkpoint_interval: int | None = option(None, at_least=1, at_most=LONGEST_RUN)
    seed: int = option(0, at_least=0, at_most=LARGEST_SEED)

    @property
    def sequences_per_pass(self) -> int:
        """Sequences in one forward pass: all of them have as many."""
        return largest_divisor(self.batch_size, self.micro_batch_size)

    @override
    def problems(self) -> list[str]:
        found: list[str] = []
        _require(
            self.optimiser != "adam" or not self.weight_decay,
            f"weight_decay is {shown(self.weight_decay)} with optimiser 'adam', which has none; use 'adamw'.",
            found,
        )
        return found


class Training(NamedTuple):
    """One training of a run, for the checks that need more than its own options.

    Attributes:
        action: what trains.
        name: dotted name of the options.
        train: the options.
        data: its text.
        all_weights: whether the model's own weights are trained (adapters are float32 whatever the model is).
    """

    action: StageAction
    name: str
    train: TrainConfig
    data: DataConfig
    all_weights: bool

    def problems(self, dtype: str) -> list[str]:
        """What would stop this training only when its turn comes; ``dtype`` is that of the model's weights."""
        found: list[str] = []
        _require(
            not self.all_weights or dtype not in HALF_DTYPES,
            f"dtype is {dtype!r}, but {self.action} trains all weights, whose small updates round to nothing there; "
            f"set dtype to float32 ({self.name}.dtype says what is computed in).",
            found,
        )
        _require(
            self.train.early_stop_patience is None or self.data.samples != 1,
            f"{self.name}.early_stop_patience holds a sample out, but {self.action} reads only 1; set it to null, or "
            "read more samples.",
            found,
        )
        return found


@dataclass(frozen=True)
class DressConfig(Config):
    """DReSS: regularise a set R of hidden channels, then remove it (Feng et al., "DReSS").

    Attributes:
        select: which channels form R.
        channels: the explicit list for select="explicit", hidden indices.
        segments: number of equal segments for select="segments".
        penalise: removed penalises R; all penalises every hidden channel while R still goes (the paper's
            full-parameter-regularisation ablation).
        norm: l2 = sum of group norms (not squared), l1 = sum of absolute values.
        strength: the papers' lambda, in units of loss per unit of norm.
        solver: subgradient (the penalty joins the loss) or prox (soft-threshold after the smooth step).
        prox_step: step size of the proximal map; None = the learning rate (l1 in the Adam metric).
        schedule: published, or anneal (the channels of R shrink to exactly zero).
        anneal_share: share of the steps after which the annealed factor is zero, in (0, 1].
        target_preserved_ratio: preserved ratio of |W| in R to reach; above it a warning is issued.
        train: the training loop's options.
    """

    select: Literal["last", "first", "segments", "explicit", "scored"] = "last"
    channels: tuple[int, ...] = option((), at_least=0, at_most=LARGEST_INDEX)
    segments: int = option(5, at_least=1, at_most=LARGEST_INDEX)
    penalise: Literal["removed", "all"] = "removed"
    norm: Norm = "l2"
    strength: float = option(1e-3, at_least=0, at_most=LARGEST_WEIGHT)
    solver: Solver = "subgradient"
    prox_step: float | None = option(None, above=0, at_most=LARGEST_WEIGHT, otherwise=", or null for the learning rate")
    schedule: Schedule = "published"
    anneal_share: float = option(0.5, above=0, at_most=1)
    target_preserved_ratio: float = option(0.3, at_least=0)
    train: TrainConfig = field(default_factory=TrainConfig)

    @override
    def problems(self) -> list[str]:
        found: list[str] = []
        _require(
            self.penalise == "removed" or self.schedule == "published",
            "penalise is 'all' with schedule 'anneal', which would shrink the whole model to zero; "
            "use schedule 'published'.",
            found,
        )
        in_adam_metric = (
            self.solver == "prox" and self.norm == "l1" and self.prox_step is None and self.train.optimiser != "sgd"
        )
        _require(
            not (self.penalise == "all" and in_adam_metric),
            "penalise is 'all' with the l1 prox in the Adam metric, which erases every weight without a gradient at "
            "once (the embeddings of all tokens that the text lacks); use solver 'subgradient' or give prox_step.",
            found,
        )
        explicit = self.select == "explicit"
        _require(
            bool(self.channels) == explicit,
            f"channels has {len(self.channels)} entries with select={self.select!r}; "
            "give channels exactly when select is 'explicit'.",
            found,
        )
        return found


@dataclass(frozen=True)
class GateConfig(Config):
    """Stage 1 of ELDeR/TRSP: learn one scalar per layer, mask the smallest, repeat.

    Attributes:
        placement: residual scales the branch, h + S (layer(h) - h); output scales the whole stream
            (the papers' literal text, which always drives the last layers out).
        search: greedy (one layer a round) or one_shot.
        strength: the papers' lambda1.
        learning_rate: of the gates (Adam).
        first_round_steps: Adam steps of the first round.
        round_steps: Adam steps of each later round, warm-started.
        batch_size: sequences per step.
    """

    placement: Literal["residual", "output"] = "residual"
    search: Literal["greedy", "one_shot"] = "greedy"
    strength: float = option(5e-3, at_least=0, at_most=LARGEST_WEIGHT)
    learning_rate: float = option(1e-2, above=0, at_most=LARGEST_WEIGHT)
    first_round_steps: int = option(40, at_least=1, at_most=100_000)
    round_steps: int = option(10, at_least=1, at_most=100_000)
    batch_size: int = option(4, at_least=1, at_most=LARGEST_BATCH)


@dataclass(frozen=True)
class ElderConfig(Config):
    """ELDeR / TRSP: learn layer gates, regularise the layers that will go, drop them.

    Attributes:
        gates: stage 1.
        layers: explicit layers to remove (skips stage 1); dense indices.
        norm: of the input-output difference of a layer in P, mean over tokens of the per-token norm.
        strength: the papers' lambda2.
        schedule: published (the norm penalty) or anneal (gates of P go from 1 to exactly 0).
        anneal_share: share of the steps after which the annealed gate is zero, in (0, 1].
        train: stage 2's training options.
    """

    gates: GateConfig = field(default_factory=GateConfig)
    layers: tuple[int, ...] = option((), at_least=0, at_most=LARGEST_INDEX)
    norm: Norm = "l2"
    strength: float = option(1e-3, at_least=0, at_most=LARGEST_WEIGHT)
    schedule: Schedule = "published"
    anneal_share: float = option(0.5, above=0, at_most=1)
    train: TrainConfig = field(default_factory=TrainConfig)


@dataclass(frozen=True)
class ScoreConfig(Config):
    """What every scoring method shares: which structures are open, how scores become a plan.

    The goal is ``ratio`` (share of ALL parameters to remove), or the counts ``heads``, ``ffn`` and ``hidden``, which
    win over it.

    Attributes:
        axes: the axes whose structures may go.
        aggregation: how the structures of a group (one per matrix) become the group's score.
        ranking: global (one order over all open layers) or local (the same count in every open layer).
        normalise: what a global order compares: none (the scores as they are, the papers' way), size (score per
            removed parameter) or standard (distance from the mean of the layer and axis, in standard deviations).
        heads_unit: kv_group (a KV head with all its query heads) or query_head (as many query heads of every KV
            group of a layer; KV heads stay).
        heads: query heads that stay in every open layer; None = by the ratio.
        ffn: FFN channels that stay in every open layer; None = by the ratio.
        hidden: hidden channels that stay; None = by the ratio.
        first_layer: first open layer; layers before it keep their heads and FFN.
        last_layer: last open layer, inclusive; negative counts from the end (-1 is the last).
        layers: the open layers, listed (instead of first_layer and last_layer).
        uniform: give every layer the same widths, so that a stock architecture fits: all layers are open and ranking
            is local, whatever the options above say; of the numbers of heads only those go that such an architecture
            takes.
        iterations: rounds; each removes its share of the goal and scores the masked model anew.
        ffn_multiple: FFN widths that result are multiples of this; channels go in bundles.
        allow_empty: a layer may lose its last unit of an axis, and the sub-block is skipped.
        magnitude: of the method magnitude: l1 = sum of |w|, l2 = sum of w^2.
        taylor: of the method taylor: vectorize |sum S|, param_first sum |S| with S = w g; param_second and param_mix
            use the second-order term.
        wanda: of the method wanda: coupled (every matrix that a structure owns a part of) or output (its columns of the
            attention's and the MLP's output projections alone).
        compensate: give the mean of what the output projections lose back as a bias (:mod:`pyprune.compensate`); any
            method may; None = flap does, no other.
        batch_size: sequences in one forward and backward pass; None = all samples at once. More than one pass a step
            holds the mean gradient of all open parameters.
        layerwise: take gradients one layer at a time (False holds those of all open parameters at once).
        seed: of the method random.
    """

    axes: tuple[ScoreAxis, ...] = ("heads", "ffn")
    aggregation: Literal["sum", "mean", "max", "prod"] = "sum"
    ranking: Literal["local", "global"] = "global"
    normalise: Literal["none", "size", "standard"] = "none"
    heads_unit: Literal["kv_group", "query_head"] = "kv_group"
    heads: int | None = option(None, at_least=1, at_most=LARGEST_INDEX)
    ffn: int | None = option(None, at_least=1, at_most=LARGEST_INDEX)
    hidden: int | None = option(None, at_least=1, at_most=LARGEST_INDEX)
    first_layer: int = option(0, at_least=0, at_most=LARGEST_INDEX)
    last_layer: int = option(-1, at_least=-LARGEST_INDEX, at_most=LARGEST_INDEX)
    layers: tuple[int, ...] = option((), at_least=0, at_most=LARGEST_INDEX)
    uniform: bool = False
    iterations: int = option(1, at_least=1, at_most=1_000)
    ffn_multiple: int = option(1, at_least=1, at_most=LARGEST_INDEX)
    allow_empty: bool = False
    magnitude: Norm = "l1"
    taylor: Literal["vectorize", "param_first", "param_second", "param_mix"] = "param_first"
    wanda: Literal["coupled", "output"] = "coupled"
    compensate: bool | None = None
    batch_size: int | None = option(None, at_least=1, at_most=LARGEST_BATCH)
    layerwise: bool = True
    seed: int = option(0, at_least=0, at_most=LARGEST_SEED)

    @property
    def counts(self) -> dict[ScoreAxis, int]:
        """The counts that were given, by axis."""
        given: dict[ScoreAxis, int | None] = {"heads": self.heads, "ffn": self.ffn, "hidden": self.hidden}
        return {axis: count for axis, count in given.items() if count is not None}

    @property
    def is_local(self) -> bool:
        """Whether every open layer loses the same count."""
        return self.ranking == "local" or self.uniform

    @override
    def problems(self) -> list[str]:
        found: list[str] = []
        _require(bool(self.axes), "axes is empty; name at least one of heads, ffn, hidden.", found)
        _require(len(set(self.axes)) == len(self.axes), f"axes names one twice: {list(self.axes)}.", found)
        found += self._goal_problems()
        _require(
            not self.layers or (self.first_layer, self.last_layer) == (0, -1),
            "layers is given together with first_layer or last_layer; use one way of naming the open layers.",
            found,
        )
        return found

    def _goal_problems(self) -> list[str]:
        found: list[str] = []
        counts, axes = set(self.counts), set(self.axes)
        if counts and counts != axes:
            found.append(
                f"counts are given for {sorted(counts)} and axes is {sorted(axes)}; give one count for every axis, and "
                "leave the other axes out."
            )
        _require(
            not counts or self.is_local,
            "counts say what stays in every open layer, which is a local ranking; set ranking to local.",
            found,
        )
        _require(
            self.is_local or "hidden" not in axes or len(axes) == 1,
            "a global ranking cannot compare hidden channels, which all layers share, with heads or ffn; "
            "set ranking to local, or use axes [hidden] alone.",
            found,
        )
        _require(
            not self.compensate or set(self.axes) != {"hidden"},
            "compensate is on, but axes is ['hidden']; a bias stands for heads and FFN channels, so open one.",
            found,
        )
        _require(
            set(self.axes) != {"hidden"} or (self.layers, self.first_layer, self.last_layer) == ((), 0, -1),
            "axes is ['hidden'], whose channels run through every layer; leave layers, first_layer and last_layer out.",
            found,
        )
        _require(
            self.normalise == "none" or self.ranking == "global",
            f"normalise is {self.normalise!r}, which only a global ranking reads; set it to none.",
            found,
        )
        _require(
            self.normalise != "size" or self.aggregation != "prod",
            "normalise is 'size' and aggregation is 'prod': a product is kept as its logarithm, which a number of "
            "parameters cannot divide; use normalise none or standard, or another aggregation.",
            found,
        )
        return found


@dataclass(frozen=True)
class MoreauConfig(Config):
    """MoreauPruner, MoreauPruner-GS and SmoothGrad (Wang et al., "MoreauPruner", Algorithm 1).

    Attributes:
        steps: T, gradient steps on the Moreau envelope; with a tolerance, the most steps. SmoothGrad has none.
        rho: strength of the proximal term.
        gamma: step size.
        eta: weight of the group norm; 0 for moreau, > 0 for moreau_gs.
        sigma: standard deviation of the noise, relative to each weight.
        draws: m, noise draws averaged in one step (the passes of SmoothGrad).
        redraw: new noise at every step; False repeats the first step's, which a converging run needs.
        tolerance: stop once the envelope's optimality condition, delta = -rho g, is missed by less than this share of
            the displacement's norm; None = all steps.
        seed: of the noise.
    """

    steps: int = option(10, at_least=1, at_most=1_000_000)
    rho: float = option(0.05, above=0, at_most=LARGEST_WEIGHT)
    gamma: float = option(1e-3, above=0, at_most=LARGEST_WEIGHT)
    eta: float = option(0.0, at_least=0, at_most=LARGEST_WEIGHT)
    sigma: float = option(0.05, at_least=0, at_most=1e30)
    draws: int = option(1, at_least=1, at_most=1_000_000)
    redraw: bool = True
    tolerance: float | None = option(None, above=0, below=1, otherwise=", or null for all steps")
    seed: int = option(0, at_least=0, at_most=LARGEST_SEED)

    @override
    def problems(self) -> list[str]:
        found: list[str] = []
        _require(
            self.gamma <= self.rho,
            f"gamma is {shown(self.gamma)} and rho is {shown(self.rho)}; gamma must not exceed rho.",
            found,
        )
        return found


@dataclass(frozen=True)
class LoraPruneConfig(Config):
    """LoRAPrune (Zhang et al. 2023): importance from the weights and gradients of LoRA factors in training.

    Rank, alpha, dropout, learning rate and momentum are those of the authors' script and code; the number of steps and
    the batch are ours (they train for epochs on instructions, here the calibration text is read). The gradient norm is
    not clipped, because that would weigh the steps' scores differently.

    Attributes:
        rank: LoRA rank.
        alpha: LoRA scale numerator (scale = alpha / rank).
        dropout: LoRA dropout probability.
        momentum: share of the earlier steps' importance that a step keeps, in [0, 1); 0 = the last step alone.
        train: the training loop's options; its seed is that of the factors too.
    """

    rank: int = option(8, at_least=1, at_most=LARGEST_RANK)
    alpha: float = option(16.0, above=0, at_most=LARGEST_WEIGHT)
    dropout: float = option(0.05, at_least=0, below=1)
    momentum: float = option(0.9, at_least=0, below=1)
    train: TrainConfig = field(
        default_factory=lambda: TrainConfig(
            learning_rate=1e-4, steps=32, batch_size=8, micro_batch_size=8, max_grad_norm=None
        )
    )

    @override
    def problems(self) -> list[str]:
        found: list[str] = []
        _require(
            self.train.early_stop_patience is None,
            "train.early_stop_patience is set, but scores are gathered over all steps; set it to null.",
            found,
        )
        return found


@dataclass(frozen=True)
class DistillConfig(Config):
    """Knowledge distillation from the dense model; every term is a mean over the predicted tokens:

        loss = (1 - alpha) CE + alpha temperature^2 KL(teacher || student) + hidden D

    CE is the language-model loss in nats, KL (nats) compares softmax(logits / temperature) of both (Hinton et al.
    2015, section 2, whose factor temperature^2 keeps the gradient's size when the temperature changes), and D is the
    squared difference of the residual streams relative to the teacher's, mean over the kept layers
    (:mod:`pyprune.distill`).

    Attributes:
        alpha: share of the teacher's distribution, in [0, 1], no unit; 0 leaves the text's own tokens alone.
        temperature: softens both distributions, at least 0.001, no unit.
        hidden: weight of D, nats per unit of D; 0 = the hidden states are not compared.
        chunk: tokens whose logits are held at once.
        teacher_dtype: dtype of the teacher's weights when it is loaded for this; None = the training dtype.
    """

    alpha: float = option(0.5, at_least=0, at_most=1)
    temperature: float = option(1.0, at_least=1e-3, at_most=LARGEST_WEIGHT)
    hidden: float = option(0.0, at_least=0, at_most=LARGEST_WEIGHT)
    chunk: int = option(256, at_least=1, at_most=1_000_000, unit="tokens")
    teacher_dtype: Literal["float32", "bfloat16", "float16"] | None = None

    @override
    def problems(self) -> list[str]:
        found: list[str] = []
        _require(
            self.alpha > 0 or self.hidden > 0,
            "alpha and hidden are 0, so the teacher would not count; raise one of them, or set distill to null.",
            found,
        )
        return found


@dataclass(frozen=True)
class RecoverConfig(Config):
    """Recovery of a pruned model: what is trained (adapters or all weights) and on which loss.

    Attributes:
        adapters: lora trains low-rank adapters through PEFT, merged before export; none trains all weights.
        rank: LoRA rank.
        alpha: LoRA scale numerator (scale = alpha / rank).
        dropout: LoRA dropout probability.
        distill: learn from the dense model as well; None = the language-model loss alone.
        train: the training loop's options.
    """

    adapters: Literal["lora", "none"] = "lora"
    rank: int = option(32, at_least=1, at_most=LARGEST_RANK)
    alpha: float = option(10.0, above=0, at_most=LARGEST_WEIGHT)
    dropout: float = option(0.0, at_least=0, below=1)
    distill: DistillConfig | None = None
    train: TrainConfig = field(default_factory=TrainConfig)


@dataclass(frozen=True)
class RecoverRunConfig(Config):
    """Everything `pyprune recover` does to a checkpoint that is cut already.

    Attributes:
        dtype: dtype of the weights while working.
        device: where the model is trained: auto (cuda when there is one), cpu, cuda or cuda:N.
        export_dtype: dtype of the written checkpoint; None = the pruned checkpoint's.
        data: recovery text.
        recover: what is trained, and on which loss.
    """

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    export_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    data: DataConfig = field(default_factory=DataConfig)
    recover: RecoverConfig = field(default_factory=RecoverConfig)

    @override
    def problems(self) -> list[str]:
        trained = Training("recover", "recover.train", self.recover.train, self.data, self.recover.adapters == "none")
        return trained.problems(self.dtype)


@dataclass(frozen=True)
class StageConfig(Config):
    """What happens with the weights before or after the cut.

    Attributes:
        before: actions before the cut, in order (regularise, finetune).
        after: actions after the cut, in order (recover = as the options of recover say, finetune = the plain control,
            all weights; regularise = the method's own penalty once more where it still applies, as in the DReSS
            eight-case ablation).
        prune: False keeps the dense shapes (the N in R&N&N).
    """

    before: tuple[StageAction, ...] = ("regularise",)
    after: tuple[StageAction, ...] = ()
    prune: bool = True


@dataclass(frozen=True)
class PruneConfig(Config):
    """Everything `pyprune prune` does.

    Attributes:
        method: dress, elder, trsp, a scoring method (magnitude, random, wanda, flap, taylor, loraprune, moreau,
            moreau_gs, smoothgrad) or none (direct removal of what the plan names).
        ratio: share to remove, in (0, 1), of the unit in ratio_of; counts are floor(ratio * n).
        ratio_of: layers, hidden or parameters; None = the method's own axis.
        hidden_multiple: legal multiple of a sliced hidden size (rounding is reported).
        plan: path of a saved plan (or of a checkpoint that holds one) to replay instead of deciding one.
        target: auto (a stock architecture when one fits, else the pruned one) or stock (refuse otherwise).
        dtype: dtype of the weights while working.
        device: where the model is trained and cut: auto (cuda when there is one), cpu, cuda or cuda:N.
        export_dtype: dtype of the written checkpoint; None = the source checkpoint's.
        data: calibration and regularisation text.
        recovery_data: recovery text; must be disjoint from data. None = the same source, other samples.
        stages: what happens before and after the cut.
        verify: measure the masked model before the cut and the compacted one after it, on calibration text
            (holds one more copy of the weights meanwhile).
        dress: options of DReSS.
        elder: options of ELDeR/TRSP.
        score: options that all scoring methods share.
        moreau: options of MoreauPruner, MoreauPruner-GS and SmoothGrad.
        loraprune: options of LoRAPrune.
        recover: options of recovery.
        finetune: options of the plain fine-tuning control.
        seed: of the order of samples in stage 1 of ELDeR/TRSP (text and training have seeds of their own).
    """

    method: str = "elder"
    ratio: float = option(0.25, above=0, below=1)
    ratio_of: RatioOf | None = None
    hidden_multiple: int = option(8, at_least=1, at_most=LARGEST_INDEX)
    plan: str | None = None
    target: Literal["auto", "stock"] = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    export_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    data: DataConfig = field(default_factory=DataConfig)
    recovery_data: DataConfig | None = None
    stages: StageConfig = field(default_factory=StageConfig)
    verify: bool = False
    dress: DressConfig = field(default_factory=DressConfig)
    elder: ElderConfig = field(default_factory=ElderConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)
    moreau: MoreauConfig = field(default_factory=MoreauConfig)
    loraprune: LoraPruneConfig = field(default_factory=LoraPruneConfig)
    recover: RecoverConfig = field(default_factory=RecoverConfig)
    finetune: TrainConfig = field(default_factory=TrainConfig)
    seed: int = option(0, at_least=0, at_most=LARGEST_SEED)

    @property
    def compensates(self) -> bool:
        """Whether the cut gives the mean of what it takes back as biases."""
        wanted = self.score.compensate
        return self.stages.prune and (self.method == "flap" if wanted is None else wanted)

    def _trainings(self) -> Iterator[Training]:
        """The trainings of all stages, in order."""
        after = self.recovery_data or self.data
        both = [(a, self.data) for a in self.stages.before] + [(a, after) for a in self.stages.after]
        for action, data in both:
            if action == "recover":
                yield Training(action, "recover.train", self.recover.train, data, self.recover.adapters == "none")
            elif action == "finetune":
                yield Training(action, "finetune", self.finetune, data, True)
            elif self.method == "dress":
                yield Training(action, "dress.train", self.dress.train, data, True)
            else:
                yield Training(action, "elder.train", self.elder.train, data, True)

    @override
    def problems(self) -> list[str]:
        found: list[str] = []
        found += dict.fromkeys(problem for training in self._trainings() for problem in training.problems(self.dtype))
        _require(
            self.stages.prune or not self.verify,
            "verify compares both sides of the cut, but stages.prune is off; turn one of them round.",
            found,
        )
        _require(
            self.data.layout == "stream",
            "data.layout is 'instructions', which is for recovery_data; calibration and regularisation read 'stream'.",
            found,
        )
        _require(
            self.stages.prune or not self.score.compensate,
            "score.compensate gives back what the cut takes, but stages.prune is off; turn one of them round.",
            found,
        )
        if self.method == "none":
            _require(self.plan is not None, "method is 'none', which decides nothing; give a plan to apply.", found)
            _require(
                "regularise" not in (*self.stages.before, *self.stages.after),
                "method is 'none', which has nothing to regularise with; take regularise out of stages.before and "
                "stages.after, or name a method.",
                found,
            )
        elif self.method not in method_modules():
            found.append(did_you_mean(self.method, method_modules(), "method"))
        elif not is_scoring(self.method):
            _require(
                not self.score.uniform,
                f"score.uniform is on, but method {self.method!r} scores nothing: its widths are its own.",
                found,
            )
        else:
            _require(
                "regularise" not in (*self.stages.before, *self.stages.after),
                f"method is {self.method!r}, which scores and regularises nothing; take regularise out of "
                "stages.before and stages.after.",
                found,
            )
        return found
