"""A library whose donors are held as KV, in the process that computes with them."""

from __future__ import annotations

from kvcmas.core.model_info import ModelInfo
from kvcmas.core.segment import SegmentKV
from kvcmas.methods.base import Outcome
from kvcmas.methods.library import DonorLibrary
from kvcmas.store.info import Put
from kvcmas.workflow.prompt import Prompt


class KVLibrary(DonorLibrary[SegmentKV]):
    """See `DonorLibrary`, which the other arguments are for.

    Args:
        info: the model that all KV belongs to.
    """

    def __init__(
        self,
        info: ModelInfo,
        budget_bytes: int,
        min_length: int = 32,
        *,
        min_prefix: int = 16,
        runs: bool = True,
        tenant_bytes: int | None = None,
    ) -> None:
        super().__init__(
            budget_bytes,
            min_length,
            min_prefix=min_prefix,
            runs=runs,
            tenant_bytes=tenant_bytes,
        )
        self.info = info

    def kv(self, segment: str) -> SegmentKV:
        """KV of a segment, preferably pinned.

        Raises:
            PlanError: no such segment is here.
        """
        return self.content(segment)

    def capture(
        self,
        prompt: Prompt,
        outcome: Outcome,
        start: int,
        stop: int,
        exact: bool,
        *,
        copies: bool = False,
    ) -> Put:
        """`add` positions `[start, stop)` of what an engine computed."""
        kv = outcome.kv
        ids = kv.token_ids[:stop].cpu().numpy()
        return self.add(prompt, ids, start, stop, exact, kv.slice(start, stop), copies=copies)
