"""Methods that remove whole layers, or whole attention or MLP blocks, and train nothing.

To add one, write a folder here with the method's name. It declares ``METHOD`` with options and presets made by
:func:`removal_method` and :func:`removal_config`, and imports no torch. The options are a subclass of
:class:`BlockOptions` if single blocks may be removed too. ``_units.py`` has the code that their decisions share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyprune.config.base import LARGEST_INDEX, option
from pyprune.config.data import DataConfig
from pyprune.config.method import MethodOptions
from pyprune.config.run import PruneConfig, StageConfig
from pyprune.methods.base import Deferred, Method
from pyprune.methods.ratio import Unit


@dataclass(frozen=True)
class BlockOptions(MethodOptions):
    """Options of methods that can also remove the attention and MLP blocks of layers separately.

    Attributes:
        unit: layer (whole layers), attention or mlp (these blocks alone; the rest of the layer is kept). The ratio
            counts units: ``ratio_of`` layers means that share of all layers, or of all blocks of that kind.
    """

    unit: Unit = "layer"


@dataclass(frozen=True)
class EdgeOptions(BlockOptions):
    """Options of methods that can also keep layers at both ends of the model.

    Attributes:
        keep_first: layers at the beginning of the model that are kept whole.
        keep_last: layers at its end that are kept whole.
    """

    keep_first: int = option(0, at_least=0, at_most=LARGEST_INDEX)
    keep_last: int = option(0, at_least=0, at_most=LARGEST_INDEX)


def removal_method(name: str, summary: str, decide: str, options: type[MethodOptions], **fields: Any) -> Method:
    """Return the registry's entry of a method of this folder, which reads a model larger than memory from disk.

    Args:
        name: name of the file or folder.
        summary: one line for people.
        decide: "module:name" of the decision.
        options: class of the method's own options.
        fields: other fields of :class:`~pyprune.methods.base.Method`.
    """
    removes = "layers, or attention or MLP blocks" if issubclass(options, BlockOptions) else ""
    return Method(name, "layers", summary, Deferred(decide), options=options, from_disk=True, removes=removes, **fields)


def removal_config(method: str, options: MethodOptions, *, samples: int, sequence_length: int) -> PruneConfig:
    """Return the start of all methods of this folder: 25 % of the layers, no training before or after the cut.

    Args:
        method: name of the method.
        options: the method's own options.
        samples: sequences of WikiText-2 that it reads.
        sequence_length: tokens in one of them.
    """
    return PruneConfig(
        method=method,
        ratio=0.25,
        ratio_of="layers",
        data=DataConfig("wikitext2", "train", samples=samples, sequence_length=sequence_length),
        stages=StageConfig(before=()),
        options=options,
    )
