"""What the modules of a model read and write on calibration text, one number a channel.

Forward hooks reduce every activation as soon as it exists and drop it: in addition to the model, what is held is the
statistics (three numbers a channel) and, of a micro batch, the activations of the layer that is running. No graph is
recorded, and the logits are not made unless the head itself is listened to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pyprune.config.train import micro_batch_for
from pyprune.errors import DataError
from pyprune.probe.streams import LayerRunner
from pyprune.runtime.modes import evaluating, frozen
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
        """Sample variance over the tokens, float64 [channels]."""
        return self.squares / max(1, self.count - 1)

    def norm(self, origin: Tensor | None = None) -> Tensor:
        """The l2 norm over the tokens of x - origin, float64 [channels]; an origin of None is 0."""
        mean = self.mean if origin is None else self.mean - origin.detach().double()
        return (self.squares + self.count * mean.square()).sqrt()

    @property
    def bytes(self) -> int:
        """Memory of the statistics."""
        return 8 * (self.mean.numel() + self.squares.numel())


@torch.no_grad()
def gather_moments(
    model: PreTrainedModel | LayerRunner,
    samples: Tensor,
    *,
    inputs: Iterable[str] = (),
    outputs: Iterable[str] = (),
    batch_size: int | None = None,
) -> dict[str, Moments]:
    """Run the model on the samples and return the moments of what the named modules read or write.

    Args:
        model: a causal LM, which comes back as it was; or its layers as something else holds them.
        samples: token ids, int64 [N, T].
        inputs: modules whose first argument [B, T, channels] is listened to.
        outputs: modules whose result [B, T, channels] is listened to.
        batch_size: sequences in one pass; None = as many as make 2,048 tokens.

    Raises:
        DataError: there is no sample.
    """
    if not samples.numel():
        raise DataError("Statistics of activations are gathered on calibration text; give samples.")
    ears = dict.fromkeys(inputs, "register_forward_pre_hook") | dict.fromkeys(outputs, "register_forward_hook")
    found = {name: Moments() for name in ears}
    size = batch_size or micro_batch_for(len(samples), samples.shape[1])
    whole = model.model if isinstance(model, LayerRunner) else model
    batches = samples.to(whole.device).split(size)

    @contextmanager
    def listening(names: Iterable[str]) -> Iterator[None]:
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(_listening(whole, name, found, ears[name]))
            yield

    with still(whole):
        if isinstance(model, LayerRunner):
            _run_layers(model, batches, found, listening)
        else:
            with listening(found):
                _run_whole(model, batches, found)
    return found


def _run_whole(model: PreTrainedModel, batches: Iterable[Tensor], names: Iterable[str]) -> None:
    """Run a model that is in memory, up to the head if that is listened to."""
    head = model.get_output_embeddings()
    listened = {id(model.get_submodule(name)) for name in names}
    runner: Callable[..., Any] = model if id(head) in listened else model.base_model
    for batch in track(batches, "activations"):
        runner(input_ids=batch, use_cache=False)


def _run_layers(
    runner: LayerRunner,
    batches: Sequence[Tensor],
    names: Iterable[str],
    listening: Callable[[Iterable[str]], AbstractContextManager[None]],
) -> None:
    """Run layers by themselves; what is outside runs before and behind them, and is listened to where it is meant."""
    places: dict[str, list[str]] = {"front": [], "layers": [], "behind": []}
    for name in names:
        places[_place(runner, name)].append(name)
    for group in runner.walking_together(batches):
        with listening(places["front"]):
            streams = [runner.embed(batch) for batch in group]
        with listening(places["layers"]):
            runner.through_(streams)
        with listening(places["behind"]):
            for batch, stream in zip(group, streams, strict=True):
                runner.leave(batch, stream)


def _place(runner: LayerRunner, name: str) -> str:
    """Where a module stands: front (embeddings), layers, or behind (the final norm and the head)."""
    if name.startswith(f"{runner.family.layers_path}."):
        return "layers"
    return "front" if runner.family.match(f"{name}.weight")[0].role == "embedding" else "behind"


@contextmanager
def _listening(model: nn.Module, name: str, into: dict[str, Moments], register: str) -> Iterator[None]:
    moments = into[name]

    def hook(module: nn.Module, args: tuple[Any, ...], *result: Any) -> None:
        moments.add(result[0] if result else args[0])

    handle = getattr(model.get_submodule(name), register)(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def still(model: PreTrainedModel) -> Iterator[None]:
    """No dropout and no graph for the model's own parameters meanwhile."""
    with frozen(model), evaluating(model):
        yield
