"""Runs the prefill of a plan.

1. The method fills every reused span (`correct` in the record).
2. One forward pass computes all other tokens, wherever they stand (`forward`).
3. Every head is measured. When all agree, that was the only pass. A head that does not grows, and
   another pass computes its new tokens and all computed tokens behind them, since these attended
   to KV that has changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcmas.engines.transformers.cancel import Cancellation
from kvcmas.engines.transformers.clock import Clock
from kvcmas.engines.transformers.heads import HeadProgress
from kvcmas.engines.transformers.record import SpanRecord
from kvcmas.engines.transformers.state import RequestState
from kvcmas.errors import UnsupportedSpanError
from kvcmas.methods.base import Method
from kvcmas.workflow.plan import Compute, Plan, Reuse


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """What a prefill did.

    logits: `[vocab]` float32, behind the prompt.
    spans: one record for each span of the plan.
    computed: sorted, disjoint ranges of positions that went through the model.
    exact: every computed token attended only to exact KV.
    passes: number of forward passes.
    """

    logits: Tensor
    spans: tuple[SpanRecord, ...]
    computed: tuple[tuple[int, int], ...]
    exact: bool
    passes: int


def run_prefill(
    state: RequestState, plan: Plan, method: Method, clock: Clock, cancel: Cancellation
) -> Prefill:
    """Execute a plan on a fresh request state.

    Raises:
        UnsupportedSpanError: the plan holds a kind of span that this engine does not know.
        CancelledError: the request was cancelled between two steps.
    """
    for span in plan.spans:
        if not isinstance(span, Compute | Reuse):
            raise UnsupportedSpanError(
                f"the transformers engine executes Compute and Reuse spans, got "
                f"{type(span).__name__}; use a method whose plans it can execute"
            )
    heads = {span.start: HeadProgress(span) for span in plan.reused()}
    computed = np.ones(plan.length, dtype=bool)
    with clock.lap("correct"):
        for head in heads.values():
            cancel.check()
            computed[head.end : head.span.stop] = False
            computed[list(head.span.landmarks)] = True
            head.fill(method, state)
    first, passes = 0, 0
    while True:
        cancel.check()
        index = torch.from_numpy(np.flatnonzero(computed[first:]) + first)
        with clock.lap("forward"):
            logits = state.compute(index)
        passes += 1
        with clock.lap("correct"):
            touched = [head for head in heads.values() if head.end > first]
            growing = [head for head in touched if head.measure(state)]
            if not growing:
                break
            first = min([head.grow(state) for head in growing])
            for head in growing:
                computed[head.span.start : head.end] = True
    return Prefill(
        logits=logits,
        spans=tuple(_record(span, heads) for span in plan.spans),
        computed=_ranges(computed),
        exact=all(head.span.exact or head.whole for head in heads.values()),
        passes=passes,
    )


def _record(span: Compute | Reuse, heads: dict[int, HeadProgress]) -> SpanRecord:
    if isinstance(span, Reuse):
        return heads[span.start].record()
    return SpanRecord(
        start=span.start, stop=span.stop, kind="compute", computed=len(span), reused=0
    )


def _ranges(computed: NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    """Maximal runs of true as `[start, stop)`."""
    edges = np.flatnonzero(np.diff(computed, prepend=False, append=False))
    return tuple((int(start), int(stop)) for start, stop in edges.reshape(-1, 2))
