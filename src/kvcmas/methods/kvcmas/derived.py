"""What is derived from donors and leaves with them: features, second readers' deviations."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from kvcmas.core.channels import to_channels
from kvcmas.core.features import Features
from kvcmas.core.lowrank import LowRank
from kvcmas.core.segment import SegmentKV
from kvcmas.methods.donors import Donor
from kvcmas.methods.kv_library import KVLibrary
from kvcmas.methods.kvcmas.book import CorrectionBook


@dataclass(frozen=True, eq=False)
class Second:
    """A second exact reader's deviation from a donor's tokens `[start, stop)`.

    donor, agent: who computed the donor, and who is the second reader.
    """

    donor: str
    agent: str
    start: int
    stop: int
    deviation: LowRank

    def slice(self, start: int, stop: int) -> LowRank:
        """Of the donor's tokens `[start, stop)`."""
        left = self.deviation.left[:, start - self.start : stop - self.start]
        return LowRank(left, self.deviation.right)


class Derived:
    """By name of the donor. Safe to use from many threads."""

    def __init__(self, library: KVLibrary) -> None:
        self._library = library
        self._features: dict[str, Features] = {}
        self._seconds: dict[str, tuple[Second, ...]] = {}
        self._lock = threading.Lock()

    def features(self, name: str, kv: SegmentKV, book: CorrectionBook) -> Features | None:
        """Features of a whole donor, computed once; `None` as long as there is no basis."""
        if book.basis is None:
            return None
        features = self._features.get(name)
        if features is None:
            features = book.basis.features(to_channels(self._library.info.rope, kv))
            with self._lock:
                self._features[name] = features
        return features

    def features_of(self, name: str, book: CorrectionBook) -> Features | None:
        """The same of a donor in the library, preferably a pinned one.

        Raises:
            PlanError: it is needed, and not here.
        """
        if book.basis is None:
            return None
        held = self._features.get(name)
        return held if held is not None else self.features(name, self._library.kv(name), book)

    def second(self, donor: Donor, length: int) -> Second | None:
        """A second exact reader of the donor's `length` tokens from its offset on."""
        start, stop = donor.offset, donor.offset + length
        held = self._seconds.get(donor.segment, ())
        return next((one for one in held if one.start <= start and stop <= one.stop), None)

    def keep_second(self, name: str, second: Second) -> None:
        """Remember a second reader, in place of those that cover less of the same tokens."""
        with self._lock:
            others = (
                one
                for one in self._seconds.get(name, ())
                if one.start < second.start or second.stop < one.stop
            )
            self._seconds[name] = (second, *others)

    def carry_over(self, old: str, new: str, agent: str, length: int) -> None:
        """The agent's new donor begins with the first `length` tokens of the old one."""
        for second in self._seconds.get(old, ()):
            if second.donor == agent and second.stop <= length:
                self.keep_second(new, second)

    def forget_departed(self) -> None:
        """Drop what belongs to donors that are no longer stored."""
        with self._lock:
            for name in self._features.keys() | self._seconds.keys():
                if self._library.segment_info(name) is None:
                    self._features.pop(name, None)
                    self._seconds.pop(name, None)

    def nbytes(self) -> dict[str, int]:
        """Bytes of `features` and of `seconds`."""
        with self._lock:
            return {
                "features": sum(features.nbytes for features in self._features.values()),
                "seconds": sum(
                    second.deviation.nbytes for held in self._seconds.values() for second in held
                ),
            }
