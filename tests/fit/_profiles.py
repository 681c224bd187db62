"""A profile whose times were made up, so that what is fitted to them is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pyprune.fit.measured import features
from pyprune.fit.profile import DENSE, Probe, Profile, Timing
from pyprune.fit.quantities import Quantity, Widths
from pyprune.plan import PrunePlan, Sizes

SIZES = Sizes.decoder(8, 512, 8, 4, 64, 1536, 1000)
PREFILL = Quantity("prefill", 512)
GENERATION = Quantity("generation", 128, 64)
MACHINE = {"device": "cpu one", "cpu": "cpu one", "isa": ["avx2"], "cores": 2, "threads": "2"}
VERSIONS = {"pyprune": "0.1.0", "torch": "2.13.0", "transformers": "5.19.0"}
PLANTED = {
    "model": 5e-3, "head": 3e-9, "hidden": 1e-6, "attention": 4e-4, "mlp": 2e-4, "projections": 4e-9,
    "scores": 8e-7, "cache": 5e-7, "ffn": 9e-9, "experts": 2e-9, "norms": 2e-7, "head pairs": 7e-4,
}  # fmt: skip
"""Seconds a unit of each feature."""

Seconds = Callable[[Probe, Quantity], float]


def planted(probe: Probe, quantity: Quantity, coefficients: Mapping[str, float] = PLANTED) -> float:
    """The seconds of a sum of the features; twice as many for another workload than a prefill."""
    scale = 1.0 if quantity.kind == "prefill" else 2.0
    return scale * sum(coefficients[name] * value for name, value in features(SIZES, probe).items())


def probes() -> list[Probe]:
    """Models that tell all features apart."""
    full = Widths(8, 4, 1536)
    shapes: dict[str, tuple[int, list[Widths]]] = {
        DENSE: (512, [full] * 8),
        "half of the layers": (512, [full] * 4),
        "half of the FFN": (512, [Widths(8, 4, 768)] * 8),
        "a quarter of the FFN": (512, [Widths(8, 4, 384)] * 8),
        "half of the KV groups": (512, [Widths(4, 2, 1536)] * 8),
        "half of the query heads": (512, [Widths(4, 4, 1536)] * 8),
        "every second attention skipped": (512, [full, Widths(0, 0, 1536)] * 4),
        "every second MLP skipped": (512, [full, Widths(8, 4, 0)] * 4),
        "three quarters of the hidden size": (384, [full] * 8),
        "half of the hidden size": (256, [full] * 8),
        "mixed": (512, [Widths(8, 4, 1024), Widths(6, 3, 1536), Widths(4, 2, 512), Widths(0, 0, 768)] * 2),
        "mixed and narrow": (448, [Widths(8, 4, 1280), Widths(2, 1, 640), Widths(4, 4, 512)] * 2),
    }
    return [Probe(name, hidden, tuple(layers)) for name, (hidden, layers) in shapes.items()]


def fake_profile(
    seconds: Seconds = planted, quantities: Sequence[Quantity] = (PREFILL, GENERATION), repeats: int = 3
) -> Profile:
    """A profile of :data:`SIZES`, in which every turn takes exactly what ``seconds`` says."""
    found = probes()
    timings = [
        Timing(probe.name, quantity, 0, float(100 * repeat + position), seconds(probe, quantity))
        for quantity in quantities
        for repeat in range(repeats)
        for position, probe in enumerate(found)
    ]
    return Profile(
        "transformers", "float32", MACHINE, VERSIONS, "llama", SIZES, {}, tuple(found), tuple(timings), made="today"
    )


def identity() -> PrunePlan:
    """The dense model's plan."""
    return PrunePlan.identity("llama", SIZES)
