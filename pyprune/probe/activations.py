"""Statistics of the inputs and outputs of a model's modules on calibration text, one number a channel.

Forward hooks reduce every activation as soon as it exists and drop it. In addition to the model, memory holds the
statistics (three numbers a channel) and, of a micro batch, the activations of the layer that is running. No graph is
recorded, and no logits are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pyprune.config.train import micro_batch_for
from pyprune.errors import DataError
from pyprune.probe.streams import LayerRunner
from pyprune.runtime.modes import evaluation_mode, frozen
from pyprune.runtime.progress import track


@dataclass
class Moments:
    """Running count, mean and squared deviations of every channel over tokens (Chan's pairwise update, in float64).

    Attributes:
        count: tokens so far.
        mean: float64 [channels].
        squares: float64 [channels], sum over tokens of (x - mean)^2.
    """

    count: int = 0
    mean: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    squares: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))

    def add(self, x: Tensor) -> None:
        """Add the tokens of ``x`` [..., channels], any floating dtype."""
        tokens = x.detach().flatten(0, -2).double()
        mean = tokens.mean(0)
        squares = (tokens - mean).square_().sum(0)
        if not self.count:
            self.count, self.mean, self.squares = len(tokens), mean, squares
            return
        total = self.count + len(tokens)
        apart = mean - self.mean
        self.squares += squares + apart.square() * (self.count * len(tokens) / total)
        self.mean += apart * (len(tokens) / total)
        self.count = total

    @property
    def variance(self) -> Tensor:
        """Return the sample variance over the tokens, float64 [channels]."""
        return self.squares / max(1, self.count - 1)

    def norm(self, origin: Tensor | None = None) -> Tensor:
        """Return the l2 norm over the tokens of x - origin, float64 [channels]; an origin of None is 0."""
        mean = self.mean if origin is None else self.mean - origin.detach().double()
        return (self.squares + self.count * mean.square()).sqrt()

    @property
    def bytes(self) -> int:
        """Return the memory of the statistics."""
        return 8 * (self.mean.numel() + self.squares.numel())


@torch.no_grad()
def gather_moments(
    model: PreTrainedModel | LayerRunner,
    samples: Tensor,
    *,
    inputs: Iterable[str] = (),
    outputs: Iterable[str] = (),
    others: Mapping[str, Callable[..., None]] = MappingProxyType({}),
    batch_size: int | None = None,
) -> dict[str, Moments]:
    """Run the model on the samples and return the moments of the inputs or outputs of named modules.

    Args:
        model: a causal LM of a known family, which comes back unchanged; or a runner of its layers.
        samples: token ids, int64 [N, T].
        inputs: modules whose first argument [B, T, channels] is measured.
        outputs: modules whose result [B, T, channels] is measured; not the head, which computes nothing here.
        others: module -> a hook of the caller's in front of it.
        batch_size: sequences in one pass; None = as many as make 2,048 tokens.

    Raises:
        DataError: there is no sample.
    """
    if not samples.numel():
        raise DataError("Statistics of activations are gathered on calibration text; give samples.")
    hooks = dict.fromkeys(inputs, "register_forward_pre_hook") | dict.fromkeys(outputs, "register_forward_hook")
    moments = {name: Moments() for name in hooks}
    calls = {name: _moments_hook(moments[name]) for name in hooks} | dict(others)
    hooks |= dict.fromkeys(others, "register_forward_pre_hook")
    runner = LayerRunner.of(model)
    places: dict[str, list[str]] = {"front": [], "layers": [], "end": []}
    for name in hooks:
        places[_place(runner, name)].append(name)

    @contextmanager
    def hook_modules(place: str) -> Iterator[None]:
        with ExitStack() as stack:
            for name in places[place]:
                register = getattr(runner.model.get_submodule(name), hooks[name])
                stack.callback(register(calls[name]).remove)
            yield

    def walk(group: Sequence[Tensor]) -> Iterator[int]:
        with hook_modules("front"):
            streams = [runner.embed(batch) for batch in group]
        with hook_modules("layers"):
            yield from runner.points_(streams)
        with hook_modules("end"):
            for batch, stream in zip(group, streams, strict=True):
                runner.run_end(batch, stream)

    groups = runner.batch_groups(samples.split(batch_size or micro_batch_for(len(samples), samples.shape[1])))
    steps = (index for group in groups for index in walk(group))
    with frozen_eval(runner.model):
        for _ in track(steps, "activations", total=len(groups) * len(runner.layers)):
            pass
    return moments


def _place(runner: LayerRunner, name: str) -> str:
    """Return the place of a module: front (embeddings), layers, or end (the final norm and the head)."""
    if name.startswith(f"{runner.family.layers_path}."):
        return "layers"
    return "front" if runner.family.match(f"{name}.weight")[0].role == "embedding" else "end"


def _moments_hook(moments: Moments) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], *result: Any) -> None:
        moments.add(result[0] if result else args[0])

    return hook


@contextmanager
def frozen_eval(model: PreTrainedModel) -> Iterator[None]:
    """Switch dropout and the graph of the model's own parameters off meanwhile."""
    with frozen(model), evaluation_mode(model):
        yield
