"""A paged cache and a pool of donors in plain tensors, as the worker side sees them."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvcmas.core.segment import SegmentKV
from kvcmas.engines.vllm.messages import BlockIds

BLOCK = 16


class FakeCache:
    """Blocks of one rank; those of a request lie scattered. reads: spans read so far."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.layers, self.kv_heads, self.head_dim = layers, kv_heads, head_dim
        self.dtype, self.device = dtype, torch.device("cpu")
        self.reads: list[tuple[int, int]] = []
        shape = (layers, kv_heads, 400 * BLOCK, head_dim)
        self._keys, self._values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        self._free = list(range(400))
        random.Random(0).shuffle(self._free)

    def allocate(self, tokens: int) -> BlockIds:
        """Blocks for a request."""
        return tuple(self._free.pop() for _ in range(-(-tokens // BLOCK)))

    def free(self, block_ids: BlockIds) -> None:
        """Give blocks back, with junk in them."""
        for block in block_ids:
            self._keys[:, :, block * BLOCK : (block + 1) * BLOCK] = 99.0
            self._values[:, :, block * BLOCK : (block + 1) * BLOCK] = 99.0
        self._free.extend(block_ids)

    def read(self, block_ids: BlockIds, start: int, stop: int) -> tuple[Tensor, Tensor]:
        self.reads.append((start, stop))
        slots = self.slots(block_ids, start, stop)
        return self._keys[:, :, slots], self._values[:, :, slots]

    def write(self, block_ids: BlockIds, start: int, keys: Tensor, values: Tensor) -> None:
        slots = self.slots(block_ids, start, start + keys.shape[2])
        self.put(slots, range(self.layers), keys, values)

    def slots(self, block_ids: BlockIds, start: int, stop: int) -> Tensor:
        positions = torch.arange(start, stop)
        return torch.tensor(block_ids)[positions // BLOCK] * BLOCK + positions % BLOCK

    def put(self, slots: Tensor, layers: range, keys: Tensor, values: Tensor) -> None:
        self._keys[layers.start : layers.stop, :, slots] = keys
        self._values[layers.start : layers.stop, :, slots] = values

    def everything(self) -> Tensor:
        """A copy of all blocks."""
        return torch.stack([self._keys, self._values])


@dataclass
class FakePool:
    """Donors in a dictionary. room: bytes of the largest one that is taken."""

    room: int = 1 << 40
    held: dict[str, SegmentKV] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def nbytes(self) -> dict[str, int]:
        with self.lock:
            return {"device": sum(segment.nbytes for segment in self.held.values())}

    def put(self, name: str, segment: SegmentKV) -> bool:
        with self.lock:
            if segment.nbytes > self.room:
                return False
            self.held[name] = segment
            return True

    def get(self, name: str) -> SegmentKV | None:
        return self.peek(name)

    def peek(self, name: str) -> SegmentKV | None:
        with self.lock:
            return self.held.get(name)

    def drop(self, name: str) -> bool:
        with self.lock:
            return self.held.pop(name, None) is not None
