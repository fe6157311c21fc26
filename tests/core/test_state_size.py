"""The state of a correction: its size follows from the model's shape, not from what was seen."""

from __future__ import annotations

import pytest
import torch

from kvcmas.core.learner import LearnerConfig, PairLearner

from .synthetic import fading_of, features_of, normal

SMALL = LearnerConfig(
    rank=4,
    target_dim=8,
    min_tokens=400,
    basis_tokens=100,
    hidden=16,
    hidden_tokens=0,
    hidden_steps=50,
    reservoir=1024,
)


@pytest.mark.parametrize("kind", ["linear", "hidden"])
def test_the_state_does_not_grow_with_what_was_seen(kind: str, device: torch.device) -> None:
    corrections, statistics = [], []
    for tokens in (100, 400):
        learner = PairLearner(SMALL)
        for seed in range(15):
            features = features_of(device, tokens=tokens, seed=10 * seed)
            own = features.own.abs() - 0.8 if kind == "hidden" else features.own
            deviation = own @ normal(device, 3, 4, 12)
            deviation += 0.2 * normal(device, 3, tokens, 12, seed=seed)
            learner.observe(features, fading_of(device, tokens), deviation)
        correction = learner.refit()
        assert correction is not None
        assert correction.layers == (0, 1, 2)
        assert correction.hidden_layers == ((0, 1, 2) if kind == "hidden" else ())
        corrections.append(correction.nbytes)
        statistics.append(learner.nbytes)
    assert corrections[0] == corrections[1]
    assert statistics[0] == statistics[1]


@pytest.mark.parametrize("tokens", [100, 300])
def test_the_state_of_smollm2_shapes(tokens: int) -> None:
    """30 layers of 3 heads of 64 channels at the default sizes: the same bytes, at most 4 MB."""
    device = torch.device("cpu")
    learner = PairLearner(LearnerConfig(min_tokens=200, basis_tokens=100, hidden_steps=2))
    outward = normal(device, 30, 64, 2 * 3 * 64)
    for seed in range(4):
        features = features_of(device, 30, tokens, own=64, window=64, seed=10 * seed)
        learner.observe(features, fading_of(device, tokens), features.own @ outward)
    correction = learner.refit()
    assert correction is not None
    assert len(correction.layers) == 30
    linear = 2 * 30 * 32 * (194 + 384)
    assert correction.nbytes - linear == len(correction.hidden_layers) * 2 * 32 * (194 + 1 + 32)
    assert correction.nbytes <= 4 << 20
