"""Teams that run `kvcmas` on a tiny model, with sizes to match."""

from __future__ import annotations

from typing import Any

import torch

from kvcmas.core.deviation import relative_deviation
from kvcmas.methods.kvcmas import Kvcmas

from ..engines.tiny import random_ids
from .team import Team

SMALL: dict[str, Any] = {
    "own_dim": 32,
    "window_dim": 16,
    "other_dim": 16,
    "rank": 16,
    "hidden": 0,
    "basis_tokens": 300,
    "fit_tokens": 300,
    # A random model's KV depends a lot on what stands before it.
    "tolerance": 1000.0,
    "audit_limit": 1000.0,
    "cold_tokens": 0,
    "audit": 0.0,
}
ROLES = {name: random_ids(20, 400 + number) for number, name in enumerate("abcd")}
TASKS = {name: random_ids(9, 500 + number) for number, name in enumerate("abcd")}
"""Role prompts and tasks of the agents `a` to `d`: what stands before and behind a document."""


class KvcmasTeam(Team):
    """A team whose method is `kvcmas`."""

    def __init__(self, device: torch.device, family: str = "llama", **options: Any) -> None:
        super().__init__("kvcmas", device, family, **{**SMALL, **options})
        if not isinstance(self.method, Kvcmas):
            raise TypeError("not kvcmas")
        self.kvcmas = self.method

    def settled(self) -> bool:
        """Also: no request is left, and nothing is kept of donors that are gone."""
        kept = {info.id for info in self.library.store.infos()}
        derived = self.kvcmas._derived
        leftover = (derived._features.keys() | derived._seconds.keys()) - kept
        return super().settled() and not len(self.kvcmas._requests) and not leftover


def document(number: int, tokens: int = 100) -> list[int]:
    """One of many documents of random tokens."""
    return random_ids(tokens, 1000 + number)


def prompt_of(agent: str, text: list[int]) -> list[int]:
    """An agent's prompt about a document."""
    return ROLES[agent] + text + TASKS[agent]


def teach(team: KvcmasTeam, count: int, *readers: str, tokens: int = 100, first: int = 0) -> None:
    """Let readers compute documents exactly that agent `a` was the first to read."""
    for number in range(first, first + count):
        team.score(prompt_of("a", document(number, tokens)), "a")
        for reader in readers:
            team.score(prompt_of(reader, document(number, tokens)), reader, dial="exact")


def first_reads(team: KvcmasTeam, number: int, tokens: int = 100) -> None:
    """Let agent `a` be the first to read a document."""
    team.score(prompt_of("a", document(number, tokens)), "a")


def approximate(team: KvcmasTeam, number: int, reader: str = "b", tokens: int = 100) -> float:
    """Deviation of a document's KV as a reader gets it."""
    first_reads(team, number, tokens)
    ids = prompt_of(reader, document(number, tokens))
    scored = team.score(ids, reader)
    assert not scored.record.exact
    return relative_deviation(
        team.dense(ids).kv.slice(20, 20 + tokens), scored.kv.slice(20, 20 + tokens)
    )
