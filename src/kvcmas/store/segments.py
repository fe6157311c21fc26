"""Donors in memory: segment KV under a byte budget, pinned while a request uses it.

    put ----> visible ----> evicted or removed
                 ^  |
           unpin |  | pin          a pinned segment is never evicted; removed while pinned, it is
                 |  v              invisible at once and its memory goes with the last pin
                 in use

A segment becomes visible as a whole or not at all. Look-up and use are one step: `pin` returns
the KV, or `None` when the segment has left since it was matched; then its tokens are computed.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from math import log2

from kvcmas.core.segment import SegmentKV
from kvcmas.errors import ConfigError, InputError, KvcmasError
from kvcmas.store.info import Put, SegmentInfo


@dataclass(slots=True)
class _Entry:
    segment: SegmentKV
    info: SegmentInfo
    nbytes: int
    value: float = 0.0
    used: int = 0
    pins: int = 0
    removed: bool = False


class SegmentStore:
    """A pool of segments. Safe to use from many threads.

    When room is needed, the least valuable unpinned segments leave first. The value of a segment
    follows the greedy-dual-size-frequency rule (Cherkasova, 1998): what a hit saves (its tokens)
    for what it occupies (its bytes), times a weight that grows with the logarithm of its hits,
    on top of a clock that rises to the value of whatever was evicted last. So unused segments
    age while the pool turns over, and those of equal value leave in the order of their last use.

    Args:
        budget: most bytes of tensors that the pool holds, pinned segments included.

    Raises:
        ConfigError: a negative budget.
    """

    def __init__(self, budget: int) -> None:
        if budget < 0:
            raise ConfigError(f"the byte budget must be >= 0, got {budget}")
        self.budget = budget
        self._entries: dict[str, _Entry] = {}
        self._nbytes = 0
        self._created = 0
        self._ticks = 0
        self._clock = 0.0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Number of visible segments."""
        with self._lock:
            return sum(not entry.removed for entry in self._entries.values())

    def __contains__(self, segment_id: str) -> bool:
        with self._lock:
            return self._visible(segment_id) is not None

    @property
    def nbytes(self) -> int:
        """Bytes held, those of removed segments that are still pinned included."""
        with self._lock:
            return self._nbytes

    def put(self, segment: SegmentKV, info: SegmentInfo) -> Put:
        """Store a copy of `segment` and evict what must leave for it.

        It is not stored (and nothing is evicted) when it exceeds the budget by itself, or
        together with what is pinned; the result's `reason` says so.

        Args:
            segment: any view; its tensors are copied, so engine buffers may be overwritten.
            info: `hits` is set by the store, `id` and `created` where they are empty; a segment
                that continues another keeps its number.

        Raises:
            InputError: the id is in use, or the segment has no tokens.
        """
        size = segment.nbytes
        if len(segment) == 0:
            raise InputError("a segment of 0 tokens cannot be stored; skip it")
        refused = self._refusal(size)
        if refused:
            return Put(None, (), refused)
        copy = segment.clone()
        with self._lock:
            segment_id = self._name(info.id)
            refused = self._refusal_locked(size)
            if refused:
                return Put(None, (), refused)
            evicted = self._make_room(size)
            self._created += 1
            entry = _Entry(
                copy,
                replace(info, id=segment_id, created=info.created or self._created, hits=0),
                size,
            )
            self._touch(entry)
            self._entries[segment_id] = entry
            self._nbytes += size
            return Put(segment_id, evicted)

    def get(self, segment_id: str) -> SegmentKV | None:
        """The KV without a pin (to look at, not to use in a request); `None` if not here."""
        with self._lock:
            entry = self._visible(segment_id)
            return entry.segment if entry else None

    def info(self, segment_id: str) -> SegmentInfo | None:
        """The metadata with the hits up to now; `None` if the segment is not here."""
        with self._lock:
            entry = self._visible(segment_id)
            return entry.info if entry else None

    def infos(self) -> list[SegmentInfo]:
        """Metadata of all visible segments, oldest first."""
        with self._lock:
            return [entry.info for entry in self._entries.values() if not entry.removed]

    def pin(self, segment_id: str) -> SegmentKV | None:
        """The KV, kept until as many `unpin` follow; counts a hit. `None` if not here."""
        with self._lock:
            entry = self._visible(segment_id)
            if entry is None:
                return None
            entry.pins += 1
            entry.info = replace(entry.info, hits=entry.info.hits + 1)
            self._touch(entry)
            return entry.segment

    def unpin(self, segment_id: str) -> None:
        """Give back one `pin`.

        Raises:
            InputError: the segment is not pinned.
        """
        with self._lock:
            entry = self._entries.get(segment_id)
            if entry is None or entry.pins == 0:
                raise InputError(
                    f"segment {segment_id!r} is not pinned; unpin exactly once for every pin that "
                    "returned a segment"
                )
            entry.pins -= 1
            if entry.removed and entry.pins == 0:
                self._drop(entry)

    def pins(self, segment_id: str) -> int:
        """How many pins are held on a segment; 0 if it is not here."""
        with self._lock:
            entry = self._entries.get(segment_id)
            return entry.pins if entry else 0

    def remove(self, segment_id: str) -> bool:
        """Make a segment invisible now and free it as soon as no pin is left.

        Returns whether it was visible.
        """
        with self._lock:
            entry = self._visible(segment_id)
            if entry is None:
                return False
            entry.removed = True
            if entry.pins == 0:
                self._drop(entry)
            return True

    def check_integrity(self) -> None:
        """Raises KvcmasError when bytes, pins or names contradict each other."""
        with self._lock:
            held = sum(entry.segment.nbytes for entry in self._entries.values())
            if held != self._nbytes:
                raise KvcmasError(f"segments hold {held} bytes, {self._nbytes} are counted")
            if held > self.budget:
                raise KvcmasError(f"segments hold {held} bytes of a budget of {self.budget}")
            for name, entry in self._entries.items():
                if entry.pins < 0 or (entry.removed and entry.pins == 0):
                    raise KvcmasError(
                        f"segment {name!r} has {entry.pins} pins, removed: {entry.removed}"
                    )
                if entry.info.id != name or entry.nbytes != entry.segment.nbytes:
                    raise KvcmasError(f"segment {name!r} is entered as {entry.info.id!r}")

    # Below, the lock is held (except in _refusal).

    def _refusal(self, size: int) -> str:
        with self._lock:
            return self._refusal_locked(size)

    def _refusal_locked(self, size: int) -> str:
        if size > self.budget:
            return f"the segment has {size} bytes, the whole budget is {self.budget}"
        pinned = sum(entry.nbytes for entry in self._entries.values() if entry.pins)
        if size + pinned > self.budget:
            return (
                f"the segment has {size} bytes, and {pinned} of the budget of {self.budget} are "
                "pinned by requests in flight"
            )
        return ""

    def _name(self, wanted: str) -> str:
        if wanted in self._entries:
            raise InputError(
                f"segment {wanted!r} is already stored; remove it first, or leave the id empty"
            )
        number = self._created + 1
        while not wanted or wanted in self._entries:
            wanted, number = f"segment-{number}", number + 1
        return wanted

    def _make_room(self, size: int) -> tuple[str, ...]:
        evicted: list[str] = []
        free = self.budget - self._nbytes
        unpinned = [entry for entry in self._entries.values() if not entry.pins]
        for entry in sorted(unpinned, key=lambda entry: (entry.value, entry.used)):
            if free >= size:
                break
            free += entry.nbytes
            self._clock = max(self._clock, entry.value)
            self._drop(entry)
            evicted.append(entry.info.id)
        return tuple(evicted)

    def _touch(self, entry: _Entry) -> None:
        self._ticks += 1
        entry.used = self._ticks
        weight = 1 + log2(1 + entry.info.hits)
        entry.value = self._clock + weight * len(entry.segment) / entry.nbytes

    def _drop(self, entry: _Entry) -> None:
        del self._entries[entry.info.id]
        self._nbytes -= entry.nbytes

    def _visible(self, segment_id: str) -> _Entry | None:
        entry = self._entries.get(segment_id)
        return None if entry is None or entry.removed else entry
