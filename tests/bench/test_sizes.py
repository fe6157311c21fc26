"""Bytes from shapes equal the bytes of real corrections."""

from __future__ import annotations

import pytest
import torch

from kvcmas.bench.sizes import (
    LLAMA_8B,
    Shape,
    basis_bytes,
    correction_bytes,
    second_basis_bytes,
)
from kvcmas.core.features import FeatureBasis, windows_of
from kvcmas.core.learner import LearnerConfig, PairLearner
from kvcmas.core.lowrank import factorise
from kvcmas.methods.kvcmas import KvcmasConfig

LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 8
CHANNELS = 2 * KV_HEADS * HEAD_DIM
TOKENS = 200


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("hidden", [0, 6])
def test_bytes_of_a_learned_correction(second: bool, hidden: int) -> None:
    config = KvcmasConfig(own_dim=12, window_dim=20, other_dim=10, rank=5, hidden=hidden)
    generator = torch.Generator().manual_seed(1)

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    channels = noise(LAYERS, TOKENS, CHANNELS)
    basis = FeatureBasis.fit(
        channels,
        windows_of(channels[0]),
        own_dim=config.own_dim,
        window_dim=config.window_dim,
        fade=config.fade,
    )
    learner = PairLearner(
        LearnerConfig(rank=5, hidden=hidden, min_tokens=100, basis_tokens=100, target_dim=CHANNELS)
    )
    mixing = noise(LAYERS, 3, CHANNELS)
    for _ in range(40):
        channels = noise(LAYERS, TOKENS, CHANNELS)
        features = basis.features(channels)
        own = features.own[..., :3]
        deviation = (own + own.abs()) @ mixing
        if second:
            other = factorise(deviation, 32).left[..., : config.other_dim]
            features = features.with_other(other)
        learner.observe(features, basis.fading(torch.arange(TOKENS)), deviation)
    correction = learner.refit()
    assert correction is not None
    shape = Shape(
        len(correction.layers), KV_HEADS, HEAD_DIM, hidden_layers=len(correction.hidden_layers)
    )
    assert len(correction.layers) == LAYERS
    assert bool(correction.hidden_layers) == bool(hidden)
    assert correction_bytes(shape, config, second=second) == correction.nbytes
    assert basis_bytes(Shape(LAYERS, KV_HEADS, HEAD_DIM), config) == basis.nbytes


def test_llama_8b_stays_small() -> None:
    config = KvcmasConfig()
    plain = correction_bytes(LLAMA_8B, config)
    second = correction_bytes(LLAMA_8B, config, second=True)
    # features x rank + rank x channels, and the hidden layer: features x 32 + 32 + 32 x rank.
    features = 64 + 64 + 64 + 2
    assert plain == 32 * 2 * (features * 32 + 32 * 2048 + features * 32 + 32 + 32 * 32)
    assert plain < second
    assert plain + second <= 16e6
    assert second_basis_bytes(LLAMA_8B, config) == 32 * 2048 * 64 * 4
