"""What a correction sees of a token: its own donor KV, and layer 0 around it.

Features of token t in layer j, all from the donor's exact KV:

    own      donor channels of layer j, reduced to `own_dim` numbers
    faded    own / (1 + t / fade): deviations shrink with the distance from the role prefix
    window   layer-0 channels of tokens t, t-1, t-2, reduced to `window_dim` numbers; layer 0 does
             not depend on what stands before a token, so this is exact for every agent
    fade, 1  the fading factor and a constant
    other    optional: the deviation of another exact reader of this very segment

Reductions are principal components of the first donors seen. They are shared by all agents and
stay fixed, because statistics gathered in one basis mean nothing in another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcmas.core.lowrank import factorise

WINDOW = 3


@dataclass(frozen=True, eq=False)
class Features:
    """Reduced features of a run of tokens.

    own: `[layers, tokens, own_dim]` float32. window: `[tokens, window_dim]` float32.
    other: `[layers, tokens, other_dim]` float32, or `None`.
    """

    own: Tensor
    window: Tensor
    other: Tensor | None = None

    def __len__(self) -> int:
        return self.own.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the features."""
        parts = (self.own, self.window, self.other)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def slice(self, start: int, stop: int) -> Features:
        """Tokens `[start, stop)` as views."""
        other = None if self.other is None else self.other[:, start:stop]
        return Features(self.own[:, start:stop], self.window[start:stop], other)

    def take(self, index: Tensor) -> Features:
        """The tokens of an index tensor, copied."""
        other = None if self.other is None else self.other[:, index]
        return Features(self.own[:, index], self.window[index], other)

    def with_other(self, other: Tensor | None) -> Features:
        """The same tokens with another exact reader's deviation, or without any."""
        return Features(self.own, self.window, other)

    def of_layers(self, layers: Sequence[int]) -> Features:
        """The features of some layers, ascending; views where the layers stand in a row."""
        start, stop = (layers[0], layers[-1] + 1) if layers else (0, 0)
        index: slice | Tensor = slice(start, stop)
        if stop - start != len(layers):
            index = torch.tensor(layers, device=self.own.device)
        other = None if self.other is None else self.other[index]
        return Features(self.own[index], self.window, other)

    def matrix(self, fading: Tensor) -> Tensor:
        """All features side by side, `[layers, tokens, features]`.

        fading: `[tokens]`, from `FeatureBasis.fading`.
        """
        layers, tokens, _ = self.own.shape
        column = fading[None, :, None].expand(layers, tokens, 1)
        parts = [self.own, self.own * column]
        parts += [self.window.expand(layers, -1, -1), column, torch.ones_like(column)]
        if self.other is not None:
            parts.append(self.other)
        return torch.cat(parts, dim=-1)

    def project(self, weights: Tensor, fading: Tensor) -> Tensor:
        """`matrix(fading) @ weights` without building the matrix, `[layers, tokens, out]`.

        weights: `[layers, features, out]` float32. Where they have rows for `other` and the
        features have none, or the other way round, `other` contributes nothing.
        """
        own_dim, window_dim, out = self.own.shape[-1], self.window.shape[-1], weights.shape[-1]
        rest = weights.shape[1] - 2 * own_dim - window_dim - 2
        own, faded, window, fade, one, other = weights.split(
            [own_dim, own_dim, window_dim, 1, 1, rest], dim=1
        )
        # Both products with `own` at once: narrow matrices multiply slowly.
        both = torch.baddbmm(torch.cat([one, fade], -1), self.own, torch.cat([own, faded], -1))
        result = torch.addcmul(both[..., :out], both[..., out:], fading[None, :, None])
        result.baddbmm_(self.window.expand(len(weights), -1, -1), window)
        if self.other is not None and rest:
            result.baddbmm_(self.other, other)
        return result


@dataclass(frozen=True, eq=False)
class FeatureBasis:
    """The reductions, shared by all agents.

    own_mean `[layers, 1, channels]`, own_project `[layers, channels, own_dim]`,
    window_mean `[1, 3 * channels]`, window_project `[3 * channels, window_dim]`; float32.
    fade: distance in tokens at which the faded features are halved.
    """

    own_mean: Tensor
    own_project: Tensor
    window_mean: Tensor
    window_project: Tensor
    fade: float

    @classmethod
    def fit(
        cls,
        channels: Tensor,
        windows: Tensor,
        *,
        own_dim: int,
        window_dim: int,
        fade: float,
        seed: int = 0,
    ) -> FeatureBasis:
        """Principal components of sample tokens, scaled to unit variance.

        channels: `[layers, tokens, channels]` float32. windows: `[tokens, 3 * channels]`.
        """
        own_mean = channels.mean(1, keepdim=True)
        window_mean = windows.mean(0, keepdim=True)
        return cls(
            own_mean,
            whitening(channels - own_mean, own_dim, seed=seed),
            window_mean,
            whitening(windows - window_mean, window_dim, seed=seed),
            fade,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the reductions."""
        parts = (self.own_mean, self.own_project, self.window_mean, self.window_project)
        return sum(part.numel() * part.element_size() for part in parts)

    def features(self, channels: Tensor, window: Tensor | None = None) -> Features:
        """Features of a run of donor tokens, from `channels` `[layers, tokens, channels]`.

        window: `windows_of` these tokens, where the run has predecessors that `channels` lacks.
        """
        window = windows_of(channels[0]) if window is None else window
        own = torch.bmm(channels - self.own_mean, self.own_project)
        return Features(own, (window - self.window_mean) @ self.window_project)

    def fading(self, distance: Tensor) -> Tensor:
        """`1 / (1 + t / fade)` for distances t in tokens, float32, same shape."""
        return 1.0 / (1.0 + distance.float().clamp_min(0) / self.fade)


def windows_of(layer0: Tensor) -> Tensor:
    """Each token's layer-0 channels with its two predecessors': `[tokens, 3 * channels]`.

    layer0: `[tokens, channels]`. Before the first token stand zeros.
    """
    padded = torch.nn.functional.pad(layer0, (0, 0, WINDOW - 1, 0))
    tokens = layer0.shape[0]
    shifts = range(WINDOW - 1, -1, -1)
    return torch.cat([padded[shift : shift + tokens] for shift in shifts], dim=-1)


def whitening(centred: Tensor, dim: int, *, seed: int) -> Tensor:
    """`[..., channels, dim]`: principal directions of `[..., tokens, channels]`, scaled.

    Directions whose standard deviation is below a ten-thousandth of the largest carry rounding
    noise; their scale is held there instead of blown up.
    """
    factors = factorise(centred, dim, seed=seed)
    spread = factors.left.square().mean(-2).sqrt()
    floor = (spread.amax(-1, keepdim=True) * 1e-4).clamp_min(1e-12)
    return factors.right.mT / spread.clamp_min(floor)[..., None, :]
