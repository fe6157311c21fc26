"""Which of the things that were learned are news for the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcmas.core.correction import Correction
from kvcmas.engines.vllm.known import KnownDonors, Owner
from kvcmas.engines.vllm.messages import Facts, PairName, Scores
from kvcmas.engines.vllm.outbox import Outbox
from kvcmas.methods.kvcmas.book import CorrectionBook, PairState
from kvcmas.methods.kvcmas.pair import Pair

_GROWTH = 2.0  # landmarks move little while a pair has not seen this many times as much


@dataclass(slots=True)
class _Told:
    """What was said of a pair. fits: of its correction. scored: tokens that scores come from."""

    facts: Facts | None = None
    correction: Correction | None = None
    fits: int = 0
    scored: int = 0


@dataclass(slots=True)
class Teller:
    """Puts facts and scores into the outbox when they are new. For one thread."""

    known: KnownDonors
    outbox: Outbox
    landmarks: bool
    _told: dict[PairName, _Told] = field(default_factory=dict)

    def tell(self, tenant: str, book: CorrectionBook) -> None:
        """Facts of pairs that changed; scores of their donors where these have become others."""
        for pair, state in _plain_pairs(book):
            name = PairName(tenant, pair.donor, pair.reader)
            told = self._told.setdefault(name, _Told())
            refitted = self._tell_facts(name, told, state, book)
            grown = state.seen >= _GROWTH * told.scored
            if state.landmarks.ready and (refitted or grown):
                told.scored = max(state.seen, 1)
                for donor in self.known.names(Owner(tenant, pair.donor)):
                    self._score(name, donor, state, book)

    def tell_scores(self, donor: str, owner: Owner, book: CorrectionBook) -> None:
        """Scores of a donor for every reader that is known."""
        for pair, state in _plain_pairs(book):
            if pair.donor == owner.agent and state.landmarks.ready:
                self._score(PairName(owner.tenant, pair.donor, pair.reader), donor, state, book)

    def forget(self, tenant: str) -> None:
        """Tell all of a tenant's pairs again: its book is another one."""
        for name, told in self._told.items():
            if name.tenant == tenant:
                told.facts, told.correction, told.scored = None, None, 0

    def clear(self) -> None:
        """Everything is to be told anew."""
        self._told.clear()

    def _tell_facts(
        self, name: PairName, told: _Told, state: PairState, book: CorrectionBook
    ) -> bool:
        correction = state.learner.correction
        refitted = correction is not told.correction
        told.correction = correction
        told.fits += refitted
        facts = Facts(
            seen=state.seen,
            version=told.fits if correction is not None else 0,
            audits=state.audits,
            audited=state.audited,
            blind=state.blind,
            distance=book.distances.between(name.donor, name.reader),
        )
        if facts != told.facts:
            told.facts = facts
            self.outbox.learned(name, facts)
        return refitted

    def _score(self, name: PairName, donor: str, state: PairState, book: CorrectionBook) -> None:
        if not self.landmarks or book.basis is None:
            return
        features = self.known.features(donor, book.basis)
        if features is None:
            return
        base, far, far_squared = state.landmarks.terms(features)
        if self.known.owner(donor) is not None:  # not dropped in the meantime
            self.outbox.scored(name, donor, Scores(base.cpu().numpy(), far, far_squared))


def _plain_pairs(book: CorrectionBook) -> list[tuple[Pair, PairState]]:
    """Pairs of two agents, without a second exact reader's help."""
    return [
        (pair, state) for pair, state in list(book.pairs.items()) if pair.donor and not pair.other
    ]
