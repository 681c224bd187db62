"""Everything that `pyprune prune` and `pyprune recover` do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self

from typing_extensions import override

from pyprune.config.base import LARGEST_INDEX, LARGEST_SEED, Config, _first, _require, option
from pyprune.config.cut import CutConfig, ReconstructConfig
from pyprune.config.data import DataConfig
from pyprune.config.method import MethodOptions
from pyprune.config.score import ScoreConfig
from pyprune.config.train import HALF_DTYPES, LARGEST_BATCH, RecoverConfig, TrainConfig
from pyprune.errors import ConfigError, shown

RatioOf = Literal["layers", "hidden", "parameters"]
StageAction = Literal["regularise", "recover", "finetune"]
TrainingAction = Literal["decide", StageAction]
"""A stage's, or the method's decision."""


class Training(NamedTuple):
    """One training of a run, for the checks that need more than its own options.

    Attributes:
        action: what trains.
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
        """Whether it is lean, or can be where memory is auto."""
        return self.train.memory != "full" and not replace(self.train, memory="lean").problems()

    def problems(self, dtype: str) -> list[str]:
        """What would stop this training only when its turn comes; ``dtype`` is that of the model's weights."""
        found: list[str] = []
        lean = dtype == "bfloat16" and self.may_be_lean
        _require(
            self.all_weights or dtype != "float16",
            f"dtype is 'float16', whose smallest number is above most of the gradients of {self.action}; set dtype to "
            "bfloat16 or float32 (export_dtype says what is written).",
            found,
        )
        _require(
            not self.all_weights or dtype not in HALF_DTYPES or lean,
            f"dtype is {dtype!r}, but {self.action} trains all weights, whose small updates round to nothing there; "
            f"set dtype to float32 ({self.name}.dtype says what is computed in), or dtype to bfloat16, "
            f"{self.name}.dtype to auto and {self.name}.memory to lean, which rounds them stochastically.",
            found,
        )
        _require(
            self.train.early_stop_patience is None or self.data.samples != 1,
            f"{self.name}.early_stop_patience holds a sample out, but {self.action} reads only 1; set it to null, or "
            "read more samples.",
            found,
        )
        return found


def _mixed_memory(trainings: list[Training]) -> list[str]:
    """Trainings of all weights train the same ones, which are float32 or bfloat16 for all of them."""
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
    """Everything `pyprune recover` does to a checkpoint that is cut already.

    Attributes:
        dtype: dtype of the weights while working.
        device: where the model is trained: auto (cuda when there is one), cpu, cuda or cuda:N.
        export_dtype: dtype of the written checkpoint; None = the pruned checkpoint's.
        data: recovery text.
        recover: what is trained, and on which loss.
        keep_adapter: write the LoRA adapters too, before they are merged: in PEFT's format, for the pruned checkpoint.
    """

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    export_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    data: DataConfig = field(default_factory=DataConfig)
    recover: RecoverConfig = field(default_factory=RecoverConfig)
    keep_adapter: bool = False

    def trainings(self) -> Iterator[Training]:
        """The one training."""
        yield Training("recover", "recover.train", self.recover.train, self.data, self.recover.adapters == "none")

    def deciding_training(self) -> None:
        """Nothing is decided here."""

    def with_training(self, action: TrainingAction, train: TrainConfig) -> Self:
        """The same with other options of the training."""
        return replace(self, recover=replace(self.recover, train=train))

    @override
    def problems(self) -> list[str]:
        all_weights = self.recover.adapters == "none"
        found = [problem for training in self.trainings() for problem in training.problems(self.dtype)]
        _require(
            not (self.keep_adapter and all_weights),
            "keep_adapter is true, but recover.adapters is 'none': all weights are trained, and there is no adapter to "
            "keep. Set recover.adapters to lora, or leave keep_adapter out.",
            found,
        )
        return found


@dataclass(frozen=True)
class ReconstructCheckpointConfig(Config):
    """Everything `pyprune reconstruct` does to a checkpoint that is cut already.

    Attributes:
        dtype: dtype of the weights while working.
        device: where the models run: auto (cuda when there is one), cpu, cuda or cuda:N.
        export_dtype: dtype of the written checkpoint; None = the pruned checkpoint's.
        data: calibration text.
        least_squares: how it is reconstructed.
        batch_size: sequences in one forward pass; None = as many as make 2,048 tokens.
    """

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    export_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    data: DataConfig = field(default_factory=lambda: DataConfig("mixture", samples=144, sequence_length=256))
    least_squares: ReconstructConfig = field(default_factory=ReconstructConfig)
    batch_size: int | None = option(None, at_least=1, at_most=LARGEST_BATCH)

    @override
    def problems(self) -> list[str]:
        found: list[str] = []
        _require(
            self.data.layout == "stream", "data.layout is 'instructions', which is for recovery; set 'stream'.", found
        )
        return found


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
        method: name of a method (``pyprune prune --help`` lists them), or none (direct removal of what the plan names).
        ratio: share to remove, in (0, 1), of the unit in ratio_of; counts are floor(ratio * n).
        ratio_of: layers, hidden or parameters; None = the method's own axis.
        hidden_multiple: legal multiple of a sliced hidden size (rounding is reported).
        plan: path of a saved plan (or of a checkpoint that holds one) to replay instead of deciding one.
        target: auto (a stock architecture when one fits, else the pruned one) or stock (refuse otherwise).
        dtype: dtype of the weights while working.
        device: where the model is trained and cut: auto (cuda when there is one), cpu, cuda or cuda:N.
        export_dtype: dtype of the written checkpoint; None = the source checkpoint's.
        data: calibration and regularisation text.
        recovery_data: recovery text; must be disjoint from data. None = the same source, other samples. In recipes and
            on the command line samples and sequence length that it does not name are those of data, but for methods
            that score.
        stages: what happens before and after the cut.
        cut: what happens at the moment of the cut.
        verify: measure the masked model before the cut and the compacted one after it, on calibration text
            (holds one more copy of the weights meanwhile, or, from file to file, one layer's).
        score: options that all scoring methods share; None for the defaults, and for methods that score nothing.
        options: the method's own options; None = its defaults. As plain data they stand under the method's name.
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
            problems: what is known to be wrong already.

        Raises:
            ConfigError: unknown keys or values of the wrong type, all together.
        """
        problems = list(problems)
        method = data.get("method", cls.method)
        named = method if isinstance(method, str) and method != "none" else ""
        own = options()
        if named in data:
            if isinstance(data[named], Mapping):
                own = options._parse(data[named], f"{named}.", problems)
            else:
                problems.append(f"{named} is {shown(data[named])}; expected a mapping of the method's options.")
        if "options" in data:
            problems.append(f"There is no option 'options'; the options of a method stand under its name ({named}).")
        config = cls._parse({k: v for k, v in data.items() if k not in (named, "options")}, "", problems)
        if problems:
            raise ConfigError(_first(problems))
        config = replace(config, options=own)
        config.validate()
        return config

    @override
    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data that :meth:`read` reads back to an equal object."""
        data = super().to_dict()
        own = data.pop("options")
        return data if own is None or self.method == "none" else {**data, self.method: own}

    @override
    def _label(self, name: str) -> str:
        return self.method if name == "options" else name

    @property
    def score_options(self) -> ScoreConfig:
        """What ``score`` says, or its defaults."""
        return self.score or ScoreConfig()

    @property
    def adds_biases(self) -> bool:
        """Whether the cut gives the mean of what it takes back as biases."""
        return self.stages.prune and self.cut.reconstruct == "bias"

    @property
    def reads_text_at_the_cut(self) -> bool:
        """Whether calibration text shapes what the cut leaves."""
        return self.stages.prune and self.cut.reconstruct != "none"

    def trainings(self) -> Iterator[Training]:
        """The trainings of all stages, in order."""
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
        """The training by which the method decides what goes, if it does; the stages' are others."""
        if self.plan is not None or self.options is None:
            return None
        found = self.options.deciding_training(self.data.sequence_length)
        if found is None:
            return None
        return Training("decide", f"{self.method}.{found.name}", found.train, self.data, all_weights=False)

    def with_training(self, action: TrainingAction, train: TrainConfig) -> Self:
        """The same with other options of a stage's training."""
        if action == "recover":
            return replace(self, recover=replace(self.recover, train=train))
        if action == "finetune":
            return replace(self, finetune=train)
        return replace(self, options=self.options.with_training(train) if self.options is not None else None)

    @override
    def problems(self) -> list[str]:
        found: list[str] = []
        found += dict.fromkeys(problem for training in self.trainings() for problem in training.problems(self.dtype))
        if self.dtype == "float16" and self.data.sequence_length > 0 and (training := self.deciding_training()):
            found += training.problems(self.dtype)
        found += _mixed_memory(list(self.trainings()))
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
            self.stages.prune or self.cut.reconstruct == "none",
            f"cut.reconstruct is {self.cut.reconstruct!r}, but stages.prune is off: nothing is cut; set it to none.",
            found,
        )
        _require(
            self.cut.reconstruct != "bias" or self.score is None or set(self.score.axes) != {"hidden"},
            "cut.reconstruct is 'bias', but score.axes is ['hidden']; a bias stands for heads and FFN channels, so "
            "open one.",
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
        return found
