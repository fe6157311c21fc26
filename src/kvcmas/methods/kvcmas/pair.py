"""Two agents of one tenant: whose KV is reused by whom."""

from __future__ import annotations

from typing import NamedTuple


class Pair(NamedTuple):
    """Whose KV is corrected for whom; `other`: the second exact reader, or empty."""

    donor: str
    reader: str
    other: str = ""

    @property
    def name(self) -> str:
        """As in plans and records: `planner>critic`, `planner+analyst>critic`."""
        return f"{self.donor}+{self.other}>{self.reader}" if self.other else ">".join(self[:2])

    @property
    def plain(self) -> Pair:
        """The two without a second exact reader."""
        return Pair(self.donor, self.reader)
