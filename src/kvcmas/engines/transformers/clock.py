"""Where the time of a request goes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch


class Clock:
    """Starts when made; adds up named laps. On CUDA every reading waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._laps: dict[str, float] = defaultdict(float)
        self._start = self._now()

    def elapsed(self) -> float:
        """Seconds since the clock was made."""
        return self._now() - self._start

    def seconds(self, name: str) -> float:
        """Seconds spent in laps of this name."""
        return self._laps[name]

    @contextmanager
    def lap(self, name: str) -> Iterator[None]:
        """Add the time of the block to `name`, also when it raises."""
        start = self._now()
        try:
            yield
        finally:
            self._laps[name] += self._now() - start

    def _now(self) -> float:
        if self._device is not None:
            torch.cuda.synchronize(self._device)
        return perf_counter()
