"""Which parts of a finished request are worth keeping as segments.

plan      | prefix, exact | Compute | Reuse: head |  reused  | Compute | answer |
captured  [------ exact, from position 0 --------)           [-- approximate --)
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcmas.methods.base import Outcome
from kvcmas.workflow.plan import Plan


@dataclass(frozen=True, slots=True)
class Capture:
    """Positions `[start, stop)`; `exact`: their KV is what a full prefill gives."""

    start: int
    stop: int
    exact: bool

    def __len__(self) -> int:
        return self.stop - self.start


def captures(plan: Plan, outcome: Outcome, min_length: int) -> list[Capture]:
    """Ranges of at least `min_length` tokens that hold anything newly computed, by position.

    The first one begins at position 0 and reaches as far as everything was computed, or reused
    exactly: computed behind exact KV alone, it is exact whatever happens later. The others are
    the computed ranges behind it, which are exact when the whole request was.
    """
    end = exact_end(plan, outcome)
    found = [Capture(start, stop, outcome.exact) for start, stop in outcome.computed if start > end]
    if any(start < end for start, _ in outcome.computed):
        found.insert(0, Capture(0, end, True))
    return [capture for capture in found if len(capture) >= min_length]


def exact_end(plan: Plan, outcome: Outcome) -> int:
    """First position whose KV may be approximate: before it all is computed or reused exactly."""
    exact_spans = [(span.start, span.stop) for span in plan.reused() if span.exact]
    end = 0
    for start, stop in sorted((*exact_spans, *outcome.computed)):
        if start > end:
            break
        end = max(end, stop)
    return end
