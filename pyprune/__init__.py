"""pyprune: structured pruning of large language models, from a plan to a checkpoint that vLLM serves.

Importing this package loads neither torch nor vllm; public names are resolved on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "PruneConfig": "pyprune.config",
    "PrunePlan": "pyprune.plan",
    "PypruneError": "pyprune.errors",
    "compact_": "pyprune.compact",
    "evaluate_perplexity": "pyprune.evaluate",
    "load_model": "pyprune.load",
    "make_plan": "pyprune.pipeline",
    "mask_": "pyprune.mask",
    "prune": "pyprune.pipeline",
    "save_checkpoint": "pyprune.save",
}

__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from pyprune.compact import compact_ as compact_
    from pyprune.config import PruneConfig as PruneConfig
    from pyprune.errors import PypruneError as PypruneError
    from pyprune.evaluate import evaluate_perplexity as evaluate_perplexity
    from pyprune.load import load_model as load_model
    from pyprune.mask import mask_ as mask_
    from pyprune.pipeline import make_plan as make_plan
    from pyprune.pipeline import prune as prune
    from pyprune.plan import PrunePlan as PrunePlan
    from pyprune.save import save_checkpoint as save_checkpoint


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
