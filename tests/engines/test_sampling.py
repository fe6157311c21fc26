"""Choosing the next token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcmas.engines.transformers.engine import TransformersEngine
from kvcmas.engines.transformers.sampling import Sampler, SamplingParams
from kvcmas.errors import ConfigError

from .fake_methods import DenseMethod
from .tiny import random_ids, tiny_model

IDS = torch.tensor([1, 2, 3])


def draws(params: SamplingParams, logits: torch.Tensor, number: int = 300) -> list[int]:
    sampler = Sampler(params, logits.device)
    return [sampler(IDS.to(logits.device), logits) for _ in range(number)]


@pytest.fixture
def logits(device: torch.device) -> torch.Tensor:
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.05, 0.05])
    return probabilities.log().to(device)


def test_greedy_takes_the_largest(logits: torch.Tensor) -> None:
    assert set(draws(SamplingParams(), logits, 5)) == {0}


def test_top_k_and_top_p_cut_the_tail(logits: torch.Tensor) -> None:
    assert set(draws(SamplingParams(temperature=1, top_k=2, seed=0), logits)) == {0, 1}
    assert set(draws(SamplingParams(temperature=1, top_p=0.8, seed=0), logits)) == {0, 1, 2}
    assert set(draws(SamplingParams(temperature=1, seed=0), logits)) == {0, 1, 2, 3, 4}


def test_temperature_sharpens(logits: torch.Tensor) -> None:
    cold = draws(SamplingParams(temperature=0.25, seed=0), logits).count(0)
    warm = draws(SamplingParams(temperature=1.0, seed=0), logits).count(0)
    # 0.4**4 over the sum of the fourth powers is 0.73.
    assert cold / 300 == pytest.approx(0.73, abs=0.1)
    assert warm / 300 == pytest.approx(0.4, abs=0.1)


def test_a_seed_repeats(device: torch.device) -> None:
    engine = TransformersEngine(tiny_model("llama", device), None, DenseMethod())
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=11, ignore_eos=True)
    first = engine.generate(random_ids(10), params).token_ids
    assert engine.generate(random_ids(10), params).token_ids == first
    other = SamplingParams(max_tokens=20, temperature=1.0, seed=12, ignore_eos=True)
    assert engine.generate(random_ids(10), other).token_ids != first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop": ("a", "")}, "stop"),
        ({"stop": "abc"}, "stop"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**options)


def test_stop_takes_a_list() -> None:
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
