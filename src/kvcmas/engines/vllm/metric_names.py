"""The metrics at `/metrics`, as data: names, labels and their values. No vLLM, no Prometheus.

Every label has a fixed list of values, so that their number is bounded, and none says who asked
(no tenant, no agent) or what was asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal


class Reason(StrEnum):
    """What was decided about a run of tokens that a donor holds, or about a request as a whole."""

    REUSED = "reused"
    EXACT = "exact"  # by the dial, or a tenant that is always served exactly
    HINT = "hint"  # the client asked for no reuse
    AUDIT = "audit"
    COLD = "cold_start"
    AUDITED = "audited_deviation"  # measured on whole runs, above the dial's limit
    SHORT = "short_runs"  # heads of such short runs disagreed
    HEAD = "head"  # its head disagreed up to the limit
    LOST = "lost"  # the donor was dropped before it was read
    LOAD = "load_failed"
    WAIT = "wait_expired"
    UNSUPPORTED = "unsupported"  # this kind of request
    OTHER = "other"


Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. label: its own label, if it has one; values: all that this label can have."""

    name: str
    kind: Kind
    help: str
    label: str | None = None
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


SOURCES: Final = ("computed", "cached", "reused")
STAGES: Final = ("match", "load", "measure", "capture", "learn")
MEMORY: Final = ("kv_device", "kv_host", "features", "states", "learning")
EVENTS: Final = ("audit", "capture", "eviction", "load_failure", "taken_back", "wait")

TOKENS: Final = Metric(
    "vllm:kvcmas_prompt_tokens",
    "counter",
    "Prompt tokens by source: computed, held by vLLM's prefix cache, or reused from a donor.",
    "source",
    SOURCES,
)
DECISIONS: Final = Metric(
    "vllm:kvcmas_decisions",
    "counter",
    "Decisions about runs of tokens that a donor holds, by reason.",
    "reason",
    tuple(Reason),
)
SECONDS: Final = Metric(
    "vllm:kvcmas_stage_seconds",
    "counter",
    "Seconds by stage; of the slowest rank.",
    "stage",
    STAGES,
)
EVENT_COUNT: Final = Metric(
    "vllm:kvcmas_events",
    "counter",
    "Audits, captured and evicted donors, failed loads, first tokens that were taken back because "
    "a head disagreed, and requests that waited for a donor.",
    "event",
    EVENTS,
)
WAITED: Final = Metric(
    "vllm:kvcmas_wait_seconds",
    "counter",
    "Seconds that requests waited for donors that were being computed.",
)
BYTES: Final = Metric(
    "vllm:kvcmas_memory_bytes",
    "gauge",
    "Bytes by kind: donors on the device and in host memory, what is kept of their features, "
    "correction states, and what they are learned from; of all ranks.",
    "kind",
    MEMORY,
)
DONORS: Final = Metric("vllm:kvcmas_donors", "gauge", "Donors that can be reused.")
DEVIATION: Final = Metric(
    "vllm:kvcmas_deviation",
    "histogram",
    "Relative deviation of the reused KV from the exact one, measured at the end of heads.",
    buckets=(0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0),
)

METRICS: Final = (TOKENS, DECISIONS, SECONDS, EVENT_COUNT, WAITED, BYTES, DONORS, DEVIATION)


def series(metric: Metric) -> tuple[str, ...]:
    """Names under which a metric is exposed."""
    if metric.kind == "counter":
        return (f"{metric.name}_total",)
    if metric.kind == "histogram":
        return tuple(f"{metric.name}_{part}" for part in ("bucket", "count", "sum"))
    return (metric.name,)
