"""Features: their order, their reductions, and the product that never builds their matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcmas.core.features import FeatureBasis, windows_of

from .synthetic import fading_of, features_of, normal

quick = settings(max_examples=30, deadline=None)


def basis_of(device: torch.device, own: int = 4, window: int = 5) -> FeatureBasis:
    channels = normal(device, 3, 200, 8)
    return FeatureBasis.fit(
        channels, windows_of(channels[0]), own_dim=own, window_dim=window, fade=16.0
    )


def test_a_window_is_the_token_then_its_predecessors(device: torch.device) -> None:
    layer0 = normal(device, 5, 4)
    windows = windows_of(layer0)
    assert windows.shape == (5, 12)
    assert torch.equal(windows[4], torch.cat([layer0[4], layer0[3], layer0[2]]))
    assert torch.equal(windows[1], torch.cat([layer0[1], layer0[0], torch.zeros_like(layer0[0])]))
    assert torch.equal(windows[0, :4], layer0[0])
    assert not windows[0, 4:].any()
    assert windows_of(layer0[:0]).shape == (0, 12)


def test_features_see_earlier_tokens_only(device: torch.device) -> None:
    basis, channels = basis_of(device), normal(device, 3, 20, 8, seed=3)
    before = basis.features(channels)
    changed = channels.clone()
    changed[:, 10] += 1
    after = basis.features(changed)
    own = (before.own != after.own).any(-1).any(0).nonzero().flatten().tolist()
    window = (before.window != after.window).any(-1).nonzero().flatten().tolist()
    assert (own, window) == ([10], [10, 11, 12])


def test_fading_halves_at_its_distance(device: torch.device) -> None:
    fading = basis_of(device).fading(torch.tensor([-5, 0, 16, 48, 1584], device=device))
    expected = torch.tensor([1.0, 1.0, 0.5, 0.25, 0.01], device=device)
    torch.testing.assert_close(fading, expected)


def test_reduced_features_have_unit_variance_and_no_correlation(device: torch.device) -> None:
    mixed = normal(device, 3, 300, 8) @ normal(device, 3, 8, 8, seed=1) + 3
    basis = FeatureBasis.fit(mixed, windows_of(mixed[0]), own_dim=4, window_dim=6, fade=16.0)
    features = basis.features(mixed)
    for sample in (*features.own, features.window):
        torch.testing.assert_close(sample.mean(0), torch.zeros_like(sample[0]), atol=1e-3, rtol=0)
        identity = torch.eye(sample.shape[1], device=device)
        # The principal components are randomised: nearly, not quite, uncorrelated.
        torch.testing.assert_close(sample.mT @ sample / 300, identity, atol=2e-2, rtol=0)


def test_all_channels_lose_nothing(device: torch.device) -> None:
    basis, channels = basis_of(device, own=8), normal(device, 3, 20, 8, seed=3)
    own = basis.features(channels).own
    back = own @ torch.linalg.pinv(basis.own_project) + basis.own_mean
    torch.testing.assert_close(back, channels, atol=1e-4, rtol=0)


def test_constant_channels_are_not_blown_up(device: torch.device) -> None:
    channels = normal(device, 3, 200, 8)
    channels[..., 5:] = 2.0
    basis = FeatureBasis.fit(channels, windows_of(channels[0]), own_dim=8, window_dim=5, fade=16.0)
    assert basis.own_project.isfinite().all()
    assert basis.features(channels).own.abs().max() < 10


def test_a_basis_is_the_same_for_the_same_seed(device: torch.device) -> None:
    first, again = basis_of(device), basis_of(device)
    assert torch.equal(first.own_project, again.own_project)
    assert torch.equal(first.window_project, again.window_project)
    assert first.nbytes == 4 * (3 * 8 + 3 * 8 * 4 + 24 + 24 * 5)


@pytest.mark.parametrize("other", [0, 3])
def test_slice_and_take(other: int, device: torch.device) -> None:
    features = features_of(device, other=other)
    part = features.slice(10, 14)
    taken = features.take(torch.arange(10, 14, device=device))
    fading = fading_of(device, 4)
    assert len(part) == len(taken) == 4
    assert torch.equal(part.matrix(fading), taken.matrix(fading))
    whole = features.matrix(torch.ones(50, device=device))
    assert torch.equal(part.matrix(torch.ones(4, device=device)), whole[:, 10:14])
    taken.own.zero_()
    assert features.own[:, 10:14].all()
    part.own.zero_()
    assert not features.own[:, 10:14].any()
    assert features.nbytes == 4 * 50 * (3 * 4 + 5 + 3 * other)


def test_order_of_the_matrix(device: torch.device) -> None:
    features, fading = features_of(device, other=3), fading_of(device, 50)
    matrix = features.matrix(fading)
    assert features.other is not None
    row = torch.cat(
        [
            features.own[1, 7],
            features.own[1, 7] * fading[7],
            features.window[7],
            fading[7:8],
            torch.ones(1, device=device),
            features.other[1, 7],
        ]
    )
    assert torch.equal(matrix[1, 7], row)
    without = features.with_other(None).matrix(fading)
    assert torch.equal(without, matrix[..., :-3])


@quick
@given(
    st.integers(1, 4), st.integers(1, 9), st.integers(0, 3), st.integers(1, 4), st.integers(0, 99)
)
def test_project_is_the_product_with_the_matrix(
    layers: int, tokens: int, other: int, out: int, seed: int
) -> None:
    device = torch.device("cpu")
    features = features_of(device, layers, tokens, other=other, seed=seed)
    fading = fading_of(device, tokens)
    matrix = features.matrix(fading)
    weights = normal(device, layers, matrix.shape[-1], out, seed=seed)
    torch.testing.assert_close(
        features.project(weights, fading), matrix @ weights, atol=1e-5, rtol=1e-5
    )


def test_project_without_a_second_reader_on_either_side(device: torch.device) -> None:
    features, fading = features_of(device, other=3), fading_of(device, 50)
    weights = normal(device, 3, 2 * 4 + 5 + 2 + 3, 6)
    plain = features.with_other(None)
    expected = plain.matrix(fading) @ weights[:, :-3]
    torch.testing.assert_close(plain.project(weights, fading), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        features.project(weights[:, :-3], fading), expected, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("chosen", [(0, 1, 2), (1, 2), (0, 2), (1,), ()])
def test_of_layers(chosen: tuple[int, ...], device: torch.device) -> None:
    features, fading = features_of(device, other=3), fading_of(device, 50)
    matrix = features.of_layers(chosen).matrix(fading)
    assert torch.equal(matrix, features.matrix(fading)[list(chosen)])
