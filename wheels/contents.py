"""What a wheel of pyprune has to hold, and what it must not: the files of the source tree, mapped, and nothing else."""

from __future__ import annotations

import configparser
import email
import fnmatch
import tomllib
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIBGOMP = "pyprune/_libs/libgomp"


def complaints(wheel: Path, *, compiled: bool) -> list[str]:
    """What is wrong with a wheel, one line each; none if it is as it should be.

    Args:
        wheel: the file; its name says for which systems it is.
        compiled: whether the C++ kernels belong in it.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        found = _files(names, project, compiled)
        information = f"pyprune-{project['project']['version']}.dist-info/"
        if not found:
            found += _entry_points(archive.read(f"{information}entry_points.txt").decode(), project["project"])
            found += _metadata(archive.read(f"{information}METADATA").decode(), project["project"])
    platform = wheel.stem.split("-")[-1]
    if compiled != platform.startswith("manylinux"):
        found.append(f"its name says {platform}; expected is {'manylinux' if compiled else 'any'}")
    return found


def _files(names: set[str], project: dict[str, Any], compiled: bool) -> list[str]:
    expected = _sources(project) | {
        f"pyprune-{project['project']['version']}.dist-info/{name}"
        for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    }
    found = [f"{name} is missing" for name in sorted(expected - names)]
    others = names - expected
    if compiled:
        for pattern in ("pyprune/_C.cpython-*-linux-gnu.so", f"{LIBGOMP}.so.1", f"{LIBGOMP}-licence/*"):
            matching = set(fnmatch.filter(others, pattern))
            others -= matching
            if not matching:
                found.append(f"{pattern} is missing")
    return found + [f"{name} does not belong in it" for name in sorted(others)]


def _sources(project: dict[str, Any]) -> set[str]:
    """The files of the packages, where the build's settings map them."""
    settings = project["tool"]["scikit-build"]
    sources = {
        f"{target}/{path.relative_to(ROOT / folder).as_posix()}"
        for target, folder in settings["wheel"]["packages"].items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in (".py", ".yaml", ".typed") and "__pycache__" not in path.parts
    }
    excluded = settings["wheel"]["exclude"]
    return {name for name in sources if not any(fnmatch.fnmatch(name, pattern) for pattern in excluded)}


def _entry_points(text: str, project: dict[str, Any]) -> list[str]:
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.optionxform = str  # type: ignore[method-assign,assignment]
    parser.read_string(text)
    seen = {group: dict(parser[group]) for group in parser.sections()}
    expected = {"console_scripts": project["scripts"], **project["entry-points"]}
    return [] if seen == expected else [f"its entry points are {seen}, pyproject.toml has {expected}"]


def _metadata(text: str, project: dict[str, Any]) -> list[str]:
    metadata = email.message_from_string(text)
    found = []
    for header, expected in (
        ("Name", project["name"]),
        ("Version", project["version"]),
        ("Requires-Python", project["requires-python"]),
        ("License-Expression", project["license"]),
    ):
        if metadata[header] != expected:
            found.append(f"METADATA has {header}: {metadata[header]}; pyproject.toml has {expected}")
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    if len(needed) != len(project["dependencies"]):
        found.append(f"METADATA asks for {needed}; pyproject.toml for {project['dependencies']}")
    return found
