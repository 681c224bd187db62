"""Options of `pyprune prune`, `pyprune recover` and `pyprune reconstruct`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self

from typing_extensions import override

from pyprune.config.base import LARGEST_INDEX, LARGEST_SEED, Config, _first, option
from pyprune.config.cut import CutConfig, ReconstructConfig
from pyprune.config.data import DataConfig
from pyprune.config.method import MethodOptions
from pyprune.config.score import ScoreConfig
from pyprune.config.train import HALF_DTYPES, LARGEST_BATCH, RecoverConfig, TrainConfig
from pyprune.errors import ConfigError, shown

RatioOf = Literal["layers", "hidden", "experts", "parameters"]
StageAction = Literal["regularise", "recover", "finetune"]
TrainingAction = Literal["decide", StageAction]
"""A stage that trains, or the method's decision."""


class Training(NamedTuple):
    """One training of a run, for the checks that need more than its own options.

    Attributes:
        action: the stage, or the decision.
        name: dotted name of the options.
        train: the options.
        data: its text.
        all_weights: whether the model's own weights are trained (adapters are float32 whatever the model is).
    """

    action: TrainingAction
    name: str
    train: TrainConfig
    data: DataConfig
    all_weights: bool

    @property
    def may_be_lean(self) -> bool:
        """True if it is lean, or can be with memory auto."""
        return self.train.memory != "full" and not list(replace(self.train, memory="lean").problems())

    def problems(self, dtype: str) -> Iterator[str]:
        """Yield problems that would stop this training at its start; ``dtype`` is that of the model's weights."""
        lean = dtype == "bfloat16" and self.may_be_lean
        if not self.all_weights and dtype == "float16":
            yield (
                f"dtype is 'float16', whose smallest number is above most of the gradients of {self.action}; set dtype "
                "to bfloat16 or float32 (export_dtype is the dtype of the written checkpoint)."
            )
        if self.all_weights and dtype in HALF_DTYPES and not lean:
            yield (
                f"dtype is {dtype!r}, but {self.action} trains all weights, whose small updates round to nothing; "
                f"set dtype to float32, or to bfloat16 with {self.name}.dtype auto and {self.name}.memory lean."
            )
        if self.train.early_stop_patience is not None and self.data.samples == 1:
            yield (
                f"{self.name}.early_stop_patience holds a sample out, but {self.action} reads only 1; set it to null "
                "or read more samples."
            )


def _mixed_memory(trainings: list[Training]) -> list[str]:
    """Refuse trainings of all weights that differ in their memory: the weights are float32 or bfloat16 for all."""
    whole = [training for training in trainings if training.all_weights]
    lean = [training.name for training in whole if training.train.memory == "lean"]
    full = [training.name for training in whole if not training.may_be_lean]
    if not (lean and full):
        return []
    return [
        f"{lean[0]}.memory is 'lean', which trains bfloat16 weights, but {full[0]}, which trains the same weights, is "
        "not lean or cannot be (its memory, dtype or optimizer); set both alike."
    ]


@dataclass(frozen=True)
class RecoverCheckpointConfig(Config):
    """Options of `pyprune recover` for an already pruned checkpoint.

    Attributes:
        dtype: dtype of the weights while working.
        device: device of the training: auto (cuda when there is one), cpu, cuda or cuda:N.
        export_dtype: dtype of the written checkpoint; None = the pruned checkpoint's.
        data: recovery text.
        recover: the trained weights and the loss.
        keep_adapter: also write the LoRA adapters before they are merged: in PEFT's format, for the pruned checkpoint.
    """

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    export_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    data: DataConfig = field(default_factory=DataConfig)
    recover: RecoverConfig = field(default_factory=RecoverConfig)
    keep_adapter: bool = False

    def trainings(self) -> Iterator[Training]:
        """Yield the one training."""
        yield Training("recover", "recover.train", self.recover.train, self.data, self.recover.adapters == "none")

    def deciding_training(self) -> None:
        """Return None: nothing is decided here."""

    def with_training(self, action: TrainingAction, train: TrainConfig) -> Self:
        """Return a copy with other options of the training."""
        return replace(self, recover=replace(self.recover, train=train))

    @override
    def problems(self) -> Iterator[str]:
        all_weights = self.recover.adapters == "none"
        for training in self.trainings():
            yield from training.problems(self.dtype)
        if self.keep_adapter and all_weights:
            yield (
                "keep_adapter is true, but recover.adapters is 'none': all weights are trained, and there is no "
                "adapter to keep. Set recover.adapters to lora, or leave keep_adapter out."
            )


@dataclass(frozen=True)
class ReconstructCheckpointConfig(Config):
    """Options of `pyprune reconstruct` for an already pruned checkpoint.

    Attributes:
        dtype: dtype of the weights while working.
        device: device of the models: auto (cuda when there is one), cpu, cuda or cuda:N.
        export_dtype: dtype of the written checkpoint; None = the pruned checkpoint's.
        data: calibration text.
        least_squares: options of the reconstruction.
        batch_size: sequences in one forward pass; None = as many as make 2,048 tokens.
    """

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    export_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    data: DataConfig = field(default_factory=lambda: DataConfig("mixture", samples=144, sequence_length=256))
    least_squares: ReconstructConfig = field(default_factory=ReconstructConfig)
    batch_size: int | None = option(None, at_least=1, at_most=LARGEST_BATCH)

    @override
    def problems(self) -> Iterator[str]:
        if self.data.layout != "stream":
            yield "data.layout is 'instructions', which is for recovery; set 'stream'."


@dataclass(frozen=True)
class StageConfig(Config):
    """Actions on the weights before and after the cut.

    Attributes:
        before: actions before the cut, in order (regularise, finetune).
        after: actions after the cut, in order (recover = by the options of recover; finetune = the plain control, all
            weights; regularise = the method's own penalty again if it still applies, as in the DReSS eight-case
            ablation).
        prune: False keeps the dense shapes (the N in R&N&N).
    """

    before: tuple[StageAction, ...] = ("regularise",)
    after: tuple[StageAction, ...] = ()
    prune: bool = True


@dataclass(frozen=True)
class PruneConfig(Config):
    """Options of `pyprune prune`.

    Attributes:
        method: name of a method (``pyprune prune --help`` lists them), or none (the plan decides what is removed).
        ratio: share to remove, in (0, 1), of the unit in ratio_of; counts are floor(ratio * n).
        ratio_of: layers, hidden, experts or parameters; None = the method's own axis.
        hidden_multiple: legal multiple of a sliced hidden size (rounding is reported).
        plan: path of a saved plan (or of a checkpoint that holds one) to replay instead of deciding one.
        target: auto (a stock architecture when one fits, else the pruned one) or stock (refuse otherwise).
        dtype: dtype of the weights while working.
        device: device of training and cut: auto (cuda when there is one), cpu, cuda or cuda:N.
        export_dtype: dtype of the written checkpoint; None = the source checkpoint's.
        data: calibration and regularisation text.
        recovery_data: recovery text; must be disjoint from data. None = the same source, other samples. In recipes and
            on the command line its default samples and sequence length are those of data, except for methods that
            score.
        stages: actions before and after the cut.
        cut: options of the cut.
        verify: measure the masked model before the cut and the compacted one after it, on calibration text
            (holds one more copy of the weights meanwhile, or, from file to file, one layer's).
        score: options that all scoring methods share; None for the defaults, and for methods that score nothing.
        options: the method's own options; None = its defaults. In plain data their key is the method's name.
        recover: options of recovery.
        finetune: options of the plain fine-tuning control.
        seed: seed of the order of samples in stage 1 of ELDeR/TRSP (text and training have their own seeds).
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
    cut: CutConfig = field(default_factory=CutConfig)
    verify: bool = False
    score: ScoreConfig | None = None
    options: MethodOptions | None = None
    recover: RecoverConfig = field(default_factory=RecoverConfig)
    finetune: TrainConfig = field(default_factory=TrainConfig)
    seed: int = option(0, at_least=0, at_most=LARGEST_SEED)

    @classmethod
    def read(cls, data: Mapping[str, Any], options: type[MethodOptions], problems: Iterable[str] = ()) -> PruneConfig:
        """Build from plain data, the method's own options under its name; :meth:`to_dict` gives such data.

        Args:
            data: JSON or YAML data.
            options: the class of the method's options (:func:`pyprune.methods.registry.read_config` knows it).
            problems: sentences about errors that the caller has detected already.

        Raises:
            ConfigError: unknown keys or values of the wrong type, all together.
        """
        problems = list(problems)
        method = data.get("method", cls.method)
        named = method if isinstance(method, str) and method != "none" else ""
        method_options = options()
        if named in data:
            if isinstance(data[named], Mapping):
                method_options = options._parse(data[named], f"{named}.", problems)
            else:
                problems.append(f"{named} is {shown(data[named])}; expected a mapping of the method's options.")
        if "options" in data:
            problems.append(f"There is no option 'options'; write a method's options under its name ({named}).")
        config = cls._parse({k: v for k, v in data.items() if k not in (named, "options")}, "", problems)
        if problems:
            raise ConfigError(_first(problems))
        config = replace(config, options=method_options)
        config.validate()
        return config

    @override
    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data that :meth:`read` reads back to an equal object."""
        data = super().to_dict()
        options = data.pop("options")
        return data if options is None or self.method == "none" else {**data, self.method: options}

    @override
    def _label(self, name: str) -> str:
        return self.method if name == "options" else name

    @property
    def score_options(self) -> ScoreConfig:
        """Return ``score``, or its defaults."""
        return self.score or ScoreConfig()

    @property
    def adds_biases(self) -> bool:
        """True if the cut adds the mean of the removed inputs as biases."""
        return self.stages.prune and self.cut.reconstruct == "bias"

    @property
    def reads_text_at_the_cut(self) -> bool:
        """True if calibration text changes the kept weights at the cut."""
        return self.stages.prune and self.cut.reconstruct != "none"

    def trainings(self) -> Iterator[Training]:
        """Yield the trainings of all stages, in order."""
        after = self.recovery_data or self.data
        both = [(a, self.data) for a in self.stages.before] + [(a, after) for a in self.stages.after]
        for action, data in both:
            if action == "recover":
                yield Training(action, "recover.train", self.recover.train, data, self.recover.adapters == "none")
            elif action == "finetune":
                yield Training(action, "finetune", self.finetune, data, True)
            elif self.options is not None and self.options.training is not None:
                yield Training(action, f"{self.method}.train", self.options.training, data, True)

    def deciding_training(self) -> Training | None:
        """Return the training by which the method decides, or None; the trainings of stages are others."""
        if self.plan is not None or self.options is None:
            return None
        deciding = self.options.deciding_training(self.data.sequence_length)
        if deciding is None:
            return None
        return Training("decide", f"{self.method}.{deciding.name}", deciding.train, self.data, all_weights=False)

    def with_training(self, action: TrainingAction, train: TrainConfig) -> Self:
        """Return a copy with other options of a stage's training."""
        if action == "recover":
            return replace(self, recover=replace(self.recover, train=train))
        if action == "finetune":
            return replace(self, finetune=train)
        return replace(self, options=self.options.with_training(train) if self.options is not None else None)

    @override
    def problems(self) -> Iterator[str]:
        yield from dict.fromkeys(problem for training in self.trainings() for problem in training.problems(self.dtype))
        if self.dtype == "float16" and self.data.sequence_length > 0 and (training := self.deciding_training()):
            yield from training.problems(self.dtype)
        yield from _mixed_memory(list(self.trainings()))
        if not self.stages.prune and self.verify:
            yield "verify compares both sides of the cut, but stages.prune is off; turn verify off, or stages.prune on."
        if self.data.layout != "stream":
            yield "data.layout is 'instructions', which is for recovery_data; set 'stream' for calibration text."
        if not self.stages.prune and self.cut.reconstruct != "none":
            yield f"cut.reconstruct is {self.cut.reconstruct!r}, but stages.prune is off, so nothing is cut; set none."
        if self.cut.reconstruct == "bias" and self.score is not None and set(self.score.axes) == {"hidden"}:
            yield (
                "cut.reconstruct is 'bias', but score.axes is ['hidden']; a bias can replace only heads and FFN "
                "channels, so open one."
            )
        if self.method == "none":
            if self.plan is None:
                yield "method is 'none', which decides nothing; give a plan to apply."
            if "regularise" in (*self.stages.before, *self.stages.after):
                yield (
                    "method is 'none', which has nothing to regularise with; take regularise out of stages.before and "
                    "stages.after, or name a method."
                )
