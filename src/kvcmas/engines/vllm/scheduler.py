"""vLLM's scheduler with prefills that have holes: reused spans are stepped over.

    vllm serve MODEL --scheduler-cls kvcmas.engines.vllm.scheduler.KvcmasScheduler ...

vLLM schedules as always: batches, budgets, preemption and block allocation are its own. What is
added: where a request continues (`num_computed_tokens`, moved behind what is reused), where its
chunk ends, and riders: pieces of a prompt that ride along in the same step as rows of their own,
on the request's own blocks. In every layer the keys and values of all rows are written before
any row attends, so that a rider sees the pieces in front of it as in one long prefill.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from kvcmas.engines.vllm.compat import (
    AsyncScheduler,
    EngineCoreOutputs,
    KVConnectorBase_V1,
    ModelRunnerOutput,
    Request,
    Scheduler,
    SchedulerOutput,
    handed_over,
    rider_request,
    scheduler_problems,
    take_back,
)
from kvcmas.engines.vllm.coordinator import Ahead, Coordinator, Scheduled
from kvcmas.engines.vllm.selftest import try_holes

_log = logging.getLogger("vllm.kvcmas")


class _Holes(Scheduler):
    """What both schedulers do around vLLM's own.

    tries_out: whether it is tried out before it may leave holes (see `selftest`).
    looks_ahead: what it can do where agreement is expected.
    """

    tries_out: ClassVar[bool] = True
    looks_ahead: ClassVar[Ahead] = "never"
    max_num_scheduled_tokens: int
    max_num_active_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._riding: list[tuple[Request, str, int, int]] = []
        self._coordinator: Coordinator | None = None
        coordinator = getattr(self.connector, "coordinator", None)
        if not isinstance(coordinator, Coordinator):
            _log.warning("kvcmas: this scheduler needs the KvcmasConnector; it is vLLM's own now")
            return
        coordinator.holes, self._coordinator = True, coordinator
        coordinator.ahead = self.looks_ahead
        if self.tries_out and coordinator.refused is None:
            self._try_out(coordinator)

    def _try_out(self, coordinator: Coordinator) -> None:
        """Leave no holes if this vLLM is not the one that the rest was written for."""
        problems = scheduler_problems()
        if not problems:
            problem = try_holes(self)
            problems = [] if problem is None else [problem]
        if problems:
            coordinator.holes, self._coordinator = False, None
            _log.warning(
                "kvcmas: prefills with holes are off, because this vLLM differs: %s. One run "
                "behind a prompt's beginning is reused all the same",
                "; ".join(problems),
            )

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """One step; riders are added to it behind vLLM's own scheduling."""
        coordinator = self._coordinator
        if coordinator is None or not coordinator.requests:
            return super().schedule(*args, **kwargs)
        budget, active = self.max_num_scheduled_tokens, self.max_num_active_reqs
        reserved = coordinator.before(
            self.running,
            self.waiting,
            budget,
            self.max_num_running_reqs - len(self.running),
            self.connector.local_hit,
        )
        # vLLM reads its budget once, at the start: what riders take is not for others. Nor are
        # their rows: the model runner has no more than `max_num_running_reqs`.
        self.max_num_scheduled_tokens = budget - reserved.tokens
        self.max_num_active_reqs = min(active, self.max_num_running_reqs - reserved.rows)
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self.max_num_scheduled_tokens, self.max_num_active_reqs = budget, active
        self._add_riders(output)
        return output

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        tokens = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        if self._coordinator is None:
            return int(tokens)
        return self._coordinator.cap(request, num_computed_tokens, tokens)

    def _preempt_request(
        self, request: Request, timestamp: float, drop_stale_output: bool = False
    ) -> None:
        if self._coordinator is not None:
            self.connector.drop_unsure(request.request_id)
            self._coordinator.preempted(request)
        super()._preempt_request(request, timestamp, drop_stale_output)

    def _build_kv_connector_meta(
        self, connector: KVConnectorBase_V1, scheduler_output: SchedulerOutput
    ) -> Any:
        meta = super()._build_kv_connector_meta(connector, scheduler_output)
        if self._coordinator is not None:
            scheduled: Scheduled = connector.scheduled
            self._hand_over(scheduled.moved, scheduler_output)
            self._riding = [
                (request, f"{request.request_id}#kvcmas-{self.current_step}-{start}", start, stop)
                for request, pieces in scheduled.riders
                for start, stop in pieces
            ]
        return meta

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """What came of a step; tokens that were sampled behind a head that disagrees go first."""
        if self._coordinator is not None:
            for name in self.connector.measured(model_runner_output.kv_connector_output):
                request = self.requests.get(name)
                if request is not None and not request.is_finished():
                    take_back(request, model_runner_output)
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        return outputs

    def _hand_over(self, moved: list[str], output: SchedulerOutput) -> None:
        """The newer model runner counts positions on the device: a jump is a new request there."""
        cached = output.scheduled_cached_reqs
        if not self.use_v2_model_runner:
            return
        for name in moved:
            if name not in cached.req_ids:
                continue
            index = cached.req_ids.index(name)
            for column in (
                cached.req_ids,
                cached.new_block_ids,
                cached.num_computed_tokens,
                cached.num_output_tokens,
            ):
                column.pop(index)
            if cached.new_token_ids:
                cached.new_token_ids.pop(index)
            request = self.requests[name]
            blocks = self.kv_cache_manager.get_block_ids(name)
            output.scheduled_new_reqs.append(handed_over(request, blocks, self.model_uses_mrope))

    def _add_riders(self, output: SchedulerOutput) -> None:
        riding, self._riding = self._riding, []
        for request, name, start, stop in riding:
            blocks = self.kv_cache_manager.get_block_ids(request.request_id)
            output.scheduled_new_reqs.append(rider_request(request, name, blocks, start))
            output.num_scheduled_tokens[name] = stop - start
            output.total_num_scheduled_tokens += stop - start
            self.finished_req_ids.add(name)  # the workers forget it in the next step


class KvcmasScheduler(_Holes):
    """For synchronous scheduling: on CPUs, and with `--no-async-scheduling`.

    What is measured in a step is known before its tokens go anywhere.
    """

    looks_ahead = "take back"


class KvcmasAsyncScheduler(_Holes, AsyncScheduler):
    """For asynchronous scheduling, vLLM's default on GPUs.

    What is measured in a step is known when the next one is on its way with its token.
    """

    looks_ahead = "trust"
