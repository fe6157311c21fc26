"""A plan behind what is in place already."""

from __future__ import annotations

from dataclasses import replace

from kvcmas.workflow.plan import Compute, Plan, Reuse, Span


def behind(plan: Plan, held: int) -> Plan:
    """The plan when its first `held` tokens are in place: nothing is reused in front of them.

    A reused span that begins before goes on behind it, with its head there.
    """
    if held <= 0:
        return plan
    spans: list[Span] = [Compute(0, held)]
    for span in plan.spans:
        if span.stop <= held:
            continue
        if span.start >= held:
            spans.append(span)
        elif isinstance(span, Compute):
            spans.append(Compute(held, span.stop))
        else:
            spans.append(_cut(span, held))
    return Plan(plan.length, tuple(_joined(spans)), plan.notes)


def _cut(span: Reuse, start: int) -> Reuse:
    length = span.stop - start
    head = replace(
        span.head, length=min(span.head.length, length), limit=min(span.head.limit, length)
    )
    return replace(
        span,
        start=start,
        offset=span.offset + start - span.start,
        head=head,
        landmarks=tuple(spot for spot in span.landmarks if spot >= start),
    )


def _joined(spans: list[Span]) -> list[Span]:
    """Computed spans in a row as one."""
    joined: list[Span] = []
    for span in spans:
        last = joined[-1] if joined else None
        if isinstance(span, Compute) and isinstance(last, Compute):
            joined[-1] = Compute(last.start, span.stop)
        else:
            joined.append(span)
    return joined
