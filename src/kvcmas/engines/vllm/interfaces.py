"""What the worker side needs of the paged cache and of the pool of donors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from kvcmas.core.segment import SegmentKV
from kvcmas.engines.vllm.messages import BlockIds


class CacheAccess(Protocol):
    """KV of one rank's heads in the engine's blocks."""

    @property
    def layers(self) -> int:
        """Layers of the model."""

    @property
    def kv_heads(self) -> int:
        """Heads of this rank."""

    @property
    def head_dim(self) -> int:
        """Numbers of a head's key, and of its value."""

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""

    @property
    def device(self) -> torch.device:
        """Where the blocks are."""

    def read(self, block_ids: BlockIds, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of positions `[start, stop)`, fresh, as `SegmentKV` orders them."""

    def slots(self, block_ids: BlockIds, start: int, stop: int) -> Tensor:
        """Where positions `[start, stop)` of a request lie, for `put`."""

    def put(self, slots: Tensor, layers: range, keys: Tensor, values: Tensor) -> None:
        """Write keys and values of some layers, as `SegmentKV` orders them, to slots."""


class Donors(Protocol):
    """KV of all donors of one rank. Safe to use from many threads."""

    @property
    def nbytes(self) -> Mapping[str, int]:
        """Bytes by tier."""

    def put(self, name: str, segment: SegmentKV) -> bool:
        """Keep a donor; false when there is no room."""

    def get(self, name: str) -> SegmentKV | None:
        """A donor that is about to be used, on the device of the cache."""

    def peek(self, name: str) -> SegmentKV | None:
        """A donor wherever it is, without counting as a use."""

    def drop(self, name: str) -> bool:
        """Forget a donor; whether it was there."""
