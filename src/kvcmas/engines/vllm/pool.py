"""KV of a rank's donors in two tiers: on the device as long as there is room, then on the host.

    put ---> device --- room is needed ---> host
               ^                             |
               +------- used, and room ------+

The scheduler decides which donors exist; the pool decides only where each of them lies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from kvcmas.core.segment import SegmentKV
from kvcmas.errors import ConfigError, InputError, KvcmasError

Tier = Literal["device", "host"]
Copy = Callable[[SegmentKV], SegmentKV]


@dataclass(slots=True)
class _Donor:
    segment: SegmentKV
    nbytes: int
    used: int


@dataclass(slots=True)
class _Tier:
    budget: int
    donors: dict[str, _Donor] = field(default_factory=dict)
    nbytes: int = 0

    @property
    def free(self) -> int:
        return self.budget - self.nbytes

    def add(self, name: str, donor: _Donor) -> None:
        self.donors[name] = donor
        self.nbytes += donor.nbytes

    def remove(self, name: str) -> _Donor:
        donor = self.donors.pop(name)
        self.nbytes -= donor.nbytes
        return donor


class TieredPool:
    """Donors in two tiers, whatever the tiers are. Safe to use from many threads.

    The pool never changes a segment's tensors, and a segment that was handed out stays valid
    after its donor moved or was dropped. While a donor moves, both of its copies exist.

    Args:
        device_bytes, host_bytes: most bytes of tensors in each tier.
        to_device, to_host: copy a segment to the memory of a tier.

    Raises:
        ConfigError: a negative budget.
    """

    def __init__(
        self, device_bytes: int, host_bytes: int, *, to_device: Copy, to_host: Copy
    ) -> None:
        for name, budget in (("device", device_bytes), ("host", host_bytes)):
            if budget < 0:
                raise ConfigError(f"the {name}'s byte budget must be >= 0, got {budget}")
        self._device, self._host = _Tier(device_bytes), _Tier(host_bytes)
        self._to_device, self._to_host = to_device, to_host
        self._ticks = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._device.donors) + len(self._host.donors)

    def __contains__(self, name: str) -> bool:
        return self.tier(name) is not None

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes held, by tier."""
        with self._lock:
            return {"device": self._device.nbytes, "host": self._host.nbytes}

    def tier(self, name: str) -> Tier | None:
        """Where a donor lies; `None` if it is not here."""
        with self._lock:
            if name in self._device.donors:
                return "device"
            return "host" if name in self._host.donors else None

    def put(self, name: str, segment: SegmentKV) -> bool:
        """Keep a donor, on the device if it fits there.

        For it, the least recently used donors move to the host as long as that has room;
        otherwise the new donor goes to the host itself. Tensors are taken over, not copied, if
        they own all of their memory, so the caller must not change them afterwards.

        Returns:
            Whether it is stored. If not, nothing has moved.

        Raises:
            InputError: the name is in use, or the segment has no tokens.
        """
        if len(segment) == 0:
            raise InputError("a donor of 0 tokens cannot be stored; skip it")
        size = segment.nbytes
        with self._lock:
            if name in self._device.donors or name in self._host.donors:
                raise InputError(f"donor {name!r} is already stored; drop it first")
            victims = self._victims(size, self._host.free)
            if victims is not None:
                self._demote(victims)
                tier, copy = self._device, self._to_device
            elif size <= self._host.free:
                tier, copy = self._host, self._to_host
            else:
                return False
            tier.add(name, _Donor(_owned(copy(segment)), size, self._tick()))
            return True

    def get(self, name: str) -> SegmentKV | None:
        """A donor on the device, to use it now; `None` if it is not here.

        One on the host is copied, and stays on the device if there is room, or if there is when
        donors that were used less recently take its place on the host.
        """
        with self._lock:
            donor = self._device.donors.get(name)
            if donor is not None:
                donor.used = self._tick()
                return donor.segment
            donor = self._host.donors.get(name)
            if donor is None:
                return None
            before, donor.used = donor.used, self._tick()
        # Not under the lock: other threads go on meanwhile.
        copied = self._to_device(donor.segment)
        with self._lock:
            if self._host.donors.get(name) is donor:
                self._promote(name, donor, copied, before)
        return copied

    def peek(self, name: str) -> SegmentKV | None:
        """A donor in the memory where it lies, without counting a use; `None` if not here."""
        with self._lock:
            donor = self._device.donors.get(name) or self._host.donors.get(name)
            return donor.segment if donor else None

    def drop(self, name: str) -> bool:
        """Forget a donor; whether it was there."""
        with self._lock:
            for tier in (self._device, self._host):
                if name in tier.donors:
                    tier.remove(name)
                    return True
            return False

    def check_integrity(self) -> None:
        """Raises KvcmasError when bytes, budgets or names contradict each other."""
        with self._lock:
            both = self._device.donors.keys() & self._host.donors.keys()
            if both:
                raise KvcmasError(f"donors {sorted(both)} lie in both tiers")
            for name, tier in (("device", self._device), ("host", self._host)):
                held = sum(donor.segment.nbytes for donor in tier.donors.values())
                if held != tier.nbytes:
                    raise KvcmasError(f"donors on the {name} hold {held} bytes, not {tier.nbytes}")
                if held > tier.budget:
                    raise KvcmasError(
                        f"donors on the {name} hold {held} bytes of a budget of {tier.budget}"
                    )

    # Below, the lock is held.

    def _tick(self) -> int:
        self._ticks += 1
        return self._ticks

    def _victims(self, size: int, host_free: int, before: int | None = None) -> list[str] | None:
        """Donors to move to the host, least recently used first, so that `size` bytes fit on the
        device; only those last used before a tick, if one is given. `None` if it cannot be.
        """
        if size > self._device.budget:
            return None
        victims: list[str] = []
        free = self._device.free
        for name, donor in sorted(self._device.donors.items(), key=lambda item: item[1].used):
            if free >= size or (before is not None and donor.used > before):
                break
            if donor.nbytes <= host_free:
                victims.append(name)
                free += donor.nbytes
                host_free -= donor.nbytes
        return victims if free >= size else None

    def _demote(self, names: list[str]) -> None:
        for name in names:
            donor = self._device.donors[name]
            donor.segment = self._to_host(donor.segment)
            self._host.add(name, self._device.remove(name))

    def _promote(self, name: str, donor: _Donor, copied: SegmentKV, before: int) -> None:
        victims = self._victims(donor.nbytes, self._host.free + donor.nbytes, before)
        if victims is None:
            return
        self._host.remove(name)
        donor.segment = copied
        self._demote(victims)
        self._device.add(name, donor)


class DonorPool(TieredPool):
    """KV of one rank's donors on its device and on the host. Safe to use from many threads.

    The host's tensors are pinned where the device is a GPU. On a CPU both tiers are the same
    memory: nothing is ever moved, and everything counts as "device" with the sum of both budgets.

    Args:
        device_bytes, host_bytes: most bytes of tensors in each tier.
        device: of the engine's cache.

    Raises:
        ConfigError: a negative budget.
    """

    def __init__(self, device_bytes: int, host_bytes: int, device: torch.device) -> None:
        def to_device(segment: SegmentKV) -> SegmentKV:
            return _each(segment, lambda tensor: tensor.to(device))

        if device.type == "cpu":
            if min(device_bytes, host_bytes) >= 0:
                device_bytes, host_bytes = device_bytes + host_bytes, 0
            super().__init__(device_bytes, host_bytes, to_device=to_device, to_host=to_device)
        else:
            super().__init__(device_bytes, host_bytes, to_device=to_device, to_host=_to_host)


def _to_host(segment: SegmentKV) -> SegmentKV:
    """A copy in host memory, complete when this returns; pinned if CUDA can use that."""
    pin = torch.cuda.is_available()

    def copy(tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pin)
        return host.copy_(tensor)

    return _each(segment, copy)


def _owned(segment: SegmentKV) -> SegmentKV:
    """Tensors that are views of larger ones are copied, or memory would not be what is counted."""

    def own(tensor: Tensor) -> Tensor:
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)

    return _each(segment, own)


def _each(segment: SegmentKV, change: Callable[[Tensor], Tensor]) -> SegmentKV:
    # Inside vLLM's inference mode the copies are to be ordinary tensors, for other threads too.
    with torch.inference_mode(False), torch.no_grad():
        return SegmentKV(
            change(segment.keys),
            change(segment.values),
            change(segment.token_ids),
            change(segment.positions),
        )
