"""The holes that prompts are given."""

from __future__ import annotations

import pytest

from kvcmas.bench.vllm.spans import cases, chosen_cases

BLOCK = 32


@pytest.mark.parametrize("length", [300, 347, 470, 600])
def test_every_plan_is_a_plan(length: int) -> None:
    found = {case.name: case.plan for case in cases(length, "donor")}
    assert len(found) == 7
    for plan in found.values():
        assert plan.length == length
        assert 0 < plan.computed < length
        assert all(span.segment == "donor" and span.offset == span.start for span in plan.reused())
    assert found["all but the last token"].computed == 1
    for name, spans in (("one", 1), ("three", 3), ("eight", 8)):
        reused = list(found[name].reused())
        assert len(reused) == spans
        assert any(span.start % BLOCK and span.stop % BLOCK for span in reused)


def test_heads_and_landmarks() -> None:
    found = {case.name: case.plan for case in cases(470, "donor")}
    (span,) = found["landmarks"].reused()
    assert (span.head.length, len(span.landmarks), span.head.tolerance) == (32, 7, None)
    assert {span.head.tolerance for span in found["measured heads"].reused()} == {0.1}


def test_some_cases_by_name() -> None:
    assert [case.name for case in chosen_cases(470, "donor", "three", "one")] == ["one", "three"]
