"""Donors in memory: their KV under a byte budget, pinned while a request uses it.

    put ----> visible ----> evicted or removed
                 ^  |
           unpin |  | pin          a pinned segment is never evicted; removed while pinned, it is
                 |  v              invisible at once and its memory goes with the last pin
                 in use

A segment becomes visible as a whole or not at all. Look-up and use are one step: `pin` returns
the KV, or `None` when the segment has left since it was matched; then its tokens are computed.
What is held need not be KV: a scheduler keeps the tokens alone (`store.content`).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from math import log2
from typing import Generic

from kvcmas.errors import ConfigError, InputError, KvcmasError
from kvcmas.store.content import ContentT
from kvcmas.store.info import Put, SegmentInfo


@dataclass(slots=True)
class _Entry(Generic[ContentT]):
    segment: ContentT
    info: SegmentInfo
    nbytes: int
    value: float = 0.0
    used: int = 0
    pins: int = 0
    removed: bool = False


class SegmentStore(Generic[ContentT]):
    """A pool of segments. Safe to use from many threads.

    When room is needed, the least valuable unpinned segments leave first. The value of a segment
    follows the greedy-dual-size-frequency rule (Cherkasova, 1998): what a hit saves (its tokens)
    for what it occupies (its bytes), times a weight that grows with the logarithm of its hits,
    on top of a clock that rises to the value of whatever was evicted last. So unused segments
    age while the pool turns over, and those of equal value leave in the order of their last use.
    A tenant that would exceed its quota evicts segments of its own first.

    Args:
        budget: most bytes that the pool holds, pinned segments included.
        tenant_bytes: most of them that the segments of one tenant take; `None` for no quota.

    Raises:
        ConfigError: a negative budget or quota.
    """

    def __init__(self, budget: int, tenant_bytes: int | None = None) -> None:
        if budget < 0:
            raise ConfigError(f"the byte budget must be >= 0, got {budget}")
        if tenant_bytes is not None and tenant_bytes < 0:
            raise ConfigError(f"the byte quota of a tenant must be >= 0, got {tenant_bytes}")
        self.budget = budget
        self.tenant_bytes = tenant_bytes
        self._entries: dict[str, _Entry[ContentT]] = {}
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

    def put(self, segment: ContentT, info: SegmentInfo) -> Put:
        """Store a copy of `segment` and evict what must leave for it.

        It is not stored (and nothing is evicted) when it exceeds the budget or its tenant's
        quota by itself, or together with what is pinned; the result's `reason` says so.

        Args:
            segment: any view; it is cloned, so engine buffers may be overwritten.
            info: `hits` is set by the store, `id` and `created` where they are empty; a segment
                that continues another keeps its number.

        Raises:
            InputError: the id is in use, or the segment has no tokens.
        """
        size = segment.nbytes
        if len(segment) == 0:
            raise InputError("a segment of 0 tokens cannot be stored; skip it")
        refused = self._refusal(size, info.tenant)
        if refused:
            return Put(None, (), refused)
        copy = segment.clone()
        with self._lock:
            segment_id = self._name(info.id)
            refused = self._refusal_locked(size, info.tenant)
            if refused:
                return Put(None, (), refused)
            evicted = self._make_room(size, info.tenant)
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

    def get(self, segment_id: str) -> ContentT | None:
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

    def pin(self, segment_id: str) -> ContentT | None:
        """The KV, kept until as many `unpin` follow; counts a hit. `None` if not here."""
        with self._lock:
            entry = self._visible(segment_id)
            if entry is None:
                return None
            entry.pins += 1
            entry.info = replace(entry.info, hits=entry.info.hits + 1)
            self._touch(entry)
            return entry.segment

    def unpin(self, segment_id: str) -> bool:
        """Give back one `pin`; returns whether a removed segment went with it.

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
            gone = entry.removed and entry.pins == 0
            if gone:
                self._drop(entry)
            return gone

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
            tenants = {entry.info.tenant for entry in self._entries.values()}
            most = max(map(self._bytes_of, tenants), default=0)
            if self.tenant_bytes is not None and most > self.tenant_bytes:
                raise KvcmasError(
                    f"a tenant's segments hold {most} bytes of a quota of {self.tenant_bytes}"
                )
            for name, entry in self._entries.items():
                if entry.pins < 0 or (entry.removed and entry.pins == 0):
                    raise KvcmasError(
                        f"segment {name!r} has {entry.pins} pins, removed: {entry.removed}"
                    )
                if entry.info.id != name or entry.nbytes != entry.segment.nbytes:
                    raise KvcmasError(f"segment {name!r} is entered as {entry.info.id!r}")

    # Below, the lock is held (except in _refusal).

    def _refusal(self, size: int, tenant: str) -> str:
        with self._lock:
            return self._refusal_locked(size, tenant)

    def _refusal_locked(self, size: int, tenant: str) -> str:
        refused = _exceeds("budget", self.budget, size, self._bytes_of(None, pinned=True))
        if not refused and self.tenant_bytes is not None:
            pinned = self._bytes_of(tenant, pinned=True)
            refused = _exceeds("quota of the tenant", self.tenant_bytes, size, pinned)
        return refused

    def _bytes_of(self, tenant: str | None, *, pinned: bool = False) -> int:
        """Bytes of a tenant's segments, or of all; only of pinned ones, or of all."""
        return sum(
            entry.nbytes
            for entry in self._entries.values()
            if (tenant is None or entry.info.tenant == tenant) and (entry.pins or not pinned)
        )

    def _name(self, wanted: str) -> str:
        if wanted in self._entries:
            raise InputError(
                f"segment {wanted!r} is already stored; remove it first, or leave the id empty"
            )
        number = self._created + 1
        while not wanted or wanted in self._entries:
            wanted, number = f"segment-{number}", number + 1
        return wanted

    def _make_room(self, size: int, tenant: str) -> tuple[str, ...]:
        evicted: list[str] = []
        if self.tenant_bytes is not None:
            evicted += self._evict(self._bytes_of(tenant) + size - self.tenant_bytes, tenant)
        evicted += self._evict(self._nbytes + size - self.budget)
        return tuple(evicted)

    def _evict(self, excess: int, tenant: str | None = None) -> list[str]:
        """Drop the least valuable segments, of one tenant or of all, until the excess is gone."""
        evicted: list[str] = []
        unpinned = [
            entry
            for entry in self._entries.values()
            if not entry.pins and (tenant is None or entry.info.tenant == tenant)
        ]
        for entry in sorted(unpinned, key=lambda entry: (entry.value, entry.used)):
            if excess <= 0:
                break
            excess -= entry.nbytes
            self._clock = max(self._clock, entry.value)
            self._drop(entry)
            evicted.append(entry.info.id)
        return evicted

    def _touch(self, entry: _Entry[ContentT]) -> None:
        self._ticks += 1
        entry.used = self._ticks
        weight = 1 + log2(1 + entry.info.hits)
        entry.value = self._clock + weight * len(entry.segment) / entry.nbytes

    def _drop(self, entry: _Entry[ContentT]) -> None:
        del self._entries[entry.info.id]
        self._nbytes -= entry.nbytes

    def _visible(self, segment_id: str) -> _Entry[ContentT] | None:
        entry = self._entries.get(segment_id)
        return None if entry is None or entry.removed else entry


def _exceeds(what: str, limit: int, size: int, pinned: int) -> str:
    if size > limit:
        return f"the segment has {size} bytes, the whole {what} is {limit}"
    if size + pinned > limit:
        return (
            f"the segment has {size} bytes, and {pinned} of the {what} of {limit} are pinned by "
            "requests in flight"
        )
    return ""
