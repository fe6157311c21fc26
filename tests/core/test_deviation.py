"""Deviation of KV and agreement of logits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvcmas.core.deviation import kl_divergence, relative_deviation, top1_agreement
from kvcmas.core.segment import SegmentKV
from kvcmas.errors import InputError


def segment(keys: Tensor, values: Tensor) -> SegmentKV:
    tokens = keys.shape[2]
    return SegmentKV(keys, values, torch.arange(tokens), torch.arange(tokens)[None])


def random_segment(layers: int = 3, tokens: int = 5) -> SegmentKV:
    generator = torch.Generator().manual_seed(0)
    shape = (layers, 2, tokens, 4)
    return segment(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))


def test_equal_segments_do_not_deviate() -> None:
    exact = random_segment()
    assert relative_deviation(exact, exact.clone()) == 0.0


def test_a_scaled_copy_deviates_by_its_scale() -> None:
    exact = random_segment()
    assert relative_deviation(exact, segment(exact.keys * 1.1, exact.values * 1.1)) == (
        pytest.approx(0.1, rel=1e-5)
    )


def test_every_layer_and_both_kinds_count_alike() -> None:
    exact = random_segment(layers=2)
    keys = exact.keys.clone()
    # One layer's keys off by half, whatever their size: (0.5**2 + 0 + 0 + 0) / 4.
    exact.keys[1] *= 1000
    keys[0] *= 1.5
    keys[1] *= 1000
    assert relative_deviation(exact, segment(keys, exact.values)) == pytest.approx(0.25, rel=1e-5)


def test_half_precision_is_summed_in_float32() -> None:
    exact = random_segment()
    large = segment((exact.keys * 1000).half(), (exact.values * 1000).half())
    assert relative_deviation(large, large) == 0.0
    shifted = segment(large.keys * 1.25, large.values * 1.25)
    assert relative_deviation(large, shifted) == pytest.approx(0.25, rel=1e-2)


def test_edges() -> None:
    exact = random_segment()
    zero = segment(torch.zeros_like(exact.keys), torch.zeros_like(exact.values))
    assert relative_deviation(zero, zero) == 0.0
    assert relative_deviation(zero, exact) == math.inf
    assert math.isnan(relative_deviation(exact, segment(exact.keys * math.nan, exact.values)))
    assert relative_deviation(exact.slice(0, 0), exact.slice(2, 2)) == 0.0
    with pytest.raises(InputError, match="one shape"):
        relative_deviation(exact, exact.slice(0, 2))


def test_kl_by_hand() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]]).log()
    q = torch.tensor([[0.25, 0.5, 0.25], [1 / 3, 1 / 3, 1 / 3]]).log()
    result = kl_divergence(p, q)
    assert result.dtype == torch.float64
    torch.testing.assert_close(
        result, torch.tensor([0.25 * math.log(2), 0.0], dtype=torch.float64), atol=1e-7, rtol=0
    )


def test_kl_with_ruled_out_tokens() -> None:
    p = torch.tensor([[0.0, -math.inf, 0.0]])
    q = torch.tensor([[0.0, -math.inf, 1.0]])
    assert torch.isfinite(kl_divergence(p, q)).all()
    assert kl_divergence(torch.zeros(1, 3), p).item() == math.inf


def test_top1() -> None:
    p = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    q = torch.tensor([[0.0, 5.0], [0.0, 1.0]])
    assert top1_agreement(p, q).tolist() == [True, False]
    with pytest.raises(InputError, match="tokens, vocab"):
        top1_agreement(p, q[0])
