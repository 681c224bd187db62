"""The picture of a real plan: what each layer keeps, and the record that it is drawn from."""

from __future__ import annotations

from pathlib import Path

from pyprune.plan import PrunePlan
from pyprune.runtime.files import read_bounded
from pyprune.runtime.records import Json, RecordFile, digest
from pyprune.runtime.svg import Drawing, text_width

COLUMN, SIDE = 28.0, 11.0
"""Width of a layer's column, and side of the square of a head."""
LEFT, TOP = 108.0, 76.0
FFN_HEIGHT = 130.0


def append_plan(path: Path, plan: Path, command: str) -> None:
    """Append what each layer keeps to a file of records.

    Args:
        path: the file of records.
        plan: JSON as ``pyprune prune --dry-run`` prints it.
        command: that printed it.

    Raises:
        PlanError: ``plan`` is no plan.
        OutputError: the file cannot be written.
    """
    from pyprune.serving.stats import environment_record

    read = PrunePlan.from_json(read_bounded(plan))
    layers = {layer.index: {"heads": layer.query_heads, "ffn": len(layer.ffn)} for layer in read.layers}
    sizes = {"heads": read.dense.num_attention_heads, "groups": read.dense.num_key_value_heads}
    facts = {
        "command": command,
        **sizes,
        "ffn": read.dense.intermediate_size,
        "layers": [layers.get(index, {"heads": (), "ffn": 0}) for index in range(read.dense.num_layers)],
    }
    record = {"kind": "plan", "key": digest(facts)[:16], **facts, "environment": environment_record()}
    RecordFile(path).add(record)


def plan(path: Path) -> Drawing:
    """Draw the newest plan of a file of records, one column a layer: its heads above its FFN channels."""
    record = list(RecordFile(path).of("plan").values())[-1]
    layers, heads, groups, ffn = (record[name] for name in ("layers", "heads", "groups", "ffn"))
    ffn_top = TOP + _head_top(heads, heads // groups) + 18
    width, height = LEFT + len(layers) * COLUMN + 20, ffn_top + FFN_HEIGHT + 66
    drawing = Drawing(width, height, "The plan of a real cut", _description(record))
    drawing.text(24, 34, "What a plan keeps of SmolLM2-135M, by layer", size=15, bold=True)
    drawing.text(24, 54, record["command"], "soft", size=12)
    drawing.text(24, TOP + 12, f"{heads} query")
    drawing.text(24, TOP + 29, "heads in")
    drawing.text(24, TOP + 46, f"{groups} groups")
    drawing.text(24, ffn_top + 12, f"{ffn:,} FFN")
    drawing.text(24, ffn_top + 29, "channels")
    for index, layer in enumerate(layers):
        left = LEFT + index * COLUMN
        for head in range(heads):
            _unit(drawing, left, TOP + _head_top(head, heads // groups), SIDE, kept=head in layer["heads"])
        kept = FFN_HEIGHT * layer["ffn"] / ffn
        if kept < FFN_HEIGHT - 3:
            _unit(drawing, left, ffn_top, FFN_HEIGHT - kept - 3 * bool(kept), kept=False)
        if kept:
            _unit(drawing, left, ffn_top + FFN_HEIGHT - kept, kept, kept=True)
        drawing.text(left + COLUMN / 2, ffn_top + FFN_HEIGHT + 18, str(index), "soft", size=11, anchor="middle")
    _legend(drawing, LEFT + 5, ffn_top + FFN_HEIGHT + 34)
    return drawing


def _head_top(head: int, group: int) -> float:
    """Return how far below the first head a head is drawn; groups are apart."""
    return head * (SIDE + 2) + head // group * 5


def _unit(drawing: Drawing, left: float, top: float, height: float, *, kept: bool) -> None:
    colour = "accent" if kept else "plain-line"
    drawing.rectangle(left + 4, top, COLUMN - 8, height, colour, corner=2, dashed=not kept)


def _legend(drawing: Drawing, x: float, y: float) -> None:
    for label, kept in (("kept", True), ("removed", False)):
        _unit(drawing, x - 4, y, SIDE, kept=kept)
        drawing.text(x + COLUMN, y + SIDE - 1, label, "soft", size=12)
        x += COLUMN + text_width(label, 12) + 20


def _description(record: Json) -> str:
    layers, ffn = record["layers"], record["ffn"]
    heads = [len(layer["heads"]) for layer in layers]
    widths = [layer["ffn"] for layer in layers]
    return (
        f"One column for each of {len(layers)} layers. Of {record['heads']} query heads, layers keep {min(heads)} to "
        f"{max(heads)}, {sum(heads)} in all; of {ffn:,} FFN channels {min(widths):,} to {max(widths):,}, "
        f"{sum(widths):,} of {ffn * len(layers):,} in all. The plan is that of: {record['command']}"
    )
