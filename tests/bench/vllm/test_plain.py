"""Rounds of plain requests, and the verdict on them."""

from __future__ import annotations

from dataclasses import replace

from kvcmas.bench.vllm.answers import Answer
from kvcmas.bench.vllm.plain import judged
from kvcmas.bench.vllm.plain_plan import PLAIN_HINTS, Round, rounds

PLAIN = [[number] * 5 for number in range(6)]
READERS = [[20] * 5, [21] * 5]


def asked() -> list[Round]:
    return rounds(PLAIN, [10] * 5, READERS)


def answers(plan: list[Round], reused: int = 30) -> list[list[Answer]]:
    return [
        [
            Answer((1, 2), ({1: -0.5}, {2: -0.25}), reused=0 if line.plain else reused)
            for line in one.lines
        ]
        for one in plan
    ]


def test_before_beside_and_behind() -> None:
    plan = asked()
    names = [one.name.split()[0].strip(",") for one in plan]
    assert names == ["before"] * 4 + ["donor", "beside"] + ["behind"] * 3
    assert [one.same for one in plan] == [True] * 4 + [False] * 5
    beside = plan[5].lines
    assert sum(line.plain for line in beside) == 3
    assert [line.ids for line in beside if not line.plain] == READERS
    # What the readers were served approximately is asked for plainly behind it.
    assert [one.lines[0].ids for one in plan[6:8]] == READERS
    assert all(one.lines[0].hints == {"reuse": False} for one in plan[6:8])
    hints = [line.hints for one in plan[:3] for line in one.lines]
    assert hints == list(PLAIN_HINTS)


def test_equal_answers_are_identical() -> None:
    plan = asked()
    found = judged(plan, answers(plan), answers(plan))
    assert found["plain_identical"] == 1
    assert found["plain_max_dlogprob_same_batch"] == 0
    assert found["plain_requests"] == sum(line.plain for one in plan for line in one.lines)


def test_bits_count_in_the_same_batch_only() -> None:
    plan = asked()
    expected = answers(plan)
    near = ({1: -0.5 + 1e-6}, {2: -0.25})
    for index, verdict in ((0, 0), (6, 1)):
        now = answers(plan)
        now[index][0] = replace(now[index][0], logprobs=near)
        assert judged(plan, expected, now)["plain_identical"] == verdict


def test_another_token_is_not_identical() -> None:
    plan = asked()
    now = answers(plan)
    now[6][0] = replace(now[6][0], tokens=(1, 3))
    assert judged(plan, answers(plan), now)["plain_identical"] == 0


def test_nothing_reused_says_nothing() -> None:
    plan = asked()
    assert judged(plan, answers(plan), answers(plan, reused=0))["plain_identical"] == 0
