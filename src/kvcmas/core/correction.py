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

from kvcmas.core.channels import split_channels
from kvcmas.core.features import Features
from kvcmas.core.hidden import HiddenMap
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
        heads, dim = out.keys.shape[1], out.keys.shape[3]
        codes = self._codes(features, fading)[:, None].expand(-1, heads, -1, -1)
        to_keys, to_values = split_channels(self.outward.float(), heads, dim)
        rotation = rope.rotation(out.positions, device=out.keys.device)
        # Layer by layer in the same two buffers: on a CPU they stay in the cache.
        bare = torch.empty(out.keys.shape[1:], dtype=torch.float32, device=out.keys.device)
        turned = torch.empty_like(bare)[None]
        for slot, layer in enumerate(self.layers):
            torch.bmm(codes[slot], to_keys[slot], out=bare)
            rotation.apply(bare[None], layers=[layer], out=turned)
            out.keys[layer] += turned[0]
            if out.values.dtype == torch.float32:
                out.values[layer].baddbmm_(codes[slot], to_values[slot])
            else:
                out.values[layer] += torch.bmm(codes[slot], to_values[slot])

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
