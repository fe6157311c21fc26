"""Counting: what is nothing, and what cannot be counted."""

from __future__ import annotations

from math import inf, nan

from kvcmas.engines.vllm import metric_names as names
from kvcmas.engines.vllm.metric_names import Reason
from kvcmas.engines.vllm.tally import Tally


def test_nothing_happened() -> None:
    tally = Tally()
    tally.spent({"load": 0.0})
    tally.measured([])
    tally.event("capture", 0)
    assert tally.take() == {}


def test_counts_begin_anew_when_taken() -> None:
    tally = Tally()
    tally.decided(Reason.REUSED)
    tally.decided(Reason.REUSED, 2)
    tally.spent({"load": 0.5})
    tally.spent({"load": 0.25, "learn": 1.0})
    tally.holds({}, donors=0)
    taken = tally.take()
    tally.decided(Reason.COLD)
    assert taken == {
        names.DECISIONS.name: {"reused": 3},
        names.SECONDS.name: {"load": 0.75, "learn": 1.0},
        names.DONORS.name: {"": 0},
    }
    assert tally.take() == {names.DECISIONS.name: {"cold_start": 1}}


def test_deviations_that_are_no_numbers_are_left_out() -> None:
    tally = Tally()
    tally.measured([nan, inf])
    assert tally.take() == {}
    tally.measured([nan, 0.5])
    assert tally.take() == {names.DEVIATION.name: [0.5]}


def test_every_label_value_is_listed_once() -> None:
    for metric in names.METRICS:
        assert len(set(metric.values)) == len(metric.values)
        assert (metric.label is None) == (not metric.values)
