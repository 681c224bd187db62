"""Recovery of a pruned model: LoRA or all weights, on text alone or against the dense model; and the plain control."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from pyprune.config.train import OF_ADAPTERS, RecoverConfig, TrainConfig
from pyprune.data.tokens import Batch
from pyprune.errors import ConfigError, TrainingError
from pyprune.plan import PrunePlan
from pyprune.runtime import processes
from pyprune.runtime.files import check_output
from pyprune.train.distill import Distillation
from pyprune.train.loop import train
from pyprune.train.lora import adapters, merge, save_adapters, target_names
from pyprune.train.objective import LossTerms, Objective, TrainReport


class _Recovery(Objective):
    """The language-model loss, or distillation; which weights are trained is decided outside, by requires_grad."""

    def __init__(self, config: RecoverConfig, distillation: Distillation | None) -> None:
        self.config = config
        self.distillation = distillation
        self.name = ("lora" if config.adapters == "lora" else "full") + ("-distill" if distillation else "")

    def run_facts(self) -> dict[str, Any]:
        """Places, rank, scale and dropout of the adapters; options and teacher of the distillation."""
        config = self.config
        adapters = {name: getattr(config, name) for name in OF_ADAPTERS}
        return {
            **(adapters if config.adapters == "lora" else {}),
            **(self.distillation.run_facts() if self.distillation else {}),
        }

    def setup(self, model: nn.Module, config: TrainConfig) -> None:
        """Listen to both residual streams."""
        if self.distillation is not None:
            self.distillation.start(model)

    def micro_loss(self, model: nn.Module, batch: Batch) -> LossTerms:
        """Return one micro batch's loss."""
        return self.distillation.terms(model, batch) if self.distillation else super().micro_loss(model, batch)

    def teardown(self, model: nn.Module) -> None:
        """Restore both models."""
        if self.distillation is not None:
            self.distillation.stop()


def recover(
    model: PreTrainedModel,
    samples: Tensor | Batch,
    config: RecoverConfig,
    *,
    teacher: PreTrainedModel | None = None,
    plan: PrunePlan | None = None,
    validation: Tensor | Batch | None = None,
    checkpoint_dir: Path | None = None,
    resume: bool = False,
    adapter_out: str | Path | None = None,
) -> TrainReport:
    """Train ``model`` in place; class, configuration and names are kept.

    LoRA adapters sit on every linear projection of the decoder layers, of any width (the head is left alone), or on
    PEFT's default modules (``config.targets``), and are merged at the end. At a loss that is not finite the last good
    adapters are merged before the error is raised. On Ctrl-C they are dropped, and a resumable checkpoint is left in
    ``checkpoint_dir``. Without adapters all weights are trained, and both cases leave the last weights. (If several
    processes have the model on the host, only the first one gets the result.)

    Args:
        model: a causal LM, dense or pruned. Base weights under adapters may be bfloat16.
        samples: token ids, int64 [N, T], or :class:`Batch` with labels (instruction records).
        config: the trained weights, the loss, and the training options.
        teacher: the dense model, for distillation; it is not changed. It takes its own weights' memory and the
            activations of one forward pass, in addition to the student's.
        plan: of the cut from the teacher to ``model``; needed if hidden states are compared. None = nothing was cut.
        validation: for early stopping, like ``samples``.
        checkpoint_dir: folder of resumable checkpoints.
        resume: continue from the newest of them.
        adapter_out: a folder to create for the trained adapters in PEFT's format, which are for the model as it was
            before; None keeps none. Nothing is written there when the training fails.

    Raises:
        MissingDependencyError: PEFT is not installed.
        UnsupportedModelError: the model has no linear projection, or none of PEFT's default modules.
        ConfigError: distillation without a teacher or a teacher without distillation, or one that does not fit; a rank
            larger than every projection; an architecture without default modules of PEFT; ``adapter_out`` without
            adapters.
        OutputError: ``adapter_out`` exists or cannot be written.
        PlanError: the plan is not the teacher's.
        TrainingError, DataError, ConfigError: as in :func:`pyprune.train.loop.train`.
    """
    config.validate()
    if adapter_out is not None and config.adapters == "none":
        raise ConfigError(
            f"adapter_out is {adapter_out}, but adapters is 'none': all weights are trained, and there is no adapter "
            "to write. Set adapters to lora, or leave adapter_out out."
        )
    if adapter_out is not None:
        check_output(adapter_out)
    objective = recovery_objective(model, config, teacher=teacher, plan=plan)
    options: dict[str, Any] = {"validation": validation, "checkpoint_dir": checkpoint_dir, "resume": resume}
    if config.adapters == "none":
        return train(model, samples, config.train, objective, description="recovery of all weights", **options)
    targets = target_names(model, config)
    keep = False
    with adapters(model, targets, config) as adapted:
        try:
            report = train(adapted, samples, config.train, objective, description="LoRA recovery", **options)
            keep = True
            if adapter_out is not None:
                save_adapters(adapted, Path(adapter_out))
        except TrainingError:
            keep = True
            raise
        finally:
            if keep and processes.gets_result():
                merge(adapted)
            adapted.unload()
    return report


def recovery_objective(
    model: PreTrainedModel,
    config: RecoverConfig,
    *,
    teacher: PreTrainedModel | None = None,
    plan: PrunePlan | None = None,
) -> Objective:
    """Make the objective of :func:`recover`; arguments and errors are the same."""
    return _Recovery(config, _distillation(model, config, teacher, plan))


def _distillation(
    model: PreTrainedModel, config: RecoverConfig, teacher: PreTrainedModel | None, plan: PrunePlan | None
) -> Distillation | None:
    if config.distill is None:
        if teacher is not None:
            raise ConfigError("A teacher was given, but recover.distill is null, so it would not be used; set distill.")
        return None
    if teacher is None:
        raise ConfigError(
            "recover.distill learns from the dense model, and none was given. Give teacher (a second copy of the dense "
            "model, made before the cut), or set recover.distill to null."
        )
    return Distillation(model, teacher, config.distill, plan)


def finetune(
    model: PreTrainedModel,
    samples: Tensor | Batch,
    config: TrainConfig,
    *,
    validation: Tensor | Batch | None = None,
    checkpoint_dir: Path | None = None,
    resume: bool = False,
) -> TrainReport:
    """Fine-tune all weights of ``model`` in place: the control for every method. Arguments as in :func:`train`."""
    return train(
        model,
        samples,
        config,
        validation=validation,
        checkpoint_dir=checkpoint_dir,
        resume=resume,
        description="fine-tuning",
    )
