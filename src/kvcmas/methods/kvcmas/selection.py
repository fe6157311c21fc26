"""Which donor a run is taken from, and which of its tokens are computed all the same."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import numpy as np

from kvcmas.methods.donors import Donor, Run
from kvcmas.methods.kvcmas.config import Dial
from kvcmas.methods.kvcmas.knowledge import Knowledge
from kvcmas.methods.kvcmas.pair import Pair
from kvcmas.workflow.plan import Head
from kvcmas.workflow.prompt import TokenIds

_CHUNK = 32
_PROBE = 16
_SHORTEST_HEAD = 8
SHORT = 128  # a head that disagrees costs more than reusing a run of fewer tokens saves


def rank_donors(knowledge: Knowledge, run: Run, reader: str, base: str) -> list[Donor]:
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
        distance = knowledge.distance(agent, reader)
        corrected = knowledge.corrected(Pair(agent, reader))
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


def landmark_count(dial: Dial, length: int, head: int) -> int:
    """Tokens behind the head that are computed too: what it leaves of the run's share."""
    return max(0, int(dial.share * length) - head)


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
