"""Requests that fail, race or belong to different tenants."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from kvcmas.core.model_info import ModelInfo
from kvcmas.core.segment import SegmentKV
from kvcmas.engines.transformers import Cancellation, SamplingParams
from kvcmas.errors import CancelledError
from kvcmas.methods.donors import Found
from kvcmas.methods.fullshared import FullShared
from kvcmas.methods.kv_library import KVLibrary
from kvcmas.workflow.plan import Plan, Reuse
from kvcmas.workflow.prompt import Prompt

from ..engines.tiny import byte_tokenizer, random_ids
from .team import DOCUMENT, OTHER_ROLE, OTHER_TASK, ROLE, TASK, Team, reused

FIRST = ROLE + DOCUMENT + TASK
SECOND = OTHER_ROLE + DOCUMENT + OTHER_TASK


class TestTenants:
    @pytest.mark.parametrize("method", ["nonshared", "fullshared"])
    def test_share_nothing(self, method: str, device: torch.device) -> None:
        team = Team(method, device)
        for tenant in ("", "a", "A", "../../x", "a\0", "\u00e9", "e\u0301"):
            record = team.ask(FIRST, tenant=tenant).record
            assert record.reused == 0
            # A tenant's first request reads as the very first one did: there is nothing to tell.
            assert record.notes == ("nothing is stored for this tenant: computed",)
            assert team.ask(FIRST, tenant=tenant).record.reused == len(FIRST) - 1
        assert team.settled()


class Interrupting(FullShared):
    """Calls `interrupt` when a request reaches `step`."""

    def __init__(self, info: ModelInfo) -> None:
        super().__init__(info)
        self.step = ""
        self.interrupt: Callable[[], object] = list

    def plan(self, prompt: Prompt) -> Plan:
        plan = super().plan(prompt)
        self._reach("plan")
        return plan

    def fill(self, prompt: Prompt, span: Reuse, start: int, stop: int, out: SegmentKV) -> None:
        self._reach("fill")
        super().fill(prompt, span, start, stop, out)
        self._reach("filled")

    def _reach(self, step: str) -> None:
        if step == self.step:
            self.interrupt()


def interrupting(team: Team) -> Interrupting:
    """Put an interrupting method in the place of the team's."""
    method = Interrupting(team.library.info)
    team.engine.method, team.library = method, method.library
    return method


class TestCancelled:
    @pytest.mark.parametrize("step", ["plan", "fill", "filled", "decode"])
    def test_releases_and_publishes_nothing(self, step: str, device: torch.device) -> None:
        team = Team("fullshared", device)
        method = interrupting(team)
        team.ask(FIRST)
        before = [info.id for info in team.library.store.infos()]
        cancel, held = Cancellation(), []

        def interrupt() -> None:
            held.append(team.library.pinned())
            cancel.cancel()

        method.interrupt, method.step = interrupt, step
        tokens: list[int] = []

        def on_token(token: int, text: str) -> None:
            tokens.append(token)
            if step == "decode" and len(tokens) == 5:
                interrupt()

        params = SamplingParams(max_tokens=40, ignore_eos=True)
        with pytest.raises(CancelledError):
            team.engine.generate(
                team.prompt(SECOND, "critic"), params, on_token=on_token, cancel=cancel
            )
        assert held[0] == 1
        assert team.settled()
        assert [info.id for info in team.library.store.infos()] == before
        assert all(team.library.store.pins(name) == 0 for name in before)

    def test_a_failing_caller(self, device: torch.device) -> None:
        team = Team("fullshared", device)
        team.ask(FIRST)

        def on_token(token: int, text: str) -> None:
            raise RuntimeError("the connection is gone")

        with pytest.raises(RuntimeError, match="connection"):
            team.engine.generate(team.prompt(SECOND, "critic"), on_token=on_token)
        assert team.settled()
        team.engine.tokenizer = byte_tokenizer()
        stream = team.engine.stream(team.prompt(SECOND, "critic"))
        assert isinstance(next(stream), str)
        assert team.library.pinned() == 1
        del stream
        assert team.settled()
        assert len(team.library.store.infos()) == 1


class Forgetting(KVLibrary):
    """Loses every segment between look-up and use."""

    def find(self, prompt: Prompt) -> Found:
        found = super().find(prompt)
        for info in self.tenant_infos(prompt.tenant):
            self.drop(info.id)
        return found


def test_segments_that_leave_between_lookup_and_use(device: torch.device) -> None:
    team = Team("fullshared", device)
    team.method.library = Forgetting(team.library.info, 1 << 24)
    team.score(FIRST)
    # A run, a prefix, a prefix and a run are found and lost again.
    for ids in (SECOND, SECOND, OTHER_ROLE + TASK + DOCUMENT + TASK):
        scored = team.score(ids, "critic")
        assert scored.record.reused == 0
        assert any("left the store after it was found" in note for note in scored.record.notes)
        assert torch.equal(scored.logits, team.dense(ids).logits)
    team.method.library.check_integrity()


def test_removal_while_a_request_runs(device: torch.device) -> None:
    """A donor that is dropped while it is pinned serves its request to the end."""
    team = Team("fullshared", device)
    method = interrupting(team)
    team.score(FIRST)
    expected = team.score(SECOND, "critic", tenant="").logits
    team.library.drop(team.library.tenant_infos("")[-1].id)
    (donor, *rest) = team.library.tenant_infos("")
    method.interrupt, method.step = partial(team.library.drop, donor.id), "plan"
    scored = team.score(SECOND, "critic")
    method.step = ""
    assert not rest
    assert len(reused(scored.record)) == 1
    torch.testing.assert_close(scored.logits, expected)
    assert team.settled()


class TestThreads:
    def test_answers_are_those_of_one_thread(self, device: torch.device) -> None:
        """Four tenants at once, each with a team of its own that reuses in a fixed order."""
        documents = [random_ids(60, 80 + number) for number in range(4)]

        def work(team: Team, number: int) -> list[tuple[tuple[int, ...], int]]:
            answers = []
            for turn in range(3):
                for agent, role in (("planner", ROLE), ("critic", OTHER_ROLE)):
                    ids = role + documents[number] + random_ids(5 + turn, 90 + turn)
                    result = team.ask(ids, agent, 6, tenant=f"tenant {number}")
                    answers.append((result.token_ids, result.record.reused))
            return answers

        alone, together = Team("fullshared", device), Team("fullshared", device)
        expected = [work(alone, number) for number in range(4)]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda number: work(together, number), range(4)))
        assert found == expected
        assert all(answers[-1][1] > 60 for answers in found)
        assert together.settled()

    def test_one_tenant_under_a_small_budget(self, device: torch.device) -> None:
        """Everybody evicts everybody's donors; `nonshared` stays exact all the same."""
        token = 3 * 2 * 16 * 2 * 4 + 16
        team = Team("nonshared", device, budget_bytes=250 * token)
        texts = [ROLE + random_ids(80, 95 + number) + TASK for number in range(4)]
        start = threading.Barrier(4)

        def work(number: int) -> list[bool]:
            start.wait()
            order = texts[number:] + texts[:number]
            return [team.agrees(team.score(ids), ids) for ids in order + order]

        with ThreadPoolExecutor(4) as pool:
            assert all(all(right) for right in pool.map(work, range(4)))
        assert team.settled()
        assert team.library.store.infos()
