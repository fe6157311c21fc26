"""The cache of one request: two buffers that a forward pass scatters into by position.

    index          0        58                        826     839       capacity
                   | role   |  reused span             | task  | generated |
    forward pass     ^^^^^^^^ ^^^^ (head)                ^^^^^^              one pass, any holes

A token's index in the buffers is its position in the prompt, for every layer: also layers with a
sliding window keep all tokens, and the mask makes the window. A pass is announced with `place`,
because the layers themselves are only handed keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvcmas.core.segment import TOKEN
from kvcmas.errors import UnsupportedModelError

Positions = slice | Tensor
"""Where the tokens of a pass stand: a slice, or `[tokens]` int64, ascending."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token's KV looks like in every layer of a model."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class _Placement:
    """Where the tokens of the coming pass stand, shared by the layers of one cache."""

    __slots__ = ("filled", "positions", "start")

    def __init__(self) -> None:
        self.positions: Positions = slice(0, 0)
        self.start = 0
        self.filled = 0


class PlanCacheLayer(CacheLayerMixin):
    """One layer's view on the buffers of a `PlanCache`."""

    is_sliding = False
    is_compileable = False

    def __init__(self, keys: Tensor, values: Tensor, placement: _Placement) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keys, self._values = keys, values
        # Batched views, where code of transformers looks for a layer's tensors.
        self.keys, self.values = keys[None], values[None]
        self.dtype, self.device = keys.dtype, keys.device
        self._placement = placement
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the buffers exist."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Scatter `[1, kv_heads, tokens, head_dim]` and return views of everything filled.

        Raises:
            UnsupportedModelError: the layer's KV has another shape than the rest of the model.
        """
        keys, values, placement = self._keys, self._values, self._placement
        if key_states.dtype != keys.dtype or not (
            _fits(key_states, keys) and _fits(value_states, values)
        ):
            raise UnsupportedModelError(
                f"a layer produced keys {tuple(key_states.shape)} and values "
                f"{tuple(value_states.shape)} in {key_states.dtype}, but the cache holds "
                f"{keys.shape[0]} heads of {keys.shape[2]} in {keys.dtype} for every layer; "
                "models whose layers differ in shape cannot be served"
            )
        where = placement.positions
        if isinstance(where, slice):
            keys[:, where].copy_(key_states[0])
            values[:, where].copy_(value_states[0])
        else:
            keys.index_copy_(1, where, key_states[0])
            values.index_copy_(1, where, value_states[0])
        filled = placement.filled
        return keys[None, :, :filled], values[None, :, :filled]

    def get_seq_length(self) -> int:
        """Tokens in front of the coming pass."""
        return self._placement.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what the coming pass attends to."""
        return self._placement.filled, 0

    def get_max_length(self) -> int:
        """Tokens that the buffers hold."""
        return int(self._keys.shape[1])


def _fits(states: Tensor, buffer: Tensor) -> bool:
    return (
        states.shape[0] == 1
        and states.shape[1] == buffer.shape[0]
        and states.shape[-1] == buffer.shape[-1]
    )


class PlanCache(Cache):
    """KV of one request, `[layers, kv_heads, capacity, head_dim]` for keys and for values.

    The buffers start uninitialised: whoever runs a pass has filled, or fills in that pass, every
    index below `filled`.
    """

    def __init__(self, shape: KVShape, capacity: int) -> None:
        size = (shape.layers, shape.kv_heads, capacity, shape.head_dim)
        self.key_buffer = torch.empty(size, dtype=shape.dtype, device=shape.device)
        self.value_buffer = torch.empty(size, dtype=shape.dtype, device=shape.device)
        self._placement = _Placement()
        super().__init__(
            layers=[
                PlanCacheLayer(keys, values, self._placement)
                for keys, values in zip(self.key_buffer, self.value_buffer, strict=True)
            ]
        )

    @property
    def capacity(self) -> int:
        """Tokens that the buffers hold."""
        return self.key_buffer.shape[TOKEN]

    def place(self, positions: Positions, start: int, filled: int) -> None:
        """Announce a pass.

        Args:
            positions: where its tokens stand.
            start: the first of these positions.
            filled: every index below it holds KV once the pass is done.
        """
        placement = self._placement
        placement.positions, placement.start, placement.filled = positions, start, filled
