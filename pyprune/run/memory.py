"""Predict the memory of a run's trainings, and choose ``train.memory``, before a model is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from pyprune.checkpoint.load import ModelSource
from pyprune.config.run import PruneConfig, RecoverCheckpointConfig, Training
from pyprune.config.train import TrainConfig
from pyprune.data.stream import check_sequence_length
from pyprune.errors import ConfigError, did_you_mean
from pyprune.families import family_for
from pyprune.methods.registry import get_method
from pyprune.plan import PrunePlan
from pyprune.runtime import processes
from pyprune.runtime.device import agree_on_bfloat16, device_memory, resolve_device, working_dtype
from pyprune.runtime.modes import frozen
from pyprune.runtime.processes import Division
from pyprune.runtime.progress import say, warn
from pyprune.runtime.report import Table, markdown_table
from pyprune.train.compiled import check_compiler
from pyprune.train.lora import recovery_model
from pyprune.train.memory import FUSED, PARTS, TrainingMemory, training_memory
from pyprune.train.objective import Objective
from pyprune.train.recover import recovery_objective
from pyprune.train.sharded import check_shares

Run = TypeVar("Run", PruneConfig, RecoverCheckpointConfig)

TEACHER_PLACEMENT = "recover.distill.teacher_placement"

PLACEMENTS = ("auto", "device", "host")
"""Where several processes have the model while nothing trains."""

LARGEST_ON_DEVICE = 0.5
"""Largest share of a device's free memory for a model that is scored and cut there."""

WORTH_A_TABLE = 0.1
"""Share of a device's free memory from which a run predicts each training part by part.

Below it, one line has an upper bound: a prediction runs the training on shapes, which takes 2 s for a tiny model and
20 s for one of 30 layers.
"""


@dataclass(frozen=True)
class TrainedModels:
    """The models that the trainings of a run hold.

    Attributes:
        model: the one that is trained.
        teacher: the dense model, for distillation; None = ``model`` itself.
        plan: by which ``model`` was cut already; None = it is dense.
        on_host: whether several processes have the models on the host, so that they divide a teacher too.
    """

    model: ModelSource
    teacher: ModelSource | None = None
    plan: PrunePlan | None = None
    on_host: bool = False

    @property
    def dense(self) -> ModelSource:
        """Return the model that teaches."""
        return self.teacher or self.model


def within_memory(models: TrainedModels, config: Run, *, always: bool = False) -> Run:
    """Choose ``memory`` for every training on auto, print the predictions, and refuse a training that does not fit.

    The training by which a method decides (gates of layers) is predicted too; it has no option ``memory``.

    Auto becomes full where all trainings of all weights fit into the device's memory, and lean otherwise. Lean loads
    the weights in bfloat16. For a small model on a large device, only an upper bound is printed.

    Args:
        models: of the run.
        config: of the run, checked.
        always: estimate small models part by part too.

    Returns:
        The options with ``memory`` chosen, and with ``dtype`` bfloat16 where it is lean.

    Raises:
        ConfigError: trainings that do not fit; the message has options that need less memory. Or ``compile`` where
            torch.compile does not work.
        DataError: sequences that are longer than the model allows.
        PypruneError: as :func:`pyprune.checkpoint.load.ModelSource.shapes`.
    """
    config = adopt_lean_dtype(config)
    trainings = _all_trainings(config)
    if not trainings:
        return config
    if learns_from_files(config) and (obstacle := models.dense.layers_obstacle()):
        raise ConfigError(f"{TEACHER_PLACEMENT} is 'files', but {obstacle}; use 'device'.")
    for training in config.trainings():
        check_shares(training.train.batch_size, f"{training.name}.batch_size")
    device = resolve_device(config.device)
    if any(training.train.compile for training in config.trainings()):
        check_compiler(device)
    capacity = device_capacity(device)
    model = models.model.shapes(config.dtype)
    for training in trainings:
        check_sequence_length(model.config, training.data.sequence_length)
    at_most = memory_estimate(models, model, config)
    if not always and at_most <= WORTH_A_TABLE * capacity:
        mib = math.ceil(at_most / 2**20)
        say(f"Memory at the peak: at most about {mib:,} MiB, of {_gib(capacity)} on {device}{_each()}.", "dim")
        # The same choice as for a large model, so that the run may be resumed on another machine.
        return set_memory(config, lean=config.dtype == "bfloat16")
    decided, predicted = memory_of(models, config, device, capacity)
    if decided.dtype != config.dtype:
        say("Memory is lean: the weights are loaded in bfloat16, and rounded stochastically as they are trained.")
    if learns_from_files(decided) and not learns_from_files(config):
        say("The dense model is not loaded while it teaches: each layer is read from its files whenever it is run.")
    say(memory_table(predicted, device, capacity))
    estimator = MemoryEstimator(models, decided, device)
    beyond = [(training, memory) for training, memory in predicted if memory.total > capacity]
    if beyond:
        raise ConfigError([_refusal(*each, estimator, decided.dtype, device, capacity) for each in beyond])
    return decided


def place_models(
    models: TrainedModels, config: PruneConfig, placement: str, *, always: bool = False
) -> tuple[Division, PruneConfig]:
    """Choose how the processes divide a run, and its ``memory``.

    Args:
        models: of the run.
        config: of the run, checked.
        placement: see :func:`division_of`.
        always: see :func:`within_memory`.

    Raises:
        ConfigError: see both.
        PypruneError: as :func:`pyprune.checkpoint.load.ModelSource.shapes`.
    """
    division = division_of(models, config, placement)
    decided = within_memory(replace(models, on_host=division.on_host), config, always=always)
    other = division if decided.dtype == config.dtype else division_of(models, decided, placement)
    if other != division:  # in lean memory the weights are half as large
        division, decided = other, within_memory(replace(models, on_host=other.on_host), config, always=always)
    return division, decided


def division_of(models: TrainedModels, config: PruneConfig, placement: str) -> Division:
    """Choose how the processes divide a run, by where they keep the model while nothing trains.

    Args:
        models: of the run.
        config: of the run, checked.
        placement: device (each process a whole one), host (the first process; see
            :class:`pyprune.runtime.processes.Division`), or auto: device where the weights fill at most half of it.

    Raises:
        ConfigError: an unknown placement, a training by which the method decides that the processes cannot share, or
            code of the repository's own for a model that only the first process has.
    """
    if placement not in PLACEMENTS:
        raise ConfigError(did_you_mean(placement, PLACEMENTS, "placement"))
    if processes.count() == 1:
        if placement != "auto":
            warn(f"--placement {placement} is for several processes (torchrun); this run has one.")
        return Division()
    agree_on_bfloat16()  # the first process may ask alone later
    device, config = resolve_device(config.device), adopt_lean_dtype(config)
    weights = sum(p.nbytes for p in models.model.shapes(config.dtype).parameters())
    remote = models.model.trust_remote_code
    if remote and placement == "host":
        raise ConfigError(
            "--placement host is for models that Transformers knows: the other processes make them from their "
            "configuration, without the repository's own code. Leave --trust-remote-code or --placement out."
        )
    if placement == "auto":
        placement = "host" if not remote and weights > LARGEST_ON_DEVICE * device_capacity(device) else "device"
    if placement == "device":
        return Division()
    deciding = config.deciding_training()
    if deciding is not None:
        check_shares(deciding.train.batch_size, f"{deciding.name}.batch_size")
    return Division(device, "first")


def device_capacity(device: torch.device) -> int:
    """Return the bytes that each process of this run may use on its device."""
    # Processes on one machine share its memory; GPUs are not shared.
    sharing = processes.local_count() if device.type == "cpu" else 1
    return processes.least(device_memory(device) // sharing)  # machines and cards may differ


def memory_of(
    models: TrainedModels, config: Run, device: torch.device, capacity: int
) -> tuple[Run, list[tuple[Training, TrainingMemory]]]:
    """Return the options with ``memory`` and the teacher's place chosen, and the memory of each training with them.

    Args:
        models: of the run.
        config: of the run, checked.
        device: of the trainings.
        capacity: bytes that a training may use.
    """
    estimator = MemoryEstimator(models, config, device)
    decided = _choose_memory(config, estimator, capacity)
    predicted = [(training, estimator.at(training, decided.dtype)) for training in _all_trainings(decided)]
    if _leaves_teacher_open(config) and not _recovery_fits(predicted, capacity):
        of_files = memory_of(models, _with_teacher(config, "files"), device, capacity)
        if _recovery_fits(of_files[1], capacity) and models.dense.layers_obstacle() is None:
            return of_files
    return decided, predicted


def _recovery_fits(predicted: list[tuple[Training, TrainingMemory]], capacity: int) -> bool:
    return all(memory.total <= capacity for training, memory in predicted if training.action == "recover")


def learns_from_files(config: PruneConfig | RecoverCheckpointConfig) -> bool:
    """Check whether a run recovers from a dense model whose layers stay in their files."""
    distill = config.recover.distill
    recovers = any(training.action == "recover" for training in config.trainings())
    return recovers and distill is not None and distill.teacher_placement == "files"


def _leaves_teacher_open(config: PruneConfig | RecoverCheckpointConfig) -> bool:
    distill = config.recover.distill
    return distill is not None and distill.teacher_placement == "auto"


def _with_teacher(config: Run, placement: Literal["device", "files"]) -> Run:
    """Set the teacher's placement, where there is a teacher."""
    distill = config.recover.distill
    if distill is None:
        return config
    return replace(config, recover=replace(config.recover, distill=replace(distill, teacher_placement=placement)))


def _all_trainings(config: PruneConfig | RecoverCheckpointConfig) -> list[Training]:
    """Return the training of the decision and those of all stages, in order."""
    deciding = config.deciding_training()
    return [*([] if deciding is None else [deciding]), *config.trainings()]


def adopt_lean_dtype(config: Run) -> Run:
    """Load the weights in bfloat16 where all of them are trained lean, or, without such a training, any is."""
    trainings = list(config.trainings())
    lean = any(t.train.memory == "lean" for t in [t for t in trainings if t.all_weights] or trainings)
    return replace(config, dtype="bfloat16") if lean and config.dtype == "float32" else config


def memory_table(predicted: list[tuple[Training, TrainingMemory]], device: torch.device, capacity: int) -> str:
    """Return a Markdown table of each training's peak memory in GiB, for the dense model: at most that after a cut."""
    columns = ("training", "memory", "a forward pass", *PARTS, "peak")
    rows = [
        (
            training.name,
            m.memory + (", steps in backward" if m.in_backward else ""),
            f"{m.sequences} x {m.length} tokens" + (", checkpointing" if m.checkpointing else ""),
            *(f"{getattr(m, part) / 2**30:.2f}" for part in PARTS),
            f"{m.total / 2**30:.2f}" + (f" (and {m.on_host / 2**30:.2f} on the host)" if m.on_host else ""),
        )
        for training, m in predicted
    ]
    title = f"Memory at the peak, GiB of at most {capacity / 2**30:.1f} on {device}{_each()}"
    return f"{title}:\n{markdown_table(Table(title, columns, tuple(rows)))}"


def _each() -> str:
    return f", in each of {processes.count()} processes" if processes.count() > 1 else ""


def memory_estimate(
    models: TrainedModels, model: PreTrainedModel, config: PruneConfig | RecoverCheckpointConfig
) -> int:
    """Return an upper bound on the memory of any training in bytes, from sizes alone."""
    trainings = _all_trainings(config)
    parameters = sum(p.numel() for p in model.parameters())
    widest = max(p.shape[0] for p in model.parameters() if p.ndim == 2)
    layers, hidden = int(model.config.num_hidden_layers), int(model.config.hidden_size)
    tokens = max(t.train.sequences_per_pass * t.data.sequence_length for t in trainings)
    activations = tokens * (8 * widest + 200 * layers * hidden + _attention_score_bytes(model, trainings))
    return 24 * parameters + activations + _teacher_bytes(models, model, config)


def _attention_score_bytes(model: PreTrainedModel, trainings: list[Training]) -> int:
    """Return the bytes per token of attention scores that are not fused: float32 copies in each layer."""
    if model.config._attn_implementation in FUSED:
        return 0
    longest = max(t.data.sequence_length for t in trainings)
    return 16 * int(model.config.num_hidden_layers) * int(model.config.num_attention_heads) * longest


def _teacher_bytes(models: TrainedModels, model: PreTrainedModel, config: PruneConfig | RecoverCheckpointConfig) -> int:
    """Return the bytes of the dense model's weights in float32 and of its logits; 0 without distillation."""
    recoveries = [t for t in config.trainings() if t.action == "recover"]
    if config.recover.distill is None or not recoveries:
        return 0
    teacher = model if models.teacher is None else models.dense.shapes()
    tokens = max(t.train.sequences_per_pass * t.data.sequence_length for t in recoveries)
    return 4 * sum(p.numel() for p in teacher.parameters()) + 8 * tokens * int(teacher.config.vocab_size)


class MemoryEstimator:
    """Predicts the peak memory of a training, from its options and the dtype of the weights.

    Args:
        models: of the run.
        config: of the run.
        device: where the real model will be.
    """

    def __init__(
        self, models: TrainedModels, config: PruneConfig | RecoverCheckpointConfig, device: torch.device
    ) -> None:
        self.models = models
        self.config = config
        self.device = device
        self._known: dict[tuple[str, TrainConfig, int, str], TrainingMemory] = {}

    def at(self, training: Training, dtype: str) -> TrainingMemory:
        """Predict the memory of a training with weights in ``dtype``."""
        key = (training.name, training.train, training.data.sequence_length, dtype)
        if key not in self._known:
            self._known[key] = self._measure(training, dtype)
        return self._known[key]

    def _measure(self, training: Training, dtype: str) -> TrainingMemory:
        model, teacher = self.models.model.shapes(dtype), self._teacher(training)
        length = training.data.sequence_length
        with self._objective(training, model, teacher) as (trained, objective):
            return training_memory(
                trained,
                training.train,
                objective,
                length,
                device=self.device,
                teacher=teacher,
                teacher_in="files" if learns_from_files(self.config) else "shares" if self.models.on_host else "device",
                # A whole model on each device decides as a whole.
                shares=1 if training.action == "decide" and not self.models.on_host else None,
            )

    def _teacher(self, training: Training) -> PreTrainedModel | None:
        recover = replace(self.config.recover, train=training.train)
        if training.action != "recover" or recover.distill is None:
            return None
        return self.models.dense.shapes(working_dtype(recover.teacher_dtype, self.device))

    @contextmanager
    def _objective(
        self, training: Training, model: PreTrainedModel, teacher: PreTrainedModel | None
    ) -> Iterator[tuple[nn.Module, Objective]]:
        """Give the trained module and its objective for the time of a block."""
        config = self.config
        if training.action == "recover":
            recover = replace(config.recover, train=training.train)
            objective = recovery_objective(model, recover, teacher=teacher, plan=self.models.plan)
            with recovery_model(model, recover) as trained:
                yield trained, objective
        elif training.action == "regularise" and isinstance(config, PruneConfig):
            yield model, _method_objective(get_method(config.method).objective, model, config)
        elif training.action == "decide" and isinstance(config, PruneConfig):
            with frozen(model):
                yield model, _method_objective(get_method(config.method).deciding_objective, model, config)
        else:
            yield model, Objective()


def _method_objective(
    make: Callable[[PrunePlan, Any], Any] | None, model: PreTrainedModel, config: PruneConfig
) -> Objective:
    """Return a method's objective for some plan of the right size: which layers are removed changes no memory."""
    method = get_method(config.method)
    if make is None:
        return Objective()
    plan = family_for(model).plan(model.config)
    if method.axis == "layers":
        plan = plan.drop_layers(range(max(1, int(config.ratio * len(plan.layers)))))
    elif method.axis == "hidden":
        plan = plan.keep_hidden(range(max(1, int((1 - config.ratio) * len(plan.hidden)))))
    objective: Objective = make(plan, config.options or method.options())
    return objective


def _choose_memory(config: Run, estimator: MemoryEstimator, capacity: int) -> Run:
    """Choose full or lean for the trainings on auto, all alike, because they train the same weights."""
    whole = [t for t in config.trainings() if t.all_weights]
    auto = [t for t in whole if t.train.memory == "auto"]
    lean = config.dtype == "bfloat16"
    if not lean and all(t.may_be_lean for t in whole):
        full = [t._replace(train=replace(t.train, memory="full")) for t in auto]
        lean = any(estimator.at(t, config.dtype).total > capacity for t in full)
    return set_memory(config, lean=lean)


def set_memory(config: Run, *, lean: bool) -> Run:
    """Set lean or full in every training of all weights on auto, and the device for the teacher."""
    if _leaves_teacher_open(config):
        config = _with_teacher(config, "device")
    for training in [t for t in config.trainings() if t.all_weights and t.train.memory == "auto"]:
        train = replace(training.train, memory="lean" if lean else "full")
        config = config.with_training(training.action, train)
    config = adopt_lean_dtype(config)
    config.validate()
    return config


def _refusal(
    training: Training,
    predicted: TrainingMemory,
    estimator: MemoryEstimator,
    dtype: str,
    device: torch.device,
    capacity: int,
) -> str:
    """Return the message for a training that does not fit: its memory, and the options that need less."""
    lines = []
    for options, other, other_dtype in _smaller_trainings(training, dtype):
        total = estimator.at(other, other_dtype).total
        if total < predicted.total:
            lines.append(f"- {', '.join(options)}: {_gib(total)}")
    for option, other_estimator in _other_placements(training, estimator, device):
        total = other_estimator.at(training, dtype).total
        if total < predicted.total:
            lines.append(f"- {option}: {_gib(total)}")
    advice = "\nWith other options it would hold less:\n" + "\n".join(lines) if lines else ""
    held = ", ".join(f"{part} {_gib(getattr(predicted, part))}" for part in PARTS)
    return (
        f"{training.name} would hold {_gib(predicted.total)} at its peak ({held}), and {device} has {_gib(capacity)} "
        f"free.{advice}\nOr take shorter sequences, or a device with more memory."
    )


def _other_placements(
    training: Training, estimator: MemoryEstimator, device: torch.device
) -> Iterator[tuple[str, MemoryEstimator]]:
    """Yield options that place models elsewhere, with an estimator for each."""
    models, config = estimator.models, estimator.config
    distill = config.recover.distill if training.action == "recover" else None
    on_device = distill is not None and distill.teacher_placement == "device" and Path(models.dense.name).is_dir()
    if on_device and models.dense.layers_obstacle() is None:  # no files are fetched for advice
        yield f"{TEACHER_PLACEMENT}=files", MemoryEstimator(models, _with_teacher(cast(Any, config), "files"), device)
    if processes.count() > 1 and isinstance(config, PruneConfig) and not models.on_host:
        yield "--placement host", MemoryEstimator(replace(models, on_host=True), config, device)


def _smaller_trainings(training: Training, dtype: str) -> Iterator[tuple[list[str], Training, str]]:
    """Yield options that need less memory, each added to those before: (what to set, the training, dtype)."""
    train, options = training.train, []
    steps: list[tuple[str, dict[str, Any]]] = []
    deciding = training.action == "decide"  # its batch is fixed, and checkpointing is the method's
    if not train.gradient_checkpointing:
        place = f"{training.name.partition('.')[0]}.train" if deciding else training.name
        steps.append((f"{place}.gradient_checkpointing=true", {"gradient_checkpointing": True}))
    if train.sequences_per_pass > 1 and not deciding:
        steps.append((f"{training.name}.micro_batch_size=1", {"micro_batch_size": 1}))
    lean: dict[str, Any] = {"memory": "lean"} | ({"dtype": "auto"} if train.dtype == "float32" else {})
    if training.all_weights and train.memory == "full" and not list(replace(train, **lean).problems()):
        changed = {name: value for name, value in lean.items() if getattr(train, name) != value}
        steps.append((", ".join(f"{training.name}.{name}={value}" for name, value in changed.items()), changed))
    if not training.all_weights and dtype == "float32":
        steps.append(("dtype=bfloat16", {}))
    for option, change in steps:
        options.append(option)
        train = replace(train, **change)
        half = train.memory == "lean" or option == "dtype=bfloat16"
        yield list(options), training._replace(train=train), "bfloat16" if half else dtype


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
