"""Where a backend keeps each number of a token's KV, found by writing numbers that tell.

A cache tensor has one axis of blocks; the order within a block is the backend's own business. It
may keep keys and values apart or together, keys transposed, or packed for its matrix instructions.
So the backend itself writes the numbers 0, 1, 2, ... into a small cache of the same kind, and where
they are found is where the KV will be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcmas.errors import UnsupportedEngineError

Write = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Backend's write: keys and values `[tokens, heads, dim]`, the cache, slots `[tokens]` int64."""

# A number is written in digits that every floating-point type of a cache holds exactly.
_BITS = 7


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """How a cache tensor is divided, and what lies where in a block of it.

    The engine numbers its blocks as its scheduler sees them; a tensor may hold each of them as
    `split` consecutive smaller blocks.

    axis: the tensor's axis of blocks. tokens: in one block of the tensor.
    keys, values: `[heads * tokens * dim]` int64, in this order: offsets in a block whose other
        axes are flattened.
    """

    axis: int
    split: int
    tokens: int
    heads: int
    dim: int
    keys: Tensor
    values: Tensor

    def blocks(self, ids: Tensor) -> Tensor:
        """The tensor's blocks `[blocks * split]` that hold the engine's blocks `ids`."""
        if self.split == 1:
            return ids
        parts = torch.arange(self.split, device=ids.device)
        return (ids[:, None] * self.split + parts).flatten()

    def read(self, cache: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[heads, blocks * tokens, dim]` in some blocks of the tensor, copied."""
        flat = self._flat(cache, blocks)
        return self._pick(flat, self.keys), self._pick(flat, self.values)

    def _flat(self, cache: Tensor, blocks: Tensor) -> Tensor:
        return cache.index_select(self.axis, blocks).movedim(self.axis, 0).flatten(1)

    def _pick(self, flat: Tensor, offsets: Tensor) -> Tensor:
        picked = flat.index_select(1, offsets)
        picked = picked.view(flat.shape[0], self.heads, self.tokens, self.dim)
        return picked.transpose(0, 1).reshape(self.heads, -1, self.dim)


def find_layout(
    write: Write, cache: Tensor, *, block_size: int, num_blocks: int, heads: int, dim: int
) -> BlockLayout:
    """Find out how a backend lays out a cache like `cache`, which is not touched.

    Args:
        write: the backend's write operation.
        cache: any shape and strides.
        block_size, num_blocks: of the engine.
        heads, dim: KV heads in this cache, and numbers in a key and in a value.

    Raises:
        UnsupportedEngineError: no axis holds the blocks, or not every number was found.
    """
    axis, split = _block_axis(write, cache, block_size, num_blocks, heads, dim)
    tokens = block_size // split
    device = cache.device
    scratch = _scratch_like(cache, axis, 3)
    slots = torch.arange(tokens, 2 * tokens, device=device)
    count = 2 * tokens * heads * dim
    codes = torch.arange(count, device=device).view(2, tokens, heads, dim)
    found = torch.zeros(scratch.numel() // 3, dtype=torch.int64, device=device)
    written = torch.zeros_like(found, dtype=torch.bool)
    for shift in range(0, count.bit_length(), _BITS):
        digits = ((codes >> shift) % 2**_BITS + 1).to(cache.dtype)
        scratch.zero_()
        write(digits[0], digits[1], scratch, slots)
        digit = scratch.select(axis, 1).flatten().to(torch.int64)
        written = digit > 0
        found += torch.where(written, (digit - 1) << shift, 0)
        if torch.count_nonzero(scratch) != torch.count_nonzero(written):
            raise _not_understood(cache, "a block's tokens were written to other blocks")
    places = written.nonzero().flatten()
    order = found[places].argsort()
    if not torch.equal(found[places][order], codes.flatten()):
        raise _not_understood(cache, f"{count} numbers were written, not all of them were found")
    # From the order of the codes, [tokens, heads, dim], to that of a segment.
    keys, values = places[order].view(2, tokens, heads, dim).transpose(1, 2).flatten(1)
    return BlockLayout(axis, split, tokens, heads, dim, keys, values)


def _block_axis(
    write: Write, cache: Tensor, block_size: int, num_blocks: int, heads: int, dim: int
) -> tuple[int, int]:
    """The axis of blocks, and how many of its blocks make one of the engine's."""
    candidates = [
        (axis, size // num_blocks)
        for axis, size in enumerate(cache.shape)
        if size and size % num_blocks == 0 and block_size % (size // num_blocks) == 0
    ]
    if len(candidates) > 1:
        # Only a full-sized cache is safe to write to as long as the axis is not known. An axis
        # can be mistaken for that of the blocks only when there are few blocks, so it is small.
        scratch = _scratch_like(cache, 0, cache.shape[0])
        ones = torch.ones(block_size, heads, dim, dtype=cache.dtype, device=cache.device)
        slots = torch.arange(block_size, device=cache.device)
        write(ones, ones, scratch, slots + (num_blocks - 1) * block_size)
        candidates = [
            (axis, split)
            for axis, split in candidates
            if _only_last(scratch.movedim(axis, 0).flatten(1).any(dim=1), split)
        ]
    if len(candidates) != 1:
        raise _not_understood(cache, f"no axis of it is one of {num_blocks} blocks")
    return candidates[0]


def _only_last(used: Tensor, count: int) -> bool:
    return bool(used[-count:].all()) and not bool(used[:-count].any())


def _scratch_like(cache: Tensor, axis: int, size: int) -> Tensor:
    """Zeros of the cache's dtype and order of axes in memory, with `size` blocks."""
    shape = list(cache.shape)
    shape[axis] = size
    order = sorted(range(cache.ndim), key=cache.stride, reverse=True)
    inverse = [order.index(dim) for dim in range(cache.ndim)]
    plain = torch.zeros([shape[dim] for dim in order], dtype=cache.dtype, device=cache.device)
    return plain.permute(inverse)


def _not_understood(cache: Tensor, reason: str) -> UnsupportedEngineError:
    return UnsupportedEngineError(
        f"the layout of the KV cache is not understood: {reason} (each layer's cache is "
        f"{tuple(cache.shape)}, {cache.dtype} on {cache.device.type}). Choose another attention "
        "backend, or run vLLM without kvcmas"
    )
