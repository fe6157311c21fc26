"""`kvcmas`: requests that fail, race, share an id, or belong to different tenants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from kvcmas.engines.transformers import Cancellation, SamplingParams
from kvcmas.errors import CancelledError, PromptError
from kvcmas.methods.base import Outcome
from kvcmas.methods.donors import Found
from kvcmas.methods.kvcmas.pair import Pair
from kvcmas.workflow.plan import Plan
from kvcmas.workflow.prompt import Prompt

from .kvcmas_team import KvcmasTeam, prompt_of, teach
from .team import DOCUMENT, reused

FIRST, SECOND = prompt_of("a", DOCUMENT), prompt_of("b", DOCUMENT)
AB = Pair("a", "b")
TOKEN_BYTES = 3 * 2 * 16 * 2 * 4 + 16


@contextmanager
def interrupted(team: KvcmasTeam, step: str, act: Callable[[], object]) -> Iterator[None]:
    """Call `act` whenever the method is asked for a step; the step itself comes after it."""
    original = getattr(team.kvcmas, step)

    def wrapper(*arguments: object) -> object:
        act()
        return original(*arguments)

    setattr(team.kvcmas, step, wrapper)
    try:
        yield
    finally:
        delattr(team.kvcmas, step)


@pytest.fixture
def team(device: torch.device) -> KvcmasTeam:
    """Agents that have learned of each other; `a` has read the document."""
    team = KvcmasTeam(device, exact_readers=2, share=0.3, head=8)
    teach(team, 6, "b", "c")
    team.score(FIRST, "a")
    return team


def state_of(team: KvcmasTeam) -> tuple[object, ...]:
    """What a request may change."""
    infos = [info.id for info in team.library.store.infos()]
    seen = {pair.name: state.seen for pair, state in team.kvcmas.book().pairs.items()}
    return infos, seen, team.kvcmas.donor_bytes(), team.library.pinned()


class TestFailures:
    @pytest.mark.parametrize("step", ["plan", "fill", "decode"])
    @pytest.mark.parametrize("dial", [None, "exact"])
    def test_a_cancelled_request_leaves_nothing(
        self, step: str, dial: str | None, team: KvcmasTeam
    ) -> None:
        """Case 21."""
        before, cancel = state_of(team), Cancellation()
        held: list[int] = []

        def on_token(token: int, text: str) -> None:
            held.append(team.library.pinned())
            if step == "decode" and len(held) == 5:
                cancel.cancel()

        def start() -> None:
            params = SamplingParams(max_tokens=40, ignore_eos=True)
            prompt = team.prompt(SECOND, "b", dial=dial)
            team.engine.generate(prompt, params, on_token=on_token, cancel=cancel)

        if step == "decode":
            with pytest.raises(CancelledError):
                start()
            assert len(held) == 5
            assert min(held) >= 1
        else:
            with interrupted(team, step, cancel.cancel), pytest.raises(CancelledError):
                start()
        assert state_of(team) == before
        assert team.settled()

    @pytest.mark.parametrize("step", ["plan", "reuse", "fill"])
    def test_an_error(self, step: str, team: KvcmasTeam) -> None:
        before = state_of(team)

        def fail() -> None:
            raise RuntimeError("out of memory, say")

        with interrupted(team, step, fail), pytest.raises(RuntimeError, match="memory"):
            team.score(SECOND, "b")
        assert state_of(team) == before
        assert team.settled()
        assert team.score(SECOND, "b").record.reused > 50

    def test_an_error_while_learning(
        self, team: KvcmasTeam, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Pins go back all the same."""

        def fail(*arguments: object) -> None:
            raise RuntimeError("no such luck")

        monkeypatch.setattr(team.kvcmas._learning, "learn", fail)
        with pytest.raises(RuntimeError, match="luck"):
            team.score(SECOND, "b")
        assert team.settled()

    def test_a_donor_that_leaves_while_it_is_used(self, team: KvcmasTeam) -> None:
        expected = team.score(SECOND, "b", tenant="").logits
        info = min(
            (info for info in team.library.store.infos() if info.agent == "a"),
            key=lambda info: -info.created,
        )
        for name in [one.id for one in team.library.store.infos() if one.agent == "b"]:
            team.library.drop(name)
        with interrupted(team, "fill", partial(team.library.drop, info.id)):
            scored = team.score(SECOND, "b")
        torch.testing.assert_close(scored.logits, expected, rtol=1e-3, atol=1e-3)
        assert team.settled()


def test_donors_that_leave_between_lookup_and_use(
    team: KvcmasTeam, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 22."""
    find = team.library.find

    def lose(prompt: Prompt) -> Found:
        found = find(prompt)
        for info in team.library.tenant_infos(prompt.tenant):
            team.library.drop(info.id)
        return found

    monkeypatch.setattr(team.library, "find", lose)
    scored = team.score(SECOND, "b")
    assert scored.record.reused == 0
    assert any("left the store after it was found" in note for note in scored.record.notes)
    assert torch.equal(scored.logits, team.dense(SECOND).logits)
    assert team.settled()


class TestOneId:
    def test_two_at_once_are_refused(self, device: torch.device) -> None:
        team = KvcmasTeam(device, learn=False)
        team.score(FIRST, "a")
        prompt, twin = team.prompt(SECOND, "b"), team.prompt(SECOND[:90], "c")
        twin = Prompt(twin.token_ids, twin.agent, prompt.request_id)
        alone = team.engine.score(team.prompt(SECOND, "b"), [5]).logits
        for other in (twin, prompt):
            for info in team.library.store.infos():
                if info.agent == "b":
                    team.library.drop(info.id)
            refused: list[bool] = []

            def intrude(other: Prompt = other, refused: list[bool] = refused) -> None:
                if not refused:
                    refused.append(True)
                    with pytest.raises(PromptError, match="in use by a request in flight"):
                        team.engine.score(other, [5])
                    assert team.library.pinned() >= 1

            with interrupted(team, "fill", intrude):
                scored = team.engine.score(prompt, [5])
            assert refused
            torch.testing.assert_close(scored.logits, alone, rtol=1e-3, atol=1e-3)
            assert team.settled()
        # One after the other is fine.
        assert team.engine.score(prompt, [5]).record.reused > 50
        assert team.settled()

    def test_finish_without_plan(self, team: KvcmasTeam) -> None:
        before = state_of(team)
        outcome = Outcome(team.dense(SECOND).kv, ((0, len(SECOND)),), exact=True)
        for what in (None, outcome):
            team.kvcmas.finish(team.prompt(SECOND, "b"), what)
        assert state_of(team) == before


def test_the_plan_of_a_request_is_its_own(team: KvcmasTeam) -> None:
    """Plans of several requests in flight, filled and finished in another order."""
    prompts = [team.prompt(prompt_of(agent, DOCUMENT), agent) for agent in "bcd"]
    plans: list[Plan] = [team.kvcmas.plan(prompt) for prompt in prompts]
    assert team.library.pinned() >= 1
    for prompt, plan in zip(reversed(prompts), reversed(plans), strict=True):
        assert plan.length == len(prompt)
        team.kvcmas.finish(prompt, None)
    assert team.settled()
    assert reused(team.score(SECOND, "b").record)
