"""A weighted sum of stored deviations, added to moved KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcmas.core.channels import split_channels
from kvcmas.core.rope import Rope
from kvcmas.core.segment import SegmentKV
from kvcmas.methods.anchors.states import Stretch


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A deviation and how much it counts.

    delta: of all layers but the first. keys, values: weights `[layers or 1, tokens or 1,
    channels or 1]`, layers counted without the first, tokens from the span's first.
    """

    delta: Stretch
    keys: Tensor
    values: Tensor

    @classmethod
    def alone(cls, delta: Stretch) -> Part:
        """A deviation that counts fully."""
        one = torch.ones(1, 1, 1)
        return cls(delta, one, one)


class Prediction:
    """The deviation of one span.

    Args:
        parts: summed up.
        first: which token of its content the span begins with.
    """

    def __init__(self, parts: Sequence[Part], first: int) -> None:
        self._parts = parts
        self._first = first

    def add(self, rope: Rope, out: SegmentKV, begin: int) -> None:
        """Add to moved KV, in place; float32, rounded once. Layer 0 stays as it is.

        out: tokens of the span from its token `begin` on.
        """
        _, heads, tokens, dim = out.keys.shape
        width = heads * (dim + out.values.shape[3])
        rotation = rope.rotation(out.positions, device=out.keys.device)
        for layer in range(1, out.layers):
            channels = torch.zeros(1, tokens, width, device=out.keys.device)
            for part in self._parts:
                self._accumulate(part, layer - 1, begin, channels[0], heads * dim)
            bare, added = split_channels(channels, heads, dim)
            out.keys[layer : layer + 1] += rotation.apply(bare, layers=[layer])
            out.values[layer : layer + 1] += added

    def _accumulate(self, part: Part, layer: int, begin: int, channels: Tensor, keys: int) -> None:
        """Add one part's rows to `[tokens, channels]`."""
        head = self._first + begin
        start = max(head, part.delta.first)
        stop = min(head + channels.shape[0], part.delta.stop)
        if start >= stop:
            return
        rows = part.delta.rows(layer, start, stop)
        span = slice(start - self._first, stop - self._first)
        into = channels[start - head : stop - head]
        into[:, :keys] += rows[:, :keys] * _at(part.keys, layer, span).to(rows.device)
        into[:, keys:] += rows[:, keys:] * _at(part.values, layer, span).to(rows.device)


def _at(weights: Tensor, layer: int, tokens: slice) -> Tensor:
    """Weights of some tokens in a layer, `[tokens or 1, channels or 1]`."""
    own = weights[layer if weights.shape[0] > 1 else 0]
    return own[tokens] if own.shape[0] > 1 else own
