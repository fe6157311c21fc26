"""Short runs: reused at the first try or computed as a whole, so that failures must be rare."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from kvcmas.methods.captures import Ranges
from kvcmas.methods.kvcmas.chosen import Chosen
from kvcmas.methods.kvcmas.pair import Pair
from kvcmas.methods.kvcmas.selection import SHORT
from kvcmas.workflow.plan import Plan

_RETRY = 8  # refused short runs are tried again at every eighth


@dataclass(frozen=True, slots=True)
class Counts:
    """Short runs of a pair.

    tried, failed: those that were to be reused, and how many of these were computed after all
    because their head disagreed. refused: those not tried.
    """

    tried: int = 0
    failed: int = 0
    refused: int = 0


class ShortRuns:
    """Counts of one tenant, by pair. Safe to use from many threads."""

    def __init__(self) -> None:
        self._counts: dict[Pair, Counts] = {}
        self._lock = threading.Lock()

    def counts(self, pair: Pair) -> Counts:
        """What has happened to short runs of the pair."""
        return self._counts.get(pair, Counts())

    def see(self, pair: Pair, failed: bool) -> None:
        """Remember whether a short run could be reused."""
        with self._lock:
            old = self.counts(pair)
            self._counts[pair] = Counts(old.tried + 1, old.failed + failed, old.refused)

    def refuse(self, pair: Pair, needed: int) -> Counts | None:
        """The counts that speak against one more try, or `None`.

        It is refused when most tries failed, `needed` of them at least; every eighth refusal
        is a try all the same.
        """
        with self._lock:
            old = self.counts(pair)
            if old.failed < needed or 2 * old.failed <= old.tried:
                return None
            refused = self._counts[pair] = Counts(old.tried, old.failed, old.refused + 1)
            return refused if refused.refused % _RETRY else None


def is_short(chosen: Chosen) -> bool:
    """Whether a run is so short that it is reused at the first try or not at all."""
    return len(chosen.run) < SHORT


def short_pair(chosen: Chosen) -> Pair:
    """Whose short runs are counted together.

    An answer's KV as its author generated it is one kind, whoever the author: it stood in the
    author's own turn, for its readers it is quoted. It then comes under the pair without a donor.
    """
    donor = chosen.donor
    generated = donor.info.generated
    middle = donor.offset + len(chosen.run) // 2
    if generated is not None and middle >= generated:
        return Pair("", chosen.pair.reader)
    return chosen.pair


def short_outcomes(
    plan: Plan, chosen: Iterable[Chosen], computed: Ranges
) -> list[tuple[Pair, bool]]:
    """Short runs that were to be reused: whose, and whether they were computed after all."""
    by_start = {one.run.start: one for one in chosen}
    found: list[tuple[Pair, bool]] = []
    for span in plan.reused():
        one = by_start.get(span.start)
        if one is None or one.donor.own or not is_short(one):
            continue
        if span.head.length >= len(span):  # computed by plan: neither agreed nor failed
            continue
        failed = any(start <= span.start and span.stop <= stop for start, stop in computed)
        found.append((short_pair(one), failed))
    return found
