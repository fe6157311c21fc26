"""How far two answers are apart."""

from __future__ import annotations

from math import inf, log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcmas.bench.vllm.answers import (
    Answer,
    largest_difference,
    mean_kl,
    top_kl,
    top_one,
    top_one_share,
)
from kvcmas.core.deviation import kl_divergence


def answer(tokens: tuple[int, ...], *rows: dict[int, float]) -> Answer:
    return Answer(tokens, rows)


def test_largest_difference_over_common_tokens() -> None:
    one = answer((1, 2), {1: -0.5, 7: -3.0}, {2: -0.25, 8: -4.0})
    other = answer((1, 2), {1: -0.5, 9: -9.0}, {2: -0.5, 8: -4.0})
    assert largest_difference(one, other) == 0.25
    assert largest_difference(one, one) == 0.0


def test_other_tokens_cannot_be_compared() -> None:
    one, other = answer((1,), {1: -0.5}), answer((2,), {1: -0.5})
    assert largest_difference(one, other) == inf
    assert largest_difference(one, answer((1,), {3: -0.5})) == inf
    assert largest_difference(one, answer((1,))) == inf


def test_answers_as_json() -> None:
    one = Answer((1, 2), ({1: -0.1}, {2: -0.30000001192092896}), cached=32)
    assert Answer.from_json(one.to_json()) == one


def test_kl_of_equal_rows_is_zero() -> None:
    row = {1: log(0.5), 2: log(0.25)}
    assert top_kl(row, row, 50) == pytest.approx(0, abs=1e-12)


def test_kl_of_two_tokens_and_the_rest() -> None:
    exact, approx = {1: log(0.5), 2: log(0.3)}, {1: log(0.4), 2: log(0.4)}
    expected = 0.5 * log(0.5 / 0.4) + 0.3 * log(0.3 / 0.4)
    assert top_kl(exact, approx, 2) == pytest.approx(expected)
    # One token named: the other one is in the rest.
    expected = 0.5 * log(0.5 / 0.4) + 0.5 * log(0.5 / 0.6)
    assert top_kl(exact, approx, 1) == pytest.approx(expected)
    assert top_kl(exact, {1: log(0.4)}, 2) == pytest.approx(expected)


def test_everything_named() -> None:
    exact, approx = {1: log(0.75), 2: log(0.25)}, {1: log(0.5), 2: log(0.5)}
    expected = 0.75 * log(1.5) + 0.25 * log(0.5)
    assert top_kl(exact, approx, 2) == pytest.approx(expected)


@given(seed=st.integers(0, 1000), most=st.integers(1, 40))
def test_buckets_never_see_more_than_there_is(seed: int, most: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    one, other = torch.randn(2, 1, 30, generator=generator, dtype=torch.float64)
    rows = [dict(enumerate(torch.log_softmax(logits[0], -1).tolist())) for logits in (one, other)]
    whole = float(kl_divergence(one, other))
    found = top_kl(*rows, most)
    assert -1e-9 <= found <= whole + 1e-9
    if most >= 30:
        assert found == pytest.approx(whole, abs=1e-9)


def test_top_one() -> None:
    assert top_one({5: -1.0, 3: -0.5, 4: -0.5}) == 3
    rows = [{1: -0.1, 2: -3.0}, {1: -0.1, 2: -3.0}]
    assert top_one_share(rows, [{1: -0.2, 2: -2.0}, {1: -2.0, 2: -0.2}]) == 0.5


def test_mean_over_positions() -> None:
    same, other = {1: log(0.5)}, {1: log(0.25)}
    one = top_kl(same, other, 5)
    assert mean_kl([same, same], [same, other], 5) == pytest.approx(one / 2)
