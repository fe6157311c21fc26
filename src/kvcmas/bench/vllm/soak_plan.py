"""The random requests of the soak, and what each may find. Plain data, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_LONGEST = 3  # passages of a prompt
_NEW_AGENT, _COPIED, _KNOWN_PASSAGE = 0.12, 0.12, 0.6
_PLAIN, _ABORTED = 0.35, 0.12
_MOST_TOKENS = 24
_PLAIN_HINTS: tuple[Mapping[str, Any], ...] = ({"reuse": False}, {"dial": "exact"})
_HINTS: tuple[Mapping[str, Any] | None, ...] = (
    *(None, None, None),
    *({"dial": "strict"}, {"dial": "fast"}, {"warm": True}, {"dial": "nonsense", "other": 1}),
)


@dataclass(frozen=True, slots=True)
class SoakRequest:
    """One request.

    agent, passages: numbers of its system prompt and of the texts behind it.
    plain: it reuses nothing, so its answer is vLLM's own.
    first: its tenant has sent neither this system prompt nor any of these texts before, so that
        nothing of it may be cached. copied: another tenant has sent the very same prompt.
    abort_after: steps until it is given up, or `None`. gap: steps until the next one comes.
    """

    tenant: str
    agent: int
    passages: tuple[int, ...]
    tokens: int
    hints: Mapping[str, Any] | None
    plain: bool
    first: bool
    copied: bool
    abort_after: int | None
    gap: int


@dataclass(slots=True)
class _Tenant:
    """What a tenant has sent."""

    agents: list[int] = field(default_factory=list)
    passages: list[int] = field(default_factory=list)


def soak_plan(
    count: int, passages: int, tenants: Sequence[str], seed: int = 0
) -> list[SoakRequest]:
    """`count` requests of several tenants, which share no text but what one copies of another.

    passages: how many texts there are; each belongs to one tenant.
    """
    draw = random.Random(seed)
    known = {tenant: _Tenant() for tenant in tenants}
    own = {
        tenant: list(range(index, passages, len(tenants))) for index, tenant in enumerate(tenants)
    }
    made: list[SoakRequest] = []
    for number in range(count):
        tenant = draw.choice(tenants)
        found = known[tenant]
        other = _to_copy(draw, made, tenant, found) if draw.random() < _COPIED else None
        if other is not None:
            agent, parts = other.agent, other.passages
        else:
            new = not found.agents or draw.random() < _NEW_AGENT
            agent = number if new else draw.choice(found.agents)
            parts = _passages(draw, found, own[tenant], fresh=new)
        first = agent not in found.agents and not set(parts) & set(found.passages)
        found.agents += [agent] if agent not in found.agents else []
        found.passages += [part for part in parts if part not in found.passages]
        plain = draw.random() < _PLAIN
        made.append(
            SoakRequest(
                tenant,
                agent,
                parts,
                tokens=draw.randint(1, _MOST_TOKENS),
                hints=draw.choice(_PLAIN_HINTS) if plain else draw.choice(_HINTS),
                plain=plain,
                first=first,
                copied=other is not None,
                abort_after=draw.randint(0, 12) if draw.random() < _ABORTED else None,
                gap=draw.choice((0, 0, 0, 1, 4)),
            )
        )
    return made


def _passages(
    draw: random.Random, found: _Tenant, own: Sequence[int], *, fresh: bool
) -> tuple[int, ...]:
    """Different ones; a fresh request takes such as its tenant has not sent, where there are."""
    unsent = [part for part in own if part not in found.passages]
    parts: list[int] = []
    for _ in range(draw.randint(1, _LONGEST)):
        again = not fresh and found.passages and draw.random() < _KNOWN_PASSAGE
        pool = found.passages if again or not unsent else unsent
        part = draw.choice(pool)
        if part not in parts:
            parts.append(part)
        if part in unsent:
            unsent.remove(part)
    return tuple(parts)


def _to_copy(
    draw: random.Random, made: Sequence[SoakRequest], tenant: str, found: _Tenant
) -> SoakRequest | None:
    """Another tenant's request of which this tenant has sent nothing."""
    strange = [
        one
        for one in made
        if one.tenant != tenant
        and one.agent not in found.agents
        and not set(one.passages) & set(found.passages)
    ]
    return draw.choice(strange) if strange else None
