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
SHORT = 128  # a head that disagrees costs more than reusing a run of fewer tokens saves


def rank_donors(book: CorrectionBook, run: Run, reader: str, base: str) -> list[Donor]:
    """The run's donors, best first.

    The reader's own KV comes first. With `base="previous"` then the newest. Otherwise the exact
    ones before the others; those whose pair has a correction before those without; of several
    with one, the learned nearest; else the oldest, which is the first agent's. That one is there
    whenever a later one is, so corrections learned for it serve every context.
    """
    if base == "previous":
        return sorted(run.sources, key=lambda donor: not donor.own)

    def rank(donor: Donor) -> tuple[bool, bool, float, int]:
        agent = donor.info.agent
        distance = book.distances.between(agent, reader)
        corrected = book.correction(Pair(agent, reader)) is not None
        known = distance if corrected and distance is not None else inf
        return (not donor.own, not donor.info.exact, known, donor.info.created)

    return sorted(run.sources, key=rank)


def head_of(dial: Dial, length: int) -> Head:
    """The exact head of a run of `length` tokens; short runs have shorter ones.

    Without a head nothing is measured, so there is no tolerance either. A short run whose head
    disagrees is computed at once: growing its head would cost a pass for few tokens.
    """
    head = min(dial.head, max(_SHORTEST_HEAD, length // 4), length)
    return Head(
        length=head,
        chunk=_CHUNK,
        limit=min(dial.limit, length) if length >= SHORT else head,
        tolerance=dial.tolerance if head else None,
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
