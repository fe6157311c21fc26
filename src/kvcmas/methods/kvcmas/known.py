"""What a tenant's book and the derived data of its donors tell the planner of one request."""

from __future__ import annotations

import torch

from kvcmas.core.correction import Correction
from kvcmas.core.features import Features
from kvcmas.core.landmarks import pick
from kvcmas.methods.donors import Donor
from kvcmas.methods.kvcmas.book import CorrectionBook
from kvcmas.methods.kvcmas.chosen import Chosen
from kvcmas.methods.kvcmas.derived import Derived, Second
from kvcmas.methods.kvcmas.filling import Added
from kvcmas.methods.kvcmas.pair import Pair


class BookKnowledge:
    """`Knowledge` of one request, and the corrections that its plan promises.

    Corrections and second readers are looked up once, so that another request that learns
    meanwhile does not part the plan from what is added.
    """

    def __init__(self, book: CorrectionBook, derived: Derived) -> None:
        self._book = book
        self._derived = derived
        self._corrections: dict[Pair, Correction | None] = {}
        self._seconds: dict[tuple[str, int, int], Second | None] = {}

    def seen(self, pair: Pair) -> int:
        """Tokens that were learned from."""
        state = self._book.pairs.get(pair)
        return state.seen if state is not None else 0

    def audited(self, pair: Pair) -> float | None:
        """Measured deviation of whole runs, `None` before the first."""
        state = self._book.pairs.get(pair)
        return state.audited if state is not None else None

    def corrected(self, pair: Pair) -> bool:
        """Whether there is a correction that is better than none."""
        return self._correction(pair) is not None

    def distance(self, donor: str, reader: str) -> float | None:
        """How far two agents are from each other."""
        return self._book.distances.between(donor, reader)

    def second(self, donor: Donor, length: int) -> str | None:
        """The second exact reader whose deviation is kept."""
        second = self._second(donor, length)
        return second.agent if second is not None else None

    def landmarks(self, chosen: Chosen, head: int, count: int) -> tuple[int, ...]:
        """Positions at which the largest deviations are expected."""
        state = self._book.pairs.get(chosen.pair.plain)
        if state is None or not state.landmarks.ready:
            return ()
        features = self._features(chosen)
        if features is None:
            return ()
        first, stop = chosen.run.start + head, chosen.run.stop
        distance = torch.arange(first, stop, device=features.window.device) - chosen.origin
        scores = state.landmarks.predict(features.slice(head, len(chosen.run)), distance)
        return tuple(first + index for index in pick(scores, count))

    def added(self, chosen: Chosen) -> Added | None:
        """What is added to the run's donor, `None` where the plan says nothing of it."""
        if not chosen.corrected:
            return None
        basis, features = self._book.basis, self._features(chosen)
        correction = self._correction(chosen.pair)
        if correction is None or basis is None or features is None:
            return None
        if chosen.pair.other:
            second = self._second(chosen.donor, len(chosen.run))
            if second is not None:
                part = second.slice(chosen.donor.offset, chosen.donor.offset + len(chosen.run))
                features = features.with_other(self._book.other_features(chosen.pair, part))
        return Added(correction, basis, chosen.origin, features)

    def _correction(self, pair: Pair) -> Correction | None:
        if pair not in self._corrections:
            book = self._book
            self._corrections[pair] = book.correction(pair) if book.basis is not None else None
        return self._corrections[pair]

    def _second(self, donor: Donor, length: int) -> Second | None:
        key = (donor.segment, donor.offset, length)
        if key not in self._seconds:
            self._seconds[key] = self._derived.second(donor, length)
        return self._seconds[key]

    def _features(self, chosen: Chosen) -> Features | None:
        """Of the run's donor tokens; the donor is pinned."""
        donor = chosen.donor
        features = self._derived.features_of(donor.segment, self._book)
        if features is None:
            return None
        return features.slice(donor.offset, donor.offset + len(chosen.run))
