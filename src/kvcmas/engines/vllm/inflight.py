"""Prompts that are being computed: whoever shares text with one waits for it to become a donor.

Otherwise several agents that are asked at once about the same new text would each compute it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcmas.workflow.matching import SegmentIndex
from kvcmas.workflow.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Pending:
    """A prompt in flight that holds `tokens` tokens of another one, in a row."""

    request_id: str
    agent: str
    tokens: int


@dataclass(slots=True)
class _Tenant:
    index: SegmentIndex
    agents: dict[str, str] = field(default_factory=dict)


class InFlight:
    """Prompts in flight, for each tenant apart.

    Args:
        min_length: shortest run in tokens that is worth waiting for.
    """

    def __init__(self, min_length: int) -> None:
        self._min_length = min_length
        self._tenants: dict[str, _Tenant] = {}
        self._tenant_of: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._tenant_of)

    def add(self, prompt: Prompt) -> None:
        """A prompt is being computed from now on."""
        if prompt.request_id in self._tenant_of or len(prompt) < self._min_length:
            return
        window = min(16, (self._min_length + 1) // 2)
        tenant = self._tenants.setdefault(prompt.tenant, _Tenant(SegmentIndex(window)))
        tenant.index.add(prompt.request_id, prompt.token_ids)
        tenant.agents[prompt.request_id] = prompt.agent
        self._tenant_of[prompt.request_id] = prompt.tenant

    def remove(self, request_id: str) -> None:
        """It has become a donor, or ended in another way."""
        name = self._tenant_of.pop(request_id, None)
        if name is None:
            return
        tenant = self._tenants[name]
        tenant.index.remove(request_id)
        del tenant.agents[request_id]
        if not tenant.agents:
            del self._tenants[name]

    def shared(self, prompt: Prompt) -> list[Pending]:
        """Prompts of other agents in flight that share a run with this one, longest run first."""
        tenant = self._tenants.get(prompt.tenant)
        if tenant is None:
            return []
        found: dict[str, int] = {}
        for match in tenant.index.match(prompt.token_ids[1:], self._min_length):
            for source in match.sources:
                if source.segment != prompt.request_id:
                    found[source.segment] = max(found.get(source.segment, 0), len(match))
        pending = [Pending(name, tenant.agents[name], size) for name, size in found.items()]
        others = [one for one in pending if one.agent != prompt.agent]
        return sorted(others, key=lambda one: -one.tokens)
