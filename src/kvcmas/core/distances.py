"""How far agents are from each other, learned from tokens that both computed exactly."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class AgentDistances:
    """Relative deviation between pairs of agents, the same in both directions.

    Nothing is assumed of pairs never seen: their distance is `None`.
    """

    _sums: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)

    def observe(self, donor: str, reader: str, deviation: Tensor, donor_channels: Tensor) -> None:
        """Both tensors `[layers, tokens, channels]`. Layers count alike, whatever their scale."""
        error = deviation.square().sum((1, 2))
        energy = donor_channels.square().sum((1, 2)).clamp_min(1e-30)
        tokens = deviation.shape[1]
        pair = _pair(donor, reader)
        total, weight = self._sums.get(pair, (0.0, 0.0))
        relative = float((error / energy).mean())
        self._sums[pair] = (total + relative * tokens, weight + tokens)

    def between(self, donor: str, reader: str) -> float | None:
        """Root mean relative deviation (dimensionless), 0 for an agent and itself."""
        if donor == reader:
            return 0.0
        total, weight = self._sums.get(_pair(donor, reader), (0.0, 0.0))
        return float((total / weight) ** 0.5) if weight else None


def _pair(first: str, second: str) -> tuple[str, str]:
    return (first, second) if first <= second else (second, first)
