"""Channels: keys and values side by side, keys without their positions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig

from kvcmas.core.channels import deviation, split_channels, to_channels
from kvcmas.core.rope import Rope

from .synthetic import normal, plain_rope, random_segment, segment_of

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size": 32,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": partial(LlamaConfig, **SHAPE),
    # Two tables: layers with a sliding window rotate by other frequencies than the rest.
    "gemma3": partial(
        Gemma3TextConfig,
        **SHAPE,
        sliding_window=24,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(name: str, device: torch.device) -> None:
    rope = Rope.from_config(CONFIGS[name]())
    segment = random_segment(device, layers=6, head_dim=8, value_dim=6, start=900)
    channels = to_channels(rope, segment)
    assert channels.shape == (6, 7, 2 * 8 + 2 * 6)
    assert channels.dtype == torch.float32
    keys, values = split_channels(channels, 2, 8)
    assert (keys.shape, values.shape) == (segment.keys.shape, segment.values.shape)
    torch.testing.assert_close(rope.rotate(keys, segment.positions), segment.keys)
    assert torch.equal(values, segment.values)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_keys_elsewhere_have_the_same_channels(name: str, device: torch.device) -> None:
    rope = Rope.from_config(CONFIGS[name]())
    bare = normal(device, 6, 2, 7, 8)
    values = normal(device, 6, 2, 7, 8, seed=1)
    places = [segment_of(bare, values, start) for start in (3, 1000)]
    here, there = (
        segment_of(rope.rotate(bare, place.positions), values, start)
        for place, start in zip(places, (3, 1000), strict=True)
    )
    assert (here.keys - there.keys).abs().max() > 0.5
    torch.testing.assert_close(to_channels(rope, here), to_channels(rope, there))
    torch.testing.assert_close(
        deviation(rope, here, there), torch.zeros(6, 7, 32, device=device), atol=1e-5, rtol=0
    )


def test_order_of_channels(device: torch.device) -> None:
    # Position 0 does not turn: channels are the keys' heads one after the other, then the values'.
    segment = random_segment(device, tokens=1)
    channels = to_channels(plain_rope(3, 8), segment)[1, 0]
    parts = [segment.keys[1, 0, 0], segment.keys[1, 1, 0], segment.values[1].flatten()]
    torch.testing.assert_close(channels, torch.cat(parts))


def test_half_precision_is_widened(device: torch.device) -> None:
    segment = random_segment(device)
    half = segment_of(segment.keys.bfloat16(), segment.values.bfloat16(), 5)
    channels = to_channels(plain_rope(3, 8), half)
    assert channels.dtype == torch.float32
    wide = segment_of(half.keys.float(), half.values.float(), 5)
    assert torch.equal(channels, to_channels(plain_rope(3, 8), wide))


def test_split_gives_views_of_any_leading_axes(device: torch.device) -> None:
    flat = normal(device, 3, 4, 5, 2 * 8 + 2 * 6)
    keys, values = split_channels(flat, 2, 8)
    assert (keys.shape, values.shape) == ((3, 4, 2, 5, 8), (3, 4, 2, 5, 6))
    keys.zero_()
    assert not flat[..., :16].any()
    assert flat[..., 16:].all()
