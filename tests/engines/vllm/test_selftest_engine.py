"""The start-up self-test in a real engine: it passes, leaves nothing behind, and finds faults."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvcmas.workflow.plan import Compute, Reuse

from .engine import Server, serving

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as one:
        yield one


def schedulers() -> tuple[type, type]:
    from kvcmas.engines.vllm.scheduler import KvcmasAsyncScheduler, KvcmasScheduler

    return KvcmasScheduler, KvcmasAsyncScheduler


def state(server: Server) -> dict[str, Any]:
    """Everything that a request could have changed."""
    scheduler, pool = server.scheduler, server.scheduler.kv_cache_manager.block_pool
    return {
        "step": scheduler.current_step,
        "sequence": (scheduler.sched_step_seq, scheduler.processed_step_seq),
        "requests": (dict(scheduler.requests), list(scheduler.running), len(scheduler.waiting)),
        "finished": (set(scheduler.finished_req_ids), set(scheduler.prev_step_scheduled_req_ids)),
        "hashes": len(pool.cached_block_hash_to_block),
        "free": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        "queries": scheduler.kv_cache_manager.prefix_cache_stats.queries,
        "external": scheduler.connector_prefix_cache_stats.queries,
        "counts": dict(server.coordinator.stats.data),
        "donors": server.donors,
        "tracked": dict(server.coordinator.requests),
        "presets": dict(server.coordinator.presets),
        "rows": scheduler.max_num_running_reqs,
        "window": scheduler.vllm_config.model_config.max_model_len,
        "blocks": scheduler.kv_cache_config.num_blocks,
    }


def tried(server: Server, scheduler: type, **attributes: Any) -> str | None:
    """The verdict about another scheduler class in this engine's configuration."""
    from kvcmas.engines.vllm.selftest import try_holes

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        super(changed, self).__init__(*args, **kwargs)
        for name, value in attributes.items():
            setattr(self, name, value)

    changed = type("Changed", (scheduler,), {"__init__": construct})
    stand_in = changed.__new__(changed)
    stand_in.__dict__.update(server.scheduler.__dict__)
    return try_holes(stand_in)


def test_holes_are_on_and_nothing_is_left_behind(server: Server) -> None:
    assert server.coordinator.holes
    fresh = state(server)
    assert fresh["step"] == fresh["hashes"] == fresh["queries"] == fresh["external"] == 0
    assert fresh["requests"] == ({}, [], 0)
    assert fresh["finished"] == (set(), set())
    assert fresh["sequence"] == (0, 0)
    assert not fresh["counts"] and not fresh["donors"] and not fresh["tracked"]
    assert len(fresh["free"]) == fresh["blocks"] - 1
    assert fresh["free"] == sorted(fresh["free"])


def test_repeated_it_changes_nothing_and_is_fast(server: Server) -> None:
    from kvcmas.engines.vllm.selftest import try_holes

    before = state(server)
    started = time.perf_counter()
    assert try_holes(server.scheduler) is None
    assert time.perf_counter() - started < 1.0  # about 0.015 on an idle machine
    assert state(server) == before


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("newer_runner", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("budget", [17, 40, 4096])
def test_passes_in_every_mode(
    server: Server, asynchronous: bool, newer_runner: bool, deferred: bool, budget: int
) -> None:
    assert (
        tried(
            server,
            schedulers()[asynchronous],
            use_v2_model_runner=newer_runner,
            defer_block_free=deferred,
            max_num_scheduled_tokens=budget,
        )
        is None
    )


def ignores_the_cap(self: Any, request: Any, position: int, tokens: int) -> int:
    return tokens


def adds_no_riders(self: Any, output: Any) -> None:
    self._riding = []


def forgets_riders(self: Any, output: Any) -> None:
    before = set(self.finished_req_ids)
    super(schedulers()[0], self)._add_riders(output)
    self.finished_req_ids = before


def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise ValueError("changed")


def leaks(self: Any, request: Any) -> None:
    del self.requests[request.request_id]


def points_elsewhere(self: Any, moved: Any, output: Any) -> None:
    cached = output.scheduled_cached_reqs
    cached.num_computed_tokens[:] = [number - 1 for number in cached.num_computed_tokens]


@pytest.mark.parametrize(
    ("method", "fault", "said"),
    [
        ("_reserve_prefill_lookahead", ignores_the_cap, "40 of 176 positions are not as planned"),
        ("_add_riders", adds_no_riders, "a row attends to an empty position"),
        ("_add_riders", forgets_riders, "workers are not told to forget a rider"),
        ("schedule", fails, "the self-test ended with ValueError: changed"),
        ("add_request", fails, "the self-test ended with ValueError: changed"),
        ("__init__", fails, "the self-test ended with ValueError: changed"),
        ("_free_blocks", leaks, "blocks of a request are not given back"),
        ("_hand_over", points_elsewhere, "2 of 176 positions are not as planned"),
    ],
)
def test_faults_are_found(server: Server, method: str, fault: Any, said: str) -> None:
    broken = type("Broken", (schedulers()[0],), {method: fault})
    before = state(server)
    verdict = tried(server, broken)
    assert verdict is not None
    assert said in verdict
    assert state(server) == before


@pytest.mark.parametrize("size", [8, 16, 32, 128])
def test_plans_have_holes_inside_of_blocks(size: int) -> None:
    from kvcmas.engines.vllm.selftest import plans

    one, two = plans(size)
    assert [type(span) for span in one.spans] == [Compute, Reuse, Compute]
    assert [type(span) for span in two.spans] == [Compute, Reuse, Compute, Reuse, Compute]
    assert one.length == two.length == 5 * size + size // 2
    assert any(span.start % size for span in one.reused())
