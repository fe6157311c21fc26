"""Streaming second moments of features and targets: all that a linear map needs.

For features x `[features]` and targets y `[targets]` of one layer they hold the sums of
`x x'`, `x y'` and `y'y`, and from them the exact error of any linear map, without the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Sums of float32 products are off by about this much of a feature's mean square: with a smaller
# penalty, features that depend on each other give a matrix that is not positive.
_LEAST_RIDGE = 1e-6


@dataclass(eq=False)
class Moments:
    """Sums over tokens, per layer; float64 so that long streams lose nothing.

    xx: `[layers, features, features]`. xy: `[layers, features, targets]`. yy: `[layers]`, the
    targets' squared norms. count: tokens.
    """

    xx: Tensor
    xy: Tensor
    yy: Tensor
    count: int = 0

    @classmethod
    def zeros(cls, layers: int, features: int, targets: int, device: torch.device) -> Moments:
        """The moments of no tokens."""

        def make(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        return cls(make(layers, features, features), make(layers, features, targets), make(layers))

    @property
    def nbytes(self) -> int:
        """Bytes of the sums, whatever the number of tokens."""
        return sum(part.numel() * part.element_size() for part in (self.xx, self.xy, self.yy))

    def add(self, x: Tensor, y: Tensor) -> None:
        """Take in tokens: x `[layers, tokens, features]`, y `[layers, tokens, targets]`."""
        self.xx += torch.bmm(x.mT, x).double()
        self.xy += torch.bmm(x.mT, y).double()
        self.yy += y.square().sum((1, 2)).double()
        self.count += x.shape[1]

    def plus(self, other: Moments) -> Moments:
        """The moments of both streams together."""
        return Moments(
            self.xx + other.xx, self.xy + other.xy, self.yy + other.yy, self.count + other.count
        )

    def error(self, weights: Tensor) -> Tensor:
        """Sum of squared errors of `y ~ x @ weights`, `[layers]` float64.

        weights: `[layers, features, targets]`.
        """
        weights = weights.double()
        explained = (weights * self.xy).sum((1, 2))
        energy = (weights * torch.bmm(self.xx, weights)).sum((1, 2))
        return (self.yy - 2 * explained + energy).clamp_min(0)


def solve_ridge(moments: Moments, ridge: float) -> Tensor:
    """Weights `[layers, features, targets]` float64 of the ridge regression.

    ridge: dimensionless; the penalty relative to each feature's own mean square, at least 1e-6.
    """
    # Scaled to a correlation matrix, so that the factorisation is safe whatever the units. Cholesky
    # rather than LU: batched LU fails at random in some builds of MKL with several threads.
    scale = torch.diagonal(moments.xx, dim1=1, dim2=2).sqrt().clamp_min(1e-9)
    gram = moments.xx / (scale[:, :, None] * scale[:, None, :])
    gram.diagonal(dim1=1, dim2=2).add_(max(ridge, _LEAST_RIDGE))
    factor = torch.linalg.cholesky(gram)
    solution: Tensor = torch.cholesky_solve(moments.xy / scale[..., None], factor)
    return solution / scale[..., None]


def reduce_rank(weights: Tensor, moments: Moments, rank: int) -> tuple[Tensor, Tensor]:
    """Best rank-`rank` map in the features' own metric: `inward @ outward ~ weights`.

    Returns inward `[layers, features, rank]` and outward `[layers, rank, targets]`, float64,
    outward with orthonormal rows. Source: reduced-rank regression (Izenman, 1975).
    """
    rank = min(rank, weights.shape[-1], weights.shape[-2])
    covariance = torch.bmm(weights.mT, torch.bmm(moments.xx, weights))
    directions = torch.linalg.eigh(covariance).eigenvectors[..., -rank:].flip(-1)
    return torch.bmm(weights, directions), directions.mT.contiguous()
