"""Which requests hold which segments."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic

from kvcmas.errors import KvcmasError, PlanError
from kvcmas.store.content import ContentT
from kvcmas.store.segments import SegmentStore


@dataclass(slots=True)
class _Held(Generic[ContentT]):
    segment: ContentT
    requests: int = 0


class Pins(Generic[ContentT]):
    """Pins on the segments of a store, by request; a request pins a segment once."""

    def __init__(self, store: SegmentStore[ContentT]) -> None:
        self._store = store
        self._requests: dict[str, set[str]] = {}
        self._held: dict[str, _Held[ContentT]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, request_id: str, names: Iterable[str]) -> frozenset[str]:
        """Pin segments; returns those that are still in the store."""
        got: set[str] = set()
        with self._lock:
            mine = self._requests.get(request_id, set())
            for name in names:
                if name not in mine:
                    segment = self._store.pin(name)
                    if segment is None:
                        continue
                    mine.add(name)
                    self._held.setdefault(name, _Held(segment)).requests += 1
                got.add(name)
            if mine:
                self._requests[request_id] = mine
        return frozenset(got)

    def release(self, request_id: str) -> frozenset[str]:
        """Unpin whatever a request holds; returns removed segments that went with it."""
        gone: set[str] = set()
        with self._lock:
            for name in self._requests.pop(request_id, ()):
                held = self._held[name]
                held.requests -= 1
                if not held.requests:
                    del self._held[name]
                if self._store.unpin(name):
                    gone.add(name)
        return frozenset(gone)

    def content(self, name: str) -> ContentT:
        """What a held segment holds (also one that was removed meanwhile), or a stored one.

        Raises:
            PlanError: there is no such segment.
        """
        held = self._held.get(name)
        segment = self._store.get(name) if held is None else held.segment
        if segment is None:
            raise PlanError(
                f"segment {name!r} is not here; pin a plan's segments before it is executed"
            )
        return segment

    def check_integrity(self) -> None:
        """Raises KvcmasError when the counts here and in the store differ."""
        with self._lock:
            counts: dict[str, int] = {}
            for names in self._requests.values():
                for name in names:
                    counts[name] = counts.get(name, 0) + 1
            if counts != {name: held.requests for name, held in self._held.items()}:
                raise KvcmasError("the pins of the requests and of the segments do not agree")
            for name, count in counts.items():
                if self._store.pins(name) != count:
                    raise KvcmasError(
                        f"segment {name!r} has {self._store.pins(name)} pins, requests hold {count}"
                    )
