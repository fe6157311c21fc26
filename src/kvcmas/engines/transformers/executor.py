"""Runs the prefill of a plan.

1. The method fills every reused span (`correct` in the record).
2. One forward pass computes all other tokens, wherever they stand (`forward`).
3. Every head is measured. When all agree, that was the only pass. A head that does not grows, and
   another pass computes its new tokens and all computed tokens behind them, since these attended
   to KV that has changed.

A plan with partial spans runs in one pass too; `layerwise.py` keeps their tokens out of the layers
whose KV is reused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcmas.engines.transformers.cancel import Cancellation
from kvcmas.engines.transformers.clock import Clock
from kvcmas.engines.transformers.heads import HeadProgress
from kvcmas.engines.transformers.layerwise import HiddenTap, LayerSchedule, layer_modules
from kvcmas.engines.transformers.record import SpanRecord
from kvcmas.engines.transformers.state import RequestState
from kvcmas.errors import PlanError, UnsupportedSpanError
from kvcmas.methods.base import Method
from kvcmas.workflow.partial import Layers
from kvcmas.workflow.plan import Compute, Plan, Reuse


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """What a prefill did.

    logits: `[vocab]` float32, behind the prompt.
    spans: one record for each span of the plan.
    computed: sorted, disjoint ranges of positions that went through the model.
    exact: every computed token attended only to exact KV.
    passes: number of forward passes.
    hidden: what the method's `boundaries` asked for; see `Outcome`.
    """

    logits: Tensor
    spans: tuple[SpanRecord, ...]
    computed: tuple[tuple[int, int], ...]
    exact: bool
    passes: int
    hidden: Mapping[int, Tensor] = field(default_factory=dict)


def run_prefill(
    state: RequestState, plan: Plan, method: Method, clock: Clock, cancel: Cancellation
) -> Prefill:
    """Execute a plan on a fresh request state.

    Raises:
        UnsupportedSpanError: the plan holds a kind of span that this engine does not know, or
            computes single layers of a model that cannot be run layer by layer.
        PlanError: a partial span names layers that the model lacks.
        CancelledError: the request was cancelled between two steps.
    """
    for span in plan.spans:
        if not isinstance(span, Compute | Reuse):
            raise UnsupportedSpanError(
                f"the transformers engine executes Compute and Reuse spans, got "
                f"{type(span).__name__}; use a method whose plans it can execute"
            )
    partial = [span for span in plan.reused() if span.partial is not None]
    _check_layers(state, plan, method, partial)
    heads = {span.start: HeadProgress(span, state.layers) for span in plan.reused()}
    computed = np.ones(plan.length, dtype=bool)
    with clock.lap("correct"):
        for head in heads.values():
            cancel.check()
            computed[head.end : head.span.stop] = False
            computed[list(head.span.landmarks)] = True
            head.fill(method, state)
    touched = computed.copy()
    for span in partial:
        touched[span.start : span.stop] = True
        computed[span.start : span.stop] = heads[span.start].whole
    tap = HiddenTap(method.boundaries, plan.length) if method.boundaries else None
    first, passes = 0, 0
    while True:
        cancel.check()
        index = torch.from_numpy(np.flatnonzero(touched[first:]) + first)
        with clock.lap("forward"):
            schedule = _schedule(state, method, partial, index) if partial else None
            logits = state.compute(index, [hook for hook in (tap, schedule) if hook is not None])
        passes += 1
        with clock.lap("correct"):
            measured = [head for head in heads.values() if head.end > first]
            growing = [head for head in measured if head.measure(state)]
            if not growing:
                break
            first = min([head.grow(state) for head in growing])
            for head in growing:
                computed[head.span.start : head.end] = True
                touched[head.span.start : head.end] = True
    return Prefill(
        logits=logits,
        spans=tuple(_record(span, heads) for span in plan.spans),
        computed=_ranges(computed),
        exact=all(head.span.exact or head.whole for head in heads.values()),
        passes=passes,
        hidden=tap.hidden if tap is not None else {},
    )


def _check_layers(state: RequestState, plan: Plan, method: Method, partial: list[Reuse]) -> None:
    if not partial and not method.boundaries:
        return
    try:
        layer_modules(state.runner.model, state.layers)
    except UnsupportedSpanError as error:
        raise UnsupportedSpanError(f"method {method.name!r}: {error}") from error
    for span in partial:
        if span.partial is not None and span.partial.depth > state.layers:
            raise PlanError(
                f"method {method.name!r} computes {span.partial.depth} layers of "
                f"[{span.start}, {span.stop}), and the model has {state.layers}"
            )
    if partial and any(span.head.tolerance is not None for span in plan.reused()):
        raise UnsupportedSpanError(
            f"method {method.name!r} planned spans computed in part next to a head that may grow; "
            "the transformers engine executes one kind or the other"
        )


def _schedule(
    state: RequestState, method: Method, partial: list[Reuse], index: Tensor
) -> LayerSchedule:
    entering: dict[int, Tensor] = {}
    for span in partial:
        if isinstance(span.partial, Layers) and span.partial.start:
            width = state.runner.config.hidden_size
            hidden = state.cache.key_buffer.new_empty(len(span), width)
            method.fill_hidden(state.prompt, span, hidden)
            entering[span.start] = hidden
    return LayerSchedule(state.cache, index.to(state.runner.device), partial, entering)


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
