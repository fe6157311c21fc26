"""A reader's exact KV beside its donor's, as corrections are learned from it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvcmas.core.channels import to_channels
from kvcmas.core.features import WINDOW, windows_of
from kvcmas.core.lowrank import LowRank
from kvcmas.core.rope import Rope
from kvcmas.core.segment import SegmentKV
from kvcmas.methods.kvcmas.pair import Pair


@dataclass(frozen=True, eq=False)
class Observation:
    """A run of tokens that a reader computed exactly, beside its donor.

    channels, deviation: `[layers, tokens, channels]` float32, the donor's and the difference.
    window: `[tokens, 3 * channels]`. distance: `[tokens]`, from the end of the role prefix.
    other: `[layers, tokens, channels]`, another exact reader's deviation, or `None`.
    whole: these are all the tokens that could have been reused, not the first ones alone.
    """

    pair: Pair
    channels: Tensor
    window: Tensor
    distance: Tensor
    deviation: Tensor
    other: LowRank | None = None
    whole: bool = False

    def __len__(self) -> int:
        return self.channels.shape[1]

    @property
    def finite(self) -> bool:
        """Neither the reader's KV nor the donor's holds an infinite value or none at all."""
        return bool(self.deviation.isfinite().all())


def observation(
    rope: Rope,
    pair: Pair,
    reader: SegmentKV,
    donor: SegmentKV,
    offset: int,
    origin: int,
    whole: bool,
) -> Observation:
    """Put the reader's tokens beside the donor's tokens `[offset, offset + len(reader))`.

    origin: position in the reader's prompt at which the text shared with the donor begins.

    Raises:
        InputError: the donor does not hold these tokens.
    """
    channels, window = donor_channels(rope, donor, offset, len(reader))
    return Observation(
        pair,
        channels,
        window,
        reader.positions[0] - origin,
        to_channels(rope, reader) - channels,
        whole=whole,
    )


def donor_channels(rope: Rope, donor: SegmentKV, offset: int, length: int) -> tuple[Tensor, Tensor]:
    """Channels `[layers, length, channels]` and windows `[length, 3 * channels]` of a part.

    Raises:
        InputError: the donor does not hold these tokens.
    """
    # With what stands to the left, where there is anything, for the layer-0 window.
    lead = min(WINDOW - 1, offset)
    channels = to_channels(rope, donor.slice(offset - lead, offset + length))
    return channels[:, lead:], windows_of(channels[0])[lead:]
