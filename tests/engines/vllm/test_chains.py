"""Block hashes of approximate KV, and what agents find of their own again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvcmas.engines.vllm.chains import (
    Own,
    OwnVariants,
    Variant,
    first_approximate,
    variant_chain,
)
from kvcmas.workflow.plan import Compute, Head, Plan, Reuse

from .fake_requests import BLOCK, FakeRequest, array, hasher, ids

TOKENS = ids(0, 96)
PLAIN = FakeRequest("plain", TOKENS).block_hashes
SPAN = Reuse(20, 60, "donor", 5, head=Head(8, 8, 16, 0.1, 4), landmarks=(40, 50))
WHO = ("tenant", "reader", "balanced")


def plan_with(*spans: Reuse) -> Plan:
    parts: list[Any] = []
    position = 0
    for span in spans:
        if span.start > position:
            parts.append(Compute(position, span.start))
        parts.append(span)
        position = span.stop
    return Plan(len(TOKENS), (*parts, Compute(position, len(TOKENS))))


PLAN = plan_with(SPAN)
FIRST = 3  # the block of position 28, where the head ends


def chain(plan: Plan = PLAN, who: tuple[Any, ...] = WHO, from_block: int = 0) -> list[Any]:
    return variant_chain(hasher, BLOCK, TOKENS, PLAIN, plan, who, from_block)


class TestFirstApproximate:
    def test_is_behind_the_first_head(self) -> None:
        assert first_approximate(PLAN) == 28

    def test_of_exact_spans_and_whole_heads_there_is_none(self) -> None:
        exact = Reuse(0, 20, "prefix", 0, exact=True)
        whole = replace(SPAN, head=Head(40, 8, 40, 0.1, 4), landmarks=())
        assert first_approximate(plan_with(exact, whole)) is None
        assert first_approximate(Plan.dense(len(TOKENS))) is None


class TestChain:
    def test_is_plain_before_the_first_approximate_block_and_no_longer_from_there_on(self) -> None:
        made = chain()
        assert len(made) == len(PLAIN) and made[:FIRST] == PLAIN[:FIRST]
        assert not set(made[FIRST:]) & set(PLAIN)

    def test_of_an_exact_plan_is_the_plain_one(self) -> None:
        assert chain(plan_with(Reuse(0, 50, "prefix", 0, exact=True))) == PLAIN

    def test_inherits_behind_the_reused_span(self) -> None:
        made = chain()
        for block in range(9, len(made)):
            tokens = TOKENS[block * BLOCK : (block + 1) * BLOCK]
            assert made[block] == hasher(made[block - 1], tokens, None)

    def test_of_the_same_plan_is_the_same(self) -> None:
        assert chain() == chain(plan_with(replace(SPAN)))
        # How long the head grows is no part of it.
        assert chain() == chain(plan_with(replace(SPAN, head=Head(8, 4, 32, 0.2, 2))))

    @pytest.mark.parametrize(
        "who",
        [
            ("tenant", "other", "balanced"),
            ("other", "reader", "balanced"),
            ("tenant", "reader", "fast"),
            (*WHO, 1),
        ],
    )
    def test_is_another_for_others(self, who: tuple[Any, ...]) -> None:
        assert not set(chain(who=who)[FIRST:]) & set(chain()[FIRST:])

    @pytest.mark.parametrize(
        "change",
        [
            {"segment": "other"},
            {"offset": 6},
            {"landmarks": (40, 51)},
            {"landmarks": ()},
            {"correction": "a>b"},
            {"stop": 61},
        ],
    )
    def test_is_another_for_another_use(self, change: dict[str, Any]) -> None:
        assert not set(chain(plan_with(replace(SPAN, **change)))[FIRST:]) & set(chain()[FIRST:])

    def test_differs_only_behind_a_later_span_that_differs(self) -> None:
        later = Reuse(70, 80, "later", 0, head=Head(0, 8, 0, None, 4))
        one, other = chain(plan_with(SPAN, later)), chain(plan_with(SPAN, replace(later, offset=1)))
        assert one[:8] == other[:8] == chain()[:8]
        assert not set(one[8:]) & set(other[8:])

    def test_keeps_what_stands_before_a_given_block(self) -> None:
        made = chain(from_block=6)
        assert made[:6] == PLAIN[:6] and made[6] != PLAIN[6]
        assert chain(from_block=len(PLAIN)) == PLAIN

    def test_in_the_first_block_begins_anew(self) -> None:
        made = chain(plan_with(Reuse(1, 20, "donor", 1, head=Head(0, 8, 0, None, 4))))
        assert not set(made) & set(PLAIN)


class TestOwnVariants:
    def variant(self, tokens: list[int], first: int = 28, tag: str = "v") -> Variant:
        hashes = [f"{tag}{block}" for block in range(len(tokens) // BLOCK)]
        return Variant(array(tokens), hashes, first)

    def find(self, own: OwnVariants, tokens: list[int], agent: str = "a") -> Own | None:
        return own.find("t", agent, array(tokens), BLOCK)

    def test_gives_the_blocks_of_the_common_beginning(self) -> None:
        own = OwnVariants()
        own.remember("t", "a", self.variant(TOKENS))
        found = self.find(own, [*TOKENS[:50], *ids(9, 40)])
        assert found is not None and found.first == 28
        assert found.hashes == [f"v{block}" for block in range(6)]

    def test_gives_the_longest(self) -> None:
        own = OwnVariants()
        own.remember("t", "a", self.variant(TOKENS, tag="long"))
        own.remember("t", "a", self.variant([*TOKENS[:40], *ids(8, 40)], tag="short"))
        found = self.find(own, [*TOKENS, 1, 2])
        assert found is not None and found.hashes[-1] == "long11"

    def test_nothing_that_is_exact_as_a_whole(self) -> None:
        own = OwnVariants()
        own.remember("t", "a", self.variant(TOKENS))
        assert self.find(own, [*TOKENS[:30], *ids(9, 40)]) is None

    def test_nothing_of_other_agents_and_tenants(self) -> None:
        own = OwnVariants()
        own.remember("t", "a", self.variant(TOKENS))
        assert self.find(own, TOKENS, "b") is None
        assert own.find("u", "a", array(TOKENS), BLOCK) is None

    def test_keeps_the_last_prompts_of_the_last_agents(self) -> None:
        own = OwnVariants(agents=2)
        for agent in "abc":
            own.remember("t", agent, self.variant(TOKENS))
        assert self.find(own, TOKENS, "a") is None
        assert self.find(own, TOKENS, "b") is not None
        for seed in range(8):
            own.remember("t", "b", self.variant(ids(50 + seed, 96)))
        assert self.find(own, TOKENS, "b") is None
