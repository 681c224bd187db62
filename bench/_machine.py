"""What tells one machine's records from another's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyprune.errors import ConfigError

if TYPE_CHECKING:
    from pyprune.fit.profile import Profile

FIRST_RELEASE = "0.32.0"
"""The release of vLLM that all records are of which were made before keys said one."""
Machine = tuple[str, int, tuple[str, ...]]
"""(device, CPUs, the instruction sets that matter): clouds give several processors one name."""


def machine_of(environment: Mapping[str, Any]) -> Machine:
    """The machine of a record's environment."""
    return environment["device"], environment["cpus"], tuple(environment["isa"])


def serving_environment() -> dict[str, Any]:
    """What a record says of where vLLM served: on the GPU, where there is one."""
    from pyprune.serving.load.run import accelerator_name
    from pyprune.serving.stats import environment_record

    return environment_record(accelerator_name())


def named_release(environment: Mapping[str, Any]) -> list[str]:
    """What a key says of the release of vLLM: nothing of :data:`FIRST_RELEASE`, whose records have keys without it."""
    from pyprune.serving.stats import vllm_release

    release = vllm_release(environment)
    return [] if release == FIRST_RELEASE else [release]


def profiled_on(profile: Profile) -> Machine:
    """The machine of a profile."""
    machine = profile.machine
    return machine["device"], machine["cores"], tuple(machine["isa"])


def environment_of(profile: Profile, path: Path, instead: str) -> dict[str, Any]:
    """This machine's environment, by the device of a profile that was measured here.

    Args:
        profile: what is to be used.
        path: where it was read.
        instead: what to do where it was not measured here, a sentence.

    Raises:
        ConfigError: it was measured on another machine.
    """
    from pyprune.fit.profile import this_machine
    from pyprune.serving.stats import environment_record

    found = environment_record(this_machine(profile.machine["device"])["device"])
    there, here = profiled_on(profile), machine_of(found)
    if there != here:
        raise ConfigError(f"{path} was measured on {named(there)}; this is {named(here)}. {instead}")
    return found


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


def named(machine: Machine) -> str:
    """A machine in a table."""
    device, cpus, isa = machine
    return f"{device} ({cpus} CPUs{', AMX' if 'amx_bf16' in isa else ''})"
