"""How many layers are worked on at once.

On a CPU so few that the passes over them stay in the cache; elsewhere so many that launches do
not count and scratch stays bounded.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

CPU_BLOCK = 1 << 18
DEVICE_BLOCK = 1 << 25


def block_elements(device: torch.device) -> int:
    """Elements of one tensor that are worked on at once."""
    return CPU_BLOCK if device.type == "cpu" else DEVICE_BLOCK


def layer_groups(layers: int, elements: int, device: torch.device) -> Iterator[range]:
    """Layers `[0, layers)` in runs, each of as many as fit; `elements` are those of one layer."""
    size = max(1, block_elements(device) // max(1, elements))
    for first in range(0, layers, size):
        yield range(first, min(first + size, layers))
