"""The soak's requests: what a tenant may find of them."""

from __future__ import annotations

from collections import defaultdict

import pytest

from kvcmas.bench.vllm.soak_plan import soak_plan

TENANTS = ("red", "green", "blue")


@pytest.mark.parametrize("seed", range(4))
def test_first_requests_are_first(seed: int) -> None:
    agents: dict[str, set[int]] = defaultdict(set)
    passages: dict[str, set[int]] = defaultdict(set)
    for one in soak_plan(200, 90, TENANTS, seed):
        strange = one.agent not in agents[one.tenant] and not passages[one.tenant] & {*one.passages}
        assert one.first == strange
        agents[one.tenant].add(one.agent)
        passages[one.tenant].update(one.passages)


@pytest.mark.parametrize("seed", range(4))
def test_only_copies_cross_tenants(seed: int) -> None:
    plan = soak_plan(200, 90, TENANTS, seed)
    sent: dict[tuple[int, tuple[int, ...]], set[str]] = defaultdict(set)
    for one in plan:
        others = sent[one.agent, one.passages] - {one.tenant}
        assert bool(others) >= one.copied
        if one.copied:
            assert one.first
        sent[one.agent, one.passages].add(one.tenant)


def test_a_soak_has_everything_in_it() -> None:
    plan = soak_plan(200, 90, TENANTS)
    assert len(plan) == 200
    assert {one.tenant for one in plan} == set(TENANTS)
    assert sum(one.copied for one in plan) >= 10
    assert sum(one.first for one in plan) >= 20
    assert 40 <= sum(one.plain for one in plan) <= 100
    assert sum(one.abort_after is not None for one in plan) >= 10
    assert {len(one.passages) for one in plan} == {1, 2, 3}
    assert all(len(set(one.passages)) == len(one.passages) for one in plan)
    assert all(1 <= one.tokens <= 24 for one in plan)
    assert soak_plan(200, 90, TENANTS) == plan


def test_plain_requests_say_so() -> None:
    for one in soak_plan(100, 30, TENANTS, 3):
        if one.plain:
            assert one.hints in ({"reuse": False}, {"dial": "exact"})
        else:
            assert one.hints is None or "reuse" not in one.hints
