"""What a reader gets of a donor: its KV, keys moved, and the pair's correction added."""

from __future__ import annotations

from dataclasses import dataclass

from kvcmas.core.correction import Correction
from kvcmas.core.features import FeatureBasis, Features
from kvcmas.core.rope import Rope
from kvcmas.core.segment import SegmentKV
from kvcmas.methods.kvcmas.observation import donor_channels
from kvcmas.methods.move import fill_moved


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


def fill_corrected(
    rope: Rope, donor: SegmentKV, offset: int, out: SegmentKV, added: Added, first: int = 0
) -> None:
    """Write the donor's tokens `[offset, offset + len(out))` into `out.keys` and `out.values`.

    Args:
        donor: KV as computed.
        out: tokens of the engine's buffers, with their positions in the reader's prompt.
        first: index of the first of them in `added.features`.

    Raises:
        InputError: the donor does not hold these tokens, or differs in shape, dtype or device.
    """
    fill_moved(rope, donor, offset, out)
    if added.features is None:
        features = added.basis.features(*donor_channels(rope, donor, offset, len(out)))
    else:
        features = added.features.slice(first, first + len(out))
    fading = added.basis.fading(out.positions[0] - added.origin)
    added.correction.apply(rope, features, fading, out)
