"""The donors as the scheduler knows them: what is kept, what leaves, and when."""

from __future__ import annotations

import pytest

from kvcmas.engines.vllm.directory import Directory
from kvcmas.engines.vllm.hints import Hints
from kvcmas.engines.vllm.inflight import Pending
from kvcmas.engines.vllm.messages import Capture, Facts, PairName, Report, StepWork
from kvcmas.engines.vllm.progress import Progress
from kvcmas.engines.vllm.tracked import Tracked
from kvcmas.methods.kvcmas.config import KvcmasConfig
from kvcmas.methods.kvcmas.planner import Planned
from kvcmas.workflow.plan import Compute, Head, Plan, Reuse
from kvcmas.workflow.prompt import Prompt

from .fake_requests import METHOD, Clock, array, ids, request
from .served import DOCUMENT, reading, scores


def make(budget: int = 10_000, tenant_bytes: int | None = None, **method: object) -> Directory:
    config = KvcmasConfig(budget_bytes=budget, **{**METHOD, **method})
    return Directory(config, 2, 1, tenant_bytes, Clock())


def track(name: str, tokens: list[int], agent: str = "a", tenant: str = "t") -> Tracked:
    prompt = Prompt(array(tokens), agent=agent, request_id=name, tenant=tenant)
    return Tracked(request(name, tokens), prompt, Hints(), None)


def capture(directory: Directory, tracked: Tracked, answer: int | None = None) -> list[Capture]:
    work = StepWork()
    if answer is None:
        directory.capture_prompt(tracked, (0, 1), work)
    else:
        for token in ids(77, answer):
            tracked.request.append(token)
        directory.capture_answer(tracked, (0, 1), work)
    return work.captures


def plan(directory: Directory, tracked: Tracked) -> Plan:
    tracked.planned = directory.plan(tracked.prompt)
    tracked.progress = Progress(tracked.planned.plan)
    return tracked.planned.plan


def serve(directory: Directory, tracked: Tracked) -> list[Capture]:
    plan(directory, tracked)
    tracked.progress = None
    made = capture(directory, tracked)
    directory.end(tracked, True)
    return made


class TestCaptures:
    def test_of_a_prompt_hold_all_of_it(self) -> None:
        directory, tokens = make(), reading("a")
        (made,) = serve(directory, track("r", tokens))
        assert (made.start, made.stop, made.exact) == (0, len(tokens), True)
        assert (made.request_id, made.tenant, made.agent) == ("r", "t", "a")
        assert made.token_ids.tolist() == tokens and made.block_ids == (0, 1)
        assert directory.library.store.nbytes == 2 * len(tokens) and len(directory) == 1

    def test_of_a_longer_prompt_continue_the_shorter(self) -> None:
        directory, tokens = make(), reading("a")
        (first,) = serve(directory, track("r", tokens))
        directory.mirror.take(scores("a", "b", first.segment, len(tokens)))
        (second,) = capture(directory, track("s", [*tokens, *ids(9, 40)]))
        assert (second.continues, second.kept) == (first.segment, len(tokens))
        assert len(directory) == 1 and directory._tokens.keys() == {second.segment}
        assert directory.mirror.scores(PairName("t", "a", "b"), first.segment) == []

    def test_do_not_continue_what_somebody_reads(self) -> None:
        directory, tokens = make(), reading("a")
        (first,) = serve(directory, track("r", tokens))
        reader = track("b", reading("b", 1), "b")
        assert [span.segment for span in plan(directory, reader).reused()] == [first.segment]
        (second,) = serve(directory, track("s", [*tokens, *ids(9, 40)]))
        assert (second.continues, second.kept) == (None, 0)
        assert directory.departed() == []
        directory.end(reader, True)
        assert directory.departed() == [] and directory.departed() == [first.segment]

    def test_of_what_is_held_already_are_not_made(self) -> None:
        directory = make()
        serve(directory, track("r", reading("a")))
        assert serve(directory, track("s", reading("a"))) == []

    def test_of_approximate_prompts_end_where_the_exact_kv_ends(self) -> None:
        directory = make()
        serve(directory, track("r", reading("a")))
        short = track("s", reading("b", 1), "b")
        plan(directory, short)
        assert capture(directory, short) == []  # too short to be worth it
        long = track("l", [*ids(8, 300), *DOCUMENT, *ids(9, 20)], "b")
        plan(directory, long)
        (made,) = capture(directory, long)
        assert (made.start, made.stop, made.exact) == (0, 300 + 8, True)

    def test_of_answers_stand_apart_without_the_token_sampled_last(self) -> None:
        tracked = track("r", reading("a"))
        (made,) = capture(make(), tracked, 40)
        prompt = len(tracked.prompt)
        assert (made.start, made.stop, made.exact) == (prompt, prompt + 39, True)
        assert made.token_ids.tolist() == ids(77, 40)[:39]

    def test_of_answers_behind_reused_text_take_their_task_along(self) -> None:
        directory = make()
        serve(directory, track("r", reading("a")))
        tracked = track("s", reading("b", 1), "b")
        plan(directory, tracked)
        (made,) = capture(directory, tracked, 40)
        assert (made.start, made.exact) == (24 + 120, False)

    def test_of_answers_after_a_preemption_that_found_all_again(self) -> None:
        directory = make()
        serve(directory, track("r", reading("a")))
        tracked = track("s", reading("b", 1), "b")
        plan(directory, tracked)
        length = len(tracked.prompt)
        assert tracked.progress is not None
        tracked.progress.restart(length + 5, length + 2, 24)
        (made,) = capture(directory, tracked, 40)
        assert (made.start, made.exact) == (length, False)

    def test_of_short_things_and_of_nobodys_are_not_made(self) -> None:
        directory = make()
        assert capture(directory, track("r", ids(1, 15))) == []
        assert capture(directory, track("r", reading("a")), 10) == []
        tracked = track("r", reading("a"))
        tracked.keeps_nothing = True
        assert capture(directory, tracked) == [] and len(directory) == 0


class TestLeaving:
    def test_evicted_donors_are_dropped_one_step_later(self) -> None:
        directory = make(budget=2 * 200)
        (first,) = serve(directory, track("r", reading("a")))
        directory.mirror.take(scores("a", "b", first.segment, 150))
        serve(directory, track("s", ids(8, 150)))
        assert directory.evicted == 1 and len(directory) == 1
        assert directory.departed() == []
        assert len(directory.mirror.scores(PairName("t", "a", "b"), first.segment)) == 1
        assert directory.departed() == [first.segment]
        assert directory.mirror.scores(PairName("t", "a", "b"), first.segment) == []
        assert directory.departed() == []

    def test_a_tenant_at_its_quota_evicts_its_own(self) -> None:
        directory = make(tenant_bytes=2 * 200)
        serve(directory, track("o", reading("a"), tenant="other"))
        (first,) = serve(directory, track("r", reading("a")))
        serve(directory, track("s", ids(8, 150)))
        directory.departed()
        assert directory.departed() == [first.segment]

    def test_refused_captures_leave(self) -> None:
        directory = make()
        (made,) = serve(directory, track("r", reading("a")))
        directory.reported(Report(refused={made.segment: "no room", "unknown": "no room"}))
        assert len(directory) == 0
        assert directory.departed() == [] and directory.departed() == [made.segment]
        directory.library.check_integrity()

    def test_forgetting_all_spares_what_is_in_use(self) -> None:
        directory = make()
        (first,) = serve(directory, track("r", reading("a")))
        (other,) = serve(directory, track("s", ids(8, 150)))
        reader = track("b", reading("b", 1), "b")
        plan(directory, reader)
        directory.forget_all()
        directory.departed()
        assert len(directory) == 0 and directory.departed() == [other.segment]
        directory.end(reader, True)
        directory.departed()
        assert directory.departed() == [first.segment]
        directory.library.check_integrity()


class TestPins:
    def test_last_from_the_plan_to_the_end(self) -> None:
        directory = make()
        serve(directory, track("r", reading("a")))
        reader = track("b", reading("b", 1), "b")
        plan(directory, reader)
        assert directory.library.pinned() == 1
        directory.end(reader, False)
        assert directory.library.pinned() == 0

    def test_of_presets_too(self) -> None:
        directory = make()
        (made,) = serve(directory, track("r", reading("a")))
        span = Reuse(1, 20, made.segment, 1, exact=True)
        preset = Planned(Plan(30, (Compute(0, 1), span, Compute(20, 30))), {})
        tracked = track("p", reading("a")[:30])
        assert directory.plan(tracked.prompt, preset) is preset
        assert directory.library.pinned() == 1


class TestLessons:
    def lessons(self, directory: Directory, tracked: Tracked) -> list[tuple[int, int, bool]]:
        work = StepWork()
        directory.teach(tracked, (0, 1), work)
        for lesson in work.lessons:
            assert lesson.source.reader == "b" and lesson.request_id == "b"
            assert lesson.source.offset - lesson.source.start == 20 - 24
            assert not lesson.source.corrected and lesson.block_ids == (0, 1)
        return [(one.source.start, one.source.stop, one.whole) for one in work.lessons]

    def reader(self, exact: bool) -> tuple[Directory, Tracked]:
        directory = make(dial="exact" if exact else "balanced")
        serve(directory, track("r", reading("a")))
        tracked = track("b", reading("b", 1), "b")
        plan(directory, tracked)
        return directory, tracked

    def test_of_an_exact_request_hold_the_whole_run_and_come_once(self) -> None:
        directory, tracked = self.reader(exact=True)
        tracked.progress = None
        assert self.lessons(directory, tracked) == [(24, 144, True)]
        assert self.lessons(directory, tracked) == []

    def test_of_an_approximate_one_hold_the_first_head(self) -> None:
        assert self.lessons(*self.reader(exact=False)) == [(24, 32, False)]

    def test_of_runs_in_the_prefix_cache_were_given_before(self) -> None:
        directory, tracked = self.reader(exact=True)
        tracked.progress, tracked.cached = None, 144
        assert self.lessons(directory, tracked) == []


class TestWaiting:
    def test_is_worth_it_for_text_that_nobody_holds(self) -> None:
        directory = make()
        prompt = track("b", reading("b"), "b").prompt
        assert directory.worth_waiting(prompt, Pending("r", "a", 120))
        serve(directory, track("r", reading("a")))
        assert not directory.worth_waiting(prompt, Pending("r", "a", 120))

    def test_is_not_for_exact_requests_nor_cold_pairs(self) -> None:
        prompt = track("b", reading("b"), "b").prompt
        pending = Pending("r", "a", 120)
        assert not make(dial="exact").worth_waiting(prompt, pending)
        cold = make(cold_tokens=100)
        assert not cold.worth_waiting(prompt, pending)
        cold.mirror.take(Report(facts={(0, PairName("t", "a", "b")): Facts(100, 0)}))
        assert cold.worth_waiting(prompt, pending)

    def test_for_landmarks_of_a_new_donor_is_short(self) -> None:
        directory = make()
        (made,) = serve(directory, track("r", reading("a")))
        prompt = track("b", reading("b"), "b").prompt
        assert not directory.settling(prompt)
        directory.mirror.take(scores("a", "b", "elsewhere", 50))
        assert directory.settling(prompt)
        clock = directory._clock
        assert isinstance(clock, Clock)
        clock.now += 1.0
        assert not directory.settling(prompt)
        clock.now -= 1.0
        directory.mirror.take(scores("a", "b", made.segment, 150))
        assert not directory.settling(prompt)


class TestContiguous:
    def plan(self, directory: Directory, tracked: Tracked, held: int) -> tuple[Plan, list[str]]:
        notes: list[str] = []
        made = directory.plan(tracked.prompt).plan
        return directory.contiguous(made, held, tracked.prompt, notes), notes

    def test_keeps_exact_kv_behind_what_is_in_place(self) -> None:
        directory = make()
        serve(directory, track("r", reading("a")))
        tracked = track("s", [*reading("a")[:100], *ids(9, 30)])
        made, notes = self.plan(directory, tracked, 0)
        assert [(span.start, span.stop) for span in made.reused()] == [(0, 100)] and not notes

    def test_leaves_no_holes(self) -> None:
        directory = make()
        serve(directory, track("r", reading("a")))
        made, notes = self.plan(directory, track("b", reading("b"), "b"), 0)
        assert list(made.reused()) == [] and "one run" in notes[0]

    @pytest.mark.parametrize(("audited", "reused"), [(None, False), (0.1, True), (0.2, False)])
    def test_takes_approximate_kv_of_pairs_that_agree(
        self, audited: float | None, reused: bool
    ) -> None:
        directory = make(audit_limit=1.0)
        serve(directory, track("r", reading("a")))
        facts = Facts(9999, 0, int(audited is not None), audited)
        directory.mirror.take(Report(facts={(0, PairName("t", "a", "b")): facts}))
        made, _ = self.plan(directory, track("b", reading("b", 1), "b"), 24)
        spans = [(span.start, span.stop, span.head) for span in made.reused()]
        assert spans == ([(24, 144, Head())] if reused else [])
