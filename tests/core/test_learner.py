"""What a pair's learner makes of linear, nonlinear and unpredictable deviations."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kvcmas.core.correction import Correction
from kvcmas.core.features import Features
from kvcmas.core.learner import LearnerConfig, PairLearner

from .synthetic import fading_of, features_of, normal

LAYERS, RUN, CHANNELS, RANK = 3, 60, 12, 4
LINEAR = LearnerConfig(
    rank=RANK, target_dim=8, min_tokens=200, growth=1.5, basis_tokens=100, hidden=0
)
BOTH = LearnerConfig(
    rank=RANK,
    target_dim=8,
    min_tokens=400,
    basis_tokens=100,
    hidden=16,
    hidden_tokens=0,
    hidden_steps=400,
    reservoir=1024,
)


def relation(
    device: torch.device, features: Features, fading: Tensor, kinds: str, noise: float, seed: int
) -> Tensor:
    """A deviation of rank four per layer: linear, nonlinear, unpredictable or 0."""
    x = features.matrix(fading)
    layers = []
    for layer, kind in enumerate(kinds):
        inward = normal(device, x.shape[-1], RANK, seed=100 + layer) / x.shape[-1] ** 0.5
        outward = normal(device, RANK, CHANNELS, seed=200 + layer)
        target = {
            "l": x[layer] @ inward,
            "n": (x[layer, :, :RANK].abs() - 0.8),
            "u": normal(device, x.shape[1], RANK, seed=seed + 300 + layer),
            "0": torch.zeros(x.shape[1], RANK, device=device),
        }[kind]
        layers.append(target @ outward)
    clean = torch.stack(layers)
    return clean + noise * normal(device, *clean.shape, seed=seed + 400) * (clean != 0)


def run(
    device: torch.device,
    seed: int,
    kinds: str = "lll",
    noise: float = 0.0,
    tokens: int = RUN,
    other: int = 0,
) -> tuple[Features, Tensor, Tensor]:
    features = features_of(device, len(kinds), tokens, other=other, seed=1000 * seed)
    fading = fading_of(device, tokens, start=16)
    return features, fading, relation(device, features, fading, kinds, noise, 1000 * seed)


def taught(
    device: torch.device,
    config: LearnerConfig,
    runs: int,
    kinds: str = "lll",
    noise: float = 0.0,
    other: int = 0,
) -> PairLearner:
    learner = PairLearner(config)
    for seed in range(runs):
        learner.observe(*run(device, seed, kinds, noise, other=other))
    return learner


def left_on_fresh_tokens(
    device: torch.device, correction: Correction, kinds: str, noise: float = 0.0
) -> list[float]:
    """Energy left in the corrected layers, relative to no correction."""
    features, fading, deviation = run(device, 999, kinds, noise, tokens=500)
    wanted = deviation[list(correction.layers)]
    error = (wanted - correction.deviation(features, fading)).square().sum((1, 2))
    return (error / wanted.square().sum((1, 2))).tolist()


def test_a_linear_relation_is_recovered(device: torch.device) -> None:
    correction = taught(device, LINEAR, 10).refit()
    assert correction is not None
    assert correction.layers == (0, 1, 2)
    assert max(correction.gain) < 1e-3
    assert max(left_on_fresh_tokens(device, correction, "lll")) < 1e-3
    assert correction.hidden is None
    assert correction.hidden_layers == ()
    assert correction.inward.shape == (3, 2 * 4 + 5 + 2, RANK)
    assert correction.outward.shape == (3, RANK, CHANNELS)


def test_the_state_is_float16(device: torch.device) -> None:
    correction = taught(device, BOTH, 15, "lnn").refit()
    assert correction is not None
    hidden = correction.hidden
    assert hidden is not None
    for part in (
        correction.inward,
        correction.outward,
        hidden.inward,
        hidden.bias,
        hidden.outward,
    ):
        assert part.dtype == torch.float16
        assert part.device.type == device.type


def test_noise_is_left_alone(device: torch.device) -> None:
    learner = taught(device, BOTH, 20, "uuu")
    assert learner.due()
    assert learner.refit() is None
    assert learner.correction is None
    assert not learner.due()


def test_each_layer_gets_the_map_that_it_needs(device: torch.device) -> None:
    kinds = "lunl0"
    correction = taught(device, BOTH, 30, kinds, noise=0.2).refit()
    assert correction is not None
    assert correction.layers == (0, 2, 3)
    assert correction.hidden_layers == (1,)
    assert correction.hidden is not None
    assert len(correction.hidden.inward) == 1
    left = left_on_fresh_tokens(device, correction, kinds, noise=0.2)
    # What is held out says what to expect of other tokens.
    assert left == pytest.approx(correction.gain, abs=0.1)
    assert left[0] < 0.15
    assert left[1] < 0.5
    assert left[2] < 0.15


def test_a_nonlinear_relation_needs_the_hidden_layer(device: torch.device) -> None:
    linear = taught(device, LINEAR, 30, "nnn").refit()
    both = taught(device, BOTH, 30, "nnn").refit()
    assert both is not None
    assert both.hidden_layers == (0, 1, 2)
    assert max(left_on_fresh_tokens(device, both, "nnn")) < 0.35
    if linear is not None:
        assert min(left_on_fresh_tokens(device, linear, "nnn")) > 0.8


def test_layers_without_deviation_are_not_corrected(device: torch.device) -> None:
    for config in (LINEAR, BOTH):
        correction = taught(device, config, 15, "0l0").refit()
        assert correction is not None
        assert correction.layers == (1,)
        learner = taught(device, config, 15, "000")
        assert learner.refit() is None


def test_the_second_reader_is_a_feature(device: torch.device) -> None:
    learner = PairLearner(LINEAR)
    for seed in range(10):
        features, fading, _ = run(device, seed, other=RANK)
        assert features.other is not None
        outward = normal(device, LAYERS, RANK, CHANNELS, seed=5)
        learner.observe(features, fading, features.other @ outward)
    correction = learner.refit()
    assert correction is not None
    assert correction.layers == (0, 1, 2)
    assert max(correction.gain) < 1e-3


def test_nothing_before_there_is_enough(device: torch.device) -> None:
    learner = PairLearner(LINEAR)
    assert (learner.tokens, learner.nbytes) == (0, 0)
    assert not learner.due()
    assert learner.refit() is None
    for seed in range(2):
        learner.observe(*run(device, seed))
    # 120 training tokens, but none held out.
    assert learner.tokens == 120
    assert not learner.due()
    assert learner.refit() is None
    for seed in range(2, 4):
        learner.observe(*run(device, seed))
    assert learner.tokens == 180
    assert not learner.due()
    assert learner.correction is None
    learner.observe(*run(device, 4))
    assert learner.tokens == 240
    assert learner.due()
    # Observing alone changes no correction.
    assert learner.correction is None
    assert learner.refit() is learner.correction is not None


def test_long_runs_without_a_held_out_one_are_not_enough(device: torch.device) -> None:
    learner = PairLearner(LINEAR)
    for seed in range(2):
        learner.observe(*run(device, seed, tokens=500))
    assert learner.tokens == 1000
    assert not learner.due()
    assert learner.refit() is None


def test_runs_before_the_basis_are_not_lost(device: torch.device) -> None:
    learner = PairLearner(LINEAR)
    learner.observe(*run(device, 0, tokens=99))
    assert learner.tokens == 0
    learner.observe(*run(device, 1, tokens=1))
    assert learner.tokens == 100


def test_empty_runs_count_for_nothing(device: torch.device) -> None:
    learner = PairLearner(LINEAR)
    features, fading, deviation = run(device, 0)
    learner.observe(features.slice(0, 0), fading[:0], deviation[:, :0])
    assert learner.observations == 0


def test_refits_are_due_when_tokens_have_grown_by_half(device: torch.device) -> None:
    learner = PairLearner(LINEAR)
    fitted = []
    for seed in range(30):
        learner.observe(*run(device, seed))
        if learner.due():
            fitted.append(learner.tokens)
            learner.refit()
            assert not learner.due()
    assert fitted[0] == 240
    assert len(fitted) == 5
    for before, after in pairwise(fitted):
        assert 1.5 * before <= after < 1.5 * before + 2 * RUN


def test_a_refit_replaces_the_correction_and_leaves_the_old_one(device: torch.device) -> None:
    learner = taught(device, LINEAR, 5)
    first = learner.refit()
    assert first is not None
    before = first.inward.clone()
    for seed in range(5, 12):
        learner.observe(*run(device, seed, noise=0.1))
    second = learner.refit()
    assert second is learner.correction
    assert second is not first
    assert torch.equal(first.inward, before)


def test_a_seed_decides_everything(device: torch.device) -> None:
    first, again = (taught(device, BOTH, 15, "lnu").refit() for _ in range(2))
    assert first is not None
    assert again is not None
    assert (first.layers, first.hidden_layers, first.gain) == (
        again.layers,
        again.hidden_layers,
        again.gain,
    )
    assert torch.equal(first.inward, again.inward)
    assert torch.equal(first.outward, again.outward)


def test_inputs_may_be_reused_by_their_owner(device: torch.device) -> None:
    clean, reused = PairLearner(LINEAR), PairLearner(LINEAR)
    for seed in range(6):
        clean.observe(*run(device, seed))
        features, fading, deviation = run(device, seed)
        reused.observe(features, fading, deviation)
        fading.zero_()
    one, two = clean.refit(), reused.refit()
    assert one is not None
    assert two is not None
    assert torch.equal(one.inward, two.inward)
