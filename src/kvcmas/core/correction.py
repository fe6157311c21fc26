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
        """Predicted deviation `[corrected, tokens, channels]` float32, keys at position 0."""
        return self._codes(features, fading) @ self.outward.float()

    def apply(self, rope: Rope, features: Features, fading: Tensor, out: SegmentKV) -> None:
        """Add the deviation to KV that was already moved to `out.positions`, in place.

        features: of `out`'s tokens, from the donor. fading: `[tokens]`.
        """
        if not self.layers or not len(out):
            return
        kv_heads, head_dim = out.keys.shape[1], out.keys.shape[3]
        codes = self._codes(features, fading)
        outward = self.outward.float()
        rotation = rope.rotation(out.positions, device=out.keys.device)
        for slot, layer in enumerate(self.layers):
            keys, values = split_channels(codes[slot] @ outward[slot], kv_heads, head_dim)
            turned = rotation.apply(keys[None].contiguous(), layers=[layer])[0]
            out.keys[layer] += turned
            out.values[layer] += values

    def _codes(self, features: Features, fading: Tensor) -> Tensor:
        """Low-rank coordinates of the deviation, `[corrected, tokens, rank]` float32."""
        index = torch.tensor(self.layers, device=features.own.device)
        own = features.own if len(self.layers) == len(features.own) else features.own[index]
        inward = self.inward.float()
        own_dim, window_dim = own.shape[-1], features.window.shape[-1]
        plain, faded, window, fade, one, other = inward.split(
            [own_dim, own_dim, window_dim, 1, 1, inward.shape[1] - 2 * own_dim - window_dim - 2],
            dim=1,
        )
        column = fading[None, :, None]
        codes = torch.baddbmm(one, own, plain)
        codes += features.window @ window
        codes += column * torch.baddbmm(fade, own, faded)
        if features.other is not None and other.shape[1]:
            codes += features.other[index] @ other
        if self.hidden is not None:
            subset = torch.tensor(self.hidden_layers, device=own.device)
            chosen = Features(own[subset], features.window, None)
            if features.other is not None:
                chosen = chosen.with_other(features.other[index[subset]])
            parts = (self.hidden.inward, self.hidden.bias, self.hidden.outward)
            codes[subset] += HiddenMap(*(part.float() for part in parts))(chosen.matrix(fading))
        return codes
