"""An installed wheel does its work: the command starts, says what the kernels use, and an op agrees with its reference.

    python wheels/smoke.py

Run it with the interpreter that the wheel is installed for, in an environment that has pyprune's dependencies.
cibuildwheel and `make wheel` do. Exit codes: 0 all is well, 1 it is not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

INSTRUCTION_SETS = {"x86_64": ("scalar", "avx2", "avx512"), "aarch64": ("neon",)}
"""What the kernels are compiled for, by machine, the lowest first."""


def main() -> int:
    """Run every check; the first that fails ends the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pure", action="store_true", help="The wheel was made without the C++ kernels.")
    pure = parser.parse_args().pure
    try:
        said = [came_from_the_wheel(pure), help_is_printed(), environment_is_named(pure)]
        if not pure:
            said.append(ops_agree())
            said.append(one_openmp())
    except Failure as failure:
        print(f"wheel: {failure}", file=sys.stderr)
        return 1
    print("\n".join(said))
    return 0


class Failure(Exception):
    """An installed wheel does not work as it should."""


def came_from_the_wheel(pure: bool) -> str:
    """The package lies in this environment, and so does its extension."""
    import pyprune
    import pyprune.serving
    from pyprune.ops import dispatch

    modules = [pyprune, pyprune.serving]
    extension = dispatch.extension()
    if pure != (extension is None):
        raise Failure(f"extension: {dispatch.backend_report()['cpp']}")
    if extension is not None:
        modules.append(extension)
    home = Path(sysconfig.get_path("platlib")).resolve()
    for module in modules:
        if home not in Path(str(module.__file__)).resolve().parents:
            raise Failure(f"{module.__name__} comes from {module.__file__}, not from {home}, where the wheel is")
    return f"pyprune is in {home}"


def help_is_printed() -> str:
    """The command that the wheel installs starts."""
    printed = _command("--help")
    if "prune" not in printed:
        raise Failure(f"pyprune --help printed:\n{printed}")
    return "pyprune --help: printed"


def environment_is_named(pure: bool) -> str:
    """`pyprune env` says which instruction set the kernels use, and it is one of this machine's."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "env.json"
        _command("env", "--json", str(report))
        said = str(json.loads(report.read_text(encoding="utf-8"))["backends"]["cpp"])
    if pure:
        if "not built" not in said:
            raise Failure(f"there is no extension, and pyprune env says: {said}")
        return f"pyprune env: {said}"
    allowed = INSTRUCTION_SETS.get(platform.machine(), ("scalar",))
    if said not in [f"available, {name}" for name in allowed]:
        raise Failure(f"pyprune env says of the kernels: {said}; on {platform.machine()} they are one of {allowed}")
    return f"pyprune env: kernels {said}"


def ops_agree() -> str:
    """Every instruction set and the reference give the same, on one thread and on two."""
    import torch

    from pyprune.ops import available_isas, group_penalty, slice_gather
    from pyprune.ops.dispatch import extension

    expected = INSTRUCTION_SETS.get(platform.machine(), ("scalar",))
    if tuple(available_isas()) != expected[: len(available_isas())]:
        raise Failure(f"the kernels have {available_isas()}, expected of {platform.machine()}: {expected}")
    module = extension()
    weights = torch.randn(96, 67, generator=torch.Generator().manual_seed(0))
    index = torch.arange(0, 67, 3)

    def run(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        own = weights.to(dtype)
        return group_penalty(own, index, 1, "l2").float(), slice_gather(own, None, index, 0.3)

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        penalty, gathered = _with_backend("python", lambda dtype=dtype: run(dtype))
        for name in available_isas():
            module.set_isa(name)
            for threads in (1, 2):
                torch.set_num_threads(threads)
                got_penalty, got_gathered = _with_backend("cpp", lambda dtype=dtype: run(dtype))
                what = f"{dtype} on {name} with {threads} thread(s)"
                if not torch.equal(got_gathered, gathered):
                    raise Failure(f"slice_gather differs from its reference: {what}")
                if not torch.allclose(got_penalty, penalty, rtol=1e-5, atol=0):
                    raise Failure(f"group_penalty is {got_penalty}, its reference {penalty}: {what}")
    module.set_isa("auto")
    return f"group_penalty and slice_gather agree with their references on {', '.join(available_isas())}"


def one_openmp() -> str:
    """Which OpenMP runtimes the process has: torch and the kernels can share one if torch's has the plain name."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return "OpenMP: not known on this system"
    paths = (line.split(maxsplit=5)[5].strip() for line in maps.read_text(encoding="utf-8").splitlines() if "/" in line)
    return "OpenMP: " + ", ".join(sorted({path for path in paths if "libgomp" in Path(path).name}))


def _with_backend(name: str, call: Callable[[], object]) -> object:
    os.environ["PYPRUNE_BACKEND"] = name
    try:
        return call()
    finally:
        del os.environ["PYPRUNE_BACKEND"]


def _command(*arguments: str) -> str:
    command = [str(Path(sysconfig.get_path("scripts")) / "pyprune"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Failure(f"pyprune {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
