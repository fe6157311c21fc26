"""Plans behind what is in place already."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcmas.engines.vllm.trimming import behind
from kvcmas.workflow.plan import Compute, Head, Plan, Reuse

SPAN = Reuse(20, 60, "donor", 5, "a>b", Head(16, 8, 32, 0.1, 4), landmarks=(30, 50))
PLAN = Plan(
    100,
    (
        Compute(0, 20),
        SPAN,
        Compute(60, 70),
        Reuse(70, 90, "prefix", 0, exact=True),
        Compute(90, 100),
    ),
    ("a note",),
)


def test_with_nothing_in_place_it_stays() -> None:
    assert behind(PLAN, 0) is PLAN


def test_a_span_goes_on_behind_with_its_head() -> None:
    cut = behind(PLAN, 40)
    span = next(cut.reused())
    assert (span.start, span.stop, span.offset) == (40, 60, 25)
    assert span.head == Head(16, 8, 20, 0.1, 4) and span.landmarks == (50,)
    assert (span.segment, span.correction) == ("donor", "a>b")
    assert cut.spans[0] == Compute(0, 40) and cut.notes == PLAN.notes


def test_a_head_never_exceeds_what_is_left() -> None:
    span = next(behind(PLAN, 55).reused())
    assert (span.head.length, span.head.limit) == (5, 5) and span.landmarks == ()


def test_computed_spans_in_a_row_become_one() -> None:
    assert behind(PLAN, 65).spans[0] == Compute(0, 70)
    assert behind(PLAN, 95).spans == (Compute(0, 100),)
    assert behind(PLAN, 10).spans == PLAN.spans


@given(st.integers(0, 99))
def test_behind_it_the_same_donor_tokens_stand_at_the_same_positions(held: int) -> None:
    def tokens(plan: Plan) -> dict[int, tuple[str, int]]:
        return {
            spot: (span.segment, span.offset + spot - span.start)
            for span in plan.reused()
            for spot in range(span.start, span.stop)
        }

    expected = {spot: donor for spot, donor in tokens(PLAN).items() if spot >= held}
    assert tokens(behind(PLAN, held)) == expected
