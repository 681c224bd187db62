"""Recoveries by name: text, adapters, loss and training options together. Plain data; importing this imports no torch.

`pyprune prune --recovery NAME` runs one after the cut of any method; `pyprune recover --preset NAME` applies it to an
already pruned checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pyprune.config.data import DataConfig
from pyprune.config.run import RecoverCheckpointConfig
from pyprune.config.train import DistillConfig, RecoverConfig, TrainConfig
from pyprune.errors import ConfigError, did_you_mean


def recovery(name: str) -> RecoverCheckpointConfig:
    """Return the options of a recovery.

    Raises:
        ConfigError: there is none of this name; the message lists them.
    """
    if name not in RECOVERIES:
        raise ConfigError(did_you_mean(name, RECOVERIES, "recovery"))
    return RECOVERIES[name]()


def as_prune_options(name: str) -> dict[str, Any]:
    """Return the options that a recovery adds to those of `pyprune prune`, as plain data.

    Raises:
        ConfigError: there is none of this name.
    """
    data = recovery(name).to_dict()
    return {"recovery_data": data["data"], "recover": data["recover"], "stages": {"after": ["recover"]}}


def _alpaca_lora() -> RecoverCheckpointConfig:
    """MoreauPruner's recovery: LoRA r=8, alpha=16, 49k cleaned Alpaca records of <= 256 tokens, 2 epochs, lr 1e-4."""
    return RecoverCheckpointConfig(
        data=DataConfig("alpaca", "train", samples=49_000, sequence_length=256, layout="instructions"),
        recover=RecoverConfig(
            rank=8,
            alpha=16.0,
            # Dropout, warm-up and decay are those of LLM-Pruner's script, which the paper uses.
            dropout=0.05,
            train=TrainConfig(
                learning_rate=1e-4,
                steps=2 * 49_000 // 64,
                batch_size=64,
                micro_batch_size=4,
                warmup_steps=100,
                decay="linear",
                dtype="auto",
            ),
        ),
    )


def _alpaca_lora_distill() -> RecoverCheckpointConfig:
    """alpaca-lora, learning from the dense model's logits and hidden states as well (all three weights are ours)."""
    base = _alpaca_lora()
    return replace(base, recover=replace(base.recover, distill=DistillConfig(alpha=0.5, temperature=1.0, hidden=0.1)))


RECOVERIES: dict[str, Callable[[], RecoverCheckpointConfig]] = {
    "alpaca-lora": _alpaca_lora,
    "alpaca-lora-distill": _alpaca_lora_distill,
}
"""Name -> function that builds the options (whose docstring describes them)."""
