"""One rotation of keys, prepared once and applied to any layers.

A key at position p holds, in each pair of channels, a vector turned by `p * frequency`. Turning
it by `shift * frequency` more gives the key at `p + shift`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from kvcmas.core.layers import block_elements
from kvcmas.core.rope.families import Layout
from kvcmas.core.rope.tables import RopeTable
from kvcmas.core.segment import TOKEN
from kvcmas.errors import InputError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """What one table does in a rotation.

    Args:
        layout: which channels form a pair.
        cos: float32 `[2 * pairs]`, or `[tokens, 2 * pairs]` where tokens turn by different
            angles; the cosines twice in a row. For the interleaved layout complex64 `[pairs]` or
            `[tokens, pairs]`, cosine and sine together.
        sin: float32 `[pairs]` or `[tokens, pairs]`; not used for the interleaved layout.
    """

    layout: Layout
    cos: Tensor
    sin: Tensor

    @classmethod
    def of(
        cls,
        table: RopeTable,
        shift: int | Tensor,
        positions: Tensor | None,
        device: torch.device | None,
    ) -> Turn:
        """The turn by `shift` (int, or int64 `[axes]` or `[axes, tokens]`).

        Without `positions` (int64 `[axes, tokens]`) the angle is `shift * frequency`. With them
        it is the difference of the two angles as the model rounds them: a float32 product, off
        by up to 2^-24 of its size, which is 1e-3 of a radian at position 20000.
        """
        frequencies = torch.tensor(table.frequencies, dtype=torch.float32, device=device)
        axes = torch.tensor(table.axes, dtype=torch.int64, device=device)
        if isinstance(shift, Tensor):
            shift = _by_pair(shift, axes)
        if positions is None:
            angle = shift * frequencies.double()
        else:
            old = _by_pair(positions, axes)
            new = (old + shift).float() * frequencies
            angle = new.double() - (old.float() * frequencies).double()
        cos, sin = angle.cos().float(), angle.sin().float()
        if table.layout is Layout.INTERLEAVED:
            return cls(table.layout, torch.complex(cos, sin), sin)
        return cls(table.layout, torch.cat((cos, cos), -1), sin)

    @property
    def pairs(self) -> int:
        """Number of pairs of channels that turn."""
        return self.sin.shape[-1]

    @property
    def count(self) -> int | None:
        """Number of tokens it is for, None if all tokens turn alike."""
        return self.sin.shape[0] if self.sin.ndim > 1 else None

    def to(self, device: torch.device) -> Turn:
        """The same turn with its tables on `device`."""
        return Turn(self.layout, self.cos.to(device), self.sin.to(device))

    def tokens(self, start: int, stop: int) -> Turn:
        """The turn of the tokens `[start, stop)`."""
        if self.count is None:
            return self
        return Turn(self.layout, self.cos[start:stop], self.sin[start:stop])

    def apply(self, keys: Tensor, out: Tensor) -> None:
        """Write the turned `keys` (`[..., tokens, channels]`, float32 or float64) to `out`.

        `out` has the shape of `keys` and must not be the same memory.
        """
        half = self.pairs
        rotated, target = keys[..., : 2 * half], out[..., : 2 * half]
        if out.shape[-1] > 2 * half:
            out[..., 2 * half :].copy_(keys[..., 2 * half :])
        if self.layout is Layout.INTERLEAVED:
            plane = rotated.reshape(*rotated.shape[:-1], half, 2).contiguous()
            turned = torch.view_as_complex(plane) * self.cos
            target.copy_(torch.view_as_real(turned).flatten(-2))
            return
        torch.mul(rotated, self.cos, out=target)
        target[..., :half].addcmul_(rotated[..., half:], self.sin, value=-1)
        target[..., half:].addcmul_(rotated[..., :half], self.sin)


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Turns keys of any layers of a model by angles that were computed once.

    Args:
        turns: one per table of the model.
        layers: for each layer of the model the index into `turns`, None where keys stay as they
            are.
    """

    turns: tuple[Turn, ...]
    layers: tuple[int | None, ...]

    def apply(
        self, keys: Tensor, *, layers: Sequence[int] | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Turn keys, computing in float32 and rounding once to the dtype of `keys`.

        Args:
            keys: `[layers, kv_heads, tokens, head_dim]`; float32, bfloat16, float16, or float64
                (then computed in float64 from float32 cosines, as a float64 model does).
            layers: the model's layers that `keys` holds, in order; all of them by default. An
                engine that moves layer by layer passes `[layer]`.
            out: where to write; same shape, dtype and device. `keys` itself turns them in place;
                it must not overlap `keys` in any other way.

        Returns:
            `out`, or a new tensor that shares no memory with `keys`.

        Raises:
            InputError: shapes, dtypes or layers do not fit (quantised keys among them).
        """
        chosen = range(len(self.layers)) if layers is None else layers
        self._check(keys, chosen, out)
        if out is None:
            out = torch.empty_like(keys, memory_format=torch.contiguous_format)
        start = 0
        for index, group in groupby(self.layers[layer] for layer in chosen):
            stop = start + sum(1 for _ in group)
            source, target = keys[start:stop], out[start:stop]
            if index is not None:
                _apply(self.turns[index].to(keys.device), source, target)
            elif out is not keys:
                target.copy_(source)
            start = stop
        return out

    def _check(self, keys: Tensor, chosen: Sequence[int], out: Tensor | None) -> None:
        if keys.dtype not in _DTYPES:
            raise InputError(
                f"keys of {keys.dtype} cannot be rotated as stored; dequantise them to float32, "
                "bfloat16 or float16 first and quantise the result again"
            )
        if keys.ndim != 4 or keys.shape[0] != len(chosen):
            raise InputError(
                f"keys must be [layers, kv_heads, tokens, head_dim] with {len(chosen)} layers, "
                f"got {tuple(keys.shape)}; name the layers they belong to with `layers`"
            )
        wrong = [layer for layer in chosen if not 0 <= layer < len(self.layers)]
        if wrong:
            raise InputError(f"layers {wrong} of a model with {len(self.layers)} layers")
        for index in {self.layers[layer] for layer in chosen}:
            if index is None:
                continue
            turn = self.turns[index]
            if turn.count not in (None, keys.shape[TOKEN]):
                raise InputError(f"{keys.shape[TOKEN]} keys, but angles for {turn.count} tokens")
            if 2 * turn.pairs > keys.shape[-1]:
                raise InputError(f"{2 * turn.pairs} channels rotate, keys have {keys.shape[-1]}")
        if out is not None and (out.shape, out.dtype, out.device) != (
            keys.shape,
            keys.dtype,
            keys.device,
        ):
            raise InputError(
                f"out is {tuple(out.shape)} {out.dtype} on {out.device}, keys are "
                f"{tuple(keys.shape)} {keys.dtype} on {keys.device}; they must be the same"
            )


def _by_pair(positions: Tensor, axes: Tensor) -> Tensor:
    """`[axes]` to `[pairs]`, or `[axes, tokens]` to `[tokens, pairs]`, contiguous."""
    return positions.to(axes.device).movedim(0, -1)[..., axes]


def _apply(turn: Turn, keys: Tensor, out: Tensor) -> None:
    wide = keys.dtype in (torch.float32, torch.float64)
    in_place = out.data_ptr() == keys.data_ptr()
    for layers, start, stop in _blocks(keys.shape, block_elements(keys.device)):
        source, target = keys[layers, :, start:stop], out[layers, :, start:stop]
        part = turn.tokens(start, stop)
        if wide:
            part.apply(source.clone() if in_place else source, target)
        else:
            turned = torch.empty_like(source, dtype=torch.float32)
            part.apply(source.float(), turned)
            target.copy_(turned)


def _blocks(shape: Sequence[int], elements: int) -> Iterator[tuple[slice, int, int]]:
    """Tiles of at most `elements` elements: whole layers, or tokens of one layer."""
    layers, heads, tokens, channels = shape
    per_token = heads * channels
    width = max(1, min(tokens, elements // per_token))
    height = max(1, elements // (per_token * width)) if width == tokens else 1
    for layer in range(0, layers, height):
        for start in range(0, tokens, width):
            yield slice(layer, layer + height), start, min(start + width, tokens)
