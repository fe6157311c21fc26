"""The scheduler side: who reuses what, step by step. Knows the shape of vLLM's requests only.

arrive     a request: who asks, and whether anything may be reused
before     each step: plan what waits, place the running ones at their next piece
admit      a request leaves the queue: how much stands in front of its own row
commit     the step is fixed: loads, measurements, captures and lessons for the workers
reported   what the workers measured, captured and learned
finish     a request ends: its answer becomes a donor, its record goes back to the client
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
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
from kvcmas.engines.vllm.hints import Hints, read_hints
from kvcmas.engines.vllm.inflight import InFlight
from kvcmas.engines.vllm.messages import BlockIds, Load, Measure, Report, StepWork
from kvcmas.engines.vllm.metric_names import Reason
from kvcmas.engines.vllm.options import VllmOptions
from kvcmas.engines.vllm.progress import Progress, Range
from kvcmas.engines.vllm.recording import Counting, reasons_of, record_of
from kvcmas.engines.vllm.records import VllmRecord
from kvcmas.engines.vllm.roles import RoleNames
from kvcmas.engines.vllm.tracked import Tracked
from kvcmas.engines.vllm.trimming import behind
from kvcmas.methods.kvcmas.config import EXACT
from kvcmas.methods.kvcmas.planner import Planned
from kvcmas.workflow.plan import Plan
from kvcmas.workflow.prompt import Prompt

_LOOK_AHEAD = 64  # waiting requests that are planned before each step

LocalHit = Callable[[Any], int]
"""Tokens of a request that vLLM's own prefix cache holds, under its present block hashes."""


@dataclass(slots=True)
class Scheduled:
    """What a step brings. riders: rows beside a request's own. moved: requests that jumped."""

    work: StepWork
    riders: list[tuple[Any, tuple[Range, ...]]] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)


class Coordinator:
    """All requests of one engine.

    Args:
        options: of the server.
        directory: the donors, and what was learned.
        roles: names agents.
        block_size: tokens of a block.
        hasher: vLLM's block hash.
        stats: counts what happens; whoever takes it away puts a new one here.
        refused: why nothing is reused at all, `None` if it is.
        holes: reuse anywhere in the prompt; without, only directly behind what is in place.
    """

    def __init__(
        self,
        options: VllmOptions,
        directory: Directory,
        roles: RoleNames,
        *,
        block_size: int,
        hasher: Hasher,
        stats: Counting,
        refused: str | None = None,
        holes: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options
        self.directory = directory
        self.roles = roles
        self.refused = refused
        self.holes = holes
        self.stats = stats
        self.requests: dict[str, Tracked] = {}
        self.presets: dict[str, Planned] = {}
        self._block_size = block_size
        self._hasher = hasher
        self._clock = clock
        self._variants = OwnVariants()
        self._inflight = InFlight(directory.min_length)
        self._prefilled: list[Tracked] = []
        self._held: dict[str, StepWork] = {}

    # arrival -----------------------------------------------------------------------------------

    def arrive(self, request: Any) -> None:
        """Take notice of a request; it is planned when its turn comes."""
        hints = read_hints(request.kv_transfer_params)
        if request.prompt_token_ids is None or request.prompt_is_token_ids is not None:
            return  # embeddings instead of tokens: nothing to match, nothing to keep
        ids = np.array(request.prompt_token_ids, dtype=np.int64)
        prompt = Prompt(
            ids,
            agent=hints.agent or self.roles.name(ids),
            request_id=request.request_id,
            tenant=_tenant_of(request),
            dial=self._dial(request, hints),
        )
        refused = self.refused or _why_exact(request, hints)
        tracked = Tracked(
            request, prompt, hints, refused, keeps_nothing=self._keeps_nothing(request, prompt)
        )
        tracked.notes.extend(hints.problems)
        self.requests[request.request_id] = tracked

    def _keeps_nothing(self, request: Any, prompt: Prompt) -> bool:
        """Whether the request's KV is of no use to anybody."""
        everyone = self.options.dial == EXACT or prompt.tenant in self.options.exact_tenants
        other = request.pooling_params is not None or request.mm_features or request.resumable
        return bool(self.refused or other or (everyone and prompt.dial == EXACT))

    def _dial(self, request: Any, hints: Hints) -> str:
        if (request.cache_salt or "") in self.options.exact_tenants:
            return EXACT
        return hints.dial or self.options.dial

    # before a step -----------------------------------------------------------------------------

    def before(
        self,
        running: Sequence[Any],
        waiting: Iterable[Any],
        budget: int,
        seats: int,
        local_hit: LocalHit,
    ) -> int:
        """Plan what waits and place what runs; returns the tokens reserved for riders.

        budget, seats: tokens of the step, and rows that are not taken by running requests.
        """
        spare, reserved = budget, 0
        prefilling: list[Tracked] = []
        for request in running:
            tracked = self.requests.get(request.request_id)
            if tracked is not None and tracked.progress is not None and not tracked.progress.done:
                prefilling.append(tracked)
            else:
                spare -= max(1, request.num_tokens - request.num_computed_tokens)
        for tracked in prefilling:
            used, rows = self._place(tracked, spare, seats)
            reserved, seats, spare = reserved + used[0], seats - rows, spare - sum(used)
        for request in islice(waiting, _LOOK_AHEAD):
            tracked = self.requests.get(request.request_id)
            if tracked is None:
                spare -= request.num_tokens
                seats -= 1
                continue
            if not self._ready(tracked, local_hit):
                continue
            seats -= 1
            tracked.allowance = (0, 0)
            if tracked.progress is None:
                spare -= request.num_tokens
            elif self.holes and seats > 0 and spare > 1:
                tracked.progress.restart(request.num_tokens, 0, 0)
                step = tracked.progress.step(spare - 1, seats)
                if step is not None:
                    tracked.allowance = (step.rider_tokens, len(step.riders))
                    reserved += step.rider_tokens
                    seats -= len(step.riders)
                    spare -= step.rider_tokens + step.stop - step.start
        return reserved

    def _place(self, tracked: Tracked, spare: int, seats: int) -> tuple[tuple[int, int], int]:
        """Move a running request to its next piece. Tokens of riders and own, and rows."""
        request, progress = tracked.request, tracked.progress
        assert progress is not None
        step = progress.step(max(0, spare - 1), max(0, seats))
        tracked.blocked = step is None
        tracked.pending = step
        if step is None:
            return (0, 0), 0
        tracked.back = request.num_computed_tokens
        request.num_computed_tokens = step.start
        return (step.rider_tokens, step.stop - step.start), len(step.riders)

    def _ready(self, tracked: Tracked, local_hit: LocalHit) -> bool:
        """Plan a request unless it waits for a donor; whether it may be scheduled."""
        if tracked.planned is not None:
            return True
        if tracked.refused is not None:
            tracked.planned = Planned(Plan.dense(len(tracked.prompt), tracked.refused), {})
            return True
        now = self._clock()
        if self._waits(tracked, now):
            return False
        started = time.perf_counter()
        self._plan(tracked, local_hit)
        tracked.match_s = time.perf_counter() - started
        self.stats.spent({"match": tracked.match_s})
        self._inflight.add(tracked.prompt)
        return True

    def _waits(self, tracked: Tracked, now: float) -> bool:
        """Whether another prompt that is being computed will be a donor worth waiting for."""
        if tracked.prompt.request_id in self.presets or tracked.hints.warm:
            return False
        begun = tracked.waiting_since
        if begun is not None and now - begun >= self.options.wait_s:
            tracked.waited_s = now - begun
            tracked.notes.append(f"no longer waiting for a donor after {tracked.waited_s:.1f} s")
            tracked.waiting_since = None
            self.stats.decided(Reason.WAIT)
            return False
        if tracked.waited_s:
            return False
        pending = self._inflight.shared(tracked.prompt)
        worth = any(self.directory.worth_waiting(tracked.prompt, one) for one in pending)
        if not worth and not self.directory.settling(tracked.prompt):
            if begun is not None:
                tracked.waited_s = now - begun
                tracked.waiting_since = None
            return False
        if begun is None:
            tracked.waiting_since = now
        return True

    def _plan(self, tracked: Tracked, local_hit: LocalHit) -> None:
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
        if not self.holes:
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

    # within a step -----------------------------------------------------------------------------

    def admit(self, request: Any, local: int) -> int | None:
        """Tokens in front of the request's own row that vLLM need not compute in it.

        local: tokens that its prefix cache holds. `None`: not in this step. May be asked often.
        """
        tracked = self.requests.get(request.request_id)
        if tracked is None:
            return 0
        if tracked.planned is None:
            return None
        tracked.cached = local
        if tracked.progress is None:
            return 0
        exact = self._exact_of(tracked, local)
        tracked.progress.restart(request.num_tokens, local, exact)
        step = tracked.progress.step(*tracked.allowance)
        tracked.pending, tracked.back, tracked.blocked = step, None, False
        if step is None:
            return None
        return step.start - local

    def _exact_of(self, tracked: Tracked, held: int) -> int:
        """How many of the tokens in place stand in blocks that are exact as a whole."""
        if not tracked.variant:
            return held
        return min(held, tracked.first // self._block_size * self._block_size)

    def cap(self, request: Any, position: int, tokens: int) -> int:
        """How many of the tokens that vLLM would compute from a position on it may."""
        tracked = self.requests.get(request.request_id)
        if tracked is None or tracked.progress is None or tracked.progress.done:
            return tokens
        if tracked.blocked or tracked.pending is None:
            return 0 if tracked.blocked else tokens
        return max(0, min(tokens, tracked.pending.stop - position))

    def preempted(self, request: Any) -> None:
        """The request lost its blocks; it will be admitted anew."""
        tracked = self.requests.get(request.request_id)
        if tracked is not None:
            tracked.pending, tracked.back, tracked.allowance = None, None, (0, 0)
            if tracked in self._prefilled:
                self._prefilled.remove(tracked)

    def commit(
        self, scheduled_tokens: dict[str, int], block_ids: Callable[[str], BlockIds]
    ) -> Scheduled:
        """The step is fixed: what the workers do in it."""
        step = Scheduled(StepWork())
        self._after_prefill(step.work, block_ids)
        for request_id, tokens in scheduled_tokens.items():
            tracked = self.requests.get(request_id)
            if tracked is not None and tracked.planned is not None:
                self._commit_one(tracked, tokens, step, block_ids)
        for tracked in self.requests.values():
            if tracked.pending is not None:
                if tracked.back is not None:
                    tracked.request.num_computed_tokens = tracked.back
                tracked.pending, tracked.back = None, None
        for request_id, work in self._held.items():
            step.work.captures += work.captures
            step.work.lessons += work.lessons
            step.work.released.append(request_id)
        self._held.clear()
        step.work.drops += self.directory.departed()
        self.stats.event("capture", len(step.work.captures))
        self.stats.event("eviction", self.directory.evicted)
        self.directory.evicted = 0
        return step

    def _commit_one(
        self, tracked: Tracked, tokens: int, step: Scheduled, block_ids: Callable[[str], BlockIds]
    ) -> None:
        request, progress, pending = tracked.request, tracked.progress, tracked.pending
        if progress is None or progress.done:
            if request.num_computed_tokens < request.num_prompt_tokens:
                tracked.steps += 1
                if request.num_computed_tokens + tokens >= request.num_prompt_tokens:
                    self._prefilled.append(tracked)
            return
        if pending is None:
            return
        executed = progress.commit(pending, tokens)
        blocks = block_ids(request.request_id)
        name = request.request_id
        for part in executed.loads:
            source = tracked.source(part.span, part.start, part.stop)
            step.work.loads.append(Load(name, source, blocks))
        for part in executed.measures:
            source = tracked.source(part.span, part.start, part.stop)
            step.work.measures.append(Measure(name, part.span.start, source, blocks))
        if pending.riders:
            step.riders.append((request, pending.riders))
        if tracked.back is not None and tracked.back != pending.start:
            step.moved.append(name)
        tracked.steps += 1
        tracked.pending, tracked.back = None, None
        if executed.last:
            self._prefilled.append(tracked)
            self._count(tracked)

    def _count(self, tracked: Tracked) -> None:
        """What vLLM will say of the request's tokens: cached, local and from outside."""
        request, progress = tracked.request, tracked.progress
        stats = request.prefill_stats
        if progress is None or stats is None or request.num_preemptions:
            return
        computed = sum(stop - start for start, stop in progress.computed())
        stats.set(
            num_prompt_tokens=request.num_prompt_tokens,
            num_local_cached_tokens=progress.held,
            num_external_cached_tokens=request.num_prompt_tokens - progress.held - computed,
        )

    def _after_prefill(self, work: StepWork, block_ids: Callable[[str], BlockIds]) -> None:
        """Prompts whose prefill was in an earlier step: they become donors, and are learned from.

        Not in the step itself, where it would delay the first token.
        """
        done, self._prefilled = self._prefilled, []
        for tracked in done:
            if not tracked.captured:
                blocks = block_ids(tracked.request.request_id)
                tracked.captured = True
                self.directory.teach(tracked, blocks, work)
                self.directory.capture_prompt(tracked, blocks, work)
                self._inflight.remove(tracked.request.request_id)

    # after a step ------------------------------------------------------------------------------

    def reported(self, report: Report) -> None:
        """What the workers measured, captured and learned."""
        for (request_id, span, end), sums in report.deviations.items():
            tracked = self.requests.get(request_id)
            if tracked is not None and tracked.progress is not None:
                tracked.progress.report(span, end, sums.deviation())
        for request_id in report.failed:
            self._failed(request_id)
        self.directory.reported(report)
        self.stats.spent(report.seconds)
        if report.nbytes:
            self.stats.holds(report.nbytes, len(self.directory))

    def _failed(self, request_id: str) -> None:
        """A donor could not be loaded: vLLM goes back to the first bad block."""
        tracked = self.requests.get(request_id)
        if tracked is None or tracked.progress is None:
            return
        request, progress = tracked.request, tracked.progress
        tracked.notes.append("a donor could not be loaded; its tokens are computed")
        self.stats.decided(Reason.LOAD)
        self.stats.event("load_failure")
        held = int(request.num_computed_tokens)
        progress.give_up("the donor could not be loaded")
        progress.restart(request.num_tokens, held, self._exact_of(tracked, held))
        if tracked in self._prefilled:
            self._prefilled.remove(tracked)

    def finish(
        self, request: Any, block_ids: BlockIds, complete: bool
    ) -> tuple[bool, VllmRecord | None]:
        """A request ends. Whether its blocks must be held, and what the client is told.

        complete: not aborted: its KV is what it seems to be.
        """
        tracked = self.requests.pop(request.request_id, None)
        if tracked is None:
            return False, None
        if tracked in self._prefilled:
            self._prefilled.remove(tracked)
        work = StepWork()
        if complete and tracked.planned is not None:
            if not tracked.captured:
                self.directory.teach(tracked, block_ids, work)
            self.directory.capture_answer(tracked, block_ids, work)
        self._inflight.remove(request.request_id)
        self.directory.end(tracked, complete)
        if complete and tracked.variant:
            ids = np.array(request.all_token_ids, dtype=np.int64)
            variant = Variant(ids, list(request.block_hashes), tracked.first)
            self._variants.remember(tracked.prompt.tenant, tracked.prompt.agent, variant)
        if work:
            self._held[request.request_id] = work
        record = record_of(tracked)
        self.stats.finished(record)
        for reason in reasons_of(tracked):
            self.stats.decided(reason)
        return bool(work), record

    def forget_all(self) -> None:
        """Drop every donor; those in use leave when their requests end."""
        self._variants = OwnVariants()
        self.directory.forget_all()


def _tenant_of(request: Any) -> str:
    """Requests of different salts, and of different adapters, share nothing."""
    salt = request.cache_salt or ""
    adapter = request.lora_request
    return salt if adapter is None else f"{salt}\x00{adapter.lora_name}\x00{adapter.lora_path}"


def _why_exact(request: Any, hints: Hints) -> str | None:
    params = request.sampling_params
    if not hints.reads:
        return "the request asked for no reuse"
    if request.pooling_params is not None or params is None:
        return "not a generation: served exactly"
    if request.mm_features:
        return "images are not shared yet: served exactly"
    if params.prompt_logprobs is not None:
        return "log-probabilities of the prompt need every token computed"
    if request.skip_reading_prefix_cache:
        return "the request does not read the prefix cache"
    if request.resumable:
        return "streaming input is served exactly"
    return None
