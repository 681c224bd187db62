"""Hooks around decoder layers: read their input and output, scale their branch, or skip them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

OutputHook = Callable[[int, Tensor, Tensor], Tensor | None]
"""(layer index, input [B, T, H], output [B, T, H]) -> replacement output, or None to leave it."""


class LayerHooks:
    """Forward hooks on decoder layers; :meth:`remove` leaves the model as it was.

    Args:
        layers: the decoder layers; each maps ``hidden_states`` [B, T, H] to a tensor of that shape.
        indices: which of them to hook.
        hook: called after each of their forward passes (and again where gradient checkpointing recomputes).
    """

    def __init__(self, layers: nn.ModuleList, indices: Sequence[int], hook: OutputHook) -> None:
        self.layers = layers
        self.skipped: dict[int, Any] = {}
        """Layer -> the ``forward`` of its own that it had, as a compiled one has; None = that of its class."""
        self.handles = [layers[i].register_forward_hook(self._wrap(i, hook), with_kwargs=True) for i in indices]

    @staticmethod
    def _wrap(index: int, hook: OutputHook) -> Callable[..., Tensor | None]:
        def after(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
            before: Tensor = args[0] if args else kwargs["hidden_states"]
            return hook(index, before, output)

        return after

    def skip(self, index: int) -> None:
        """Make a layer the identity without computing it."""
        if index not in self.skipped:
            self.skipped[index] = vars(self.layers[index]).get("forward")
            self.layers[index].forward = _identity

    def remove(self) -> None:
        """Take all hooks off and let skipped layers compute again."""
        for handle in self.handles:
            handle.remove()
        for index, own in self.skipped.items():
            del self.layers[index].forward
            if own is not None:
                self.layers[index].forward = own
        self.handles.clear()
        self.skipped.clear()


def _identity(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return hidden_states
