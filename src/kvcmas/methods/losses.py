"""What tenants last lost for want of room, to be told in the notes of their plans."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from kvcmas.store.segments import SegmentStore

_REMEMBERED = 256  # tenants


class Losses:
    """The last loss of each of the tenants that lost something most recently."""

    def __init__(self, store: SegmentStore[Any]) -> None:
        self._evicted = f"segments left to keep the budget of {store.budget} bytes"
        if store.tenant_bytes is not None:
            self._evicted += f", {store.tenant_bytes} for a tenant"
        self._reasons: OrderedDict[str, str] = OrderedDict()

    def evicted(self, tenant: str) -> None:
        """Segments of the tenant's had to leave."""
        self.refused(tenant, self._evicted)

    def refused(self, tenant: str, reason: str) -> None:
        """A segment of the tenant's was not stored."""
        self._reasons[tenant] = reason
        self._reasons.move_to_end(tenant)
        if len(self._reasons) > _REMEMBERED:
            self._reasons.popitem(last=False)

    def notes(self, tenant: str, what: str) -> tuple[str, ...]:
        """That something is computed, and what was lost before."""
        loss = self._reasons.get(tenant)
        return (f"{what}: computed",) + ((f"before: {loss}",) if loss else ())
