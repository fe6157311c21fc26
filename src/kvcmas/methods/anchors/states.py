"""How the deviation (or the KV) of a stretch of text is held.

All forms give rows `[tokens, channels]` float32 of one layer, keys at position 0; see
`core.channels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Protocol

import torch
from torch import Tensor

from kvcmas.core.lowrank import LowRank, factorise


class State(Protocol):
    """Rows of every layer in some form."""

    @property
    def tokens(self) -> int:
        """Number of rows of a layer."""

    @property
    def nbytes(self) -> int:
        """Bytes that it occupies."""

    def rows(self, layer: int, start: int, stop: int) -> Tensor:
        """Rows `[start, stop)` of a layer, `[rows, channels]` float32."""


@dataclass(frozen=True, eq=False)
class Full:
    """Every number. channels: `[layers, tokens, channels]` float32."""

    channels: Tensor

    @property
    def tokens(self) -> int:
        """Number of rows of a layer."""
        return self.channels.shape[1]

    @property
    def nbytes(self) -> int:
        """`4 * layers * tokens * channels`."""
        return self.channels.numel() * self.channels.element_size()

    def rows(self, layer: int, start: int, stop: int) -> Tensor:
        """Rows of a layer."""
        return self.channels[layer, start:stop]


@dataclass(frozen=True, eq=False)
class Factored:
    """Low-rank factors, of keys and of values apart; float32."""

    keys: LowRank
    values: LowRank

    @classmethod
    def of(cls, channels: Tensor, key_channels: int, rank: int) -> Factored:
        """Factor `[layers, tokens, channels]` float32 at `rank`."""
        return cls(
            factorise(channels[..., :key_channels].contiguous(), rank),
            factorise(channels[..., key_channels:].contiguous(), rank),
        )

    @property
    def tokens(self) -> int:
        """Number of rows of a layer."""
        return self.keys.left.shape[1]

    @property
    def nbytes(self) -> int:
        """`4 * layers * rank * (2 * tokens + channels)`."""
        return self.keys.nbytes + self.values.nbytes

    def rows(self, layer: int, start: int, stop: int) -> Tensor:
        """Rows of a layer."""
        return torch.cat(
            [part.left[layer, start:stop] @ part.right[layer] for part in (self.keys, self.values)],
            dim=-1,
        )


@dataclass(frozen=True, eq=False)
class Sparse:
    """The largest numbers of each layer.

    index: `[layers, kept]` int32 into a layer's `tokens * channels` numbers.
    values: `[layers, kept]` float32.
    """

    index: Tensor
    values: Tensor
    tokens: int
    channels: int

    @classmethod
    def of(cls, channels: Tensor, density: float) -> Sparse:
        """Keep a share `density` of each layer of `[layers, tokens, channels]` float32."""
        flat = channels.flatten(1)
        kept = ceil(density * flat.shape[1])
        index = flat.abs().topk(kept, dim=1, sorted=False).indices
        return cls(index.int(), flat.gather(1, index), channels.shape[1], channels.shape[2])

    @property
    def nbytes(self) -> int:
        """`8 * layers * kept`."""
        return sum(part.numel() * part.element_size() for part in (self.index, self.values))

    def rows(self, layer: int, start: int, stop: int) -> Tensor:
        """Rows of a layer, zero where nothing is kept."""
        dense = self.values.new_zeros(self.tokens * self.channels)
        dense[self.index[layer].long()] = self.values[layer]
        return dense.view(self.tokens, self.channels)[start:stop]


@dataclass(frozen=True, eq=False)
class Stretch:
    """A state of tokens `[first, stop)` of a content."""

    first: int
    state: State

    @property
    def stop(self) -> int:
        """Behind its last token."""
        return self.first + self.state.tokens

    def rows(self, layer: int, start: int, stop: int) -> Tensor:
        """Rows of a layer; positions count from the content's first token."""
        return self.state.rows(layer, start - self.first, stop - self.first)
