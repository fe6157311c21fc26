"""Low-rank factors: exact at full rank, near the best possible below it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcmas.core.lowrank import factorise
from kvcmas.errors import InputError

from .synthetic import normal

quick = settings(max_examples=30, deadline=None)
seeds = st.integers(0, 2**31)
sizes = st.integers(1, 12)


@quick
@given(sizes, sizes, st.integers(0, 5), seeds)
def test_full_rank_is_the_matrix(rows: int, columns: int, more: int, seed: int) -> None:
    matrix = normal(torch.device("cpu"), 2, rows, columns, seed=seed)
    factors = factorise(matrix, min(rows, columns) + more, seed=seed)
    assert factors.rank == min(rows, columns)
    torch.testing.assert_close(factors.dense(), matrix, atol=2e-5, rtol=0)


@quick
@given(sizes, sizes, st.integers(1, 12), seeds)
def test_rows_of_the_right_factor_are_orthonormal(
    rows: int, columns: int, rank: int, seed: int
) -> None:
    right = factorise(normal(torch.device("cpu"), rows, columns, seed=seed), rank).right
    torch.testing.assert_close(right @ right.mT, torch.eye(len(right)), atol=1e-5, rtol=0)


@quick
@given(st.integers(1, 25), seeds)
def test_the_error_is_near_that_of_the_svd(rank: int, seed: int) -> None:
    # Singular values that fall by a tenth each, as those of deviations do at first.
    device = torch.device("cpu")
    left = torch.linalg.qr(normal(device, 60, 30, seed=seed)).Q
    right = torch.linalg.qr(normal(device, 40, 30, seed=seed + 1)).Q
    values = 0.9 ** torch.arange(30)
    error = (left * values) @ right.mT - factorise((left * values) @ right.mT, rank).dense()
    best = values[rank:].square().sum().sqrt()
    assert error.norm() <= 1.02 * best + 1e-5


def test_seeds_batches_and_devices(device: torch.device) -> None:
    matrix = normal(device, 3, 50, 40)
    first, again = factorise(matrix, 5, seed=7), factorise(matrix, 5, seed=7)
    assert torch.equal(first.left, again.left)
    assert torch.equal(first.right, again.right)
    assert not torch.equal(first.left, factorise(matrix, 5, seed=8).left)
    assert (first.left.shape, first.right.shape) == ((3, 50, 5), (3, 5, 40))
    assert first.left.device == matrix.device
    assert first.nbytes == 4 * 3 * 5 * (50 + 40)
    for layer in range(3):
        alone = factorise(matrix[layer], 5, seed=7)
        torch.testing.assert_close(alone.dense(), first.dense()[layer], atol=1e-4, rtol=0)


def test_a_matrix_of_lower_rank_than_asked_for(device: torch.device) -> None:
    column = normal(device, 20, 1)
    matrix = column @ normal(device, 1, 10)
    torch.testing.assert_close(factorise(matrix, 4).dense(), matrix, atol=1e-5, rtol=0)
    zero = factorise(torch.zeros(20, 10, device=device), 4)
    assert not zero.dense().any()
    assert zero.right.isfinite().all()


def test_float64_stays_float64(device: torch.device) -> None:
    matrix = normal(device, 20, 10).double()
    factors = factorise(matrix, 10)
    assert factors.left.dtype == torch.float64
    torch.testing.assert_close(factors.dense(), matrix, atol=1e-12, rtol=0)


def test_bad_input() -> None:
    with pytest.raises(InputError, match="rank must be at least 1, got 0"):
        factorise(torch.ones(3, 3), 0)
    with pytest.raises(InputError, match="float16"):
        factorise(torch.ones(3, 3).half(), 1)
    with pytest.raises(InputError, match=r"of shape \(3,\)"):
        factorise(torch.ones(3), 1)
