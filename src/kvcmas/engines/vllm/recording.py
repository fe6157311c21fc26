"""From what happened to a request to its record and to the counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from kvcmas.engines.record import SpanRecord
from kvcmas.engines.vllm.head_state import HeadState
from kvcmas.engines.vllm.metric_names import Reason
from kvcmas.engines.vllm.progress import Progress
from kvcmas.engines.vllm.records import VllmRecord
from kvcmas.engines.vllm.tracked import Tracked
from kvcmas.methods.kvcmas.config import EXACT
from kvcmas.workflow.plan import Reuse

_REASONS = (
    ("audit:", Reason.AUDIT),
    ("cold start", Reason.COLD),
    ("was measured at a deviation", Reason.AUDITED),
    ("disagreed in", Reason.SHORT),
    ("the dial is exact", Reason.EXACT),
    ("left the store", Reason.LOST),
    ("asked for no reuse", Reason.HINT),
)


class Counting(Protocol):
    """Where the coordinator counts (`metrics.KvcmasStats`)."""

    def finished(self, record: VllmRecord) -> None:
        """A request is over."""

    def decided(self, reason: Reason, count: int = 1) -> None:
        """Decisions of one kind."""

    def event(self, name: str, count: int = 1) -> None:
        """Events of one kind."""

    def spent(self, seconds: Mapping[str, float]) -> None:
        """Seconds by stage."""

    def holds(self, nbytes: Mapping[str, int], donors: int) -> None:
        """What is held now."""


def record_of(tracked: Tracked) -> VllmRecord:
    """The record of a request that is over."""
    prompt, progress, planned = tracked.prompt, tracked.progress, tracked.planned
    notes = tracked.notes + list(planned.plan.notes if planned is not None else ())
    if planned is None and tracked.refused is not None:
        notes.append(tracked.refused)
    # Without progress a preempted request may have found more than its prompt again.
    cached = min(tracked.cached if progress is None else progress.cached, len(prompt))
    spans = tuple(_spans(progress, len(prompt), cached))
    return VllmRecord(
        agent=prompt.agent,
        dial=prompt.dial or EXACT,
        prompt=len(prompt),
        computed=sum(span.computed for span in spans),
        reused=sum(span.reused for span in spans),
        cached=cached,
        spans=spans,
        steps=tracked.steps,
        waited_s=round(tracked.waited_s, 6),
        audit=any(note.startswith("audit:") for note in notes),
        notes=tuple(notes),
    )


def reasons_of(tracked: Tracked) -> Iterator[Reason]:
    """What was decided about the request's runs, for counting."""
    planned, progress = tracked.planned, tracked.progress
    if tracked.refused is not None:
        hinted = not tracked.hints.reads
        yield Reason.HINT if hinted else Reason.UNSUPPORTED
        return
    if progress is not None:
        for head in progress.heads.values():
            yield Reason.HEAD if head.whole and head.notes else Reason.REUSED
    for note in planned.plan.notes if planned is not None else ():
        for part, reason in _REASONS:
            if part in note:
                yield reason
                break


def _spans(progress: Progress | None, length: int, cached: int) -> Iterable[SpanRecord]:
    if cached:
        yield SpanRecord(start=0, stop=cached, kind="cached", computed=0, reused=0)
    if progress is None:
        if cached < length:
            yield _computed(cached, length)
        return
    for span in progress.plan.spans:
        start = max(span.start, cached)
        if start >= span.stop:
            continue
        if isinstance(span, Reuse):
            yield _reused(progress.heads[span.start], start)
        else:
            yield _computed(start, span.stop)


def _computed(start: int, stop: int) -> SpanRecord:
    return SpanRecord(start=start, stop=stop, kind="compute", computed=stop - start, reused=0)


def _reused(head: HeadState, start: int) -> SpanRecord:
    span = head.span
    landmarks = sum(spot >= max(head.end, start) for spot in span.landmarks)
    own = max(0, head.end - start)
    return SpanRecord(
        start=start,
        stop=span.stop,
        kind="reuse",
        computed=own + landmarks,
        reused=span.stop - start - own - landmarks,
        segment=span.segment,
        offset=span.offset + start - span.start,
        correction=span.correction,
        exact=span.exact,
        head=own,
        landmarks=landmarks,
        deviation=head.deviation,
        tolerance=span.head.tolerance,
        notes=tuple(head.notes),
    )
