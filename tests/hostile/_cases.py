"""What a hostile case is, and the small builders that the tables are written with."""

from __future__ import annotations

import gzip
import json
import random
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pyprune.runtime.files import seal

Step = Callable[[Path], object]
"""Changes the case's folder, which it is given."""

CHEAP = "--samples 2 --sequence-length 16"
PRUNE = f"prune dense --calibration text.txt {CHEAP}"
"""A run of the default method, elder, which would train if it were let."""
DRY = f"{PRUNE} --method magnitude --dry-run"
"""Reads the model and decides in a blink."""
READS = f"prune dense --method wanda --ratio 0.2 {CHEAP} --dry-run --calibration"
"""Reads the text that follows."""
EVAL = "eval dense --protocol ppl-128 --max-tokens 256 --ppl"
RECOVER = f"recover pruned --data text.txt {CHEAP}"
QUICK = " ".join(
    f"--set recover.train.{name}"
    for name in ("steps=2", "batch_size=2", "micro_batch_size=1", "warmup_steps=0", "dtype=float32")
)
BRIEF = f"{RECOVER} --set recover.rank=2 {QUICK}"
"""A recovery that takes a second."""


@dataclass(frozen=True)
class Case:
    """One hostile input.

    The case's folder, which is the current one, holds ``dense`` (a model that pyprune did not write), ``pruned`` (a
    checkpoint that it did), ``text.txt``, ``plan.json`` and ``recipe.yaml``.

    Attributes:
        name: in words.
        command: arguments of ``pyprune``, as one writes them in a shell, or listed.
        steps: what is done to the folder first.
        codes: exit codes that are right.
        lines: most lines of the message.
        says: what the message must hold.
        then: called with the folder after the run, and after all other checks.
        slow: run by ``make fuzz`` only.
        seconds: after which it has hung.
        growth: bytes by which the process may grow over what it is after its imports.
    """

    name: str
    command: str | Sequence[str]
    steps: tuple[Step, ...] = ()
    codes: tuple[int, ...] = (2,)
    lines: int = 2
    says: str = ""
    then: Step | None = None
    slow: bool = False
    seconds: float = 20.0
    growth: int = 600 << 20

    @property
    def arguments(self) -> list[str]:
        """The command as a list."""
        return shlex.split(self.command) if isinstance(self.command, str) else list(self.command)


def case(name: str, command: str | Sequence[str], *steps: Step, **more: Any) -> Case:
    """A :class:`Case`, its steps written one after the other."""
    return Case(name, command, steps, **more)


def table(*cases: Case) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Parametrise a test by cases, each named by its words."""
    names = [c.name for c in cases]
    assert len(set(names)) == len(names), sorted(n for n in set(names) if names.count(n) > 1)
    marked = [pytest.param(c, id=c.name, marks=_tier(c, i)) for i, c in enumerate(cases)]
    return pytest.mark.parametrize("case", marked)


def _tier(case: Case, place: int) -> list[pytest.MarkDecorator]:
    """The marks of a case: the first tier runs every third of a table, which are of all kinds that it lists."""
    if case.slow:
        return [pytest.mark.fuzz]
    return [pytest.mark.second] if place % 3 else []


def turns(commands: Mapping[str, str], number: int, count: int = 1) -> Iterator[tuple[str, str, bool]]:
    """Every command by its name, and whether it is left to ``make fuzz``.

    Each input goes to ``count`` of the commands in the default run, the next input to the next ones.
    """
    for place, (name, command) in enumerate(commands.items()):
        yield name, command, (place - number) % len(commands) >= count


def brief(value: Any) -> str:
    """JSON of a value for the name of a case: short, and without anything that a terminal acts on."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:25]}... ({len(text):,} characters)"


# --- steps ---


def write(name: str, content: str | bytes = "someone's own\n") -> Step:
    """Write a file, and the folders that it lies in."""

    def step(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    return step


def gzipped(name: str, content: bytes, damage: Callable[[bytes], bytes] = bytes) -> Step:
    """Write a compressed file, damaged."""
    return write(name, damage(gzip.compress(content, mtime=0)))


def write_json(name: str, data: Any) -> Step:
    """Write a JSON file."""
    return write(name, json.dumps(data))


def folder_at(name: str) -> Step:
    """Make an empty folder."""
    return lambda folder: (folder / name).mkdir(parents=True)


def link(name: str, target: str) -> Step:
    """Make a symbolic link; the target is written as given."""
    return lambda folder: (folder / name).symlink_to(target)


def copied(source: str, name: str) -> Step:
    """Copy a file or a folder."""

    def step(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (folder / source).is_dir() else shutil.copy
        copy(folder / source, folder / name)

    return step


def removed(name: str) -> Step:
    """Remove a file."""
    return lambda folder: (folder / name).unlink()


def emptied(name: str) -> Step:
    """Leave nothing in a file."""
    return write(name, b"")


def cut_short(name: str) -> Step:
    """Keep the first half of a file."""
    return lambda folder: _rewrite(folder / name, lambda data: data[: len(data) // 2])


def bit_flipped(name: str) -> Step:
    """Flip a bit in the middle of a file."""

    def flip(data: bytes) -> bytes:
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]

    return lambda folder: _rewrite(folder / name, flip)


def now_a_folder(name: str) -> Step:
    """Put a folder in the place of a file."""

    def step(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return step


def _rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def json_changed(name: str, *path: str | int, to: Any) -> Step:
    """Set a value inside a JSON file; a path of several names leads to it."""
    return lambda folder: _change(folder / name, path, to, sealed=False)


def record_changed(*path: str | int, to: Any) -> Step:
    """Set a value inside the record of ``pruned``, and give it a checksum that is right."""
    return lambda folder: _change(folder / "pruned/pruning.json", path, to, sealed=True)


def _change(file: Path, path: Sequence[str | int], to: Any, *, sealed: bool) -> None:
    data = json.loads(file.read_text())
    inner = data
    for key in path[:-1]:
        inner = inner.setdefault(key, {}) if isinstance(inner, dict) else inner[key]
    inner[path[-1]] = to
    if sealed:
        data.pop("sha256", None)
        data = seal(data)
    file.write_text(json.dumps(data))


# --- hostile values ---


def mutated(data: Any, seed: int) -> Any:
    """Plain JSON data with one seeded change inside: a key gone, a key more, another type, an absurd number."""
    rng = random.Random(seed)
    data = json.loads(json.dumps(data))
    places = list(_places(data))
    holder, key = rng.choice(places)
    if rng.random() < 0.25:
        del holder[key]
    elif isinstance(holder, dict) and rng.random() < 0.2:
        holder[rng.choice(["unknown", "", "__class__", "x" * 5000])] = rng.choice(ABSURD)
    else:
        holder[key] = rng.choice([value for value in ABSURD if value != holder[key]])
    return data


ABSURD: list[Any] = [None, True, -1, 10**9, 10**30, 1.5, 1e308, "", "text", "\x1b[31m", [], [[[]]], {}, {"a": {"b": 1}}]
"""Values that hardly any key may hold."""


def _places(data: Any) -> Any:
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in items:
        yield data, key
        if isinstance(value, dict | list):
            yield from _places(value)


def nested_json(depth: int) -> str:
    """JSON text of lists in lists."""
    return "[" * depth + "]" * depth
