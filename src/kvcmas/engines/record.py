"""What every engine says about one span of a prompt: plain data, JSON both ways."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class SpanRecord(BaseModel):
    """What happened to one span of the plan; lengths in tokens.

    kind: `cached` is a prefix that the engine's own cache held; only vLLM tells it apart.
    head: tokens at the front of a reused span that were computed.
    landmarks: single tokens behind its head that were computed too.
    deviation: relative deviation measured last at the head's end, `None` when nothing was
        measured.
    token_layers: of a span that was computed in some layers only, tokens times layers computed;
        `computed` is then this over the model's layers, rounded up.
    notes: why the head was lengthened or the span computed, in words.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    start: int
    stop: int
    kind: Literal["compute", "reuse", "cached"]
    computed: int
    reused: int
    segment: str | None = None
    offset: int | None = None
    correction: str | None = None
    exact: bool = False
    head: int = 0
    landmarks: int = 0
    deviation: float | None = None
    tolerance: float | None = None
    token_layers: int | None = None
    notes: tuple[str, ...] = ()
