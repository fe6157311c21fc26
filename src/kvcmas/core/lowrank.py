"""Low-rank factors by a seeded randomised range finder.

Source: Halko, Martinsson and Tropp, "Finding structure with randomness", arXiv 0909.4061,
algorithms 4.4 and 5.1, with a QR after every power iteration for numerical stability.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcmas.errors import InputError

_OVERSAMPLE = 8
_POWER_ITERATIONS = 2


@dataclass(frozen=True, eq=False)
class LowRank:
    """`left @ right` approximates a matrix; leading axes are batch axes.

    left: `[..., rows, rank]`. right: `[..., rank, columns]`, its rows orthonormal.
    """

    left: Tensor
    right: Tensor

    @property
    def rank(self) -> int:
        """Columns of `left`, rows of `right`."""
        return self.left.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of both factors."""
        return sum(part.numel() * part.element_size() for part in (self.left, self.right))

    def dense(self) -> Tensor:
        """The approximated matrix, `[..., rows, columns]`."""
        return self.left @ self.right


def factorise(matrix: Tensor, rank: int, *, seed: int = 0) -> LowRank:
    """Factor `matrix` `[..., rows, columns]` (float32 or float64) at `rank`.

    The rank is cut to what the shape allows; at full rank the product is the matrix itself up
    to rounding. The same seed gives the same factors on the same device.

    Raises:
        InputError: the rank is below one, or the matrix is not a floating point matrix.
    """
    if rank < 1:
        raise InputError(f"rank must be at least 1, got {rank}")
    if matrix.ndim < 2 or matrix.dtype not in (torch.float32, torch.float64):
        raise InputError(
            f"expected a float32 or float64 matrix [..., rows, columns], got {matrix.dtype} "
            f"of shape {tuple(matrix.shape)}"
        )
    rows, columns = matrix.shape[-2:]
    rank = min(rank, rows, columns)
    sketch = min(rank + _OVERSAMPLE, rows, columns)
    generator = torch.Generator().manual_seed(seed)
    probe = torch.randn(columns, sketch, generator=generator, dtype=matrix.dtype)
    basis = torch.linalg.qr(matrix @ probe.to(matrix.device)).Q
    for _ in range(_POWER_ITERATIONS):
        basis = torch.linalg.qr(matrix.mT @ basis).Q
        basis = torch.linalg.qr(matrix @ basis).Q
    inner = torch.linalg.svd(basis.mT @ matrix, full_matrices=False)
    left = (basis @ inner.U[..., :rank]) * inner.S[..., None, :rank]
    return LowRank(left, inner.Vh[..., :rank, :])
