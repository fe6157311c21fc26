"""Records: the way into a response and back, and the log line."""

from __future__ import annotations

import json
from math import nan

import pytest

from kvcmas.engines.record import SpanRecord
from kvcmas.engines.transformers import record as transformers_record
from kvcmas.engines.vllm.records import VllmRecord, log_line
from kvcmas.errors import ConfigError


def reuse(deviation: float | None = 0.08) -> SpanRecord:
    return SpanRecord(
        start=64,
        stop=900,
        kind="reuse",
        computed=40,
        reused=796,
        segment="s7",
        offset=3,
        correction="planner>critic",
        head=32,
        landmarks=8,
        deviation=deviation,
        tolerance=0.15,
        notes=("grew\nonce",),
    )


def record(span: SpanRecord) -> VllmRecord:
    return VllmRecord(
        agent="critic",
        dial="balanced",
        prompt=1000,
        computed=140,
        reused=796,
        cached=64,
        spans=(
            SpanRecord(start=0, stop=64, kind="cached", computed=0, reused=0),
            span,
            SpanRecord(start=900, stop=1000, kind="compute", computed=100, reused=0),
        ),
        steps=3,
        waited_s=0.25,
        notes=("hint dial ignored: unknown",),
    )


def test_there_and_back() -> None:
    sent = record(reuse())
    params = json.loads(json.dumps(sent.to_params(), allow_nan=False))
    assert list(params) == ["kvcmas"]
    assert VllmRecord.from_params(params) == sent


def test_a_deviation_that_is_no_number_becomes_none() -> None:
    params = json.loads(json.dumps(record(reuse(nan)).to_params(), allow_nan=False))
    back = VllmRecord.from_params(params)
    assert back is not None
    assert back.spans[1].deviation is None


def test_responses_without_a_record() -> None:
    assert VllmRecord.from_params(None) is None
    assert VllmRecord.from_params({"remote_host": "x"}) is None


def test_a_record_of_another_version_is_refused() -> None:
    params = record(reuse()).to_params()
    params["kvcmas"]["version"] = 2
    with pytest.raises(ConfigError, match="not a record of version 1"):
        VllmRecord.from_params(params)


def test_log_line() -> None:
    assert log_line(record(reuse())) == (
        "critic (balanced): 1000 tokens = 140 computed + 796 reused + 64 cached, 3 steps; "
        "waited 0.25 s; "
        "[64, 900) from s7, head 32, 8 landmarks, deviation 0.08 of 0.15, "
        "corrected by planner>critic; "
        "note: hint dial ignored: unknown; note: grew once"
    )
    audit = VllmRecord(
        agent="a", dial="fast", prompt=9, computed=9, reused=0, cached=0, steps=1, audit=True
    )
    assert (
        log_line(audit) == "a (fast, audit): 9 tokens = 9 computed + 0 reused + 0 cached, 1 steps"
    )


def test_both_engines_have_the_same_spans() -> None:
    assert transformers_record.SpanRecord is SpanRecord
