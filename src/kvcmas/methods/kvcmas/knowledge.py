"""What a plan needs of what was learned. Plain data: the learning may be in other processes."""

from __future__ import annotations

from typing import Protocol

from kvcmas.methods.donors import Donor
from kvcmas.methods.kvcmas.chosen import Chosen
from kvcmas.methods.kvcmas.pair import Pair


class Knowledge(Protocol):
    """What the traffic of one tenant has taught, as the planner of a request sees it.

    Answers about the same thing must not change while a request is planned.
    """

    def seen(self, pair: Pair) -> int:
        """Tokens that were learned from."""

    def audited(self, pair: Pair) -> float | None:
        """Measured deviation of whole runs (`core.deviation`), `None` before the first."""

    def corrected(self, pair: Pair) -> bool:
        """Whether there is a correction that is better than none."""

    def distance(self, donor: str, reader: str) -> float | None:
        """How far two agents are from each other, `None` while that is unknown."""

    def second(self, donor: Donor, length: int) -> str | None:
        """The second exact reader whose deviation is kept.

        Of the donor's `length` tokens from its offset on, all of them; `None` if there is none.
        """

    def landmarks(self, chosen: Chosen, head: int, count: int) -> tuple[int, ...]:
        """Positions in the prompt, ascending, at which the largest deviations are expected.

        At most `count` of them (at least 1), behind the first `head` tokens of the run; none
        while nothing is known of the pair.
        """
