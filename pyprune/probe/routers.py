"""Routers that choose between some of their experts only: those that a plan keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from pyprune.errors import UnsupportedModelError
from pyprune.families import named_axes
from pyprune.families.base import ROUTER

_PRODUCTS = (nn.functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__)
_CLOSED = "closed_experts"


class ClosedExperts(TorchFunctionMode):
    """Makes the logits of some experts minus infinity in each call of a router, until it is opened.

    What a router makes of its logits, in whatever order, is then what it makes of those of the other experts. The
    product with its matrix is found by its width, because it has no module of its own in most classes.

    Args:
        router: the module that holds the matrix.
        removed: indices of the experts.
        experts: number of all experts.
    """

    def __init__(self, router: nn.Module, removed: Sequence[int], experts: int) -> None:
        super().__init__()
        self._removed = torch.zeros(experts, dtype=torch.bool)
        self._removed[list(removed)] = True
        self._found = False
        self._handles = (
            router.register_forward_pre_hook(self._enter),
            router.register_forward_hook(self._leave, always_call=True),
        )

    def open(self) -> None:
        """Let the router choose between all experts again."""
        for handle in self._handles:
            handle.remove()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in _PRODUCTS and output.shape[-1] == len(self._removed):
            self._found = True
            return output.masked_fill(self._removed.to(output.device), -torch.inf)
        return output

    def _enter(self, router: nn.Module, args: tuple[Any, ...]) -> None:
        self._found = False
        self.__enter__()

    def _leave(self, router: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.__exit__(None, None, None)
        if not self._found and output is not None:
            raise UnsupportedModelError(
                f"{type(router).__name__} multiplies its input with no matrix of {len(self._removed)} experts, so that "
                "none can be closed. Keep all experts."
            )


def routers(model: PreTrainedModel) -> Iterator[tuple[int, nn.Module]]:
    """Yield the layer of every router of a model, dense or cut, and the module that holds its matrix."""
    for param in named_axes(model):
        if param.row.axes == ROUTER and param.row.role == "reader" and param.layer is not None:
            yield param.layer, model.get_submodule(param.name.rpartition(".")[0])


def close_experts(router: nn.Module, removed: Sequence[int], experts: int) -> None:
    """Let a router choose between all experts but these, and no longer between others only.

    Args:
        router: the module that holds its matrix.
        removed: indices of the experts; () = it chooses between all.
        experts: number of all experts.
    """
    closed = vars(router).pop(_CLOSED, None)
    if closed is not None:
        closed.open()
    if removed:
        vars(router)[_CLOSED] = ClosedExperts(router, removed, experts)
