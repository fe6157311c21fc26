"""Which pairs of agents have agreed lately, so that nobody need wait for their measurements."""

from __future__ import annotations

from collections import OrderedDict, deque

from kvcmas.engines.vllm.messages import PairName

LEAST = 2  # measurements in a row that must have agreed
_KEPT = 4  # newest measurements of a pair that count
_PAIRS = 4096  # pairs that are remembered


class Agreements:
    """Deviations at the ends of heads, as first measured, of each pair."""

    def __init__(self) -> None:
        self._seen: OrderedDict[PairName, deque[float]] = OrderedDict()

    def see(self, pair: PairName, deviation: float) -> None:
        """A head of the pair was measured."""
        seen = self._seen.setdefault(pair, deque(maxlen=_KEPT))
        seen.append(deviation)
        self._seen.move_to_end(pair)
        if len(self._seen) > _PAIRS:
            self._seen.popitem(last=False)

    def expected(self, pair: PairName, tolerance: float, least: int = LEAST) -> bool:
        """Whether its last measurements, at least so many, are within a tolerance."""
        seen = self._seen.get(pair, ())
        # Written so that a deviation that is not a number counts as disagreement.
        return len(seen) >= least and all(deviation <= tolerance for deviation in seen)

    def clear(self) -> None:
        """Forget all."""
        self._seen.clear()
