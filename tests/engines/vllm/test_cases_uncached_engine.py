"""vLLM without its prefix cache: everything is served exactly, and the record says why."""

from __future__ import annotations

import pytest

from .engine import CRITIC, PLANNER, serving, text

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.filterwarnings("ignore")]


def test_nothing_is_reused_without_a_prefix_cache() -> None:
    with serving({"dial": "fast"}, enable_prefix_caching=False) as server:
        free = server.free_blocks
        shared = text(0)[:900]
        critic = server.chat(CRITIC, shared, "Write your criticism.")
        clean = server.one(critic, hints={"reuse": False})
        server.one(server.chat(PLANNER, shared, "Write a plan."))
        answer = server.one(critic)
        assert answer.log_probs == clean.log_probs
        assert answer.record.computed == len(critic)
        assert (answer.record.reused, answer.record.cached, answer.cached) == (0, 0, 0)
        assert any("prefix caching is off" in note for note in answer.record.notes)
        assert not server.donors
        server.check_idle(free)
