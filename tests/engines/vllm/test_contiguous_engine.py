"""The connector without kvcmas's scheduler: one exact run behind what is in place is reused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .engine import BLOCK, CRITIC, NEAR, PLANNER, Server, serving, text

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

NOTHING = {"reuse": False}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving({"dial": "fast", "method": {"learn": False}}, scheduler=None) as one:
        yield one


def test_an_exact_beginning_is_reused_to_its_last_token(server: Server) -> None:
    one = server.chat(PLANNER, text(0), "Write a plan.")
    other = server.chat(PLANNER, text(0), "Say in one sentence what it is about.")
    shared = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    assert shared % BLOCK
    clean = server.one(other, hints=NOTHING, salt="clean")
    first = server.one(one)
    assert first.record.computed == len(one)

    local = server.one(other)  # vLLM's whole blocks, and the rest from the donor
    assert local.record.cached == shared // BLOCK * BLOCK
    assert local.record.reused == shared % BLOCK
    assert local.cached == shared
    assert local.difference(clean) <= NEAR

    server.one(one, salt="b")
    server.forget_blocks()
    donated = server.one(other, salt="b")
    assert (donated.record.cached, donated.record.reused) == (0, shared)
    assert donated.cached == shared
    assert donated.difference(clean) <= NEAR
    assert server.scheduled == len(other) - shared + len(donated.ids) - 1
    server.check_idle(server.free_blocks)


def test_there_are_no_holes(server: Server) -> None:
    """Shared text behind another role is computed, and the record says why."""
    server.one(server.chat(PLANNER, text(1), "Write a plan."))
    ids = server.chat(CRITIC, text(1), "Write your criticism.")
    clean = server.one(ids, hints=NOTHING, salt="clean")
    server.forget_blocks()
    reader = server.one(ids)
    assert reader.record.reused == reader.cached == 0
    assert reader.log_probs == clean.log_probs
    assert any("without kvcmas's scheduler" in note for note in reader.record.notes)
    server.check_idle(server.free_blocks)
