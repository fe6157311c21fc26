"""Statistics, and what counts as shared and computed."""

from __future__ import annotations

from math import isnan, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcmas.bench.shared_run import computed_of, longest_shared_run
from kvcmas.bench.stats import mean, median, ratio, ratio_interval, without_nan
from kvcmas.engines.transformers import RequestRecord, SpanRecord


def test_means_and_ratios() -> None:
    assert mean([1, 2, 6]) == 3
    assert median([1, 2, 6]) == 2
    assert ratio(1, 4) == 0.25
    assert isnan(mean([])) and isnan(median([])) and isnan(ratio(1, 0))


def test_no_spread_no_interval() -> None:
    low, high = ratio_interval([1, 2, 3], [2, 4, 6])
    assert low == high == 0.5
    assert all(isnan(end) for end in ratio_interval([1], [2]))
    assert all(isnan(end) for end in ratio_interval([1, 1], [0, 0]))


def test_the_interval_has_the_spread_of_the_mean() -> None:
    random = np.random.default_rng(3)
    values = random.normal(5, 1, 400)
    low, high = ratio_interval(values.tolist(), [1.0] * 400)
    # Half the width of a 95% interval of the mean is 1.96 standard errors: 0.098.
    assert high - low == pytest.approx(2 * 0.098, rel=0.15)
    assert low < values.mean() < high
    assert (low, high) == ratio_interval(values.tolist(), [1.0] * 400)


def test_nan_becomes_none() -> None:
    assert without_nan({"a": [1.0, nan, (float("inf"), "x")], "b": True}) == {
        "a": [1.0, None, [None, "x"]],
        "b": True,
    }


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=20)


@given(TOKENS, TOKENS)
def test_the_longest_shared_run(prompt: list[int], other: list[int]) -> None:
    start, stop = longest_shared_run(np.array(prompt), np.array(other))

    def occurs(run: list[int]) -> bool:
        return any(other[i : i + len(run)] == run for i in range(len(other)))

    assert occurs(prompt[start:stop])
    longer = stop - start + 1
    assert not any(
        occurs(prompt[i : i + longer]) for i in range(len(prompt) - longer + 1) if longer
    )


def span(start: int, stop: int, kind: str, computed: int) -> SpanRecord:
    return SpanRecord.model_validate(
        {
            "start": start,
            "stop": stop,
            "kind": kind,
            "computed": computed,
            "reused": stop - start - computed,
        }
    )


def test_computed_of_counts_heads_and_overlaps() -> None:
    times = dict.fromkeys(
        ("ttft_s", "match_s", "correct_s", "forward_s", "other_s", "decode_s", "finish_s"), 0.0
    )
    record = RequestRecord(
        request_id="1",
        agent="a",
        method="m",
        prompt=100,
        computed=45,
        reused=55,
        generated=0,
        passes=1,
        exact=False,
        notes=(),
        spans=(
            span(0, 10, "reuse", 0),
            span(10, 30, "compute", 20),
            span(30, 85, "reuse", 10),
            span(85, 100, "compute", 15),
        ),
        total_s=0.0,
        **times,
    )
    assert computed_of(record, 0, 100) == 45
    assert computed_of(record, 20, 90) == 10 + 10 + 5
    assert computed_of(record, 30, 85) == 10
