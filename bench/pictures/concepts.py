"""Pictures of the ideas: axes, exactness, reconstruction, objectives. They need no record."""

from __future__ import annotations

from collections.abc import Sequence

from bench.pictures.flow import PLAN, draw_model
from pyprune.runtime.svg import Drawing


def exactness() -> Drawing:
    """The invariant: masked equals cut."""
    drawing = Drawing(
        640,
        222,
        "Masked and cut compute the same",
        "Left, the dense model whose removed layer, heads and channels are set to zero. Right, the cut model, where "
        "they are gone. An equals sign stands between them: both give the same logits.",
    )
    drawing.text(32, 34, "dense, removed parts zero", size=15, bold=True)
    draw_model(drawing, 32, 54, PLAN, gaps=True)
    drawing.text(302, 116, "=", "accent", size=40, anchor="middle", bold=True)
    drawing.text(412, 34, "cut", size=15, bold=True)
    draw_model(drawing, 412, 54, PLAN, gaps=False)
    drawing.text(32, 204, "Equal logits for every family and axis, also after saving, loading and serving.", "soft")
    return drawing


HIDDEN, HEADS, FFN = "accent", "second", "third"
"""Colour of the axis in the picture of the axes."""
WIDTHS = {"vocab": 150.0, HIDDEN: 78.0, HEADS: 78.0, FFN: 130.0}
STRIPE = 9.0


def axes() -> Drawing:
    """Matrices of a layer with the names of their axes; equal colours are cut together."""
    drawing = Drawing(
        780,
        284,
        "Axes of the parameters",
        "Eight matrices of a decoder. Each side carries the name of an axis: vocab, hidden, heads or ffn. A stripe of "
        "one colour runs through every matrix that has this axis: a hidden channel through all eight, a head through "
        "the projections of queries, keys and values and of the attention's output, an FFN channel through gate, up "
        "and down.",
    )
    drawing.text(24, 34, "One unit of an axis is removed from every matrix that has the axis", size=15, bold=True)
    matrices = (
        ("embedding", "vocab", HIDDEN),
        ("q, k, v", HEADS, HIDDEN),
        ("attention out", HIDDEN, HEADS),
        ("gate, up", FFN, HIDDEN),
        ("down", HIDDEN, FFN),
    )
    left = 52.0
    for name, rows, columns in matrices:
        height, width = WIDTHS[rows], WIDTHS[columns]
        drawing.text(left, 66, name, size=13, bold=True)
        drawing.rectangle(left, 94, width, height, "plain-line")
        if rows != "vocab":
            drawing.rectangle(left, 94 + 0.6 * height, width, STRIPE, rows)
        drawing.rectangle(left + 0.4 * width, 94, STRIPE, height, columns)
        drawing.text(left + width / 2, 88, _axis(columns), columns, size=12, anchor="middle")
        drawing.text(left - 6, 94 + height / 2, _axis(rows), _ink(rows), size=12, anchor="middle", upright=True)
        left += width + 58
    for row, (colour, words) in enumerate(
        ((HIDDEN, "hidden channel: in every matrix"), (HEADS, "head: in the attention"), (FFN, "channel: in the FFN"))
    ):
        drawing.rectangle(160 + 224 * row, 258, 12, STRIPE, colour)
        drawing.text(160 + 224 * row + 20, 266, words, "soft", size=12)
    return drawing


def _axis(colour: str) -> str:
    return {"vocab": "vocab", HIDDEN: "hidden", HEADS: "heads", FFN: "ffn"}[colour]


def _ink(colour: str) -> str:
    return "soft" if colour == "vocab" else colour


def reconstruction() -> Drawing:
    """A least-squares problem: the rest of the inputs, other weights, the same outputs."""
    drawing = Drawing(
        760,
        234,
        "Reconstruction",
        "Above, the dense model: six inputs, a matrix W, and outputs y. Below, two inputs are removed and the matrix "
        "has another colour: its weights are solved so that the outputs stay as close to y as they can on a sample of "
        "text.",
    )
    for top, kept, colour, label, result in (
        (46.0, (0, 1, 2, 3, 4, 5), "accent", "W", "y"),
        (136.0, (0, 2, 3, 5), "second", "W'", "close to y"),
    ):
        drawing.text(24, top + 30, "dense" if colour == "accent" else "cut", size=15, bold=True)
        for unit in range(6):
            left = 124 + unit * 22.0
            whole = unit in kept
            drawing.rectangle(left, top + 16, 16, 16, "accent" if whole else "plain-line", corner=2, dashed=not whole)
        drawing.text(124, top + 52, "inputs of the projection", "soft", size=12)
        drawing.arrow(268, top + 24, 300, top + 24)
        drawing.rectangle(314, top, 22.0 * len(kept), 48, colour, corner=4)
        drawing.text(314 + 11.0 * len(kept), top + 30, label, "paper", size=16, anchor="middle", bold=True)
        drawing.arrow(460, top + 24, 492, top + 24)
        for unit in range(4):
            drawing.rectangle(506 + unit * 22.0, top + 16, 16, 16, "soft", corner=2)
        drawing.text(606, top + 29, result, size=14)
    drawing.text(24, 218, "W' is the least-squares solution on a sample of text: closed form, no training.", "soft")
    return drawing


def objectives() -> Drawing:
    """Draw what a recovery learns from."""
    drawing = Drawing(
        760,
        232,
        "What a recovery learns from",
        "Text goes into the pruned model, and into the dense model, whose weights stay. The next word of the text and "
        "the logits of the dense model are the two targets. Their losses are added, and gradients go to the pruned "
        "model alone.",
    )
    _box(drawing, 24, 84, 92, ("text",), "soft-line")
    _box(drawing, 184, 34, 170, ("pruned model", "trained"), "accent-line")
    _box(drawing, 184, 134, 170, ("dense model", "fixed"), "soft-line")
    _box(drawing, 440, 34, 194, ("next token of the text", "cross-entropy"), "second-line")
    _box(drawing, 440, 134, 194, ("logits of the dense model", "KL divergence"), "third-line")
    drawing.line([(116, 111), (150, 111), (150, 61)], "soft", thick=1.5)
    drawing.line([(150, 111), (150, 161)], "soft", thick=1.5)
    for y in (61, 161):
        drawing.arrow(150, y, 178, y)
        drawing.arrow(358, y, 434, y)
    drawing.line([(396, 61), (396, 148)], "soft", thick=1.5)
    drawing.arrow(396, 148, 434, 148)
    drawing.line([(638, 61), (664, 61), (664, 161), (638, 161)], "soft", thick=1.5)
    drawing.arrow(664, 111, 686, 111)
    drawing.text(694, 116, "loss", size=15, bold=True)
    drawing.text(24, 216, "The default adds both halves; either one can be used alone.", "soft")
    return drawing


def _box(drawing: Drawing, x: float, y: float, width: float, words: Sequence[str], colour: str) -> None:
    drawing.rectangle(x, y, width, 54, colour, corner=6)
    for row, line in enumerate(words):
        height = y + 32 if len(words) == 1 else y + 23 + 18 * row
        drawing.text(x + width / 2, height, line, "soft" if row else "ink", anchor="middle", bold=not row)
