"""From reused spans to the spans of a plan."""

from __future__ import annotations

from collections.abc import Iterable

from kvcmas.workflow.plan import Compute, Plan, Reuse, Span


def plan_of(length: int, reused: Iterable[Reuse], notes: Iterable[str] = ()) -> Plan:
    """The plan that reuses these spans (by position, not overlapping) and computes the rest.

    Raises:
        PlanError: the spans overlap, or cover the last token.
    """
    spans: list[Span] = []
    position = 0
    for span in reused:
        if span.start > position:
            spans.append(Compute(position, span.start))
        spans.append(span)
        position = span.stop
    if position < length:
        spans.append(Compute(position, length))
    return Plan(length, tuple(spans), tuple(notes))
