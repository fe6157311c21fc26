"""The reservoir keeps a uniform sample of a stream, whatever the chunks it came in."""

from __future__ import annotations

import pytest
import torch

from kvcmas.core.features import Features
from kvcmas.core.reservoir import Reservoir

from .synthetic import fading_of, features_of, normal

CPU = torch.device("cpu")


def offer(reservoir: Reservoir, first: int, tokens: int, device: torch.device = CPU) -> None:
    """Tokens whose target is their number."""
    number = torch.arange(first, first + tokens, device=device, dtype=torch.float32)
    features = Features(number.view(1, -1, 1), torch.zeros(tokens, 1, device=device))
    reservoir.add(features, torch.ones(tokens, device=device), number.view(1, -1, 1))


def numbers(reservoir: Reservoir) -> list[int]:
    return [int(number) for number in reservoir.sample()[1].flatten().tolist()]


@pytest.mark.parametrize("chunk", [1, 7, 30, 1000])
def test_never_more_than_the_capacity(chunk: int, device: torch.device) -> None:
    reservoir = Reservoir(30)
    for first in range(0, 100, chunk):
        before = len(reservoir)
        offer(reservoir, first, min(chunk, 100 - first), device)
        assert len(reservoir) == min(30, max(before, min(100, first + chunk)))
    assert reservoir.seen == 100
    kept = numbers(reservoir)
    assert len(set(kept)) == 30
    assert set(kept) <= set(range(100))


def test_below_the_capacity_all_are_kept_in_order(device: torch.device) -> None:
    reservoir = Reservoir(30)
    offer(reservoir, 0, 11, device)
    offer(reservoir, 11, 9, device)
    assert numbers(reservoir) == list(range(20))


@pytest.mark.parametrize("chunk", [3, 64])
def test_every_token_is_as_likely_as_any_other(chunk: int) -> None:
    runs, stream, capacity = 300, 128, 16
    counts = torch.zeros(stream)
    for seed in range(runs):
        reservoir = Reservoir(capacity, seed)
        for first in range(0, stream, chunk):
            offer(reservoir, first, min(chunk, stream - first))
        counts[numbers(reservoir)] += 1
    expected = runs * capacity / stream
    # Chi-squared with 127 degrees of freedom: 99.9 percent lie below 181.
    assert float(((counts - expected) ** 2 / expected).sum()) < 181
    # And no trend: the first and the second half of the stream are kept alike.
    assert abs(float(counts[:64].sum() / counts.sum()) - 0.5) < 0.03


def test_chunks_do_not_change_what_is_kept() -> None:
    whole, parts = Reservoir(10, seed=3), Reservoir(10, seed=3)
    offer(whole, 0, 200)
    for first in range(0, 200, 25):
        offer(parts, first, 25)
    assert numbers(whole) == numbers(parts)


def test_a_seed_decides_what_is_kept(device: torch.device) -> None:
    kept = []
    for seed in (1, 1, 2):
        reservoir = Reservoir(10, seed)
        offer(reservoir, 0, 200, device)
        kept.append(numbers(reservoir))
    assert kept[0] == kept[1] != kept[2]


@pytest.mark.parametrize("other", [0, 3])
def test_a_sample_has_the_features_as_the_matrix_has_them(other: int, device: torch.device) -> None:
    features, fading = features_of(device, other=other), fading_of(device, 50)
    targets = normal(device, 3, 50, 6, seed=9)
    reservoir = Reservoir(64)
    reservoir.add(features, fading, targets)
    x, y = reservoir.sample()
    assert (x.dtype, y.dtype) == (torch.float32, torch.float32)
    # Kept as float16: eleven bits.
    torch.testing.assert_close(x, features.matrix(fading), atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(y, targets, atol=2e-3, rtol=2e-3)


def test_rows_of_one_token_stay_together(device: torch.device) -> None:
    reservoir = Reservoir(8)
    for first in range(0, 200, 50):
        features = features_of(device, seed=first)
        reservoir.add(features, fading_of(device, 50, first), features.own.sum(-1, keepdim=True))
    x, y = reservoir.sample()
    torch.testing.assert_close(x[..., :4].sum(-1, keepdim=True), y, atol=1e-2, rtol=0)


def test_it_shares_no_memory_and_counts_its_bytes(device: torch.device) -> None:
    reservoir = Reservoir(8)
    assert (len(reservoir), reservoir.nbytes) == (0, 0)
    features = features_of(device)
    targets = normal(device, 3, 50, 6).half()
    reservoir.add(features, fading_of(device, 50).half(), targets)
    kept = [part.clone() for part in reservoir.sample()]
    features.own.zero_()
    targets.zero_()
    assert all(map(torch.equal, kept, reservoir.sample()))
    assert reservoir.nbytes == 2 * 8 * (3 * 4 + 5 + 1 + 3 * 6)
