"""Which windows occur in which stored texts: hash of a window -> its places."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvcmas.errors import KvcmasError
from kvcmas.workflow.prompt import TokenIds
from kvcmas.workflow.rolling_hash import RollingHash
from kvcmas.workflow.runs import MAX_OFFSETS, Bucket


class WindowTable:
    """The windows of stored texts that begin at multiples of `window`.

    Of one window that occurs again and again in one text, the first `MAX_OFFSETS + 1` places are
    kept (the last of them only says that there are more).
    """

    def __init__(self, window: int, seed: int) -> None:
        self._hash = RollingHash(window, seed)
        self._buckets: dict[int, Bucket] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def _aligned(self, token_ids: TokenIds) -> list[int]:
        hashes: list[int] = self._hash.windows(token_ids)[:: self._hash.window].tolist()
        return hashes

    def add(self, text: int, token_ids: TokenIds) -> None:
        """Enter the windows of `token_ids`."""
        for index, key in enumerate(self._aligned(token_ids)):
            places = self._buckets.setdefault(key, {}).setdefault(text, [])
            if len(places) <= MAX_OFFSETS:
                places.append(index * self._hash.window)

    def remove(self, text: int, token_ids: TokenIds) -> None:
        """Take out what `add(text, token_ids)` entered."""
        for key in set(self._aligned(token_ids)):
            bucket = self._buckets[key]
            del bucket[text]
            if not bucket:
                del self._buckets[key]

    def look_up(self, token_ids: TokenIds) -> Iterator[tuple[int, Bucket]]:
        """Positions of a prompt, ascending, whose window has stored places, with these."""
        buckets = self._buckets
        hashes: list[int] = self._hash.windows(token_ids).tolist()
        return ((position, buckets[key]) for position, key in enumerate(hashes) if key in buckets)

    def check_integrity(self, texts: dict[int, TokenIds]) -> None:
        """Raises KvcmasError unless the table holds exactly the windows of `texts`."""
        fresh: dict[int, set[int]] = {}
        for text, token_ids in texts.items():
            for key in self._aligned(token_ids):
                fresh.setdefault(key, set()).add(text)
        held = {key: set(bucket) for key, bucket in self._buckets.items()}
        if held != fresh:
            raise KvcmasError(
                f"the window table holds {len(held)} windows, its texts have {len(fresh)}, or they "
                "belong to other texts"
            )


def bucket_sizes(hits: list[tuple[int, Bucket]], windows: int) -> NDArray[np.int64]:
    """How many texts share the window at each position: `[windows]` int64."""
    sizes = np.zeros(windows, dtype=np.int64)
    for position, bucket in hits:
        sizes[position] = len(bucket)
    return sizes
