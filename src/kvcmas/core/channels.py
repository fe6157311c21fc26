"""Keys and values as one vector per token and layer, in a frame without positions.

Corrections live in this frame: keys are un-rotated, so that a deviation does not depend on
where its token stands.

    channels   [layers, tokens, channels]   float32
               channels = kv_heads * head_dim (keys) + kv_heads * value_dim (values)
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcmas.core.rope import Rope
from kvcmas.core.segment import SegmentKV


def to_channels(rope: Rope, segment: SegmentKV) -> Tensor:
    """`[layers, tokens, channels]` float32, keys un-rotated."""
    keys = rope.unrotate(segment.keys.float(), segment.positions)
    return torch.cat([_flat(keys), _flat(segment.values.float())], dim=-1)


def deviation(rope: Rope, reader: SegmentKV, donor: SegmentKV) -> Tensor:
    """Reader minus donor, `[layers, tokens, channels]`, both keys at position 0."""
    return to_channels(rope, reader) - to_channels(rope, donor)


def split_channels(channels: Tensor, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Undo the flattening: keys and values `[..., tokens, channels]` > `[..., heads, tokens, dim]`.

    Keys stay un-rotated. Both are views.
    """
    keys = channels[..., : kv_heads * head_dim]
    values = channels[..., kv_heads * head_dim :]
    return _headed(keys, kv_heads), _headed(values, kv_heads)


def _flat(states: Tensor) -> Tensor:
    """`[layers, heads, tokens, dim]` to `[layers, tokens, heads * dim]`."""
    return states.transpose(1, 2).flatten(2)


def _headed(flat: Tensor, heads: int) -> Tensor:
    return flat.view(*flat.shape[:-1], heads, -1).transpose(-3, -2)
