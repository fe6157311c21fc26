"""Prefills with holes in small steps, and under preemption: the answers stay as they are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcmas.methods.tiling import plan_of
from kvcmas.workflow.plan import Head, Plan, Reuse

from .engine import CRITIC, LENGTH, NEAR, PLANNER, Answer, Ask, Server, own, serving, text

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

BUDGET = 40
BLOCKS = 30  # 29 are of use: two requests that share their first one; they need more later
TOKENS = 30
MORE = 45
EXACT = {"reuse": False}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(
        {"method": {"learn": False}},
        max_num_batched_tokens=BUDGET,
        num_gpu_blocks_override=BLOCKS,
        max_model_len=640,
    ) as one:
        yield one


@pytest.fixture(scope="module")
def prompt(server: Server) -> list[int]:
    return server.chat(PLANNER, text(0) + text(1), "Write a plan.")[:LENGTH]


@pytest.fixture(scope="module")
def dense(server: Server, prompt: list[int]) -> Answer:
    answer = server.one(prompt, tokens=TOKENS)
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
    one = Head(length=48, chunk=16, limit=64, tolerance=tolerance, probe=16)
    two = Head(length=16, chunk=32, limit=96, tolerance=tolerance, probe=16)
    spans = [
        Reuse(40, 200, segment, 40, head=one, landmarks=(100, 101, 150)),
        Reuse(240, 350, segment, 240, head=two),
    ]
    return plan_of(LENGTH, spans)


def plans(segment: str) -> list[Plan]:
    return [
        own(segment, LENGTH, (50, 300)),
        own(segment, LENGTH, (0, 200), (230, 440)),
        own(segment, LENGTH, *((20 + 50 * i, 57 + 50 * i) for i in range(8))),
        own(segment, LENGTH, (40, 350), landmarks=(100, 101, 150, 200, 333)),
        heads(segment),
    ]


@pytest.mark.parametrize("case", range(5))
def test_in_small_steps(
    server: Server, prompt: list[int], dense: Answer, segment: str, case: int
) -> None:
    plan = plans(segment)[case]
    answer = server.one(prompt, plan, tokens=TOKENS)
    assert answer.difference(dense) <= NEAR
    assert answer.record.computed == plan.computed
    assert answer.record.reused == answer.cached == LENGTH - plan.computed
    assert all(sum(step.values()) <= BUDGET for step in server.steps)
    assert server.scheduled == plan.computed + len(answer.ids) - 1
    assert answer.record.steps >= plan.computed // BUDGET


def test_a_head_that_disagrees_in_small_steps(
    server: Server, prompt: list[int], dense: Answer, segment: str
) -> None:
    with server.corrupted(segment, 40, 350):
        answer = server.one(prompt, heads(segment, tolerance=0.0), tokens=TOKENS)
    assert answer.difference(dense) <= NEAR
    assert (answer.record.computed, answer.record.reused) == (LENGTH, 0)
    assert all(sum(step.values()) <= BUDGET for step in server.steps)


@pytest.mark.parametrize("steps", [1, 5, 9])
def test_aborted_in_small_steps(
    server: Server, prompt: list[int], segment: str, steps: int
) -> None:
    name = server.submit(Ask(prompt, heads(segment)))
    for _ in range(steps):
        server.engine.step()
    server.engine.abort_request([name], internal=True)
    server.settle()


def test_preempted(server: Server, prompt: list[int], dense: Answer, segment: str) -> None:
    """Blocks for two of four; a plain one is among them."""
    other = Ask(server.chat(CRITIC, text(2), "Write."), hints=EXACT, tokens=TOKENS)
    alone = server.run(other)[0]
    longer = server.one(prompt, hints=EXACT, tokens=MORE)
    server.forget_blocks()
    given = plans(segment)
    asks = [Ask(prompt, plan, tokens=MORE) for plan in (given[0], given[4], given[2])]
    *answers, plain = server.run(*asks, other)
    assert server.preempted
    assert plain.difference(alone) <= NEAR
    for answer, ask in zip(answers, asks, strict=True):
        assert answer.difference(longer) <= NEAR
        assert ask.plan is not None
        assert answer.record.computed <= ask.plan.computed
    server.forget_blocks()


@pytest.mark.parametrize("steps", (1, 4, 7))
def test_preempted_at_any_step(
    server: Server, prompt: list[int], dense: Answer, segment: str, steps: int
) -> None:
    """All running requests lose their blocks; one of them has a head that disagrees."""
    with server.corrupted(segment, 240, 350):
        server.submit(Ask(prompt, heads(segment), tokens=TOKENS))
        for _ in range(steps):
            server.engine.step()
        assert server.scheduler.reset_prefix_cache(reset_running_requests=True)
        (output,) = server.finish()
    assert output.difference(dense) <= NEAR
    assert output.record.computed < LENGTH
