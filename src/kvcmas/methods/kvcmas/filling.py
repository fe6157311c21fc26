"""What a reader gets of a donor: its KV, keys moved, and the pair's correction added."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvcmas.core.addition import Addition
from kvcmas.core.correction import Correction
from kvcmas.core.features import FeatureBasis, Features
from kvcmas.core.layers import layer_groups
from kvcmas.core.rope import Rope
from kvcmas.core.segment import SegmentKV
from kvcmas.methods.kvcmas.observation import donor_channels
from kvcmas.methods.move import Move


@dataclass(frozen=True, eq=False)
class Added:
    """What is added to the moved KV of a run.

    basis: of the features. origin: position at which the text shared with the donor begins.
    features: of the run's donor tokens; `None` computes them from the donor.
    """

    correction: Correction
    basis: FeatureBasis
    origin: int
    features: Features | None = None


class Filling:
    """A donor's tokens as a reader gets them, any layers at a time.

    Args:
        donor, offset, positions: as for `Move`.
        added: what is added to the moved KV, if anything.
        first: index of the first token in `added.features`.

    Raises:
        InputError: the donor does not hold these tokens.
    """

    def __init__(
        self,
        rope: Rope,
        donor: SegmentKV,
        offset: int,
        positions: Tensor,
        added: Added | None,
        first: int = 0,
    ) -> None:
        self._move = Move(rope, donor, offset, positions)
        self._addition: Addition | None = None
        count = positions.shape[1]
        if added is None or not count or not added.correction.layers:
            return
        if added.features is None:
            features = added.basis.features(*donor_channels(rope, donor, offset, count))
        else:
            features = added.features.slice(first, first + count)
        fading = added.basis.fading(positions[0] - added.origin)
        self._addition = added.correction.addition(rope, features, fading, positions)

    def fill(self, layers: range, keys: Tensor, values: Tensor) -> None:
        """Write these layers; see `Move.fill`."""
        self._move.fill(layers, keys, values)
        if self._addition is not None:
            self._addition.add(layers, keys, values)

    def fill_all(self, out: SegmentKV) -> None:
        """Write all layers of a segment."""
        heads, tokens, dim = out.keys.shape[1:]
        for layers in layer_groups(out.layers, heads * tokens * dim, out.keys.device):
            chosen = slice(layers.start, layers.stop)
            self.fill(layers, out.keys[chosen], out.values[chosen])


def fill_corrected(
    rope: Rope, donor: SegmentKV, offset: int, out: SegmentKV, added: Added, first: int = 0
) -> None:
    """Write the donor's tokens `[offset, offset + len(out))` into `out.keys` and `out.values`.

    Args:
        out: tokens of the engine's buffers, with their positions in the reader's prompt.
        donor, offset, added, first: as for `Filling`.

    Raises:
        InputError: the donor does not hold these tokens, or differs in shape, dtype or device.
    """
    Filling(rope, donor, offset, out.positions, added, first).fill_all(out)
