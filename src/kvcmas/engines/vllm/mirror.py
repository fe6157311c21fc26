"""What the workers have learned, as far as the scheduler needs it to plan.

Every rank learns from its own heads and reports apart. A pair counts as corrected when all ranks
have a correction, as seen when all have; deviations and scores are averaged over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvcmas.engines.vllm.messages import Facts, PairName, Report, Scores
from kvcmas.methods.donors import Donor
from kvcmas.methods.kvcmas.chosen import Chosen
from kvcmas.methods.kvcmas.pair import Pair


class Mirror:
    """Facts and landmark scores of all tenants; `of` gives one tenant's view.

    Args:
        ranks: how many workers report.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._facts: dict[PairName, dict[int, Facts]] = {}
        self._scores: dict[tuple[PairName, str], dict[int, Scores]] = {}
        self._scored: set[PairName] = set()

    def take(self, report: Report) -> None:
        """News from the workers."""
        for (rank, pair), facts in report.facts.items():
            self._facts.setdefault(pair, {})[rank] = facts
        for (rank, pair, segment), scores in report.scores.items():
            self._scores.setdefault((pair, segment), {})[rank] = scores
            self._scored.add(pair)

    def forget(self, segments: set[str]) -> None:
        """Donors that left."""
        for key in [key for key in self._scores if key[1] in segments]:
            del self._scores[key]

    def clear(self) -> None:
        """Nothing is known any more."""
        self._facts.clear()
        self._scores.clear()
        self._scored.clear()

    def of(self, tenant: str) -> TenantMirror:
        """What is known of one tenant's pairs."""
        return TenantMirror(self, tenant)

    def facts(self, pair: PairName) -> list[Facts]:
        """One for each rank, or none."""
        known = self._facts.get(pair, {})
        return list(known.values()) if len(known) == self.ranks else []

    def scores(self, pair: PairName, segment: str) -> list[Scores]:
        """One for each rank, or none."""
        known = self._scores.get((pair, segment), {})
        return list(known.values()) if len(known) == self.ranks else []

    def scored(self, pair: PairName) -> bool:
        """Whether scores of any donor were reported for the pair."""
        return pair in self._scored

    def totals(self) -> Mapping[str, int]:
        """Counts for display: pairs, and how many have a correction."""
        corrected = sum(
            all(facts.version for facts in ranks.values()) for ranks in self._facts.values()
        )
        return {"pairs": len(self._facts), "corrected": corrected}


class TenantMirror:
    """`methods.kvcmas.knowledge.Knowledge` of one tenant, from what the workers reported."""

    def __init__(self, mirror: Mirror, tenant: str) -> None:
        self._mirror = mirror
        self._tenant = tenant

    def seen(self, pair: Pair) -> int:
        """Tokens that every rank has learned from."""
        return min((facts.seen for facts in self._facts(pair)), default=0)

    def audited(self, pair: Pair) -> float | None:
        """Running mean of the deviation of whole runs."""
        values = [facts.audited for facts in self._facts(pair)]
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return None
        return float(np.sqrt(np.mean(np.square(known))))

    def corrected(self, pair: Pair) -> bool:
        """Whether every rank has a correction."""
        facts = self._facts(pair)
        return bool(facts) and all(one.version for one in facts)

    def version(self, pair: Pair) -> int:
        """Differs whenever the correction does."""
        return sum(one.version for one in self._facts(pair))

    def distance(self, donor: str, reader: str) -> float | None:
        """How far the two agents are from each other."""
        values = [one.distance for one in self._facts(Pair(donor, reader))]
        known = [value for value in values if value is not None]
        return float(np.mean(known)) if known and len(known) == len(values) else None

    def second(self, donor: Donor, length: int) -> str | None:
        """None: one exact reader for each segment here."""
        return None

    def landmarks(self, chosen: Chosen, head: int, count: int) -> tuple[int, ...]:
        """Positions of the highest scores behind the head, ascending."""
        run, donor = chosen.run, chosen.donor
        parts = self._mirror.scores(self._name(chosen.pair), donor.segment)
        first, last = donor.offset + head, donor.offset + len(run)
        if not parts or first >= last or any(len(part.base) < last for part in parts):
            return ()
        far = np.log(np.maximum(np.arange(run.start + head, run.stop) - chosen.origin, 0) + 8.0)
        total = np.zeros(last - first)
        for part in parts:
            total += part.base[first:last] + part.far * far + part.far_squared * far * far
        count = min(count, total.shape[0])
        best = np.argpartition(total, total.shape[0] - count)[total.shape[0] - count :]
        return tuple(int(spot) for spot in np.sort(best) + run.start + head)

    def scores_expected(self, pair: Pair, segment: str) -> bool:
        """Whether other donors have scores for this pair, and this one not yet."""
        name = self._name(pair)
        return self._mirror.scored(name) and not self._mirror.scores(name, segment)

    def _facts(self, pair: Pair) -> list[Facts]:
        return self._mirror.facts(self._name(pair))

    def _name(self, pair: Pair) -> PairName:
        return PairName(self._tenant, pair.donor, pair.reader)
