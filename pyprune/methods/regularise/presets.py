"""Presets of the regularising methods: complete options by name. Plain data; importing this file imports no torch.

``<method>`` is what we recommend, ``<method>-paper`` has the papers' constants. The papers name neither optimizer nor
number of steps nor epochs; those constants are ours and marked so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pyprune.config.data import DataConfig
from pyprune.config.regularise import DressConfig, ElderConfig, GateConfig
from pyprune.config.run import PruneConfig, StageConfig
from pyprune.config.train import RecoverConfig, TrainConfig


def published_training(steps: int, validation_interval: int) -> TrainConfig:
    """The papers' training constants: lr 2e-5, batch 64, patience 5, min delta 1e-4; AdamW and steps are ours."""
    return TrainConfig(
        optimizer="adamw",
        learning_rate=2e-5,
        weight_decay=0.0,
        steps=steps,
        batch_size=64,
        micro_batch_size=1,
        warmup_steps=0,
        decay="constant",
        max_grad_norm=1.0,
        dtype="bfloat16",
        early_stop_patience=5,
        early_stop_min_delta=1e-4,
        validation_interval=validation_interval,
    )


def short_training() -> TrainConfig:
    """20 steps of 8 x 256 tokens: what two CPU cores do in a few minutes on a 135M model (all constants ours)."""
    return TrainConfig(
        optimizer="fused_adamw",
        learning_rate=3e-4,
        weight_decay=0.0,
        steps=20,
        batch_size=8,
        micro_batch_size=8,
        warmup_steps=2,
        decay="cosine",
        max_grad_norm=1.0,
        dtype="bfloat16",
    )


def _dress_paper() -> PruneConfig:
    """DReSS with the paper's constants: l2, lambda 1e-3, last 25 %, 750 + 250 samples of 2048, LoRA recovery."""
    return PruneConfig(
        method="dress",
        ratio=0.25,
        ratio_of="hidden",
        data=DataConfig("wikitext2", "train", samples=750, sequence_length=2048),
        recovery_data=DataConfig("wikitext2", "train", samples=250, sequence_length=2048, seed=1),
        stages=StageConfig(before=("regularise",), after=("recover",)),
        # 750 samples are 12 steps an epoch; about 700 steps are what lr 2e-5 needs to bring weights of size
        # 0.02 to the 30 % of Figure 5.
        dress=DressConfig(
            select="last",
            norm="l2",
            penalty_weight=1e-3,
            solver="subgradient",
            schedule="published",
            target_preserved_ratio=0.3,
            train=published_training(steps=720, validation_interval=12),
        ),
        recover=RecoverConfig(rank=32, alpha=10.0, train=published_training(steps=40, validation_interval=4)),
        finetune=published_training(steps=40, validation_interval=4),
    )


def _dress_paper_opt() -> PruneConfig:
    """DReSS with the paper's constants for OPT-2.7B: lambda 5e-3."""
    base = _dress_paper()
    return replace(base, dress=replace(base.dress, penalty_weight=5e-3))


def _dress() -> PruneConfig:
    """DReSS, recommended: channels of the smallest norm are annealed to exactly zero while the rest is trained."""
    return PruneConfig(
        method="dress",
        ratio=0.25,
        ratio_of="hidden",
        data=DataConfig("wikitext2", "train", samples=160, sequence_length=256),
        stages=StageConfig(before=("regularise",)),
        dress=DressConfig(
            select="scored",
            norm="l2",
            penalty_weight=0.0,
            schedule="anneal",
            anneal_share=0.5,
            target_preserved_ratio=0.05,
            train=short_training(),
        ),
        finetune=short_training(),
    )


def _elder_paper() -> PruneConfig:
    """ELDeR with the papers' constants: lambda1 5e-3, lambda2 1e-3, 128 samples of 2048, no recovery."""
    return PruneConfig(
        method="elder",
        ratio=0.25,
        ratio_of="layers",
        data=DataConfig("wikitext2", "train", samples=128, sequence_length=2048),
        stages=StageConfig(before=("regularise",)),
        # Steps and learning rate of the gates are ours: the papers name neither. 128 samples are 2 steps an epoch.
        elder=ElderConfig(
            gates=GateConfig(
                placement="residual",
                search="greedy",
                penalty_weight=5e-3,
                learning_rate=1e-2,
                first_round_steps=40,
                round_steps=10,
                batch_size=4,
            ),
            norm="l2",
            penalty_weight=1e-3,
            schedule="published",
            train=published_training(steps=100, validation_interval=2),
        ),
        recover=RecoverConfig(rank=32, alpha=10.0, train=published_training(steps=40, validation_interval=4)),
        finetune=published_training(steps=100, validation_interval=2),
    )


def _elder_paper_literal() -> PruneConfig:
    """ELDeR with the gate exactly as printed (scaling the whole stream), which drives the last layers out first."""
    base = _elder_paper()
    gates = replace(base.elder.gates, placement="output")
    return replace(base, elder=replace(base.elder, gates=gates))


def _trsp_paper() -> PruneConfig:
    """TRSP with its paper's constants; ELDeR under its first name."""
    return replace(_elder_paper(), method="trsp")


def _elder() -> PruneConfig:
    """ELDeR, recommended: well-trained residual gates, then the chosen layers are faded out during training."""
    return PruneConfig(
        method="elder",
        ratio=0.25,
        ratio_of="layers",
        data=DataConfig("wikitext2", "train", samples=160, sequence_length=256),
        stages=StageConfig(before=("regularise",)),
        elder=ElderConfig(
            gates=GateConfig(
                placement="residual",
                search="greedy",
                penalty_weight=5e-2,
                learning_rate=3e-2,
                first_round_steps=40,
                round_steps=10,
                batch_size=4,
            ),
            norm="l2",
            penalty_weight=0.0,
            schedule="anneal",
            anneal_share=0.25,
            train=short_training(),
        ),
        finetune=short_training(),
    )


def _trsp() -> PruneConfig:
    """TRSP, recommended: the same as elder."""
    return replace(_elder(), method="trsp")


PRESETS: dict[str, Callable[[], PruneConfig]] = {
    "dress": _dress,
    "dress-paper": _dress_paper,
    "dress-paper-opt": _dress_paper_opt,
    "elder": _elder,
    "elder-paper": _elder_paper,
    "elder-paper-literal": _elder_paper_literal,
    "trsp": _trsp,
    "trsp-paper": _trsp_paper,
}
"""Preset name -> function that builds its options (whose docstring describes it)."""
