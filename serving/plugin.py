"""What vLLM's entry points call in each of its processes."""

from __future__ import annotations

from pyprune.families import all_families
from pyprune.serving.launch import answer_for_variants

ARCHITECTURES = {family.pruned_model: family.served_by for family in all_families().values() if family.served_by}
"""Architecture name in config.json -> where vLLM finds its class, imported only when a checkpoint needs it."""


def look_for_platform() -> None:
    """Bring no platform, but use the moment: vLLM asks its ``vllm.platform_plugins`` before it reads its own version.

    With the CPU builds on PyPI the plain ``vllm serve`` dies of that question (:mod:`pyprune.serving.launch`), long
    before it loads the general plugins.
    """
    answer_for_variants()


def register() -> None:
    """Tell vLLM about the pruned architectures and Transformers about their configurations.

    vLLM may call this several times in one process; calling it again changes nothing.
    """
    from vllm import ModelRegistry

    import pyprune.modeling  # noqa: F401  (registers the configurations with AutoConfig)

    known = ModelRegistry.get_supported_archs()
    for name, target in ARCHITECTURES.items():
        if name not in known:
            ModelRegistry.register_model(name, target)
