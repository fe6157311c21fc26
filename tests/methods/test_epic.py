"""`epic`: heads of k tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcmas.core.deviation import relative_deviation
from kvcmas.errors import ConfigError
from kvcmas.methods import create

from .anchor_team import critic, planner
from .team import DOCUMENT, Team, reused, same_kv


def served(device: torch.device, **options: Any) -> tuple[Team, Any]:
    team = Team("epic", device, **options)
    team.score(planner(DOCUMENT))
    return team, team.score(critic(DOCUMENT), "critic")


def test_the_first_k_tokens_are_computed(device: torch.device) -> None:
    team, scored = served(device, k=16)
    (span,) = reused(scored.record)
    assert (span.start, span.stop, span.head, span.tolerance) == (40, 140, 16, None)
    assert (scored.record.computed, scored.record.passes) == (65, 1)
    exact = team.dense(critic(DOCUMENT)).kv
    assert relative_deviation(exact.slice(0, 56), scored.kv.slice(0, 56)) < 1e-5
    assert team.settled()


@pytest.mark.parametrize("k", [100, 1000])
def test_a_head_as_long_as_the_run_is_a_full_prefill(k: int, device: torch.device) -> None:
    team, scored = served(device, k=k)
    assert scored.record.exact
    assert scored.record.computed == len(critic(DOCUMENT))
    expected = team.dense(critic(DOCUMENT)).logits
    assert (scored.logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_without_a_head_it_is_blind_reuse(device: torch.device) -> None:
    _, scored = served(device, k=0)
    blind = Team("fullshared", device)
    blind.score(planner(DOCUMENT))
    assert same_kv(scored.kv, blind.score(critic(DOCUMENT), "critic").kv)


def test_quality_grows_with_k(device: torch.device) -> None:
    """The paper's direction: the more tokens are computed, the nearer to a full prefill."""
    errors = []
    for k in (0, 16, 64, 96):
        team, scored = served(device, k=k)
        exact = team.dense(critic(DOCUMENT)).kv.slice(0, 140)
        errors.append(relative_deviation(exact, scored.kv.slice(0, 140)))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.5 * errors[0]


def test_refused(device: torch.device) -> None:
    team = Team("epic", device)
    with pytest.raises(ConfigError, match="k must be an integer >= 0, got -1"):
        create("epic", team.library.info, k=-1)
