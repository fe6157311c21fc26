"""A coordinator that serves one request after the other, with a worker that does as it is told."""

from __future__ import annotations

from typing import Any

from kvcmas.engines.vllm.coordinator import Coordinator, Scheduled
from kvcmas.engines.vllm.messages import BlockIds, PairName, Report, Scores, StepWork
from kvcmas.engines.vllm.records import VllmRecord

from .fake_requests import BLOCK, FakeRequest, array, coordinator, ids, no_hit, request

DOCUMENT = ids(500, 120)
ROLE = {"a": ids(501, 20), "b": ids(502, 24), "c": ids(503, 16)}


def reading(agent: str, task: int = 0, text: list[int] = DOCUMENT) -> list[int]:
    """An agent's role, a text, and a task of 10 tokens."""
    return [*ROLE[agent], *text, *ids(1000 + task, 10)]


def blocks_of(request: FakeRequest) -> BlockIds:
    return tuple(range(-(-request.num_tokens // BLOCK)))


def step(
    side: Coordinator, *waiting: FakeRequest, running: list[FakeRequest] | None = None, **more: Any
) -> Scheduled:
    """One step of vLLM: whatever is admitted gets all that it may compute."""
    running = running if running is not None else []
    budget, seats = more.get("budget", 10_000), more.get("seats", 100)
    side.before(running, waiting, budget, seats, more.get("hit", no_hit))
    scheduled: dict[str, int] = {}
    for given in list(running):
        wanted = given.num_tokens - given.num_computed_tokens
        if tokens := side.cap(given, given.num_computed_tokens, wanted):
            scheduled[given.request_id] = tokens
    for given in waiting:
        local = more.get("hit", no_hit)(given)
        before = side.admit(given, local)
        if before is not None:
            given.num_computed_tokens = local + before
            wanted = given.num_tokens - given.num_computed_tokens
            scheduled[given.request_id] = side.cap(given, local + before, wanted)
            running.append(given)
    known = {given.request_id: given for given in running}
    done = side.commit(scheduled, lambda name: blocks_of(known[name]))
    for name, tokens in scheduled.items():
        known[name].num_computed_tokens += tokens
    return done


def serve(side: Coordinator, request: FakeRequest, answer: int = 1) -> tuple[VllmRecord, StepWork]:
    """From arrival to end, all heads agreeing; the record, and the work that came with the end."""
    side.arrive(request)
    running: list[FakeRequest] = []
    step(side, request, running=running)
    for _ in range(50):
        if request.num_computed_tokens == request.num_tokens:
            break
        agree(side, request)
        step(side, running=running)
    for token in range(answer):
        request.append(7 + token)
        if token + 1 < answer:
            step(side, running=running)
    _, record = side.finish(request, blocks_of(request), True)
    assert record is not None
    return record, step(side).work


def agree(side: Coordinator, request: FakeRequest, deviation: float = 0.0) -> None:
    """All heads of a request were measured."""
    progress = side.requests[request.request_id].progress
    if progress is not None:
        for head in list(progress.heads.values()):
            if not head.settled:
                progress.report(head.span.start, head.end, deviation)


def with_donor(**more: Any) -> Coordinator:
    """A coordinator that holds the document, read by agent a."""
    side = coordinator(**more)
    serve(side, request("donor", reading("a"), "a"))
    return side


def clean(side: Coordinator) -> bool:
    """Whether no request leaves anything behind."""
    side.directory.library.check_integrity()
    held = side.requests or side._held or side._prefilled or len(side.planning.inflight)
    return not held and side.directory.library.pinned() == 0


def scores(donor: str, reader: str, segment: str, tokens: int) -> Report:
    """Landmark scores of a donor, all the same."""
    made = Scores(array([0] * tokens).astype("float32"), 0.0, 0.0)
    return Report(scores={(0, PairName("t", donor, reader), segment): made})
