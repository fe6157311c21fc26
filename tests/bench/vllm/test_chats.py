"""Text after text, until the chat client's agents reuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from kvcmas.bench.vllm.chats import Row, cached_share, converse, first_turns

AGENTS = ("planner", "analyst", "critic")


def talk(reuses: Callable[[str], bool]) -> Callable[[str], Sequence[Row]]:
    """A client at a server at which first turns of later agents reuse some texts."""

    def rows(text: str) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = []
        for agent in AGENTS:
            held = 80 if reuses(text) and agent != AGENTS[0] else 0
            found.append({"agent": agent, "turn": 1, "prompt": 100, "cached": held})
            found.append({"agent": agent, "turn": 2, "prompt": 120, "cached": 96})
        return found

    return rows


def test_ends_when_all_later_agents_reuse() -> None:
    talks = {"kvcmas": talk(lambda text: text >= "c"), "vllm": talk(lambda text: False)}
    told: list[tuple[str, int, int]] = []
    found = converse(talks, "abcdef", lambda *state: told.append(state))
    assert (found["chat_texts"], found["chat_reusing"]) == (3, 1)
    assert found["chat_first_turn_cached_share_kvcmas"] == pytest.approx(0.8)
    assert found["chat_first_turn_cached_share_vllm"] == 0
    assert found["chat_cached_share_kvcmas"] == pytest.approx((2 * 80 + 3 * 96) / 660)
    assert found["chat_cached_share_vllm"] == pytest.approx(3 * 96 / 660)
    assert len(found["chat_rows"]) == (3 + 2) * 6
    asked = {(row["server"], row["text"]) for row in found["chat_rows"]}
    assert {text for name, text in asked if name == "kvcmas"} == {1, 2, 3}
    # vLLM's own server: the first text and the last.
    assert {text for name, text in asked if name == "vllm"} == {1, 3}
    assert told == [("chat client", number, 6) for number in range(4)]


def test_one_agent_that_does_not_reuse_is_not_all() -> None:
    def rows(text: str) -> list[Row]:
        return [*talk(lambda _: True)(text)[:4], *talk(lambda _: False)(text)[4:]]

    found = converse({"kvcmas": rows, "vllm": rows}, "ab")
    assert (found["chat_texts"], found["chat_reusing"]) == (2, 0)
    assert found["chat_first_turn_cached_share_kvcmas"] == pytest.approx(0.4)


def test_a_first_text_that_is_the_last_is_asked_once() -> None:
    found = converse({"vllm": talk(lambda _: False), "kvcmas": talk(lambda _: True)}, "ab")
    assert (found["chat_texts"], len(found["chat_rows"])) == (1, 2 * 6)
    assert found["chat_first_turn_cached_share_vllm"] == 0


def test_the_first_agent_has_no_first_turn_to_reuse() -> None:
    rows = talk(lambda _: True)("a")
    assert [row["agent"] for row in first_turns(rows)] == ["analyst", "critic"]
    assert first_turns([]) == []


def test_without_a_text_there_is_no_figure() -> None:
    found = converse({"kvcmas": talk(lambda _: True)}, [])
    assert found["chat_texts"] == 0
    assert found["chat_cached_share_kvcmas"] != found["chat_cached_share_kvcmas"]
    assert cached_share([]) != cached_share([])
