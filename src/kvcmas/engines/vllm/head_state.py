"""The head of one reused span while its request is prefilled."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcmas.workflow.plan import Reuse


@dataclass(slots=True)
class HeadState:
    """The head of one reused span.

    length: tokens of the span that are computed at its front, up to now.
    settled: nothing is to be decided any more. agreed: because it was measured. trusted: because
        nobody waits for the measurement.
    asked: measurements that are not reported yet; stale: how many of them came before the KV
        was computed again, and say nothing any more.
    """

    span: Reuse
    length: int
    settled: bool
    agreed: bool = False
    trusted: bool = False
    deviation: float | None = None
    asked: int = 0
    stale: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Position behind the head."""
        return self.span.start + self.length

    @property
    def decided(self) -> bool:
        """Whether nothing need be measured, or the measurement has agreed."""
        return self.agreed or self.trusted or self.whole or not self.measured

    @property
    def measured(self) -> bool:
        """Whether the head's end is to agree with a tolerance."""
        return not self.span.exact and self.span.head.tolerance is not None

    @property
    def whole(self) -> bool:
        """Whether nothing of the span is reused."""
        return self.length >= len(self.span)


def head_of(span: Reuse) -> HeadState:
    """The head of a span before anything is computed."""
    length, notes = span.head.length, []
    if not length and span.head.tolerance is not None and not span.exact:
        length = min(span.head.chunk, len(span))
        notes.append(f"a tolerance needs a head to be measured on; computed {length} tokens")
    settled = span.exact or span.head.tolerance is None or length >= len(span)
    return HeadState(span, length, settled, notes=notes)
