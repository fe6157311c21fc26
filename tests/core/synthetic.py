"""Random inputs of the shapes that corrections see, without a model."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcmas.core.features import Features
from kvcmas.core.rope import Layout, Rope, RopeTable
from kvcmas.core.segment import SegmentKV


def normal(device: torch.device, *shape: int, seed: int = 0) -> Tensor:
    """Standard normal float32 numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device)


def features_of(
    device: torch.device,
    layers: int = 3,
    tokens: int = 50,
    own: int = 4,
    window: int = 5,
    other: int = 0,
    seed: int = 0,
) -> Features:
    extra = normal(device, layers, tokens, other, seed=seed + 2) if other else None
    return Features(
        normal(device, layers, tokens, own, seed=seed),
        normal(device, tokens, window, seed=seed + 1),
        extra,
    )


def fading_of(device: torch.device, tokens: int, start: int = 0, fade: float = 16.0) -> Tensor:
    return 1 / (1 + torch.arange(start, start + tokens, device=device) / fade)


def plain_rope(layers: int, head_dim: int, base: float = 10000.0) -> Rope:
    """The default rotation, the same in all layers."""
    pairs = head_dim // 2
    frequencies = tuple(base ** (-pair / pairs) for pair in range(pairs))
    return Rope((RopeTable(frequencies, (0,) * pairs, Layout.NEOX),), (0,) * layers)


def segment_of(keys: Tensor, values: Tensor, start: int = 0) -> SegmentKV:
    """Token ids do not matter here; positions count on from `start`."""
    tokens = torch.arange(keys.shape[2], device=keys.device)
    return SegmentKV(keys, values, tokens, (tokens + start)[None])


def random_segment(
    device: torch.device,
    layers: int = 3,
    heads: int = 2,
    tokens: int = 7,
    head_dim: int = 8,
    value_dim: int = 6,
    start: int = 0,
    seed: int = 0,
) -> SegmentKV:
    return segment_of(
        normal(device, layers, heads, tokens, head_dim, seed=seed),
        normal(device, layers, heads, tokens, value_dim, seed=seed + 1),
        start,
    )
