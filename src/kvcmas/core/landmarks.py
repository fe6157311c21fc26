"""Where inside a segment the role prefix leaves its notes: landmark tokens.

Deviations are not spread evenly. A few tokens, such as paragraph breaks and the ends of sentences,
take most of them, and which ones can be told from the text: a ridge regression predicts the
logarithm of a token's deviation energy from its features. Computing the tokens with the largest
prediction exactly, wherever they stand, does more than an exact head of the same size
(`docs/decisions/landmarks.md` has the figures).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcmas.core.features import Features
from kvcmas.core.moments import Moments, solve_ridge

_PARTS = 24
_EVERY = 4
_RIDGE = 1e-3
_MIN_TOKENS = 500
_FAR_TERMS = 3  # the last columns: far, its square, a constant


class LandmarkModel:
    """Predicts the deviation energy of tokens of one pair; learned online.

    The energy of a token is its squared deviation relative to the mean of its layer, averaged
    over the layers between a quarter and two thirds of the depth: an error there is still seen by
    all layers behind it, while the deviation of early layers hardly changes answers.
    """

    def __init__(self, layers: int) -> None:
        self._layers = slice(layers // 4, max(layers // 4 + 1, 2 * layers // 3))
        self._seen = list(range(min(_EVERY // 2, layers - 1), layers, _EVERY))
        self._moments: Moments | None = None
        self._energy = torch.zeros(layers, dtype=torch.float64)
        self._weights: Tensor | None = None

    @property
    def ready(self) -> bool:
        """Whether enough tokens were seen to predict."""
        return self._moments is not None and self._moments.count >= _MIN_TOKENS

    @property
    def nbytes(self) -> int:
        """Bytes of the statistics."""
        return self._moments.nbytes if self._moments else 0

    def observe(self, features: Features, distance: Tensor, deviation: Tensor) -> None:
        """Take in tokens: distance `[tokens]`, deviation `[layers, tokens, channels]`."""
        if not len(features):
            return
        energy = deviation.square().sum(-1).double()
        self._energy = self._energy.to(energy.device) + energy.sum(1)
        count = len(features) + (self._moments.count if self._moments else 0)
        mean = (self._energy / count).clamp_min(1e-30)
        relative = (energy / mean[:, None])[self._layers].mean(0)
        x = self._matrix(features, distance)
        if self._moments is None:
            self._moments = Moments.zeros(1, x.shape[-1], 1, x.device)
        self._moments.add(x, relative.clamp_min(1e-3).log().float()[None, :, None])
        self._weights = None

    def predict(self, features: Features, distance: Tensor) -> Tensor:
        """Expected log energy of each token, `[tokens]` float32; higher is more worth computing."""
        weights = self._solved()
        if weights is None:
            return torch.zeros(len(features), device=features.window.device)
        return (self._matrix(features, distance)[0] @ weights).squeeze(-1)

    def terms(self, features: Features) -> tuple[Tensor, float, float]:
        """`predict` without the distance: `base` `[tokens]` float32, `far`, `far_squared`.

        At a distance of d tokens, with f = log(max(d, 0) + 8), the prediction for token t is
        `base[t] + far * f + far_squared * f * f`.
        """
        weights = self._solved()
        if weights is None:
            return torch.zeros(len(features), device=features.window.device), 0.0, 0.0
        zeros = torch.zeros(len(features), device=features.window.device)
        own = self._matrix(features, zeros)[0, :, :-_FAR_TERMS] @ weights[:-_FAR_TERMS]
        far, far_squared, constant = weights[-_FAR_TERMS:].flatten().tolist()
        return own.squeeze(-1) + constant, far, far_squared

    def _solved(self) -> Tensor | None:
        if self._weights is None and self._moments is not None:
            self._weights = solve_ridge(self._moments, _RIDGE)[0].float()
        return self._weights

    def _matrix(self, features: Features, distance: Tensor) -> Tensor:
        far = torch.log(distance.float().clamp_min(0) + 8)[:, None]
        own = features.own[self._seen, :, :_PARTS].transpose(0, 1).flatten(1)
        parts = [features.window, own, far, far.square(), torch.ones_like(far)]
        return torch.cat(parts, dim=-1)[None]


def pick(scores: Tensor, count: int) -> list[int]:
    """Indices of the `count` highest scores, ascending."""
    count = max(0, min(count, scores.shape[0]))
    return sorted(scores.topk(count).indices.tolist())
