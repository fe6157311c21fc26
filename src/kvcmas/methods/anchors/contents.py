"""Shared texts that were seen, recognised by their tokens.

Nothing marks a shared text in a prompt. It is a run that the library found, and the same text may
come out a few tokens longer or shorter, as what stands around it happens to agree with a donor:

    content        | T h e   t e x t .     |
    found later  | T h e   t e x t |             the overlap is used, the rest computed
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from kvcmas.core.segment import SegmentKV
from kvcmas.methods.anchors.pool import Anchor
from kvcmas.methods.gathering import EDGE
from kvcmas.workflow.prompt import TokenIds


@dataclass(eq=False)
class Content:
    """A shared text.

    token_ids: `[tokens]` int64. new: the gate's verdict, `None` before it was asked.
    base: its KV by itself, for methods that take deviations from that.
    anchor: what was learned from this very text. name: for records, a digest of the tokens.
    """

    token_ids: TokenIds
    new: bool | None = None
    base: SegmentKV | None = None
    anchor: Anchor | None = None
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = blake2b(self.token_ids.tobytes(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class Located:
    """Tokens `[start, stop)` of a run are a content's tokens from `at` on."""

    content: Content
    start: int
    stop: int
    at: int


class Contents:
    """The most recently used contents.

    Args:
        capacity: most of them that are kept.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._contents: list[Content] = []

    def __len__(self) -> int:
        return len(self._contents)

    def __iter__(self) -> Iterator[Content]:
        return iter(self._contents)

    def locate(self, run: TokenIds) -> Located | None:
        """The content that a run is, but for a few tokens at either end."""
        for content in reversed(self._contents):
            located = _overlap(content, run)
            if located is not None:
                return located
        return None

    def use(self, content: Content) -> Content:
        """Keep a content, as the most recent one; returns the one that is kept for this text."""
        located = self.locate(content.token_ids)
        kept = content if located is None else located.content
        self._contents = [other for other in self._contents if other is not kept]
        self._contents = [*self._contents, kept][-self._capacity :]
        return kept


def _overlap(content: Content, run: TokenIds) -> Located | None:
    length, held = len(run), len(content.token_ids)
    needed = max(length // 2, length - 2 * EDGE, 1)
    for shift in sorted(range(-EDGE, EDGE + 1), key=abs):
        start, stop = max(0, -shift), min(length, held - shift)
        if stop - start < needed:
            continue
        differ = start + np.flatnonzero(
            run[start:stop] != content.token_ids[start + shift : stop + shift]
        )
        left, right = differ[differ < start + EDGE], differ[differ >= stop - EDGE]
        if len(left) + len(right) != len(differ):
            continue
        start, stop = max([start, *(left + 1)]), min([stop, *right])
        if stop - start >= needed:
            return Located(content, int(start), int(stop), int(start + shift))
    return None
