"""Waiting for donors in flight, ends of all kinds, and loads that fail."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvcmas.engines.vllm.coordinator import Coordinator
from kvcmas.engines.vllm.messages import Facts, PairName, Report

from .fake_requests import BLOCK, Clock, FakeRequest, coordinator, ids, no_hit, request
from .served import agree, blocks_of, clean, reading, serve, step, with_donor


class TestWaiting:
    def pair(self, **more: Any) -> tuple[Coordinator, FakeRequest, FakeRequest, Clock]:
        """Agent a in its first step, and agent b that is to read the same text."""
        clock = Clock()
        side = coordinator(clock=clock, wait_s=2.0, **more)
        writer, reader = request("w", reading("a"), "a"), request("r", reading("b", 1), "b")
        side.arrive(writer)
        side.arrive(reader)
        return side, writer, reader, clock

    def test_ends_when_the_donor_is_there(self) -> None:
        side, writer, reader, clock = self.pair()
        running: list[FakeRequest] = []
        step(side, writer, reader, running=running)
        assert running == [writer] and side.requests["r"].planned is None
        clock.now += 0.5
        # The prompt is captured with the step behind its prefill.
        assert len(step(side, reader, running=running).work.captures) == 1
        assert running == [writer]
        done = step(side, reader, running=running)
        assert running == [writer, reader] and done.work.measures
        assert side.requests["r"].waited_s == pytest.approx(0.5)

    def test_has_an_end(self) -> None:
        side, writer, reader, clock = self.pair()
        running: list[FakeRequest] = []
        side.before([], [writer, reader], 1000, 10, no_hit)
        assert side.admit(reader, 0) is None
        clock.now += 2.0
        step(side, reader, running=running)
        assert running == [reader]
        tracked = side.requests["r"]
        assert tracked.waited_s == 2.0 and "no longer waiting" in tracked.notes[0]

    def test_ends_when_the_writer_leaves(self) -> None:
        side, writer, reader, _ = self.pair()
        side.before([], [writer, reader], 1000, 10, no_hit)
        side.finish(writer, (), False)
        side.before([], [reader], 1000, 10, no_hit)
        assert side.admit(reader, 0) == 0

    def test_is_not_for_those_who_keep_nothing(self) -> None:
        clock = Clock()
        side = coordinator(clock=clock, dial="exact")
        writer = request("w", reading("a"), "a")
        reader = request("r", reading("b", 1), "b", dial="balanced")
        side.arrive(writer)
        side.arrive(reader)
        side.before([], [writer, reader], 1000, 10, no_hit)
        assert side.admit(reader, 0) == 0

    def test_cold_pairs_do_not(self) -> None:
        side, writer, reader, _ = self.pair(method={"cold_tokens": 50})
        side.before([], [writer, reader], 1000, 10, no_hit)
        assert side.admit(reader, 0) == 0
        side, writer, reader, _ = self.pair(method={"cold_tokens": 50})
        facts = {(0, PairName("", "a", "b")): Facts(50, 0)}
        side.reported(Report(facts=facts))
        side.before([], [writer, reader], 1000, 10, no_hit)
        assert side.admit(reader, 0) is None


class TestEnds:
    def test_prompts_of_one_token_answers_become_donors(self) -> None:
        side, given = coordinator(), request("r", reading("a"), "a")
        side.arrive(given)
        step(side, given)
        given.append(1)
        held, _ = side.finish(given, blocks_of(given), True)
        assert held
        work = step(side).work
        assert [(one.start, one.stop) for one in work.captures] == [(0, 150)]
        assert work.released == ["r"] and clean(side)

    def test_a_donor_that_is_captured_in_this_step_is_loaded_in_the_next(self) -> None:
        side, given = coordinator(), request("w", reading("a"), "a")
        side.arrive(given)
        step(side, given)
        given.append(1)
        side.finish(given, blocks_of(given), True)
        tokens = [*reading("a")[:100], *ids(9, 40)]
        reader = request("r", tokens, "a")
        side.arrive(reader)
        running: list[FakeRequest] = []
        first = step(side, reader, running=running)
        assert first.work.captures and not first.work.loads and not running
        second = step(side, reader, running=running)
        assert running == [reader]
        assert [one.source.segment for one in second.work.loads] == [first.work.captures[0].segment]

    def test_an_answer_becomes_a_donor_of_its_own(self) -> None:
        side = coordinator()
        given = request("r", reading("a"), "a")
        _, work = serve(side, given, answer=30)
        assert [(one.start, one.stop) for one in work.captures] == [(150, 150 + 29)]
        assert len(side.directory) == 2 and clean(side)

    @pytest.mark.parametrize("seed", range(30))
    def test_aborted_at_any_moment_nothing_is_left(self, seed: int) -> None:
        draw = random.Random(seed)
        side = with_donor()
        held = len(side.directory)
        reader = request("r", reading("b", 1), "b")
        side.arrive(reader)
        running: list[FakeRequest] = []
        for moment in range(draw.randint(0, 3)):
            waiting = [] if running else [reader]
            step(side, *waiting, running=running, budget=draw.choice([5, 1000]))
            if draw.random() < 0.5:
                agree(side, reader, draw.choice([0.0, 0.5]))
            if running and draw.random() < 0.3:
                side.preempted(running.pop())
                reader.num_computed_tokens = 0
            assert moment < 3
        if draw.random() < 0.3:
            side.before(running, [], 1000, 10, no_hit)
        kept, record = side.finish(reader, blocks_of(reader), False)
        assert not kept and record is not None
        step(side)
        assert clean(side) and len(side.directory) >= held

    def test_an_agent_goes_on_behind_what_it_was_served_with(self) -> None:
        side = with_donor()
        reader = request("r", reading("b", 1), "b")
        serve(side, reader)
        cached = reader.block_hashes
        assert cached[4] != FakeRequest("plain", reader.all_token_ids).block_hashes[4]

        def hit(given: FakeRequest) -> int:
            same = 0
            for one, other in zip(given.block_hashes, cached, strict=False):
                if one != other:
                    break
                same += BLOCK
            return same

        again = request("s", [*reader.all_token_ids, *ids(9, 60)], "b")
        side.arrive(again)
        side.before([], [again], 1000, 10, hit)
        assert side.requests["s"].cached == len(cached) * BLOCK
        assert side.admit(again, hit(again)) == 0
        side.finish(again, (), False)
        other = request("t", [*reader.all_token_ids, *ids(9, 60)], "c")
        side.arrive(other)
        side.before([], [other], 1000, 10, hit)
        assert side.requests["t"].cached == 4 * BLOCK
        exact = request("u", [*reader.all_token_ids, *ids(9, 60)], "b", dial="exact")
        side.arrive(exact)
        side.before([], [exact], 1000, 10, hit)
        assert side.requests["u"].cached == 4 * BLOCK

    def test_forgetting_all_tells_the_workers(self) -> None:
        side = with_donor()
        side.forget_all()
        assert step(side).work.reset and not step(side).work.reset
        assert len(side.directory) == 0 and clean(side)


class TestFailedLoads:
    def test_are_computed_and_never_tried_again(self) -> None:
        side, reader = with_donor(), request("r", reading("b", 1), "b")
        side.arrive(reader)
        running: list[FakeRequest] = []
        step(side, reader, running=running)
        agree(side, reader)
        assert step(side, running=running).work.loads
        reader.num_computed_tokens = 32
        side.reported(Report(failed={"r"}))
        done = step(side, running=running)
        assert not done.work.loads and not done.work.measures
        assert reader.num_computed_tokens == reader.num_tokens
        reader.append(1)
        _, record = side.finish(reader, blocks_of(reader), True)
        assert record is not None and record.reused == 0
        assert any("could not be loaded" in note for note in record.notes)

    def test_of_requests_that_are_gone_are_nothing(self) -> None:
        side = with_donor()
        side.reported(Report(failed={"unknown"}))
        assert clean(side)
