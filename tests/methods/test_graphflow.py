"""`graphflow`: residuals of relations that recur."""

from __future__ import annotations

import pytest
import torch

from kvcmas.core.deviation import relative_deviation
from kvcmas.engines.transformers import Cancellation, SamplingParams
from kvcmas.errors import CancelledError, ConfigError
from kvcmas.methods import create
from kvcmas.methods.graphflow import GraphFlow

from .anchor_team import CHANNELS, DOCUMENTS, LAYERS, critic, drop_donors_of, judge, planner
from .team import DOCUMENT, Team, reused, same_kv


def method_of(team: Team) -> GraphFlow:
    if not isinstance(team.method, GraphFlow):
        raise TypeError("another method")
    return team.method


def test_a_recurring_relation(device: torch.device) -> None:
    team = Team("graphflow", device, density=1.0)
    team.score(planner(DOCUMENT))
    blind = team.score(critic(DOCUMENT), "critic")
    assert [span.correction for span in reused(blind.record)] == [None]
    second = team.score(critic(DOCUMENT), "critic")
    assert second.record.exact
    assert any("it recurs" in note for note in second.record.notes)
    drop_donors_of(team, "critic")
    third = team.score(critic(DOCUMENT), "critic")
    assert [span.correction for span in reused(third.record)] == ["residual"]
    exact = team.dense(critic(DOCUMENT)).kv
    errors = [
        relative_deviation(exact.slice(40, 140), scored.kv.slice(40, 140))
        for scored in (blind, third)
    ]
    assert errors[1] < 1e-4 < 1e-2 < errors[0]
    assert team.agrees(third, critic(DOCUMENT))
    assert team.settled()


def test_the_denser_the_better(device: torch.device) -> None:
    errors = []
    for density in (0.01, 0.1, 0.5):
        team = Team("graphflow", device, density=density)
        team.score(planner(DOCUMENT))
        team.score(critic(DOCUMENT), "critic", dial="exact")
        kept = -(-density * len(DOCUMENT) * CHANNELS // 1)
        assert method_of(team).state_bytes() == 8 * (LAYERS - 1) * kept
        drop_donors_of(team, "critic")
        kv = team.score(critic(DOCUMENT), "critic").kv.slice(40, 140)
        errors.append(relative_deviation(team.dense(critic(DOCUMENT)).kv.slice(40, 140), kv))
    blind = Team("fullshared", device)
    blind.score(planner(DOCUMENT))
    kv = blind.score(critic(DOCUMENT), "critic").kv.slice(40, 140)
    errors.insert(0, relative_deviation(blind.dense(critic(DOCUMENT)).kv.slice(40, 140), kv))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.5 * errors[0]


def test_other_texts_and_readers_are_blind_reuse(device: torch.device) -> None:
    """Whatever it knows of a text or of a reader, another relation gets nothing of it."""
    team, blind = Team("graphflow", device), Team("fullshared", device)
    team.score(planner(DOCUMENT))
    team.score(critic(DOCUMENT), "critic", dial="exact")
    drop_donors_of(team, "critic")
    blind.score(planner(DOCUMENT))
    one, other = (which.score(judge(DOCUMENT), "judge") for which in (team, blind))
    assert same_kv(one.kv, other.kv)
    for which in (team, blind):
        which.score(planner(DOCUMENTS[1]))
    one, other = (which.score(critic(DOCUMENTS[1]), "critic") for which in (team, blind))
    assert same_kv(one.kv.slice(40, 140), other.kv.slice(40, 140))
    assert [span.correction for span in reused(one.record)] == [None]


def test_tenants_share_nothing(device: torch.device) -> None:
    team = Team("graphflow", device)
    team.score(planner(DOCUMENT), tenant="a")
    team.score(critic(DOCUMENT), "critic", tenant="a", dial="exact")
    team.score(planner(DOCUMENT), tenant="b")
    record = team.score(critic(DOCUMENT), "critic", tenant="b").record
    assert [span.correction for span in reused(record)] == [None]
    assert method_of(team).state_bytes("a") > 0
    assert method_of(team).state_bytes("b") == 0


def test_a_cancelled_request_leaves_nothing(device: torch.device) -> None:
    team = Team("graphflow", device, compute_at=1)
    team.score(planner(DOCUMENT))
    cancel = Cancellation()

    def on_token(token: int, text: str) -> None:
        cancel.cancel()

    with pytest.raises(CancelledError):
        team.engine.generate(
            team.prompt(critic(DOCUMENT), "critic"),
            SamplingParams(max_tokens=9, ignore_eos=True),
            on_token=on_token,
            cancel=cancel,
        )
    assert team.settled()
    assert (method_of(team)._tenants, method_of(team)._reads) == ({}, {})


def test_the_longest_unused_residual_leaves(device: torch.device) -> None:
    team = Team("graphflow", device, relations=2)
    for document in DOCUMENTS[:3]:
        team.score(planner(document))
        team.score(critic(document), "critic", dial="exact")
    kept = -(-len(DOCUMENT) * CHANNELS // 10)
    assert method_of(team).state_bytes() == 2 * 8 * (LAYERS - 1) * kept


def test_refused(device: torch.device) -> None:
    info = Team("graphflow", device).library.info
    with pytest.raises(ConfigError, match="density must be a number"):
        create("graphflow", info, density=0)
    with pytest.raises(ConfigError, match="compute_at must be an integer >= 0"):
        create("graphflow", info, compute_at=-1)
