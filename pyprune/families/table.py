"""The tables that ``pyprune families`` prints: each model type with its open axes and engines, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from pyprune.families import all_families, family_or_reason, find_family, gguf_types
from pyprune.families.base import Family
from pyprune.families.engines import NEARLY, NOT_ON_CPU, REFUSED, vllm_cell
from pyprune.families.gemma4 import GIVEN
from pyprune.families.infer import causal_types
from pyprune.runtime.report import Table

if TYPE_CHECKING:
    from transformers import PretrainedConfig

AXES = ("layers", "hidden", "heads", "ffn")
"""Axes of a plan, in the order of the columns."""


def known_types() -> list[str]:
    """Return every model type: those with a table, and every other of which Transformers has a causal LM."""
    return list(dict.fromkeys((*all_families(), *causal_types())))


def open_table(model_types: Iterable[str]) -> Table:
    """Return a row for each of these types that has a table: its open axes, and why others are closed.

    Args:
        model_types: of Transformers; a family without a table is inferred, which takes a quarter of a second.
    """
    families = [family for family in map(find_family, model_types) if family is not None and not family.layers_alone]
    rows = [_row(family) for family in sorted(families, key=lambda family: family.model_type)]
    columns = ("type", "table", *AXES, "experts", "stock", "vLLM", "GGUF", "closed, or refused")
    return Table("Model types", columns, tuple(rows))


def layers_table(model_types: Iterable[str]) -> Table:
    """Return one row with those of these types that have no table, and lose whole layers alone."""
    families = {name: find_family(name) for name in sorted(model_types)}
    names = [name for name, family in families.items() if family is not None and family.layers_alone]
    return Table("Layers alone", ("count", "types"), ((len(names), ", ".join(names)),))


def vllm_table() -> Table:
    """Return a row for each type that vLLM does not serve as Transformers does, with the reason."""
    reasons = {"no": REFUSED, "nearly": NEARLY, "not on a CPU": NOT_ON_CPU}
    rows = [(name, word, reason) for word, types in reasons.items() for name, reason in sorted(types.items())]
    return Table("vLLM", ("type", "vLLM", "reason"), tuple(rows))


def gguf_table() -> Table:
    """Return a row for each type that llama.cpp does not hold, or computes otherwise, with the reason."""
    reasons = {"no": gguf_types.REFUSED, "nearly": gguf_types.NEARLY}
    rows = [(name, word, reason) for word, types in reasons.items() for name, reason in sorted(types.items())]
    return Table("GGUF", ("type", "GGUF", "reason"), tuple(rows))


def refused_table(model_types: Iterable[str]) -> Table:
    """Return a row for each of these types that has no family, with the reason."""
    reasons = [(name, family_or_reason(name)) for name in sorted(model_types) if find_family(name) is None]
    return Table("Refused", ("type", "reason"), tuple((name, cast(str, reason)) for name, reason in reasons))


def _row(family: Family) -> tuple[str, ...]:
    untied, tied = (family.closed_axes(_like(tied)) for tied in (False, True))
    owned = _owned(family)
    cells = ["no" if axis in untied else "untied head" if axis in tied else "yes" for axis in AXES]
    cells = [cell if axis in owned else "none" for axis, cell in zip(AXES, cells, strict=True)]
    reasons = _kept_whole(family)
    reasons += [f"{axis}: {reason}" for axis, reason in (tied | untied).items()]
    reasons += [f"{name} is {value}: {reason}" for name, (value, reason) in family.refused_switches.items()]
    cells.append("yes" if "experts" in family.mixture_fields else "")
    cells.append(", ".join(dict.fromkeys(target.model_type for target in family.stock_targets)))
    cells += [vllm_cell(family), gguf_types.gguf_cell(family.model_type, family.gguf)]
    return (family.model_type, _source(family), *cells, "; ".join(reasons))


def _source(family: Family) -> str:
    """Return where the table of a type comes from: its own, inferred, or none."""
    if family.model_type in all_families() or family.model_type in GIVEN:
        return "own"
    return "none" if family.layers_alone else "inferred"


def _owned(family: Family) -> tuple[str, ...]:
    """Return the axes that a type has, those of its blocks included."""
    return ("layers", "hidden", *(axis for kind in family.kinds.values() for axes in kind.values() for axis in axes))


def _kept_whole(family: Family) -> list[str]:
    """Return a clause for each closed block."""
    inside = dict.fromkeys(block for kind in family.kinds.values() for block, axes in kind.items() if not axes)
    sharing = {*family.needed_kinds, *family.needed_kinds.values()}
    where = " in layers that share keys and values" if sharing else ""
    return [f"{block} is kept whole{where}" for block in inside]


def _like(tied: bool) -> PretrainedConfig:
    """Return what a family reads of a configuration to tell which axes are closed."""
    return cast("PretrainedConfig", SimpleNamespace(tie_word_embeddings=tied))


def model_table(family: Family, config: PretrainedConfig, name: str, also_closed: Mapping[str, str]) -> Table:
    """Return the sizes of one model, and whether each of its axes is open.

    Args:
        family: of the model.
        config: of the model.
        name: of the model, for the title.
        also_closed: axes that another part of the model closes, with the reasons.
    """
    sizes = family.sizes(config)
    closed = family.closed_axes(config) | dict(also_closed)
    rows: list[tuple[str, Any]] = [("type", family.model_type), ("table", _source(family))]
    rows += [(f"{kind} layers", sizes.describe(kind)) for kind in sizes.kinds]
    rows += [(name, getattr(sizes, name)) for name in ("hidden_size", "vocab_size")]
    if not family.layers_alone:
        closed = dict.fromkeys(set(AXES) - set(_owned(family)), ", ".join(_kept_whole(family))) | closed
    axes = (*AXES, "experts") if "experts" in sizes.axes else AXES
    rows += [(f"axis {axis}", f"closed: {closed[axis]}" if axis in closed else "open") for axis in axes]
    return Table(name, ("", "value"), tuple(rows))
