"""What tells one machine's records from another's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyprune.budget.profile import Profile

Machine = tuple[str, int, tuple[str, ...]]
"""(device, CPUs, the instruction sets that matter): clouds give several processors one name."""


def machine_of(environment: Mapping[str, Any]) -> Machine:
    """The machine of a record's environment."""
    return environment["device"], environment["cpus"], tuple(environment["isa"])


def profiled_on(profile: Profile) -> Machine:
    """The machine of a profile."""
    machine = profile.machine
    return machine["device"], machine["cores"], tuple(machine["isa"])


def environment_of(profile: Profile) -> dict[str, Any]:
    """This machine's environment, by the device of a profile where it has one like it."""
    from pyprune.budget.profile import this_machine
    from pyprune.serving.stats import environment_record

    return environment_record(this_machine(profile.machine["device"])["device"])


def named(machine: Machine) -> str:
    """A machine in a table."""
    device, cpus, isa = machine
    return f"{device} ({cpus} CPUs{', AMX' if 'amx_bf16' in isa else ''})"
