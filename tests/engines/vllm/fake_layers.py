"""Attention layers in pure torch that keep their KV in the layouts of several backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Place = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""Writes keys and values `[tokens, heads, dim]` at `block`, `offset` `[tokens]` of a cache."""


def _apart(cache: Tensor, block: Tensor, offset: Tensor, keys: Tensor, values: Tensor) -> None:
    cache[0, block, offset], cache[1, block, offset] = keys, values


def _pairs(cache: Tensor, block: Tensor, offset: Tensor, keys: Tensor, values: Tensor) -> None:
    cache[block, 0, offset], cache[block, 1, offset] = keys, values


def _combined(cache: Tensor, block: Tensor, offset: Tensor, keys: Tensor, values: Tensor) -> None:
    cache[block, :, offset] = torch.cat((keys, values), dim=-1)


def _transposed(cache: Tensor, block: Tensor, offset: Tensor, keys: Tensor, values: Tensor) -> None:
    blocks, heads, size, dim = cache.shape[0], cache.shape[1], cache.shape[2], keys.shape[2]
    areas = cache.view(blocks, heads, 2, size * dim)
    areas[:, :, 0].view(blocks, heads, dim, size)[block, :, :, offset] = keys
    areas[:, :, 1].view(blocks, heads, size, dim)[block, :, offset] = values


def _packed(cache: Tensor, block: Tensor, offset: Tensor, keys: Tensor, values: Tensor) -> None:
    """Keys transposed with neighbouring channels side by side, values with neighbouring tokens."""
    blocks, heads, size, dim = cache.shape[0], cache.shape[1], cache.shape[2], keys.shape[2]
    areas = cache.view(blocks, heads, 2, size * dim)
    pairs = keys.unflatten(2, (dim // 2, 2))
    areas[:, :, 0].view(blocks, heads, dim // 2, size, 2)[block, :, :, offset] = pairs
    by_two = areas[:, :, 1].view(blocks, heads, size // 2, dim, 2)
    by_two[block, :, offset // 2, :, offset % 2] = values


@dataclass(frozen=True)
class Layout:
    """shape: letters of the axes in order: B(locks), N (tokens), H(eads), D(im), C (2 * dim),
    P(added: 2 * dim + 3), 2. memory: the same letters in the order of their strides. split:
    blocks of the tensor in one of the engine's.
    """

    shape: str
    place: Place
    memory: str = ""
    split: int = 1

    def zeros(self, blocks: int, block_size: int, heads: int, dim: int, dtype: torch.dtype) -> Any:
        sizes = {
            **{"B": blocks * self.split, "N": block_size // self.split, "H": heads, "D": dim},
            **{"C": 2 * dim, "P": 2 * dim + 3, "2": 2},
        }
        memory = self.memory or self.shape
        plain = torch.zeros([sizes[axis] for axis in memory], dtype=dtype)
        return plain.permute([memory.index(axis) for axis in self.shape])


def _padded(cache: Tensor, block: Tensor, offset: Tensor, keys: Tensor, values: Tensor) -> None:
    cache[block, :, offset, :-3] = torch.cat((keys, values), dim=-1)


LAYOUTS = {
    "2BNHD": Layout("2BNHD", _apart),
    "B2NHD": Layout("B2NHD", _pairs),
    "BHNC": Layout("BHNC", _combined),
    "BHNC in memory BNHC": Layout("BHNC", _combined, memory="BNHC"),
    "BHNC in memory HBNC": Layout("BHNC", _combined, memory="HBNC"),
    "BHNP padded": Layout("BHNP", _padded),
    "keys transposed": Layout("BHNC", _transposed),
    "packed in pairs": Layout("BHNC", _packed),
    "blocks split in two": Layout("BHNC", _combined, split=2),
    "blocks split in four": Layout("2BNHD", _apart, split=4),
}


class FakeImpl:
    def __init__(self, layout: Layout, block_size: int) -> None:
        self._layout = layout
        self._tokens = block_size // layout.split

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        assert key.is_contiguous() and value.is_contiguous() and slot_mapping.dtype == torch.int64
        block, offset = slot_mapping // self._tokens, slot_mapping % self._tokens
        self._layout.place(kv_cache, block, offset, key, value)


@dataclass
class FakeEngine:
    """Caches and layers as vLLM hands them over, layers in no order."""

    caches: dict[str, Tensor]
    layers: dict[str, Any]
    block_size: int
    num_blocks: int


def fake_engine(
    layout: Layout,
    *,
    layers: int = 3,
    blocks: int = 11,
    block_size: int = 8,
    heads: int = 3,
    dim: int = 6,
    dtype: torch.dtype = torch.float32,
    fill: bool = True,
) -> FakeEngine:
    caches, modules = {}, {}
    generator = torch.Generator().manual_seed(1)
    for index in reversed(range(layers)):
        # Ten and more layers: 10 comes behind 9, not behind 1.
        name = f"model.layers.{index + 8}.self_attn.attn"
        cache = layout.zeros(blocks, block_size, heads, dim, dtype)
        if fill:
            cache.copy_(torch.randn(cache.shape, generator=generator))
        caches[name] = cache
        modules[name] = SimpleNamespace(
            impl=FakeImpl(layout, block_size),
            num_kv_heads=heads,
            head_size=dim,
            head_size_v=dim,
            kv_cache_dtype="auto",
            kv_sharing_target_layer_name=None,
            kv_cache=cache,
        )
    return FakeEngine(caches, modules, block_size, blocks)
