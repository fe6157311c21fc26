"""The planner of `kvcmas` where there is no KV: beside the method, with the same plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvcmas.errors import ConfigError
from kvcmas.methods.base import Outcome
from kvcmas.methods.donors import Donor
from kvcmas.methods.kvcmas.chosen import Chosen
from kvcmas.methods.kvcmas.known import BookKnowledge
from kvcmas.methods.kvcmas.lessons import kept_of
from kvcmas.methods.kvcmas.pair import Pair
from kvcmas.methods.kvcmas.planner import Planned, Planner
from kvcmas.methods.library import DonorLibrary
from kvcmas.store.content import TokenRun
from kvcmas.workflow.plan import Plan
from kvcmas.workflow.prompt import Prompt

from ..engines.tiny import random_ids
from .kvcmas_team import ROLES, TASKS, KvcmasTeam, document


class Told:
    """Knowledge that comes from elsewhere: donors have other names there."""

    def __init__(self, known: BookKnowledge, names: dict[str, str]) -> None:
        self._known = known
        self._names = names

    def seen(self, pair: Pair) -> int:
        return self._known.seen(pair)

    def audited(self, pair: Pair) -> float | None:
        return self._known.audited(pair)

    def corrected(self, pair: Pair) -> bool:
        return self._known.corrected(pair)

    def distance(self, donor: str, reader: str) -> float | None:
        return self._known.distance(donor, reader)

    def second(self, donor: Donor, length: int) -> str | None:
        return self._known.second(self._there(donor), length)

    def landmarks(self, chosen: Chosen, head: int, count: int) -> tuple[int, ...]:
        assert count > 0
        return self._known.landmarks(replace(chosen, donor=self._there(chosen.donor)), head, count)

    def _there(self, donor: Donor) -> Donor:
        return replace(donor, segment=self._names[donor.segment])


class Twin:
    """Plans every request of a team once more, before the team does, and keeps tokens only."""

    def __init__(self, team: KvcmasTeam) -> None:
        self.team, self.method = team, team.kvcmas
        config = self.method.config
        self.library: DonorLibrary[TokenRun] = DonorLibrary(
            config.budget_bytes, config.min_length, min_prefix=config.min_prefix
        )
        self.planner = Planner(config, self.library)
        self.names: dict[str, str] = {}
        self.planned: dict[str, Planned] = {}
        self.plans: list[tuple[Plan, Plan]] = []
        self._plan, self._finish = self.method.plan, self.method.finish
        team.kvcmas.plan, team.kvcmas.finish = self.plan, self.finish  # type: ignore[method-assign]

    def plan(self, prompt: Prompt) -> Plan:
        known = BookKnowledge(self.method.book(prompt.tenant), self.method._derived)
        planned = self.planner.plan(prompt, Told(known, self.names))
        self.planned[prompt.request_id] = planned
        plan = self._plan(prompt)
        spans = tuple(
            replace(span, segment=self.names[span.segment]) if hasattr(span, "segment") else span
            for span in planned.plan.spans
        )
        self.plans.append((replace(planned.plan, spans=spans), plan))
        return plan

    def finish(self, prompt: Prompt, outcome: Outcome | None) -> None:
        assert outcome is not None
        plan, runs = (planned := self.planned.pop(prompt.request_id)).plan, planned.chosen.values()
        computed, exact, config = outcome.computed, outcome.exact, self.method.config
        ids, size = outcome.kv.tokens(), outcome.kv.nbytes // len(outcome.kv)
        self._finish(prompt, outcome)
        self.planner.finished(prompt.tenant, plan, runs, computed)
        self.library.release(prompt.request_id)
        for part in kept_of(plan, runs, computed, exact, config):
            content = TokenRun(ids[part.start : part.stop], size * len(part))
            self.library.add(
                prompt,
                ids,
                part.start,
                part.stop,
                part.exact,
                content,
                copies=config.base == "previous",
            )
        here, there = self.library.store.infos(), self.team.library.store.infos()
        self.names |= {one.id: two.id for one, two in zip(here, there, strict=True)}
        assert [replace(info, id="") for info in here] == [replace(info, id="") for info in there]
        assert self.library.store.nbytes == self.team.library.store.nbytes
        self.library.check_integrity()


SETTINGS: dict[str, dict[str, Any]] = {
    "landmarks": {"share": 0.3, "head": 8},
    "cold, audited, distrusted": {"audit": 0.2, "cold_tokens": 600, "audit_limit": 0.5},
    "two exact readers": {"exact_readers": 2, "share": 0.3, "head": 8},
    "previous": {"base": "previous", "share": 0.3, "head": 8},
    "failing heads": {"tolerance": 0.0},
    "small budget": {"budget_bytes": 1500 * (3 * 2 * 16 * 2 * 4 + 16), "share": 0.3},
}


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_plans_are_those_of_the_method(options: dict[str, Any], device: torch.device) -> None:
    team = KvcmasTeam(device, **options)
    twin = Twin(team)
    for number in range(8):
        text = document(number, 256 if number % 3 else 90)
        question = document(900 + number % 2, 40)
        for agent in "abc":
            ids = ROLES[agent] + question + text + TASKS[agent]
            dial = "exact" if number in (1, 2, 3) else None
            tenant = "x" if number == 4 else ""
            result = team.ask(ids, agent, 36, tenant=tenant, dial=dial)
            text = text + list(result.token_ids)
    assert len(twin.plans) == 24
    for mine, plan in twin.plans:
        assert mine == plan
    spans = [span for _, plan in twin.plans for span in plan.reused()]
    assert any(not span.exact for span in spans)
    assert any(span.landmarks for span in spans) or "share" not in options
    assert twin.library.pinned() == 0
    assert team.settled()


def test_a_wrong_dial_holds_nothing(device: torch.device) -> None:
    team = KvcmasTeam(device)
    team.score(ROLES["a"] + document(0) + TASKS["a"], "a")
    planner = Planner(team.kvcmas.config, team.library)
    known = BookKnowledge(team.kvcmas.book(), team.kvcmas._derived)
    prompt = replace(team.prompt(ROLES["b"] + document(0) + random_ids(5), "b"), dial="never")
    with pytest.raises(ConfigError, match="unknown dial"):
        planner.plan(prompt, known)
    assert team.library.pinned() == 0
    planned = planner.plan(replace(prompt, dial="exact"), known)
    assert [one.pair for one in planned.chosen.values()] == [Pair("a", "b")]
    assert (*planned.plan.reused(),) == ()
    assert team.library.pinned() == 1
    team.library.release(prompt.request_id)
