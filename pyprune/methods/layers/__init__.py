"""Methods that remove whole layers, or whole attention or MLP blocks, and train nothing.

To add one, write a folder here whose name is the method's. It declares ``METHOD`` with options (a subclass of
:class:`BlockOptions` where single blocks may go too) and presets made by :func:`removing`, and imports no torch.
``_units.py`` has what their decisions share: how many units go, which may, and the loss without each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyprune.config.data import DataConfig
from pyprune.config.method import MethodOptions
from pyprune.config.run import PruneConfig, StageConfig
from pyprune.methods.ratio import Unit

BLOCKS_TOO = "layers, or attention or MLP blocks"
"""What a method with :class:`BlockOptions` removes, for the table of methods."""


@dataclass(frozen=True)
class BlockOptions(MethodOptions):
    """Options of methods that can also remove the attention and MLP blocks of layers separately.

    Attributes:
        unit: layer (whole layers), attention or mlp (these blocks alone; the rest of the layer stays). The ratio counts
            units: ``ratio_of`` layers means that share of all layers, or of all blocks of that kind.
    """

    unit: Unit = "layer"


def removing(method: str, options: MethodOptions, *, samples: int, sequence_length: int) -> PruneConfig:
    """What all methods of this folder start from: 25 % of the layers, no training before or after the cut.

    Args:
        method: its name.
        options: its own.
        samples: sequences of WikiText-2 that it reads.
        sequence_length: tokens in one of them.
    """
    return PruneConfig(
        method=method,
        ratio=0.25,
        ratio_of="layers",
        data=DataConfig("wikitext2", "train", samples=samples, sequence_length=sequence_length),
        stages=StageConfig(before=(), after=()),
        options=options,
    )
