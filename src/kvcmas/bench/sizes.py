"""Bytes of the correction state from a model's shape alone, with the same classes as in service."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcmas.core.correction import Correction
from kvcmas.core.features import WINDOW, FeatureBasis
from kvcmas.core.hidden import HiddenMap
from kvcmas.methods.kvcmas.config import KvcmasConfig


@dataclass(frozen=True, slots=True)
class Shape:
    """What the state's size depends on. hidden_layers: how many layers have a hidden map."""

    layers: int
    kv_heads: int
    head_dim: int
    hidden_layers: int | None = None

    @property
    def channels(self) -> int:
        """Numbers in a token's keys and values of one layer."""
        return 2 * self.kv_heads * self.head_dim


LLAMA_8B = Shape(layers=32, kv_heads=8, head_dim=128)
"""Of Llama-3.1-8B."""


def correction_bytes(shape: Shape, config: KvcmasConfig, *, second: bool = False) -> int:
    """Bytes of one pair's correction when every layer is corrected.

    second: with a second exact reader's deviation among the features.
    """
    channels, hidden_layers = shape.channels, shape.hidden_layers
    own = min(config.own_dim, channels)
    features = 2 * own + min(config.window_dim, WINDOW * channels) + 2
    features += min(config.other_dim, channels) if second else 0
    rank = min(config.rank, channels)
    number = shape.layers if hidden_layers is None else hidden_layers
    hidden = None
    if config.hidden and number:
        hidden = HiddenMap(
            inward=_half(number, features, config.hidden),
            bias=_half(number, 1, config.hidden),
            outward=_half(number, config.hidden, rank),
        )
    return Correction(
        layers=tuple(range(shape.layers)),
        inward=_half(shape.layers, features, rank),
        outward=_half(shape.layers, rank, channels),
        hidden=hidden,
    ).nbytes


def basis_bytes(shape: Shape, config: KvcmasConfig) -> int:
    """Bytes of what all agents share: the feature basis, float32."""
    channels = shape.channels
    return FeatureBasis(
        own_mean=_single(shape.layers, 1, channels),
        own_project=_single(shape.layers, channels, min(config.own_dim, channels)),
        window_mean=_single(1, WINDOW * channels),
        window_project=_single(WINDOW * channels, min(config.window_dim, WINDOW * channels)),
        fade=config.fade,
    ).nbytes


def second_basis_bytes(shape: Shape, config: KvcmasConfig) -> int:
    """Bytes of the basis for one second exact reader's deviations, shared too."""
    dim = min(config.other_dim, shape.channels)
    return _single(shape.layers, shape.channels, dim).nbytes


def _half(*size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.float16, device="meta")


def _single(*size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.float32, device="meta")
