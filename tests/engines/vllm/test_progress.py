"""The execution of random plans, with KV that says where it comes from."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcmas.engines.vllm.progress import Progress
from kvcmas.workflow.plan import Compute, Head, Plan, Reuse, Span

TOLERANCE = 0.1


def random_plan(draw: random.Random) -> Plan:
    """Computed and reused spans of all kinds; the last token is computed."""
    spans: list[Span] = []
    position = 0
    for number in range(draw.randint(1, 6)):
        computed = bool(spans) and isinstance(spans[-1], Compute)
        if not computed and draw.random() < 0.6:
            length = draw.randint(1, 30)
            spans.append(Compute(position, position + length))
            position += length
        length = draw.randint(1, 60)
        places = range(position, position + length)
        if draw.random() < 0.2:
            span = Reuse(position, position + length, f"s{number}", 0, exact=True)
        else:
            first = draw.choice([0, 0, min(8, length), min(16, length), length])
            head = Head(first, 8, 32, draw.choice([None, TOLERANCE]), 4)
            spots = tuple(sorted(draw.sample(places, min(length, draw.randint(0, 4)))))
            span = Reuse(position, position + length, f"s{number}", 3, head=head, landmarks=spots)
        spans.append(span)
        position += length
    spans.append(Compute(position, position + draw.randint(1, 9)))
    return Plan(spans[-1].stop, tuple(spans))


class Run:
    """One request: `kv` holds C (computed), L (loaded) or X (found again) for each position."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.progress = Progress(random_plan(draw))
        self.kv: list[str | None] = []
        self.asked: list[tuple[int, int]] = []
        self.steps = 0
        self.generated = 0
        self.restart(draw.choice([0, 0, draw.randint(0, self.progress.plan.length - 1)]))

    def restart(self, held: int) -> None:
        length = self.progress.plan.length + self.generated
        exact = self.draw.randint(0, held)
        self.progress.restart(length, held, exact)
        self.kv = ["X"] * held + [None] * (length - held)
        assert (self.progress.held, self.progress.exact_held) == (held, exact)

    def step(self) -> None:
        progress, draw, kv = self.progress, self.draw, self.kv
        tokens, rows = draw.choice([0, 5, 1000]), draw.choice([0, 1, 100])
        step = progress.step(tokens, rows)
        self.steps += 1
        if step is None:
            assert self.asked, "nothing to wait for"
            assert progress.waiting
            return
        assert len(step.riders) <= rows and step.rider_tokens <= tokens
        pieces = [*step.riders, (step.start, step.stop)]
        assert all(stop < start for (_, stop), (start, _) in pairwise(pieces))
        granted = draw.randint(1, step.stop - step.start)
        before = progress.model_tokens
        done = progress.commit(step, granted)
        pieces[-1] = (step.start, step.start + granted)
        assert progress.model_tokens == before + step.rider_tokens + granted
        self._load(done.loads)
        for start, stop in pieces:
            assert None not in kv[:start], "computed before all in front of it is in place"
            kv[start:stop] = ["C"] * (stop - start)
            if stop == progress.length:
                assert all(head.settled for head in progress.heads.values())
        for part in done.measures:
            assert part.stop == progress.heads[part.span.start].end
            assert 0 < part.stop - part.start <= part.span.head.probe
            assert set(kv[part.start : part.stop]) <= {"C", "X"}
            self.asked.append((part.span.start, part.stop))
        assert done.last == progress.done

    def _load(self, loads: tuple) -> None:
        computed = {spot for start, stop in self.progress.computed() for spot in range(start, stop)}
        for part in loads:
            assert part.span.start <= part.start < part.stop <= part.span.stop
            for spot in range(part.start, part.stop):
                assert spot >= self.progress.held
                # A computed token in between is computed in this step or later.
                assert self.kv[spot] is None or spot not in computed
                self.kv[spot] = "L"

    def report(self) -> None:
        span, end = self.asked.pop(self.draw.randrange(len(self.asked)))
        self.progress.report(span, end, self.draw.choice([0.05, 0.05, 0.5, float("nan")]))

    def finish(self, preemptions: int = 0) -> None:
        while not self.progress.done:
            self.step()
            assert self.steps < 500
            while self.asked and (self.draw.random() < 0.7):
                self.report()
            if preemptions and self.draw.random() < 0.2:
                preemptions -= 1
                self.generated = self.draw.choice([0, 0, 3])
                self.restart(self.draw.choice([0, self.draw.randint(0, len(self.kv) - 1)]))

    def check(self) -> None:
        progress = self.progress
        assert None not in self.kv
        computed = {spot for start, stop in progress.computed() for spot in range(start, stop)}
        for spot in range(progress.held, progress.plan.length):
            assert self.kv[spot] == ("C" if spot in computed else "L")
        assert set(self.kv[progress.plan.length :]) <= {"C", "X"}


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 2**32))
def test_every_plan_ends_as_told(seed: int) -> None:
    run = Run(random.Random(seed))
    run.finish()
    run.check()
    assert not run.progress.waiting


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_preemptions_lose_nothing(seed: int) -> None:
    run = Run(random.Random(seed))
    run.finish(preemptions=3)
    run.check()


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 6))
def test_given_up_at_any_moment_the_rest_is_computed(seed: int, steps: int) -> None:
    run = Run(random.Random(seed))
    for _ in range(steps):
        if not run.progress.done:
            run.step()
            while run.asked:
                run.report()
    over = run.progress.done
    run.progress.give_up("lost")
    assert run.progress.done == over
    for head in run.progress.heads.values():
        rest = run.kv[head.end : head.span.stop]
        all_landmarks = set(rest) == {"C"}
        assert head.whole or "L" in rest or all_landmarks or head.end <= run.progress.held
    run.finish()
    run.check()


def one_span(head: Head, length: int = 100, landmarks: tuple[int, ...] = ()) -> Progress:
    """10 computed tokens, a reused span, 5 computed tokens."""
    span = Reuse(10, 10 + length, "s", 0, head=head, landmarks=landmarks)
    stop = 15 + length
    return Progress(Plan(stop, (Compute(0, 10), span, Compute(10 + length, stop))))


class TestHead:
    def test_holds_the_tail_back(self) -> None:
        progress = one_span(Head(8, 8, 32, TOLERANCE, 4), landmarks=(50,))
        step = progress.step(1000, 10)
        assert step is not None
        assert (step.riders, step.start, step.stop) == (((0, 18),), 50, 51)
        done = progress.commit(step, 1)
        assert [(part.start, part.stop) for part in done.loads] == [(18, 50)]
        assert [(part.start, part.stop) for part in done.measures] == [(14, 18)]
        assert progress.waiting and progress.step(1000, 10) is None
        progress.report(10, 18, TOLERANCE)
        step = progress.step(1000, 10)
        assert step is not None and (step.start, step.stop) == (110, 115)
        assert [(part.start, part.stop) for part in progress.commit(step, 5).loads] == [(51, 110)]
        assert progress.done and progress.computed() == ((0, 18), (50, 51), (110, 115))
        assert progress.exact_end() == 18 and not progress.exact

    def test_that_disagrees_grows_and_what_stood_behind_is_computed_again(self) -> None:
        progress = one_span(Head(8, 8, 32, TOLERANCE, 4), landmarks=(50,))
        progress.commit(progress.step(1000, 10), 1)
        progress.report(10, 18, 0.5)
        step = progress.step(1000, 10)
        assert step is not None
        assert (step.riders, step.start, step.stop) == (((18, 26),), 50, 51)
        assert "computed 16 tokens" in progress.heads[10].notes[0]

    @pytest.mark.parametrize("deviation", [float("nan"), float("inf")])
    def test_that_is_no_number_computes_the_whole_span(self, deviation: float) -> None:
        progress = one_span(Head(8, 8, 32, TOLERANCE, 4))
        progress.commit(progress.step(1000, 10), 18)
        progress.report(10, 18, deviation)
        assert progress.heads[10].whole and progress.exact
        step = progress.step(1000, 10)
        assert step is not None and (step.start, step.stop) == (18, 115)

    def test_at_its_limit_computes_the_whole_span(self) -> None:
        progress = one_span(Head(8, 8, 12, TOLERANCE, 4))
        for end in (18, 22):
            step = progress.step(0, 0)
            progress.commit(step, step.stop - step.start)
            progress.report(10, end, 0.5)
        assert progress.heads[10].whole and progress.computed() == ((0, 115),)

    def test_without_tolerance_only_records(self) -> None:
        progress = one_span(Head(8, 8, 8, None, 4))
        step = progress.step(1000, 10)
        assert step is not None and (step.riders, step.start) == (((0, 18),), 110)
        progress.commit(step, 5)
        progress.report(10, 18, 9.0)
        assert progress.done and progress.heads[10].deviation == 9.0

    def test_of_no_tokens_gets_some_where_there_is_a_tolerance(self) -> None:
        progress = one_span(Head(0, 8, 32, TOLERANCE, 4))
        assert progress.heads[10].length == 8
        assert progress.heads[10].notes

    def test_a_report_of_an_older_length_says_nothing(self) -> None:
        progress = one_span(Head(8, 8, 32, TOLERANCE, 4))
        progress.commit(progress.step(0, 0), 18)
        progress.report(10, 12, 0.5)
        progress.report(99, 18, 0.5)
        assert progress.heads[10].length == 8

    def test_a_report_from_before_a_growth_in_front_says_nothing(self) -> None:
        head = Head(8, 8, 32, TOLERANCE, 4)
        spans = (Reuse(1, 50, "a", 0, head=head), Reuse(50, 100, "b", 0, head=head))
        progress = Progress(Plan(105, (Compute(0, 1), *spans, Compute(100, 105))))
        step = progress.step(1000, 10)
        progress.commit(step, step.stop - step.start)
        progress.report(1, 9, 0.5)
        progress.report(50, 58, 0.01)
        assert not progress.heads[50].settled
        step = progress.step(1000, 10)
        assert (step.riders, step.start, step.stop) == (((9, 17),), 50, 58)
        progress.commit(step, 8)
        progress.report(1, 17, 0.01)
        progress.report(50, 58, 0.01)
        assert all(one.settled for one in progress.heads.values())
