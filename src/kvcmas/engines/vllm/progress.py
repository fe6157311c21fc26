"""How far a request's plan has been executed, and what its next step computes.

A step computes pieces: runs of positions, each behind everything it attends to. The last piece
is the request's own row of the batch; the pieces before it ride along as rows of their own, so
that a plan with many reused spans needs no step for each of them.

    plan       | Compute |head|   reused   L  reused   |head| reused |  tail  |
    step 1     [---------|----]            |           [----]                    measured
    step 2                                                           [--------]  sampled
                          pieces ride along: the first in step 1, none in step 2

Everything reused in front of a piece is loaded before it is computed. As long as a head waits
for its measurement the tail is held back: no token is sampled behind KV that did not agree.
Everything else is computed meanwhile, and again if it stood behind a head that grew.

Where agreement is expected the tail may go ahead in the same step as the heads (`ahead`). Then
whoever samples drops the token if a head disagrees all the same, and the rest is computed again.

Plain state without vLLM: positions are counted in tokens from the start of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, nan

import numpy as np
from numpy.typing import NDArray

from kvcmas.engines.vllm.head_state import HeadState, head_of
from kvcmas.workflow.plan import Plan, Reuse

_IN_PLACE, _COMPUTE, _LOAD = 0, 1, 2

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Step:
    """What the next step computes: `riders`, then `[start, stop)` as the request's own row."""

    start: int
    stop: int
    riders: tuple[Range, ...] = ()

    @property
    def rider_tokens(self) -> int:
        """Tokens of the riders."""
        return sum(stop - start for start, stop in self.riders)


@dataclass(frozen=True, slots=True)
class SpanRange:
    """Positions `[start, stop)` of a reused span."""

    span: Reuse
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Executed:
    """What belongs to a step that was scheduled.

    loads: written before the forward pass. measures: the last tokens of heads, compared behind it.
    last: nothing is left to compute.
    """

    loads: tuple[SpanRange, ...]
    measures: tuple[SpanRange, ...]
    last: bool


class Progress:
    """The execution of one plan. `restart` begins it, and begins it again after a preemption."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.heads = {span.start: head_of(span) for span in plan.reused()}
        self.held = self.exact_held = 0
        self.began: int | None = None
        self.model_tokens = 0
        self._state: NDArray[np.int8] = np.zeros(0, dtype=np.int8)
        self.restart(plan.length, 0, 0)

    @property
    def length(self) -> int:
        """Tokens that are to be in place when the prefill ends."""
        return int(self._state.shape[0])

    @property
    def cached(self) -> int:
        """Tokens that were held whenever the request was admitted: they were never computed."""
        return self.held if self.began is None else min(self.began, self.held)

    @property
    def done(self) -> bool:
        """Whether every token was computed or loaded."""
        return not self._state.any()

    @property
    def exact(self) -> bool:
        """Whether every computed token attended only to exact KV."""
        return self.exact_end() >= self.plan.length

    @property
    def unsure(self) -> int | None:
        """First position that may hold KV nobody has agreed on yet; `None` if there is none."""
        if self.done:
            return None
        measured = (head.span.start for head in self.heads.values() if head.measured)
        return min(measured, default=None)

    @property
    def undecided(self) -> bool:
        """Whether heads are still to be measured, or to be computed further."""
        return any(not head.settled for head in self.heads.values())

    @property
    def waiting(self) -> bool:
        """Whether nothing can be computed before a measurement is reported."""
        return not self.done and self.step(0, 0) is None

    def restart(self, length: int, held: int, exact_held: int) -> None:
        """Begin with `held` tokens in place, of `length` (the prompt, and what was generated).

        The first `exact_held` of them are exact. Decisions about heads stay as they are.
        """
        state = np.full(length, _COMPUTE, dtype=np.int8)
        for head in self.heads.values():
            state[head.end : head.span.stop] = _LOAD
            state[[spot for spot in head.span.landmarks if spot >= head.end]] = _COMPUTE
            # Blocks that are found again hold what was agreed on before.
            head.settled = head.decided or head.end <= held
        state[:held] = _IN_PLACE
        self.held, self.exact_held = held, min(held, exact_held)
        self._state = state

    def step(self, rider_tokens: int, riders: int, ahead: bool = False) -> Step | None:
        """The next step, with at most so many tokens and pieces beside the request's own row.

        The own row may be cut to fewer tokens (`commit`). `None`: nothing can be computed now.
        ahead: nothing is held back.
        """
        pieces: list[Range] = []
        total = 0
        for start, stop in self._pieces(self.length if ahead else self._barrier()):
            if pieces and (len(pieces) > riders or total > rider_tokens):
                break
            pieces.append((start, stop))
            total += stop - start
        if not pieces:
            return None
        *before, (start, stop) = pieces
        return Step(start, stop, tuple(before))

    def commit(self, step: Step, granted: int) -> Executed:
        """A step was scheduled, its own row with the first `granted` tokens of it."""
        self.began = self.cached
        stop = step.start + granted
        loads = self._loads(step.start)
        for first, last in (*step.riders, (step.start, stop)):
            self._state[first:last] = _IN_PLACE
            self.model_tokens += last - first
        done = [*step.riders, (step.start, stop)]
        measures = []
        for head in self.heads.values():
            measured = head.length and not head.whole and not head.span.exact
            if measured and any(first < head.end <= last for first, last in done):
                probe = min(head.span.head.probe, head.length)
                measures.append(SpanRange(head.span, head.end - probe, head.end))
                head.asked += 1
        return Executed(tuple(loads), tuple(measures), self.done)

    def trust(self) -> None:
        """Wait for no measurement; those that are made are kept for the record."""
        for head in self.heads.values():
            head.trusted = head.settled = True

    def doubt(self) -> None:
        """Count measurements that were asked for and did not come as disagreement."""
        for head in list(self.heads.values()):
            if head.asked and not head.settled:
                self.report(head.span.start, head.end, nan)

    def report(self, span_start: int, end: int, deviation: float) -> None:
        """A head that ended at `end` was measured. A report that came too late is ignored."""
        head = self.heads.get(span_start)
        if head is None:
            return
        head.asked -= 1
        if head.stale:
            head.stale -= 1
            return
        if head.end != end:
            return
        head.deviation = deviation
        tolerance = head.span.head.tolerance
        if head.settled or tolerance is None:
            if head.trusted and tolerance is not None and not deviation <= tolerance:
                head.notes.append(
                    f"deviation {deviation:.4g} above tolerance {tolerance:.4g} where agreement "
                    "was taken for granted"
                )
            return
        # Written so that a deviation that is not a number counts as disagreement.
        if deviation <= tolerance:
            head.settled = head.agreed = True
            return
        self._grow(head, tolerance, deviation)

    def give_up(self, reason: str) -> None:
        """Compute whatever is not in place yet, and nothing is reused any more."""
        for head in self.heads.values():
            if not head.whole and bool((self._state[head.span.start : head.span.stop] != 0).any()):
                self._lengthen(head, len(head.span), reason)

    def exact_end(self) -> int:
        """First position whose KV may be approximate."""
        if self.held > self.exact_held:
            return self.exact_held
        for head in self.heads.values():
            if not (head.span.exact or head.whole or head.span.stop <= self.exact_held):
                return max(head.end, self.exact_held)
        return self.plan.length

    def computed(self) -> tuple[Range, ...]:
        """Positions of the prompt that go through the model, as ranges.

        Those that were held at every admission do not; a preemption changes nothing else.
        """
        mask = np.zeros(self.plan.length, dtype=bool)
        mask[list(self.plan.computed_positions())] = True
        for head in self.heads.values():
            mask[head.span.start : head.end] = True
        mask[: self.cached] = False
        return _runs(mask)

    def _grow(self, head: HeadState, tolerance: float, deviation: float) -> None:
        limit, chunk = head.span.head.limit, head.span.head.chunk
        if not isfinite(deviation) or head.length >= limit:
            length, what = len(head.span), "the whole span"
        else:
            length = min(head.length + chunk, limit, len(head.span))
            what = f"{length} tokens"
        self._lengthen(
            head,
            length,
            f"deviation {deviation:.4g} above tolerance {tolerance:.4g} after a head of "
            f"{head.length} tokens; computed {what}",
        )

    def _lengthen(self, head: HeadState, length: int, why: str) -> None:
        """Whatever was computed behind the head attended to KV that changes: again."""
        old_end = head.end
        head.length = length
        head.agreed = False
        head.settled = head.decided
        head.stale = head.asked
        head.notes.append(why)
        self._state[old_end : head.end] = _COMPUTE
        for start, stop in self.computed():
            first = max(start, old_end)
            behind = self._state[first:stop]
            behind[behind == _IN_PLACE] = _COMPUTE
        for other in self.heads.values():
            if other.span.start > head.span.start and not other.whole:
                other.agreed = False
                other.settled = other.decided
                other.stale = other.asked

    def _barrier(self) -> int:
        """First position that is held back."""
        open_heads = [head.end for head in self.heads.values() if not head.settled]
        if not open_heads:
            return self.length
        others = np.flatnonzero(self._state != _COMPUTE)
        tail = int(others[-1]) + 1 if others.size else 0
        return min(max(tail, *open_heads), self.length - 1)

    def _pieces(self, barrier: int) -> tuple[Range, ...]:
        return _runs(self._state[:barrier] == _COMPUTE)

    def _loads(self, before: int) -> list[SpanRange]:
        """Reused tokens in front of a position that are not in place yet.

        Gaps between them are computed in this step or later, so they are simply written over.
        """
        loads = []
        for head in self.heads.values():
            stop = min(head.span.stop, before)
            missing = np.flatnonzero(self._state[head.end : stop] == _LOAD) + head.end
            if missing.size:
                first, last = int(missing[0]), int(missing[-1]) + 1
                loads.append(SpanRange(head.span, first, last))
                self._state[missing] = _IN_PLACE
        return loads


def _runs(mask: NDArray[np.bool_]) -> tuple[Range, ...]:
    """Maximal runs of true as `[start, stop)`."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    return tuple((int(start), int(stop)) for start, stop in edges.reshape(-1, 2))
