"""pyprune: structured pruning of large language models, from a plan to a checkpoint that vLLM serves.

The verbs read and write checkpoint folders, as the commands of the same names do:

* :func:`prune`, :func:`recover`, :func:`export`: a folder or hub id -> a new checkpoint folder;
* :func:`fit`, :func:`sweep`: a dense model and a budget -> the best checkpoint that keeps it, or a table of several;
* :func:`evaluate`, :func:`bench`: quality, and speed of several models side by side;
* :func:`build_config`, :func:`build_recovery`: preset, recipe and options -> one checked configuration;
* :class:`PrunePlan`: the parts that are kept; saved, edited and replayed.

``prune_``, ``recover_``, ``compact_`` and ``mask_`` change a model in memory, in place. ``examples/`` has scripts.

Importing this package loads neither torch nor vllm; public names are resolved on first use.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pyprune.runtime import moved
from pyprune.runtime.version import VERSION as __version__

_PUBLIC = {
    "Evaluation": "pyprune.quality.measure:Evaluation",
    "PruneConfig": "pyprune.config.run:PruneConfig",
    "PrunePlan": "pyprune.plan:PrunePlan",
    "PruneResult": "pyprune.run.result:PruneResult",
    "PypruneError": "pyprune.errors:PypruneError",
    "bench": "pyprune.serving.speed.measure:measure",
    "build_config": "pyprune.run.recipe:build_config",
    "build_reconstruction": "pyprune.run.recipe:build_reconstruction",
    "build_recovery": "pyprune.run.recipe:build_recovery",
    "compact_": "pyprune.cut.compact:compact_",
    "evaluate": "pyprune.quality.measure:evaluate",
    "evaluate_perplexity": "pyprune.quality.perplexity:evaluate_perplexity",
    "evaluate_tasks": "pyprune.quality.tasks:evaluate_tasks",
    "export": "pyprune.serving.export:export",
    "export_gguf": "pyprune.serving.gguf.write:export_gguf",
    "fit": "pyprune.fit.fit:fit",
    "load_model": "pyprune.checkpoint.load:load_model",
    "make_plan": "pyprune.run.prune:plan_model",
    "mask_": "pyprune.cut.mask:mask_",
    "prune": "pyprune.run.prune:prune_checkpoint",
    "prune_": "pyprune.run.prune:prune_model_",
    "reconstruct": "pyprune.run.reconstruct:reconstruct_checkpoint",
    "recover": "pyprune.run.recover:recover_checkpoint",
    "recover_": "pyprune.train.recover:recover",
    "save_checkpoint": "pyprune.checkpoint.save:save_checkpoint",
    "sweep": "pyprune.fit.fit:sweep",
    "take_profile": "pyprune.fit.profiling.timing:take_profile",
}
"""Public name -> "module:name there"."""

__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from pyprune.checkpoint.load import load_model as load_model
    from pyprune.checkpoint.save import save_checkpoint as save_checkpoint
    from pyprune.config.run import PruneConfig as PruneConfig
    from pyprune.cut.compact import compact_ as compact_
    from pyprune.cut.mask import mask_ as mask_
    from pyprune.errors import PypruneError as PypruneError
    from pyprune.fit.fit import fit as fit
    from pyprune.fit.fit import sweep as sweep
    from pyprune.fit.profiling.timing import take_profile as take_profile
    from pyprune.plan import PrunePlan as PrunePlan
    from pyprune.quality.measure import Evaluation as Evaluation
    from pyprune.quality.measure import evaluate as evaluate
    from pyprune.quality.perplexity import evaluate_perplexity as evaluate_perplexity
    from pyprune.quality.tasks import evaluate_tasks as evaluate_tasks
    from pyprune.run.prune import plan_model, prune_checkpoint, prune_model_
    from pyprune.run.recipe import build_config as build_config
    from pyprune.run.recipe import build_reconstruction as build_reconstruction
    from pyprune.run.recipe import build_recovery as build_recovery
    from pyprune.run.reconstruct import reconstruct_checkpoint
    from pyprune.run.recover import recover_checkpoint
    from pyprune.run.result import PruneResult as PruneResult
    from pyprune.serving.export import export as export
    from pyprune.serving.gguf.write import export_gguf as export_gguf
    from pyprune.serving.speed.measure import measure
    from pyprune.train.recover import recover as recover_in_memory

    bench = measure
    make_plan = plan_model
    prune = prune_checkpoint
    prune_ = prune_model_
    reconstruct = reconstruct_checkpoint
    recover = recover_checkpoint
    recover_ = recover_in_memory


class _FrontDoor(ModuleType):
    """Keep ``pyprune.fit`` the function: importing the folder of that name would put the folder in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _PUBLIC or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _FrontDoor
moved.install()


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _PUBLIC[name].partition(":")
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
