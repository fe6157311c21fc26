"""Which holes a prompt is given: spans of its own KV, so that the exact answer is known."""

from __future__ import annotations

from dataclasses import dataclass

from kvcmas.methods.tiling import plan_of
from kvcmas.workflow.plan import Head, Plan, Reuse

_PROBE = 16


@dataclass(frozen=True, slots=True)
class Case:
    """A name and a plan."""

    name: str
    plan: Plan


def cases(length: int, segment: str) -> list[Case]:
    """Plans for a prompt of `length` tokens that reuse a donor of the same tokens.

    One, three and eight spans whose ends lie inside blocks, spans from the first token on and up
    to the last but one, spans that touch, spans of a token, landmarks, and measured heads.
    """
    parts = {
        "one": [_span(segment, length // 10 + 1, length - length // 8)],
        "three": [
            _span(segment, *ends) for ends in _spread(length, 3, first=length // 12 + 3, share=0.8)
        ],
        "eight": [_span(segment, *ends) for ends in _spread(length, 8, first=21, share=0.6)],
        "all but the last token": [_span(segment, 0, length - 1)],
        "touching and tiny": [
            _span(segment, start, stop)
            for start, stop in ((20, 60), (60, 100), (100, 101), (105, 106), (120, length // 2))
        ],
        "landmarks": [
            _span(segment, 41, length - 20, head=32, landmarks=_marks(80, length - 40, 7))
        ],
        "measured heads": [
            _span(segment, start, stop, head=16, landmarks=(start + 20,), tolerance=0.1)
            for start, stop in _spread(length, 3, first=33, share=0.7)
        ],
    }
    return [Case(name, plan_of(length, spans)) for name, spans in parts.items()]


def chosen_cases(length: int, segment: str, *names: str) -> list[Case]:
    """Some of `cases`, by name."""
    return [case for case in cases(length, segment) if case.name in names]


def _span(
    segment: str,
    start: int,
    stop: int,
    *,
    head: int = 0,
    landmarks: tuple[int, ...] = (),
    tolerance: float | None = None,
) -> Reuse:
    limit = min(4 * head, stop - start)
    probe = min(_PROBE, max(head, 1))
    measured = Head(head, 16, limit, tolerance, probe)
    return Reuse(start, stop, segment, start, head=measured, landmarks=landmarks)


def _spread(length: int, count: int, *, first: int, share: float) -> list[tuple[int, int]]:
    """`count` spans behind `first`, that cover a share of what is there; none is last."""
    period = (length - first - 1) // count
    size = int(period * share)
    return [(first + index * period, first + index * period + size) for index in range(count)]


def _marks(start: int, stop: int, count: int) -> tuple[int, ...]:
    step = (stop - start) // count
    return tuple(start + index * step for index in range(count))
