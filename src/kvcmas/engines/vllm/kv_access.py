"""Reads and writes vLLM's paged KV cache by position, whatever the attention backend's layout."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from kvcmas.core.segment import TOKEN
from kvcmas.engines.vllm.kv_layout import find_layout
from kvcmas.errors import InputError, UnsupportedEngineError

_PLAIN_DTYPES = ("auto", "float16", "bfloat16", "float32")
_WRITE_PARAMETERS = ("layer", "key", "value", "kv_cache", "slot_mapping")


class KVAccess:
    """The KV cache of one rank.

    Build it before the first step: the backend is tried out, on a small cache of its own and then
    on the last blocks of every layer, which are restored.

    Args:
        kv_caches: by layer name, as vLLM registers them with a connector; any layout.
        layers: by layer name, vLLM's attention layers.
        block_size: tokens in a block, as the scheduler counts them.
        num_blocks: blocks in each layer's cache, as the scheduler counts them.

    Attributes:
        layers, kv_heads, head_dim: of this rank; `head_dim` of keys and of values.
        dtype, device: of the cache.
        bytes_per_token: keys and values of one token in all layers.

    Raises:
        UnsupportedEngineError: a quantised cache, latent attention, layers that share KV or
            differ in shape, or a layout that is not understood.
    """

    def __init__(
        self,
        kv_caches: Mapping[str, Tensor],
        layers: Mapping[str, Any],
        block_size: int,
        num_blocks: int,
    ) -> None:
        names = sorted(kv_caches, key=_layer_number)
        if not names:
            raise UnsupportedEngineError(
                "vLLM registered no KV cache; kvcmas needs a model with attention layers"
            )
        for name in names:
            _check_layer(name, layers.get(name), kv_caches[name])
        self._caches = [kv_caches[name] for name in names]
        self._layers = [layers[name] for name in names]
        _check_alike(names, self._layers, self._caches)
        self._block_size = block_size
        self._num_blocks = num_blocks
        first = self._caches[0]
        self.layers = len(names)
        self.kv_heads = int(self._layers[0].num_kv_heads)
        self.head_dim = int(self._layers[0].head_size)
        self.dtype, self.device = first.dtype, first.device
        self.bytes_per_token = 2 * self.layers * self.kv_heads * self.head_dim * first.itemsize
        with torch.inference_mode():
            self._layout = find_layout(
                partial(_write, self._layers[0]),
                first,
                block_size=block_size,
                num_blocks=num_blocks,
                heads=self.kv_heads,
                dim=self.head_dim,
            )
        self._verify(names)

    def read(self, block_ids: Sequence[int], start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Copy the KV of positions `[start, stop)` out of a request's blocks.

        Args:
            block_ids: the request's blocks; position p lies in `block_ids[p // block_size]`.

        Returns:
            Keys and values `[layers, kv_heads, stop - start, head_dim]`, contiguous, in the
            cache's dtype, on its device.

        Raises:
            InputError: the positions or blocks do not exist.
        """
        ids, first = self._blocks_of(block_ids, start, stop)
        # Also inside vLLM's inference mode the result is to be an ordinary tensor.
        with torch.inference_mode(False), torch.no_grad():
            shape = (self.layers, self.kv_heads, stop - start, self.head_dim)
            keys = torch.empty(shape, dtype=self.dtype, device=self.device)
            values = torch.empty_like(keys)
            if start == stop:
                return keys, values
            blocks = self._layout.blocks(torch.tensor(ids, device=self.device))
            begin, end = start - first, stop - first
            for layer, cache in enumerate(self._caches):
                layer_keys, layer_values = self._layout.read(cache, blocks)
                keys[layer] = layer_keys[:, begin:end]
                values[layer] = layer_values[:, begin:end]
            return keys, values

    def write(self, block_ids: Sequence[int], start: int, keys: Tensor, values: Tensor) -> None:
        """Put KV of all layers at positions from `start` on.

        Args:
            block_ids: as in `read`.
            keys, values: `[layers, kv_heads, tokens, head_dim]`, as for `put`.

        Raises:
            InputError: other shapes, or positions or blocks that do not exist.
        """
        tokens = keys.shape[TOKEN] if keys.ndim > TOKEN else 0
        slots = self.slots(block_ids, start, start + tokens)
        self.put(slots, range(self.layers), keys, values)

    def slots(self, block_ids: Sequence[int], start: int, stop: int) -> Tensor:
        """Where positions `[start, stop)` of a request lie, int64 `[stop - start]`.

        Raises:
            InputError: the positions or blocks do not exist.
        """
        ids, first = self._blocks_of(block_ids, start, stop)
        with torch.inference_mode():
            positions = torch.arange(start - first, stop - first, device=self.device)
            blocks = torch.tensor(ids, device=self.device, dtype=torch.int64)
            return (
                blocks[positions // self._block_size] * self._block_size
                + positions % self._block_size
            )

    def put(self, slots: Tensor, layers: range, keys: Tensor, values: Tensor) -> None:
        """Write KV to slots, with the backend's own operation.

        Args:
            slots: `[tokens]`, as `slots` gives them.
            layers: which ones `keys` and `values` hold.
            keys, values: `[len(layers), kv_heads, tokens, head_dim]`; converted to the cache's
                dtype and device where they differ.

        Raises:
            InputError: other shapes.
        """
        expected = (len(layers), self.kv_heads, slots.shape[0], self.head_dim)
        if keys.shape != expected or values.shape != expected:
            raise InputError(
                f"keys and values must be [{len(layers)} layers, {self.kv_heads} KV heads, tokens, "
                f"{self.head_dim}] for {slots.shape[0]} slots, got {tuple(keys.shape)} and "
                f"{tuple(values.shape)}"
            )
        if not slots.shape[0]:
            return
        with torch.inference_mode():
            for index, layer in enumerate(layers):
                _write(
                    self._layers[layer],
                    self._by_token(keys[index]),
                    self._by_token(values[index]),
                    self._caches[layer],
                    slots,
                )

    def _by_token(self, states: Tensor) -> Tensor:
        """`[heads, tokens, dim]` as the backend takes it, `[tokens, heads, dim]`."""
        return states.transpose(0, 1).to(self.device, self.dtype).contiguous()

    def _blocks_of(self, block_ids: Sequence[int], start: int, stop: int) -> tuple[list[int], int]:
        """The blocks that hold `[start, stop)`, and the first position in them."""
        size = self._block_size
        if not 0 <= start <= stop <= len(block_ids) * size:
            raise InputError(
                f"positions [{start}, {stop}) do not lie in {len(block_ids)} blocks of {size} "
                "tokens; give all blocks of the request, and a range in them"
            )
        begin = start // size
        ids = list(block_ids[begin : -(-stop // size)])
        unknown = next((i for i in ids if not 0 <= i < self._num_blocks), None)
        if unknown is not None:
            raise InputError(f"block {unknown} does not exist; the cache has {self._num_blocks}")
        return ids, begin * size

    def _verify(self, names: Sequence[str]) -> None:
        """Write and read back random KV in the last blocks of every layer, then restore them."""
        ids = [self._num_blocks - 1, max(0, self._num_blocks - 3)][: self._num_blocks]
        size = self._block_size * len(ids)
        generator = torch.Generator().manual_seed(0)
        shape = (2, self.layers, self.kv_heads, size, self.head_dim)
        sent = torch.randn(shape, generator=generator).to(self.device, self.dtype)
        with torch.inference_mode():
            blocks = self._layout.blocks(torch.tensor(ids, device=self.device))
            axis = self._layout.axis
            saved = [cache.index_select(axis, blocks) for cache in self._caches]
            try:
                self.write(ids, 0, sent[0], sent[1])
                got = self.read(ids, 0, size)
            finally:
                for cache, kept in zip(self._caches, saved, strict=True):
                    cache.index_copy_(axis, blocks, kept)
        for index, name in enumerate(names):
            for what, given, back in zip(("keys", "values"), sent, got, strict=True):
                if not torch.equal(given[index], back[index]):
                    raise UnsupportedEngineError(
                        f"the layout of the KV cache is not understood: {what} that were written "
                        f"to layer {name} are not read back the same. Choose another attention "
                        "backend, or run vLLM without kvcmas"
                    )


def _write(layer: Any, keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
    layer.impl.do_kv_cache_update(layer, keys, values, cache, slots)


def _layer_number(name: str) -> tuple[int, ...]:
    """`model.layers.11.self_attn.attn` as `(11,)`: vLLM does not register layers in order."""
    return tuple(int(part) for part in re.findall(r"(?<![^.])\d+(?![^.])", name))


def _check_layer(name: str, layer: Any, cache: Any) -> None:
    """Refuse a layer whose KV cannot be moved, by name."""
    if layer is None:
        raise UnsupportedEngineError(f"vLLM registered a KV cache of {name}, but no such layer")
    dtype = str(getattr(layer, "kv_cache_dtype", "auto"))
    plain = isinstance(cache, Tensor) and cache.is_floating_point() and cache.itemsize > 1
    if dtype not in _PLAIN_DTYPES or not plain:
        raise UnsupportedEngineError(
            f"{name} keeps its KV as {dtype}, which kvcmas cannot move; start vLLM with "
            "--kv-cache-dtype auto"
        )
    write = getattr(getattr(layer, "impl", None), "do_kv_cache_update", None)
    if write is None or not _takes_keys_and_values(write):
        raise UnsupportedEngineError(
            f"{name} ({type(layer).__name__}) does not store a key and a value for every head and "
            "token (latent attention or a state), so its KV cannot be moved"
        )
    if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
        raise UnsupportedEngineError(
            f"{name} uses the KV of {layer.kv_sharing_target_layer_name}; kvcmas needs a model "
            "whose layers have KV of their own"
        )
    if layer.head_size != getattr(layer, "head_size_v", layer.head_size):
        raise UnsupportedEngineError(
            f"{name} has keys of {layer.head_size} and values of {layer.head_size_v} numbers for "
            "a head; kvcmas needs both alike"
        )
    bound = getattr(layer, "kv_cache", cache)
    if bound is not cache and not _same_memory(bound, cache):
        raise UnsupportedEngineError(
            f"{name} reads its KV cache in other blocks than vLLM registered. Set --block-size to "
            "one that the attention backend takes as it is"
        )


def _check_alike(names: Sequence[str], layers: Sequence[Any], caches: Sequence[Tensor]) -> None:
    """Refuse layers that differ in what one tensor of all layers needs to be alike."""
    kinds = [
        (layer.num_kv_heads, layer.head_size, tuple(cache.shape), cache.dtype, cache.device)
        for layer, cache in zip(layers, caches, strict=True)
    ]
    for name, kind in zip(names, kinds, strict=True):
        if kind != kinds[0]:
            raise UnsupportedEngineError(
                f"the layers' KV differs: {names[0]} has {kinds[0][0]} heads of {kinds[0][1]} in "
                f"{kinds[0][2]}, {kinds[0][3]}; {name} has {kind[0]} of {kind[1]} in {kind[2]}, "
                f"{kind[3]}. kvcmas needs them alike"
            )


def _takes_keys_and_values(write: Any) -> bool:
    """Whether it is the write operation of ordinary attention; that of latent attention differs."""
    parameters = list(signature(write).parameters.values())
    if any(parameter.kind is Parameter.VAR_POSITIONAL for parameter in parameters):
        return True
    return tuple(parameter.name for parameter in parameters) == _WRITE_PARAMETERS


def _same_memory(one: Any, other: Tensor) -> bool:
    return (
        isinstance(one, Tensor)
        and one.data_ptr() == other.data_ptr()
        and (one.shape, one.stride()) == (other.shape, other.stride())
    )
