"""Prefills with holes on vLLM's newer model runner, which counts positions on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from .interpreted import use_interpreter

if TYPE_CHECKING:
    from .engine import Server

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

LENGTH = 200
TOKENS = 3


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        use_interpreter(patch)  # before anything imports Triton
        from .engine import serving

        with serving({"method": {"learn": False}}, max_model_len=512, max_num_seqs=8) as one:
            assert one.scheduler.use_v2_model_runner
            yield one


def test_holes_and_a_head(server: Server) -> None:
    from kvcmas.methods.tiling import plan_of
    from kvcmas.workflow.plan import Head, Reuse

    from .engine import NEAR, PLANNER, text

    prompt = server.chat(PLANNER, text(0), "Write a plan.")[:LENGTH]
    dense = server.one(prompt, tokens=TOKENS)
    assert dense.record.computed == LENGTH
    (segment,) = server.donors
    free = server.free_blocks

    head = Head(length=16, chunk=16, limit=32, tolerance=0.1, probe=8)
    plan = plan_of(
        LENGTH,
        [
            Reuse(20, 70, segment, 20),
            Reuse(80, 180, segment, 80, head=head, landmarks=(120, 121)),
        ],
    )
    server.forget_blocks()
    answer = server.one(prompt, plan, tokens=TOKENS)
    assert answer.difference(dense) <= NEAR
    assert answer.record.computed == plan.computed
    assert answer.record.steps == 2
    assert answer.record.spans[-2].deviation is not None
    assert answer.record.spans[-2].deviation < 1e-3
    assert any("#kvcmas" in row for step in server.steps for row in step)
    assert server.scheduled == plan.computed + TOKENS - 1
    server.check_idle(free)

    server.forget_blocks()
    with server.corrupted(segment, 80, 180):
        grown = server.one(prompt, plan, tokens=TOKENS)
    assert grown.difference(dense) <= NEAR
    assert grown.record.reused == 50
    server.check_idle(free)

    server.forget_blocks()
    with server.corrupted(segment, 20, 70):
        wrong = server.one(prompt, plan, tokens=TOKENS)
    assert wrong.ids != dense.ids or wrong.difference(dense) > 0.01
