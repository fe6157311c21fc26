"""Methods for testing engines: they reuse what the test tells them to."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch

from kvcmas.core.segment import SegmentKV
from kvcmas.methods.base import Method, Outcome
from kvcmas.workflow.plan import Compute, Head, Plan, Reuse, Span
from kvcmas.workflow.prompt import Prompt


class DenseMethod(Method):
    """Computes everything and keeps what it is told at the end."""

    name: ClassVar[str] = "dense"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.outcomes: list[Outcome | None] = []

    def plan(self, prompt: Prompt) -> Plan:
        self.calls.append("plan")
        return Plan.dense(len(prompt), "nothing is stored")

    def fill(self, prompt: Prompt, span: Reuse, start: int, stop: int, out: SegmentKV) -> None:
        raise NotImplementedError("a dense plan has nothing to fill")

    def finish(self, prompt: Prompt, outcome: Outcome | None) -> None:
        self.calls.append("finish")
        self.outcomes.append(outcome)

    @property
    def last(self) -> Outcome:
        outcome = self.outcomes[-1]
        if outcome is None:
            raise LookupError("the last request had no outcome")
        return outcome


class StoredMethod(DenseMethod):
    """Reuses given spans, filled from the exact KV of the very same prompt.

    Args:
        donor: KV of at least the whole prompt.
        spans: the plan's reused spans; what lies between them is computed.
        spoil: changes what is filled, in place.
    """

    name: ClassVar[str] = "stored"

    def __init__(
        self,
        donor: SegmentKV,
        spans: list[Reuse],
        spoil: Callable[[SegmentKV], None] | None = None,
    ) -> None:
        super().__init__()
        self.donor, self.spans, self.spoil = donor, spans, spoil
        self.filled: list[tuple[int, int]] = []

    def plan(self, prompt: Prompt) -> Plan:
        self.calls.append("plan")
        spans: list[Span] = []
        position = 0
        for span in self.spans:
            if span.start > position:
                spans.append(Compute(position, span.start))
            spans.append(span)
            position = span.stop
        if position < len(prompt):
            spans.append(Compute(position, len(prompt)))
        return Plan(len(prompt), tuple(spans))

    def fill(self, prompt: Prompt, span: Reuse, start: int, stop: int, out: SegmentKV) -> None:
        self.calls.append("fill")
        self.filled.append((start, stop))
        if out.token_ids.tolist() != prompt.token_ids[start:stop].tolist():
            raise LookupError("the engine gave other tokens than the prompt's")
        if out.positions.tolist() != [list(range(start, stop))]:
            raise LookupError("the engine gave other positions than the span's")
        source = self.donor.slice(start, stop)
        out.keys.copy_(source.keys)
        out.values.copy_(source.values)
        if self.spoil is not None:
            self.spoil(out)


def garbage(segment: SegmentKV) -> None:
    """KV that has nothing to do with any prompt."""
    generator = torch.Generator(segment.keys.device).manual_seed(7)
    segment.keys.normal_(generator=generator).mul_(3)
    segment.values.normal_(generator=generator).mul_(3)


def holes(*ranges: tuple[int, int], head: Head | None = None, exact: bool = False) -> list[Reuse]:
    """Reused spans at these positions."""
    return [
        Reuse(start, stop, "donor", start, head=head or Head(), exact=exact)
        for start, stop in ranges
    ]
