"""The scheduler side, step by step, around requests that nobody computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvcmas.engines.vllm.coordinator import Coordinator
from kvcmas.engines.vllm.messages import Report, Sums
from kvcmas.methods.kvcmas.planner import Planned
from kvcmas.workflow.plan import Compute, Head, Plan, Reuse

from .fake_requests import BLOCK, FakeRequest, Params, coordinator, ids, no_hit, request
from .served import agree, blocks_of, clean, reading, serve, step, with_donor


class TestArrival:
    def test_names_agents_by_hint_or_prompt(self) -> None:
        side = coordinator()
        side.arrive(request("one", reading("a"), "planner"))
        side.arrive(request("two", reading("a", 1)))
        side.arrive(request("three", reading("a", 2)))
        side.arrive(request("four", reading("b", 1)))
        names = {name: one.prompt.agent for name, one in side.requests.items()}
        assert names["one"] == "planner"
        assert names["two"] == names["three"] != names["four"]

    def test_salts_and_adapters_share_nothing(self) -> None:
        side = coordinator()
        adapter = SimpleNamespace(lora_name="x", lora_path="/x")
        for name, salt, lora in (("1", None, None), ("2", "s", None), ("3", "s", adapter)):
            side.arrive(request(name, reading("a"), cache_salt=salt, lora_request=lora))
        assert len({one.prompt.tenant for one in side.requests.values()}) == 3

    def test_embeddings_are_left_alone(self) -> None:
        side = coordinator()
        given = FakeRequest("e", None)
        side.arrive(given)
        assert not side.requests and side.admit(given, 5) == 0 and side.cap(given, 0, 7) == 7
        assert side.finish(given, (), True) == (False, None)

    @pytest.mark.parametrize(
        ("more", "why"),
        [
            ({"reuse": False}, "asked for no reuse"),
            ({"warm": True}, "asked for no reuse"),
            ({"pooling_params": object()}, "not a generation"),
            ({"mm_features": [1]}, "images"),
            ({"sampling_params": Params(prompt_logprobs=1)}, "log-probabilities"),
            ({"skip_reading_prefix_cache": True}, "does not read the prefix cache"),
            ({"resumable": True}, "streaming"),
        ],
    )
    def test_some_kinds_are_served_exactly(self, more: dict[str, Any], why: str) -> None:
        record, work = serve(with_donor(), request("r", reading("b", 1), "b", **more))
        assert record.reused == 0 and any(why in note for note in record.notes)
        assert not work.loads

    def test_hints_that_cannot_be_used_are_noted(self) -> None:
        record, _ = serve(coordinator(), request("r", reading("a"), "a", dial="quick"))
        assert any("dial ignored" in note for note in record.notes)

    def test_exact_tenants_reuse_and_keep_nothing(self) -> None:
        side = coordinator(exact_tenants=("s",))
        record, work = serve(side, request("r", reading("a"), "a", cache_salt="s", dial="fast"))
        assert record.dial == "exact" and not work.captures and len(side.directory) == 0


class TestSteps:
    def test_natural_reuse(self) -> None:
        side, reader = with_donor(), request("r", reading("b", 1), "b")
        side.arrive(reader)
        running: list[FakeRequest] = []
        first = step(side, reader, running=running)
        assert first.work.loads == [] and first.riders == []
        assert reader.num_computed_tokens == 24 + 8
        (measure,) = first.work.measures
        assert (measure.span, measure.source.start, measure.source.stop) == (24, 24, 32)
        assert side.cap(reader, 32, 99) == 99
        sums = Sums(np.array([0.01]), np.ones(1))
        side.reported(Report(deviations={("r", 24, 32): sums}))
        second = step(side, running=running)
        (load,) = second.work.loads
        assert (load.source.start, load.source.stop, load.source.offset) == (32, 144, 28)
        assert load.block_ids == blocks_of(reader) and second.moved == ["r"]
        assert reader.num_computed_tokens == reader.num_tokens
        assert reader.prefill_stats.told == {
            "num_prompt_tokens": 154,
            "num_local_cached_tokens": 0,
            "num_external_cached_tokens": 112,
        }
        reader.append(5)
        _, record = side.finish(reader, blocks_of(reader), True)
        assert record is not None and (record.computed, record.reused) == (42, 112)
        assert record.spans[1].deviation == pytest.approx(0.1) and record.steps == 2
        step(side)
        assert clean(side)

    def test_waits_for_the_measurement(self) -> None:
        side, reader = with_donor(), request("r", reading("b", 1), "b")
        side.arrive(reader)
        running: list[FakeRequest] = []
        step(side, reader, running=running)
        stood = reader.num_computed_tokens
        assert step(side, running=running).work.loads == []
        assert reader.num_computed_tokens == stood
        agree(side, reader, deviation=float("nan"))
        step(side, running=running)
        assert reader.num_computed_tokens == reader.num_tokens

    def preset(self, side: Coordinator) -> FakeRequest:
        """Three holes without measurements."""
        (info,) = side.directory.library.store.infos()
        spans: list[Compute | Reuse] = []
        for start in (10, 50, 90):
            spans.append(Compute(start - 10, start))
            spans.append(Reuse(start, start + 30, info.id, 20, head=Head()))
        plan = Plan(130, (*spans, Compute(120, 130)))
        given = request("p", ids(3, 130), "b")
        side.presets["p"] = Planned(plan, {})
        side.arrive(given)
        return given

    def test_riders_take_tokens_and_rows(self) -> None:
        side = with_donor()
        given = self.preset(side)
        reserved = side.before([], [given], 1000, 10, no_hit)
        assert (reserved.tokens, reserved.rows) == (30, 3)
        assert side.admit(given, 0) == 120 and side.cap(given, 120, 10) == 10
        done = side.commit({"p": 10}, lambda name: (0,))
        assert done.riders == [(given, ((0, 10), (40, 50), (80, 90)))]
        assert [load.source.start for load in done.work.loads] == [10, 50, 90]

    @pytest.mark.parametrize(("budget", "seats"), [(1000, 1), (1000, 2), (12, 10), (25, 3), (1, 1)])
    def test_riders_never_exceed_budget_and_seats(self, budget: int, seats: int) -> None:
        side = with_donor()
        given = self.preset(side)
        other = request("o", ids(4, 20), "c")
        side.arrive(other)
        reserved = side.before([], [given, other], budget, seats, no_hit)
        assert reserved.tokens < budget and reserved.rows < seats
        assert side.admit(given, 0) is not None
        assert side.cap(given, given.num_computed_tokens, budget - reserved.tokens) > 0

    def test_a_request_that_found_no_room_stands_where_it_stood(self) -> None:
        side = with_donor()
        given = self.preset(side)
        running: list[FakeRequest] = []
        step(side, given, running=running, budget=5, seats=1)
        assert given.num_computed_tokens == 10
        side.before(running, [], 1000, 10, no_hit)
        assert given.num_computed_tokens == 120
        side.commit({}, lambda name: (0,))
        assert given.num_computed_tokens == 10
        step(side, running=running)
        assert given.num_computed_tokens == 130

    def test_a_preempted_request_begins_again(self) -> None:
        side = with_donor()
        given = self.preset(side)
        running: list[FakeRequest] = []
        step(side, given, running=running, budget=5, seats=1)
        side.before(running, [], 1000, 10, no_hit)
        side.preempted(given)
        given.num_computed_tokens = 0
        assert side.commit({}, lambda name: (0,)).riders == []
        assert given.num_computed_tokens == 0
        done = step(side, given, running=[])
        assert len(done.riders[0][1]) == 3 and given.num_computed_tokens == 130

    def test_a_chunk_that_is_cut_goes_on(self) -> None:
        side = with_donor()
        given = self.preset(side)
        side.before([], [given], 1000, 10, no_hit)
        side.admit(given, 0)
        given.num_computed_tokens = 120
        side.commit({"p": 4}, lambda name: (0,))
        given.num_computed_tokens = 124
        side.before([given], [], 1000, 10, no_hit)
        assert (given.num_computed_tokens, side.cap(given, 124, 99)) == (124, 6)

    def test_without_holes_vllm_cuts_chunks_by_itself(self) -> None:
        side = with_donor(holes=False)
        tokens = [*reading("a")[:100], *ids(9, 60)]
        given = request("r", tokens, "b")
        side.arrive(given)
        side.before([], [given], 0, 0, no_hit)
        assert side.admit(given, 0) == 100
        given.num_computed_tokens = 100
        (load,) = side.commit({"r": 30}, blocks_for(given)).work.loads
        assert (load.source.start, load.source.stop) == (0, 100)
        given.num_computed_tokens = 130
        assert not side.commit({"r": 30}, blocks_for(given)).work
        given.num_computed_tokens = 160
        assert [one.stop for one in side.commit({}, blocks_for(given)).work.captures] == [160]


def blocks_for(given: FakeRequest) -> Any:
    return lambda name: tuple(range(given.num_tokens // BLOCK + 1))
