"""Least squares over a stream of tokens: what is kept is the Gram matrix, never the tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from pyprune.probe.moments import add_moments_
from pyprune.runtime import processes

FLOAT64_INPUTS = 1024
"""Up to this many inputs everything is float64; beyond it is float32, as memory and time of float64 are not small."""
_ROWS = 4096


class NormalEquations:
    """The normal equations of min_D sum over tokens ||x D - r||^2 + ridge * mean(diag(x^T x)) * ||D||^2.

    Products and sums are float64, or float32 of wide inputs (see :data:`FLOAT64_INPUTS`), over at most 4,096 tokens at
    a time.

    Args:
        inputs: size of x.
        outputs: size of r.
        constant: x has a constant appended, whose row of D is a bias and costs no ridge.
        device: of the sums.
    """

    def __init__(self, inputs: int, outputs: int, *, constant: bool, device: torch.device) -> None:
        self.constant = constant
        size = inputs + constant
        dtype = torch.float64 if size <= FLOAT64_INPUTS else torch.float32
        self.gram = torch.zeros(size, size, dtype=dtype, device=device)
        self.moment = torch.zeros(size, outputs, dtype=dtype, device=device)
        self.tokens = 0
        self._whole: tuple[Tensor, Tensor] | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """The sums."""
        return self.gram, self.moment

    @property
    def nbytes(self) -> int:
        """Bytes held while a solution is made: the sums (of all processes too), and the factor beside what it is of or
        beside the solution.
        """
        sums = (2 if processes.divided() else 1) * (self.gram.nbytes + self.moment.nbytes)
        return sums + self.gram.nbytes + max(self.gram.nbytes, self.moment.nbytes)

    def add(self, x: Tensor, r: Tensor, weight: Tensor) -> None:
        """Add tokens.

        Args:
            x: [tokens, inputs], any floating dtype.
            r: [tokens, outputs], any floating dtype.
            weight: float32 [tokens]; how much each token's error counts (it multiplies the error, not its square).
        """
        for some in torch.arange(len(x), device=x.device).split(_ROWS):
            w = weight[some, None].to(self.gram.dtype)
            given = x[some].to(self.gram.dtype)
            if self.constant:
                given = torch.cat([given, torch.ones_like(w)], dim=1)
            given = given * w
            add_moments_(self.gram, given)
            self.moment += given.T @ (r[some].to(self.gram.dtype) * w)
        self.tokens += len(x)

    def grown(self) -> None:
        """Tokens were added in this process or another; all of them say so, at the same point."""
        self._whole = None

    def _over_processes(self) -> tuple[Tensor, Tensor]:
        """The sums of all processes that share the tokens."""
        if not processes.divided():
            return self.gram, self.moment
        if self._whole is None:
            self._whole = processes.summed_(self.gram.clone()), processes.summed_(self.moment.clone())
        return self._whole

    def solve(self, ridge: float) -> Tensor | None:
        """The solution D [inputs (+ 1 with a constant), outputs], or None where it is not determined.

        Args:
            ridge: relative to the mean of the diagonal of x^T x.
        """
        gram, moment = self._over_processes()
        diagonal = gram.diagonal()
        penalty = torch.full_like(diagonal, ridge)
        if self.constant:
            penalty[-1] = 0.0
        mean = diagonal[: len(diagonal) - self.constant].mean()
        matrix = gram.clone()
        matrix.diagonal().add_(penalty * mean)
        factor, failed = torch.linalg.cholesky_ex(matrix)
        del matrix
        found = None if failed else torch.cholesky_solve(moment, factor)
        solved = found is not None and bool(torch.isfinite(found).all())
        # What fails in one process fails in all, or they would not try the same solutions.
        return found if processes.agreed(solved) else None
