"""The place of every tensor in files, by Transformers' conversion tables: read piece by piece, and written alike.

A table says how tensors in files become those of a model: experts one by one on the hub are one tensor in memory,
projections are joined, prefixes differ. Everything is written as it was read: under the names of the source, with
layers and experts counted anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from pyprune.checkpoint.shards import TensorFiles
from pyprune.errors import CheckpointError

MULTI_TOKEN = re.compile(r"(^|\.)mtp[._]")
"""In names of weights that predict several tokens at once."""
MULTI_TOKEN_MATRIX = ".eh_proj.weight"  # noqa: S105
"""End of a name in a layer of such weights that has no name of its own."""
MULTI_TOKEN_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Fields of configurations that count such layers."""
COMPUTED = "rotary_emb.inv_freq"
"""End of names in old files of values that the model computes."""
_INDEX = re.compile(r"(?:(?<=\.)|^)\d+(?=\.)")
_START = re.compile(r".*?\.\d+(?=\.)|.*(?=\.)|.*")


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """The place of one tensor of a model in files.

    Attributes:
        sources: names in files: for each pattern of the table, in its order, the tensors that match it, in order.
        dtype: of the first one; None = the source lacks it.
        prefix: of its names in what is written: some files hold the decoder without the causal LM around it.
        name: in the model that the files were written for.
        converter: how they become the tensor; None = the file holds it as it is.
        config: of that model.
    """

    sources: Mapping[str, tuple[str, ...]]
    dtype: torch.dtype | None = None
    prefix: str = ""
    name: str = ""
    converter: WeightConverter | None = None
    config: PretrainedConfig | None = None

    @property
    def is_merged(self) -> bool:
        """Return whether the first dimension counts tensors of the files, such as experts."""
        first = self.converter.operations[0] if self.converter is not None else None
        return isinstance(first, MergeModulelist) and first.dim == 0

    @property
    def parts(self) -> int:
        """Return how many parts :meth:`part` can read."""
        return min(map(len, self.sources.values())) if self.is_merged else 1

    def names(self, part: int) -> list[str]:
        """Return the names in files of one part."""
        chosen = slice(part, part + 1) if self.is_merged else slice(None)
        return [name for names in self.sources.values() for name in names[chosen]]

    def part(self, index: int, read: Callable[[str], Tensor]) -> Tensor:
        """Return one expert [1, ...] of a merged tensor; of another the whole.

        Args:
            index: of the expert; else 0.
            read: returns a tensor of the files, by its name.
        """
        if self.converter is None:
            return read(self.names(0)[0])
        operations = self.converter.operations
        if self.is_merged:
            values: dict[str, Any] = {pattern: read(names[index])[None] for pattern, names in self.sources.items()}
            return self._converted(self.converter, operations[1:], values)[0]
        values = {pattern: [read(name) for name in names] for pattern, names in self.sources.items()}
        return self._converted(self.converter, operations, values)[0]

    def read(self, read: Callable[[str], Tensor]) -> Tensor:
        """Return the whole tensor; it is a new one unless the file holds it as it is."""
        first = self.part(0, read)
        if not self.is_merged:
            return first
        whole = first.new_empty((self.parts, *first.shape[1:]))
        whole[:1] = first
        for index in range(1, self.parts):
            whole[index : index + 1] = self.part(index, read)
        return whole

    def files_of(self, index: int, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values of the tensors of files.

        Args:
            index: of the part, as it is counted in what is written.
            tensor: as :meth:`part` returns it, or cut.
        """
        parts = [tensor]
        if self.converter is not None:
            back = cast(WeightConverter, self.converter.reverse_transform())
            operations = back.operations[:-1] if self.is_merged else back.operations
            parts = self._converted(back, operations, {back.source_patterns[0]: tensor})
            parts = [part[0] for part in parts] if self.is_merged else parts
        for name, part in zip(self.names(index), parts, strict=True):
            yield self.prefix + name, part

    def split(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values of all tensors of files that hold one of the model, which may be cut."""
        for index, part in enumerate(tensor.split(1) if self.is_merged else (tensor,)):
            yield from self.files_of(index, part)

    def renumbered(self, old: int, new: int) -> StoredTensor:
        """Return the place of the same tensor in a layer with another index, which is the first one in its names."""

        def moved(name: str) -> str:
            return _INDEX.sub(lambda found: str(new) if found[0] == str(old) else found[0], name, count=1)

        return replace(self, sources={key: tuple(map(moved, names)) for key, names in self.sources.items()})

    def _converted(self, converter: WeightConverter, operations: Sequence[Any], values: dict[str, Any]) -> list[Tensor]:
        for operation in operations:
            values = operation.convert(
                values,
                source_patterns=converter.source_patterns,
                target_patterns=converter.target_patterns,
                full_layer_name=self.name,
                config=self.config,
            )
        return list(values.values())


@dataclass(frozen=True, eq=False)
class Places:
    """The place of every tensor of a model in the files of a checkpoint.

    Attributes:
        tensors: name in the model -> its place.
        unused: names in files of weights that the model has no use for: those that predict several tokens, and those
            that its class leaves out.
        unknown: names in files that have no place in the model, for no known reason, or for which the tables make
            several tensors of one.
    """

    tensors: Mapping[str, StoredTensor]
    unused: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # nothing changes it

    def of(self, name: str) -> StoredTensor:
        """Return the place of a tensor of the model; one that the source lacks is written under its own name."""
        return self.tensors.get(name) or StoredTensor({name: (name,)})

    def kept(self, path: str, layers: Sequence[int]) -> Self:
        """Return the places in a model that kept some layers.

        Args:
            path: dotted path of the layers.
            layers: indices of those that are kept, ascending.
        """
        inside = re.compile(re.escape(path) + r"\.(\d+)\.(.*)", re.DOTALL)
        position = {old: new for new, old in enumerate(layers)}
        tensors: dict[str, StoredTensor] = {}
        for name, place in self.tensors.items():
            found = inside.fullmatch(name)
            if found is None:
                tensors[name] = place
            elif (old := int(found[1])) in position:
                tensors[f"{path}.{position[old]}.{found[2]}"] = place.renumbered(old, position[old])
        return replace(self, tensors=tensors)

    def split(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of files, by their names, of tensors of the model."""
        return {stored: part for name, tensor in state.items() for stored, part in self.of(name).split(tensor)}

    def note(self) -> str | None:
        """Return a sentence about the weights that are left out; None if there are none."""
        starts = dict.fromkeys(_START.match(name)[0] for name in self.unused)  # type: ignore[index]
        if not starts:
            return None
        named = ", ".join(list(starts)[:3]) + (", ..." if len(starts) > 3 else "")
        return f"Weights that the model does not use were left out: {named} (tensors: {len(self.unused)})."


def find_places(files: TensorFiles, model: PreTrainedModel) -> Places:
    """Find the place in a model of every tensor of its files.

    Args:
        files: of a checkpoint of the model.
        model: whose tensors they are; their values are not read.

    Raises:
        CheckpointError: two tensors have the same place.
    """
    state = model.state_dict(keep_vars=True)
    base, conversions = model.base_model_prefix, get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    found: dict[str, dict[str, list[str]]] = {}
    prefixes: dict[str, str] = {}
    nowhere: dict[str, str] = {}
    for name in sorted(files.names(), key=dot_natural_key):
        tables = renamings, converters
        own, pattern = rename_source_key(name, *tables, base, state)
        if own not in state:  # named as in the model already
            tables = [], []
            own, pattern = rename_source_key(name, *tables, base, state)
        if own not in state or (pattern is not None and len(by_pattern[pattern].target_patterns) > 1):
            nowhere[name] = rename_source_key(name, renamings, converters)[0]
            continue
        found.setdefault(own, {}).setdefault(pattern or "", []).append(name)
        if own == f"{base}.{rename_source_key(name, *tables)[0]}":
            prefixes[own] = f"{base}."
    unused = {*multi_token_names(nowhere), *_left_out(nowhere, model)}
    tensors = {}
    for own, sources in found.items():
        converter = next((by_pattern[pattern] for pattern in sources if pattern), None)
        _check_one(own, sources, converter)
        order = converter.source_patterns if converter else sources
        placed = {pattern: tuple(sources[pattern]) for pattern in order}
        dtype = files.dtype(next(iter(placed.values()))[0])
        tensors[own] = StoredTensor(placed, dtype, prefixes.get(own, ""), own, converter, model.config)
    return Places(
        tensors,
        tuple(name for name in nowhere if name in unused and not name.endswith(COMPUTED)),
        tuple(name for name in nowhere if name not in unused),
    )


def remember_places(model: PreTrainedModel, files: TensorFiles) -> None:
    """Keep with a model that was loaded from files where its tensors are, for what is written of it.

    Of a text tower only what is left out is known: Transformers names the whole model's tensors.
    """
    if getattr(model, "tower", None) is not None:
        places = Places({}, tuple(multi_token_names(files.names())))
    else:
        places = find_places(files, model)
    if not places.unknown:
        model.places = places  # type: ignore[assignment]


def places_of(model: PreTrainedModel) -> Places | None:
    """Return where the tensors of a model were in the files that it was loaded from, also after a cut; else None."""
    return getattr(model, "places", None)


def multi_token_names(names: Collection[str]) -> list[str]:
    """Return those of these names, which have no place in a model, that are of weights that predict several tokens."""
    layers = tuple(name.removesuffix(MULTI_TOKEN_MATRIX) + "." for name in names if name.endswith(MULTI_TOKEN_MATRIX))
    return [name for name in names if MULTI_TOKEN.search(name) or name.startswith(layers)]


def forget_multi_token_(config: PretrainedConfig) -> None:
    """Make a configuration count no layers that predict several tokens: their weights are neither read nor written."""
    for name in MULTI_TOKEN_COUNTS:
        if getattr(config, name, None):
            setattr(config, name, 0)


def _left_out(names: Mapping[str, str], model: PreTrainedModel) -> list[str]:
    """Return the names in files that the class of a model leaves out, by their names in the model."""
    patterns = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    computed = [name for name in names if name.endswith(COMPUTED)]
    return computed + [name for name, own in names.items() if any(pattern.search(own) for pattern in patterns)]


def _check_one(own: str, sources: Mapping[str, Sequence[str]], converter: WeightConverter | None) -> None:
    """Refuse tensors of files of which it is unclear how they make one of the model."""
    if converter is None:
        first, *others = sources[""]
        if others:
            raise CheckpointError(
                f"The files hold {own} twice, as {first} and as {others[0]}; it is unclear which one is valid. Fetch "
                "or write the checkpoint again."
            )
        return
    counts = {pattern: len(sources.get(pattern, ())) for pattern in (*converter.source_patterns, *sources)}
    if len({*counts.values()}) > 1 or "" in counts:
        listed = ", ".join(f"{count} of {pattern or own}" for pattern, count in counts.items())
        raise CheckpointError(
            f"The files hold different numbers of tensors for {own}: {listed}. The checkpoint is incomplete; fetch it "
            "again."
        )
