"""Landmarks: which tokens take most of the deviation is learned from their features."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcmas.core.features import Features
from kvcmas.core.landmarks import LandmarkModel, pick

from .synthetic import features_of, normal

LAYERS, TOKENS = 6, 400


def run(device: torch.device, seed: int) -> tuple[Features, Tensor, Tensor]:
    """Features, distances, and a deviation that is larger where window feature 2 is."""
    features = features_of(device, LAYERS, TOKENS, own=8, window=6, seed=seed)
    size = torch.exp(features.window[:, 2])[None, :, None]
    deviation = normal(device, LAYERS, TOKENS, 10, seed=seed + 7) * size
    scale = torch.tensor([0.01, 1, 5, 50, 2, 1000], device=device)[:, None, None]
    return features, torch.arange(TOKENS, device=device), deviation * scale


def test_it_finds_the_tokens_that_deviate_most(device: torch.device) -> None:
    model = LandmarkModel(LAYERS)
    for seed in range(0, 40, 10):
        model.observe(*run(device, seed))
    features, distance, deviation = run(device, 500)
    scores = model.predict(features, distance)
    assert scores.shape == (TOKENS,)
    assert scores.dtype == torch.float32
    rule = features.window[:, 2]
    assert torch.corrcoef(torch.stack([scores, rule]))[0, 1] > 0.97
    found = set(pick(scores, 40))
    assert len(found & set(pick(rule, 40))) > 30
    # What counts: a tenth of the tokens takes a good half of the energy.
    energy = deviation[2].square().sum(-1)
    assert energy[sorted(found)].sum() > 0.5 * energy.sum()


def test_distance_alone_can_be_the_rule(device: torch.device) -> None:
    model = LandmarkModel(LAYERS)
    distance = torch.arange(TOKENS, device=device)
    for seed in (0, 10):
        features = features_of(device, LAYERS, TOKENS, own=8, window=6, seed=seed)
        near = 1 / (1 + distance / 16)
        noise = normal(device, LAYERS, TOKENS, 10, seed=seed + 7)
        model.observe(features, distance, noise * near[None, :, None])
    scores = model.predict(features_of(device, LAYERS, TOKENS, own=8, window=6, seed=90), distance)
    assert scores[:40].mean() > scores[40:100].mean() > scores[300:].mean()


def test_layers_count_alike_whatever_their_scale(device: torch.device) -> None:
    features, distance, deviation = run(device, 0)
    scores = []
    for factor in (1.0, 1e4):
        scaled = deviation.clone()
        scaled[2] *= factor
        model = LandmarkModel(LAYERS)
        model.observe(features, distance, scaled)
        scores.append(model.predict(features, distance))
    torch.testing.assert_close(scores[0], scores[1], atol=1e-3, rtol=0)


def test_nothing_is_predicted_before_enough_was_seen(device: torch.device) -> None:
    model = LandmarkModel(LAYERS)
    features, distance, deviation = run(device, 0)
    assert not model.ready
    assert model.nbytes == 0
    assert torch.equal(model.predict(features, distance), torch.zeros(TOKENS, device=device))
    model.observe(features.slice(0, 0), distance[:0], deviation[:, :0])
    assert model.nbytes == 0
    sizes, ready = [], []
    for _ in range(3):
        model.observe(features, distance, deviation)
        sizes.append(model.nbytes)
        ready.append(model.ready)
    # 400, 800 and 1200 tokens.
    assert ready == [False, True, True]
    assert sizes[0] == sizes[1] == sizes[2] > 0


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 32])
def test_models_of_any_depth(layers: int, device: torch.device) -> None:
    features = features_of(device, layers, 60)
    distance = torch.arange(60, device=device)
    model = LandmarkModel(layers)
    model.observe(features, distance, normal(device, layers, 60, 10))
    assert model.predict(features, distance).isfinite().all()


def test_equal_kv_is_no_problem(device: torch.device) -> None:
    features, distance, deviation = run(device, 0)
    model = LandmarkModel(LAYERS)
    model.observe(features, distance, torch.zeros_like(deviation))
    assert model.predict(features, distance).isfinite().all()


def test_terms_add_up_to_the_prediction(device: torch.device) -> None:
    model = LandmarkModel(LAYERS)
    features, distance, _ = run(device, 500)
    base, *weights = model.terms(features)
    assert torch.equal(base, torch.zeros(TOKENS, device=device))
    assert weights == [0.0, 0.0]
    for seed in range(0, 40, 10):
        some, where, error = run(device, seed)
        model.observe(some, where, error / (1 + where / 16)[None, :, None])
    for start in (-20, 0, 300):
        far = torch.log((distance + start).clamp_min(0) + 8)
        base, near, square = model.terms(features)
        assert base.dtype == torch.float32
        assert near and square
        expected = model.predict(features, distance + start)
        torch.testing.assert_close(base + near * far + square * far * far, expected,
                                   atol=1e-5, rtol=1e-5)  # fmt: skip


def test_pick(device: torch.device) -> None:
    scores = torch.tensor([0.1, 0.9, -1.0, 0.5], device=device)
    assert pick(scores, 2) == [1, 3]
    assert pick(scores, 9) == [0, 1, 2, 3]
    assert pick(scores, 0) == pick(scores, -1) == pick(scores[:0], 3) == []
