"""When a pair of agents is expected to agree."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import pytest

from kvcmas.engines.vllm import agreements
from kvcmas.engines.vllm.agreements import Agreements
from kvcmas.engines.vllm.messages import PairName

PAIR = PairName("", "planner", "critic")


def test_nothing_is_expected_of_an_unknown_pair() -> None:
    assert not Agreements().expected(PAIR, 1.0)


@pytest.mark.parametrize(
    ("deviations", "expected"),
    [
        ([0.1], False),
        ([0.1, 0.15], True),
        ([0.1, 0.16], False),
        ([nan, 0.1, 0.1], False),
        ([0.9, 0.1, 0.1, 0.1], False),
        ([0.9, 0.1, 0.1, 0.1, 0.1], True),
    ],
)
def test_the_last_measurements_count(deviations: list[float], expected: bool) -> None:
    seen = Agreements()
    for deviation in deviations:
        seen.see(PAIR, deviation)
    assert seen.expected(PAIR, 0.15) is expected
    assert not seen.expected(PAIR, 0.05) and not seen.expected(PAIR, 0.15, least=9)


def test_tenants_and_directions_are_apart() -> None:
    seen = Agreements()
    for _ in range(3):
        seen.see(PAIR, 0.0)
    assert not seen.expected(replace(PAIR, tenant="x"), 1.0)
    assert not seen.expected(replace(PAIR, donor="critic", reader="planner"), 1.0)


def test_the_least_recently_measured_pair_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreements, "_PAIRS", 2)
    seen = Agreements()
    for reader in ("a", "b", "a", "b", "c", "c"):
        seen.see(replace(PAIR, reader=reader), 0.0)
    assert [seen.expected(replace(PAIR, reader=name), 1.0) for name in "abc"] == [
        False,
        True,
        True,
    ]
