"""Numerical operations with one meaning and several implementations.

``ops/<op>/reference.py`` defines an op in plain torch; ``triton.py`` (GPU) and ``pyprune._C`` (CPU) must
agree with it. Methods call the functions here and never a backend. ``PYPRUNE_BACKEND=auto|python|triton|cpp``
chooses. Subnormal numbers are not flushed to zero; docs/reference/kernels.md has the rule and what departs from it.
"""

from __future__ import annotations

from pyprune.ops.dispatch import BackendError, OpError, available_isas, backend_report, plain_torch, triton_obstacle
from pyprune.ops.group_importance import group_importance
from pyprune.ops.group_penalty import add_group_penalty_, group_penalty
from pyprune.ops.group_soft_threshold import group_soft_threshold
from pyprune.ops.layer_norm_virtual import layer_norm_virtual
from pyprune.ops.moreau_step import moreau_step
from pyprune.ops.perturb import perturb
from pyprune.ops.regularised_adamw import regularised_adamw
from pyprune.ops.residual_diff_norm import residual_diff_norm
from pyprune.ops.slice_gather import slice_gather

__all__ = [
    "BackendError",
    "OpError",
    "add_group_penalty_",
    "available_isas",
    "backend_report",
    "group_importance",
    "group_penalty",
    "group_soft_threshold",
    "layer_norm_virtual",
    "moreau_step",
    "triton_obstacle",
    "perturb",
    "regularised_adamw",
    "residual_diff_norm",
    "slice_gather",
    "plain_torch",
]
