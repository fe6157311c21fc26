"""Counts on their way from the scheduler to `/metrics`.

The scheduler side of the connector counts in a `KvcmasStats`, gives it away in
`get_kv_connector_stats` and begins a new one. In the process that serves HTTP, `KvcmasPromMetrics`
adds it to the metrics of `metric_names.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvcmas.engines.vllm import metric_names as names
from kvcmas.engines.vllm.metric_names import Metric, Reason
from kvcmas.engines.vllm.tally import Tally

_SUMS = (names.TOKENS, names.DECISIONS, names.SECONDS, names.EVENT_COUNT, names.WAITED)
_LATEST = (names.BYTES, names.DONORS)


@dataclass
class KvcmasStats(Tally, KVConnectorStats):
    """What happened since the last one: a tally that vLLM can carry.

    Strings, numbers, lists and dictionaries only, so that it survives pickle and msgpack. Counts
    of two are summed; of gauges the newer one counts, so only one side may set them.
    """

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # vLLM gives the same dictionary to its log and to its metrics: sums need their own.
        self.data = deepcopy(self.data)

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KvcmasStats:
        """Add a later one to this one; returns this one."""
        for metric in _SUMS:
            for value, number in other.data.get(metric.name, {}).items():
                self._add(metric, number, value)
        for metric in _LATEST:
            if metric.name in other.data:
                self.data[metric.name] = dict(other.data[metric.name])
        samples = other.data.get(names.DEVIATION.name, [])
        if samples:
            self.data.setdefault(names.DEVIATION.name, []).extend(samples)
        return self

    def reduce(self) -> dict[str, int | float]:
        """A few numbers for vLLM's periodic log line."""
        tokens = self.data.get(names.TOKENS.name, {})
        events = self.data.get(names.EVENT_COUNT.name, {})
        told: dict[str, int | float] = {source: tokens.get(source, 0) for source in names.SOURCES}
        told |= {f"{event}s": count for event, count in events.items()}
        samples = self.data.get(names.DEVIATION.name, [])
        if samples:
            told["mean deviation"] = round(sum(samples) / len(samples), 4)
        kinds = self.data.get(names.BYTES.name, {})
        told |= {f"{kind} MB": round(nbytes / 1e6, 1) for kind, nbytes in kinds.items()}
        return told


class KvcmasPromMetrics(KVConnectorPromMetrics):
    """The metrics of `metric_names.METRICS`, one series for each engine and label value.

    A label value that is not in its metric's list is counted under `other` where the list has
    it, and left out elsewhere.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._series: dict[tuple[str, int, str], Any] = {}
        make = {"counter": self._counter, "gauge": self._gauge, "histogram": self._histogram}
        for metric in names.METRICS:
            self._register(metric, make[metric.kind], labelnames, per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add a `KvcmasStats.data` to the metrics of one engine."""
        for metric in names.METRICS:
            found = transfer_stats_data.get(metric.name)
            if not found:
                continue
            if metric.kind == "histogram":
                series = self._series[metric.name, engine_idx, ""]
                for sample in found:
                    series.observe(sample)
                continue
            for value, number in found.items():
                series = self._find(metric, engine_idx, value)
                if series is None:
                    continue
                if metric.kind == "counter":
                    series.inc(number)
                else:
                    series.set(number)

    def _find(self, metric: Metric, engine: int, value: str) -> Any:
        found = self._series.get((metric.name, engine, value))
        if found is None:
            found = self._series.get((metric.name, engine, Reason.OTHER.value))
        return found

    def _register(
        self,
        metric: Metric,
        make: Callable[[Metric, list[str]], Any],
        labelnames: list[str],
        per_engine: Mapping[int, list[object]],
    ) -> None:
        own = [] if metric.label is None else [metric.label]
        family = make(metric, [*labelnames, *own])
        for engine, engine_values in per_engine.items():
            for value in metric.values or ("",):
                labels = [*engine_values, *([value] if own else [])]
                self._series[metric.name, engine, value] = family.labels(*labels)

    def _counter(self, metric: Metric, labelnames: list[str]) -> Counter:
        return self._counter_cls(name=metric.name, documentation=metric.help, labelnames=labelnames)

    def _gauge(self, metric: Metric, labelnames: list[str]) -> Gauge:
        return self._gauge_cls(
            name=metric.name,
            documentation=metric.help,
            labelnames=labelnames,
            multiprocess_mode="mostrecent",
        )

    def _histogram(self, metric: Metric, labelnames: list[str]) -> Histogram:
        return self._histogram_cls(
            name=metric.name,
            documentation=metric.help,
            labelnames=labelnames,
            buckets=list(metric.buckets),
        )
