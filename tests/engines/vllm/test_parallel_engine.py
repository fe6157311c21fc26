"""Three tensor parallel ranks, each with the KV of its own head, against one rank."""

from __future__ import annotations

from typing import Any

import pytest

from .engine import CRITIC, NEAR, PLANNER, Answer, Server, serving, text

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

FAST = {"dial": "fast", "method": {"learn": False}}


def shared_text(server: Server) -> tuple[Answer, Answer, Answer]:
    """An agent computes a text, another one reuses it; and what that one gets without."""
    planner = server.chat(PLANNER, text(0), "Write a plan.")
    critic = server.chat(CRITIC, text(0), "Write your criticism.")
    exact = server.one(critic, hints={"reuse": False}, salt="apart")
    first = server.one(planner)
    reader = server.one(critic)
    server.check_idle(server.free_blocks)
    return exact, first, reader


def test_three_ranks_do_what_one_does() -> None:
    with serving(FAST, max_model_len=1024) as server:
        alone = shared_text(server)
    ranks: dict[str, Any] = {
        "tensor_parallel_size": 3,
        "distributed_executor_backend": "mp",
        "max_model_len": 1024,
    }
    with serving(FAST, **ranks) as server:
        together = shared_text(server)
    for one, three in zip(alone, together, strict=True):
        assert three.difference(one) <= NEAR
    (_, _, one), (_, _, three) = alone, together
    assert one.record.reused > one.record.prompt // 2
    mine, theirs = one.record.model_dump(), three.record.model_dump()
    deviations = []
    for record in (mine, theirs):
        for name in ("waited_s",):
            del record[name]
        reused = [span for span in record["spans"] if span["kind"] == "reuse"]
        deviations.append([span.pop("deviation") for span in reused])
        for span in reused:
            del span["segment"]
    assert mine == theirs
    assert deviations[0]
    assert deviations[1] == pytest.approx(deviations[0], rel=1e-3)
