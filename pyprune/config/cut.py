"""The options of the cut itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from typing_extensions import override

from pyprune.config.base import LARGEST_INDEX, LARGEST_WEIGHT, Config, option
from pyprune.config.data import DataConfig
from pyprune.config.train import LARGEST_BATCH


@dataclass(frozen=True)
class ReconstructConfig(Config):
    """How a cut is reconstructed by least squares (:mod:`pyprune.cut.reconstruct`).

    Attributes:
        ridges: candidates for the ridge, relative to the mean of diag(x^T x); the best one is chosen for every writer.
            They are tried from the largest down, until one is worse than the best before it.
        held_back: share of the sequences of each kind that judges the candidates, in (0, 0.5].
        readers: whether q, k, v, gate and up are solved as well; null = if hidden channels are removed.
        relative: whether a token's error counts relative to the size of its stream, by which the norms divide; on
            SmolLM2 the perplexity was not better than with absolute errors.
        dtype: compute dtype of the layers: float32 (that of the weights), bfloat16 (autocast), or auto: bfloat16 if the
            device multiplies faster in it, else float32. The streams keep the dtype of the weights, the systems float32
            or float64.
    """

    ridges: tuple[float, ...] = option((1e-2, 1e-1, 1.0, 10.0), at_least=0, at_most=LARGEST_WEIGHT)
    held_back: float = option(0.125, above=0, at_most=0.5)
    readers: bool | None = None
    relative: bool = False
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"

    @override
    def problems(self) -> Iterator[str]:
        if not self.ridges:
            yield "ridges is empty; give one or more numbers from 0 up."


@dataclass(frozen=True)
class CutConfig(Config):
    """Options of the cut.

    Attributes:
        reconstruct: how the kept weights compensate for the removed ones: none, bias (the mean of the lost input of
            the output projections is added as a bias: FLAP's, :mod:`pyprune.cut.compensate`) or least_squares (the kept
            weights are solved in closed form to follow the dense stream, :mod:`pyprune.cut.reconstruct`). Both read the
            calibration text.
        data: the text of the reconstruction; null = the text of the method and the stages before the cut. Text of
            several kinds keeps the reconstruction from fitting one of them at the cost of the others. Its default
            samples and sequence length are those of the method's text, as for recovery_data.
        least_squares: options of least_squares.
        batch_size: sequences in one forward pass of the reconstruction; null = as many as make 2,048 tokens.
        experts_per_token: experts that each token of a mixture reads from the start of the run on, fewer than in the
            dense model (num_experts_per_tok); null = as many. Reconstruction and distillation follow the model that
            reads all of them.
    """

    reconstruct: Literal["none", "bias", "least_squares"] = "none"
    data: DataConfig | None = None
    least_squares: ReconstructConfig = field(default_factory=ReconstructConfig)
    batch_size: int | None = option(None, at_least=1, at_most=LARGEST_BATCH)
    experts_per_token: int | None = option(None, at_least=1, at_most=LARGEST_INDEX)

    @property
    def idle(self) -> dict[str, str]:
        """Return options that the values of others switch off: name -> the option and the value that do it."""
        unread = {"none": ("least_squares", "batch_size"), "bias": ("least_squares",), "least_squares": ()}
        return dict.fromkeys(unread[self.reconstruct], f"reconstruct {self.reconstruct!r}")

    @override
    def problems(self) -> Iterator[str]:
        if self.data is not None and self.reconstruct == "none":
            yield "data is given, but reconstruct is 'none', which reads no text; leave it out, or set reconstruct."
        if self.data is not None and self.data.layout != "stream":
            yield "data.layout is 'instructions', which is for recovery_data; a cut is reconstructed on 'stream'."
