"""Which ranges of a finished request are kept."""

from __future__ import annotations

import pytest

from kvcmas.methods.captures import Capture, captures
from kvcmas.methods.tiling import plan_of
from kvcmas.workflow.plan import Compute, Head, Reuse

PREFIX = Reuse(0, 40, "prefix", 0, exact=True)
BLIND = Reuse(60, 160, "document", 5)


@pytest.mark.parametrize(
    ("reused", "computed", "exact", "expected"),
    [
        ([], [(0, 210)], True, [Capture(0, 210, True)]),
        ([PREFIX], [(40, 210)], True, [Capture(0, 210, True)]),
        # The prefix is everything, but for the last token and the answer.
        ([Reuse(0, 199, "p", 0, exact=True)], [(199, 210)], True, [Capture(0, 210, True)]),
        (
            [BLIND],
            [(0, 60), (160, 210)],
            False,
            [Capture(0, 60, True), Capture(160, 210, False)],
        ),
        (
            [PREFIX, BLIND],
            [(40, 60), (160, 210)],
            False,
            [Capture(0, 60, True), Capture(160, 210, False)],
        ),
        # A head that was computed continues what is exact.
        (
            [Reuse(60, 160, "document", 5, head=Head(length=16))],
            [(0, 76), (160, 210)],
            False,
            [Capture(0, 76, True), Capture(160, 210, False)],
        ),
        # Two exact pieces with a computed one between them.
        (
            [PREFIX, Reuse(60, 160, "own", 0, exact=True)],
            [(40, 60), (160, 210)],
            True,
            [Capture(0, 210, True)],
        ),
        # Nothing computed in front of the first blind span.
        ([PREFIX, Reuse(40, 160, "document", 5)], [(160, 210)], False, [Capture(160, 210, False)]),
        # Single tokens inside a reused span are no segments, nor are short ends.
        ([BLIND], [(0, 60), (80, 81), (160, 170)], False, [Capture(0, 60, True)]),
    ],
)
def test_ranges(
    reused: list[Reuse],
    computed: list[tuple[int, int]],
    exact: bool,
    expected: list[Capture],
) -> None:
    assert captures(plan_of(200, reused), computed, exact, min_length=32) == expected


def test_nothing_short_is_kept() -> None:
    assert captures(plan_of(31, []), [(0, 31)], True, 32) == []
    assert len(captures(plan_of(32, []), [(0, 32)], True, 32)) == 1


def test_plan_of_fills_the_gaps() -> None:
    plan = plan_of(200, [PREFIX, BLIND], ["why"])
    assert plan.spans == (PREFIX, Compute(40, 60), BLIND, Compute(160, 200))
    assert plan.notes == ("why",)
