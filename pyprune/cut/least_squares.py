"""Least squares over a stream of tokens, of which only the Gram matrix is kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from pyprune.probe.moments import add_moments_
from pyprune.runtime import processes

FLOAT64_INPUTS = 1024
"""Up to this many inputs sums and solutions are float64; of more, whose memory and time are not small, float32."""
FLOAT64_PRODUCTS = 256
"""Up to this many inputs products are float64 as well, which costs little there."""
_ROWS = 2048
"""Tokens of one product: the rounding of float32 grows with them, and the sum over products is more exact."""


Part = tuple[Tensor, Tensor]
"""Inputs that some tokens have: their rows, int64 [n], and the inputs [n, inputs of a block]."""
SWEEPS = 4
"""Times that each block is solved for what the others leave; on text the error then hardly changes."""


class NormalEquations:
    """The normal equations of min_W sum over tokens ||y - x W||^2 + ridge * mean(diag(x^T x)) * ||W - start||^2.

    Args:
        start: [inputs (+ 1 with a constant), outputs], any floating dtype; it is kept.
        constant: x has a constant appended, whose row of W is a bias; changing it costs no ridge.
    """

    def __init__(self, start: Tensor, *, constant: bool) -> None:
        self.constant = constant
        self.start = start
        size, outputs = start.shape
        dtype = torch.float64 if size <= FLOAT64_INPUTS else torch.float32
        self._products = dtype if size <= FLOAT64_PRODUCTS else torch.float32
        self.gram = start.new_zeros(size, size, dtype=dtype)
        self.moment = start.new_zeros(size, outputs, dtype=dtype)
        self.squares = start.new_zeros(outputs, dtype=dtype)
        self._sums: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The sums."""
        return self.gram, self.moment, self.squares

    @property
    def nbytes(self) -> int:
        """Bytes held during a solution: the sums, those of all processes, the factor, and its matrix or both sides."""
        sums = (2 if processes.is_divided() else 1) * sum(tensor.nbytes for tensor in self.tensors)
        return sums + self.gram.nbytes + max(self.gram.nbytes, 2 * self.moment.nbytes)

    def add(self, x: Tensor, y: Tensor, weight: Tensor | None = None) -> None:
        """Add tokens.

        Args:
            x: [tokens, inputs], any floating dtype.
            y: [tokens, outputs], any floating dtype; what x W should be.
            weight: float32 [tokens]; how much each token's error counts (it multiplies the error, not its square).
                None counts all alike.
        """
        scales = [None] * -(-len(x) // _ROWS) if weight is None else weight.to(self._products)[:, None].split(_ROWS)
        for inputs, targets, scale in zip(x.split(_ROWS), y.split(_ROWS), scales, strict=True):
            inputs, targets = inputs.to(self._products), targets.to(self._products)
            if self.constant:
                inputs = torch.cat([inputs, inputs.new_ones(len(inputs), 1)], dim=1)
            if scale is not None:
                inputs, targets = inputs * scale, targets * scale
            add_moments_(self.gram, inputs)
            self.moment += inputs.T @ targets
            self.squares += targets.square().sum(0)

    def forget_sums(self) -> None:
        """Forget the sums over all processes, as tokens were added; all of them call this at the same point."""
        self._sums = None

    def _over_processes(self) -> tuple[Tensor, Tensor, Tensor]:
        """The sums of all processes that share the tokens."""
        if not processes.is_divided():
            return self.tensors
        if self._sums is None:
            gram, moment, squares = (processes.summed_(tensor.clone()) for tensor in self.tensors)
            self._sums = gram, moment, squares
        return self._sums

    def error(self) -> float:
        """Sum over tokens of ||y - x start||^2, weighted."""
        gram, moment, squares = self._over_processes()
        start = self.start.to(gram.dtype)
        return max(0.0, float(squares.sum() + (start * (gram @ start - 2 * moment)).sum()))

    def solutions(self, ridges: Iterable[float]) -> Iterator[tuple[float, Tensor]]:
        """Yield (ridge, W) for each ridge whose system :meth:`solve` solves."""
        yield from ((ridge, solution) for ridge in ridges if (solution := self.solve(ridge)) is not None)

    def solve(self, ridge: float) -> Tensor | None:
        """Return the solution W [inputs (+ 1 with a constant), outputs], or None if the system is singular.

        Args:
            ridge: relative to the mean of the diagonal of x^T x.
        """
        gram, moment, _ = self._over_processes()
        inputs = len(gram) - self.constant
        penalty = ridge * gram.diagonal()[:inputs].mean()
        matrix = gram.clone()
        matrix.diagonal()[:inputs].add_(penalty)
        factor, failed = torch.linalg.cholesky_ex(matrix)
        del matrix
        solution = None
        if not failed:
            right_side = moment.clone()
            right_side[:inputs] += penalty * self.start[:inputs]
            solution = torch.cholesky_solve(right_side, factor)
        return _agreed(solution)


class BlockEquations:
    """Holds the same equations for inputs in blocks, of which each token has few: one block is solved at a time.

    Products of inputs of two blocks are not held, but the tokens are. Each block is solved in turn for what the others
    leave (Gauss-Seidel), :data:`SWEEPS` times from the start, or from the solution with the ridge before. A block that
    has fewer tokens than inputs is solved by its tokens: W = start + x^T A with (x x^T + ridge) A = what the others
    leave, of which ridge A is then left.

    Args:
        starts: [inputs of the block, outputs] for each block, any floating dtype; they are kept.
    """

    constant = False

    def __init__(self, starts: Sequence[Tensor]) -> None:
        self.starts = starts
        self._chunks: list[tuple[Sequence[Part], Tensor]] = []
        self._warm: list[Tensor] = []
        self._by_tokens: dict[int, Tensor] = {}  # number of a block -> A

    @property
    def nbytes(self) -> int:
        """Bytes held during a solution: inputs and targets of the tokens, what is left of them, and three solutions."""
        inputs = sum(x.nbytes for parts, _ in self._chunks for _, x in parts)
        tokens = inputs + 2 * sum(y.nbytes for _, y in self._chunks)
        largest = max(map(len, self.starts))
        return tokens + sum(3 * 4 * start.numel() for start in self.starts) + 3 * 4 * largest**2

    def add(self, parts: Sequence[Part], y: Tensor, weight: Tensor | None = None) -> None:
        """Add tokens.

        Args:
            parts: of each block.
            y: [tokens, outputs], any floating dtype; what the sum of all blocks should be.
            weight: as in :meth:`NormalEquations.add`.
        """
        scaled = [(rows, x.float() if weight is None else x.float() * weight[rows, None]) for rows, x in parts]
        self._chunks.append((scaled, y.float() if weight is None else y.float() * weight[:, None]))

    def forget_sums(self) -> None:
        """Forget the solution of the tokens before, as tokens were added."""
        self._warm, self._by_tokens = [], {}

    def error(self) -> float:
        """Sum over tokens of ||y - x start||^2, weighted."""
        total = sum(y.square().sum(dtype=torch.float64) for y in self._left([w.float() for w in self.starts]))
        return float(_over_processes(torch.as_tensor(total)))

    def solutions(self, ridges: Iterable[float]) -> Iterator[tuple[float, Tensor]]:
        """Yield (ridge, W) for each ridge whose system :meth:`solve` solves."""
        yield from ((ridge, solution) for ridge in ridges if (solution := self.solve(ridge)) is not None)

    def solve(self, ridge: float) -> Tensor | None:
        """Return the blocks of the solution one below the other, [inputs, outputs], or None if one is singular.

        Args:
            ridge: relative to the mean of the diagonal of x^T x, of the inputs of all blocks.
        """
        blocks = self._warm or [w.float() for w in self.starts]
        left = self._left(blocks)
        sizes = [len(start) for start in self.starts]
        squares = sum(x.square().sum(dtype=torch.float64) for parts, _ in self._chunks for _, x in parts)
        penalty = ridge * float(_over_processes(torch.as_tensor(squares))) / sum(sizes)
        few = [penalty > 0 and not processes.is_divided() and self._tokens(n) < size for n, size in enumerate(sizes)]
        for _ in range(SWEEPS):
            for number, size in enumerate(sizes):
                if few[number]:
                    solvable = self._solve_by_tokens_(number, left, penalty)
                else:
                    solvable = self._solve_block_(number, size, blocks, left, penalty)
                if not solvable:
                    return None
        for number in (number for number, by_tokens in enumerate(few) if by_tokens):
            inputs = torch.cat([parts[number][1] for parts, _ in self._chunks])
            blocks[number] = self.starts[number].float() + inputs.T @ self._by_tokens[number]
        self._warm = blocks
        return torch.cat(blocks)

    def _left(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """Return what blocks leave of the targets of every chunk."""
        left = []
        for parts, y in self._chunks:
            rest = y.clone()
            for (rows, x), block in zip(parts, blocks, strict=True):
                rest.index_add_(0, rows, x @ block, alpha=-1)
            left.append(rest)
        return left

    def _tokens(self, number: int) -> int:
        return sum(len(parts[number][0]) for parts, _ in self._chunks)

    def _solve_block_(
        self, number: int, size: int, blocks: list[Tensor], left: Sequence[Tensor], penalty: float
    ) -> bool:
        """Solve a block for what the others leave, in place; return whether it has a solution."""
        block = blocks[number]
        gram, moment = block.new_zeros(size, size), block.new_zeros(block.shape)
        for (parts, _), rest in zip(self._chunks, left, strict=True):
            rows, x = parts[number]
            gram += x.T @ x
            moment += x.T @ rest[rows]
        gram, moment = _over_processes(gram), _over_processes(moment)
        moment += gram @ block + penalty * self.starts[number]
        gram.diagonal().add_(penalty)
        factor, failed = torch.linalg.cholesky_ex(gram)
        solved = _agreed(None if failed else torch.cholesky_solve(moment, factor))
        if solved is None:
            return False
        for (parts, _), rest in zip(self._chunks, left, strict=True):
            rows, x = parts[number]
            rest.index_add_(0, rows, x @ (block - solved))
        blocks[number] = solved
        return True

    def _solve_by_tokens_(self, number: int, left: Sequence[Tensor], penalty: float) -> bool:
        """Solve a block of few tokens for what the others leave, in place; return whether it has a solution."""
        x = torch.cat([parts[number][1] for parts, _ in self._chunks])
        rows = [parts[number][0] for parts, _ in self._chunks]
        target = torch.cat([rest[places] for rest, places in zip(left, rows, strict=True)])
        products = x @ x.T
        if number in self._by_tokens:
            target += products @ self._by_tokens[number]
        products.diagonal().add_(penalty)
        factor, failed = torch.linalg.cholesky_ex(products)
        if failed:
            return False
        self._by_tokens[number] = solved = torch.cholesky_solve(target, factor)
        if not torch.isfinite(solved).all():
            return False
        parts = (penalty * solved).split([len(places) for places in rows])
        for rest, places, part in zip(left, rows, parts, strict=True):
            rest[places] = part
        return True


def _agreed(solution: Tensor | None) -> Tensor | None:
    """Return a solution that is finite in all processes, else None in all of them."""
    # A solution that fails in one process fails in all, so that all try the same ones.
    solved = solution is not None and bool(torch.isfinite(solution).all())
    return solution if processes.all_agree(solved) else None


def _over_processes(sums: Tensor) -> Tensor:
    """Return the sums of all processes that share the tokens."""
    return processes.summed_(sums) if processes.is_divided() else sums
