"""Counts between two reports of the scheduler. Plain data, no vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

from kvcmas.engines.vllm import metric_names as names
from kvcmas.engines.vllm.metric_names import Metric, Reason
from kvcmas.engines.vllm.records import VllmRecord


class Tally:
    """Counts what happens until it is taken.

    data: `{metric: {label value: number}}`, and lists of samples; empty when nothing happened. A
        metric without a label has the label value `""`.
    """

    data: dict[str, Any]

    def __init__(self) -> None:
        self.data = {}

    def take(self) -> dict[str, Any]:
        """All counts since the last call."""
        taken, self.data = self.data, {}
        return taken

    def finished(self, record: VllmRecord) -> None:
        """Count a request that is through its prefill: its tokens, deviations, audit and wait."""
        for source in names.SOURCES:
            self._add(names.TOKENS, getattr(record, source), source)
        deviations = (span.deviation for span in record.spans)
        self.measured(value for value in deviations if value is not None)
        if record.audit:
            self.event("audit")
        if record.waited_s > 0:
            self.event("wait")
            self._add(names.WAITED, record.waited_s)

    def decided(self, reason: Reason, count: int = 1) -> None:
        """Count decisions of one kind."""
        self._add(names.DECISIONS, count, reason.value)

    def event(self, name: str, count: int = 1) -> None:
        """Count events, one of `metric_names.EVENTS`."""
        self._add(names.EVENT_COUNT, count, name)

    def measured(self, deviations: Iterable[float]) -> None:
        """Note relative deviations; one that is no finite number is left out, it has no bucket."""
        samples = [float(value) for value in deviations if isfinite(value)]
        if samples:
            self.data.setdefault(names.DEVIATION.name, []).extend(samples)

    def spent(self, seconds: Mapping[str, float]) -> None:
        """Count seconds by stage."""
        for stage, value in seconds.items():
            self._add(names.SECONDS, value, stage)

    def holds(self, nbytes: Mapping[str, int], donors: int) -> None:
        """What is held now: bytes by kind, and how many donors."""
        if nbytes:
            self.data[names.BYTES.name] = dict(nbytes)
        self.data[names.DONORS.name] = {"": donors}

    def _add(self, metric: Metric, number: float, value: str = "") -> None:
        if number:
            counts = self.data.setdefault(metric.name, {})
            counts[value] = counts.get(value, 0) + number
