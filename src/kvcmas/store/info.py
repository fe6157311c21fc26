"""What the store knows about a segment besides its KV."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """Where a donor comes from.

    agent: who computed it. tenant: whom it belongs to.
    start: position of its first token in its own prompt.
    prefix: hash of the tokens before it in that prompt (`workflow.prefix_index.prefix_hash`).
    exact: every token before and in it was computed or reused exactly, so it is the KV that a
        full prefill gives.
    id: unique among the segments of a store; left empty, the store chooses one.
    created: the store's running number, from 1; given by the store where it is 0.
    hits: how often it was pinned; kept by the store.
    generated: index of its first token that the agent generated itself, `None` if there is none.
    """

    agent: str
    tenant: str
    start: int
    prefix: str
    exact: bool
    id: str = ""
    created: int = 0
    hits: int = 0
    generated: int | None = None


@dataclass(frozen=True, slots=True)
class Put:
    """Outcome of `SegmentStore.put`.

    id: name of the stored segment; `None` when it was not stored, and `reason` says why.
    evicted: segments that left to make room; drop them from every index.
    continued: the segment, removed now, whose tokens are the first ones of the stored one; set
        by those who know of such a thing (`DonorLibrary.add`).
    """

    id: str | None
    evicted: tuple[str, ...] = ()
    reason: str = ""
    continued: str | None = None
