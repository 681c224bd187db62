"""Pictures that need no record: what happens to a model, drawn with a small model of six layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyprune.runtime.svg import Drawing

HEADS = 4
UNIT, GAP = 12.0, 3.0
"""Side of the square of a head, and the space between two."""
FFN = 62.0
"""Length of the bar of a whole FFN."""
STEP = 21.0
"""From one layer to the next."""


@dataclass(frozen=True)
class Kept:
    """Holds what is kept of a layer.

    Attributes:
        heads: numbers of its heads.
        ffn: share of its FFN channels.
    """

    heads: Sequence[int] = range(HEADS)
    ffn: float = 1.0


WHOLE = Kept()
PLAN = (WHOLE, Kept((0, 1, 3), 0.7), None, Kept((0, 2), 0.5), Kept((1, 2, 3), 0.8), WHOLE)
"""What is kept of each layer; None = nothing."""


def draw_model(
    drawing: Drawing, x: float, y: float, layers: Sequence[Kept | None], *, gaps: bool, outputs: str = "accent"
) -> None:
    """Draw a model, one layer a row: heads, FFN, and the output projection of each as a narrow bar.

    Args:
        drawing: gets the shapes.
        x: of the upper left corner.
        y: of the upper left corner.
        layers: from the first one.
        gaps: draw what is removed as outlines in its old place; otherwise what is kept moves together.
        outputs: colour of the output projections.
    """
    rows = [layer for layer in layers if gaps or layer is not None]
    for row, layer in enumerate(rows):
        top = y + row * STEP
        _draw_heads(drawing, x, top, layer, gaps, outputs)
        _draw_ffn(drawing, x + HEADS * (UNIT + GAP) + 14, top, layer, gaps, outputs)


def _draw_heads(drawing: Drawing, x: float, y: float, layer: Kept | None, gaps: bool, outputs: str) -> None:
    kept = tuple(layer.heads) if layer else ()
    places = range(HEADS) if gaps else range(len(kept))
    for place in places:
        left = x + place * (UNIT + GAP)
        if not gaps or place in kept:
            drawing.rectangle(left, y, UNIT, UNIT, "accent", corner=2)
        else:
            drawing.rectangle(left, y, UNIT, UNIT, "plain-line", corner=2, dashed=True)
    if kept:
        drawing.rectangle(x + len(places) * (UNIT + GAP), y, 4, UNIT, outputs)


def _draw_ffn(drawing: Drawing, x: float, y: float, layer: Kept | None, gaps: bool, outputs: str) -> None:
    kept = FFN * layer.ffn if layer else 0.0
    if kept:
        drawing.rectangle(x, y, kept, UNIT, "accent", corner=2)
    if gaps and kept < FFN:
        start = kept + GAP if kept else 0.0
        drawing.rectangle(x + start, y, FFN - start, UNIT, "plain-line", corner=2, dashed=True)
    if kept:
        drawing.rectangle(x + (FFN if gaps else kept) + GAP, y, 4, UNIT, outputs)


def flow() -> Drawing:
    """From a dense model to a served one, in five steps."""
    drawing = Drawing(
        960,
        232,
        "From a dense model to a served one",
        "Five small models side by side. The dense model has every layer, head and FFN channel. The plan marks what is "
        "removed: a whole layer, some heads and some channels. After the cut the rest has moved together, in smaller "
        "matrices. Reconstruction changes the output projections of the rest. The result runs in vLLM, llama.cpp and "
        "Transformers.",
    )
    dense = (WHOLE,) * len(PLAN)
    panels = (
        ("dense", ("every layer, head", "and FFN channel"), dense, True, "accent"),
        ("plan", ("what is kept, as data:", "saved, edited, replayed"), PLAN, True, "accent"),
        ("cut", ("smaller matrices,", "same logits as masked"), PLAN, False, "accent"),
        ("reconstructed", ("output projections", "solved on a little text"), PLAN, False, "second"),
        ("served", ("vLLM, llama.cpp,", "Transformers"), PLAN, False, "second"),
    )
    for number, (name, words, layers, gaps, outputs) in enumerate(panels):
        left = 24 + number * 188
        drawing.text(left, 34, name, size=15, bold=True)
        if name == "served":
            drawing.rectangle(left - 10, 44, 164, 136, "accent-line", corner=8)
        draw_model(drawing, left, 54, layers, gaps=gaps, outputs=outputs)
        for row, line in enumerate(words):
            drawing.text(left, 198 + 17 * row, line, "soft")
        if number:
            drawing.arrow(left - 38, 110, left - 18, 110)
    return drawing
