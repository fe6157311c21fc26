"""Prefills with holes under the scheduler for asynchronous scheduling.

On CPUs vLLM turns asynchronous scheduling off: the class is used, but each step ends before the
next one is planned.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcmas.methods.tiling import plan_of
from kvcmas.workflow.plan import Head, Plan, Reuse

from .engine import (
    ASYNC_HOLES,
    CRITIC,
    LENGTH,
    NEAR,
    PLANNER,
    SAME,
    Answer,
    Ask,
    Server,
    own,
    serving,
    text,
)

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

EXACT = {"reuse": False}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving({"method": {"learn": False}}, scheduler=ASYNC_HOLES, async_scheduling=True) as one:
        yield one


@pytest.fixture(scope="module")
def prompt(server: Server) -> list[int]:
    return server.chat(PLANNER, text(0) + text(1), "Write a plan.")[:LENGTH]


@pytest.fixture(scope="module")
def dense(server: Server, prompt: list[int]) -> Answer:
    answer = server.one(prompt)
    assert (answer.record.computed, answer.cached) == (LENGTH, 0)
    return answer


@pytest.fixture(scope="module")
def segment(server: Server, dense: Answer) -> str:
    (name,) = server.donors
    return name


@pytest.fixture(autouse=True)
def clean(server: Server, segment: str) -> Iterator[None]:
    server.forget_blocks()
    free = server.free_blocks
    yield
    server.check_idle(free)


def heads(segment: str, tolerance: float = 0.1) -> Plan:
    one = Head(length=32, chunk=16, limit=64, tolerance=tolerance, probe=16)
    two = Head(length=16, chunk=32, limit=96, tolerance=tolerance, probe=16)
    spans = [
        Reuse(40, 200, segment, 40, head=one, landmarks=(100, 101, 150)),
        Reuse(240, 350, segment, 240, head=two),
    ]
    return plan_of(LENGTH, spans)


def plans(segment: str) -> dict[str, Plan]:
    return {
        "one": own(segment, LENGTH, (50, 300)),
        "two, from 0 on": own(segment, LENGTH, (0, 200), (230, 430)),
        "eight": own(segment, LENGTH, *((20 + 50 * i, 57 + 50 * i) for i in range(8))),
        "heads": heads(segment),
    }


@pytest.mark.parametrize("case", ["one", "two, from 0 on", "eight", "heads"])
def test_holes_are_exact(
    server: Server, prompt: list[int], dense: Answer, segment: str, case: str
) -> None:
    plan = plans(segment)[case]
    answer = server.one(prompt, plan)
    assert answer.difference(dense) <= SAME
    assert answer.record.computed == plan.computed
    assert answer.record.reused == answer.cached == LENGTH - plan.computed


def test_a_corrupted_donor_shows(
    server: Server, prompt: list[int], dense: Answer, segment: str
) -> None:
    with server.corrupted(segment, 50, 300):
        answer = server.one(prompt, plans(segment)["one"])
    assert answer.ids != dense.ids or answer.difference(dense) > 0.01


@pytest.mark.parametrize("tolerance", [0.0, 0.1])
def test_a_head_that_disagrees_grows(
    server: Server, prompt: list[int], dense: Answer, segment: str, tolerance: float
) -> None:
    with server.corrupted(segment, 240, 350):
        answer = server.one(prompt, heads(segment, tolerance))
    assert answer.difference(dense) <= NEAR
    spans = [span for span in answer.record.spans if span.kind == "reuse"]
    assert spans[1].reused == 0
    assert spans[0].reused > 0 or tolerance == 0  # rounding may be none at all


def test_beside_plain_requests_and_twins(
    server: Server, prompt: list[int], dense: Answer, segment: str
) -> None:
    other = Ask(server.chat(CRITIC, text(2), "Write."), hints=EXACT)
    alone = server.run(other)[0]
    server.forget_blocks()
    with server.corrupted(segment, 240, 350):
        *mine, plain = server.run(*[Ask(prompt, heads(segment))] * 3, other)
    assert plain.difference(alone) <= NEAR
    for answer in mine:
        assert answer.difference(dense) <= NEAR


@pytest.mark.parametrize("steps", range(7))
def test_aborted_at_any_step(
    server: Server, prompt: list[int], dense: Answer, segment: str, steps: int
) -> None:
    with server.corrupted(segment, 240, 350):
        name = server.submit(Ask(prompt, heads(segment)))
        for _ in range(steps):
            server.engine.step()
        server.engine.abort_request([name], internal=True)
        server.settle()
        server.coordinator.presets.clear()
        answer = server.one(prompt, heads(segment))
    assert answer.difference(dense) <= NEAR
