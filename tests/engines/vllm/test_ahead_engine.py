"""Tails that go ahead in the step of their heads, and tokens that are taken back, in vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvcmas.engines.vllm.messages import PairName

from .engine import CRITIC, NEAR, PLANNER, SAME, Answer, Ask, Server, serving, text

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

METHOD = {"learn": False, "audit": 0.0, "cold_tokens": 0, "tolerance": 1.0, "limit": 64}
READER = {"agent": "critic"}
EXACT = {"agent": "critic", "reuse": False}
PAIR = PairName("", "planner", "critic")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving({"method": METHOD}) as one:
        yield one


@pytest.fixture(scope="module")
def prompt(server: Server) -> list[int]:
    return server.chat(CRITIC, text(0), "Write your criticism.")


@pytest.fixture(scope="module")
def exact(server: Server, prompt: list[int]) -> Answer:
    server.one(server.chat(PLANNER, text(0), "Write a plan."), hints={"agent": "planner"})
    return server.one(prompt, hints=EXACT)


@pytest.fixture(scope="module")
def segment(server: Server, exact: Answer) -> str:
    """The planner's prompt, the first donor."""
    infos = server.coordinator.directory.library.store.infos()
    (name,) = (info.id for info in infos if info.agent == "planner")
    return name


@pytest.fixture(autouse=True)
def clean(server: Server, segment: str) -> Iterator[None]:
    forget(server, segment)
    server.coordinator.directory.agreements.clear()
    free = server.free_blocks
    yield
    server.check_idle(free)


def forget(server: Server, segment: str) -> None:
    """All but the planner's donor."""
    server.forget_blocks()
    server.coordinator.planning.forget()
    directory = server.coordinator.directory
    for info in directory.library.store.infos():
        if info.id != segment and directory.library.drop(info.id):
            directory._leaving.append(info.id)


def expect_agreement(server: Server) -> None:
    for _ in range(2):
        server.coordinator.directory.agreements.see(PAIR, 0.0)


def taken_back(answer: Answer) -> bool:
    return any("taken back" in note for note in answer.record.notes)


def test_one_step_where_agreement_is_expected(
    server: Server, prompt: list[int], segment: str
) -> None:
    waited = server.one(prompt, hints=READER)
    assert waited.record.steps == 2 and waited.record.reused > 200
    forget(server, segment)
    expect_agreement(server)
    answer = server.one(prompt, hints=READER)
    assert answer.record.steps == 1
    assert answer.record.reused == waited.record.reused
    assert answer.difference(waited) <= NEAR
    assert not taken_back(answer)
    assert [span.deviation for span in answer.record.spans if not span.exact] == pytest.approx(
        [span.deviation for span in waited.record.spans if not span.exact]
    )


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"min_tokens": 6, "stop_token_ids": [11, 13]},
    ],
    ids=["greedy", "penalties", "stops"],
)
def test_a_token_behind_garbage_is_taken_back(
    server: Server, prompt: list[int], segment: str, more: dict[str, Any]
) -> None:
    plain = server.one(prompt, hints=EXACT, more=more)
    forget(server, segment)
    expect_agreement(server)
    with server.corrupted(segment, 0, 330):
        answer = server.one(prompt, hints=READER, more=more)
    assert taken_back(answer)
    assert answer.difference(plain) <= NEAR
    assert answer.record.steps > 1
    assert answer.record.computed == len(prompt) - answer.record.cached
    # It has been seen to disagree: the next one waits for its measurement.
    assert not server.coordinator.directory.agreements.expected(PAIR, 1.0)


def test_others_in_the_batch_go_on(
    server: Server, prompt: list[int], segment: str, exact: Answer
) -> None:
    other = server.chat(PLANNER, text(3), "Write a plan.")
    expect_agreement(server)
    with server.corrupted(segment, 0, 330):
        one, two, three = server.run(
            Ask(other, hints=EXACT),
            Ask(prompt, hints=READER),
            Ask(other[:200], hints=EXACT),
        )
    assert taken_back(two) and two.difference(exact) <= NEAR
    server.forget_blocks()
    alone = server.one(other, hints=EXACT)
    assert one.difference(alone) <= NEAR
    server.forget_blocks()
    assert three.difference(server.one(other[:200], hints=EXACT)) <= NEAR


def test_aborted_after_it_was_taken_back(
    server: Server, prompt: list[int], segment: str, exact: Answer
) -> None:
    expect_agreement(server)
    with server.corrupted(segment, 0, 330):
        name = server.submit(Ask(prompt, hints=READER))
        while not any(one.again for one in server.coordinator.requests.values()):
            server.engine.step()
        server.engine.abort_request([name], internal=True)
        server.finish()
    again = server.one(prompt, hints=EXACT)
    assert again.difference(exact) <= SAME


def test_a_seed_waits(server: Server, prompt: list[int]) -> None:
    """A token that is taken back would have moved its generator on."""
    expect_agreement(server)
    answer = server.one(prompt, hints=READER, more={"seed": 5})  # greedy: nothing is drawn
    assert answer.record.steps == 2
