"""`kvcmas`: what must be exact is exact, whatever was reused before."""

from __future__ import annotations

import random

import pytest
import torch

from kvcmas.core.deviation import relative_deviation
from kvcmas.engines.transformers import SamplingParams
from kvcmas.errors import ConfigError, PromptError

from ..engines.tiny import LIMIT, random_ids
from .kvcmas_team import KvcmasTeam, document, prompt_of, teach
from .team import ANSWER, DOCUMENT, TASK, Team, model_kv, reused, same_kv

FIRST, SECOND, THIRD = (prompt_of(agent, DOCUMENT) for agent in "abc")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("dial", [None, "exact", "strict", "balanced", "fast"])
def test_first_agent_is_served_as_without_kvcmas(
    family: str, dial: str | None, device: torch.device
) -> None:
    team = Team("kvcmas", device, family)
    scored = team.score(FIRST, "a", dial=dial)
    assert (scored.record.exact, scored.record.reused) == (True, 0)
    keys, values = model_kv(team.model, FIRST)
    assert torch.equal(scored.kv.keys[:, :, : len(FIRST)], keys)
    assert torch.equal(scored.kv.values[:, :, : len(FIRST)], values)
    plain = team.dense(FIRST)
    assert torch.equal(scored.logits, plain.logits)
    assert same_kv(scored.kv, plain.kv)


class TestExactDial:
    def test_reuses_the_exact_prefix_alone(self, device: torch.device) -> None:
        team = KvcmasTeam(device)
        team.score(FIRST, "a")
        team.score(SECOND, "b")
        scored = team.score(SECOND, "b", dial="exact")
        spans = [(span.start, span.exact, span.correction) for span in reused(scored.record)]
        assert spans == [(0, True, None)]
        assert scored.record.exact
        assert any("dial is exact" in note for note in scored.record.notes)
        assert team.agrees(scored, SECOND)

    def test_as_the_dial_of_the_method(self, device: torch.device) -> None:
        team = KvcmasTeam(device, dial="exact")
        for agent in "abc":
            ids = prompt_of(agent, DOCUMENT)
            scored = team.score(ids, agent)
            assert scored.record.reused == 0
            assert torch.equal(scored.logits, team.dense(ids).logits)
        # A single request may be less strict than the method.
        assert team.score(prompt_of("d", DOCUMENT), "d", dial="fast").record.reused > 60

    @pytest.mark.parametrize("base", ["donor", "previous"])
    @pytest.mark.parametrize("landmarks", [False, True])
    def test_nothing_approximate_reaches_it(
        self, base: str, landmarks: bool, device: torch.device
    ) -> None:
        """Case 26, after approximate turns, answers and follow-ups of several agents."""
        team = KvcmasTeam(device, base=base, landmarks=landmarks, share=0.5, head=8)
        teach(team, 6, "b", "c")
        talk = list(DOCUMENT)
        for agent in "abcabc":
            answer = team.ask(prompt_of(agent, talk), agent, 40)
            talk = talk + list(answer.token_ids)[:-1]
        assert any(not info.exact for info in team.library.store.infos())
        for agent in "abcd":
            for text in (DOCUMENT, talk, talk + random_ids(40, 9)):
                ids = prompt_of(agent, text)
                scored = team.score(ids, agent, dial="exact")
                assert scored.record.exact
                assert all(span.exact for span in reused(scored.record))
                assert team.agrees(scored, ids)
        self._check_stored(team)
        assert team.settled()

    @staticmethod
    def _check_stored(team: KvcmasTeam) -> None:
        """Whatever counts as exact is what the model computes."""
        checked = 0
        for info in team.library.store.infos():
            if info.exact and info.start == 0:
                kv = team.library.kv(info.id)
                dense = team.dense([*kv.token_ids.tolist(), 5]).kv.slice(0, len(kv))
                assert relative_deviation(dense, kv) < 1e-4
                checked += 1
        assert checked > 10

    def test_a_prompt_that_an_approximate_one_continues(self, device: torch.device) -> None:
        """The answer behind reused KV is the agent's own, but no exact prefix."""
        team = KvcmasTeam(device)
        team.score(FIRST, "a")
        answer = list(team.ask(SECOND, "b", 60).token_ids)
        longer = SECOND + answer
        own = reused(team.score(longer, "b").record)[-1]
        assert (own.correction, own.head, own.exact) == (None, 0, False)
        exact = team.score(longer, "b", dial="exact")
        assert team.agrees(exact, longer)
        # And another agent's exact request with the very same text.
        assert team.agrees(team.score(longer, "c", dial="exact"), longer)


@pytest.mark.parametrize("base", ["donor", "previous"])
def test_whatever_is_called_exact_is(base: str, device: torch.device) -> None:
    """Random traffic of four agents, with documents in any order and heads that disagree."""
    team = KvcmasTeam(device, base=base, head=8, share=0.3, tolerance=0.9, exact_readers=2)
    choose = random.Random(3)
    exact = 0
    for _ in range(60):
        parts = [document(choose.randrange(4), choose.choice((60, 100))) for _ in range(2)]
        ids = prompt_of(agent := choose.choice("abcd"), [token for part in parts for token in part])
        scored = team.score(ids, agent, dial=choose.choice((None, None, "exact")))
        if scored.record.exact:
            exact += 1
            assert team.agrees(scored, ids)
        if choose.random() < 0.1:
            team.library.drop(team.library.store.infos()[0].id)
    assert 20 < exact < 55
    assert team.settled()


@pytest.mark.parametrize("dial", ["bogus", "", "Exact", "ballanced"])
def test_unknown_dial(dial: str, device: torch.device) -> None:
    team = KvcmasTeam(device)
    team.score(FIRST, "a")
    with pytest.raises(ConfigError, match="unknown dial"):
        team.score(SECOND, "b", dial=dial)
    assert team.settled()
    assert len(team.library.store.infos()) == 1


class TestHeadsThatDisagree:
    @pytest.mark.parametrize("limit", [0, 16, 64, 500])
    def test_give_the_dense_result(self, limit: int, device: torch.device) -> None:
        team = KvcmasTeam(device, tolerance=0.0, limit=limit)
        teach(team, 5, "b")
        team.score(FIRST, "a")
        scored = team.score(SECOND, "b")
        (span,) = (span for span in reused(scored.record) if not span.exact)
        assert span.head == len(range(span.start, span.stop))
        assert "above tolerance" in span.notes[-1]
        assert scored.record.exact
        assert team.agrees(scored, SECOND)
        # It was exact, so it is a donor and a beginning like any other.
        again = team.score(SECOND, "b", dial="exact")
        assert again.record.computed == 1
        assert team.agrees(again, SECOND)

    def test_a_long_head_of_which_a_part_is_kept(self, device: torch.device) -> None:
        """Behind a head that grew and then agreed, the beginning is still exact."""
        team = KvcmasTeam(device, head=8)
        team.score(FIRST, "a")
        deviations = team.score(SECOND, "b")
        measured = next(span.deviation for span in reused(deviations.record) if not span.exact)
        assert measured is not None
        assert 0 < measured < 1000
        text = prompt_of("c", DOCUMENT)
        strict = KvcmasTeam(device, head=8, tolerance=measured)
        strict.score(FIRST, "a")
        strict.score(text, "c")
        kept = max(strict.library.store.infos(), key=lambda info: info.created)
        kv = strict.library.kv(kept.id)
        assert (kept.agent, kept.start, kept.exact) == ("c", 0, True)
        dense = strict.dense(text).kv.slice(0, len(kv))
        assert relative_deviation(dense, kv) < 1e-4


class TestLengths:
    @pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 34])
    def test_short_prompts(self, length: int, device: torch.device) -> None:
        team = KvcmasTeam(device)
        team.score(FIRST, "a")
        for ids in (FIRST[:length], DOCUMENT[:length], TASK[:length]):
            for agent in "ab":
                scored = team.score(ids, agent)
                assert scored.record.computed >= 1
                if scored.record.exact:
                    assert team.agrees(scored, ids)
        assert team.settled()

    @pytest.mark.parametrize("length", [63, 64, 65, 79, 80, 81])
    def test_fully_covered_prompts_compute_a_token(self, length: int, device: torch.device) -> None:
        """Case 5."""
        team = KvcmasTeam(device)
        ids = DOCUMENT[:length]
        team.score(ids, "a")
        for agent in "ab":
            scored = team.score(ids, agent)
            assert scored.record.computed == 1
            assert team.agrees(scored, ids)
        record = team.score(prompt_of("b", [])[:20] + ids, "b").record
        assert record.computed >= 21
        assert record.computed + record.reused == 20 + length

    @pytest.mark.parametrize("more", [-1, 0, 1])
    def test_the_models_window(self, more: int, device: torch.device) -> None:
        """Case 9: the segment fits its donor, but not every reader."""
        team = KvcmasTeam(device)
        text = random_ids(LIMIT - 40, 77)
        team.score(text, "a")
        role = random_ids(40 - len(ANSWER) + more, 78)
        if more <= 0:
            assert team.score(role + text, "b").record.reused > 400
        else:
            before = len(team.library.store.infos())
            with pytest.raises(PromptError):
                team.score(role + text, "b")
            assert len(team.library.store.infos()) == before
        assert team.settled()

    def test_an_empty_prompt(self, device: torch.device) -> None:
        team = KvcmasTeam(device)
        with pytest.raises(PromptError):
            team.score([], "a")
        assert team.settled()

    def test_no_tokens_asked_for(self, device: torch.device) -> None:
        team = KvcmasTeam(device)
        result = team.engine.generate(team.prompt(FIRST, "a"), SamplingParams(max_tokens=0))
        assert result.token_ids == ()
        assert team.score(SECOND, "b").record.reused > 60


def test_a_and_b_then_b_and_a(device: torch.device) -> None:
    """Case 6: two segments in another order, each behind a head of its own."""
    one, two = document(1, 80), document(2, 100)
    team = KvcmasTeam(device, head=16)
    team.score(prompt_of("a", one + two), "a")
    ids = prompt_of("b", two + one)
    scored = team.score(ids, "b")
    assert [(span.start, span.stop, span.head) for span in reused(scored.record)] == [
        (20, 120, 16),
        (120, 200, 16),
    ]
    dense = team.dense(ids)
    # Random weights exaggerate the deviation; still nearer than unrelated KV would be.
    assert relative_deviation(dense.kv.slice(20, 200), scored.kv.slice(20, 200)) < 1.0
    assert torch.isfinite(scored.logits).all()
    assert team.agrees(team.score(ids, "b", dial="exact"), ids)
    assert team.settled()
