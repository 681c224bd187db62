"""The wheel holds the package and nothing else, and works where only its dependencies are.

The C++ kernels are left out here, because they take a minute to compile. `make wheel` has them.
"""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests._support.paths import REPO
from wheels.smoke import INSTRUCTION_SETS

CONFIG = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, SETTINGS, BUILD = CONFIG["project"], CONFIG["tool"]["cibuildwheel"], CONFIG["tool"]["scikit-build"]["wheel"]
SMOKE = REPO / "wheels" / "smoke.py"
INFORMATION = f"pyprune-{PROJECT['version']}.dist-info"

pytestmark = pytest.mark.xdist_group("wheel")  # one wheel for all of them


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    options = ["--wheel", "--no-isolation", "--outdir", str(out), "-C", "wheel.cmake=false"]
    subprocess.run([sys.executable, "-m", "build", *options, str(REPO)], check=True, stdout=subprocess.DEVNULL)
    [path] = out.glob("*.whl")
    return path


def sources() -> set[str]:
    """The files of the packages, where the build's settings map them."""
    files = {
        f"{target}/{path.relative_to(REPO / folder).as_posix()}"
        for target, folder in BUILD["packages"].items()
        for path in (REPO / folder).rglob("*")
        if path.is_file() and path.suffix in (".py", ".yaml", ".typed") and "__pycache__" not in path.parts
    }
    return {name for name in files if not any(fnmatch(name, pattern) for pattern in BUILD["exclude"])}


def test_every_supported_python_gets_a_wheel_for_both_machines() -> None:
    assert set(SETTINGS["linux"]["archs"]) == set(INSTRUCTION_SETS)
    minors = [int(re.fullmatch(r"cp3(\d+)-manylinux_\*", name)[1]) for name in SETTINGS["build"]]  # type: ignore[index]
    assert PROJECT["requires-python"] == f">=3.{minors[0]}"
    assert minors == list(range(minors[0], minors[-1] + 1))
    named = [int(minor) for minor in re.findall(r"Python :: 3\.(\d+)", " ".join(PROJECT["classifiers"]))]
    assert named == minors
    images = {SETTINGS["linux"][f"manylinux-{machine}-image"] for machine in INSTRUCTION_SETS}
    assert images == {"manylinux_2_28"}, "torch's own wheels ask for glibc 2.28"


def test_wheels_have_the_kernels_and_are_tried() -> None:
    assert SETTINGS["environment"] == {"PYPRUNE_REQUIRE_EXT": "1"}
    command = SETTINGS["test-command"].split()
    assert command[0] == "python"
    assert Path(command[1].format(project=REPO)) == SMOKE
    options = re.findall(r"^option\((\w+)", (REPO / "CMakeLists.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {name.removeprefix("cmake.define.") for name in SETTINGS["config-settings"]} <= set(options)


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = email.message_from_bytes(archive.read(f"{INFORMATION}/METADATA"))
    information = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    assert names == sources() | {f"{INFORMATION}/{name}" for name in information}
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().strip() == (REPO / "README.md").read_text(encoding="utf-8").strip()


def test_it_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    [packages] = environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("platlib") + "\n", encoding="utf-8")
    python = str(environment / "bin" / "python")
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps")
    subprocess.run([*pip, str(wheel)], check=True, env=alone)
    command = (python, "-P", str(SMOKE), "--pure")
    done = subprocess.run(command, capture_output=True, text=True, env=alone, cwd=environment)
    assert done.returncode == 0, done.stderr
    installed, printed, kernels = done.stdout.splitlines()
    assert installed.startswith(f"pyprune is in {environment}")
    assert printed == "pyprune --help: printed"
    assert kernels.startswith("pyprune env: the extension pyprune._C is not built")


def test_a_package_that_is_not_the_wheels_is_refused() -> None:
    """Here pyprune is the source tree."""
    done = subprocess.run([sys.executable, "-P", str(SMOKE), "--pure"], capture_output=True, text=True, cwd="/")
    assert done.returncode == 1
    assert re.match(r"wheel: (extension: available|pyprune comes from)", done.stderr)
