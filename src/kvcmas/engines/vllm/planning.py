"""From a request that waits to a plan that can be executed.

wait       for a prompt in flight that will be a donor, within a limit
plan       by the method's own planner
adopt      behind what the same agent was served with before
rename     the blocks from the first approximate one on
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvcmas.engines.vllm.chains import (
    Hasher,
    OwnVariants,
    Variant,
    first_approximate,
    variant_chain,
)
from kvcmas.engines.vllm.directory import Directory
from kvcmas.engines.vllm.inflight import InFlight
from kvcmas.engines.vllm.metric_names import Reason
from kvcmas.engines.vllm.progress import Progress
from kvcmas.engines.vllm.recording import Counting
from kvcmas.engines.vllm.tracked import Tracked
from kvcmas.engines.vllm.trimming import behind
from kvcmas.methods.kvcmas.config import EXACT
from kvcmas.methods.kvcmas.planner import Planned
from kvcmas.workflow.plan import Plan

LocalHit = Callable[[Any], int]
"""Tokens of a request that vLLM's own prefix cache holds, under its present block hashes."""


class Planning:
    """Plans requests, each once.

    Args:
        directory: the donors, and what was learned.
        hasher, block_size: vLLM's block hash, and tokens of a block.
        wait_s: longest wait for a donor in seconds.
        count: gives whoever counts now.
    """

    def __init__(
        self,
        directory: Directory,
        hasher: Hasher,
        block_size: int,
        wait_s: float,
        clock: Callable[[], float],
        count: Callable[[], Counting],
    ) -> None:
        self.directory = directory
        self.inflight = InFlight(directory.min_length)
        self.presets: dict[str, Planned] = {}
        self._variants = OwnVariants()
        self._hasher = hasher
        self._block_size = block_size
        self._wait_s = wait_s
        self._clock = clock
        self._count = count

    def ready(self, tracked: Tracked, local_hit: LocalHit, holes: bool) -> bool:
        """Plan a request unless it waits for a donor; whether it may be scheduled."""
        if tracked.planned is not None:
            return True
        if tracked.refused is not None:
            tracked.planned = Planned(Plan.dense(len(tracked.prompt), tracked.refused), {})
            self._announce(tracked)
            return True
        now = self._clock()
        if self._waits(tracked, now):
            return False
        started = time.perf_counter()
        self._plan(tracked, local_hit, holes)
        tracked.match_s = time.perf_counter() - started
        self._count().spent({"match": tracked.match_s})
        self._announce(tracked)
        return True

    def _announce(self, tracked: Tracked) -> None:
        """A prompt that will be a donor: others may wait for it."""
        exact = tracked.progress is None or tracked.progress.exact
        if exact and not tracked.keeps_nothing:
            self.inflight.add(tracked.prompt)

    def _waits(self, tracked: Tracked, now: float) -> bool:
        """Whether another prompt that is being computed will be a donor worth waiting for."""
        if tracked.prompt.request_id in self.presets:
            return False
        begun = tracked.waiting_since
        if begun is not None and now - begun >= self._wait_s:
            tracked.waited_s = now - begun
            tracked.notes.append(f"no longer waiting for a donor after {tracked.waited_s:.1f} s")
            tracked.waiting_since = None
            self._count().decided(Reason.WAIT)
            return False
        if tracked.waited_s:
            return False
        pending = self.inflight.shared(tracked.prompt)
        worth = any(self.directory.worth_waiting(tracked.prompt, one) for one in pending)
        if not worth and not self.directory.settling(tracked.prompt):
            if begun is not None:
                tracked.waited_s = now - begun
                tracked.waiting_since = None
            return False
        if begun is None:
            tracked.waiting_since = now
        return True

    def _plan(self, tracked: Tracked, local_hit: LocalHit, holes: bool) -> None:
        prompt, request = tracked.prompt, tracked.request
        preset = self.presets.pop(prompt.request_id, None)
        planned = self.directory.plan(prompt, preset)
        tracked.planned = planned
        plan = planned.plan
        approximate = first_approximate(plan) is not None
        tracked.cached = local_hit(request)
        # Runs that were found and are computed all the same are to come out exact.
        if prompt.dial != EXACT and (approximate or not planned.chosen):
            self._adopt(tracked, local_hit)
        plan = behind(plan, tracked.cached)
        if not holes:
            plan = self.directory.contiguous(plan, tracked.cached, prompt, tracked.notes)
        first = first_approximate(plan)
        if first is not None:
            self._rename(tracked, plan, first)
        if any(True for _ in plan.reused()) or tracked.variant:
            tracked.progress = Progress(plan)
            tracked.sources = self.directory.sources(planned, plan, prompt)

    def _adopt(self, tracked: Tracked, local_hit: LocalHit) -> None:
        """Go on behind what the agent was served with before, as far as it is still there."""
        prompt, request = tracked.prompt, tracked.request
        own = self._variants.find(prompt.tenant, prompt.agent, prompt.token_ids, self._block_size)
        if own is None or len(own.hashes) * self._block_size <= tracked.cached:
            return
        plain = list(request.block_hashes)
        chain = list(own.hashes)
        for block in range(len(chain), len(plain)):
            tokens = self._tokens(request, block)
            chain.append(self._hasher(chain[-1], tokens, None))
        request.block_hashes[:] = chain[: len(plain)]
        held = local_hit(request)
        if held <= tracked.cached:
            request.block_hashes[:] = plain
            return
        tracked.cached, tracked.variant = held, True
        tracked.first = own.first

    def _rename(self, tracked: Tracked, plan: Plan, first: int) -> None:
        """Give the blocks from the first approximate one on a chain of their own."""
        prompt, request = tracked.prompt, tracked.request
        versions = self.directory.versions(tracked.planned, prompt)
        request.block_hashes[:] = variant_chain(
            self._hasher,
            self._block_size,
            request.all_token_ids,
            list(request.block_hashes),
            plan,
            (prompt.tenant, prompt.agent, prompt.dial or "", *versions),
            from_block=tracked.cached // self._block_size if tracked.variant else 0,
        )
        if not tracked.variant:
            tracked.variant, tracked.first = True, first

    def _tokens(self, request: Any, block: int) -> Sequence[int]:
        start = block * self._block_size
        tokens: Sequence[int] = request.all_token_ids[start : start + self._block_size]
        return tokens

    def exact_of(self, tracked: Tracked, held: int) -> int:
        """How many of the tokens in place stand in blocks that are exact as a whole."""
        if not tracked.variant:
            return held
        return min(held, tracked.first // self._block_size * self._block_size)

    def remember(self, tracked: Tracked) -> None:
        """An agent was served approximately: its next prompt may go on behind this one."""
        request, prompt = tracked.request, tracked.prompt
        ids = np.array(request.all_token_ids, dtype=np.int64)
        variant = Variant(ids, list(request.block_hashes), tracked.first)
        self._variants.remember(prompt.tenant, prompt.agent, variant)

    def forget(self) -> None:
        """Nothing that agents were served with counts any more."""
        self._variants = OwnVariants()
