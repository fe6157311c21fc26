"""What a worker will tell the scheduler with its next report."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from kvcmas.engines.vllm.messages import Facts, PairName, Report, Scores, Sums


class Outbox:
    """Gathers the news of one rank. Safe to use from many threads."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._report = Report()
        self._lock = threading.Lock()

    def captured(self, segment: str) -> None:
        """This rank holds a new donor."""
        with self._lock:
            self._report.captured[segment] = 1

    def refused(self, segment: str, reason: str) -> None:
        """This rank could not take a donor."""
        with self._lock:
            self._report.refused[segment] = reason

    def failed(self, request_id: str) -> None:
        """A load of this request could not be done."""
        with self._lock:
            self._report.failed.add(request_id)

    def measured(self, name: tuple[str, int, int], sums: Sums) -> None:
        """A deviation, by request, span and end of the head."""
        with self._lock:
            self._report.deviations[name] = sums

    def learned(self, pair: PairName, facts: Facts) -> None:
        """What is known of a pair now."""
        with self._lock:
            self._report.facts[self._rank, pair] = facts

    def scored(self, pair: PairName, segment: str, scores: Scores) -> None:
        """Where the landmarks of a donor are for a pair."""
        with self._lock:
            self._report.scores[self._rank, pair, segment] = scores

    def forget(self, segment: str) -> None:
        """Take back the scores of a donor that was dropped."""
        with self._lock:
            for key in [key for key in self._report.scores if key[2] == segment]:
                del self._report.scores[key]

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Count the seconds of a stage, as this thread waits for them."""
        began = perf_counter()
        try:
            yield
        finally:
            seconds = perf_counter() - began
            with self._lock:
                spent = self._report.seconds
                spent[stage] = spent.get(stage, 0.0) + seconds

    def take(self, nbytes: dict[str, int] | None) -> Report | None:
        """Everything since the last call; `None` when there is nothing. nbytes: put in as it is."""
        with self._lock:
            report, self._report = self._report, Report()
        report.nbytes = nbytes or {}
        return report if report else None
