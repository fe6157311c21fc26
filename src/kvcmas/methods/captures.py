"""Which parts of a finished request are worth keeping as segments.

plan      | prefix, exact | Compute | Reuse: head |  reused  | Compute | answer |
captured  [------ exact, from position 0 --------)           [-- approximate --)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcmas.workflow.plan import Plan

Ranges = Sequence[tuple[int, int]]
"""Sorted, disjoint ranges `[start, stop)` of positions."""


@dataclass(frozen=True, slots=True)
class Capture:
    """Positions `[start, stop)`; `exact`: their KV is what a full prefill gives."""

    start: int
    stop: int
    exact: bool

    def __len__(self) -> int:
        return self.stop - self.start


def captures(plan: Plan, computed: Ranges, exact: bool, min_length: int) -> list[Capture]:
    """Ranges of at least `min_length` tokens that hold anything newly computed, by position.

    The first one begins at position 0 and reaches as far as everything was computed, or reused
    exactly: computed behind exact KV alone, it is exact whatever happens later. The others are
    the computed ranges behind it, which are exact when the whole request was.

    Args:
        computed: positions that went through the model.
        exact: each of them attended to exact KV only.
    """
    end = exact_end(plan, computed)
    found = [Capture(start, stop, exact) for start, stop in computed if start > end]
    if any(start < end for start, _ in computed):
        found.insert(0, Capture(0, end, True))
    return [capture for capture in found if len(capture) >= min_length]


def exact_end(plan: Plan, computed: Ranges) -> int:
    """First position whose KV may be approximate: before it all is computed or reused exactly."""
    exact_spans = [(span.start, span.stop) for span in plan.reused() if span.exact]
    end = 0
    for start, stop in sorted((*exact_spans, *computed)):
        if start > end:
            break
        end = max(end, stop)
    return end
