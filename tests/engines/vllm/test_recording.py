"""From what happened to a request to its record and to the counts."""

from __future__ import annotations

from typing import Any

import pytest

from kvcmas.engines.vllm.hints import Hints
from kvcmas.engines.vllm.metric_names import Reason
from kvcmas.engines.vllm.progress import Progress
from kvcmas.engines.vllm.recording import reasons_of, record_of
from kvcmas.engines.vllm.tracked import Tracked
from kvcmas.methods.kvcmas.planner import Planned
from kvcmas.workflow.plan import Compute, Head, Plan, Reuse
from kvcmas.workflow.prompt import Prompt

from .fake_requests import array, ids

HEAD = Head(8, 8, 32, 0.1, 4)
SPAN = Reuse(30, 80, "donor", 5, "a>b", HEAD, landmarks=(50, 60))


def plan(*notes: str) -> Plan:
    prefix = Reuse(0, 20, "prefix", 0, exact=True)
    return Plan(100, (prefix, Compute(20, 30), SPAN, Compute(80, 100)), notes)


def track(*notes: str, dial: str | None = "fast", **more: Any) -> Tracked:
    prompt = Prompt(array(ids(1, 100)), agent="b", request_id="r", dial=dial)
    tracked = Tracked(None, prompt, Hints(), None)
    made = plan(*notes)
    tracked.planned, tracked.progress = Planned(made, {}), Progress(made)
    for name, value in more.items():
        setattr(tracked, name, value)
    return tracked


def test_each_token_counts_once() -> None:
    record = record_of(track(steps=3, waited_s=0.25))
    assert (record.prompt, record.computed, record.reused, record.cached) == (100, 40, 60, 0)
    assert [(span.start, span.stop, span.kind) for span in record.spans] == [
        (0, 20, "reuse"),
        (20, 30, "compute"),
        (30, 80, "reuse"),
        (80, 100, "compute"),
    ]
    assert (record.agent, record.dial, record.steps, record.waited_s) == ("b", "fast", 3, 0.25)


def test_a_reused_span_says_where_it_comes_from() -> None:
    tracked = track()
    assert tracked.progress is not None
    tracked.progress.heads[30].deviation = 0.05
    span = record_of(tracked).spans[2]
    assert (span.segment, span.offset, span.correction) == ("donor", 5, "a>b")
    assert (span.head, span.landmarks, span.computed, span.reused) == (8, 2, 10, 40)
    assert (span.deviation, span.tolerance) == (0.05, 0.1)


def test_what_the_prefix_cache_held_comes_first() -> None:
    tracked = track()
    assert tracked.progress is not None
    tracked.progress.restart(100, 55, 55)
    record = record_of(tracked)
    assert (record.computed, record.reused, record.cached) == (21, 24, 55)
    first, reused, _ = record.spans
    assert (first.kind, first.stop, first.computed, first.reused) == ("cached", 55, 0, 0)
    assert (reused.start, reused.offset, reused.head, reused.landmarks) == (55, 30, 0, 1)


def test_a_preemption_never_counts_more_than_the_prompt() -> None:
    tracked = track()
    assert tracked.progress is not None
    tracked.progress.restart(130, 120, 20)
    record = record_of(tracked)
    assert (record.computed, record.reused, record.cached) == (0, 0, 100)
    assert [span.kind for span in record.spans] == ["cached"]
    plain = record_of(track(progress=None, cached=128))
    assert (plain.computed, plain.cached) == (0, 100)


def test_without_reuse() -> None:
    record = record_of(track(progress=None, cached=32, dial=None))
    assert (record.computed, record.reused, record.cached, record.dial) == (68, 0, 32, "exact")
    assert [(span.start, span.stop) for span in record.spans] == [(0, 32), (32, 100)]


def test_a_head_that_grew_counts_as_computed() -> None:
    tracked = track()
    assert tracked.progress is not None
    tracked.progress.give_up("lost")
    record = record_of(tracked)
    # The exact prefix is lost as well.
    assert (record.computed, record.reused) == (100, 0)
    assert record.spans[2].notes == ("lost",) and record.spans[2].landmarks == 0


def test_notes_of_the_request_and_of_its_plan() -> None:
    record = record_of(track("audit: served exactly", notes=["a hint"]))
    assert record.notes == ("a hint", "audit: served exactly") and record.audit
    refused = record_of(track(planned=None, progress=None, refused="no reuse at all"))
    assert refused.notes == ("no reuse at all",) and not refused.audit


@pytest.mark.parametrize(
    ("note", "reason"),
    [
        ("audit: served exactly, to measure what reuse would have cost", Reason.AUDIT),
        ("[1, 2) is computed: cold start, a>b has seen 0 of 9 tokens", Reason.COLD),
        ("[1, 2) is computed: a>b was measured at a deviation of 0.3, above", Reason.AUDITED),
        ("[1, 2) is computed: heads of short runs disagreed in 2 of 2 for b", Reason.SHORT),
        ("the dial is exact: stored runs are computed", Reason.EXACT),
        ("segment x left the store after it was found", Reason.LOST),
    ],
)
def test_reasons_of_plans(note: str, reason: Reason) -> None:
    assert list(reasons_of(track(note, "something else", progress=None))) == [reason]


def test_reasons_of_spans() -> None:
    tracked = track()
    assert list(reasons_of(tracked)) == [Reason.REUSED, Reason.REUSED]
    assert tracked.progress is not None
    progress = tracked.progress
    step = progress.step(1000, 10)
    assert step is not None
    progress.commit(step, step.stop - step.start)
    progress.report(30, 38, float("nan"))
    assert list(reasons_of(tracked)) == [Reason.REUSED, Reason.HEAD]


def test_reasons_of_refused_requests() -> None:
    hinted = track(refused="the request asked for no reuse", hints=Hints(reuse=False))
    assert list(reasons_of(hinted)) == [Reason.HINT]
    assert list(reasons_of(track(refused="not a generation"))) == [Reason.UNSUPPORTED]
