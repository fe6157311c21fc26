"""Spans computed in part: what is refused, and how their work is counted."""

from __future__ import annotations

from typing import Any

import pytest

from kvcmas.errors import PlanError
from kvcmas.workflow.partial import Layers, Partial, Selected
from kvcmas.workflow.plan import Compute, Head, Plan, Reuse


def plan(partial: Partial | None, **options: Any) -> Plan:
    reuse = Reuse(10, 30, "donor", 0, partial=partial, **options)
    return Plan(35, (Compute(0, 10), reuse, Compute(30, 35)))


@pytest.mark.parametrize(
    ("partial", "expected"),
    [
        (None, 15 * 8),
        (Layers(2, 5), 15 * 8 + 20 * 3),
        (Layers(0, 8), 35 * 8),
        (Selected(2, 3), 15 * 8 + 20 * 2 + 3 * 6),
        (Selected(2, 20), 35 * 8),
        (Selected(8, 0), 35 * 8),
    ],
)
def test_token_layers(partial: Partial | None, expected: int) -> None:
    made = plan(partial)
    assert made.token_layers(8) == expected
    assert made.computed == 15


@pytest.mark.parametrize(("start", "stop"), [(3, 3), (4, 3), (-1, 2)])
def test_no_layers(start: int, stop: int) -> None:
    with pytest.raises(PlanError, match="must be a range that is not empty"):
        Layers(start, stop)


@pytest.mark.parametrize(("layers", "count"), [(0, 3), (2, -1)])
def test_no_selection(layers: int, count: int) -> None:
    with pytest.raises(PlanError, match="selected behind at least 1 layer"):
        Selected(layers, count)


@pytest.mark.parametrize(
    "options",
    [
        {"exact": True},
        {"head": Head(4)},
        {"head": Head(tolerance=0.1)},
        {"landmarks": (12,)},
    ],
)
def test_goes_with_nothing_else(options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="computed in part"):
        plan(Layers(0, 2), **options)


def test_more_tokens_than_the_span_has() -> None:
    with pytest.raises(PlanError, match="21 selected tokens do not fit a span of 20"):
        plan(Selected(2, 21))


def test_the_last_token_is_computed() -> None:
    with pytest.raises(PlanError, match="last token of the prompt must be computed"):
        Plan(20, (Reuse(0, 20, "donor", 0, partial=Selected(2, 20)),))
