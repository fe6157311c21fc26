"""Donor KV written to where the reader needs it: keys moved, values as they are."""

from __future__ import annotations

from torch import Tensor

from kvcmas.core.rope import Rope
from kvcmas.core.rope.rotation import Rotation
from kvcmas.core.segment import SegmentKV


class Move:
    """A donor's tokens on their way to a reader's positions, any layers at a time.

    Keys are turned with the model's own rounding, so that they agree with recomputation to 1e-6
    of their norm; at an unchanged position they are copied bit by bit.

    Args:
        donor: KV as computed (a moved copy would add up errors).
        offset: the first of its tokens.
        positions: `[axes, tokens]` int64, where they stand at the reader.

    Raises:
        InputError: the donor does not hold these tokens.
    """

    def __init__(self, rope: Rope, donor: SegmentKV, offset: int, positions: Tensor) -> None:
        self._source = donor.slice(offset, offset + positions.shape[1])
        self._rotation = _rotation(rope, self._source.positions, positions)

    def fill(self, layers: range, keys: Tensor, values: Tensor) -> None:
        """Write these layers.

        keys, values: `[len(layers), kv_heads, tokens, dim]`, of the donor's dtype and device.

        Raises:
            InputError: they differ from the donor in shape, dtype or device.
        """
        chosen = slice(layers.start, layers.stop)
        values.copy_(self._source.values[chosen])
        self._rotation.apply(self._source.keys[chosen], layers=layers, out=keys)


def fill_moved(rope: Rope, donor: SegmentKV, offset: int, out: SegmentKV) -> None:
    """Write the donor's tokens `[offset, offset + len(out))` into `out.keys` and `out.values`.

    Args:
        donor, offset: as for `Move`.
        out: tokens of the engine's buffers, with their positions.

    Raises:
        InputError: the donor does not hold these tokens, or differs in shape, dtype or device.
    """
    move = Move(rope, donor, offset, out.positions)
    move.fill(range(out.layers), out.keys, out.values)


def _rotation(rope: Rope, old: Tensor, new: Tensor) -> Rotation:
    shift = new - old
    first = shift[:, :1]
    if not bool((shift == first).all()):
        return rope.rotation(shift, positions=old, device=old.device)
    # One number per axis: spares the look-up of a shift for every token.
    steps = set(first[:, 0].tolist())
    if len(steps) == 1:
        return rope.rotation(steps.pop(), positions=old, device=old.device)
    return rope.rotation(first[:, 0], positions=old, device=old.device)
