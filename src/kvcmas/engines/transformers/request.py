"""A request from the method's plan to its `finish`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvcmas.core.segment import SegmentKV
from kvcmas.engines.transformers.cancel import Cancellation
from kvcmas.engines.transformers.clock import Clock
from kvcmas.engines.transformers.executor import Prefill, run_prefill
from kvcmas.engines.transformers.forward import ModelRunner
from kvcmas.engines.transformers.record import RequestRecord
from kvcmas.engines.transformers.standalone import encode_wanted
from kvcmas.engines.transformers.state import RequestState
from kvcmas.errors import PlanError
from kvcmas.methods.base import Method, Outcome
from kvcmas.workflow.plan import Plan
from kvcmas.workflow.prompt import Prompt


class Request:
    """A prefilled request; whoever decodes it sets the three public numbers.

    ttft_s: seconds until the first token.
    answer_s: seconds until the last one.
    generated: tokens sampled.
    """

    def __init__(
        self,
        state: RequestState,
        plan: Plan,
        prefill: Prefill,
        clock: Clock,
        encoded: int = 0,
    ) -> None:
        self.state = state
        self.prefill = prefill
        self.clock = clock
        self.ttft_s = self.answer_s = clock.elapsed()
        self.generated = 0
        self._plan = plan
        self._encoded = encoded

    def kv(self) -> SegmentKV:
        """Everything that has KV, as views."""
        return self.state.segment(0, self.state.filled)

    def outcome(self) -> Outcome:
        """What the method learns from; generated tokens belong to the last computed range."""
        *ranges, (start, _) = self.prefill.computed
        computed = (*ranges, (start, self.state.filled))
        return Outcome(self.kv(), computed, self.prefill.exact, self.prefill.hidden)

    def record(self, method: Method) -> RequestRecord:
        """The record, complete once the method has finished."""
        prompt, prefill, clock = self.state.prompt, self.prefill, self.clock
        computed = sum(span.computed for span in prefill.spans)
        match_s, correct_s = clock.seconds("match"), clock.seconds("correct")
        forward_s, encode_s = clock.seconds("forward"), clock.seconds("encode")
        return RequestRecord(
            request_id=prompt.request_id,
            agent=prompt.agent,
            method=method.name,
            prompt=len(prompt),
            computed=computed,
            reused=len(prompt) - computed,
            generated=self.generated,
            passes=prefill.passes,
            exact=prefill.exact,
            spans=prefill.spans,
            notes=self._plan.notes,
            ttft_s=self.ttft_s,
            match_s=match_s,
            correct_s=correct_s,
            forward_s=forward_s,
            other_s=self.ttft_s - match_s - correct_s - forward_s - encode_s,
            decode_s=self.answer_s - self.ttft_s,
            finish_s=clock.seconds("finish"),
            total_s=clock.elapsed(),
            encoded=self._encoded,
            encode_s=encode_s,
        )


@contextmanager
def open_request(
    runner: ModelRunner,
    method: Method,
    prompt: Prompt,
    new_tokens: int,
    clock: Clock,
    cancel: Cancellation,
) -> Iterator[Request]:
    """Plan and prefill a checked prompt; on leaving, `method.finish` is called exactly once.

    The method is given an outcome when the block ends without an exception, and `None` when
    anything failed or was cancelled.

    Raises:
        CancelledError: the request was cancelled.
        PlanError: the method's plan is for another prompt.
    """
    cancel.check()
    outcome: Outcome | None = None
    try:
        encoded = encode_wanted(runner, method, prompt, clock, cancel)
        with clock.lap("match"):
            plan = method.plan(prompt)
        if plan.length != len(prompt):
            raise PlanError(
                f"method {method.name!r} planned {plan.length} tokens for a prompt of {len(prompt)}"
            )
        state = RequestState(runner, prompt, new_tokens)
        prefill = run_prefill(state, plan, method, clock, cancel)
        request = Request(state, plan, prefill, clock, encoded)
        yield request
        outcome = request.outcome()
    finally:
        with clock.lap("finish"):
            method.finish(prompt, outcome)
