"""What was learned, without learning more: for measuring."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from kvcmas.core.lowrank import LowRank, factorise
from kvcmas.methods.kvcmas.book import CorrectionBook
from kvcmas.methods.kvcmas.observation import Observation
from kvcmas.methods.kvcmas.pair import Pair


@dataclass
class FrozenBook(CorrectionBook):
    """A book that shares everything with the one it was made of, and takes in nothing."""

    @classmethod
    def of(cls, book: CorrectionBook) -> FrozenBook:
        """The book as it is now."""
        return cls(
            **{field.name: getattr(book, field.name) for field in fields(book) if field.init}
        )

    def see_donor(self, channels: Tensor) -> None:
        """Nothing."""

    def observe(self, observation: Observation) -> None:
        """Nothing."""

    def see_distance(self, *seen: Any) -> None:
        """Nothing."""

    def see_other(self, pair: Pair, deviation: Tensor) -> LowRank:
        """The second exact reader's deviation in compact form; its basis stays as it is."""
        return factorise(deviation, self.config.rank, seed=self.config.seed)
