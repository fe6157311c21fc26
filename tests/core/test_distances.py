"""Distances between agents: symmetric, unknown until seen."""

from __future__ import annotations

import pytest
import torch

from kvcmas.core.distances import AgentDistances

from .synthetic import normal


def test_nothing_is_assumed() -> None:
    distances = AgentDistances()
    assert distances.between("a", "b") is None
    assert distances.between("a", "a") == 0.0


def test_the_same_in_both_directions(device: torch.device) -> None:
    distances, donor = AgentDistances(), normal(device, 3, 20, 6)
    distances.observe("b", "a", 0.5 * donor, donor)
    assert distances.between("a", "b") == distances.between("b", "a") == pytest.approx(0.5)
    assert distances.between("a", "c") is None
    # Seen in the other direction: one pair, root of the mean square.
    distances.observe("a", "b", 0.1 * donor, donor)
    assert distances.between("a", "b") == pytest.approx((0.26 / 2) ** 0.5)


def test_tokens_are_the_weights(device: torch.device) -> None:
    distances, donor = AgentDistances(), normal(device, 3, 30, 6)
    distances.observe("a", "b", 0.5 * donor, donor)
    distances.observe("a", "b", 0.1 * donor[:, :10], donor[:, :10])
    assert distances.between("a", "b") == pytest.approx(((30 * 0.25 + 10 * 0.01) / 40) ** 0.5)
    before = distances.between("a", "b")
    distances.observe("a", "b", donor[:, :0], donor[:, :0])
    assert distances.between("a", "b") == before


def test_layers_count_alike_whatever_their_scale(device: torch.device) -> None:
    distances, donor = AgentDistances(), normal(device, 2, 20, 6)
    donor[1] *= 1000
    deviation = torch.stack([0.6 * donor[0], 0 * donor[1]])
    distances.observe("a", "b", deviation, donor)
    assert distances.between("a", "b") == pytest.approx((0.36 / 2) ** 0.5)


def test_layers_of_zeros_do_not_divide_by_zero(device: torch.device) -> None:
    distances, zero = AgentDistances(), torch.zeros(2, 20, 6, device=device)
    distances.observe("a", "b", zero, zero)
    assert distances.between("a", "b") == 0.0


def test_nearer_agents_have_smaller_distances(device: torch.device) -> None:
    distances, donor = AgentDistances(), normal(device, 3, 20, 6)
    for reader, size in (("near", 0.1), ("far", 0.9)):
        distances.observe("a", reader, size * normal(device, 3, 20, 6, seed=5), donor)
    near, far = distances.between("near", "a"), distances.between("far", "a")
    assert near is not None
    assert far is not None
    assert near < far
