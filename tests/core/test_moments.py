"""Streaming moments against the tokens they summarise."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcmas.core.moments import Moments, reduce_rank, solve_ridge

from .synthetic import normal

CPU = torch.device("cpu")
quick = settings(max_examples=30, deadline=None)
seeds = st.integers(0, 2**31)
LAYERS, TOKENS, FEATURES, TARGETS = 2, 40, 6, 4


def data(seed: int = 0, device: torch.device = CPU) -> tuple[Tensor, Tensor]:
    x = normal(device, LAYERS, TOKENS, FEATURES, seed=seed)
    relation = normal(device, LAYERS, FEATURES, TARGETS, seed=seed + 1)
    return x, x @ relation + 0.5 * normal(device, LAYERS, TOKENS, TARGETS, seed=seed + 2)


def moments_of(x: Tensor, y: Tensor, cuts: list[int] | None = None) -> Moments:
    moments = Moments.zeros(LAYERS, x.shape[-1], y.shape[-1], x.device)
    edges = [0, *sorted(cuts or []), x.shape[1]]
    for start, stop in pairwise(edges):
        moments.add(x[:, start:stop], y[:, start:stop])
    return moments


def residual(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    return (y.double() - x.double() @ weights.double()).square().sum((1, 2))


def assert_same(one: Moments, two: Moments) -> None:
    assert one.count == two.count
    for name in ("xx", "xy", "yy"):
        torch.testing.assert_close(getattr(one, name), getattr(two, name), atol=1e-4, rtol=1e-6)


@quick
@given(seeds, st.lists(st.integers(0, TOKENS), max_size=6))
def test_any_split_in_any_order_gives_the_batch(seed: int, cuts: list[int]) -> None:
    x, y = data(seed)
    batch = moments_of(x, y)
    assert_same(moments_of(x, y, cuts), batch)
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(seed))
    assert_same(moments_of(x[:, order], y[:, order], cuts), batch)


@quick
@given(seeds, st.integers(0, TOKENS))
def test_plus_is_both_streams(seed: int, cut: int) -> None:
    x, y = data(seed)
    first, second = moments_of(x[:, :cut], y[:, :cut]), moments_of(x[:, cut:], y[:, cut:])
    assert_same(first.plus(second), moments_of(x, y))
    assert_same(second.plus(first), moments_of(x, y))
    assert first.count == cut


@quick
@given(seeds)
def test_error_is_the_residual_of_any_map(seed: int) -> None:
    x, y = data(seed)
    moments = moments_of(x, y)
    for weights in (
        normal(CPU, LAYERS, FEATURES, TARGETS, seed=seed + 5),
        torch.zeros(LAYERS, FEATURES, TARGETS),
        solve_ridge(moments, 0.01),
    ):
        torch.testing.assert_close(
            moments.error(weights), residual(x, y, weights), atol=1e-3, rtol=1e-4
        )


@quick
@given(seeds, st.floats(1e-5, 1.0))
def test_ridge_is_the_solution_of_the_normal_equations(seed: int, ridge: float) -> None:
    x, y = data(seed)
    x = x * torch.tensor([1.0, 1e-3, 1e3, 1.0, 1.0, 1.0])  # units must not matter
    weights = solve_ridge(moments_of(x, y), ridge)
    for layer in range(LAYERS):
        gram = x[layer].double().mT @ x[layer].double()
        penalised = gram + ridge * gram.diagonal().diag()
        expected = torch.linalg.solve(penalised, x[layer].double().mT @ y[layer].double())
        torch.testing.assert_close(weights[layer], expected, atol=1e-4, rtol=1e-3)


@quick
@given(seeds)
def test_ridge_without_penalty_is_least_squares(seed: int) -> None:
    x, y = data(seed)
    moments = moments_of(x, y)
    expected = torch.linalg.lstsq(x.double(), y.double()).solution
    torch.testing.assert_close(solve_ridge(moments, 0.0), expected, atol=1e-3, rtol=1e-3)


def test_dependent_and_absent_features_are_no_problem(device: torch.device) -> None:
    x, y = data(device=device)
    x = torch.cat([x, x, x[..., :1] + x[..., 1:2], torch.zeros_like(x[..., :1])], dim=-1)
    moments = moments_of(x, y)
    weights = solve_ridge(moments, 0.0)
    assert weights.isfinite().all()
    best = torch.linalg.lstsq(x[..., :FEATURES], y).solution
    least = residual(x[..., :FEATURES], y, best)
    torch.testing.assert_close(moments.error(weights), least, atol=1e-2, rtol=1e-3)


@quick
@given(seeds, st.integers(1, TARGETS + 2))
def test_reduce_rank_is_the_best_map_of_that_rank(seed: int, rank: int) -> None:
    x, y = data(seed)
    moments = moments_of(x, y)
    weights = solve_ridge(moments, 0.01)
    inward, outward = reduce_rank(weights, moments, rank)
    rank = min(rank, TARGETS)
    assert (inward.shape, outward.shape) == ((LAYERS, FEATURES, rank), (LAYERS, rank, TARGETS))
    identity = torch.eye(rank, dtype=torch.float64).expand(LAYERS, -1, -1)
    torch.testing.assert_close(outward @ outward.mT, identity)
    # Whatever map of that rank, its output on these tokens is a matrix of that rank; the best one
    # is the truncated singular value decomposition of the full map's output.
    full = x.double() @ weights
    error = (full - x.double() @ inward @ outward).square().sum((1, 2))
    best = torch.linalg.svdvals(full)[:, rank:].square().sum(-1)
    torch.testing.assert_close(error, best, atol=1e-3, rtol=1e-4)


def test_state_has_the_size_of_its_shapes(device: torch.device) -> None:
    x, y = data(device=device)
    moments = moments_of(x, y)
    assert moments.nbytes == moments_of(x[:, :5], y[:, :5]).nbytes
    assert moments.nbytes == 8 * LAYERS * (FEATURES**2 + FEATURES * TARGETS + 1)
    assert moments.xx.device == x.device
