"""Donor KV written to where the reader needs it: keys moved, values as they are."""

from __future__ import annotations

from kvcmas.core.rope import Rope
from kvcmas.core.segment import SegmentKV


def fill_moved(rope: Rope, donor: SegmentKV, offset: int, out: SegmentKV) -> None:
    """Write the donor's tokens `[offset, offset + len(out))` into `out.keys` and `out.values`.

    Keys are turned to `out.positions` with the model's own rounding, so that they agree with
    recomputation to 1e-6 of their norm; at an unchanged position they are copied bit by bit.

    Args:
        donor: KV as computed (a moved copy would add up errors).
        out: tokens of the engine's buffers, with their positions.

    Raises:
        InputError: the donor does not hold these tokens, or differs in shape, dtype or device.
    """
    source = donor.slice(offset, offset + len(out))
    out.values.copy_(source.values)
    shift = out.positions - source.positions
    first = shift[:, :1]
    if not bool((shift == first).all()):
        rope.move(source.keys, shift, positions=source.positions, out=out.keys)
        return
    # One number per axis: spares the look-up of a shift for every token.
    steps = set(first[:, 0].tolist())
    if steps == {0}:
        out.keys.copy_(source.keys)
    elif len(steps) == 1:
        rope.move(source.keys, steps.pop(), positions=source.positions, out=out.keys)
    else:
        rope.move(source.keys, first[:, 0], positions=source.positions, out=out.keys)
