"""Parts of `kvcmas` that a worker calls with KV of its own: lessons, observations, filling."""

from __future__ import annotations

import torch

from kvcmas.core.channels import deviation, to_channels
from kvcmas.core.features import windows_of
from kvcmas.core.segment import SegmentKV
from kvcmas.methods.captures import Capture
from kvcmas.methods.donors import Donor, Run
from kvcmas.methods.kvcmas.chosen import Chosen
from kvcmas.methods.kvcmas.config import KvcmasConfig
from kvcmas.methods.kvcmas.filling import Added, fill_corrected
from kvcmas.methods.kvcmas.lessons import Lesson, kept_of, lessons_of
from kvcmas.methods.kvcmas.observation import observation
from kvcmas.methods.kvcmas.pair import Pair
from kvcmas.methods.move import fill_moved
from kvcmas.methods.tiling import plan_of
from kvcmas.store.info import SegmentInfo
from kvcmas.workflow.plan import Head, Reuse

from .kvcmas_team import KvcmasTeam, document, first_reads, prompt_of, teach

AB = Pair("a", "b")


def chosen(start: int, stop: int, *, exact: bool = True, own: bool = False) -> Chosen:
    donor = Donor("s", 5, SegmentInfo("a", "", 0, "", exact), own)
    return Chosen(Run(start, stop, (donor,)), donor, AB, start)


HEAD = Reuse(60, 160, "s", 5, head=Head(length=16))
LATER = Reuse(170, 300, "s", 5, head=Head(length=16))


class TestLessons:
    CHOSEN = (chosen(60, 160), chosen(170, 300))

    def test_of_an_approximate_request(self) -> None:
        """The head alone; behind it nothing is exact, and later heads are not either."""
        plan = plan_of(320, [HEAD, LATER])
        computed = ((0, 76), (160, 186), (300, 330))
        (lesson,) = lessons_of(plan, self.CHOSEN, computed, False, KvcmasConfig())
        assert lesson == Lesson(self.CHOSEN[0], 76)
        assert (lesson.start, lesson.stop, lesson.whole) == (60, 76, False)

    def test_of_an_exact_request(self) -> None:
        lessons = lessons_of(plan_of(320, []), self.CHOSEN, ((0, 330),), True, KvcmasConfig())
        assert [(one.start, one.stop, one.whole) for one in lessons] == [
            (60, 160, True),
            (170, 300, True),
        ]

    def test_a_run_that_was_computed_after_all(self) -> None:
        computed = ((0, 186), (300, 330))
        lessons = lessons_of(
            plan_of(320, [HEAD, LATER]), self.CHOSEN, computed, False, KvcmasConfig()
        )
        assert [(one.stop, one.whole) for one in lessons] == [(160, True), (186, False)]

    def test_what_teaches_nothing(self) -> None:
        some = (chosen(60, 160, exact=False), chosen(170, 300, own=True))
        plan, computed = plan_of(320, []), ((0, 330),)
        assert lessons_of(plan, some, computed, True, KvcmasConfig()) == []
        off = KvcmasConfig(learn=False)
        assert lessons_of(plan, self.CHOSEN, computed, True, off) == []
        previous = lessons_of(plan, some, computed, True, KvcmasConfig(base="previous"))
        assert [one.start for one in previous] == [60]

    def test_what_is_kept(self) -> None:
        plan, computed = plan_of(320, [HEAD, LATER]), ((0, 76), (160, 186), (300, 340))
        kept = [Capture(0, 76, True), Capture(300, 340, False)]
        assert kept_of(plan, self.CHOSEN, computed, False, KvcmasConfig()) == kept
        previous = KvcmasConfig(base="previous")
        corrected = [Capture(60, 160, False), Capture(170, 300, False)]
        assert kept_of(plan, self.CHOSEN, computed, False, previous) == kept + corrected
        everything = [Capture(0, 340, True)]
        assert kept_of(plan_of(320, []), self.CHOSEN, ((0, 340),), True, previous) == everything


def test_an_observation(device: torch.device) -> None:
    team = KvcmasTeam(device)
    text = document(0)
    kv = {agent: team.dense(prompt_of(agent, text)).kv for agent in "ab"}
    rope = team.library.info.rope
    seen = observation(rope, AB, kv["b"].slice(25, 80), kv["a"], 25, 20, False)
    assert (seen.pair, len(seen), seen.whole, seen.other) == (AB, 55, False, None)
    assert seen.distance.tolist() == list(range(5, 60))
    channels = to_channels(rope, kv["a"])
    torch.testing.assert_close(seen.channels, channels[:, 25:80])
    # The window reaches two tokens to the left of the part, as far as there are any.
    torch.testing.assert_close(seen.window, windows_of(channels[0])[25:80])
    torch.testing.assert_close(
        seen.deviation, deviation(rope, kv["b"].slice(25, 80), kv["a"].slice(25, 80))
    )
    first = observation(rope, AB, kv["b"].slice(20, 40), kv["a"].slice(20, 60), 0, 20, True)
    torch.testing.assert_close(first.window, windows_of(channels[0, 20:40]))
    assert first.whole


def test_filling_by_hand_is_filling_by_the_method(device: torch.device) -> None:
    """Whole or in parts, with features at hand or without."""
    team = KvcmasTeam(device, head=8, landmarks=False)
    teach(team, 8, "b")
    first_reads(team, 50)
    prompt = team.prompt([*prompt_of("b", document(50)), 3, 4], "b")
    span = list(team.kvcmas.plan(prompt).reused())[-1]
    assert span.correction == "a>b"
    dense = team.dense(prompt.token_ids.tolist()).kv.slice(span.start, span.stop).clone()

    def blank(start: int, stop: int) -> SegmentKV:
        part = dense.slice(start, stop).clone()
        part.keys.zero_()
        part.values.zero_()
        return part

    length = len(span)
    whole = blank(0, length)
    team.kvcmas.fill(prompt, span, span.start, span.stop, whole)
    added = team.kvcmas._requests.get(prompt).added[span.start]
    donor, rope = team.library.kv(span.segment), team.library.info.rope
    bare = Added(added.correction, added.basis, added.origin)
    for given in (added, bare):
        for start, stop in ((0, length), (0, 1), (1, 30), (length - 3, length)):
            out = blank(start, stop)
            fill_corrected(rope, donor, span.offset + start, out, given, start)
            expected = whole.slice(start, stop)
            torch.testing.assert_close(out.keys, expected.keys, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(out.values, expected.values, atol=1e-5, rtol=1e-5)
    moved = blank(0, length)
    fill_moved(rope, donor, span.offset, moved)
    assert (moved.values - whole.values).abs().max() > 1e-3
    team.kvcmas.finish(prompt, None)
    assert team.settled()
