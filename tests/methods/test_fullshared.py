"""`fullshared` on a model: what is reused, and what stays exact."""

from __future__ import annotations

import pytest
import torch

from kvcmas.core.deviation import relative_deviation
from kvcmas.methods.base import Outcome

from ..engines.tiny import random_ids
from .team import (
    ANSWER,
    BOS,
    DOCUMENT,
    OTHER_ROLE,
    OTHER_TASK,
    ROLE,
    TASK,
    Team,
    model_kv,
    reused,
    same_kv,
)

FIRST = ROLE + DOCUMENT + TASK
SECOND = OTHER_ROLE + DOCUMENT + OTHER_TASK


@pytest.fixture
def team(device: torch.device) -> Team:
    return Team("fullshared", device)


def test_first_agent_is_served_as_without_kvcmas(team: Team) -> None:
    scored = team.score(FIRST)
    assert scored.record.exact
    assert scored.record.reused == 0
    keys, values = model_kv(team.model, FIRST)
    assert torch.equal(scored.kv.keys[:, :, : len(FIRST)], keys)
    assert torch.equal(scored.kv.values[:, :, : len(FIRST)], values)
    plain = team.dense(FIRST)
    assert torch.equal(scored.logits, plain.logits)
    assert same_kv(scored.kv, plain.kv)


def test_reader_reuses_the_document(team: Team) -> None:
    team.score(FIRST)
    scored = team.score(SECOND, "critic")
    record = scored.record
    assert (record.prompt, record.computed, record.reused, record.passes) == (149, 49, 100, 1)
    (span,) = reused(record)
    assert (span.start, span.stop, span.offset, span.head) == (40, 140, 20, 0)
    assert (span.exact, span.correction, record.exact) == (False, None, False)
    # Layer 0 knows nothing of other tokens: moved keys are exact there. Deeper, blind reuse errs.
    dense = team.dense(SECOND).kv
    for layers, low, high in ((slice(0, 1), 0, 1e-5), (slice(1, 3), 0.01, 1)):
        one, other = (
            type(kv)(kv.keys[layers], kv.values[layers], kv.token_ids, kv.positions)
            for kv in (scored.kv.slice(40, 140), dense.slice(40, 140))
        )
        assert low <= relative_deviation(other, one) <= high
    assert torch.isfinite(scored.logits).all()
    assert team.settled()


def test_the_same_prompt_again(team: Team) -> None:
    """An agent's second turn: exact role, the document, and its own KV of what follows."""
    tail = random_ids(40, 71)
    team.score(FIRST)
    first = team.score(SECOND + tail, "critic")
    again = team.score(SECOND + tail, "critic")
    spans = [(span.start, span.stop, span.exact) for span in reused(again.record)]
    assert spans == [(0, 40, True), (40, 140, False), (140, 188, False)]
    assert again.record.computed == 1
    torch.testing.assert_close(again.logits, first.logits, rtol=1e-3, atol=1e-3)
    end = len(SECOND + tail)
    assert relative_deviation(first.kv.slice(0, end), again.kv.slice(0, end)) < 1e-5


@pytest.mark.parametrize("length", [47, 48, 49, 64])
def test_fully_covered_prompts_compute_a_token(team: Team, length: int) -> None:
    ids = DOCUMENT[:length]
    team.score(ids)
    scored = team.score(ids, "critic")
    assert scored.record.computed == 1
    assert team.agrees(scored, ids)
    # The same, covered by a run instead of a prefix.
    team.score(ROLE + DOCUMENT)
    assert team.score(OTHER_ROLE + ids).record.computed == 42


def test_a_and_b_then_b_and_a(team: Team) -> None:
    one, two = random_ids(50, 72), random_ids(60, 73)
    team.score(ROLE + one + two + TASK)
    record = team.score(OTHER_ROLE + two + one + OTHER_TASK, "critic").record
    assert [(span.start, span.stop, span.offset) for span in reused(record)] == [
        (40, 100, 70),
        (100, 150, 20),
    ]
    assert record.computed == 49


def test_answers_are_donors(team: Team) -> None:
    answer = list(team.ask(FIRST, tokens=50).token_ids)
    record = team.ask(OTHER_ROLE + answer + OTHER_TASK, "critic").record
    (span,) = reused(record)
    assert (span.start, span.stop) == (40, 89)  # the last sampled token has no KV
    assert span.offset == len(FIRST)


class TestBeginOfText:
    """The token at position 0 is never reused anywhere else."""

    @pytest.mark.parametrize(
        ("lone", "start", "offset"),
        [([BOS, *DOCUMENT], 300, 1), (DOCUMENT, 301, 1)],
    )
    def test_lone_document_far_away(
        self, team: Team, lone: list[int], start: int, offset: int
    ) -> None:
        team.score(lone)
        far = [BOS, *random_ids(299, 74), *DOCUMENT, *TASK]
        record = team.score(far, "critic").record
        (span,) = reused(record)
        assert (span.start, span.stop, span.offset) == (start, 400, offset)
        assert record.spans[0].kind == "compute"

    def test_even_where_the_prompt_repeats_it(self, team: Team) -> None:
        team.score([BOS, *DOCUMENT])
        (span,) = reused(team.score([BOS, *ROLE, BOS, *DOCUMENT, *TASK], "critic").record)
        assert (span.start, span.offset) == (22, 1)

    def test_a_reader_computes_its_own(self, team: Team) -> None:
        team.score(FIRST)
        record = team.score(DOCUMENT + OTHER_TASK, "critic").record
        assert [(span.start, span.stop, span.offset) for span in reused(record)] == [(1, 100, 21)]


class TestExactness:
    def test_exact_dial(self, team: Team) -> None:
        team.score(FIRST)
        team.score(SECOND, "critic")
        scored = team.score(SECOND, "critic", dial="exact")
        assert [(span.start, span.stop, span.exact) for span in reused(scored.record)] == [
            (0, 40, True)
        ]
        assert scored.record.exact
        assert "dial is exact" in scored.record.notes[0]
        assert team.agrees(scored, SECOND)

    def test_a_plain_request_is_not_polluted(self, team: Team) -> None:
        """Another tenant's request, after others reused: as without kvcmas, bit for bit."""
        team.score(FIRST)
        team.score(SECOND, "critic")
        plain = team.score(SECOND, "critic", tenant="plain")
        assert torch.equal(plain.logits, team.dense(SECOND).logits)

    def test_prefixes_stay_exact_behind_reuse(self, team: Team) -> None:
        """What a reader captured next to approximate KV never answers as an exact prefix."""
        team.score(FIRST)
        team.score(SECOND, "critic")
        for info in team.library.store.infos():
            segment = team.library.kv(info.id)
            if info.exact and info.start == 0:
                ids = segment.token_ids.tolist()
                keys, _ = model_kv(team.model, ids)
                assert (segment.keys - keys).abs().max() <= 1e-4 * keys.abs().max()
        kept = {(info.agent, info.start, info.exact) for info in team.library.store.infos()}
        assert kept == {("planner", 0, True), ("critic", 0, True)}
        prefix = team.library.find(team.prompt([*SECOND, *ANSWER], "critic")).prefix
        assert prefix is not None
        assert prefix.length == len(OTHER_ROLE)


class TestLengths:
    @pytest.mark.parametrize(("length", "expected"), [(31, 0), (32, 32), (33, 33)])
    def test_shortest_run(self, team: Team, length: int, expected: int) -> None:
        team.score(FIRST)
        ids = OTHER_ROLE + DOCUMENT[10 : 10 + length] + OTHER_TASK
        assert team.score(ids, "critic").record.reused == expected

    def test_option(self, device: torch.device) -> None:
        team = Team("fullshared", device, min_length=8)
        team.score(FIRST)
        ids = OTHER_ROLE + DOCUMENT[10:25] + OTHER_TASK
        assert team.score(ids, "critic").record.reused == 15


def test_tiny_budget_falls_back_to_compute(device: torch.device) -> None:
    team = Team("fullshared", device, budget_bytes=1000)
    team.score(FIRST)
    scored = team.score(SECOND, "critic")
    assert scored.record.reused == 0
    assert "whole budget is 1000" in scored.record.notes[1]
    assert torch.equal(scored.logits, team.dense(SECOND).logits)
    assert team.settled()


def test_choice_of_donor(team: Team) -> None:
    """The reader's own KV, else exact KV, else what is newest."""
    team.score(FIRST)
    outcome = Outcome(team.dense(SECOND).kv, ((0, len(SECOND)),), exact=False)
    critic = team.prompt(SECOND, "critic")
    newest = team.library.capture(critic, outcome, 40, 140, False, copies=True)
    (span,) = reused(team.score(SECOND, "critic").record)
    assert (span.segment, span.offset, span.exact) == (newest.id, 0, False)
    span = reused(team.score(SECOND, "judge").record)[-1]
    assert (span.segment != newest.id, span.offset, span.exact) == (True, 20, False)
