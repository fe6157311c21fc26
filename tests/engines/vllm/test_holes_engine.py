"""Prefills with holes in a real engine: holes filled with the prompt's own KV change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvcmas.methods.tiling import plan_of
from kvcmas.workflow.plan import Head, Plan, Reuse

from .engine import (
    CRITIC,
    LENGTH,
    NEAR,
    PLANNER,
    SAME,
    WRITER,
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
    with serving({"method": {"learn": False}}) as one:
        yield one


@pytest.fixture(scope="module")
def prompt(server: Server) -> list[int]:
    return server.chat(PLANNER, text(0) + text(1), "Write a plan.")[:LENGTH]


@pytest.fixture(scope="module")
def dense(server: Server, prompt: list[int]) -> Answer:
    """The full prefill, whose own KV becomes the donor."""
    answer = server.one(prompt)
    assert (answer.record.computed, answer.cached) == (LENGTH, 0)
    return answer


@pytest.fixture(autouse=True)
def clean(server: Server, dense: Answer) -> Iterator[None]:
    server.forget_blocks()
    free = server.free_blocks
    yield
    server.check_idle(free)


@pytest.fixture(scope="module")
def segment(server: Server, dense: Answer) -> str:
    (name,) = server.donors
    return name


CASES: dict[str, list[tuple[int, int]]] = {
    "one": [(64, 320)],
    "one, unaligned": [(50, 301)],
    "three": [(40, 100), (130, 200), (201, 330)],
    "eight": [(20 + 50 * i, 57 + 50 * i) for i in range(8)],
    "first at position 0": [(0, 200), (230, 300)],
    "to the end": [(33, LENGTH - 1)],
    "from 0 to the end": [(0, LENGTH - 1)],
    "adjacent": [(20, 60), (60, 128), (128, 200)],
    "of one token": [(31, 32), (100, 101), (105, 106)],
}


@pytest.mark.parametrize("case", CASES)
def test_holes_are_exact(
    server: Server, prompt: list[int], dense: Answer, segment: str, case: str
) -> None:
    plan = own(segment, LENGTH, *CASES[case])
    check(server, prompt, dense, plan, NEAR if plan.computed == 1 else SAME)


LANDMARKS = (100, 101, 150, 200, 333)


def test_landmarks_are_exact(
    server: Server, prompt: list[int], dense: Answer, segment: str
) -> None:
    head = Head(length=32)
    plan = own(segment, LENGTH, (40, 350), head=head, landmarks=LANDMARKS)
    check(server, prompt, dense, plan)


def test_heads_that_agree_are_exact(
    server: Server, prompt: list[int], dense: Answer, segment: str
) -> None:
    plan = two_heads(segment)
    answer = check(server, prompt, dense, plan)
    for span in answer.record.spans:
        if span.kind == "reuse":
            assert span.deviation is not None and span.deviation < 1e-4
    assert answer.record.steps == 2  # a step that measures, and one with the tail


def test_eight_heads_take_two_steps(
    server: Server, prompt: list[int], dense: Answer, segment: str
) -> None:
    head = Head(length=8, chunk=16, limit=32, tolerance=0.1, probe=8)
    spans = [
        Reuse(start, start + 37, segment, start, head=head, landmarks=(start + 20,))
        for start in range(20, 420, 50)
    ]
    answer = check(server, prompt, dense, plan_of(LENGTH, spans))
    assert answer.record.steps == 2


def two_heads(segment: str, tolerance: float = 0.1) -> Plan:
    one = Head(length=32, chunk=16, limit=64, tolerance=tolerance, probe=16)
    two = Head(length=16, chunk=32, limit=96, tolerance=tolerance, probe=16)
    spans = [
        Reuse(40, 200, segment, 40, head=one, landmarks=(100, 101, 150)),
        Reuse(240, 350, segment, 240, head=two),
    ]
    return plan_of(LENGTH, spans)


def check(
    server: Server, prompt: list[int], dense: Answer, plan: Plan, most: float = SAME
) -> Answer:
    answer = server.one(prompt, plan)
    computed = plan.computed
    assert answer.difference(dense) <= most
    assert answer.record.computed == computed
    assert answer.record.reused == LENGTH - computed
    assert answer.cached == LENGTH - computed
    assert server.scheduled == computed + len(answer.ids) - 1
    return answer


def test_a_corrupted_donor_shows(
    server: Server, prompt: list[int], dense: Answer, segment: str
) -> None:
    plan = own(segment, LENGTH, (50, 300))
    with server.corrupted(segment, 50, 300):
        answer = server.one(prompt, plan)
    assert answer.ids != dense.ids or answer.difference(dense) > 0.01
    assert answer.record.computed == plan.computed


def test_a_head_that_disagrees_grows_until_all_is_computed(
    server: Server, prompt: list[int], dense: Answer, segment: str
) -> None:
    plan = two_heads(segment, tolerance=0.0)
    with server.corrupted(segment, 40, 350):
        answer = server.one(prompt, plan)
    assert answer.difference(dense) <= SAME
    assert (answer.record.computed, answer.record.reused) == (LENGTH, 0)
    spans = [span for span in answer.record.spans if span.kind == "reuse"]
    assert [span.head for span in spans] == [160, 110]
    assert all("computed the whole span" in span.notes[-1] for span in spans)
    # Landmarks, and what stands behind a head, were computed with it and again.
    assert server.scheduled >= LENGTH + len(answer.ids) - 1
    server.forget_blocks()
    assert server.one(prompt, hints=EXACT).difference(dense) == 0


def test_only_the_head_that_disagrees_grows(
    server: Server, prompt: list[int], dense: Answer, segment: str
) -> None:
    plan = two_heads(segment)
    with server.corrupted(segment, 240, 350):
        answer = server.one(prompt, plan)
    assert answer.difference(dense) <= SAME
    heads = [span.head for span in answer.record.spans if span.kind == "reuse"]
    assert heads == [32, 110]


def test_beside_plain_requests(
    server: Server, prompt: list[int], dense: Answer, segment: str
) -> None:
    others = [
        Ask(server.chat(role, text(number), "Write your opinion of it."), hints=EXACT)
        for role, number in ((CRITIC, 2), (WRITER, 3))
    ]
    clean = server.run(Ask(prompt, hints=EXACT), *others)
    server.forget_blocks()
    mixed = server.run(Ask(prompt, two_heads(segment)), *others)
    for one, other in zip(mixed, clean, strict=True):
        assert one.difference(other) <= NEAR
    assert mixed[0].difference(dense) <= NEAR
    assert mixed[0].record.computed == two_heads(segment).computed
    assert [one.record.computed for one in mixed[1:]] == [len(ask.ids) for ask in others]
    total = sum(one.record.computed + len(one.ids) - 1 for one in mixed)
    assert server.scheduled == total


def test_several_with_holes_at_once(
    server: Server, prompt: list[int], dense: Answer, segment: str
) -> None:
    plans = [own(segment, LENGTH, *spans) for spans in CASES.values()] + [two_heads(segment)]
    answers = server.run(*(Ask(prompt, plan) for plan in plans))
    for answer, plan in zip(answers, plans, strict=True):
        assert answer.difference(dense) <= NEAR
        # Blocks that another one of them has filled exactly may be found in the prefix cache.
        assert answer.record.computed <= plan.computed


def test_twins_wait_for_what_is_not_agreed_on(
    server: Server, prompt: list[int], dense: Answer, segment: str
) -> None:
    """The second one finds the first one's blocks in the prefix cache."""
    with server.corrupted(segment, 240, 350):
        answers = server.run(*[Ask(prompt, two_heads(segment))] * 3)
    for answer in answers:
        assert answer.difference(dense) <= NEAR
    assert answers[0].record.computed < LENGTH
    assert all(answer.cached > 400 for answer in answers[1:])


@pytest.mark.parametrize("steps", [1, 2])
def test_blocks_that_are_not_agreed_on_are_not_found_after_an_abort(
    server: Server, prompt: list[int], dense: Answer, segment: str, steps: int
) -> None:
    with server.corrupted(segment, 240, 350):
        name = server.submit(Ask(prompt, two_heads(segment)))
        for _ in range(steps):
            server.engine.step()
        server.engine.abort_request([name], internal=True)
        server.settle()
        answer = server.one(prompt, two_heads(segment))
    assert answer.difference(dense) <= NEAR


def test_log_probabilities_of_the_prompt(
    server: Server, prompt: list[int], dense: Answer, segment: str
) -> None:
    more = {"prompt_logprobs": 1}
    clean = server.one(prompt, hints=EXACT, more=more)
    server.forget_blocks()
    answer = server.one(prompt, own(segment, LENGTH, (50, 300)), more=more)
    assert answer.record.computed == LENGTH
    assert answer.output.prompt_logprobs == clean.output.prompt_logprobs
    assert len(answer.output.prompt_logprobs) == LENGTH
    assert any("log-probabilities of the prompt" in note for note in answer.record.notes)


def test_three_samples(server: Server, prompt: list[int], dense: Answer, segment: str) -> None:
    answer = server.one(prompt, two_heads(segment), more={"n": 3, "temperature": 1.0})
    samples = [sample.token_ids for sample in answer.output.outputs]
    assert len(samples) == 3 and len({tuple(ids) for ids in samples}) > 1
    # The first token is drawn from what the full prefill gives, whichever it is.
    for sample in answer.output.outputs:
        for token, known in sample.logprobs[0].items():
            assert abs(known.logprob - dense.log_probs[0].get(token, known.logprob)) <= NEAR
    assert server.scheduled < LENGTH  # of all three: two have the blocks of the first


def test_seeded_samples_are_served_exactly(
    server: Server, prompt: list[int], dense: Answer, segment: str
) -> None:
    """On CPUs vLLM cannot take a seeded prefill in several steps."""
    more = {"n": 3, "temperature": 1.0, "seed": 5}
    clean = server.one(prompt, hints=EXACT, more=more)
    server.forget_blocks()
    answer = server.one(prompt, two_heads(segment), more=more)
    mine = [sample.token_ids for sample in answer.output.outputs]
    assert mine == [sample.token_ids for sample in clean.output.outputs]
    assert len({tuple(ids) for ids in mine}) > 1
    assert answer.record.reused == 0
    assert any("seeded request" in note for note in answer.record.notes)
    server.coordinator.presets.clear()


def test_structured_output(server: Server, prompt: list[int], dense: Answer, segment: str) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    def more() -> dict[str, Any]:
        return {"structured_outputs": StructuredOutputsParams(regex="(no|yes), [0-9]{3}")}

    clean = server.one(prompt, hints=EXACT, more=more())
    server.forget_blocks()
    answer = server.one(prompt, two_heads(segment), more=more())
    assert answer.difference(clean) <= SAME
    assert answer.output.outputs[0].text.startswith(("no, ", "yes, "))
    assert answer.record.computed == two_heads(segment).computed


def test_a_request_that_does_not_read_the_prefix_cache(
    server: Server, prompt: list[int], dense: Answer, segment: str
) -> None:
    plan = own(segment, LENGTH, (50, 300))
    answer = server.one(prompt, plan, more={"skip_reading_prefix_cache": True})
    assert answer.difference(dense) == 0
    assert (answer.record.computed, answer.cached) == (LENGTH, 0)


@pytest.mark.parametrize("tolerance", [None, 0.1])
def test_one_token(
    server: Server, prompt: list[int], dense: Answer, segment: str, tolerance: float | None
) -> None:
    plan = own(segment, LENGTH, (50, 300), head=Head(length=16, limit=64, tolerance=tolerance))
    answer = server.one(prompt, plan, tokens=1)
    assert answer.ids == dense.ids[:1]
    for token, value in answer.log_probs[0].items():
        assert abs(value - dense.log_probs[0][token]) <= SAME
    assert server.scheduled == plan.computed


@pytest.mark.parametrize("steps", range(8))
def test_aborted_at_any_step(
    server: Server, prompt: list[int], dense: Answer, segment: str, steps: int
) -> None:
    name = server.submit(Ask(prompt, two_heads(segment)))
    for _ in range(steps):
        server.engine.step()
    server.engine.abort_request([name], internal=True)
    server.settle()
    server.coordinator.presets.clear()


def test_nothing_is_left_behind_in_blocks(server: Server, prompt: list[int], dense: Answer) -> None:
    """After all of the above, a plain request of the same text is as it was."""
    answer = server.one(prompt, hints=EXACT)
    assert answer.difference(dense) == 0
    assert answer.log_probs == dense.log_probs
