"""A correction's deviation of one run of tokens, ready to be added to any layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvcmas.core.channels import split_channels
from kvcmas.core.rope.rotation import Rotation


class Addition:
    """What is added to moved KV.

    Its scratch memory is used again from call to call: one call at a time.

    Args:
        layers: the corrected ones, ascending.
        codes: `[corrected, tokens, rank]` float32.
        outward: `[corrected, rank, channels]` float32.
        rotation: from position 0 to the tokens'.
    """

    def __init__(
        self, layers: tuple[int, ...], codes: Tensor, outward: Tensor, rotation: Rotation
    ) -> None:
        self.layers = layers
        self._codes = codes
        self._outward = outward
        self._rotation = rotation
        self._scratch: tuple[Tensor, Tensor] | None = None

    def add(self, layers: range, keys: Tensor, values: Tensor) -> None:
        """Add in place, in float32, rounding once.

        keys, values: `[len(layers), kv_heads, tokens, dim]` of these layers, keys moved.
        """
        heads, dim = keys.shape[1], keys.shape[3]
        for slots in _runs(self.layers, layers):
            at = self.layers[slots.start] - layers.start
            chosen = slice(at, at + len(slots))
            inner = slice(slots.start, slots.stop)
            channels, turned = self._buffers(len(slots), heads * dim)
            torch.bmm(self._codes[inner], self._outward[inner], out=channels)
            bare, added = split_channels(channels, heads, dim)
            by_head = turned.unflatten(2, (heads, dim)).transpose(1, 2)
            self._rotation.apply(bare, layers=self.layers[inner], out=by_head)
            keys[chosen] += by_head
            values[chosen] += added

    def _buffers(self, layers: int, width: int) -> tuple[Tensor, Tensor]:
        """Room for channels and for turned keys, `[layers, tokens, ...]` float32."""
        tokens, channels = self._codes.shape[1], self._outward.shape[2]
        if self._scratch is None or len(self._scratch[0]) < layers:
            self._scratch = (
                self._codes.new_empty(layers, tokens, channels),
                self._codes.new_empty(layers, tokens, width),
            )
        return self._scratch[0][:layers], self._scratch[1][:layers]


def _runs(corrected: Sequence[int], layers: range) -> Iterator[range]:
    """Indices of corrected layers among `layers`, in runs that are neighbours in the model."""
    run: list[int] = []
    for slot, layer in enumerate(corrected):
        if layer not in layers:
            continue
        if run and layer != corrected[run[-1]] + 1:
            yield range(run[0], run[-1] + 1)
            run = []
        run.append(slot)
    if run:
        yield range(run[0], run[-1] + 1)
