"""Hooks around decoder layers: read their input and output, scale their branch, or skip them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from pyprune.probe.streams import entering_stream, leaving_stream, replaced_forwards, skip_layer, with_stream

OutputHook = Callable[[int, Tensor, Tensor], Tensor | None]
"""(layer index, input [B, T, H], output [B, T, H]) -> replacement output, or None to leave it."""


class LayerHooks:
    """Forward hooks on decoder layers; :meth:`remove` restores the model.

    Args:
        layers: the decoder layers; each maps a stream [B, T, H] to one of that shape, alone or first in a tuple.
        indices: which of them to hook.
        hook: called after each of their forward passes (and again where gradient checkpointing recomputes).
    """

    def __init__(self, layers: nn.ModuleList, indices: Sequence[int], hook: OutputHook) -> None:
        self.layers = layers
        self.skipped: set[int] = set()
        self._undo = ExitStack()
        for i in indices:
            self._undo.callback(layers[i].register_forward_hook(self._wrap(i, hook), with_kwargs=True).remove)

    @staticmethod
    def _wrap(index: int, hook: OutputHook) -> Callable[..., Any]:
        def after(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
            replacement = hook(index, entering_stream(args, kwargs), leaving_stream(output))
            return None if replacement is None else with_stream(output, replacement)

        return after

    def skip(self, index: int) -> None:
        """Make a layer the identity; it is computed only where it returns more than the stream."""
        if index not in self.skipped:
            self.skipped.add(index)
            layer = self.layers[index]
            self._undo.enter_context(replaced_forwards({layer: skip_layer(layer)}))

    def remove(self) -> None:
        """Take all hooks off and let skipped layers compute again."""
        self._undo.close()
        self.skipped.clear()
