"""The options of the one training loop, of recovery and of distillation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from typing_extensions import override

from pyprune.config.base import LARGEST_SEED, LARGEST_WEIGHT, Config, option
from pyprune.errors import shown

HALF_DTYPES = ("bfloat16", "float16")
LARGEST_BATCH = 65_536
LARGEST_RANK = 65_536
LONGEST_RUN = 100_000_000
"""Steps."""


def micro_batch_for(batch_size: int, sequence_length: int, max_tokens: int = 2048) -> int:
    """Return the largest divisor of ``batch_size`` whose micro batch holds at most ``max_tokens`` (at least 1)."""
    return largest_divisor(batch_size, max(1, max_tokens // sequence_length))


def largest_divisor(number: int, at_most: int) -> int:
    """Return the largest divisor of ``number`` (at least 1) that is not above ``at_most`` (at least 1)."""
    return next(d for d in range(min(number, at_most), 0, -1) if number % d == 0)


@dataclass(frozen=True)
class TrainConfig(Config):
    """The one training loop's options; a preset names those that it changes, and the paper's constants.

    Attributes:
        optimizer: fused_adamw (decoupled weight decay; pyprune's own kernel, if there is one, with DReSS's penalty
            and the clipping in its pass), adamw (torch's own), adam (no decay), or sgd (with momentum 0).
        learning_rate: peak learning rate.
        weight_decay: decoupled decay per unit learning rate.
        steps: optimizer steps, at most.
        batch_size: sequences per optimizer step.
        micro_batch_size: sequences per forward pass, at most: the largest divisor of batch_size up to it is used, and
            gradients are accumulated over batch_size sequences.
        warmup_steps: linear warm-up, steps.
        decay: learning-rate schedule after the warm-up.
        max_grad_norm: global gradient-norm clip; None = no clipping.
        dtype: compute dtype: float32, bfloat16 (autocast over float32 weights), or auto: bfloat16 if the device
            multiplies faster in it or the weights have it (lean ``memory``), else float32.
        gradient_checkpointing: recompute activations in the backward pass.
        compile: run the decoder layers under torch.compile, each size of a layer compiled at its first step. It needs a
            C++ compiler on a CPU and Triton on a GPU. It uses less memory than the run predicts.
        memory: full (float32 weights and moments, gradients of all weights), lean (bfloat16 weights with stochastic
            rounding, 8-bit moments, each weight stepped inside backward as soon as its gradient exists), or auto: full
            if that fits in the device's memory, else lean. Lean clips each gradient by its own norm. It holds the
            gradients of all weights, in bfloat16, only if a step has several forward passes.
        copies: place of the last good weights (to return to when a loss is not finite) and of the best ones (of early
            stopping): device, host (the CPU's memory), off (neither is kept), or auto: device when memory is full;
            when it is lean the host of a GPU, and on a CPU off unless training stops early.
        last_good_interval: steps between two copies of the last good weights.
        early_stop_patience: evaluations without improvement before stopping; None = off.
        early_stop_min_delta: smallest improvement of the validation loss that counts.
        validation_interval: steps between two validations (used when early stopping is on).
        checkpoint_interval: steps between two resumable checkpoints; None = only at the end and when the run is
            interrupted. Several processes cannot save when one is lost; for them None is a tenth of the steps.
        seed: seed of the order of samples and of dropout.
    """

    optimizer: Literal["adamw", "fused_adamw", "adam", "sgd"] = "fused_adamw"
    learning_rate: float = option(2e-5, above=0, at_most=LARGEST_WEIGHT)
    weight_decay: float = option(0.0, at_least=0, at_most=LARGEST_WEIGHT)
    steps: int = option(100, at_least=1, at_most=LONGEST_RUN)
    batch_size: int = option(64, at_least=1, at_most=LARGEST_BATCH)
    micro_batch_size: int = option(1, at_least=1, at_most=LARGEST_BATCH)
    warmup_steps: int = option(0, at_least=0, at_most=LONGEST_RUN)
    decay: Literal["constant", "linear", "cosine"] = "constant"
    max_grad_norm: float | None = option(1.0, above=0, otherwise=", or null for no clipping")
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    gradient_checkpointing: bool = False
    compile: bool = False
    memory: Literal["auto", "full", "lean"] = "auto"
    copies: Literal["auto", "device", "host", "off"] = "auto"
    last_good_interval: int = option(10, at_least=1, at_most=LONGEST_RUN)
    early_stop_patience: int | None = option(None, at_least=1, at_most=LONGEST_RUN)
    early_stop_min_delta: float = option(1e-4, at_least=0)
    validation_interval: int = option(10, at_least=1, at_most=LONGEST_RUN)
    checkpoint_interval: int | None = option(None, at_least=1, at_most=LONGEST_RUN)
    seed: int = option(0, at_least=0, at_most=LARGEST_SEED)

    @property
    def sequences_per_pass(self) -> int:
        """Return the sequences in each forward pass."""
        return largest_divisor(self.batch_size, self.micro_batch_size)

    @property
    def passes(self) -> int:
        """Return the forward passes in one optimizer step."""
        return self.batch_size // self.sequences_per_pass

    @override
    def problems(self) -> Iterator[str]:
        lean = self.memory == "lean"
        if lean and self.optimizer == "sgd":
            yield (
                "memory is 'lean' with optimizer 'sgd', which has no moments to store in 8 bits and would round small "
                "updates of bfloat16 weights to nothing; use 'adamw', 'fused_adamw' or 'adam', or memory 'full'."
            )
        if lean and self.dtype == "float32":
            yield (
                "memory is 'lean', which holds the weights in bfloat16, but dtype is 'float32'; set dtype to auto, or "
                "memory to 'full'."
            )
        if self.optimizer == "adam" and self.weight_decay:
            yield f"weight_decay is {shown(self.weight_decay)} with optimizer 'adam', which has none; use 'adamw'."


@dataclass(frozen=True)
class DistillConfig(Config):
    """Knowledge distillation from the dense model; every term is a mean over the predicted tokens:

        loss = (1 - alpha) CE + alpha temperature^2 KL(teacher || student) + hidden D

    CE is the language-model loss in nats. KL (nats) compares softmax(logits / temperature) of both (Hinton et al. 2015,
    section 2, whose factor temperature^2 keeps the gradient's size when the temperature changes). D is the squared
    difference of the residual streams relative to the teacher's, mean over the kept layers
    (:mod:`pyprune.train.distill`).

    Attributes:
        alpha: share of the teacher's distribution, in [0, 1], no unit; 0 leaves the text's own tokens alone.
        temperature: softens both distributions, at least 0.001, no unit.
        hidden: weight of D, nats per unit of D; 0 = the hidden states are not compared.
        chunk: tokens whose logits are held at once.
        teacher_dtype: dtype of the teacher's weights when it is loaded for distillation; None = the training dtype.
        teacher_placement: place of the loaded teacher: device (several processes with models on the host divide it
            among their devices), files (each of its layers is read from safetensors whenever it runs, and one layer is
            in memory at a time), or auto: device if the training then fits, else files.
    """

    alpha: float = option(0.5, at_least=0, at_most=1)
    temperature: float = option(1.0, at_least=1e-3, at_most=LARGEST_WEIGHT)
    hidden: float = option(0.0, at_least=0, at_most=LARGEST_WEIGHT)
    chunk: int = option(256, at_least=1, at_most=1_000_000, unit="tokens")
    teacher_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    teacher_placement: Literal["auto", "device", "files"] = "auto"

    @override
    def problems(self) -> Iterator[str]:
        if self.alpha <= 0 and self.hidden <= 0:
            yield "alpha and hidden are 0, so the teacher would not count; raise one of them, or set distill to null."


OF_NO_RESULT = ("teacher_placement",)
"""Options that do not change the result of a run: it can be resumed with any of their values."""

OF_ADAPTERS = ("targets", "rank", "alpha", "dropout")
"""Options of a recovery that only its adapters read."""


@dataclass(frozen=True)
class RecoverConfig(Config):
    """Recovery of a pruned model: what is trained (adapters or all weights) and on which loss.

    Attributes:
        adapters: lora trains low-rank adapters through PEFT, merged before export; none trains all weights.
        targets: modules that get an adapter: all-linear (every projection of the decoder layers) or default (PEFT's
            choice for the architecture: q_proj and v_proj for LLaMA).
        rank: LoRA rank.
        alpha: LoRA scale numerator (scale = alpha / rank).
        dropout: LoRA dropout probability.
        distill: learn from the dense model as well; None = the language-model loss alone.
        train: the training loop's options.
    """

    adapters: Literal["lora", "none"] = "lora"
    targets: Literal["all-linear", "default"] = "all-linear"
    rank: int = option(32, at_least=1, at_most=LARGEST_RANK)
    alpha: float = option(10.0, above=0, at_most=LARGEST_WEIGHT)
    dropout: float = option(0.0, at_least=0, below=1)
    distill: DistillConfig | None = None
    train: TrainConfig = field(default_factory=TrainConfig)

    @property
    def idle(self) -> dict[str, str]:
        """Return options that the values of others switch off: name -> the option and the value that do it."""
        return {} if self.adapters == "lora" else dict.fromkeys(OF_ADAPTERS, f"adapters {self.adapters!r}")

    @property
    def teacher_dtype(self) -> str:
        """Return the dtype of the loaded teacher's weights: the chosen one, else the training dtype, or auto."""
        return (self.distill.teacher_dtype if self.distill else None) or self.train.dtype
