"""Hints of a request: what is understood, and that nothing else does any harm."""

from __future__ import annotations

from typing import Any

import pytest

from kvcmas.engines.vllm.hints import Hints, read_hints


def test_without_hints() -> None:
    for params in (None, {}, {"kvcmas": None}, {"do_remote_prefill": True}):
        assert read_hints(params) == Hints(None, None, reuse=True, warm=False, problems=())


def test_all_hints() -> None:
    given = {"agent": "critic", "dial": "fast", "reuse": False, "warm": True}
    assert read_hints({"kvcmas": given}) == Hints("critic", "fast", reuse=False, warm=True)


@pytest.mark.parametrize(
    ("given", "reads"),
    [({}, True), ({"reuse": False}, False), ({"warm": True}, False), ({"warm": False}, True)],
)
def test_whether_anything_may_be_reused(given: dict[str, Any], reads: bool) -> None:
    assert read_hints({"kvcmas": given}).reads is reads


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"agent": 3}, "hint agent ignored: expected a name of 1 to 200 printable"),
        ({"agent": ""}, "hint agent ignored"),
        ({"agent": "a" * 201}, "hint agent ignored"),
        ({"agent": "a\nb"}, "hint agent ignored"),
        ({"dial": "fats"}, "did you mean 'fast'?"),
        ({"dial": ["fast"]}, "hint dial ignored: expected a name, got ['fast']"),
        ({"reuse": "no"}, "hint reuse ignored: expected true or false, got 'no'"),
        ({"warm": 1}, "hint warm ignored: expected true or false, got 1"),
        ({"agnet": "critic"}, "hint 'agnet' ignored: unknown; did you mean 'agent'?"),
        ({7: 1}, "hint 7 ignored: unknown; there are: agent, dial, reuse, warm"),
        ("critic", "hints ignored: kv_transfer_params['kvcmas'] must be an object, got 'critic'"),
        ([1], "must be an object"),
    ],
)
def test_a_bad_hint_is_named_and_the_rest_counts(given: Any, problem: str) -> None:
    hints = read_hints({"kvcmas": given})
    assert len(hints.problems) == 1
    assert problem in hints.problems[0]
    assert (hints.agent, hints.dial, hints.reuse, hints.warm) == (None, None, True, False)
    if isinstance(given, dict):
        good = read_hints({"kvcmas": {"reuse": False, **given}})
        assert good.reuse is ("reuse" in given)


def test_problems_stay_small_whatever_is_sent() -> None:
    given: dict[str, Any] = {f"{number}" * 5000: 1 for number in range(50)}
    problems = read_hints({"kvcmas": {**given, "dial": "x" * 10_000}}).problems
    assert len(problems) == 8
    assert all(len(problem) < 500 for problem in problems)
