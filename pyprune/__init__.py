"""pyprune: structured pruning of large language models, from a plan to a checkpoint that vLLM serves.

Importing this package loads neither torch nor vllm; public names are resolved on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "PruneConfig": "pyprune.config.run",
    "PrunePlan": "pyprune.plan",
    "PypruneError": "pyprune.errors",
    "compact_": "pyprune.cut.compact",
    "evaluate_perplexity": "pyprune.quality.perplexity",
    "load_model": "pyprune.checkpoint.load",
    "make_plan": "pyprune.pipeline",
    "mask_": "pyprune.cut.mask",
    "prune": "pyprune.pipeline",
    "save_checkpoint": "pyprune.checkpoint.save",
}

__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from pyprune.checkpoint.load import load_model as load_model
    from pyprune.checkpoint.save import save_checkpoint as save_checkpoint
    from pyprune.config.run import PruneConfig as PruneConfig
    from pyprune.cut.compact import compact_ as compact_
    from pyprune.cut.mask import mask_ as mask_
    from pyprune.errors import PypruneError as PypruneError
    from pyprune.pipeline import make_plan as make_plan
    from pyprune.pipeline import prune as prune
    from pyprune.plan import PrunePlan as PrunePlan
    from pyprune.quality.perplexity import evaluate_perplexity as evaluate_perplexity


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
