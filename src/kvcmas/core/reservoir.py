"""A bounded, uniform sample of all tokens seen: what maps with a hidden layer are fitted on."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcmas.core.features import Features


class Reservoir:
    """Keeps `capacity` tokens, each token of the stream with equal probability.

    Source: Vitter, "Random sampling with a reservoir", 1985, algorithm R. Tokens are kept as
    float16 features and targets, about half the bytes of the learned quantities they stand for.
    """

    def __init__(self, capacity: int, seed: int = 0) -> None:
        self.capacity = capacity
        self.seen = 0
        self._random = torch.Generator().manual_seed(seed)
        self._rows: list[Tensor] = []

    def __len__(self) -> int:
        return self._rows[0].shape[0] if self._rows else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens kept."""
        return sum(row.numel() * row.element_size() for row in self._rows)

    def add(self, features: Features, fading: Tensor, targets: Tensor) -> None:
        """Offer tokens: fading `[tokens]`, targets `[layers, tokens, dim]`."""
        incoming = [features.own, features.window[None], fading[None, :, None], targets]
        if features.other is not None:
            incoming.append(features.other)
        rows = [part.transpose(0, 1).half() for part in incoming]
        tokens = rows[0].shape[0]
        free = min(tokens, self.capacity - len(self))
        if free:
            kept = [row[:free].clone() for row in rows]
            if self._rows:
                kept = [torch.cat(pair) for pair in zip(self._rows, kept, strict=True)]
            self._rows = kept
        ranks = torch.arange(self.seen + free + 1, self.seen + tokens + 1, dtype=torch.float64)
        draws = torch.rand(tokens - free, generator=self._random, dtype=torch.float64)
        slots = (draws * ranks).long()
        for source in torch.nonzero(slots < self.capacity).flatten().tolist():
            for row, new in zip(self._rows, rows, strict=True):
                row[slots[source]] = new[free + source]
        self.seen += tokens

    def sample(self) -> tuple[Tensor, Tensor]:
        """Everything kept: features `[layers, tokens, features]` and targets, float32."""
        own, window, fading, targets, *other = (row.float().transpose(0, 1) for row in self._rows)
        features = Features(own, window[0], other[0] if other else None)
        return features.matrix(fading[0, :, 0]), targets
