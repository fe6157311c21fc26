"""Does this vLLM's scheduler execute a plan with holes? Tried out at the start, without a model.

A twin of the scheduler, of the same class and with a few blocks of its own, runs two requests to
their end. What it would send to the workers is followed position by position; the model's answers
are made up. The twin is thrown away, so that nothing of it reaches workers, counters or the
prefix cache.

    jump     the request's own row computes one piece after the other
    riders   pieces in front of the own row ride along as rows of their own
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np

from kvcmas.engines.vllm.compat import AsyncScheduler, SchedulerOutput
from kvcmas.engines.vllm.compat_checks import model_answer, synthetic_request
from kvcmas.engines.vllm.messages import StepWork
from kvcmas.errors import UnsupportedEngineError
from kvcmas.methods.kvcmas.planner import Planned
from kvcmas.methods.tiling import plan_of
from kvcmas.workflow.plan import Plan, Reuse

_log = logging.getLogger("vllm.kvcmas")

_BLOCKS = 32  # of the twin's cache; a request takes 6
_SEATS = 4  # rows of a step in which pieces ride along
_TOKEN = 7  # what the model would have sampled
_EMPTY, _LOADED, _COMPUTED = 0, 1, 2


def try_holes(scheduler: Any) -> str | None:
    """Why this scheduler (with a connector of kvcmas) cannot be trusted with holes, or `None`.

    Takes a few milliseconds and leaves the scheduler as it is; never raises.
    """
    try:
        twin = _twin(scheduler)
        size = int(twin.block_size)
        one, two = plans(size)
        seats = twin.max_num_running_reqs
        for name, plan, rows in (("jump", one, 1), ("riders", two, max(seats, _SEATS))):
            twin.max_num_running_reqs = twin.max_num_active_reqs = rows
            _Trial(twin, name, plan).run()
    except UnsupportedEngineError as error:
        return str(error)
    except Exception as error:  # whatever a changed vLLM raises here, the server still starts
        _log.debug("kvcmas: the self-test failed", exc_info=True)
        return f"the self-test ended with {type(error).__name__}: {error}"
    return None


def plans(block_size: int) -> tuple[Plan, Plan]:
    """One hole, and two; they begin and end inside of blocks, and at their edges."""
    size, length = block_size, 5 * block_size + block_size // 2
    first = Reuse(size + size // 4, 2 * size + size // 2, "one", 0)
    second = Reuse(3 * size, 4 * size + max(1, size // 4), "two", 0)
    return plan_of(length, [first]), plan_of(length, [first, second])


def _twin(scheduler: Any) -> Any:
    """A scheduler of the same class and configuration that shares nothing with this one."""
    config = copy(scheduler.vllm_config)
    config.kv_events_config = None
    config.ec_transfer_config = None
    # Preparing for images takes long and changes nothing for a text.
    config.model_config = copy(config.model_config)
    config.model_config.multimodal_config = None
    config.model_config.max_model_len = max(
        config.model_config.max_model_len, 8 * scheduler.block_size
    )
    blank = type("Twin", (type(scheduler),), {"tries_out": False})
    return blank(
        vllm_config=config,
        kv_cache_config=replace(scheduler.kv_cache_config, num_blocks=_BLOCKS),
        structured_output_manager=scheduler.structured_output_manager,
        block_size=scheduler.block_size,
        hash_block_size=scheduler.hash_block_size,
    )


class _Trial:
    """One request that follows a plan in a scheduler of its own.

    Raises:
        UnsupportedEngineError: anything that is not as the plan wants it; says what.
    """

    def __init__(self, scheduler: Any, name: str, plan: Plan) -> None:
        self.scheduler = scheduler
        self.name = name
        self.plan = plan
        # Other tokens in each trial: an agent continues what it was served with before.
        self._ids = [len(name)] * plan.length
        self._state = np.full(plan.length, _EMPTY, dtype=np.int8)
        self._blocks: list[int] = []
        self._to_forget: set[str] = set()
        self._sampled: list[int] = []

    def run(self) -> None:
        """From arrival to the last block that is given back."""
        scheduler = self.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        free = pool.get_num_free_blocks()
        request = synthetic_request(self.name, self._ids, scheduler.block_size)
        scheduler.add_request(request)
        coordinator = scheduler.connector.coordinator
        coordinator.presets[self.name] = Planned(self.plan, {})
        # An asynchronous scheduler is asked for the next step before the last one has ended.
        depth = 2 if isinstance(scheduler, AsyncScheduler) else 1
        steps: deque[SchedulerOutput] = deque()
        for _ in range(2 * self.plan.length):
            if not scheduler.requests:
                break
            output = scheduler.schedule()
            self._follow(output)
            steps.append(output)
            if len(steps) == depth:
                self._answer(steps.popleft())
        while steps:
            self._answer(steps.popleft())
        self._check_end()
        _require(
            not (scheduler.requests or scheduler.running or scheduler.waiting),
            "a request does not end",
        )
        _require(not coordinator.requests, "a request that ended is still tracked")
        _require(pool.get_num_free_blocks() == free, "blocks of a request are not given back")
        self._check_cache()

    def _follow(self, output: SchedulerOutput) -> None:
        """What the workers are told in a step: loads first, then the rows of the batch."""
        forgotten = self._to_forget <= output.finished_req_ids
        _require(forgotten, "workers are not told to forget a rider")
        self._to_forget = output.num_scheduled_tokens.keys() - {self.name}
        starts = _starts(output)
        self._learn_blocks(output)
        for load in self._work(output).loads:
            self._check_blocks(load.block_ids, load.source.stop)
            places = self._state[load.source.start : load.source.stop]
            _require(not (places == _COMPUTED).any(), "a load overwrites what was computed")
            places[:] = _LOADED
        scheduled = output.num_scheduled_tokens
        total = output.total_num_scheduled_tokens
        _require(total == sum(scheduled.values()), "the step's tokens are counted wrongly")
        _require(total <= self.scheduler.max_num_scheduled_tokens, "a step exceeds its budget")
        _require(len(scheduled) <= self.scheduler.max_num_running_reqs, "a step has too many rows")
        for name, tokens in scheduled.items():
            _require(name in starts, f"workers do not know the row {name}")
            self._compute(starts[name], starts[name] + tokens)
        last = max((starts[name] + tokens for name, tokens in scheduled.items()), default=0)
        if self.name in scheduled:
            own = starts[self.name] + scheduled[self.name]
            _require(own == last, "a rider stands behind the request's own row")
        _require(bool((self._state[:last] != _EMPTY).all()), "a row attends to an empty position")

    def _learn_blocks(self, output: SchedulerOutput) -> None:
        """The own row's blocks, as the workers put them together; riders must have the same."""
        cached = output.scheduled_cached_reqs
        for name, new_blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name == self.name and new_blocks is not None:
                self._blocks += new_blocks[0]
        for new in output.scheduled_new_reqs:
            if new.req_id == self.name:
                self._blocks = list(new.block_ids[0])
        for new in output.scheduled_new_reqs:
            self._check_blocks(new.block_ids[0], 0)

    def _compute(self, start: int, stop: int) -> None:
        _require(0 <= start < stop <= self.plan.length, f"a row computes [{start}, {stop})")
        self._check_blocks(self._blocks, stop)
        places = self._state[start:stop]
        again = bool((places == _COMPUTED).any())
        _require(not again, f"positions in [{start}, {stop}) are computed twice")
        places[:] = _COMPUTED

    def _check_blocks(self, blocks: Iterable[int], stop: int) -> None:
        blocks = list(blocks)
        _require(blocks == self._blocks, "a load or a rider has other blocks than its request")
        _require(len(blocks) * self.scheduler.block_size >= stop, "a row has too few blocks")

    def _answer(self, output: SchedulerOutput) -> None:
        """The step has been executed. Riders sample as well; nobody may notice."""
        scheduled = output.num_scheduled_tokens
        starts = _starts(output)
        sampled = {
            name: [_TOKEN] if name != self.name or starts[name] + tokens == self.plan.length else []
            for name, tokens in scheduled.items()
        }
        answer = model_answer(sampled, set(self._work(output).released))
        for outputs in self.scheduler.update_from_output(output, answer).values():
            for one in outputs.outputs:
                _require(one.request_id == self.name, f"{one.request_id} is answered")
                self._sampled += one.new_token_ids

    def _work(self, output: SchedulerOutput) -> StepWork:
        work = getattr(output.kv_connector_metadata, "work", None)
        if not isinstance(work, StepWork):
            raise UnsupportedEngineError("a step reaches the workers without the connector's part")
        return work

    def _check_end(self) -> None:
        wanted = np.full(self.plan.length, _LOADED, dtype=np.int8)
        wanted[list(self.plan.computed_positions())] = _COMPUTED
        wrong = np.flatnonzero(self._state != wanted)
        if wrong.size:
            words = {_EMPTY: "left out", _LOADED: "loaded", _COMPUTED: "computed"}
            position = int(wrong[0])
            raise UnsupportedEngineError(
                f"{wrong.size} of {self.plan.length} positions are not as planned: the first, "
                f"{position}, is {words[int(self._state[position])]}, to be "
                f"{words[int(wanted[position])]}"
            )
        _require(self._sampled == [_TOKEN], f"sampled tokens are {self._sampled}, not one")

    def _check_cache(self) -> None:
        """A plain request of the same tokens finds exact blocks only."""
        size = self.scheduler.block_size
        plain = synthetic_request(self.name, self._ids, size)
        hit = int(self.scheduler.kv_cache_manager.get_computed_blocks(plain)[1])
        first = next(span.start for span in self.plan.reused())
        _require(hit <= first, f"a plain request finds {hit} tokens cached, {first} are exact")


def _starts(output: SchedulerOutput) -> dict[str, int]:
    """First position of each row, as the workers read it."""
    starts = {new.req_id: int(new.num_computed_tokens) for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    return starts | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise UnsupportedEngineError(otherwise)
