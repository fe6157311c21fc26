"""A source's KV as its reader gets it, and how far it is from exact KV."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from kvcmas.core.layers import layer_groups
from kvcmas.core.rope import Rope
from kvcmas.core.segment import CHANNEL, HEAD, TOKEN, SegmentKV
from kvcmas.engines.vllm.messages import Source, Sums
from kvcmas.methods.kvcmas.filling import Added, Filling


class Approximation:
    """The donor's KV at a source's positions: keys moved, then corrected.

    added: with features of the whole donor.
    """

    def __init__(self, rope: Rope, donor: SegmentKV, source: Source, added: Added | None) -> None:
        self._like = donor.keys
        self._tokens = len(source)
        self._kept = donor.token_ids[source.offset : source.offset + len(source)]
        self._positions = torch.arange(source.start, source.stop, device=donor.keys.device)[None]
        self._filling = Filling(
            rope, donor, source.offset, self._positions, added, first=source.offset
        )

    def layers(self) -> Iterator[tuple[range, Tensor, Tensor]]:
        """Layers in groups: keys and values `[layers, kv_heads, tokens, head_dim]` of each.

        Every group is written over the one before it. In memory their tokens come before heads,
        as attention backends take them.
        """
        layers, heads, _, dim = self._like.shape
        buffer: Tensor | None = None
        for group in layer_groups(layers, heads * self._tokens * dim, self._like.device):
            if buffer is None:
                shape = (2, len(group), self._tokens, heads, dim)
                buffer = self._like.new_empty(shape).transpose(2, 3)
            keys, values = buffer[0, : len(group)], buffer[1, : len(group)]
            self._filling.fill(group, keys, values)
            yield group, keys, values

    def segment(self) -> SegmentKV:
        """All of it; shares no memory with the donor."""
        layers, heads, _, dim = self._like.shape
        keys = self._like.new_empty(layers, heads, self._tokens, dim)
        out = SegmentKV(keys, torch.empty_like(keys), self._kept, self._positions)
        self._filling.fill_all(out)
        return out


def deviation_sums(keys: Tensor, values: Tensor, approx: SegmentKV) -> Sums:
    """Sums of a deviation. keys, values: exact, `[layers, kv_heads, tokens, head_dim]`."""
    error, energy = zip(
        _sums(keys.float(), approx.keys.float()),
        _sums(values.float(), approx.values.float()),
        strict=True,
    )
    return Sums(torch.cat(error).cpu().numpy(), torch.cat(energy).cpu().numpy())


def unknown_sums(layers: int) -> Sums:
    """Of a deviation that could not be measured: NaN, so that it agrees with no tolerance."""
    nothing = np.full(2 * layers, np.nan)
    return Sums(nothing, nothing)


def _sums(exact: Tensor, approx: Tensor) -> tuple[Tensor, Tensor]:
    """`[layers]` float64: squared differences, and squares of the exact KV."""
    axes = (HEAD, TOKEN, CHANNEL)
    error = (approx - exact).square().sum(axes, dtype=torch.float64)
    return error, exact.square().sum(axes, dtype=torch.float64)
