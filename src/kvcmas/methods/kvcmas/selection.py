"""Which donor a run is taken from, and which of its tokens are computed all the same."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import numpy as np
import torch

from kvcmas.core.features import Features
from kvcmas.core.landmarks import LandmarkModel, pick
from kvcmas.methods.donors import Donor, Run
from kvcmas.methods.kvcmas.book import CorrectionBook, Pair
from kvcmas.methods.kvcmas.config import Dial
from kvcmas.workflow.plan import Head
from kvcmas.workflow.prompt import TokenIds

_CHUNK = 32
_PROBE = 16
_SHORTEST_HEAD = 8


def rank_donors(book: CorrectionBook, run: Run, reader: str, base: str) -> list[Donor]:
    """The run's donors, best first.

    The reader's own KV comes first. With `base="previous"` then the newest; otherwise the exact
    ones before the others, the learned nearest before those of unknown distance.
    """
    if base == "previous":
        return sorted(run.sources, key=lambda donor: not donor.own)

    def rank(donor: Donor) -> tuple[bool, bool, float]:
        distance = book.distances.between(donor.info.agent, reader)
        return (not donor.own, not donor.info.exact, inf if distance is None else distance)

    return sorted(run.sources, key=rank)


def head_of(dial: Dial, length: int) -> Head:
    """The exact head of a run of `length` tokens; short runs have shorter ones."""
    head = min(dial.head, max(_SHORTEST_HEAD, length // 4), length)
    return Head(
        length=head,
        chunk=_CHUNK,
        limit=min(dial.limit, length),
        tolerance=dial.tolerance,
        probe=min(_PROBE, max(head, 1)),
    )


def landmarks_of(
    model: LandmarkModel, features: Features, start: int, origin: int, head: int, share: float
) -> tuple[int, ...]:
    """Positions behind the head that are computed, within the share of the run left by the head.

    features: of the run's donor tokens. start: of the run. origin: end of the role prefix.
    """
    length = len(features)
    count = int(share * length) - head
    if count <= 0 or not model.ready:
        return ()
    distance = torch.arange(start + head, start + length, device=features.window.device) - origin
    scores = model.predict(features.slice(head, length), distance)
    return tuple(start + head + index for index in pick(scores, count))


def origin_of(ids: TokenIds, run: Run, donor_ids: TokenIds, offset: int) -> int:
    """Where the text shared with the donor begins: the run, extended to the left.

    A run found behind the reader's own exact prefix starts in the middle of what is shared.
    """
    reach = min(run.start, offset)
    before = ids[run.start - reach : run.start][::-1] == donor_ids[offset - reach : offset][::-1]
    same = int(np.argmin(before)) if not before.all() else reach
    return run.start - same


def pair_of(donor: str, reader: str, others: Iterable[str]) -> Pair:
    """The pair with the first other exact reader that is neither of them."""
    other = next((name for name in others if name not in (donor, reader)), "")
    return Pair(donor, reader, other)
