"""The donors as the scheduler knows them: names, tokens and bytes. Their KV is in the workers.

The scheduler decides what is kept and what leaves; the workers do as they are told. A donor can
be found as soon as its capture is on its way: whoever loads it does so in a later step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kvcmas.engines.vllm.agreements import Agreements
from kvcmas.engines.vllm.head_state import HeadState
from kvcmas.engines.vllm.inflight import Pending
from kvcmas.engines.vllm.messages import (
    BlockIds,
    Capture,
    Lesson,
    PairName,
    Report,
    Source,
    StepWork,
)
from kvcmas.engines.vllm.mirror import Mirror
from kvcmas.engines.vllm.tracked import Tracked
from kvcmas.methods.kvcmas.chosen import Chosen
from kvcmas.methods.kvcmas.config import KvcmasConfig
from kvcmas.methods.kvcmas.lessons import lessons_of
from kvcmas.methods.kvcmas.pair import Pair
from kvcmas.methods.kvcmas.planner import Planned, Planner
from kvcmas.methods.library import DonorLibrary
from kvcmas.store.content import TokenRun
from kvcmas.workflow.plan import Compute, Head, Plan, Reuse, Span
from kvcmas.workflow.prompt import Prompt, TokenIds

_COVERED = 0.8  # share of a pending run that donors must hold, so that waiting is not worth it
_SETTLING_S = 0.3  # longest time in seconds for which a reader waits for a new donor's landmarks
_LONG = 256  # exact beginnings of approximate prompts that are worth being donors


class Directory:
    """Donors of all tenants, and what was learned from them.

    Args:
        config: of the method.
        token_bytes: bytes of one token's KV in one rank.
        ranks: workers that hold a part of each donor.
        tenant_bytes: most bytes of one tenant, in one rank.
    """

    def __init__(
        self,
        config: KvcmasConfig,
        token_bytes: int,
        ranks: int,
        tenant_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.library: DonorLibrary[TokenRun] = DonorLibrary(
            config.budget_bytes,
            config.min_length,
            min_prefix=config.min_prefix,
            tenant_bytes=tenant_bytes,
        )
        self.planner = Planner(config, self.library)
        self.mirror = Mirror(ranks)
        self.agreements = Agreements()
        self.evicted = 0
        self._fresh: dict[str, float] = {}
        self._token_bytes = token_bytes
        self._clock = clock
        self._tokens: dict[str, int] = {}
        self._leaving: list[str] = []
        self._left: list[str] = []

    def __len__(self) -> int:
        return len(self.library.store)

    @property
    def min_length(self) -> int:
        """Shortest run in tokens that is reused."""
        return self.config.min_length

    # planning ----------------------------------------------------------------------------------

    def plan(self, prompt: Prompt, preset: Planned | None = None) -> Planned:
        """What is reused of a prompt; its donors stay until `end`. A preset is taken as it is."""
        if preset is None:
            return self.planner.plan(prompt, self.mirror.of(prompt.tenant))
        self.library.pin(prompt.request_id, {span.segment for span in preset.plan.reused()})
        return preset

    def worth_waiting(self, prompt: Prompt, pending: Pending) -> bool:
        """Whether a prompt in flight will be a donor that is not there yet and may be reused."""
        dial = self.config.setting(prompt.dial)
        if dial is None:
            return False
        seen = self.mirror.of(prompt.tenant).seen(Pair(pending.agent, prompt.agent))
        if seen < dial.cold_tokens and self.config.learn:
            return False
        found = self.library.find(prompt)
        held = sum(len(run) for run in found.runs)
        held += found.prefix.length if found.prefix is not None else 0
        return held < _COVERED * pending.tokens

    def settling(self, prompt: Prompt) -> bool:
        """Whether a donor is so new that its landmarks come at any moment, and are expected."""
        now = self._clock()
        for segment in [name for name, at in self._fresh.items() if now - at > _SETTLING_S]:
            del self._fresh[segment]
        if not self._fresh or self.config.setting(prompt.dial) is None:
            return False
        known = self.mirror.of(prompt.tenant)
        return any(
            donor.segment in self._fresh
            and known.scores_expected(Pair(donor.info.agent, prompt.agent), donor.segment)
            for run in self.library.find(prompt).runs
            for donor in run.sources
        )

    def sources(self, planned: Planned, plan: Plan, prompt: Prompt) -> dict[int, Source]:
        """Where each reused span of a plan (cut from the planned one) takes its KV from."""
        return {span.start: self._source(planned, span, prompt) for span in plan.reused()}

    def _source(self, planned: Planned, span: Reuse, prompt: Prompt) -> Source:
        chosen = _chosen_for(planned, span)
        return Source(
            prompt.tenant,
            span.segment,
            span.offset,
            span.start,
            span.stop,
            prompt.agent,
            origin=chosen.origin if chosen is not None else span.start,
            corrected=span.correction is not None,
        )

    def versions(self, planned: Planned | None, prompt: Prompt) -> tuple[int, ...]:
        """Which corrections a plan uses."""
        known = self.mirror.of(prompt.tenant)
        chosen = planned.chosen.values() if planned is not None else ()
        return tuple(known.version(one.pair) for one in chosen if one.corrected)

    def agrees(self, tracked: Tracked, least: int) -> bool:
        """Whether all heads of a request that are to be measured are expected to agree.

        least: measurements of each pair that must have agreed lately.
        """
        progress = tracked.progress
        heads = progress.heads.values() if progress is not None else ()
        return all(
            (pair := self._pair(tracked, head.span)) is not None
            and self.agreements.expected(pair, head.span.head.tolerance or 0.0, least)
            for head in heads
            if head.measured and not head.whole
        )

    def measured(self, tracked: Tracked, head: HeadState, end: int, deviation: float) -> None:
        """A head was measured; only the first measurement says how its pair does."""
        pair = self._pair(tracked, head.span)
        if pair is not None and end - head.span.start == head.length and not head.notes:
            self.agreements.see(pair, deviation)

    def _pair(self, tracked: Tracked, span: Reuse) -> PairName | None:
        planned, prompt = tracked.planned, tracked.prompt
        chosen = _chosen_for(planned, span) if planned is not None else None
        if chosen is None:
            return None
        return PairName(prompt.tenant, chosen.donor.info.agent, prompt.agent)

    def contiguous(self, plan: Plan, held: int, prompt: Prompt, notes: list[str]) -> Plan:
        """The part of a plan that needs no scheduler of our own: one run behind what is in place.

        There no head can be measured, so that only exact KV is reused, and KV of pairs whose
        audits agree.
        """
        dial = self.config.setting(prompt.dial)
        known = self.mirror.of(prompt.tenant)
        spans: list[Span] = []
        position = held
        for span in plan.reused():
            donor = self.library.segment_info(span.segment)
            audited = known.audited(Pair(donor.agent, prompt.agent)) if donor else None
            agrees = dial is not None and audited is not None and audited <= dial.tolerance
            if span.start > position or not (span.exact or agrees):
                notes.append(
                    f"[{span.start}, {span.stop}) is computed: without kvcmas's scheduler only "
                    "one run behind what is in place is reused"
                )
                break
            spans.append(replace(span, head=Head(), landmarks=()))
            position = span.stop
        start = spans[0].start if spans else plan.length
        before: list[Span] = [Compute(0, start)] if spans and start else []
        after: list[Span] = [Compute(position if spans else 0, plan.length)]
        return Plan(plan.length, (*before, *spans, *after), plan.notes)

    # captures and lessons ----------------------------------------------------------------------

    def capture_prompt(self, tracked: Tracked, block_ids: BlockIds, work: StepWork) -> None:
        """The prompt becomes a donor, as far as it is exact."""
        prompt, progress = tracked.prompt, tracked.progress
        stop = len(prompt)
        if progress is not None and not progress.exact:
            stop = progress.exact_end()
            if stop < _LONG:
                return
        self._capture(tracked, prompt.token_ids, 0, stop, True, block_ids, work)

    def capture_answer(self, tracked: Tracked, block_ids: BlockIds, work: StepWork) -> None:
        """What was generated becomes a donor of its own, with its task where that is not one yet.

        Apart from its prompt, which keeps its name and with it what was derived from its KV. The
        token that was sampled last has no KV.
        """
        request, prompt, progress = tracked.request, tracked.prompt, tracked.progress
        total = len(prompt) + max(0, request.num_tokens - len(prompt) - 1)
        exact = progress is None or progress.exact
        start = len(prompt)
        if not exact and progress is not None and (computed := progress.computed()):
            # None are left where a preemption found the whole prompt again.
            start = computed[-1][0]
        self._capture(tracked, _all_ids(request, total), start, total, exact, block_ids, work)

    def _capture(
        self,
        tracked: Tracked,
        ids: TokenIds,
        start: int,
        stop: int,
        exact: bool,
        block_ids: BlockIds,
        work: StepWork,
    ) -> None:
        prompt = tracked.prompt
        if tracked.keeps_nothing or stop - start < self.min_length:
            return
        size = stop - start
        run = TokenRun(ids[start:stop].copy(), size * self._token_bytes)
        put = self.library.add(prompt, ids, start, stop, exact, run)
        self.evicted += len(put.evicted)
        self._leaving += put.evicted
        if put.id is None:
            return
        older, kept = put.continued, 0
        if older is not None:
            kept = self._tokens.get(older, 0)
            if self.library.store.pins(older):
                older = None  # somebody still reads it: it leaves when they are done
            else:
                self._tokens.pop(older, None)
                self.mirror.forget({older})
        self._tokens[put.id] = size
        self._fresh[put.id] = self._clock()
        work.captures.append(
            Capture(
                prompt.request_id,
                put.id,
                prompt.tenant,
                prompt.agent,
                start,
                stop,
                run.token_ids,
                exact,
                block_ids,
                older,
                kept if older is not None else 0,
            )
        )

    def teach(self, tracked: Tracked, block_ids: BlockIds, work: StepWork) -> None:
        """Runs that were computed exactly although there is a donor teach the correction."""
        planned, progress, prompt = tracked.planned, tracked.progress, tracked.prompt
        if tracked.taught or planned is None or not planned.chosen:
            return
        tracked.taught = True
        if progress is None:
            plan, computed, exact = Plan.dense(len(prompt)), ((0, len(prompt)),), True
        else:
            held = ((0, progress.exact_held),) if progress.exact_held else ()
            plan, exact = progress.plan, progress.exact
            computed = (*held, *progress.computed())
        for lesson in lessons_of(plan, planned.chosen.values(), computed, exact, self.config):
            if lesson.stop <= tracked.cached:
                continue  # computed by an earlier request, which has taught it
            chosen = lesson.chosen
            source = Source(
                prompt.tenant,
                chosen.donor.segment,
                chosen.donor.offset,
                lesson.start,
                lesson.stop,
                prompt.agent,
                chosen.origin,
                corrected=False,
            )
            work.lessons.append(Lesson(prompt.request_id, source, lesson.whole, block_ids))

    # news and the end --------------------------------------------------------------------------

    def reported(self, report: Report) -> None:
        """What the workers hold and have learned."""
        for segment in report.refused:
            if self.library.drop(segment):
                self._leaving.append(segment)
        self.mirror.take(report)

    def end(self, tracked: Tracked, complete: bool) -> None:
        """A request is over: its donors are free."""
        prompt, progress = tracked.prompt, tracked.progress
        if complete and tracked.planned is not None and progress is not None and progress.done:
            self.planner.finished(
                prompt.tenant,
                progress.plan,
                tracked.planned.chosen.values(),
                progress.computed(),
            )
        self._leaving += self.library.release(prompt.request_id)

    def departed(self) -> list[str]:
        """Donors that workers forget in this step: those that left before the last one.

        One step later, because the step in which a donor leaves may still learn from it.
        """
        gone, self._left, self._leaving = self._left, self._leaving, []
        for segment in gone:
            self._tokens.pop(segment, None)
        if gone:
            self.mirror.forget(set(gone))
        return gone

    def forget_all(self) -> None:
        """Drop all donors; those in use leave when their requests end."""
        for info in self.library.store.infos():
            in_use = self.library.store.pins(info.id)
            if self.library.drop(info.id) and not in_use:
                self._leaving.append(info.id)
        self.mirror.clear()
        self.agreements.clear()


def _chosen_for(planned: Planned, span: Reuse) -> Chosen | None:
    return next(
        (
            chosen
            for chosen in planned.chosen.values()
            if chosen.run.start <= span.start and span.stop <= chosen.run.stop
        ),
        None,
    )


def _all_ids(request: Any, total: int) -> TokenIds:
    return np.array(request.all_token_ids[:total], dtype=np.int64)
