"""Maps with a hidden layer: what a linear map cannot do, the same each time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcmas.core.hidden import HiddenMap, train_hidden

from .synthetic import normal


def problem(device: torch.device, tokens: int = 600, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two layers; the targets are the magnitudes of the features, on very different scales."""
    features = normal(device, 2, tokens, 4, seed=seed)
    scale = torch.tensor([100.0, 0.01], device=device).view(2, 1, 1)
    return features, (features.abs() - 0.8) * scale


def left(found: HiddenMap, features: Tensor, targets: Tensor) -> Tensor:
    error = (found(features) - targets).square().sum((1, 2))
    return error / targets.square().sum((1, 2))


def test_it_learns_what_no_linear_map_can(device: torch.device) -> None:
    features, targets = problem(device)
    linear = torch.linalg.lstsq(features, targets).solution
    fresh, wanted = problem(device, seed=50)
    assert ((fresh @ linear - wanted).square().sum() / wanted.square().sum()) > 0.9
    found = train_hidden(features, targets, hidden=16, steps=300)
    assert left(found, fresh, wanted).max() < 0.35
    assert found.inward.shape == (2, 4, 16)
    assert found.bias.shape == (2, 1, 16)
    assert found.outward.shape == (2, 16, 4)


def test_a_seed_decides_the_map(device: torch.device) -> None:
    features, targets = problem(device, tokens=64)
    maps = [train_hidden(features, targets, hidden=4, steps=10, seed=seed) for seed in (3, 3, 4)]
    assert torch.equal(maps[0].outward, maps[1].outward)
    assert torch.equal(maps[0].inward, maps[1].inward)
    assert not torch.equal(maps[0].inward, maps[2].inward)


def test_training_leaves_the_random_state_of_torch_alone(device: torch.device) -> None:
    before = torch.get_rng_state()
    train_hidden(*problem(device, tokens=32), hidden=4, steps=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_more_steps_lower_the_error(device: torch.device) -> None:
    features, targets = problem(device)
    errors = [
        float(
            left(train_hidden(features, targets, hidden=16, steps=steps), features, targets).sum()
        )
        for steps in (1, 30, 200)
    ]
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_trains_where_gradients_are_off(mode: type, device: torch.device) -> None:
    with mode():
        features, targets = problem(device, tokens=64)
        found = train_hidden(features, targets, hidden=4, steps=5)
        assert found(features).shape == targets.shape
    assert not found.outward.requires_grad
    assert found.outward.any()


def test_targets_of_zero_give_zero(device: torch.device) -> None:
    features, _ = problem(device, tokens=64)
    found = train_hidden(features, torch.zeros(2, 64, 4, device=device), hidden=4, steps=5)
    assert not found(features).any()


def test_the_formula(device: torch.device) -> None:
    inward, bias, outward = (normal(device, *shape) for shape in ((2, 4, 3), (2, 1, 3), (2, 3, 5)))
    features = normal(device, 2, 7, 4, seed=5)
    active = torch.nn.functional.gelu(features @ inward + bias)
    torch.testing.assert_close(HiddenMap(inward, bias, outward)(features), active @ outward)
