"""Run the contract of every family on the oldest and on the newest releases of what pyprune stands on: `make releases`.

    python -m tests.releases [oldest] [newest] [--keep FOLDER] [-- ARGUMENTS OF PYTEST]

An environment of its own is made for each, without vLLM, whose releases `make matrix` tries: Transformers, torch, peft,
datasets, lm-eval and gguf are the lowest releases that pyproject.toml asks for, or the newest that it allows; pip
decides about everything else. pyprune's wheel is installed as a user installs it, without its C++ kernels, and its own
requirements hold. The environments are deleted afterwards, 2 GB each, unless --keep names a folder for them.

The last line of each says what was installed. Exit codes: 0 both passed, 1 one did not, 2 a wrong option.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

REPO = Path(__file__).resolve().parents[1]
TRIED = ("transformers", "torch", "peft", "datasets", "lm-eval", "gguf")
EXTRAS = "data,eval,recover,gguf"
"""README's, without vLLM."""
CONTRACT = (
    "tests/families/test_contract.py", "tests/modeling", "tests/checkpoint/test_tokenizer.py",
    "tests/checkpoint/test_gguf_config.py", "tests/data/test_bos.py", "tests/runtime/test_progress.py",
)  # fmt: skip
"""What may change with a release of another package: classes, caches, tokenizers, GGUF readers, adapters, bars."""
TESTING = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist")


def requirements() -> dict[str, Requirement]:
    """Name -> what pyproject.toml asks for, of itself and of its extras."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = project["dependencies"] + [line for extra in project["optional-dependencies"].values() for line in extra]
    return {need.name: need for need in map(Requirement, lines)}


def pinned(which: str) -> list[str]:
    """What pip is asked for beside pyprune: the lowest releases, or none, so that it takes the newest ones."""
    asked = requirements()
    lowest = [next(s.version for s in asked[name].specifier if s.operator == ">=") for name in TRIED]
    testing = [f"{name}{asked[name].specifier}" for name in TESTING]
    return testing + ([f"{name}=={low}" for name, low in zip(TRIED, lowest, strict=True)] if which == "oldest" else [])


def try_releases(which: str, folder: Path, arguments: list[str]) -> bool:
    """Make the environment, run the contract in it; whether every test passed."""
    print(f"releases: {which}: an environment in {folder}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
    index = os.environ.get("TORCH_INDEX")
    others = pinned(which)
    torch = next((name for name in others if name.startswith("torch==")), f"torch{requirements()['torch'].specifier}")
    # First and alone, as in the Makefile: another package would bring the build for GPUs.
    subprocess.run([*pip, "install", "--no-compile", *(["--index-url", index] if index else []), torch], check=True)
    package = [f"pyprune[{EXTRAS}] @ {REPO.as_uri()}", "--config-settings", "wheel.cmake=false"]
    subprocess.run([*pip, "install", "--no-compile", *package, *others], check=True)
    # A copy beside no sources, so that what is tested is the installed package.
    copy = folder / "checkout"
    for part in ("tests", "bench"):
        shutil.copytree(REPO / part, copy / part, ignore=shutil.ignore_patterns("__pycache__", "results"))
    shutil.copy(REPO / "pyproject.toml", copy)
    done = subprocess.run(
        [str(python), "-m", "pytest", *CONTRACT, "--tier", "first", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=copy,
        check=False,
    )
    print(f"releases: {which}: {'passed' if not done.returncode else 'FAILED'} with {_versions(python)}", flush=True)
    return not done.returncode


def _versions(python: Path) -> str:
    code = f"from importlib.metadata import version; print(', '.join(f'{{n}} {{version(n)}}' for n in {TRIED!r}))"
    return subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    """Try the releases that are named; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", metavar="oldest|newest", help="both, when none is named")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where the environments stay")
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:cut])
    which = options.which or ["oldest", "newest"]
    if unknown := sorted(set(which) - {"oldest", "newest"}):
        parser.error(f"{unknown[0]!r} is neither oldest nor newest")
    with tempfile.TemporaryDirectory(prefix="pyprune-releases-") as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        passed = [try_releases(name, folder / name, given[cut + 1 :]) for name in which]
        return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
