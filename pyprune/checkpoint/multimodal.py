"""The table of multimodal types that ``pyprune families`` prints."""

from __future__ import annotations

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from pyprune.checkpoint.tower import TWINS, WIDE_INSIDE, WIDTHS, count_first_layers
from pyprune.families import family_of_type
from pyprune.families.table import AXES
from pyprune.runtime.progress import quiet
from pyprune.runtime.report import Table


def multimodal_table() -> Table:
    """Return a row for each multimodal type whose tower loses all axes: the type of its tower, and the open axes."""
    with quiet("transformers"):
        rows = tuple(map(_row, sorted(WIDTHS)))
    return Table("Multimodal types", ("type", "tower", *AXES, "conditions"), rows)


def _row(model_type: str) -> tuple[str, ...]:
    config = CONFIG_MAPPING[model_type]()
    text = config.text_config.model_type
    tower, conditions = TWINS.get(text, text), list[str]()
    closed = family_of_type(tower).closed
    if first := count_first_layers(config):
        conditions.append(f"layers: the first ones (here {first}) read images and are kept")
    if tower == "qwen2" and text in TWINS:
        conditions.append("heads, hidden: a stock model keeps heads that are together as wide as the stream")
    if model_type in WIDE_INSIDE:
        conditions.append("hidden: the projector loses as many channels inside")
    axes = ("no" if axis in closed else "yes" for axis in AXES)
    return (model_type, f"as {tower}" if text in TWINS else tower, *axes, "; ".join(conditions))
