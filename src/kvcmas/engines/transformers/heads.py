"""The exact head of a reused span: how long it is, whether it agrees, how it grows.

The method fills a span from the head's last tokens (the probe) on, so one call gives the reused
KV and what the probe would have been. The forward pass then writes the exact KV over the probe,
and the two are compared:

    span     |  head            |  reused                     |
                       |  probe |
    filled             [-------------------------------------)
    computed [------------------)
"""

from __future__ import annotations

from math import isfinite

import torch

from kvcmas.core.deviation import relative_deviation
from kvcmas.core.segment import TOKEN, SegmentKV
from kvcmas.engines.transformers.record import SpanRecord
from kvcmas.engines.transformers.state import RequestState
from kvcmas.methods.base import Method
from kvcmas.workflow.plan import Reuse


class HeadProgress:
    """One reused span of a request in flight."""

    def __init__(self, span: Reuse, layers: int) -> None:
        self.span = span
        self._layers = layers
        self.length = span.head.length
        self.deviation: float | None = None
        self.notes: list[str] = []
        self._approx: SegmentKV | None = None
        if not self.length and span.head.tolerance is not None and not span.exact:
            self.length = min(span.head.chunk, len(span))
            self.notes.append(
                f"a tolerance needs a head to be measured on; computed {self.length} tokens"
            )

    @property
    def end(self) -> int:
        """Position behind the head."""
        return self.span.start + self.length

    @property
    def whole(self) -> bool:
        """Whether nothing of the span is reused."""
        return self.end == self.span.stop or self._token_layers == len(self.span) * self._layers

    @property
    def _token_layers(self) -> int | None:
        partial = self.span.partial
        return None if partial is None else partial.token_layers(len(self.span), self._layers)

    def fill(self, method: Method, state: RequestState) -> None:
        """Let the method write the reused tokens, and the probe in front of them."""
        span = self.span
        begin = self.end - min(span.head.probe, self.length)
        if begin < span.stop:
            method.fill(state.prompt, span, begin, span.stop, state.segment(begin, span.stop))
        if self.length:
            self._approx = state.segment(begin, self.end).clone()

    def measure(self, state: RequestState) -> bool:
        """Compare the probe with the exact KV; true when the head must grow."""
        if self._approx is None:
            return False
        exact = state.segment(self.end - len(self._approx), self.end)
        self.deviation = relative_deviation(exact, self._approx)
        tolerance = self.span.head.tolerance
        # Written so that a deviation that is not a number counts as disagreement.
        disagrees = tolerance is not None and not self.deviation <= tolerance
        return disagrees and not self.whole

    def grow(self, state: RequestState) -> int:
        """Lengthen the head; returns the first position to compute (again)."""
        span, head, old_end = self.span, self.span.head, self.end
        # Masked KV that is not finite still reaches the tokens before it (zero times infinity is
        # not a number), so nothing of the pass can be kept.
        finite = self.deviation is not None and isfinite(self.deviation)
        if not finite or self.length >= head.limit:
            length, what = len(span), "the whole span"
        else:
            length = min(self.length + head.chunk, head.limit, len(span))
            what = f"{length} tokens"
        self.notes.append(
            f"deviation {self.deviation:.4g} above tolerance {head.tolerance:.4g} after a head of "
            f"{self.length} tokens; computed {what}"
        )
        self.length = length
        self._approx = None if self.whole else self._extend(state, old_end)
        return old_end if finite else 0

    def _extend(self, state: RequestState, old_end: int) -> SegmentKV:
        """The longer head's probe: still approximate in the cache, but for what is kept."""
        begin = self.end - min(self.span.head.probe, self.length)
        if begin >= old_end or self._approx is None:
            return state.segment(begin, self.end).clone()
        kept, fresh = old_end - begin, state.segment(old_end, self.end)
        old = self._approx
        whole = state.segment(begin, self.end)
        return SegmentKV(
            torch.cat((old.keys[:, :, -kept:], fresh.keys), dim=TOKEN),
            torch.cat((old.values[:, :, -kept:], fresh.values), dim=TOKEN),
            whole.token_ids,
            whole.positions,
        )

    def record(self) -> SpanRecord:
        """What happened to the span."""
        span = self.span
        landmarks = sum(position >= self.end for position in span.landmarks)
        computed, work = self.length + landmarks, self._token_layers
        if work is not None:
            computed = -(-work // self._layers)
        return SpanRecord(
            start=span.start,
            stop=span.stop,
            kind="reuse",
            computed=computed,
            reused=len(span) - computed,
            segment=span.segment,
            offset=span.offset,
            correction=span.correction,
            exact=span.exact,
            head=self.length,
            landmarks=landmarks,
            deviation=self.deviation,
            tolerance=span.head.tolerance,
            token_layers=work,
            notes=tuple(self.notes),
        )
