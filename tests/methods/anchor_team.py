"""Two or three agents, documents that they share, and a look into methods with anchors."""

from __future__ import annotations

from typing import Any

import torch

from kvcmas.methods.anchors.known import Known
from kvcmas.methods.anchors.method import AnchorMethod

from ..engines.tiny import random_ids
from .team import DOCUMENT, OTHER_ROLE, OTHER_TASK, ROLE, TASK, Team

LAYERS, CHANNELS = 3, 64  # of the tiny llama; channels of keys and values together
DOCUMENTS = [DOCUMENT, *(random_ids(100, 200 + number) for number in range(12))]
LAST_ROLE, LAST_TASK = random_ids(30, 107), random_ids(9, 108)


def planner(document: list[int]) -> list[int]:
    return ROLE + document + TASK


def critic(document: list[int]) -> list[int]:
    return OTHER_ROLE + document + OTHER_TASK


def judge(document: list[int]) -> list[int]:
    return LAST_ROLE + document + LAST_TASK


def templated(number: int) -> list[int]:
    """The document with a few other tokens, never 32 in a row the same."""
    other = random_ids(len(DOCUMENT), 300 + number)
    first = number % 3
    return [
        other[index] if index >= first and (index - first) % 25 == 0 else token
        for index, token in enumerate(DOCUMENT)
    ]


def anchor_team(method: str, device: torch.device, **options: Any) -> Team:
    return Team(method, device, **options)


def known(team: Team, tenant: str = "") -> Known:
    return anchors_of(team).known(tenant)


def anchors_of(team: Team) -> AnchorMethod:
    if not isinstance(team.method, AnchorMethod):
        raise TypeError("the team's method has no anchors")
    return team.method


def drop_donors_of(team: Team, agent: str) -> None:
    """Forget what an agent computed, so that it starts from the other's KV again."""
    for info in team.library.tenant_infos(""):
        if info.agent == agent:
            team.library.drop(info.id)
