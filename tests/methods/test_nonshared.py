"""`nonshared` on a model: what it serves is what a full prefill gives."""

from __future__ import annotations

import pytest
import torch

from kvcmas.errors import PromptError

from ..engines.tiny import FAMILIES, LIMIT, random_ids
from .team import DOCUMENT, OTHER_ROLE, OTHER_TASK, ROLE, TASK, Team, reused, same_kv


@pytest.mark.parametrize("family", FAMILIES)
def test_prefix_hit_equals_dense(family: str, device: torch.device) -> None:
    team = Team("nonshared", device, family)
    first, second = ROLE + DOCUMENT + TASK, ROLE + DOCUMENT + OTHER_TASK
    team.score(first)
    scored = team.score(second, "critic")
    assert (scored.record.reused, scored.record.computed) == (120, 9)
    assert [span.exact for span in reused(scored.record)] == [True]
    assert scored.record.exact
    assert team.agrees(scored, second)
    # The reused part is the very KV of the first request.
    assert same_kv(scored.kv.slice(0, 120), team.dense(first).kv.slice(0, 120))
    assert team.settled()


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 47, 48, 49, 64])
def test_the_same_prompt_again(length: int, device: torch.device) -> None:
    team = Team("nonshared", device)
    ids = DOCUMENT[:length]
    first = team.score(ids)
    again = team.score(ids)
    assert first.record.computed == length
    assert again.record.computed == (1 if length > 16 else length)
    assert team.agrees(first, ids)
    assert team.agrees(again, ids)
    assert team.settled()


def test_answers_are_part_of_the_prefix(device: torch.device) -> None:
    """The next turn: everything but the last sampled token, which has no KV, is reused."""
    team = Team("nonshared", device)
    ids = ROLE + DOCUMENT + TASK
    result = team.ask(ids, tokens=12)
    turn = [*ids, *result.token_ids, *OTHER_TASK]
    scored = team.score(turn)
    assert (scored.record.reused, scored.record.computed) == (len(ids) + 11, 10)
    assert team.agrees(scored, turn)
    # The longer beginning replaced the shorter one.
    assert len(team.library.store.infos()) == 1


def test_nothing_but_beginnings(device: torch.device) -> None:
    team = Team("nonshared", device)
    team.ask(ROLE + DOCUMENT + TASK)
    record = team.ask(OTHER_ROLE + DOCUMENT + TASK).record
    assert record.reused == 0
    assert "no stored prompt begins" in record.notes[0]


def test_a_and_b_then_b_and_a(device: torch.device) -> None:
    team = Team("nonshared", device)
    one, two = random_ids(50, 61), random_ids(60, 62)
    team.score(ROLE + one + two + TASK)
    swapped = ROLE + two + one + TASK
    scored = team.score(swapped)
    assert scored.record.reused == len(ROLE)
    assert team.agrees(scored, swapped)


def test_budget(device: torch.device) -> None:
    token = 3 * 2 * 16 * 2 * 4 + 16
    team = Team("nonshared", device, budget_bytes=150 * token)
    ids = ROLE + DOCUMENT + TASK
    team.score(ids)
    team.score(OTHER_ROLE + random_ids(90, 63))
    scored = team.score(ids)
    assert scored.record.reused == 0
    assert f"budget of {150 * token} bytes" in scored.record.notes[1]
    assert team.agrees(scored, ids)
    assert team.settled()


def test_beyond_the_window(device: torch.device) -> None:
    team = Team("nonshared", device)
    team.ask(random_ids(LIMIT - 4, 64))
    before = team.library.store.infos()
    with pytest.raises(PromptError, match="window is 512"):
        team.ask([*random_ids(LIMIT - 4, 64), 5])
    with pytest.raises(PromptError, match="empty"):
        team.ask([])
    assert team.library.store.infos() == before
    assert team.settled()
