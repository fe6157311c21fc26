"""Requests that reuse nothing, around such that do: they get what an engine without reuse gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .engine import BLOCK, CRITIC, NEAR, PLANNER, SAME, WRITER, Answer, Ask, Server, serving, text

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

EXACT = {"dial": "exact"}
NOTHING = {"reuse": False}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving({"dial": "fast", "method": {"learn": False}}) as one:
        yield one


@pytest.fixture(autouse=True)
def empty(server: Server) -> Iterator[int]:
    assert server.llm.reset_prefix_cache(reset_connector=True)
    server.run(Ask([1, 2, 3], tokens=1, salt="to let the workers forget"))
    assert server.llm.reset_prefix_cache(reset_connector=True)
    assert not server.donors
    free = server.free_blocks
    yield free
    server.check_idle(free)


@pytest.fixture(scope="module")
def planner(server: Server) -> list[int]:
    return server.chat(PLANNER, text(0), "Write a plan.")


@pytest.fixture(scope="module")
def critic(server: Server) -> list[int]:
    return server.chat(CRITIC, text(0), "Write your criticism.")


def test_plain_requests_around_one_that_reuses(
    server: Server, planner: list[int], critic: list[int]
) -> None:
    clean = server.one(critic, hints=NOTHING)
    assert clean.record.computed == len(critic)
    assert server.llm.reset_prefix_cache(reset_connector=True)

    first = server.one(planner)
    assert (first.record.reused, first.cached) == (0, 0)
    reader = server.one(critic)
    assert reader.record.reused > len(critic) // 2
    assert reader.cached == reader.record.reused + reader.record.cached
    assert server.scheduled == reader.record.computed + len(reader.ids) - 1
    assert not same(reader, clean)

    for hints in (EXACT, NOTHING):
        after = server.one(critic, hints=hints)
        assert after.difference(clean) <= SAME
        assert after.record.reused == 0
        # Of the reader's blocks only those in front of its first approximate token are found.
        spans = [span for span in reader.record.spans if span.kind == "reuse"]
        if hints is EXACT:
            assert after.cached <= spans[0].start + spans[0].head
        server.forget_blocks()
    alone = server.one(critic, hints=NOTHING)
    assert alone.log_probs == clean.log_probs


def same(one: Answer, other: Answer) -> bool:
    return one.ids == other.ids and one.difference(other) <= NEAR


def test_plain_requests_beside_one_that_reuses(
    server: Server, planner: list[int], critic: list[int]
) -> None:
    """In the same batches bit for bit what they are without."""
    writer = Ask(server.chat(WRITER, text(1), "Write."), salt="w", hints=NOTHING)
    clean = server.run(writer, Ask(critic, salt="c", hints=NOTHING))
    alone = server.one(writer.ids, salt="w2", hints=NOTHING)
    server.one(planner)
    mixed = server.run(writer, Ask(critic))
    server.forget_blocks()
    fresh = server.run(Ask(writer.ids, salt="w", hints=NOTHING), Ask(critic))
    assert mixed[1].record.reused > 0
    assert fresh[1].record.reused > 0
    assert mixed[0].cached == (len(writer.ids) - 1) // BLOCK * BLOCK
    for answer in (clean[0], mixed[0], fresh[0]):
        assert answer.difference(alone) <= NEAR
        assert answer.record.reused == 0
    server.forget_blocks()
    again = server.run(writer, Ask(critic, salt="c", hints=NOTHING))
    for one, other in zip(again, clean, strict=True):
        assert one.log_probs == other.log_probs


def test_an_agent_hits_its_own_blocks(
    server: Server, planner: list[int], critic: list[int]
) -> None:
    server.one(planner)
    reader = server.one(critic, tokens=40)
    assert reader.record.reused > 0
    again = server.one(critic, tokens=40)
    assert again.record.cached == (len(critic) - 1) // BLOCK * BLOCK
    assert again.cached == again.record.cached
    assert again.record.computed == len(critic) - again.record.cached

    # The next turn begins with its prompt and its answer, however approximate.
    turn = [*critic, *reader.ids, *server.chat(CRITIC, text(4), "And of this?")]
    later = server.one(turn)
    held = (len(critic) + len(reader.ids) - 1) // BLOCK * BLOCK
    assert later.record.cached == held
    assert later.record.computed + later.record.reused == len(turn) - held

    # Other agents do not hit them, and exact requests neither.
    first = reader.record.spans[1].start + reader.record.spans[1].head
    other = server.one(critic, hints={"agent": "somebody else"})
    assert other.record.cached <= first
    exact = server.one(critic, hints=EXACT)
    assert exact.record.cached <= first


def test_tenants_share_nothing(server: Server, planner: list[int], critic: list[int]) -> None:
    clean = server.one(critic, hints=NOTHING, salt="clean")
    for salt in ("a", "b", None, "c"):
        first = server.one(planner, salt=salt)
        assert (first.record.reused, first.record.cached, first.cached) == (0, 0, 0)
    for salt in ("d", "e"):
        answer = server.one(critic, salt=salt)
        assert (answer.record.reused, answer.record.cached, answer.cached) == (0, 0, 0)
        assert answer.log_probs == clean.log_probs
    for salt in ("a", "b", None):
        assert server.one(critic, salt=salt).record.reused > 0
    # As in vLLM's own prefix cache an empty salt is none.
    assert server.one(planner, salt="").record.cached > 0
    assert server.one(server.chat(WRITER, text(0), "Write."), salt="").record.reused > 0


def test_hints(server: Server, planner: list[int], critic: list[int]) -> None:
    named = server.one(planner, hints={"agent": "planner"})
    assert named.record.agent == "planner"
    assert not ignored(named)
    nothing = server.one(critic, hints=NOTHING)
    assert nothing.record.reused == 0
    assert "the request asked for no reuse" in nothing.record.notes
    server.forget_blocks()
    exact = server.one(critic, hints={"dial": "exact"})
    assert exact.record.dial == "exact"
    assert exact.difference(nothing) <= NEAR
    # What the agent itself has computed before is exact.
    assert all(span.exact for span in exact.record.spans if span.kind == "reuse")


def test_a_warm_request_is_exact_and_becomes_a_donor(
    server: Server, planner: list[int], critic: list[int]
) -> None:
    server.one(planner)
    warm = server.one(critic, tokens=1, hints={"warm": True})
    assert (warm.record.reused, warm.record.computed) == (0, len(critic))
    assert len(server.donors) == 2
    assert server.one(server.chat(WRITER, text(0), "Write."), tokens=1).record.reused > 0


@pytest.mark.parametrize(
    "hints", [7, [], {"agent": 3}, {"dial": "quick"}, {"reuse": "no"}, {"rewse": True}]
)
def test_nonsense_is_named_and_ignored(server: Server, planner: list[int], hints: object) -> None:
    answer = server.one(planner, tokens=2, hints=hints)
    assert len(answer.ids) == 2
    assert answer.record.dial == "fast"
    assert len(ignored(answer)) == 1


def ignored(answer: Answer) -> list[str]:
    return [note for note in answer.record.notes if "ignored" in note]
