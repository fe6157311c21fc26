"""What a look-up finds for a prompt. Plain data.

prompt    0            p                 start       stop        n-1  n
          |  prefix    |                 |   run     |            |  |
          |  exact     |  not stored     | sources   |  not stored   |
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcmas.store.info import SegmentInfo


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The prompt's first `length` tokens are the first tokens of `segment`, whose KV is exact."""

    segment: str
    length: int
    info: SegmentInfo


@dataclass(frozen=True, slots=True)
class Donor:
    """A segment that holds the KV of a whole run, from its token `offset` on.

    own: computed at the very same position behind the very same tokens, by the reader itself or
        exactly. Then it is the reader's own KV: neither move, head nor correction applies.
    """

    segment: str
    offset: int
    info: SegmentInfo
    own: bool = False

    @property
    def exact(self) -> bool:
        """Whether the KV is what a full prefill of the reader's prompt gives."""
        return self.own and self.info.exact


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens `[start, stop)` of the prompt, held by every one of `sources` (newest first)."""

    start: int
    stop: int
    sources: tuple[Donor, ...]

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Found:
    """Everything stored that a prompt can reuse, without the prompt's last token.

    prefix: the exact beginning, or `None`.
    runs: behind the prefix, by position, not overlapping; none contains position 0.
    notes: why something was not found, in words.
    """

    prefix: PrefixHit | None = None
    runs: tuple[Run, ...] = ()
    notes: tuple[str, ...] = ()
