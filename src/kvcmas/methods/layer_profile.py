"""Which layers `droidspeak` computes: chosen from measurements of groups of layers.

DroidSpeak (arXiv 2411.02820, section 4.2) measures, for each pair of agents and offline, the loss
of quality for groups of layers in a row, and takes groups from the frontier of few layers and
little loss. Measuring needs a model: `kvcmas.bench.layer_profile` does it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvcmas.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Profiled:
    """Layers `[first, first + layers)`, and the loss when these are computed; less is better."""

    first: int
    layers: int
    loss: float


def layer_groups(layers: int, step: int) -> list[tuple[int, int]]:
    """All groups `(first, layers)` that begin and end at multiples of `step` (or the last layer).

    Raises:
        ConfigError: a step below 1.
    """
    if step < 1:
        raise ConfigError(f"step must be at least 1 layer, got {step}")
    edges = sorted({*range(0, layers, step), layers})
    return [(start, stop - start) for start in edges for stop in edges if stop > start]


def frontier(profile: Iterable[Profiled]) -> list[Profiled]:
    """The groups that no other beats in both layers and loss, by number of layers."""
    kept: list[Profiled] = []
    for group in sorted(profile, key=lambda group: (group.layers, group.loss, group.first)):
        if not kept or group.loss < kept[-1].loss:
            kept.append(group)
    return kept


def choose_layers(profile: Iterable[Profiled], most_loss: float) -> Profiled:
    """The fewest layers whose loss is at most `most_loss`; the least loss where none is.

    Raises:
        ConfigError: nothing was measured.
    """
    best = frontier(profile)
    if not best:
        raise ConfigError("no group of layers was measured; profile some first")
    return next((group for group in best if group.loss <= most_loss), best[-1])
