"""The plan: what happens to each token of a prompt. Plain data, no torch.

A plan is made by a method and executed by an engine; neither knows the other. Its spans
tile the prompt in order, without gap or overlap:

    position   0          58                                   826   839
               |  Compute |               Reuse                |Compute|
               |          |  head  |   moved, corrected  ^   ^ |       |
               | role     | exact  |   shared document   |   | | task  |
                                                       landmarks
Contract
- spans are sorted, non-empty, and cover exactly `[0, length)`;
- the last token of a prompt is always computed: it gives the first logits;
- the head of a reused span is computed, so a head as long as its span computes it whole;
- the landmarks of a reused span, single tokens inside it, are computed too: each attends to
  everything before it, of which the reused part is approximate;
- a partial span is computed in some layers only (`partial.py`); it has neither head nor landmarks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from kvcmas.errors import PlanError
from kvcmas.workflow.partial import Partial, Selected


@dataclass(frozen=True, slots=True)
class Compute:
    """Tokens `[start, stop)` go through the model."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Head:
    """How many of a reused span's first tokens are computed exactly, and when that is enough.

    length: tokens computed before the first measurement.
    chunk: tokens added whenever the measurement does not agree.
    limit: longest head; when the KV still disagrees there, the whole span is computed.
    tolerance: largest relative deviation (dimensionless) that counts as agreement; `None`
        takes `length` as it is and only records the deviation.
    probe: how many of the head's last tokens are measured.
    """

    length: int = 0
    chunk: int = 32
    limit: int = 0
    tolerance: float | None = None
    probe: int = 16


@dataclass(frozen=True, slots=True)
class Reuse:
    """Tokens `[start, stop)` take the KV of segment `segment` from its token `offset` on.

    exact: the KV was computed behind the very same tokens at the very same positions, so it
        is used as it is (the prefix reuse that every engine has).
    correction: name of the correction to add after the move, or `None` for the move alone.
    landmarks: positions in the prompt, ascending, that are computed although they lie inside
        the span, because large deviations are expected there.
    partial: computes some layers, or some tokens in most layers; `None` reuses all layers. Only
        engines that can run single layers execute it.
    """

    start: int
    stop: int
    segment: str
    offset: int
    correction: str | None = None
    head: Head = Head()
    exact: bool = False
    landmarks: tuple[int, ...] = ()
    partial: Partial | None = None

    def __len__(self) -> int:
        return self.stop - self.start


Span = Compute | Reuse


@dataclass(frozen=True, slots=True)
class Plan:
    """Spans that tile `[0, length)`. `notes` say in words why something was not reused."""

    length: int
    spans: tuple[Span, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def dense(cls, length: int, *notes: str) -> Plan:
        """The plan of a full prefill."""
        return cls(length, (Compute(0, length),), notes)

    def reused(self) -> Iterator[Reuse]:
        """The reused spans, in order."""
        return (span for span in self.spans if isinstance(span, Reuse))

    def computed_positions(self) -> Iterator[int]:
        """Positions computed in all layers when every head has its first length, in order.

        Partial spans have none: `token_layers` counts their work.
        """
        for span in self.spans:
            if isinstance(span, Compute):
                yield from range(span.start, span.stop)
                continue
            end = span.start + span.head.length
            yield from range(span.start, end)
            yield from (position for position in span.landmarks if position >= end)

    @property
    def computed(self) -> int:
        """Number of tokens computed in all layers when every head has its first length."""
        return sum(1 for _ in self.computed_positions())

    def token_layers(self, layers: int) -> int:
        """Work on a model of `layers`: each token counts the layers that it goes through."""
        partial = sum(
            span.partial.token_layers(len(span), layers)
            for span in self.reused()
            if span.partial is not None
        )
        return self.computed * layers + partial


def _check(plan: Plan) -> None:
    position = 0
    for span in plan.spans:
        if span.start != position or span.stop <= span.start:
            raise PlanError(
                f"spans must tile the prompt in order: expected a span that starts at {position} "
                f"and is not empty, got [{span.start}, {span.stop})"
            )
        if isinstance(span, Reuse):
            _check_reuse(span)
        position = span.stop
    if position != plan.length:
        raise PlanError(f"spans cover [0, {position}), the prompt has {plan.length} tokens")
    if plan.length == 0:
        raise PlanError("a plan needs at least one token; refuse an empty prompt before planning")
    last = plan.spans[-1]
    if isinstance(last, Reuse) and last.head.length < len(last) and not _ends_computed(last):
        raise PlanError(
            f"the last token of the prompt must be computed, but [{last.start}, {last.stop}) is "
            "reused to the end; end the reused span one token earlier"
        )


def _check_reuse(span: Reuse) -> None:
    head = span.head
    if span.offset < 0:
        raise PlanError(f"offset into segment {span.segment!r} must be >= 0, got {span.offset}")
    if not 0 <= head.length <= len(span):
        raise PlanError(f"head of {head.length} tokens does not fit a span of {len(span)}")
    if head.chunk < 1 or head.probe < 1:
        raise PlanError(f"head chunk and probe must be >= 1, got {head.chunk} and {head.probe}")
    if head.tolerance is not None and not head.tolerance >= 0:
        raise PlanError(f"head tolerance must be >= 0, got {head.tolerance}")
    if span.exact and (span.correction is not None or head.length or span.landmarks):
        raise PlanError("an exact span needs neither correction, head nor landmarks")
    _check_partial(span)
    if any(a >= b for a, b in pairwise(span.landmarks)) or not all(
        span.start <= position < span.stop for position in span.landmarks
    ):
        raise PlanError(
            f"landmarks must ascend and lie in [{span.start}, {span.stop}), got {span.landmarks}"
        )


def _check_partial(span: Reuse) -> None:
    partial = span.partial
    if partial is None:
        return
    head = span.head
    if span.exact or head.length or head.tolerance is not None or span.landmarks:
        raise PlanError(
            f"[{span.start}, {span.stop}) is computed in part, which goes with neither an exact "
            "span, a head nor landmarks; split the span"
        )
    if isinstance(partial, Selected) and partial.count > len(span):
        raise PlanError(f"{partial.count} selected tokens do not fit a span of {len(span)}")


def _ends_computed(span: Reuse) -> bool:
    return bool(span.landmarks) and span.landmarks[-1] == span.stop - 1
