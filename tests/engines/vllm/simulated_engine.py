"""vLLM's scheduling loop in short, around a real coordinator and a worker of words."""

from __future__ import annotations

import random
from collections import deque

from kvcmas.engines.vllm.coordinator import Coordinator
from kvcmas.engines.vllm.messages import Report
from kvcmas.engines.vllm.records import VllmRecord

from .fake_requests import BLOCK, FakeRequest
from .simulated_blocks import Blocks, exact_kv
from .simulated_worker import Row, Worker


class Engine:
    """Requests in, records out.

    budget: tokens of a step, riders included. rows: most rows of a step. delay: steps until the
    scheduler hears of what the worker measured and learned.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        draw: random.Random,
        *,
        blocks: int = 400,
        budget: int = 256,
        rows: int = 6,
        delay: int = 0,
        fails: float = 0.0,
        refuses: float = 0.0,
        disagrees: float = 0.5,
    ) -> None:
        self.coordinator = coordinator
        self.blocks = Blocks(blocks)
        self.worker = Worker(self.blocks, draw, fails, refuses, disagrees)
        self.waiting: deque[FakeRequest] = deque()
        self.running: list[FakeRequest] = []
        self.answers: dict[str, int] = {}
        self.records: dict[str, VllmRecord] = {}
        self.preempted = 0
        self._budget, self._rows, self._delay = budget, rows, delay
        self._draw = draw
        self._reports: deque[Report] = deque()
        self._held: set[str] = set()

    def add(self, request: FakeRequest, answer: int) -> None:
        """A request that is to generate so many tokens."""
        self.answers[request.request_id] = answer
        self.worker.requests[request.request_id] = request
        self.coordinator.arrive(request)
        self.waiting.append(request)

    def abort(self, request: FakeRequest) -> None:
        """The client went away."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._finish(request, False)

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        return bool(self.waiting or self.running or self._reports or self._held)

    def step(self) -> None:
        """Schedule, compute, update."""
        side = self.coordinator
        seats = self._rows - len(self.running)
        reserved = side.before(self.running, self.waiting, self._budget, seats, self._hit)
        assert 0 <= reserved.tokens < self._budget
        scheduled: dict[str, int] = {}
        left, preempted = self._schedule_running(self._budget - reserved.tokens, scheduled)
        if not preempted:
            self._schedule_waiting(left, self._rows - reserved.rows, scheduled)
        step = side.commit(scheduled, lambda name: tuple(self.blocks.tables[name]))
        assert {request.request_id for request, _ in step.riders} <= scheduled.keys()
        riders = sum(stop - start for _, pieces in step.riders for start, stop in pieces)
        assert riders <= reserved.tokens
        assert riders + sum(scheduled.values()) <= self._budget
        assert len(self.running) + sum(len(pieces) for _, pieces in step.riders) <= self._rows
        rows = self._rows_of(scheduled, dict((r.request_id, p) for r, p in step.riders))
        report = self.worker.step(step.work, rows)
        for name in step.work.released:
            self._held.remove(name)
            self.blocks.release(name)
        # As vLLM's synchronous scheduler, which hears of a step before it takes its tokens.
        back = side.measured(report) if side.ahead == "take back" else []
        self._update(scheduled, report.failed, set(back))
        side.reported(Report(failed=report.failed))
        report.failed = set()
        self._reports.append(report)
        idle = not (self.running or self.waiting)
        while len(self._reports) > (0 if idle else self._delay):
            side.reported(self._reports.popleft())

    def _hit(self, request: FakeRequest) -> int:
        return len(self.blocks.hit(request)) * BLOCK

    def _schedule_running(self, budget: int, scheduled: dict[str, int]) -> tuple[int, bool]:
        index, preempted = 0, False
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            position = request.num_computed_tokens
            tokens = min(request.num_tokens - position, budget)
            tokens = self.coordinator.cap(request, position, tokens)
            if tokens == 0:
                index += 1
                continue
            room = self.blocks.allocate(request, position + tokens)
            while not room:
                victim = self.running.pop()
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
                room = self.blocks.allocate(request, position + tokens)
            if not room:
                break
            scheduled[request.request_id] = tokens
            budget -= tokens
            index += 1
        return budget, preempted

    def _schedule_waiting(self, budget: int, rows: int, scheduled: dict[str, int]) -> None:
        skipped: list[FakeRequest] = []
        while budget > 0 and self.waiting and len(self.running) < rows:
            request = self.waiting[0]
            found = self.blocks.hit(request)
            before = self.coordinator.admit(request, len(found) * BLOCK)
            if before is None:
                skipped.append(self.waiting.popleft())
                continue
            assert before >= 0
            position = len(found) * BLOCK + before
            tokens = min(request.num_tokens - position, budget)
            tokens = self.coordinator.cap(request, position, tokens)
            if tokens == 0 or not self.blocks.allocate(request, position + tokens, found):
                break
            request.num_computed_tokens = position
            self.running.append(self.waiting.popleft())
            scheduled[request.request_id] = tokens
            budget -= tokens
        self.waiting.extendleft(reversed(skipped))

    def _preempt(self, request: FakeRequest) -> None:
        self.preempted += 1
        self._drop_unsure(request)
        self.coordinator.preempted(request)
        self.blocks.release(request.request_id)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def _drop_unsure(self, request: FakeRequest) -> None:
        first = self.coordinator.unsure(request.request_id)
        if first is not None:
            self.blocks.evict(self.blocks.tables[request.request_id][first // BLOCK :])

    def _rows_of(
        self, scheduled: dict[str, int], riders: dict[str, tuple[tuple[int, int], ...]]
    ) -> list[Row]:
        rows = []
        for name, tokens in scheduled.items():
            request = self.worker.requests[name]
            rows += [Row(request, start, stop) for start, stop in riders.get(name, ())]
            start = request.num_computed_tokens
            rows.append(Row(request, start, start + tokens))
            request.num_computed_tokens += tokens
        return rows

    def _update(self, scheduled: dict[str, int], failed: set[str], back: set[str]) -> None:
        for name in scheduled:
            request = self.worker.requests[name]
            if name in failed:
                block = self.worker.failed_blocks[name]
                request.num_computed_tokens = block * BLOCK
                self.blocks.evict(self.blocks.tables[name][block:])
            elif name in back:
                request.num_computed_tokens = min(
                    request.num_computed_tokens, request.num_tokens - 1
                )
            elif request.num_computed_tokens == request.num_tokens:
                self._check(request)
                request.append(self._draw.randrange(10**6, 10**7))
                if request.num_tokens - request.num_prompt_tokens >= self.answers[name]:
                    self.running.remove(request)
                    self._finish(request, True)

    def _check(self, request: FakeRequest) -> None:
        """What a token is sampled behind."""
        table = self.blocks.tables[request.request_id]
        held = self.blocks.read(table, 0, request.num_tokens)
        tenant = request.cache_salt or ""
        for kv, token in zip(held, request.all_token_ids, strict=True):
            assert kv is not None
            assert (kv.tenant, kv.token) == (tenant, token)
        tracked = self.coordinator.requests[request.request_id]
        progress = tracked.progress
        assert progress is None or all(head.settled for head in progress.heads.values())
        end = tracked.first if tracked.variant else request.num_tokens
        assert held[:end] == exact_kv(tenant, request.all_token_ids)[:end]

    def _finish(self, request: FakeRequest, complete: bool) -> None:
        name = request.request_id
        self._drop_unsure(request)
        blocks = tuple(self.blocks.tables.get(name, ()))
        held, record = self.coordinator.finish(request, blocks, complete)
        assert record is not None
        assert record.computed + record.reused + record.cached == record.prompt
        self.records[name] = record
        if held:
            self._held.add(name)
        else:
            self.blocks.release(name)
