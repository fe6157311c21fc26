"""The donors that a rank holds: whose they are, and their features, computed once."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from kvcmas.core.channels import to_channels
from kvcmas.core.features import FeatureBasis, Features
from kvcmas.core.rope import Rope
from kvcmas.core.segment import SegmentKV
from kvcmas.engines.vllm.interfaces import Donors


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose traffic a donor comes from."""

    tenant: str
    agent: str


class KnownDonors:
    """By name of the donor. Safe to use from many threads; nothing waits for a computation.

    Args:
        pool: holds their KV.
        rope: how the model rotates keys.
        device: where features are computed and kept.
    """

    def __init__(self, pool: Donors, rope: Rope, device: torch.device) -> None:
        self._pool = pool
        self._rope = rope
        self._device = device
        self._owners: dict[str, Owner] = {}
        self._features: dict[str, tuple[FeatureBasis, Features]] = {}
        self._lock = threading.Lock()

    def add(self, name: str, owner: Owner) -> None:
        """Remember whose donor it is."""
        with self._lock:
            self._owners[name] = owner

    def forget(self, name: str) -> None:
        """Drop a donor with everything that was derived from it."""
        with self._lock:
            self._owners.pop(name, None)
            self._features.pop(name, None)
        self._pool.drop(name)

    def clear(self) -> None:
        """Drop all donors."""
        with self._lock:
            names = list(self._owners)
        for name in names:
            self.forget(name)

    def owner(self, name: str) -> Owner | None:
        """Whose donor it is; `None` when there is none of this name."""
        with self._lock:
            return self._owners.get(name)

    def names(self, owner: Owner) -> list[str]:
        """All donors of an agent, oldest first."""
        with self._lock:
            return [name for name, held in self._owners.items() if held == owner]

    def kv(self, name: str) -> SegmentKV | None:
        """A donor's KV on the device, without counting as a use."""
        held = self._pool.peek(name)
        return None if held is None else on_device(held, self._device)

    def features(
        self, name: str, basis: FeatureBasis, kv: SegmentKV | None = None
    ) -> Features | None:
        """Features of a whole donor in a basis; `None` when its KV is gone.

        kv: of the donor, on the device; looked up when it is needed and not given.
        """
        with self._lock:
            held = self._features.get(name)
        if held is not None and held[0] is basis:
            return held[1]
        kv = self.kv(name) if kv is None else kv
        if kv is None:
            return None
        features = basis.features(to_channels(self._rope, kv))
        with self._lock:
            if name in self._owners:
                self._features[name] = basis, features
        return features

    def feature_bytes(self) -> int:
        """Bytes of all features."""
        with self._lock:
            return sum(features.nbytes for _, features in self._features.values())


def on_device(segment: SegmentKV, device: torch.device) -> SegmentKV:
    """The segment itself where it is there, otherwise a copy."""
    if segment.keys.device == device:
        return segment
    parts = (segment.keys, segment.values, segment.token_ids, segment.positions)
    return SegmentKV(*(part.to(device) for part in parts))
