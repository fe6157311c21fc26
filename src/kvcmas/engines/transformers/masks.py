"""Attention masks for tokens that do not stand next to each other.

Index and position are the same number in a `PlanCache`, so a token at position `p` attends to
every index `<= p` (and `> p - window` in a sliding-window layer), wherever the tokens of the pass
stand. A pass without holes needs no mask of ours: the model's own causal path is exact, and bit
by bit what a run without kvcmas does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvcmas.errors import UnsupportedModelError

FULL, SLIDING = "full_attention", "sliding_attention"

Mask = Tensor | dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class MaskBuilder:
    """Builds what a model's forward accepts as `attention_mask`.

    layer_types: the model takes a dict with one mask for each of these; empty when it takes one
        tensor for all layers.
    window: tokens that a sliding-window layer sees, itself included; `None` without such layers.
    additive: eager attention adds the mask to its scores, sdpa takes booleans.
    """

    layer_types: tuple[str, ...]
    window: int | None
    additive: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, config: PreTrainedConfig, dtype: torch.dtype) -> MaskBuilder:
        """The builder for a (text) configuration.

        Raises:
            UnsupportedModelError: an attention implementation or a kind of layer that no mask
                by position can serve.
        """
        # The attribute is where transformers keeps the choice; it has no public accessor.
        attention: str | None = getattr(config, "_attn_implementation", None)
        if attention not in ("eager", "sdpa"):
            raise UnsupportedModelError(
                f"attention implementation {attention!r} cannot compute tokens with holes between "
                'them; load the model with attn_implementation="sdpa" (or "eager")'
            )
        kinds: Any = getattr(config, "layer_types", None)
        layer_types = tuple(sorted(set(kinds))) if kinds else ()
        unknown = [kind for kind in layer_types if kind not in (FULL, SLIDING)]
        if getattr(config, "attention_chunk_size", None) is not None and not layer_types:
            unknown = ["chunked_attention"]
        if unknown:
            raise UnsupportedModelError(
                f"layers of kind {', '.join(unknown)} are not supported, only {FULL} and {SLIDING}"
            )
        window: int | None = getattr(config, "sliding_window", None)
        if layer_types and SLIDING not in layer_types:
            window = None
        elif SLIDING in layer_types and window is None:
            raise UnsupportedModelError(f"layers of kind {SLIDING} need a sliding_window")
        return cls(layer_types, window, attention == "eager", dtype)

    def build(self, positions: Tensor, filled: int) -> Mask:
        """The mask of a pass with holes.

        Args:
            positions: `[tokens]` int64, of the computed tokens.
            filled: number of indices in the cache that hold KV.

        Returns:
            `[1, 1, tokens, filled]`, bool (true attends) or additive in the model's dtype; a dict
            of them by layer type for models that ask for one.
        """
        index = torch.arange(filled, device=positions.device)
        query = positions[:, None]
        causal = index <= query
        sliding = causal if self.window is None else causal & (index > query - self.window)
        if not self.layer_types:
            return self._finish(sliding)
        masks = {FULL: causal, SLIDING: sliding}
        return {kind: self._finish(masks[kind]) for kind in self.layer_types}

    def _finish(self, mask: Tensor) -> Tensor:
        mask = mask[None, None]
        if not self.additive:
            return mask
        # The smallest finite number, as transformers' own eager masks have it: minus infinity
        # would make a fully masked row NaN.
        lowest = torch.finfo(self.dtype).min
        zeros = torch.zeros((), dtype=self.dtype, device=mask.device)
        return torch.where(mask, zeros, lowest)
