"""Statistics: sums, the way between processes, and what Prometheus shows in the end."""

from __future__ import annotations

import pickle
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from kvcmas.engines.record import SpanRecord
from kvcmas.engines.vllm import metric_names as names
from kvcmas.engines.vllm.metric_names import Reason
from kvcmas.engines.vllm.records import VllmRecord

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def metrics() -> Any:
    pytest.importorskip("vllm", reason="needs vLLM")
    from kvcmas.engines.vllm import metrics

    return metrics


def record(deviation: float | None = 0.08, waited_s: float = 0.0, audit: bool = False) -> Any:
    span = SpanRecord(
        start=20, stop=80, kind="reuse", computed=10, reused=50, segment="s", deviation=deviation
    )
    return VllmRecord(
        agent="secret-agent",
        dial="fast",
        prompt=100,
        computed=30,
        reused=50,
        cached=20,
        spans=(span,),
        waited_s=waited_s,
        audit=audit,
    )


def filled(metrics: Any) -> Any:
    stats = metrics.KvcmasStats()
    stats.finished(record(waited_s=0.5, audit=True))
    stats.finished(record(deviation=None))
    stats.decided(Reason.REUSED, 2)
    stats.decided(Reason.COLD)
    stats.event("eviction", 3)
    stats.spent({"load": 0.25, "learn": 1.0})
    stats.holds({"kv_device": 1000, "states": 10}, donors=4)
    return stats


def test_an_empty_one(metrics: Any) -> None:
    stats = metrics.KvcmasStats()
    assert stats.is_empty()
    assert not filled(metrics).is_empty()
    assert stats.aggregate(metrics.KvcmasStats()).is_empty()
    assert stats.aggregate(filled(metrics)) == filled(metrics)


def test_sums_and_latest_values(metrics: Any) -> None:
    stats, later = filled(metrics), filled(metrics)
    later.holds({"kv_device": 2000}, donors=0)
    before = pickle.dumps(later.data)
    assert stats.aggregate(later) is stats
    assert pickle.dumps(later.data) == before
    assert stats.data == {
        names.TOKENS.name: {"computed": 120, "cached": 80, "reused": 200},
        names.DEVIATION.name: [0.08, 0.08],
        names.EVENT_COUNT.name: {"audit": 2, "wait": 2, "eviction": 6},
        names.WAITED.name: {"": 1.0},
        names.DECISIONS.name: {"reused": 4, "cold_start": 2},
        names.SECONDS.name: {"load": 0.5, "learn": 2.0},
        names.BYTES.name: {"kv_device": 2000},
        names.DONORS.name: {"": 0},
    }
    assert stats.reduce() == {
        "computed": 120,
        "cached": 80,
        "reused": 200,
        "audits": 2,
        "waits": 2,
        "evictions": 6,
        "mean deviation": 0.08,
        "kv_device MB": 0.0,
    }
    stats.reset()
    assert stats.is_empty()


def test_between_processes(metrics: Any) -> None:
    import msgspec

    stats = filled(metrics)
    assert pickle.loads(pickle.dumps(stats)) == stats
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))
    assert data == stats.data
    rebuilt = metrics.KvcmasStats(data=data)
    rebuilt.aggregate(stats)
    assert data == stats.data, "what was given is not changed"


def exposed(metrics: Any, *observed: tuple[dict[str, Any], int]) -> tuple[Any, str]:
    """A registry of its own with the metrics of two engines, and what it shows."""
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

    registry = CollectorRegistry()
    types = {kind: partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)}
    prom = metrics.KvcmasPromMetrics(
        SimpleNamespace(kv_transfer_config=None),
        types,
        ["model_name", "engine"],
        {0: ["m", "0"], 1: ["m", "1"]},
    )
    for data, engine in observed:
        prom.observe(data, engine)
    return registry, generate_latest(registry).decode()


def test_what_prometheus_shows(metrics: Any) -> None:
    data = filled(metrics).to_dict()
    registry, text = exposed(metrics, (data, 0), (data, 0), (data, 1))

    def value(name: str, engine: str = "0", **labels: str) -> float | None:
        found: float | None = registry.get_sample_value(
            name, {"model_name": "m", "engine": engine, **labels}
        )
        return found

    assert value("vllm:kvcmas_prompt_tokens_total", source="computed") == 120
    assert value("vllm:kvcmas_prompt_tokens_total", source="reused") == 200
    assert value("vllm:kvcmas_prompt_tokens_total", engine="1", source="cached") == 40
    assert value("vllm:kvcmas_decisions_total", reason="cold_start") == 2
    assert value("vllm:kvcmas_decisions_total", reason="audit") == 0
    assert value("vllm:kvcmas_stage_seconds_total", stage="learn") == 2
    assert value("vllm:kvcmas_events_total", event="eviction") == 6
    assert value("vllm:kvcmas_wait_seconds_total") == 1
    assert value("vllm:kvcmas_memory_bytes", kind="kv_device") == 1000
    assert value("vllm:kvcmas_donors") == 4
    assert value("vllm:kvcmas_deviation_count") == 2
    assert value("vllm:kvcmas_deviation_bucket", le="0.1") == 2
    assert value("vllm:kvcmas_deviation_bucket", le="0.07") == 0
    assert "secret-agent" not in text


def test_labels_are_bounded(metrics: Any) -> None:
    data = {
        names.DECISIONS.name: {"made up": 3},
        names.SECONDS.name: {"made up": 3.0},
        names.BYTES.name: {"made up": 3},
    }
    registry, text = exposed(metrics, (data, 0))
    assert "made up" not in text
    labels = {"model_name": "m", "engine": "0", "reason": "other"}
    assert registry.get_sample_value("vllm:kvcmas_decisions_total", labels) == 3
    for metric in names.METRICS:
        for shown in names.series(metric):
            assert shown in text


def test_label_names_tell_nothing_about_who_asked(metrics: Any) -> None:
    registry, _ = exposed(metrics, (filled(metrics).to_dict(), 0))
    allowed = {"model_name", "engine", "source", "reason", "stage", "event", "kind", "le"}
    for family in registry.collect():
        for sample in family.samples:
            assert set(sample.labels) <= allowed
