"""The models that several processes of a run read, and the dense model that teaches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from transformers import PreTrainedModel

from pyprune.checkpoint.load import ModelSource
from pyprune.config.run import PruneConfig, RecoverCheckpointConfig
from pyprune.errors import ConfigError
from pyprune.run.memory import learns_from_files
from pyprune.runtime import processes
from pyprune.runtime.device import resolve_device, working_dtype
from pyprune.runtime.progress import say

TEACHER_DTYPE = "recover.distill.teacher_dtype"


def teacher_dtype(config: PruneConfig | RecoverCheckpointConfig) -> str:
    """Return the dtype of the dense model's weights while it teaches."""
    return working_dtype(config.recover.teacher_dtype, resolve_device(config.device))


def load_teacher(
    source: ModelSource, config: PruneConfig | RecoverCheckpointConfig, *, device: str, dtype: str
) -> PreTrainedModel:
    """Load the dense model for ``recover.distill``, or open it where it stays in its files.

    Args:
        source: of the dense model.
        config: of the run, ``teacher_placement`` decided.
        device: to load it to, where it is loaded.
        dtype: of its weights, see :func:`teacher_dtype`.
    """
    if learns_from_files(config):
        return source.open_layers(dtype=dtype, device=config.device).whole()
    return source.load(dtype=dtype, device=device)[0]


class HostCopy(NamedTuple):
    """A model that every process of a run loads on the host: its source, the option that gives its dtype, the dtype."""

    source: ModelSource
    option: str
    dtype: str


def report_copies(copies: Iterable[HostCopy]) -> None:
    """Print which models several processes cannot share on the host, because loaded and stored dtypes differ."""
    if processes.count() == 1:
        return
    effect = f"each of the {processes.count()} processes has a copy of its own on the host"
    for source, option, dtype in copies:
        if source.gguf_file is not None:
            say(f"{source.gguf_file} of {source} is dequantised: {effect}. Safetensors in {dtype} would be shared.")
        elif source.dtype not in (None, dtype):
            say(
                f"{option} is {dtype}, and {source} is stored in {source.dtype}: {effect}. With "
                f"{option}={source.dtype} they share the files' pages."
            )


def check_alike(model: str, *weights: str) -> None:
    """Refuse models that are not the same in all processes, which may be on several machines.

    Args:
        model: for the message.
        weights: what they are known by, the dense model's too.

    Raises:
        ConfigError: they differ.
    """
    if not processes.alike(weights):
        raise ConfigError(
            f"The processes of this run find different weights in {model} or in its dense model. Put the same files on "
            "all machines, or name a folder that they share."
        )
