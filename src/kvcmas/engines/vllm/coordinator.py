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
from typing import Any, Literal

from kvcmas.engines.vllm.agreements import LEAST
from kvcmas.engines.vllm.arrivals import tracked_of
from kvcmas.engines.vllm.chains import Hasher
from kvcmas.engines.vllm.directory import Directory
from kvcmas.engines.vllm.messages import BlockIds, Load, Measure, Report, StepWork
from kvcmas.engines.vllm.metric_names import Reason
from kvcmas.engines.vllm.options import VllmOptions
from kvcmas.engines.vllm.planning import LocalHit, Planning
from kvcmas.engines.vllm.progress import Range, Step
from kvcmas.engines.vllm.recording import Counting, reasons_of, record_of
from kvcmas.engines.vllm.records import VllmRecord
from kvcmas.engines.vllm.roles import RoleNames
from kvcmas.engines.vllm.tracked import Tracked
from kvcmas.methods.kvcmas.planner import Planned

Ahead = Literal["never", "take back", "trust"]
"""What happens where heads are expected to agree: as everywhere; their tail is computed in the
same step, and its token taken back if they do not; or nobody waits for their measurements."""

_SURE = 4  # measurements of a pair that must have agreed before it is trusted
_LOOK_AHEAD = 64  # waiting requests that are planned before each step


@dataclass(frozen=True, slots=True)
class Reserved:
    """What riders take of a step: tokens, and rows of the batch."""

    tokens: int
    rows: int


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
        on_cpu: the model runs on CPUs.

    Attributes:
        ahead: how a request whose heads are expected to agree is spared the wait for it.
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
        ahead: Ahead = "never",
        on_cpu: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options
        self.directory = directory
        self.roles = roles
        self.refused = refused
        self.holes = holes
        self.ahead = ahead
        self.on_cpu = on_cpu
        self.stats = stats
        self.requests: dict[str, Tracked] = {}
        self.planning = Planning(
            directory, hasher, block_size, options.wait_s, clock, lambda: self.stats
        )
        self._block_size = block_size
        self._prefilled: list[Tracked] = []
        self._held: dict[str, StepWork] = {}
        self._undecided: set[str] = set()
        self._reset = False

    @property
    def presets(self) -> dict[str, Planned]:
        """Plans by request id that are taken instead of the planner's, to compare engines."""
        return self.planning.presets

    # arrival -----------------------------------------------------------------------------------

    def arrive(self, request: Any) -> None:
        """Take notice of a request; it is planned when its turn comes."""
        tracked = tracked_of(request, self.options, self.roles, self.refused, on_cpu=self.on_cpu)
        if tracked is not None:
            self.requests[request.request_id] = tracked

    # before a step -----------------------------------------------------------------------------

    def before(
        self,
        running: Sequence[Any],
        waiting: Iterable[Any],
        budget: int,
        seats: int,
        local_hit: LocalHit,
    ) -> Reserved:
        """Plan what waits and place what runs; returns what is reserved for riders.

        budget, seats: tokens of the step, and rows that are not taken by running requests.
        """
        spare, reserved, rows = budget, 0, 0
        prefilling: list[Tracked] = []
        for request in running:
            tracked = self.requests.get(request.request_id)
            if tracked is not None and tracked.progress is not None and not tracked.progress.done:
                prefilling.append(tracked)
            else:
                spare -= max(1, request.num_tokens - request.num_computed_tokens)
        for tracked in prefilling:
            used, riders = self._place(tracked, spare, seats)
            reserved, rows = reserved + used[0], rows + riders
            seats, spare = seats - riders, spare - sum(used)
        for request in islice(waiting, _LOOK_AHEAD):
            tracked = self.requests.get(request.request_id)
            if tracked is None:
                spare -= request.num_tokens
                seats -= 1
                continue
            if not self.planning.ready(tracked, local_hit, self.holes) or self._on_its_way(tracked):
                continue
            seats -= 1
            tracked.allowance = (0, 0)
            if tracked.progress is None:
                spare -= request.num_tokens
            elif self.holes and seats > 0 and spare > 1:
                tracked.progress.restart(request.num_tokens, 0, 0)
                self._look_ahead(tracked)
                step = tracked.progress.step(spare - 1, seats, tracked.ahead)
                if step is not None:
                    tracked.allowance = (step.rider_tokens, len(step.riders))
                    reserved, rows = reserved + step.rider_tokens, rows + len(step.riders)
                    seats -= len(step.riders)
                    spare -= step.rider_tokens + step.stop - step.start
        return Reserved(reserved, rows)

    def _look_ahead(self, tracked: Tracked) -> None:
        """Decide whether a request waits for its measurements; once taken back, it does."""
        progress, params = tracked.progress, tracked.request.sampling_params
        if progress is None or tracked.again or self.ahead == "never":
            return
        if self.ahead == "trust":
            if self.directory.agrees(tracked, _SURE):
                progress.trust()
        # A token that is taken back would have moved on a generator with a seed.
        elif params is None or params.seed is None:
            tracked.ahead = self.directory.agrees(tracked, LEAST)

    def _place(self, tracked: Tracked, spare: int, seats: int) -> tuple[tuple[int, int], int]:
        """Move a running request to its next piece. Tokens of riders and own, and rows."""
        request, progress = tracked.request, tracked.progress
        assert progress is not None
        step = progress.step(max(0, spare - 1), max(0, seats), tracked.ahead)
        tracked.blocked = step is None
        tracked.pending = step
        if step is None:
            return (0, 0), 0
        tracked.back = request.num_computed_tokens
        request.num_computed_tokens = step.start
        return (step.rider_tokens, step.stop - step.start), len(step.riders)

    # within a step -----------------------------------------------------------------------------

    def admit(self, request: Any, local: int) -> int | None:
        """Tokens in front of the request's own row that vLLM need not compute in it.

        local: tokens that its prefix cache holds. `None`: not in this step. May be asked often.
        """
        tracked = self.requests.get(request.request_id)
        if tracked is None:
            return 0
        if tracked.planned is None or self._on_its_way(tracked):
            return None
        tracked.cached = local
        if tracked.progress is None:
            return 0
        if self._unsure(tracked, local):
            return None
        exact = self.planning.exact_of(tracked, local)
        tracked.progress.restart(request.num_tokens, local, exact)
        step = tracked.progress.step(*tracked.allowance, tracked.ahead)
        tracked.pending, tracked.back, tracked.blocked = step, None, False
        if step is None:
            return None
        return step.start - local

    def _on_its_way(self, tracked: Tracked) -> bool:
        """Whether a donor is captured in the step that comes: it can be loaded in the next one."""
        coming = {capture.segment for work in self._held.values() for capture in work.captures}
        return any(source.segment in coming for source in tracked.sources.values())

    def _unsure(self, tracked: Tracked, local: int) -> bool:
        """Whether blocks of the prefix cache are another one's whose heads have not agreed yet."""
        hashes = tracked.request.block_hashes
        for other in self.requests.values():
            if other is tracked or other.progress is None:
                continue
            first = other.progress.unsure if other.holding or other.pending is not None else None
            if first is None or first >= local:
                continue
            theirs, block = other.request.block_hashes, first // self._block_size
            if block < len(theirs) and theirs[block] == hashes[block]:
                return True
        return False

    def unsure(self, request_id: str) -> int | None:
        """First position of a request whose block is of no use to others when it stops now."""
        tracked = self.requests.get(request_id)
        if tracked is None or tracked.progress is None or not tracked.holding:
            return None
        return tracked.progress.unsure

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
            tracked.holding = False
            if tracked in self._prefilled:
                self._prefilled.remove(tracked)

    def commit(
        self, scheduled_tokens: dict[str, int], block_ids: Callable[[str], BlockIds]
    ) -> Scheduled:
        """The step is fixed: what the workers do in it."""
        step = Scheduled(StepWork())
        # First, in the order in which they became donors: a later one may continue an earlier one.
        for request_id, work in self._held.items():
            step.work.captures += work.captures
            step.work.lessons += work.lessons
            step.work.released.append(request_id)
        self._held.clear()
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
        step.work.drops += self.directory.departed()
        step.work.reset, self._reset = self._reset, False
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
            if self.holes:
                return
            # Nobody places the chunks behind the first: vLLM goes on by itself.
            start = int(request.num_computed_tokens)
            pending = Step(start, start + tokens)
        executed = progress.commit(pending, tokens)
        tracked.holding = True
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
        if tracked.again or (tracked.back is not None and tracked.back != pending.start):
            step.moved.append(name)
        if tracked.ahead and progress.undecided:
            self._undecided.add(name)
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
                self.planning.inflight.remove(tracked.request.request_id)

    # after a step ------------------------------------------------------------------------------

    def measured(self, report: Report | None) -> list[str]:
        """Take what was measured in a step out of its report; requests whose token is taken back.

        They had gone on behind a head that disagrees, and are to be computed again from there.
        """
        if report is not None:
            for (request_id, span, end), sums in report.deviations.items():
                tracked = self.requests.get(request_id)
                if tracked is None or tracked.progress is None:
                    continue
                deviation = sums.deviation()
                head = tracked.progress.heads.get(span)
                if head is not None:
                    self.directory.measured(tracked, head, end, deviation)
                tracked.progress.report(span, end, deviation)
            report.deviations = {}
        failed = report.failed if report is not None else set()
        undecided, self._undecided = self._undecided, set()
        return [name for name in sorted(undecided - failed) if self._taken_back(name)]

    def _taken_back(self, request_id: str) -> bool:
        tracked = self.requests.get(request_id)
        if tracked is None or tracked.progress is None:
            return False
        tracked.progress.doubt()
        if tracked.progress.done:
            return False
        tracked.ahead, tracked.again = False, True
        tracked.notes.append("a token was taken back, because a head disagreed")
        if tracked in self._prefilled:
            self._prefilled.remove(tracked)
        self.stats.event("taken_back")
        return True

    def reported(self, report: Report) -> None:
        """What the workers measured, captured and learned."""
        self.measured(report)
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
        progress.restart(request.num_tokens, held, self.planning.exact_of(tracked, held))
        progress.give_up("the donor could not be loaded")
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
                self.directory.capture_prompt(tracked, block_ids, work)
            self.directory.capture_answer(tracked, block_ids, work)
        self.planning.inflight.remove(request.request_id)
        self.directory.end(tracked, complete)
        if complete and tracked.variant:
            self.planning.remember(tracked)
        if work:
            self._held[request.request_id] = work
        record = record_of(tracked)
        self.stats.finished(record)
        for reason in reasons_of(tracked):
            self.stats.decided(reason)
        return bool(work), record

    def forget_all(self) -> None:
        """Drop every donor and what was learned, as after a change of the model's weights."""
        self.planning.forget()
        self._reset = True
        self.directory.forget_all()
