"""Entries of records: the machine, the release of vLLM, and a plan's seconds next to the dense model's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyprune.errors import ConfigError

if TYPE_CHECKING:
    from pyprune.fit.profile import Profile, Timing
    from pyprune.fit.quantities import Quantity

FIRST_RELEASE = "0.32.0"
"""The release of vLLM of all records whose keys name none."""
Machine = tuple[str, int, tuple[str, ...]]
"""(device, CPUs, instruction sets): clouds give several processors one name."""


def machine_of(environment: Mapping[str, Any]) -> Machine:
    """Return the machine of a record's environment."""
    return environment["device"], environment["cpus"], tuple(environment["isa"])


def serving_environment() -> dict[str, Any]:
    """Return the environment of a record of vLLM: of the GPU, if there is one."""
    from pyprune.serving.load.run import accelerator_name
    from pyprune.serving.stats import environment_record

    return environment_record(accelerator_name())


def named_release(environment: Mapping[str, Any]) -> list[str]:
    """Return the part of a key that names the release of vLLM; nothing for :data:`FIRST_RELEASE`."""
    from pyprune.serving.stats import vllm_release

    release = vllm_release(environment)
    return [] if release == FIRST_RELEASE else [release]


def profiled_on(profile: Profile) -> Machine:
    """Return the machine of a profile."""
    machine = profile.machine
    return machine["device"], machine["cores"], tuple(machine["isa"])


def environment_of(profile: Profile, path: Path, instead: str) -> dict[str, Any]:
    """Return this machine's environment, for a profile that was measured here.

    Args:
        profile: the profile to use.
        path: its file.
        instead: a sentence that says what to do if it was measured elsewhere.

    Raises:
        ConfigError: it was measured on another machine.
    """
    from pyprune.fit.profile import this_machine
    from pyprune.serving.stats import environment_record

    environment = environment_record(this_machine(profile.machine["device"])["device"])
    there, here = profiled_on(profile), machine_of(environment)
    if there != here:
        raise ConfigError(f"{path} was measured on {machine_label(there)}; this is {machine_label(here)}. {instead}")
    return environment


def metric(text: str, name: str) -> float:
    """Return the value of a metric of vLLM, summed over its labels.

    Args:
        text: of /metrics.
        name: of the metric.

    Raises:
        ConfigError: the server does not have it.
    """
    lines = [line for line in text.splitlines() if re.match(rf"{re.escape(name)}[{{ ]", line)]
    if not lines:
        raise ConfigError(f"/metrics has no {name}; vLLM 0.32 has.")
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def machine_label(machine: Machine) -> str:
    """Return a machine as a cell of a table."""
    device, cpus, isa = machine
    return f"{device} ({cpus} CPUs{', AMX' if 'amx_bf16' in isa else ''})"


def compare_with_dense(turns: Sequence[Timing], name: str, quantity: Quantity) -> dict[str, Any]:
    """Return the median seconds of a model and of the dense one, its share of the dense model's time, and the spread.

    Args:
        turns: of a group of engines.
        name: of the model.
        quantity: the workload.
    """
    from statistics import median

    from pyprune.fit.measured import relative_seconds
    from pyprune.fit.profile import DENSE

    seconds, spread = relative_seconds(turns, quantity)
    samples, dense = ([t.seconds for t in turns if (t.probe, t.quantity) == (one, quantity)] for one in (name, DENSE))
    return {
        "seconds": median(samples),
        "dense_seconds": median(dense),
        "turns": len(samples),
        "share_of_dense": seconds[name] / seconds[DENSE],
        "spread": spread[name],
    }
