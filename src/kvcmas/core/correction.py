"""The correction of one agent pair: compact low-rank maps that turn donor KV into reader KV.

For every corrected layer, with features x of a token (see `features.py`):

    deviation(x) = (x @ inward + hidden(x)) @ outward

`outward` has `rank` rows, so the deviation of a layer is a low-rank map whatever the features.
Its size depends on the model's shape only, never on the context or the documents seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu

from kvcmas.core.addition import Addition
from kvcmas.core.features import Features
from kvcmas.core.hidden import HiddenMap
from kvcmas.core.layers import layer_groups
from kvcmas.core.rope import Rope
from kvcmas.core.segment import SegmentKV


@dataclass(frozen=True, eq=False)
class Correction:
    """Low-rank maps of the corrected layers; the others are reused as they are.

    layers: indices of the corrected layers, ascending.
    inward: `[corrected, features, rank]` float16. outward: `[corrected, rank, channels]` float16.
    hidden_layers: positions within `layers` that also have a hidden layer; hidden: their maps,
        float16, or `None`.
    gain: per corrected layer, held-out energy left by the correction (1 = no better than none).
    """

    layers: tuple[int, ...]
    inward: Tensor
    outward: Tensor
    hidden_layers: tuple[int, ...] = ()
    hidden: HiddenMap | None = None
    gain: tuple[float, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        parts = [self.inward, self.outward]
        if self.hidden is not None:
            parts += [self.hidden.inward, self.hidden.bias, self.hidden.outward]
        return sum(part.numel() * part.element_size() for part in parts)

    def deviation(self, features: Features, fading: Tensor) -> Tensor:
        """Predicted deviation `[corrected, tokens, channels]` float32, keys at position 0.

        features: of all layers of the model. fading: `[tokens]`, from `FeatureBasis.fading`.
        """
        return self._codes(features, fading) @ self.outward.float()

    def apply(self, rope: Rope, features: Features, fading: Tensor, out: SegmentKV) -> None:
        """Add the deviation to KV that was already moved to `out.positions`, in place.

        features: of `out`'s tokens and all layers, from the donor. fading: `[tokens]`, from
        `FeatureBasis.fading`. Computed in float32, rounded once to the dtype of `out`.
        """
        if not self.layers or not len(out):
            return
        addition = self.addition(rope, features, fading, out.positions)
        heads, tokens, dim = out.keys.shape[1:]
        for layers in layer_groups(out.layers, heads * tokens * dim, out.keys.device):
            chosen = slice(layers.start, layers.stop)
            addition.add(layers, out.keys[chosen], out.values[chosen])

    def addition(
        self, rope: Rope, features: Features, fading: Tensor, positions: Tensor
    ) -> Addition:
        """The deviation of a run of tokens, to be added layer by layer.

        positions: `[axes, tokens]` int64, where the tokens stand; the rest as for `apply`.
        """
        return Addition(
            self.layers,
            self._codes(features, fading),
            self.outward.float(),
            rope.rotation(positions, device=features.own.device),
        )

    def _codes(self, features: Features, fading: Tensor) -> Tensor:
        """Low-rank coordinates of the deviation, `[corrected, tokens, rank]` float32."""
        features = features.of_layers(self.layers)
        codes = features.project(self.inward.float(), fading)
        if self.hidden is not None:
            inward, bias, outward = (
                part.float() for part in (self.hidden.inward, self.hidden.bias, self.hidden.outward)
            )
            chosen = features.of_layers(self.hidden_layers)
            active = gelu(chosen.project(inward, fading).add_(bias))
            codes[list(self.hidden_layers)] += torch.bmm(active, outward)
        return codes
