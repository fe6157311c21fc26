"""Prompts that are being computed, found by those that share text with them."""

from __future__ import annotations

from kvcmas.engines.vllm.inflight import InFlight, Pending
from kvcmas.workflow.prompt import Prompt

from .fake_requests import array, ids

TEXT = ids(1, 60)


def prompt(name: str, tokens: list[int], agent: str = "a", tenant: str = "t") -> Prompt:
    return Prompt(array(tokens), agent=agent, request_id=name, tenant=tenant)


def flying() -> InFlight:
    inflight = InFlight(16)
    inflight.add(prompt("one", [*ids(2, 10), *TEXT, *ids(3, 5)]))
    return inflight


def reader(agent: str = "b", tenant: str = "t", text: int = 60) -> Prompt:
    return prompt("reader", [*ids(4, 20), *TEXT[:text], *ids(5, 5)], agent, tenant)


def test_finds_the_run_at_any_offset() -> None:
    assert flying().shared(reader()) == [Pending("one", "a", 60)]
    assert flying().shared(reader(text=20)) == [Pending("one", "a", 20)]


def test_short_runs_are_not_worth_it() -> None:
    assert flying().shared(reader(text=15)) == []


def test_agents_do_not_wait_for_themselves_nor_for_other_tenants() -> None:
    assert flying().shared(reader("a")) == []
    assert flying().shared(reader(tenant="u")) == []


def test_a_request_does_not_find_itself() -> None:
    inflight = InFlight(16)
    inflight.add(reader())
    assert inflight.shared(reader()) == []


def test_the_longest_run_comes_first() -> None:
    more = ids(6, 80)
    inflight = flying()
    inflight.add(prompt("two", [*ids(7, 4), *more], "c"))
    both = prompt("reader", [*ids(4, 20), *TEXT, *ids(8, 3), *more, 1], "b")
    assert inflight.shared(both) == [Pending("two", "c", 80), Pending("one", "a", 60)]


def test_what_is_over_is_forgotten() -> None:
    inflight = flying()
    inflight.add(prompt("one", TEXT))  # a second time: nothing
    assert len(inflight) == 1
    inflight.remove("one")
    inflight.remove("one")
    assert len(inflight) == 0 and inflight.shared(reader()) == []
    inflight.add(prompt("one", TEXT))
    assert inflight.shared(reader())


def test_prompts_that_are_too_short_are_not_kept() -> None:
    inflight = InFlight(16)
    inflight.add(prompt("short", TEXT[:15]))
    assert len(inflight) == 0
