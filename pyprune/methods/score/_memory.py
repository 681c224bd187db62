"""The memory of scoring in addition to the model: an account by design, and the measured peak."""

from __future__ import annotations

import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pyprune.families import NamedParam
from pyprune.methods.score._gradients import GradientReport
from pyprune.methods.score.base import Scoring


@dataclass
class Account:
    """Bytes held in addition to the model while scores are taken.

    Attributes:
        model: weights of the model in memory; 0 if they are read from disk, one tensor or layer at a time.
        state: data held through all steps (a displacement, sums of gradients, statistics of activations, or the
            streams of a model on disk).
        layer: changed weights and gradients that exist at once: of one layer, or of all open parameters; 0 for
            methods without gradients.
        layerwise: true if ``layer`` counts one layer.
        peak: largest memory of the process (CPU, resident) or of the device (GPU, allocated) meanwhile.
    """

    run: Scoring
    model: int
    state: int = 0
    layer: int = 0
    layerwise: bool = True
    peak: int = 0

    def gradients(self, report: GradientReport, *, copies: int, changed: bool = False) -> None:
        """Count the memory of a pass of gradients.

        Args:
            report: report of the pass.
            copies: float32 copies of open parameters that were held through the steps: of all of them, or of one
                layer's if all passes went through it together.
            changed: whether the weights were changed (a copy of them) or read in place.
        """
        gradients = _layer_bytes(self.run.open_params, _wide_bytes)
        at_work = _layer_bytes(self.run.open_params, lambda p: _wide_bytes(p) + (p.nbytes if changed else 0))
        self.state = copies * _total_bytes(gradients, of_one=report.together) + report.streams
        self.layer = _total_bytes(at_work, of_one=report.layerwise)
        self.layerwise = report.layerwise

    def write(self) -> None:
        """Put the account into the run's details and notes."""
        # Later rounds hold a copy of all weights, which undoes the mask afterwards.
        held = self.state + (self.model if self.run.masked else 0)
        unit = "one layer's" if self.layerwise else "all open layers'"
        layer = f" and {_mb(self.layer)} for {unit} weights and gradients" if self.layer else ""
        self.run.details["memory"] = {
            "model_bytes": self.model,
            "state_bytes": held,
            "layer_bytes": self.layer,
            "layerwise": self.layerwise,
            "peak_bytes": self.peak,
        }
        model = f"the model's {_mb(self.model)}" if self.model else "the part that it read from disk at a time"
        self.run.note(
            f"In addition to {model}, scoring held {_mb(held)} through all steps{layer}; peak memory {_mb(self.peak)}."
        )


@contextmanager
def measure_memory(run: Scoring) -> Iterator[Account]:
    """Measure the peak memory meanwhile and report it."""
    cuda = run.device.type == "cuda"
    account = Account(run, sum(p.nbytes for p in run.model.parameters() if not p.is_meta))
    if cuda:
        torch.cuda.reset_peak_memory_stats(run.device)
    else:
        _reset_resident_peak()
    yield account
    account.peak = torch.cuda.max_memory_allocated(run.device) if cuda else _resident_peak()
    account.write()


def _reset_resident_peak() -> None:
    """Reset the process's peak on Linux; elsewhere the reported peak is that of its whole life."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _resident_peak() -> int:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def _layer_bytes(params: Iterable[NamedParam], count: Callable[[Tensor], int]) -> dict[int | None, int]:
    """Return the bytes of the parameters of each layer, and under None of those outside of the layers."""
    sizes: Counter[int | None] = Counter()
    for param in params:
        sizes[param.layer] += count(param.parameter)
    return sizes


def _total_bytes(sizes: Mapping[int | None, int], *, of_one: bool) -> int:
    """Return the bytes outside of the layers plus those of the largest layer (``of_one``), or of all layers."""
    inner = [size for layer, size in sizes.items() if layer is not None]
    return sizes.get(None, 0) + (max(inner, default=0) if of_one else sum(inner))


def _wide_bytes(tensor: Tensor) -> int:
    """Return the bytes of the tensor's gradient or displacement: float32, or float64 for float64."""
    return tensor.numel() * max(4, tensor.element_size())


def _mb(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
