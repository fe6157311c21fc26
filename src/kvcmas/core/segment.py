"""Segment KV: the keys and values of a run of tokens, with the ids and positions they belong to.

Axis order, here and everywhere in kvcmas:

    keys, values   [layers, kv_heads, tokens, head_dim]
    token_ids      [tokens]      int64
    positions      [axes, tokens] int64   one axis for text, three for M-RoPE

Keys are stored as the model computed them: after QK-norm and after rotation at `positions`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcmas.errors import InputError

LAYER, HEAD, TOKEN, CHANNEL = 0, 1, 2, 3


@dataclass(frozen=True, eq=False)
class SegmentKV:
    """KV of a run of tokens.

    Args:
        keys: `[layers, kv_heads, tokens, head_dim]`, rotated at `positions`.
        values: `[layers, kv_heads, tokens, value_dim]`, same dtype and device as `keys`.
        token_ids: `[tokens]` int64.
        positions: `[axes, tokens]` int64.

    Raises:
        InputError: shapes, dtypes or devices do not agree.
    """

    keys: Tensor
    values: Tensor
    token_ids: Tensor
    positions: Tensor

    def __post_init__(self) -> None:
        keys, values = self.keys, self.values
        if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
            raise InputError(
                "keys and values must be [layers, kv_heads, tokens, dim] and agree in the first "
                f"three axes, got {tuple(keys.shape)} and {tuple(values.shape)}"
            )
        if self.token_ids.shape != (keys.shape[TOKEN],):
            raise InputError(
                f"{keys.shape[TOKEN]} tokens of KV need as many token ids, "
                f"got shape {tuple(self.token_ids.shape)}"
            )
        if self.positions.ndim != 2 or self.positions.shape[1] != keys.shape[TOKEN]:
            raise InputError(
                f"positions must be [axes, {keys.shape[TOKEN]}], got {tuple(self.positions.shape)}"
            )
        if keys.dtype != values.dtype or keys.device != values.device:
            raise InputError(
                f"keys are {keys.dtype} on {keys.device}, values {values.dtype} on "
                f"{values.device}; both must be the same"
            )

    def __len__(self) -> int:
        return self.keys.shape[TOKEN]

    @property
    def layers(self) -> int:
        """Layers of the model that this KV holds."""
        return self.keys.shape[LAYER]

    @property
    def nbytes(self) -> int:
        """Bytes that the tensors of this segment occupy."""
        tensors = (self.keys, self.values, self.token_ids, self.positions)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def tokens(self) -> Any:
        """Token ids on the CPU: a numpy array, `[tokens]` int64."""
        return self.token_ids.cpu().numpy()

    def slice(self, start: int, stop: int) -> SegmentKV:
        """Tokens `[start, stop)` as views on the same memory.

        Raises:
            InputError: the range does not lie in `[0, tokens]`.
        """
        if not 0 <= start <= stop <= len(self):
            raise InputError(f"slice [{start}, {stop}) of a segment of {len(self)} tokens")
        return SegmentKV(
            self.keys[:, :, start:stop],
            self.values[:, :, start:stop],
            self.token_ids[start:stop],
            self.positions[:, start:stop],
        )

    def clone(self) -> SegmentKV:
        """A copy that shares no memory with this one."""
        return SegmentKV(
            self.keys.clone(memory_format=torch.contiguous_format),
            self.values.clone(memory_format=torch.contiguous_format),
            self.token_ids.clone(),
            self.positions.clone(),
        )
