"""The wheel holds the package and nothing else, and works where only its dependencies are.

The C++ kernels are left out here, because they take a minute to compile. `make wheel` has them, and the same checks.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests._support.paths import REPO
from wheels import make
from wheels.contents import complaints
from wheels.smoke import INSTRUCTION_SETS

PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))
SETTINGS = PROJECT["tool"]["cibuildwheel"]
INFORMATION = f"pyprune-{PROJECT['project']['version']}.dist-info"

pytestmark = pytest.mark.xdist_group("wheel")  # one wheel for all of them


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make.build(tmp_path_factory.mktemp("wheel"), compiled=False)


def changed(wheel: Path, folder: Path, change: Callable[[dict[str, bytes]], object]) -> Path:
    """A copy of the wheel whose files, by name, went through ``change``."""
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    change(files)
    copy = folder / wheel.name
    with zipfile.ZipFile(copy, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return copy


def test_every_supported_python_gets_a_wheel_for_both_machines() -> None:
    assert set(SETTINGS["linux"]["archs"]) == set(INSTRUCTION_SETS)
    minors = [int(re.fullmatch(r"cp3(\d+)-manylinux_\*", name)[1]) for name in SETTINGS["build"]]  # type: ignore[index]
    assert PROJECT["project"]["requires-python"] == f">=3.{minors[0]}"
    assert minors == list(range(minors[0], minors[-1] + 1))
    images = {SETTINGS["linux"][f"manylinux-{machine}-image"] for machine in INSTRUCTION_SETS}
    assert images == {"manylinux_2_28"}, "torch's own wheels ask for glibc 2.28"


def test_wheels_have_the_kernels_and_are_tried() -> None:
    assert SETTINGS["environment"] == {"PYPRUNE_REQUIRE_EXT": "1"}
    command = SETTINGS["test-command"].split()
    assert command[0] == "python"
    assert (REPO / command[1].removeprefix("{project}/")).is_file()
    options = re.findall(r"^option\((\w+)", (REPO / "CMakeLists.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {name.removeprefix("cmake.define.") for name in SETTINGS["config-settings"]} <= set(options)


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    assert complaints(wheel, compiled=False) == []
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {
        "pyprune/serving/vllm/plugin.py",
        "pyprune/recipes/llama/llama2-7b-dress.yaml",
        "pyprune/py.typed",
        f"{INFORMATION}/licenses/LICENSE",
    } <= names
    assert not any("container" in name or "tests" in name for name in names)


def test_a_wheel_without_kernels_is_not_taken_for_one_with_them(wheel: Path) -> None:
    assert complaints(wheel, compiled=True) == [
        "pyprune/_C.cpython-*-linux-gnu.so is missing",
        "pyprune/_libs/libgomp.so.1 is missing",
        "pyprune/_libs/libgomp-licence/* is missing",
        "its name says any; expected is manylinux",
    ]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda files: files.pop("pyprune/serving/vllm/plugin.py"), "pyprune/serving/vllm/plugin.py is missing"),
        (lambda files: files.update({"pyprune/old.py": b""}), "pyprune/old.py does not belong in it"),
        (lambda files: files.update({"tests/x.py": b""}), "tests/x.py does not belong in it"),
        (lambda files: files.pop(f"{INFORMATION}/licenses/LICENSE"), f"{INFORMATION}/licenses/LICENSE is missing"),
        (
            lambda files: files.update({f"{INFORMATION}/entry_points.txt": b"[console_scripts]\npyprune = x:y\n"}),
            "its entry points are {'console_scripts': {'pyprune': 'x:y'}}",
        ),
        (
            lambda files: files.update(
                {f"{INFORMATION}/METADATA": files[f"{INFORMATION}/METADATA"].replace(b"Apache-2.0", b"MIT")}
            ),
            "METADATA has License-Expression: MIT",
        ),
    ],
    ids=["missing", "stray", "outside", "licence", "entry points", "metadata"],
)
def test_what_is_wrong_with_a_wheel_is_named(
    wheel: Path, tmp_path: Path, change: Callable[[dict[str, bytes]], object], complaint: str
) -> None:
    [found] = complaints(changed(wheel, tmp_path, change), compiled=False)
    assert found.startswith(complaint)


def test_it_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    printed = make.try_it(wheel, tmp_path / "environment", compiled=False).splitlines()
    assert printed[0].startswith(f"pyprune is in {tmp_path / 'environment'}")
    assert printed[1] == "pyprune --help: printed"
    assert printed[2].startswith("pyprune env: the extension pyprune._C is not built")


def test_a_package_that_is_not_the_wheels_is_refused() -> None:
    """Here pyprune is the source tree."""
    done = subprocess.run(
        [sys.executable, "-P", str(REPO / "wheels" / "smoke.py"), "--pure"], capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 1
    assert re.match(r"wheel: (extension: available|pyprune comes from)", done.stderr)
